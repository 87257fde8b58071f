"""Frames, tickets, messages and the handshake: what goes in comes out, anything else is refused."""

import socket
import struct
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st
from welcomes import welcome

from dataloaderjob.core import frames, handshake, ipc, sockets, ticket_codec
from dataloaderjob.core.errors import AuthError, RemoteProtocolError
from dataloaderjob.core.frames import FROM_FEEDER, FROM_RECEIVER, FrameKind

U32 = st.integers(0, 2**32 - 1)
U64 = st.integers(0, 2**64 - 1)


KEY = st.integers(min_value=-(2**63) - 1, max_value=2**63)
INTS = st.tuples(
    st.integers(min_value=0, max_value=2**64 - 1), st.integers(min_value=0, max_value=2**64 - 1),
    st.lists(KEY, max_size=3), st.booleans(),
)  # fmt: skip


@given(st.lists(st.tuples(st.integers(0, 2**64 - 1), INTS | st.binary(max_size=9)), min_size=1, max_size=5))
def test_batch_packed_tickets_equal_individually_packed_ones(entries):
    found = ticket_codec.join_tickets_of_ints(
        [number for number, _ in entries], [entry for _, entry in entries]
    )
    if any(isinstance(entry, bytes) for _, entry in entries):
        assert found is None
        return
    packed = [(number, ticket_codec.pack_ticket_of_ints(*entry)) for number, entry in entries]
    one_size = len({len(entry[2]) for _, entry in entries}) == 1
    in_range = all(-(2**63) <= key < 2**63 for _, entry in entries for key in entry[2])
    assert found == (ticket_codec.join_tickets(packed) if one_size and in_range else None)


@given(
    kind=st.sampled_from(sorted(FROM_FEEDER)), stream=U32, ticket=U64,
    bundle=st.binary(min_size=16, max_size=16),
    share=st.floats(0, 1), room=st.integers(0, frames.MAX_BODY_NBYTES),
    flags=st.integers(0, 3), load=st.integers(0, 2**20),
)  # fmt: skip
def test_header_round_trips(kind, share, **fields):
    fields["nbytes"] = int(share * frames._LIMIT_OF[kind])
    header = frames.unpack_header(frames.pack_header(kind, **fields), FROM_FEEDER)
    assert header.kind == kind
    assert header.load == min(fields.pop("load"), 0xFFFF)
    assert all(getattr(header, name) == value for name, value in fields.items())


@given(st.binary(min_size=64, max_size=64))
def test_random_bytes_are_refused_as_a_header(data):
    with pytest.raises(RemoteProtocolError):
        frames.unpack_header(data, FROM_FEEDER)


