"""Seeds of samples and batches, derived from the iterator's base seed. Pure.

A seed depends on (base seed, purpose, position, key) and on nothing that differs between processes, so
a batch is the same whichever process makes it. The hash is BLAKE2b over little-endian words: 0.7 µs,
where splitmix64 in plain Python takes 1.2 µs.
"""

from __future__ import annotations

import operator
import struct
from functools import lru_cache
from hashlib import blake2b
from typing import Any

from dataloaderjob.core import values

MASK = (1 << 64) - 1
SAMPLE = 1
BATCH = 2
"""Purposes: the seed of sample 3 and the seed of batch 3 must differ."""


_sample_words = struct.Struct("<4Q").pack


@lru_cache(maxsize=32)
def _words(count: int) -> struct.Struct:
    return struct.Struct(f"<{count}Q")


def derive(base_seed: int, *parts: int) -> int:
    """Returns a seed in [0, 2**64) that depends on every part and on their order.

    Parts are taken modulo 2**64, so negative numbers are fine.
    """
    words = _words(1 + len(parts)).pack(base_seed & MASK, *[part & MASK for part in parts])
    return int.from_bytes(blake2b(words, digest_size=8).digest(), "little")


def of_sample(base_seed: int, position: int, key: Any) -> int:
    """The seed of one sample. `position` counts samples from the start of the iterator."""
    number = key if type(key) is int else key_number(key)
    # derive(base_seed, SAMPLE, position, number), written out for the sake of 0.8 µs per sample.
    words = _sample_words(base_seed & MASK, SAMPLE, position & MASK, number & MASK)
    return int.from_bytes(blake2b(words, digest_size=8).digest(), "little")


def of_batch(base_seed: int, ticket_no: int) -> int:
    """The seed of collate_fn, and of `__getitems__`, for one ticket."""
    return derive(base_seed, BATCH, ticket_no)


def key_number(key: Any) -> int:
    """A number for a sampler's key of any kind, the same in every process.

    Integers (numpy's, and tensors of one integer) count as their value; plain values by their
    encoding. Of any other object only the type counts: a pickle or a repr of it may differ between
    processes, and the position already tells two samples apart.
    """
    try:
        return operator.index(key)
    except TypeError:
        pass
    try:
        data = values.pack(key)
    except values.NotPlainError:
        data = f"{type(key).__module__}.{type(key).__qualname__}".encode()
    return int.from_bytes(blake2b(data, digest_size=8).digest(), "little")
