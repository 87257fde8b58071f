"""Keys by role: derived ones tell nothing of each other, and wrapped ones open only for whom they were made."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataloaderjob.core import handshake, keys, sockets
from dataloaderjob.core.errors import AuthError
from dataloaderjob.core.keys import Holder

JOB_KEY = bytes(range(32))
SECRETS = st.binary(min_size=keys.NBYTES, max_size=keys.NBYTES)


def test_derived_keys_differ_by_holder_and_job():
    found = [keys.derive(key, holder) for key in (JOB_KEY, b"k" * 32) for holder in Holder]
    assert len({JOB_KEY, *found}) == 2 * len(Holder) + 1
    assert {len(key) for key in found} == {keys.NBYTES}


@given(SECRETS, st.text(max_size=40))
def test_wrapped_key_is_returned_to_a_holder_of_the_same_key(secret: bytes, about: str):
    text = keys.wrap(JOB_KEY, secret, about)
    assert text == keys.wrap(JOB_KEY, secret, about)
    assert secret.hex() not in text
    assert keys.unwrap(JOB_KEY, text, about) == secret


@given(SECRETS, st.integers(0, 8 * 48 - 1))
def test_wrapped_key_with_any_changed_bit_is_refused(secret: bytes, bit: int):
    data = bytearray.fromhex(keys.wrap(JOB_KEY, secret, "i0"))
    data[bit // 8] ^= 1 << bit % 8
    with pytest.raises(AuthError):
        keys.unwrap(JOB_KEY, data.hex(), "i0")


@given(st.text(max_size=120))
def test_text_that_is_no_wrapped_key_is_refused(text: str):
    with pytest.raises(AuthError):
        keys.unwrap(JOB_KEY, text, "i0")


def test_wrapped_key_is_refused_for_another_instance_or_holder():
    text = keys.wrap(JOB_KEY, b"s" * 32, "i0")
    for key, about in ((JOB_KEY, "i1"), (b"k" * 32, "i0")):
        with pytest.raises(AuthError, match=f"the link key of '{about}'"):
            keys.unwrap(key, text, about)


def completes(
    client: keys.Key, server: keys.Key, role: str, newest: int = keys.SINCE, name: str = "n"
) -> bool:
    """True if both sides complete the handshake. `newest`: the version of the server. `name`: of the client."""
    theirs = handshake.Versions(newest - 1, newest, "use others")
    left = handshake.ClientHandshake(client, role=role, name=name, job="j")
    right = handshake.ServerHandshake(server, job="j", versions=theirs)
    try:
        left.receive(right.receive(left.receive(right.greeting)))
    except AuthError:
        return False
    return left.done and right.done


@pytest.mark.parametrize(
    ("holder", "role"), [*itertools.product(Holder, [*keys.HOLDERS, keys.FEEDER_ROLE, "receiver", ""])]
)
def test_derived_key_opens_the_roles_of_its_holder_only(holder: Holder, role: str):
    served = completes(keys.derive(JOB_KEY, holder), keys.of_job(JOB_KEY), role)
    assert served == (keys.HOLDERS.get(role) is holder)


NAMES = (
    "feeder-0",
    "feeder-1",
    "feeder-10",
    "feeder-01",
    "feeder-0 ",
    "feeder-0\n",
    "feeder-\u0660",
    "FEEDER-0",
    "",
    "\ud800",
)


@pytest.mark.parametrize("name", NAMES, ids=ascii)
@pytest.mark.parametrize("newest", [keys.NAMED - 1, keys.NAMED])
def test_key_of_a_feeders_name_opens_its_role_for_that_name_only(name: str, newest: int):
    own = keys.of_feeder(JOB_KEY, "feeder-0")
    served = completes(own, keys.of_job(JOB_KEY), keys.FEEDER_ROLE, newest, name)
    assert served == (name == "feeder-0" and newest == keys.NAMED)


def test_key_of_a_feeders_name_opens_no_other_role():
    own = keys.of_feeder(JOB_KEY, "feeder-0")
    for role in (*keys.HOLDERS, "receiver", ""):
        assert not completes(own, keys.of_job(JOB_KEY), role, keys.NAMED, "feeder-0"), role


@pytest.mark.parametrize("newest", range(keys.SINCE, keys.NAMED))
def test_feeder_of_an_earlier_version_is_refused_with_what_to_do(newest: int):
    theirs = handshake.Versions(newest, newest, "use others")
    left = handshake.ClientHandshake(
        keys.derive(JOB_KEY, Holder.FEEDER), role=keys.FEEDER_ROLE, name="feeder-0", job="j", versions=theirs
    )
    right = handshake.ServerHandshake(keys.of_job(JOB_KEY), job="j")
    with pytest.raises(
        AuthError, match=f"version {newest}, but version {keys.NAMED} or later.*: use images from the same"
    ):
        right.receive(left.receive(right.greeting))


def test_acceptor_without_the_roles_key_is_recognized():
    """Code in a feeder that answers at the supervisor's address learns nothing, and is not believed."""
    of_feeder = keys.derive(JOB_KEY, Holder.FEEDER)
    for holder, role in ((Holder.CONTROL, "control"), (Holder.SIDECAR, "sidecar")):
        client = handshake.ClientHandshake(keys.derive(JOB_KEY, holder), role=role, name="n", job="j")
        challenge = handshake.new_challenge()
        client.receive(sockets.pack_message(challenge))
        forged = handshake.ServerHandshake(of_feeder, job="j")
        with pytest.raises(AuthError, match="does not hold this job's key"):
            client.receive(forged.receive(client.receive(forged.greeting)))


@pytest.mark.parametrize("newest", [keys.SINCE - 1, keys.SINCE])
def test_controllers_reach_supervisors_of_this_release_and_the_one_before(newest: int):
    earlier = JOB_KEY if newest < keys.SINCE else keys.of_job(JOB_KEY)
    assert completes(keys.of_job(JOB_KEY), earlier, "control", newest)
