"""Seals: what was sealed is opened in its order and on its connection, and nothing else ever is."""

from __future__ import annotations

import itertools
import socket
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st
from welcomes import welcome

from dataloaderjob.core import keys, sockets
from dataloaderjob.core.errors import AuthError, RemoteProtocolError
from dataloaderjob.core.handshake import (
    CONTROL,
    SEALED,
    ClientHandshake,
    ServerHandshake,
    Versions,
    accept_answer,
    answer_challenge,
    confirm_acceptance,
    greet,
    new_challenge,
)
from dataloaderjob.core.seals import MAC_NBYTES, SEAL_NBYTES, BrokenSeal, Opener, Sealer, Seals

KEY = b"k" * 32
PARTS = st.lists(
    st.tuples(st.binary(min_size=1, max_size=80), st.binary(max_size=80)), min_size=1, max_size=6
)
Part = tuple[bytes, bytes]


def opened(opener: Opener, sealed: bytes, head_nbytes: int) -> Part:
    """The head and payload of one frame."""
    at = head_nbytes + SEAL_NBYTES
    opener.open_head(sealed[:at])
    payload, mac = sealed[at:-MAC_NBYTES], sealed[-MAC_NBYTES:]
    if at == len(sealed):
        return sealed[:head_nbytes], b""
    opener.open_payload(payload, mac)
    return sealed[:head_nbytes], payload


def sealed_parts(parts: list[Part], key: bytes = KEY) -> list[bytes]:
    sealer = Sealer(key)
    return [sealer.seal(*part) for part in parts]


@given(PARTS)
def test_sealed_frames_are_opened_in_their_order(parts: list[Part]):
    opener = Opener(KEY)
    for part, sealed in zip(parts, sealed_parts(parts), strict=True):
        assert opened(opener, sealed, len(part[0])) == part


@given(PARTS, st.integers(0, 1 << 20), st.integers(0, 7))
def test_frame_with_any_changed_bit_is_refused(parts: list[Part], place: int, bit: int):
    sealed = [bytearray(frame) for frame in sealed_parts(parts)]
    number = place % len(sealed)
    sealed[number][place % len(sealed[number])] ^= 1 << bit
    opener = Opener(KEY)
    for frame, (head, _) in zip(sealed[:number], parts, strict=False):
        opened(opener, bytes(frame), len(head))
    with pytest.raises(BrokenSeal, match="in transit"):
        opened(opener, bytes(sealed[number]), len(parts[number][0]))


@given(PARTS, st.data())
def test_frames_in_any_other_order_are_refused_at_the_first_difference(
    parts: list[Part], data: st.DataObject
):
    sent = list(range(len(parts)))
    came = data.draw(st.lists(st.sampled_from(sent), max_size=8))
    same = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(sent, came, strict=False)))
    sealed, opener = sealed_parts(parts), Opener(KEY)
    for at, number in enumerate(came):
        if at < same:
            assert opened(opener, sealed[number], len(parts[number][0])) == parts[number]
            continue
        with pytest.raises(BrokenSeal):
            opened(opener, sealed[number], len(parts[number][0]))
        break


@given(PARTS)
def test_frame_of_another_connection_is_refused(parts: list[Part]):
    with pytest.raises(BrokenSeal, match="was altered in transit, or was sent on another connection"):
        opened(Opener(KEY), sealed_parts(parts, b"o" * 32)[0], len(parts[0][0]))


@pytest.mark.parametrize(
    ("came", "text"),
    [
        ([0, 2], "frames were dropped or reordered in transit: frame 2 arrived when frame 1 was due"),
        ([0, 1, 1], "frame 1 was replayed in transit: it arrived when frame 2 was due"),
        ([1], "frames were dropped or reordered in transit: frame 1 arrived when frame 0 was due"),
    ],
)
def test_refusal_says_what_happened_to_the_frames(came: list[int], text: str):
    sealed, opener = sealed_parts([(b"head", b"payload")] * 3), Opener(KEY)
    *fine, last = came
    for number in fine:
        opened(opener, sealed[number], 4)
    with pytest.raises(BrokenSeal, match=text):
        opened(opener, sealed[last], 4)


def test_changed_length_is_refused_before_its_bytes_are_awaited():
    seals = Seals(Sealer(KEY), Opener(KEY))
    inbox, data = sockets.Inbox(seals), bytearray(sockets.pack_message({"a": 1}, seals))
    data[2] ^= 1
    inbox.feed(bytes(data))
    with pytest.raises(BrokenSeal, match="frame 0 was altered in transit"):
        inbox.take()


@given(
    st.lists(st.dictionaries(st.text(max_size=5), st.integers()), max_size=5), st.lists(st.integers(0, 400))
)
def test_sealed_messages_arrive_for_any_split_of_the_bytes(messages: list[dict[str, int]], cuts: list[int]):
    sent, received = Seals(Sealer(KEY), Opener(KEY)), Seals(Sealer(KEY), Opener(KEY))
    data = b"".join(sockets.pack_message(message, sent) for message in messages)
    inbox, found = sockets.Inbox(received), []
    for start, end in itertools.pairwise(sorted({0, len(data), *(cut % (len(data) + 1) for cut in cuts)})):
        inbox.feed(data[start:end])
        while (message := inbox.take()) is not None:
            found.append(message)
    assert found == messages


