"""The handshake as bytes: both sides get there however the bytes are cut, and neither reads beyond it."""

from __future__ import annotations

import itertools
import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataloaderjob.core import handshake, sockets
from dataloaderjob.core.errors import AuthError, RemoteProtocolError

KEY = b"k" * handshake.KEY_NBYTES


def sides(key: bytes = KEY) -> tuple[handshake.ClientHandshake, handshake.ServerHandshake]:
    client = handshake.ClientHandshake(KEY, role="receiver", name="r", job="j", facts={"x": 1})
    return client, handshake.ServerHandshake(key, job="j", facts={"y": 2})


def in_pieces(side: handshake.Handshake, data: bytes, cuts: list[int]) -> bytes:
    """What `side` sends in answer to `data`, which comes cut at these places."""
    places = sorted({cut % (len(data) + 1) for cut in cuts} | {0, len(data)})
    return b"".join(side.receive(data[a:b]) for a, b in itertools.pairwise(places))


@given(st.lists(st.integers(0, 4000), max_size=8), st.binary(max_size=40))
def test_handshake_completes_for_any_split_of_the_bytes(cuts, behind):
    client, server = sides()
    hello = in_pieces(client, server.greeting, cuts)
    last = in_pieces(server, hello, cuts)
    assert in_pieces(client, last + behind, cuts) == b""
    assert client.done
    assert server.done
    assert client.facts == {"y": 2}
    assert server.peer is not None
    assert (server.peer["role"], server.peer["facts"]) == ("receiver", {"x": 1})
    assert (client.rest, server.rest) == (behind, b"")


def test_messages_of_any_size_are_not_taken_for_tls():
    """A message of 790 bytes begins with the first two bytes of a TLS record."""
    sizes = set()
    for nbytes in range(700):
        server = handshake.ServerHandshake(KEY, job="j")
        client = handshake.ClientHandshake(KEY, role="receiver", name="r", job="j", facts={"x": "a" * nbytes})
        hello = client.receive(server.greeting)
        sizes.add(len(hello) - sockets.LENGTH.size)
        client.receive(server.receive(hello))
        assert client.done
    assert 790 in sizes


@pytest.mark.parametrize("version", [1, 3])
def test_peer_under_tls_is_told_apart_by_its_first_bytes(version: int):
    for side in sides():
        with pytest.raises(AuthError, match="the peer uses TLS, but this process does not"):
            side.receive(bytes([0x16, 3, version, 0]))


def test_reading_only_the_wanted_bytes_leaves_none_over():
    client, server = sides()
    incoming = {client: server.greeting, server: b""}
    other = {client: server, server: client}
    while not (client.done and server.done):
        for side in (client, server):
            take = min(side.wanted, len(incoming[side]))
            data, incoming[side] = incoming[side][:take], incoming[side][take:]
            incoming[other[side]] += side.receive(data)
    assert (client.rest, server.rest) == (b"", b"")


@given(st.binary(max_size=200))
def test_random_bytes_never_complete_a_handshake(data):
    for side in sides():
        try:
            side.receive(data)
        except (AuthError, RemoteProtocolError):
            continue
        assert not side.done


def test_peer_with_another_key_is_refused_by_both_sides():
    client, server = sides(b"o" * handshake.KEY_NBYTES)
    hello = client.receive(server.greeting)
    with pytest.raises(AuthError, match="does not hold this job's key"):
        server.receive(hello)
    with pytest.raises(AuthError, match="the peer refused: no"):
        client.receive(sockets.pack_message({"error": "no"}))


def test_length_beyond_the_limit_is_refused_before_the_bytes_arrive():
    client, _ = sides()
    with pytest.raises(RemoteProtocolError, match="exceeds 4096"):
        client.receive(sockets.LENGTH.pack(handshake.MAX_HELLO_NBYTES + 1))


