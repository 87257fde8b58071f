"""The tickets that TICKET frames carry: all that a feeder needs to make one batch. Pure: no sockets.

The payload of a ticket contains the seed, position and keys of one batch. The trainer packs it, and the receiver
forwards it unread. Only two kinds of process decode it: feeders, and processes that report a late batch.

    u64 base_seed, u64 first_position, u8 bare, u8 key_form, u16 draws, u32 count, then the keys

`draws` is the number of earlier iterators that used the RNGs held by the dataset, or 0 if it holds none.
`bare` is 1 if torch's fetcher receives a single key (`batch_size=None`), and 0 if it receives a list of keys.
`key_form` is the form of the keys. Pickles are allowed only from trainer to feeder.

    INTS     `count` int64 values
    PICKLED  one pickle of the batch sampler's output: a list with keys of any other type, a tuple, or an array
    ITEMS    one pickle of an array; the keys are a list of the array's items
    READ     u32 slot, then the samples that the slot read (`ReadSamples`) in place of keys
    SLOT     see below

A batch of an IterableDataset has no keys. Its ticket (key form SLOT) names the slot, which corresponds to one of
torch's workers. In place of the first position, it contains the batch's number in that slot. `count` is the number of
samples in a batch. These fields follow:

    u32 slot, u8 (1: drop_last, 2: asks), u64 needed: the first batch of the slot that may still be requested again
    u64 known, u64 digest: the digest of batch `known` - 1, if it was received and must be rebuilt identically; else 0

If the slot is to resume from a snapshot, u64 made and the snapshot follow. The snapshot was taken after `made` batches.
Only processes that run user code look into it.
"""

from __future__ import annotations

import pickle
import struct
from collections.abc import Callable, Sequence
from enum import IntEnum
from functools import lru_cache
from typing import Any, NamedTuple

from dataloaderjob.core.errors import RemoteProtocolError
from dataloaderjob.core.frames import MAX_SNAPSHOT_NBYTES

_TICKET_HEAD = struct.Struct("<QQBBHI")
TICKET_HEAD_NBYTES = _TICKET_HEAD.size
_KEY_FORM_AT = 17
_DRAWS_AT, _DRAWS = 18, struct.Struct("<H")
MAX_DRAWS = 0xFFFF
_SLOT = struct.Struct("<IBQQQ")
_KNOWN = struct.Struct("<QQ")
_MADE = struct.Struct("<Q")
_READ = struct.Struct("<I")
_SLOT_END = TICKET_HEAD_NBYTES + _SLOT.size
_NEEDED_AT, _NEEDED = TICKET_HEAD_NBYTES + 5, struct.Struct("<Q")
_TICKET_ENTRY = struct.Struct("<QI")
TicketOfInts = tuple[int, int, list[int], bool]
"""The arguments of `pack_ticket_of_ints`."""


class KeyForm(IntEnum):
    INTS = 0
    PICKLED = 1
    SLOT = 2
    ITEMS = 3
    READ = 4


class Ticket(NamedTuple):
    """Everything that a feeder needs to make one batch."""

    base_seed: int
    first_position: int
    bare: bool
    keys: Sequence[Any]
    draws: int = 0


class ReadSamples(NamedTuple):
    """The samples of a batch, as its slot read them. A ticket carries them in place of keys. The batch's place in its
    slot is `Ticket.first_position`."""

    slot: int
    size: int
    """Number of samples that the loader requests for a batch."""
    body: bytes | memoryview
    """The samples, encoded by `batches.encoding`."""


class SlotTicket(NamedTuple):
    """Everything that a feeder needs to make one batch of an IterableDataset."""

    base_seed: int
    number: int
    """The batch's place in its slot, from 0."""
    slot: int
    size: int
    """Number of samples in a batch, or 1 if samples are bare."""
    bare: bool = False
    drop_last: bool = False
    needed: int = 0
    """Number of the first batch of the slot that may still be requested again."""
    known: tuple[int, int] | None = None
    """(number, digest) of a received batch. If the batch is rebuilt, its digest must be the same."""
    snapshot: tuple[int, bytes] | None = None
    """(batches made, state) from which the slot may resume."""
    asks: bool = False
    """True if the ticket only asks whether the batch exists."""


