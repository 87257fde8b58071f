"""The handshake as bytes: both sides get there however the bytes are cut, and neither reads beyond it."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataloaderjob.core import sockets
from dataloaderjob.core.errors import AuthError, RemoteProtocolError

KEY = b"k" * sockets.KEY_NBYTES


def sides(key: bytes = KEY) -> tuple[sockets.ClientHandshake, sockets.ServerHandshake]:
    client = sockets.ClientHandshake(KEY, role="receiver", name="r", job="j", facts={"x": 1})
    return client, sockets.ServerHandshake(key, job="j", facts={"y": 2})


def in_pieces(side: sockets.Handshake, data: bytes, cuts: list[int]) -> bytes:
    """What `side` sends in answer to `data`, which comes cut at these places."""
    places = sorted({cut % (len(data) + 1) for cut in cuts} | {0, len(data)})
    return b"".join(side.receive(data[a:b]) for a, b in itertools.pairwise(places))


@given(st.lists(st.integers(0, 4000), max_size=8), st.binary(max_size=40))
def test_both_sides_learn_of_each_other_however_the_bytes_are_cut(cuts, behind):
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


def test_who_reads_no_more_than_is_wanted_leaves_nothing_behind():
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
def test_bytes_of_a_stranger_never_complete_a_handshake(data):
    for side in sides():
        try:
            side.receive(data)
        except (AuthError, RemoteProtocolError):
            continue
        assert not side.done


def test_a_peer_with_another_key_is_refused_by_both():
    client, server = sides(b"o" * sockets.KEY_NBYTES)
    hello = client.receive(server.greeting)
    with pytest.raises(AuthError, match="does not hold this job's key"):
        server.receive(hello)
    with pytest.raises(AuthError, match="the peer refused: no"):
        client.receive(sockets.pack_message({"error": "no"}))


def test_a_length_beyond_the_limit_is_refused_before_the_bytes_come():
    client, _ = sides()
    with pytest.raises(RemoteProtocolError, match="exceeds 4096"):
        client.receive(sockets.LENGTH.pack(sockets.MAX_HELLO_NBYTES + 1))