@given(bit=st.integers(0, 64 * 8 - 1))
def test_any_flipped_bit_is_noticed(bit):
    data = bytearray(frames.pack_header(FrameKind.ANNOUNCE, stream=2, ticket=3, room=1000))
    data[bit // 8] ^= 1 << bit % 8
    with pytest.raises(RemoteProtocolError):
        frames.unpack_header(data, FROM_FEEDER)


@pytest.mark.parametrize("nbytes", [frames.MAX_CONTROL_NBYTES + 1, 2**63, 2**64 - 1])
def test_excessive_length_is_refused_before_allocation(nbytes):
    with pytest.raises(RemoteProtocolError, match="exceeds"):
        frames.unpack_header(frames.pack_header(FrameKind.FAILED, nbytes=nbytes), FROM_FEEDER)


def test_frame_kind_of_the_other_side_is_refused():
    with pytest.raises(RemoteProtocolError, match="not allowed"):
        frames.unpack_header(frames.pack_header(FrameKind.TICKET), FROM_FEEDER)
    assert not FROM_FEEDER & FROM_RECEIVER


@given(seed=U64, first=U64, keys=st.lists(st.integers(-(2**63), 2**63 - 1), max_size=50), bare=st.booleans())
def test_integer_ticket_round_trips(seed, first, keys, bare):
    data = ticket_codec.pack_ticket(seed, first, keys, bare=bare)
    assert len(data) == ticket_codec.TICKET_HEAD_NBYTES + 8 * len(keys)
    assert ticket_codec.unpack_ticket(data) == (seed, first, bare, keys, 0)


@given(
    st.lists(
        st.one_of(st.integers(), st.text(), st.tuples(st.integers(), st.text()), st.booleans()), max_size=20
    )
)
def test_ticket_of_any_keys_round_trips_with_their_types(keys):
    found = ticket_codec.unpack_ticket(ticket_codec.pack_ticket(1, 2, keys)).keys
    assert found == keys
    assert list(map(type, found)) == list(map(type, keys))


@given(st.binary(max_size=100))
def test_random_bytes_are_refused_or_round_trip_as_a_ticket(data):
    if len(data) > 17 and data[17] in (ticket_codec.KeyForm.PICKLED, ticket_codec.KeyForm.ITEMS):
        return  # authenticated peers only; nothing to prove about pickle
    try:
        found = ticket_codec.unpack_ticket(data)
    except RemoteProtocolError:
        return
    assert (
        ticket_codec.pack_ticket(found.base_seed, found.first_position, found.keys, bare=found.bare)[24:]
        == data[24:]
    )


@given(st.lists(st.tuples(U64, st.binary(max_size=40)), max_size=20))
def test_several_tickets_travel_as_one_message(entries):
    assert ticket_codec.split_tickets(ticket_codec.join_tickets(entries)) == entries


@given(st.lists(st.tuples(U64, st.binary(max_size=40)), min_size=1, max_size=5), st.integers(1, 60))
def test_truncated_ticket_message_is_refused_or_shorter(entries, cut):
    data = ticket_codec.join_tickets(entries)
    try:
        found = ticket_codec.split_tickets(data[:-cut])
    except RemoteProtocolError:
        return
    assert len(found) < len(entries)


def test_a_ticket_is_described_by_its_indices():
    data = ticket_codec.pack_ticket(0, 0, [5, 6, 7])
    assert ticket_codec.describe_keys(data) == "indices [5, 6, 7]"
    assert ticket_codec.describe_keys(data, 1) == "index 6"
    assert "40 in all" in ticket_codec.describe_keys(ticket_codec.pack_ticket(0, 0, list(range(40))))
    assert ticket_codec.describe_keys(ticket_codec.pack_ticket(0, 0, ["a", "b"]), 1) == "key number 1 of 2"


@pytest.mark.parametrize("nbytes", [0, 1, ipc.CHUNK_NBYTES, ipc.CHUNK_NBYTES + 1, 5 * ipc.CHUNK_NBYTES + 7])
def test_message_of_any_size_is_reassembled(nbytes):
    payload = bytes(i % 251 for i in range(nbytes))
    assembler = ipc.Assembler()
    packets = ipc.pack(ipc.Type.TICKETS, payload, stream=3, ticket=4, awaiting=5)
    found = [assembler.feed(packet) for packet in packets]
    assert found[:-1] == [None] * (len(packets) - 1)
    assert (found[-1].payload, found[-1].stream, found[-1].ticket, found[-1].awaiting) == (payload, 3, 4, 5)


def test_a_message_that_never_ends_is_refused():
    assembler = ipc.Assembler(limit_nbytes=1000)
    packet = ipc.HEAD.pack(ipc.Type.TICKETS, 1, frames.PROTOCOL, 0, 0, 0) + bytes(600)
    assert assembler.feed(packet) is None
    with pytest.raises(RemoteProtocolError, match="exceeds 1000"):
        assembler.feed(packet)


def test_limit_of_a_message_is_not_a_limit_of_the_connection():
    assembler = ipc.Assembler(limit_nbytes=1000)
    heads = [ipc.HEAD.pack(ipc.Type.TICKETS, more, frames.PROTOCOL, 0, 0, 0) for more in (1, 0)]
    for _ in range(5):
        assert assembler.feed(heads[0] + bytes(400)) is None
        assert assembler.feed(heads[1] + bytes(400)).payload == bytes(800)
        assert assembler.nbytes == 0


@given(st.binary(max_size=200))
def test_random_packets_never_break_the_assembler(data):
    try:
        ipc.Assembler().feed(data)
    except RemoteProtocolError:
        assert len(data) < ipc.HEAD_NBYTES


def meet(key_a: bytes, key_b: bytes, job_a="j", job_b="j", tamper=None):
    """Both sides of a handshake over a socket pair; returns (what the acceptor saw, the connector's error)."""
    a, b = map(sockets.Connection.of, socket.socketpair())
    result, errors = {}, []

    def connector():
        try:
            result["facts"] = handshake.greet(a, key_a, role="receiver", name="r", job=job_a, facts={"x": 1})
        except Exception as exc:
            errors.append(exc)
        finally:
            a.close()

    thread = threading.Thread(target=connector)
    thread.start()
    try:
        seen = welcome(b, key_b, job=job_b, facts={"y": 2})
    except Exception as exc:
        seen = exc
    finally:
        thread.join()
        b.close()
    return seen, result, errors


def test_two_holders_of_the_key_learn_each_others_facts():
    key = handshake.new_key()
    seen, result, errors = meet(key, key)
    assert (seen["role"], seen["name"], seen["facts"]) == ("receiver", "r", {"x": 1})
    assert result["facts"] == {"y": 2}
    assert not errors


def test_wrong_key_is_refused_and_both_sides_learn_why():
    seen, _, errors = meet(handshake.new_key(), handshake.new_key())
    assert isinstance(seen, AuthError)
    assert "does not hold this job's key" in str(errors[0])


def test_other_job_with_the_same_key_is_refused():
    key = handshake.new_key()
    seen, _, errors = meet(key, key, job_a="mine", job_b="yours")
    assert isinstance(seen, AuthError)
    assert "'yours'" in str(errors[0])
    assert "'mine'" in str(errors[0])


def test_other_protocol_version_is_refused_with_the_remedy():
    with pytest.raises(AuthError, match="same dataloaderjob version"):
        handshake.answer_challenge(
            b"k" * 32,
            {"nonce": "00", "protocol": 99},
            role="r",
            name="n",
            job="j",
            facts={},
            versions=handshake.DATA,
        )


@pytest.mark.parametrize("field", ["nonce", "role", "name", "job", "facts"])
def test_field_changed_in_transit_is_noticed(field):
    key = handshake.new_key()
    challenge = handshake.new_challenge()
    reply = handshake.answer_challenge(key, challenge, role="receiver", name="n", job="j", facts={})
    reply[field] = "other"
    with pytest.raises(AuthError):
        handshake.accept_answer(key, challenge, reply, job="j", facts={})


def test_answer_is_not_valid_for_another_challenge():
    key = handshake.new_key()
    reply = handshake.answer_challenge(
        key, handshake.new_challenge(), role="receiver", name="n", job="j", facts={}
    )
    with pytest.raises(AuthError):
        handshake.accept_answer(key, handshake.new_challenge(), reply, job="j", facts={})


def test_an_unauthenticated_peer_cannot_make_us_hold_more_than_a_greeting():
    a, b = map(sockets.Connection.of, socket.socketpair())
    a.sendall(struct.pack("<I", handshake.MAX_HELLO_NBYTES + 1))
    with pytest.raises(RemoteProtocolError, match="exceeds"):
        welcome(b, b"k" * 32, job="j")
    a.close()
    b.close()
