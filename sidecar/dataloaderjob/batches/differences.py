"""The first difference between two batches, reported as the path of an element, such as `[0]['image'][3, 1]`.

The encoded bodies are compared, because digests cover their bytes. The comparison needs none of the user's classes and
runs none of the user's code.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from dataloaderjob.batches import special
from dataloaderjob.core import layout, values
from dataloaderjob.core.errors import RemoteProtocolError
from dataloaderjob.core.layout import Buffer, Layout, Node, NodeKind

_MAX_SHOWN = 60
_BUFFERS = frozenset({NodeKind.TENSOR, NodeKind.ARRAY, NodeKind.SCALAR})


@dataclass(frozen=True, slots=True)
class Parsed:
    """A parsed body."""

    body: bytes
    layout: Layout
    values: list[Any]

    @staticmethod
    def of(body: bytes) -> Parsed:
        parsed = layout.parse(body[: layout.key_nbytes(body)])
        found = values.unpack_many(body[parsed.values_offset :], parsed.num_values)
        return Parsed(body, parsed, found)

    def bytes_of(self, buffer: Buffer) -> memoryview:
        return memoryview(self.body)[buffer.offset : buffer.offset + buffer.nbytes]


def describe(body: bytes) -> Iterator[str]:
    """Yields a line for each leaf, with its path and a description. Raises RemoteProtocolError if the body is
    invalid."""
    parsed = Parsed.of(body)
    for path, node in _leaves(parsed.layout.root, ""):
        yield f"batch{path}: {_about(parsed, node)}"


def first_difference(a: bytes, b: bytes) -> str | None:
    """Returns a description of the first difference between two bodies, or None if they are equal. Raises
    RemoteProtocolError if a body is invalid."""
    one, other = Parsed.of(a), Parsed.of(b)
    return _compare(one, one.layout.root, other, other.layout.root, "")


def _compare(a: Parsed, x: Node, b: Parsed, y: Node, path: str) -> str | None:
    if (x.kind, x.cls, x.way, len(x.children)) != (y.kind, y.cls, y.way, len(y.children)) or x.keys != y.keys:
        return f"batch{path} is {_about(a, x)} in one and {_about(b, y)} in the other"
    if x.kind in _BUFFERS:
        return _compare_buffers(a, a.layout.buffers[x.index], b, b.layout.buffers[y.index], path)
    if x.kind is NodeKind.VALUE:
        return _compare_values(a.values[x.index], b.values[y.index], path)
    if x.kind is NodeKind.PICKLE and a.values[x.index] != b.values[y.index]:
        return f"batch{path} is sent as a pickle, and the bytes of the pickles differ"
    for (step, left), (_, right) in zip(_children(x), _children(y), strict=True):
        found = _compare(a, left, b, right, path + step)
        if found is not None:
            return found
    return None


def _compare_buffers(a: Parsed, x: Buffer, b: Parsed, y: Buffer, path: str) -> str | None:
    if _shape(x) != _shape(y) or (x.strides, x.flags) != (y.strides, y.flags):
        return f"batch{path} is {_shape(x)} in one and {_shape(y)} in the other"
    left = np.frombuffer(a.bytes_of(x), np.uint8)
    right = np.frombuffer(b.bytes_of(y), np.uint8)
    differ = np.flatnonzero(left != right)
    if not differ.size:
        return None
    item = int(differ[0]) // max(1, x.itemsize)
    items = len(np.unique(differ // max(1, x.itemsize)))
    where = f"{path}{list(_element(x, item))}" if x.shape else path
    shown = f"{_item(a, x, item)} in one and {_item(b, y, item)} in the other"
    return f"batch{where} is {shown} ({items} of {_count(x)} elements of batch{path} differ)"


def _compare_values(x: Any, y: Any, path: str) -> str | None:
    # Values are compared by their encoding, as in the digest: NaN equals itself, and 0.0 differs from -0.0.
    if values.pack(x) == values.pack(y):
        return None
    steps: Iterable[tuple[str, Any, Any]] = ()
    if type(x) is type(y) and isinstance(x, list | tuple) and len(x) == len(y):
        steps = ((f"[{i}]", left, right) for i, (left, right) in enumerate(zip(x, y, strict=True)))
    elif type(x) is dict and type(y) is dict and list(x) == list(y):
        steps = ((f"[{key!r}]", x[key], y[key]) for key in x)
    for step, left, right in steps:
        found = _compare_values(left, right, path + step)
        if found is not None:
            return found
    return f"batch{path} is {_cut(x)} in one and {_cut(y)} in the other"


# Paths


def _leaves(node: Node, path: str) -> Iterator[tuple[str, Node]]:
    children = list(_children(node))
    if not children:
        yield path, node
    for step, child in children:
        yield from _leaves(child, path + step)


def _children(node: Node) -> Iterator[tuple[str, Node]]:
    """Yields (step, child) for each child of a node. A step is the child's part of the path."""
    if node.kind is NodeKind.MADE:
        yield "", node.children[0]
    elif node.kind is NodeKind.ATTRIBUTES:
        yield "", node.children[0]
        yield from zip([f".{name}" for name in node.keys], node.children[1:], strict=True)
    elif node.kind is NodeKind.DATACLASS:
        yield from zip([f".{name}" for name in node.keys], node.children, strict=True)
    elif node.keys:
        yield from zip([f"[{key!r}]" for key in node.keys], node.children, strict=True)
    else:
        yield from ((f"[{i}]", child) for i, child in enumerate(node.children))