# The handshake


def sides(
    client: Versions = CONTROL, server: Versions = CONTROL, *, key: bytes = KEY
) -> tuple[ClientHandshake, ServerHandshake]:  # fmt: skip
    """Both sides of a handshake that succeeded."""
    left = ClientHandshake(key, role="control", name="n", job="j", versions=client)
    right = ServerHandshake(key, job="j", versions=server)
    left.receive(right.receive(left.receive(right.greeting)))
    return left, right


def test_each_direction_of_each_connection_has_its_own_seals():
    (left, right), (_, other) = sides(), sides()
    assert left.seals is not None
    assert right.seals is not None
    assert other.seals is not None
    said, back = left.seals.out.seal(b"head", b"payload"), right.seals.out.seal(b"back")
    assert opened(right.seals.into, said, 4) == (b"head", b"payload")
    assert opened(left.seals.into, back, 4) == (b"back", b"")
    for stranger in (left.seals, other.seals):
        with pytest.raises(BrokenSeal):
            opened(stranger.into, said, 4)


def window(newest: int) -> Versions:
    return Versions(newest - 1, newest, "use others")


@pytest.mark.parametrize(("client", "server"), [(SEALED, SEALED - 1), (SEALED - 1, SEALED)])
def test_peer_of_the_version_before_is_served_without_seals(client: int, server: int):
    left, right = sides(window(client), window(server))
    assert (left.done, right.done) == (True, True)
    assert (left.seals, right.seals) == (None, None)


def test_peers_of_the_next_version_have_seals_too():
    left, right = sides(window(SEALED + 2), window(SEALED + 1))
    assert None not in (left.seals, right.seals)


NEWEST = CONTROL.newest
EARLIER = {"protocol": SEALED - 1, "oldest": SEALED - 2}


def handshake(**changes: dict[str, object]) -> None:
    """A handshake on which somebody on the path changes messages. Raises AuthError."""
    of_client, of_server = CONTROL, CONTROL
    fields = {"role": "control", "name": "n", "job": "j", "facts": {"x": 1}}
    said = new_challenge(of_server)
    heard = {**said, **changes.get("challenge", {})}
    if heard["nonce"] == "":
        heard["nonce"] = said["nonce"].partition("-")[0]
    answer = answer_challenge(KEY, heard, **fields, versions=of_client)  # type: ignore[arg-type]
    came = {**answer, **changes.get("answer", {})}
    last = accept_answer(KEY, said, came, job="j", facts={"y": 2}, versions=of_server)
    confirm_acceptance(KEY, heard, answer, {**last, **changes.get("last", {})}, of_client)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"challenge": EARLIER}, f"speaks protocol version {NEWEST}, which was altered to 4 in transit"),
        (
            {"challenge": {"protocol": NEWEST + 1}},
            f"speaks protocol version {NEWEST}, which was altered to {NEWEST + 1} in transit",
        ),
        ({"challenge": {**EARLIER, "nonce": ""}}, "or its answer was altered in transit"),
        ({"challenge": {"nonce": ""}}, "or its answer was altered in transit"),
        ({"challenge": {"oldest": 1}}, "or its answer was altered in transit"),
        ({"answer": {"protocol": SEALED - 1}}, "or its answer was altered in transit"),
        ({"answer": {"role": "sidecar"}}, "for role 'sidecar', or its answer was altered in transit"),
        ({"answer": {"name": "m"}}, "or its answer was altered in transit"),
        ({"answer": {"facts": {}}}, "or its answer was altered in transit"),
        ({"last": {"facts": {}}}, "or its message was altered in transit"),
    ],
)
def test_version_role_or_fact_altered_in_a_handshake_ends_it(
    changes: dict[str, dict[str, object]], text: str
):
    handshake()
    with pytest.raises(AuthError, match=text):
        handshake(**changes)


def test_version_altered_between_versions_with_seals_ends_a_handshake():
    later = window(SEALED + 1)
    said = new_challenge(later)
    heard = {**said, "nonce": said["nonce"].partition("-")[0], "protocol": SEALED, "oldest": 4}
    answer = answer_challenge(KEY, heard, role="r", name="n", job="j", facts={}, versions=later)
    with pytest.raises(AuthError, match="or its answer was altered in transit"):
        accept_answer(KEY, said, answer, job="j", facts={}, versions=later)


def test_messages_over_a_unix_socket_have_no_seals():
    ours, theirs = map(sockets.Connection.of, socket.socketpair())
    thread = threading.Thread(target=welcome, args=(theirs, keys.of_job(KEY)), kwargs={"job": "j"})
    thread.start()
    with ours, theirs:
        greet(ours, keys.of_job(KEY), role="control", name="n", job="j")
        thread.join()
        sockets.send_message(ours, {"a": 1})
        assert (ours.seals, theirs.seals) == (None, None)
        assert theirs.recv(100) == sockets.pack_message({"a": 1})


def test_message_beyond_the_limit_is_refused_with_seals_too():
    seals = Seals(Sealer(KEY), Opener(KEY))
    head = seals.out.seal(sockets.LENGTH.pack(101))
    with pytest.raises(RemoteProtocolError, match="a message of 101 bytes exceeds 100"):
        sockets.open_head(head, 100, seals)