@lru_cache(maxsize=64)
def _ticket_struct(count: int) -> struct.Struct:
    return struct.Struct(f"<QQBBHI{count}q")


def all_ints(keys: Sequence[Any]) -> bool:
    """Returns True if all keys are exactly of type `int`, so that they can be sent as integers. Other types, such as
    numpy integers, must be pickled, because the dataset sees a key's type."""
    n = len(keys)
    return type(keys[0]) is int if n == 1 else list(map(type, keys)).count(int) == n


def pack_ticket(
    base_seed: int,
    first_position: int,
    keys: Sequence[Any],
    *,
    bare: bool = False,
    pickle_keys: Callable[[Any], bytes] = pickle.dumps,
) -> bytes:
    """Packs the ticket of one batch. A list of ints takes 8 bytes per key. `pickle_keys` packs any other keys."""
    if type(keys) is list and all_ints(keys):
        return pack_ticket_of_ints(base_seed, first_position, keys, bare)
    return _pack_pickled_ticket(base_seed, first_position, keys, bare, pickle_keys=pickle_keys)


def pack_ticket_of_items(base_seed: int, first_position: int, keys: Any) -> bytes:
    """Packs the ticket of a batch. `keys` is an array with one item per key. The array is pickled as a whole, because
    the items of a list would be pickled separately."""
    return _pack_pickled_ticket(base_seed, first_position, keys, False, KeyForm.ITEMS)


def pack_ticket_of_ints(base_seed: int, first_position: int, keys: Sequence[int], bare: bool) -> bytes:
    """Packs keys known to be ints, as `pack_ticket` does. Pickles them if any key exceeds 64 bits."""
    n = len(keys)
    try:
        return _ticket_struct(n).pack(base_seed, first_position, bare, KeyForm.INTS, 0, n, *keys)
    except struct.error:
        return _pack_pickled_ticket(base_seed, first_position, keys, bare)


def _pack_pickled_ticket(
    base_seed: int,
    first_position: int,
    keys: Any,
    bare: bool,
    form: KeyForm = KeyForm.PICKLED,
    pickle_keys: Callable[[Any], bytes] = pickle.dumps,
) -> bytes:
    return _TICKET_HEAD.pack(base_seed, first_position, bare, form, 0, len(keys)) + pickle_keys(keys)


def unpack_ticket(data: bytes | memoryview) -> Ticket:
    """Decodes the output of `pack_ticket`. Raises RemoteProtocolError on anything else."""
    base_seed, first, bare, key_form, draws, n = _ticket_head(data)
    if key_form == KeyForm.INTS:
        if len(data) != TICKET_HEAD_NBYTES + 8 * n:
            raise RemoteProtocolError(
                f"a ticket of {n} indices must have {TICKET_HEAD_NBYTES + 8 * n} bytes, but has {len(data)}"
            )
        return Ticket(base_seed, first, bool(bare), list(_ticket_struct(n).unpack_from(data)[6:]), draws)
    if key_form in (KeyForm.PICKLED, KeyForm.ITEMS):
        keys = pickle.loads(data[TICKET_HEAD_NBYTES:])  # noqa: S301  authenticated, trainer to feeder only
        if len(keys) != n:
            raise RemoteProtocolError(f"a ticket announces {n} keys but holds {len(keys)}")
        return Ticket(base_seed, first, bool(bare), list(keys) if key_form == KeyForm.ITEMS else keys, draws)
    if key_form == KeyForm.READ and len(data) >= TICKET_HEAD_NBYTES + _READ.size:
        (slot,) = _READ.unpack_from(data, TICKET_HEAD_NBYTES)
        read = ReadSamples(slot, n, memoryview(data)[TICKET_HEAD_NBYTES + _READ.size :])
        return Ticket(base_seed, first, bool(bare), read, draws)
    raise RemoteProtocolError(f"unknown key form {key_form}")