def _element(buffer: Buffer, item: int) -> tuple[int, ...]:
    """Converts an item's position in memory to its indices in the buffer's array."""
    if buffer.strides is None:
        return tuple(int(i) for i in np.unravel_index(item, buffer.shape))
    found = [0] * len(buffer.shape)
    for stride, axis in sorted(((s, i) for i, s in enumerate(buffer.strides)), reverse=True):
        if buffer.shape[axis] > 1:
            found[axis], item = divmod(item, stride)
    return tuple(found)


# Descriptions


def _about(parsed: Parsed, node: Node) -> str:
    if node.kind in _BUFFERS:
        return _shape(parsed.layout.buffers[node.index])
    if node.kind is NodeKind.VALUE:
        return _cut(parsed.values[node.index])
    if node.kind is NodeKind.PICKLE:
        return f"a pickle of {len(parsed.values[node.index])} bytes"
    if node.kind in (NodeKind.SAME, NodeKind.AGAIN):
        return "the same object as one before it"
    name = ".".join(node.cls) if node.cls else node.way or node.kind.name.lower()
    keys = f" with the keys {_cut(list(node.keys))}" if node.keys else f" of {len(node.children)}"
    return f"a {name}{keys}"


def _shape(buffer: Buffer) -> str:
    dtype = buffer.dtype if isinstance(buffer.dtype, str) else repr(buffer.dtype)
    return f"{buffer.kind.name.lower()} {dtype} {list(buffer.shape)}"


def _count(buffer: Buffer) -> int:
    return buffer.nbytes // max(1, buffer.itemsize)


def _item(parsed: Parsed, buffer: Buffer, item: int) -> str:
    raw = parsed.bytes_of(buffer)[item * buffer.itemsize : (item + 1) * buffer.itemsize]
    try:
        if buffer.kind is NodeKind.TENSOR:
            known = special.tensor_type(buffer.dtype, buffer.itemsize)
            if known.carrier:
                return f"0x{bytes(raw)[::-1].hex()}"
            return str(np.frombuffer(raw, known.numpy)[0])
        return str(np.frombuffer(raw, special.array_type(buffer.dtype, buffer.itemsize))[0])
    except (RemoteProtocolError, ValueError, TypeError):
        return f"0x{bytes(raw)[::-1].hex()}"


def _cut(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _MAX_SHOWN else f"{text[: _MAX_SHOWN - 3]}..."