def speak(client: handshake.Versions, server: handshake.Versions) -> int:
    """The version that two peers settle on. Raises AuthError."""
    left = handshake.ClientHandshake(KEY, role="control", name="operator", job="j", versions=client)
    right = handshake.ServerHandshake(KEY, job="j", versions=server)
    left.receive(right.receive(left.receive(right.greeting)))
    assert left.done
    assert right.peer is not None
    return int(right.peer["protocol"])


def window(newest: int) -> handshake.Versions:
    return handshake.Versions(newest - 1, newest, "use others")


@pytest.mark.parametrize(("client", "server", "spoken"), [(4, 4, 4), (5, 4, 4), (4, 5, 4), (6, 5, 5)])
def test_peers_of_neighbouring_versions_use_the_newest_common_one(client: int, server: int, spoken: int):
    assert speak(window(client), window(server)) == spoken


@pytest.mark.parametrize(("client", "server"), [(7, 5), (5, 7)])
def test_peers_of_distant_versions_refuse_each_other_with_the_reason(client: int, server: int):
    needed = f"must speak protocol version {client - 1} to {client}, but speaks {server - 1} to {server}: use others"
    with pytest.raises(AuthError, match=needed):
        speak(window(client), window(server))


def test_peer_without_a_version_window_speaks_one_version_only():
    challenge = {"nonce": "00", "protocol": 4}
    fields = {"role": "control", "name": "n", "job": "j", "facts": {}}
    assert handshake.answer_challenge(KEY, challenge, **fields, versions=window(5))["protocol"] == 4
    with pytest.raises(AuthError, match="version 5 to 6, but speaks 4"):
        handshake.answer_challenge(KEY, challenge, **fields, versions=window(6))


@pytest.mark.parametrize("protocol", [3, 6, "5", None, 5.0, True])
def test_peer_that_chooses_a_version_not_offered_is_refused(protocol: object):
    challenge = handshake.new_challenge(window(5))
    reply = handshake.answer_challenge(
        KEY, challenge, role="r", name="n", job="j", facts={}, versions=window(5)
    )
    with pytest.raises(AuthError, match="must speak protocol version 4 to 5, but speaks"):
        handshake.accept_answer(
            KEY, challenge, {**reply, "protocol": protocol}, job="j", facts={}, versions=window(5)
        )


@pytest.mark.parametrize("field", ["nonce", "role", "name", "job", "facts"])
def test_answer_with_a_field_changed_on_its_way_is_refused(field: str):
    challenge = handshake.new_challenge()
    reply = handshake.answer_challenge(KEY, challenge, role="r", name="n", job="j", facts={"x": 1})
    handshake.accept_answer(KEY, challenge, reply, job="j", facts={})
    with pytest.raises(AuthError, match="does not hold this job's key"):
        handshake.accept_answer(KEY, challenge, {**reply, field: "other"}, job="j", facts={})


def test_acceptors_facts_changed_on_their_way_are_refused():
    challenge = handshake.new_challenge()
    reply = handshake.answer_challenge(KEY, challenge, role="r", name="n", job="j", facts={})
    last = handshake.accept_answer(KEY, challenge, reply, job="j", facts={"y": 2})
    assert handshake.confirm_acceptance(KEY, challenge, reply, last) == {"y": 2}
    with pytest.raises(AuthError, match="does not hold this job's key"):
        handshake.confirm_acceptance(KEY, challenge, reply, {**last, "facts": {"y": 3}})


def test_a_connection_keeps_the_congestion_control_of_its_host():
    with socket.socket() as sock:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"reno")  # every Linux has it
        sockets.tune(sock)
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(b"\0") == b"reno"


def test_control_protocol_version_is_independent_of_the_data_protocols():
    with pytest.raises(AuthError, match="same dataloaderjob version"):
        handshake.DATA.common({"protocol": handshake.DATA.newest + 1, "oldest": handshake.DATA.newest + 1})
    assert handshake.CONTROL.common(
        {"protocol": handshake.CONTROL.newest + 1, "oldest": handshake.CONTROL.newest}
    )


