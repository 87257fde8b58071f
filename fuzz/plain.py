"""Targets: plain values, the layout of a batch, and whole batches as a trainer decodes them."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from dataloaderjob.batches.decoding import Decoder
from dataloaderjob.batches.encoding import encode
from dataloaderjob.core import layout, values
from dataloaderjob.core.errors import RemoteProtocolError, UnsupportedBatch
from fuzz.target import Target, mutate_bytes, mutate_values

_SCHEMA_NBYTES = 2
"""An input of these targets: the size of the schema, the schema, the rest of the body."""


class Pair(NamedTuple):
    first: Any
    second: Any


@dataclass
class Sample:
    image: Any
    label: str


def _values() -> Sequence[bytes]:
    plain: tuple[Any, ...] = (
        None, [1, -5, 1 << 80, 2.5, 1j, "text", "\ud800", b"bytes", bytearray(b"more")],
        {"a": (1, {2, 3}), 4: frozenset({5})},
        [[[[[]]]]], tuple(range(40)),
    )  # fmt: skip
    return [values.pack(one) for one in plain]


def _unpack(data: bytes) -> None:
    found = values.unpack(data)
    if type(found) is list:
        assert values.unpack_many(data, len(found)) is not None
    with contextlib.suppress(values.NotPlainError):  # nested more deeply than is sent
        values.pack(found)


def _batches() -> list[Any]:
    shared = torch.arange(6.0)
    return [
        torch.arange(12, dtype=torch.int16).reshape(3, 4),
        {"image": torch.rand(2, 3, requires_grad=True), "label": [1, 2], "name": ("a", "b"), 3: np.arange(3)},
        [np.float32(1.5), np.array(["a", "bc"]), np.array([1], "datetime64[s]"), torch.ones(2, dtype=torch.bfloat16)],
        [shared, shared, torch.Size([1, 2]), None, 1 << 70, {1, 2}, frozenset({3}), np.zeros((2, 0))],
        torch.zeros(4, 3).t(),
        np.zeros(2, dtype=[("x", "i4"), ("y", "f8", (2,))]),
        torch.sparse_coo_tensor(torch.tensor([[0, 1]]), torch.tensor([1.0, 2.0]), (3,)),
    ]  # fmt: skip


def _bodies() -> Sequence[bytes]:
    found = []
    for batch in _batches():
        encoded = encode(batch, allow_pickle=False)
        body = b"".join(map(bytes, encoded.buffers))
        end = layout.key_nbytes(body)
        schema = body[layout.HEADER.size : end]
        found.append(len(schema).to_bytes(_SCHEMA_NBYTES, "little") + schema + body[end:])
    return found


def _parts(data: bytes) -> tuple[bytes, bytes]:
    nbytes = int.from_bytes(data[:_SCHEMA_NBYTES], "little")
    return data[_SCHEMA_NBYTES : _SCHEMA_NBYTES + nbytes], data[_SCHEMA_NBYTES + nbytes :]


def _headed(schema: bytes) -> bytes:
    """A schema behind a header that fits it, which a mutation never finds by itself."""
    head = (0, 0, layout.MAGIC, layout.VERSION, 0, len(schema), layout.digest(schema))
    return layout.HEADER.pack(*head) + schema


def _schema(data: bytes) -> None:
    schema, _ = _parts(data)
    layout.parse(_headed(schema))


def _body(data: bytes) -> None:
    schema, rest = _parts(data)
    body = np.frombuffer(_headed(schema) + rest, np.uint8).copy()
    decoder = Decoder(allow_pickle=False)
    decoder.decode(body)
    decoder.decode(body)  # by the plan that it has kept


def _raw(data: bytes) -> None:
    layout.parse(data)


def _mutate(data: bytes, chance: random.Random) -> bytes:
    """Changes the schema as a value, or the bytes behind it."""
    schema, rest = _parts(data)
    if chance.random() < 0.7:
        schema = mutate_values(schema, chance)
    else:
        rest = mutate_bytes(rest, chance)
    if chance.random() < 0.2:
        rest = rest[: chance.randrange(len(rest) + 1)]
    return (len(schema) & 0xFFFF).to_bytes(_SCHEMA_NBYTES, "little") + schema + rest


_REFUSED = (RemoteProtocolError,)
TARGETS = (
    Target(name="values", parse=_unpack, seeds=_values, declared=_REFUSED, mutate=mutate_values),
    Target(name="layout", parse=_schema, seeds=_bodies, declared=_REFUSED, mutate=_mutate),
    Target(
        name="layout-headers",
        parse=_raw,
        seeds=lambda: [_headed(_parts(b)[0]) for b in _bodies()],
        declared=_REFUSED,
    ),
    Target(
        name="batches",
        parse=_body,
        seeds=_bodies,
        declared=(RemoteProtocolError, UnsupportedBatch),
        mutate=_mutate,
    ),
)
