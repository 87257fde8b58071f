"""The payload of a ticket: seeds, position and the keys of one batch. Pure.

The receiver hands it on unread; a feeder, and a message about a late batch, decode it.

    u64 base_seed, u64 first_position, u8 form, u8 key_form, u16 0, u32 count, then the keys

`form` says how torch's fetcher sees the keys: a batch (list) or one bare key (`batch_size=None`).
`key_form`: INTS is count int64, a list; PICKLED is one pickle of what the batch sampler gave: a list of any other
kind of key, a tuple, an array (trainer to feeder is the direction in which pickle is allowed); ITEMS is one
pickle of an array, whose items are the keys in the list. STREAM_POSITION is kept for iterable datasets:
a stream's name and a position instead of indices.
"""

from __future__ import annotations

import pickle
import struct
from collections.abc import Callable, Sequence
from enum import IntEnum
from functools import lru_cache
from typing import Any, NamedTuple

from dataloaderjob.core.errors import RemoteProtocolError

_HEAD = struct.Struct("<QQBBHI")
HEAD_NBYTES = _HEAD.size
DEPTH = 2
"""Tickets that a feeder has in hand wherever there are enough: one that it works on, one that hides the round trip."""


class Form(IntEnum):
    BATCH = 0
    BARE = 1


class KeyForm(IntEnum):
    INTS = 0
    PICKLED = 1
    STREAM_POSITION = 2
    ITEMS = 3


class Ticket(NamedTuple):
    """What a feeder needs to make one batch."""

    base_seed: int
    first_position: int
    bare: bool
    keys: Sequence[Any]


@lru_cache(maxsize=64)
def _ints(count: int) -> struct.Struct:
    return struct.Struct(f"<QQBBHI{count}q")


def all_ints(keys: Sequence[Any]) -> bool:
    """Whether these go as integers. Only `int` itself does: torch's workers see the type of a numpy integer."""
    n = len(keys)
    return type(keys[0]) is int if n == 1 else list(map(type, keys)).count(int) == n


def pack(
    base_seed: int,
    first_position: int,
    keys: Sequence[Any],
    *,
    bare: bool = False,
    pickle_keys: Callable[[Any], bytes] = pickle.dumps,
) -> bytes:
    """Packs the keys of one batch; a list of ints in 8 bytes each, anything else as `pickle_keys` makes of it."""
    if type(keys) is list and all_ints(keys):
        return pack_ints(base_seed, first_position, keys, bare)
    return _pack_pickled(base_seed, first_position, keys, bare, pickle_keys=pickle_keys)


def pack_items(base_seed: int, first_position: int, keys: Any) -> bytes:
    """Packs the list of an array's items, each of which would take a pickle of its own."""
    return _pack_pickled(base_seed, first_position, keys, False, KeyForm.ITEMS)


def pack_ints(base_seed: int, first_position: int, keys: Sequence[int], bare: bool) -> bytes:
    """`pack` of what is known to be ints. Pickled beyond 64 bits."""
    n = len(keys)
    try:
        return _ints(n).pack(base_seed, first_position, bare, KeyForm.INTS, 0, n, *keys)
    except struct.error:
        return _pack_pickled(base_seed, first_position, keys, bare)


def _pack_pickled(
    base_seed: int,
    first_position: int,
    keys: Any,
    bare: bool,
    form: KeyForm = KeyForm.PICKLED,
    pickle_keys: Callable[[Any], bytes] = pickle.dumps,
) -> bytes:
    return _HEAD.pack(base_seed, first_position, bare, form, 0, len(keys)) + pickle_keys(keys)