def has_pickled_keys(data: bytes | memoryview) -> bool:
    """Returns True if unpacking the ticket loads a pickle, which may run code. Raises RemoteProtocolError if `data` is
    not a ticket."""
    return _ticket_head(data)[3] in (KeyForm.PICKLED, KeyForm.ITEMS)


def with_draws(data: bytes, draws: int) -> bytes:
    """Returns the packed ticket with `draws`, the number of earlier iterators that used the dataset's RNGs."""
    return data[:_DRAWS_AT] + _DRAWS.pack(draws & MAX_DRAWS) + data[_DRAWS_AT + _DRAWS.size :]


def pack_read_samples(base_seed: int, number: int, read: ReadSamples, *, bare: bool) -> bytes:
    """Packs a ticket that carries the samples of batch `number` of a slot."""
    head = _TICKET_HEAD.pack(base_seed, number, bare, KeyForm.READ, 0, read.size)
    return b"".join((head, _READ.pack(read.slot), read.body))


def pack_slot_ticket(ticket: SlotTicket) -> bytes:
    head = _TICKET_HEAD.pack(ticket.base_seed, ticket.number, ticket.bare, KeyForm.SLOT, 0, ticket.size)
    packed = head + _SLOT.pack(ticket.slot, ticket.drop_last | ticket.asks << 1, ticket.needed, 0, 0)
    return with_beginning(packed, ticket.snapshot, ticket.known)


def with_beginning(data: bytes, snapshot: tuple[int, bytes] | None, known: tuple[int, int] | None) -> bytes:
    """Adds a snapshot to resume from, and the digest of a received batch, to a slot's packed ticket."""
    if known is not None:
        data = data[: _SLOT_END - _KNOWN.size] + _KNOWN.pack(known[0] + 1, known[1]) + data[_SLOT_END:]
    return data if snapshot is None else data[:_SLOT_END] + _MADE.pack(snapshot[0]) + snapshot[1]


def with_needed(data: bytes, needed: int) -> bytes:
    """Returns a slot's packed ticket with another `needed`, the first batch that may still be requested again."""
    return data[:_NEEDED_AT] + _NEEDED.pack(needed) + data[_NEEDED_AT + _NEEDED.size :]


def slot_of(data: bytes) -> int | None:
    """Returns the slot of a packed ticket, or None if the ticket has keys."""
    is_slots = len(data) >= _SLOT_END and data[_KEY_FORM_AT] == KeyForm.SLOT
    return int(_SLOT.unpack_from(data, TICKET_HEAD_NBYTES)[0]) if is_slots else None


def unpack_slot_ticket(data: bytes | memoryview) -> SlotTicket | None:
    """Decodes a slot's ticket. Returns None for a ticket with keys. Raises RemoteProtocolError for anything else."""
    base_seed, number, bare, key_form, _, size = _ticket_head(data)
    if key_form != KeyForm.SLOT:
        return None
    rest = len(data) - _SLOT_END
    if rest and not _MADE.size <= rest <= _MADE.size + MAX_SNAPSHOT_NBYTES:
        raise RemoteProtocolError(
            f"a slot's ticket must have {_SLOT_END} bytes, followed by a snapshot of at most "
            f"{MAX_SNAPSHOT_NBYTES}, but has {len(data)}"
        )
    slot, bits, needed, known, digest = _SLOT.unpack_from(data, TICKET_HEAD_NBYTES)
    had = (known - 1, digest) if known else None
    snapshot = (
        (_MADE.unpack_from(data, _SLOT_END)[0], bytes(data[_SLOT_END + _MADE.size :])) if rest else None
    )
    drop_last, asks = bool(bits & 1), bool(bits & 2)
    return SlotTicket(base_seed, number, slot, size, bool(bare), drop_last, needed, had, snapshot, asks)


def positions_of(data: bytes | memoryview) -> tuple[int, int]:
    """Returns (position of the first sample, number of samples) of a packed ticket."""
    _, first, _, _, _, n = _ticket_head(data)
    return first, n