HERE, THERE = (
    "a Unix socket in network namespace 1 of machine a",
    "a Unix socket in network namespace 1 of machine b",
)
TRANSPORTS = {"tcp": sockets.TCP, "tls": sockets.TLS, "here": HERE, "there": THERE}


def exchange(client: handshake.ClientHandshake, server: handshake.ServerHandshake) -> None:
    client.receive(server.receive(client.receive(server.greeting)))


@pytest.mark.parametrize("versions", [handshake.CONTROL, handshake.DATA], ids=["control", "data"])
@pytest.mark.parametrize("left", TRANSPORTS.values(), ids=TRANSPORTS)
@pytest.mark.parametrize("right", TRANSPORTS.values(), ids=TRANSPORTS)
def test_relay_between_transports_is_refused_by_both_sides(left: str, right: str, versions):
    about = {"role": "r", "name": "n", "job": "j"}
    client = handshake.ClientHandshake(KEY, **about, versions=versions, transport=left)
    server = handshake.ServerHandshake(KEY, job="j", versions=versions, transport=right)
    if left == right:
        exchange(client, server)
        assert client.done
        assert server.done
        return
    with pytest.raises(AuthError, match=f"this side uses {right} and the peer uses {left}: something relays"):
        exchange(client, server)
    assert not server.done
    client = handshake.ClientHandshake(KEY, **about, versions=versions, transport=left)
    challenge = handshake.new_challenge(versions)
    reply = sockets.take_message(bytearray(client.receive(sockets.pack_message(challenge))), 4096)
    assert reply is not None
    facts = {handshake.TRANSPORT: right}
    last = handshake.accept_answer(KEY, challenge, reply, job="j", facts=facts, versions=versions)
    with pytest.raises(AuthError, match=f"this side uses {left} and the peer uses {right}: something relays"):
        client.receive(sockets.pack_message(last))
    assert not client.done


@pytest.mark.parametrize(
    ("version", "facts", "refused"),
    [
        (handshake.BOUND - 1, {}, False),
        (handshake.BOUND, {}, True),
        (handshake.BOUND, {handshake.TRANSPORT: sockets.TCP}, False),
        (handshake.BOUND - 1, {handshake.TRANSPORT: sockets.TLS}, True),
    ],
    ids=["earlier", "unstated", "same", "earlier-and-another"],
)
def test_only_peers_of_earlier_versions_may_omit_their_transport(version: int, facts, refused: bool):
    """A relay cannot make a newer peer omit it: the MACs of all versions cover facts."""
    theirs = handshake.Versions(version, version, "use others")
    server = handshake.ServerHandshake(KEY, job="j")
    challenge = sockets.take_message(bytearray(server.greeting), 4096)
    assert challenge is not None
    reply = handshake.answer_challenge(
        KEY, challenge, role="r", name="n", job="j", facts=facts, versions=theirs
    )
    if refused:
        with pytest.raises(AuthError, match="something relays the connection"):
            server.receive(sockets.pack_message(reply))
    else:
        server.receive(sockets.pack_message(reply))
    assert server.done is not refused


def test_ends_of_a_unix_socket_name_their_machine_and_namespace(tmp_path, monkeypatch: pytest.MonkeyPatch):
    left, right = socket.socketpair()
    with left, right, socket.socket() as tcp:
        here = sockets.transport_of(left)
        assert here == sockets.transport_of(right)
        assert sockets.transport_of(tcp) == sockets.TCP
        (tmp_path / "boot").write_text("another\n")
        for name, other in (("_BOOT_ID", "boot"), ("_NAMESPACE", "boot")):
            with monkeypatch.context() as changed:
                changed.setattr(sockets, name, str(tmp_path / other))
                assert sockets.transport_of(left) not in {here, sockets.TCP}
        monkeypatch.setattr(sockets, "_BOOT_ID", str(tmp_path / "none"))
        assert sockets.transport_of(left) != sockets.transport_of(left), "an unknown namespace is nobody's"