def unpack(data: bytes | memoryview) -> Ticket:
    """Decodes what `pack` made. Raises RemoteProtocolError on anything else."""
    if len(data) < HEAD_NBYTES:
        raise RemoteProtocolError(f"a ticket needs at least {HEAD_NBYTES} bytes, found {len(data)}")
    base_seed, first, bare, key_form, _, n = _HEAD.unpack_from(data)
    if key_form == KeyForm.INTS:
        if len(data) != HEAD_NBYTES + 8 * n:
            raise RemoteProtocolError(
                f"a ticket of {n} indices needs {HEAD_NBYTES + 8 * n} bytes, found {len(data)}"
            )
        return Ticket(base_seed, first, bool(bare), list(_ints(n).unpack_from(data)[6:]))
    if key_form in (KeyForm.PICKLED, KeyForm.ITEMS):
        keys = pickle.loads(data[HEAD_NBYTES:])  # noqa: S301  authenticated, trainer to feeder only
        if len(keys) != n:
            raise RemoteProtocolError(f"a ticket says {n} keys and holds {len(keys)}")
        return Ticket(base_seed, first, bool(bare), list(keys) if key_form == KeyForm.ITEMS else keys)
    raise RemoteProtocolError(f"key form {key_form} is not known: this feeder serves map-style datasets only")


def base_seed(data: bytes | memoryview) -> int:
    """The seed of a packed ticket, read without unpickling its keys, which are the user's."""
    if len(data) < HEAD_NBYTES:
        raise RemoteProtocolError(f"a ticket needs at least {HEAD_NBYTES} bytes, found {len(data)}")
    return int(_HEAD.unpack_from(data)[0])


_ENTRY = struct.Struct("<QI")


def join(entries: Sequence[tuple[int, bytes]]) -> bytes:
    """Several tickets (number, payload) as one message's payload."""
    parts = []
    for number, data in entries:
        parts.append(_ENTRY.pack(number, len(data)))
        parts.append(data)
    return b"".join(parts)


Ints = tuple[int, int, list[int], bool]
"""The arguments of `pack_ints`."""


@lru_cache(maxsize=64)
def _joined(tickets: int, count: int) -> struct.Struct:
    return struct.Struct("<" + f"QIQQBBHI{count}q" * tickets)


def join_ints(numbers: Sequence[int], entries: Sequence[Ints | bytes]) -> bytes | None:
    """`join` of what `pack_ints` makes of each, in one go; None where these have not as many keys each, all ints."""
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
        fields += number, HEAD_NBYTES + 8 * count, base_seed, first_position, bare, KeyForm.INTS, 0, count
        fields += keys
    try:
        return _joined(len(entries), count).pack(*fields)
    except struct.error:  # a key beyond 64 bits
        return None


def split(data: bytes) -> list[tuple[int, bytes]]:
    """Takes apart what `join` made. Raises RemoteProtocolError on anything else."""
    entries, at = [], 0
    while at < len(data):
        if len(data) - at < _ENTRY.size:
            raise RemoteProtocolError("a message of tickets ends within a ticket's head")
        number, nbytes = _ENTRY.unpack_from(data, at)
        at += _ENTRY.size
        if nbytes > len(data) - at:
            raise RemoteProtocolError(f"ticket {number} says {nbytes} bytes, {len(data) - at} are left")
        entries.append((number, data[at : at + nbytes]))
        at += nbytes
    return entries


def describe(data: bytes | memoryview, position: int | None = None, limit: int = 8) -> str:
    """The keys of a packed ticket as text for a message, without unpickling anything."""
    if len(data) < HEAD_NBYTES:
        return "unknown indices"
    _, _, _, key_form, _, n = _HEAD.unpack_from(data)
    if key_form != KeyForm.INTS or len(data) != HEAD_NBYTES + 8 * n:
        return f"{n} keys" if position is None else f"key number {position} of {n}"
    keys = _ints(n).unpack_from(data)[6:]
    if position is not None and 0 <= position < n:
        return f"index {keys[position]}"
    more = f", ... {n} in all" if n > limit else ""
    return f"indices [{', '.join(map(str, keys[:limit]))}{more}]"