def ints_of(data: bytes | memoryview) -> list[int] | None:
    """Returns the keys of a packed ticket if they are ints. Returns None for other keys, because only processes that
    run user code may unpickle keys. Raises RemoteProtocolError if the ticket is too short for its keys."""
    key_form = _ticket_head(data)[3]
    return list(unpack_ticket(data).keys) if key_form == KeyForm.INTS else None


def base_seed_of(data: bytes | memoryview) -> int:
    """Returns the seed of a packed ticket, read without unpickling the user's keys."""
    return _ticket_head(data)[0]


def _ticket_head(data: bytes | memoryview) -> tuple[int, ...]:
    if len(data) < TICKET_HEAD_NBYTES:
        raise RemoteProtocolError(
            f"a ticket must have at least {TICKET_HEAD_NBYTES} bytes, but has {len(data)}"
        )
    return _TICKET_HEAD.unpack_from(data)


def join_tickets(entries: Sequence[tuple[int, bytes]]) -> bytes:
    """Joins several tickets (number, payload) into one message's payload."""
    parts = []
    for number, data in entries:
        parts.append(_TICKET_ENTRY.pack(number, len(data)))
        parts.append(data)
    return b"".join(parts)


@lru_cache(maxsize=64)
def _tickets_struct(tickets: int, count: int) -> struct.Struct:
    return struct.Struct("<" + f"QIQQBBHI{count}q" * tickets)


def join_tickets_of_ints(numbers: Sequence[int], entries: Sequence[TicketOfInts | bytes]) -> bytes | None:
    """Packs the entries as `pack_ticket_of_ints` does and joins them as `join_tickets` does, in one step. Returns None
    unless all entries have the same number of keys and all keys are ints."""
    fields: list[int] = []
    count = -1
    for number, entry in zip(numbers, entries, strict=True):
        if isinstance(entry, bytes):
            return None
        base_seed, first_position, keys, bare = entry
        if len(keys) != count:
            if count >= 0:
                return None
            count = len(keys)
        fields += (
            number,
            TICKET_HEAD_NBYTES + 8 * count,
            base_seed,
            first_position,
            bare,
            KeyForm.INTS,
            0,
            count,
        )
        fields += keys
    try:
        return _tickets_struct(len(entries), count).pack(*fields)
    except struct.error:  # a key beyond 64 bits
        return None


def split_tickets(data: bytes) -> list[tuple[int, bytes]]:
    """Splits the output of `join_tickets`. Raises RemoteProtocolError on anything else."""
    entries, at = [], 0
    while at < len(data):
        if len(data) - at < _TICKET_ENTRY.size:
            raise RemoteProtocolError("a message of tickets ends in the middle of a ticket's head")
        number, nbytes = _TICKET_ENTRY.unpack_from(data, at)
        at += _TICKET_ENTRY.size
        if nbytes > len(data) - at:
            raise RemoteProtocolError(
                f"ticket {number} announces {nbytes} bytes, but {len(data) - at} are left"
            )
        entries.append((number, data[at : at + nbytes]))
        at += nbytes
    return entries


def describe_keys(data: bytes | memoryview, position: int | None = None, limit: int = 8) -> str:
    """Returns the keys of a packed ticket as text for a message, without unpickling anything."""
    if len(data) < TICKET_HEAD_NBYTES:
        return "unknown indices"
    _, first, _, key_form, _, n = _TICKET_HEAD.unpack_from(data)
    if key_form in (KeyForm.SLOT, KeyForm.READ) and len(data) >= TICKET_HEAD_NBYTES + _READ.size:
        where = "" if position is None else f"sample {position} of "
        return f"{where}batch {first} of slot {_READ.unpack_from(data, TICKET_HEAD_NBYTES)[0]}"
    if key_form != KeyForm.INTS or len(data) != TICKET_HEAD_NBYTES + 8 * n:
        return f"{n} keys" if position is None else f"key number {position} of {n}"
    keys = _ticket_struct(n).unpack_from(data)[6:]
    if position is not None and 0 <= position < n:
        return f"index {keys[position]}"
    more = f", ... {n} in all" if n > limit else ""
    return f"indices [{', '.join(map(str, keys[:limit]))}{more}]"
