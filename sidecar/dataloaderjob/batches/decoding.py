"""Decoding of bytes into a batch tree, without a copy: tensors and arrays are views of the body.

Each schema is analyzed once and cached. With a cached schema, decoding takes one numpy view and one torch view per
leaf.
"""

from __future__ import annotations

import pickle
import struct
from collections import defaultdict
from collections.abc import Callable, Sequence
from itertools import repeat
from mmap import mmap
from operator import itemgetter
from typing import Any

import numpy as np
import torch

from dataloaderjob.batches import allowed, objects, special
from dataloaderjob.batches.encoding import is_class_of_items
from dataloaderjob.core import layout, values
from dataloaderjob.core.errors import DataLoaderJobError, RemoteProtocolError
from dataloaderjob.core.layout import Buffer, Node, NodeKind

Body = np.ndarray[Any, np.dtype[np.uint8]]
"""The bytes of a body: uint8, shape (size of the body,)."""
Memory = memoryview | mmap
Maker = Callable[[Body], Any]
Builder = Callable[[list[Any]], Any]

_MAX_SCHEMAS = 256
"""Maximum number of schemas in a decoder's cache. Each ragged batch adds a schema, which takes a few KB."""
_MAX_KEY_NBYTES = 1 << 20

_HEAD_AT = layout.SEAL.size
_HEAD_END = layout.HEADER.size
_read_words: Callable[[Memory, int], tuple[int, ...]] = struct.Struct("<4Q").unpack_from
"""Reads the first 32 bytes of a body as four words: its digest, the batch's identity, the schema's version and length,
and the schema's digest."""
_ndarray: Callable[..., np.ndarray[Any, Any]] = np.ndarray
_from_numpy = torch.from_numpy


class BodyPlan:
    """A plan that turns bodies of one schema into batches."""

    __slots__ = (
        "_build", "_made", "_num_values", "_values_offset", "first_word", "head", "leaves", "nbytes", "second_word",
    )  # fmt: skip

    def __init__(self, head: bytes, parsed: layout.Layout, allow_pickle: bool) -> None:
        self.head = head
        """The header that follows the seal in each body of this schema."""
        self.first_word, self.second_word = layout.SEAL.unpack(head)
        plain = all(map(_is_plain, parsed.buffers))
        self.leaves = _plain_maker(parsed.buffers) if plain else _any_maker(parsed.buffers)
        """A function that takes a body and returns its leaves that have buffers."""
        self._build = _Builders(parsed, allow_pickle=allow_pickle).node(parsed.root)
        self._num_values = parsed.num_values
        self._made: list[Any] = [None] * parsed.num_made
        self._values_offset = parsed.values_offset
        self.nbytes = -1 if self._num_values else self._values_offset
        """Size of each body in bytes, or -1 if bodies end with values of variable length."""

    def check(self, nbytes: int) -> None:
        """Raises RemoteProtocolError if a body of `nbytes` bytes cannot have this schema."""
        if nbytes != self.nbytes and (nbytes < self._values_offset or not self._num_values):
            more = " at least" if self._num_values else ""
            raise RemoteProtocolError(
                f"a batch must have{more} {self._values_offset} bytes, but has {nbytes}"
            )

    def batch(self, base: Body) -> Any:
        """Returns the batch that the body in `base` encodes. Raises RemoteProtocolError if the body is invalid."""
        leaves = self.leaves(base)
        if self._num_values:
            leaves += values.unpack_many(base.data[self._values_offset :], self._num_values)
        if self._made:
            leaves += self._made
        try:
            return self._build(leaves)
        except DataLoaderJobError:
            raise
        except Exception as exc:  # an unhashable key, or the user's __hash__
            raise RemoteProtocolError(f"a batch cannot be assembled: {exc}") from exc


class Decoder:
    """A decoder of bodies. Each thread needs its own decoder."""

    __slots__ = ("_allow_pickle", "_last", "_plans", "digest")

    def __init__(self, *, allow_pickle: bool) -> None:
        self._allow_pickle = allow_pickle
        self._plans: dict[bytes, BodyPlan] = {}
        self._last: BodyPlan | None = None
        self.digest = 0
        """Digest of the last body that was passed to `plan`."""

    def decode(self, base: Body) -> Any:
        """Returns the batch that the body `base` encodes. Its tensors and arrays are views of the body and keep it
        alive.

        Each tensor has its own storage, which covers exactly the tensor's bytes. Raises RemoteProtocolError if the body
        is invalid, and UnsupportedBatch if this process lacks a class that the batch needs.
        """
        plan = self.plan(base.data, 0, len(base))
        return plan.batch(base)

    def plan(self, memory: Memory, at: int, nbytes: int) -> BodyPlan:
        """Returns the plan for the body of `nbytes` bytes that begins at offset `at` in `memory`. Raises the same
        errors as `decode`."""
        plan = self._last
        try:
            self.digest, _, first, second = _read_words(memory, at)
        except struct.error:
            first = second = 0  # the memory is too short for any body
        if plan is None or second != plan.second_word or first != plan.first_word:
            plan = self._find(memory, at, nbytes)
        if nbytes != plan.nbytes:
            plan.check(nbytes)
        return plan

    def _find(self, memory: Memory, at: int, nbytes: int) -> BodyPlan:
        """Returns the plan for a body whose schema differs from the previous body's schema."""
        start = bytes(memory[at : at + min(_HEAD_END, nbytes)])
        plan = self._plans.get(start[_HEAD_AT:]) or self._prepare(start, memory, at, nbytes)
        self._last = plan
        return plan

    def _prepare(self, start: bytes, memory: Memory, at: int, nbytes: int) -> BodyPlan:
        """Analyzes a new schema and returns its plan. Creates the leaves once, as a test. For later bodies, it is then
        enough to check the size."""
        key = bytes(memory[at : at + min(layout.key_nbytes(start), nbytes)])
        plan = BodyPlan(start[_HEAD_AT:], layout.parse(key), self._allow_pickle)
        plan.check(nbytes)
        try:
            plan.leaves(np.ndarray((nbytes,), np.uint8, memory, at))
        except (ValueError, TypeError, OverflowError, RuntimeError) as exc:
            raise RemoteProtocolError(f"a leaf of a batch cannot be created: {exc}") from exc
        if len(key) <= _MAX_KEY_NBYTES:
            if len(self._plans) >= _MAX_SCHEMAS:
                del self._plans[next(iter(self._plans))]
            self._plans[plan.head] = plan
        return plan


# Leaves


def _any_maker(buffers: Sequence[Buffer]) -> Maker:
    makers = [_tensor_maker(b) if b.kind is NodeKind.TENSOR else _array_maker(b) for b in buffers]
    return lambda base: [make(base) for make in makers]


def _plain_maker(buffers: Sequence[Buffer]) -> Maker:
    """Returns a function that creates all leaves without running Python code for each one."""
    shapes = [b.shape for b in buffers]
    types = [_known(b).numpy for b in buffers]
    offsets = [b.offset for b in buffers]
    strides = [_byte_strides(b) for b in buffers]
    return lambda base: list(map(_from_numpy, map(_ndarray, shapes, types, repeat(base), offsets, strides)))


def _known(buffer: Buffer) -> special.TensorType:
    return special.tensor_type(buffer.dtype, buffer.itemsize)


def _is_plain(buffer: Buffer) -> bool:
    return buffer.kind is NodeKind.TENSOR and not buffer.flags and not _known(buffer).carrier


def _byte_strides(buffer: Buffer) -> tuple[int, ...] | None:
    return None if buffer.strides is None else tuple([s * buffer.itemsize for s in buffer.strides])


def _tensor_maker(buffer: Buffer) -> Maker:
    known = _known(buffer)
    shape, dtype, offset, strides = buffer.shape, known.numpy, buffer.offset, _byte_strides(buffer)
    requires_grad = bool(buffer.flags & layout.REQUIRES_GRAD)

    def plain(base: Body) -> torch.Tensor:
        return _from_numpy(_ndarray(shape, dtype, base, offset, strides))

    def carried(base: Body) -> torch.Tensor:
        return _from_numpy(_ndarray(shape, dtype, base, offset, strides)).view(known.dtype)

    make = carried if known.carrier else plain
    if buffer.flags & layout.PARAMETER:
        return lambda base: torch.nn.Parameter(make(base), requires_grad)
    if requires_grad:
        return lambda base: make(base).requires_grad_()
    return make


def _array_maker(buffer: Buffer) -> Maker:
    dtype = special.array_type(buffer.dtype, buffer.itemsize)
    shape, offset, strides = buffer.shape, buffer.offset, _byte_strides(buffer)

    def array(base: Body) -> Any:
        return _ndarray(shape, dtype, base, offset, strides)

    if buffer.kind is NodeKind.ARRAY:
        return array
    if shape:
        raise RemoteProtocolError(f"a scalar cannot have shape {shape}")
    # Makes a copy, because a structured scalar would be a view.
    return lambda base: array(base).copy()[()]


# Containers


class _Builders:
    """A factory of functions, one for each node. Each function builds its node's part of the tree.

    It receives a single list: the leaves with buffers, then the values, then the objects built so far. Later nodes can
    refer to these objects.
    """

    def __init__(self, parsed: layout.Layout, *, allow_pickle: bool) -> None:
        self.num_buffers = len(parsed.buffers)
        self.first_made = self.num_buffers + parsed.num_values
        self.allow_pickle = allow_pickle

    def node(self, node: Node) -> Builder:
        leaf = self._leaf(node)
        if leaf is not None:
            return itemgetter(leaf)
        own = _OWN.get(node.kind)
        if own is not None:
            return own(self, node)
        return _CONTAINERS[node.kind](node, self._items(node.children))

    def _leaf(self, node: Node) -> int | None:
        if node.kind in (NodeKind.TENSOR, NodeKind.ARRAY, NodeKind.SCALAR):
            return node.index
        if node.kind is NodeKind.AGAIN:
            return self.first_made + node.index
        return self.num_buffers + node.index if node.kind is NodeKind.VALUE else None

    def _items(self, children: tuple[Node, ...]) -> Builder:
        """Returns a function that builds the list of children. If the children are adjacent leaves, as usual, the
        function returns a slice of the leaves."""
        places = [self._leaf(child) for child in children]
        first = places[0] if places else 0
        if first is not None and places == list(range(first, first + len(places))):
            return itemgetter(slice(first, first + len(places)))
        builders = [self.node(child) for child in children]
        return lambda leaves: [build(leaves) for build in builders]

    def _made(self, node: Node) -> Builder:
        cls, way, place = objects.class_for(node.way, node.cls), node.way, self.first_made + node.index
        content, make = self.node(node.children[0]), objects.CARRIERS[way].make

        def build(leaves: list[Any]) -> Any:
            found = content(leaves)
            try:
                made = leaves[place] = make(cls, found)
            except Exception as exc:
                raise RemoteProtocolError(
                    f"a {way} cannot be created from the received content: {exc}"
                ) from exc
            return made

        return build

    def _attributes(self, node: Node) -> Builder:
        whole, *others = node.children
        content = self.node(whole)  # raises for an unknown way
        if not _may_have_attributes(whole):
            raise RemoteProtocolError(
                f"a {whole.way or whole.kind.name} {whole.cls or ''} cannot have attributes"
            )
        names, items = node.keys, self._items(tuple(others))

        def build(leaves: list[Any]) -> Any:
            made = content(leaves)
            own = objects.own_dict(made)
            if type(own) is not dict:
                raise RemoteProtocolError(f"a {type(made).__name__} cannot have attributes")
            # Not setattr, which would run the user's properties.
            own.update(zip(names, items(leaves), strict=True))
            return made

        return build

    def _pickle(self, node: Node) -> Builder:
        if not self.allow_pickle:
            raise RemoteProtocolError(
                "a feeder sent a pickled leaf, which this process does not load: "
                "pass allow_pickle=True to its DataLoader"
            )
        index = self.num_buffers + node.index

        def load(leaves: list[Any]) -> Any:
            if type(leaves[index]) is not bytes:
                raise RemoteProtocolError(
                    f"a pickled leaf must be bytes, but is a {type(leaves[index]).__name__}"
                )
            return pickle.loads(leaves[index])  # noqa: S301  the user allowed it

        return load


def _may_have_attributes(node: Node) -> bool:
    """Returns True if the object that is built from the node may get attributes. On an object with its own state,
    attributes could cause code to run."""
    if node.kind is NodeKind.MAPPING or (node.kind is NodeKind.MADE and node.way == "mapping"):
        return node.cls is not None and objects.takes_attributes(allowed.find(*node.cls))
    if node.kind is NodeKind.MADE:
        return objects.CARRIERS[node.way].attributes
    return node.kind is NodeKind.NAMEDTUPLE


def _class(node: Node, is_one: Callable[[Any], object], what: str) -> Any:
    """Returns the class of a node. Raises RemoteProtocolError if `is_one` rejects the class. The error says that the
    class is `what`."""
    if node.cls is None:
        raise RemoteProtocolError(f"a {node.kind.name} must name its class, but names none")
    cls = allowed.find(*node.cls)
    if not is_one(cls):
        raise RemoteProtocolError(f"{allowed.full_name(cls)} is {what} in this process")
    return cls


def _namedtuple(node: Node, items: Builder) -> Builder:
    cls = _class(node, objects.is_namedtuple, "not a named tuple that a batch may carry")
    if len(allowed.static(cls, "_fields")) != len(node.children):
        count = len(node.children)
        raise RemoteProtocolError(f"{allowed.full_name(cls)} has no {count} fields in this process")
    return lambda leaves: tuple.__new__(cls, items(leaves))


def _class_of_items(node: Node, items: Builder) -> Builder:
    cls = _class(node, is_class_of_items, "not a collection that a batch may carry")
    return lambda leaves: cls(items(leaves))


def _dict(node: Node, items: Builder) -> Builder:
    keys = node.keys
    return lambda leaves: dict(zip(keys, items(leaves), strict=True))


def _mapping(node: Node, items: Builder) -> Builder:
    make = objects.mapping_maker(_class(node, objects.mapping_maker, "not a mapping that a batch may carry"))
    assert make is not None  # noqa: S101  asked by _class
    keys = node.keys
    return lambda leaves: make(dict(zip(keys, items(leaves), strict=True)))


def _defaultdict(node: Node, items: Builder) -> Builder:
    factory = (
        None if node.cls is None else _class(node, allowed.is_factory, "not a factory that a batch may carry")
    )
    keys = node.keys
    return lambda leaves: defaultdict(factory, zip(keys, items(leaves), strict=True))


def _dataclass(node: Node, items: Builder) -> Builder:
    cls = _class(node, objects.is_dataclass_of_batches, "not a dataclass that a batch may carry")
    put = objects.fields_putter(cls, node.keys)
    return lambda leaves: put(object.__new__(cls), items(leaves))


def _of(build: Callable[[list[Any]], Any]) -> Callable[[Node, Builder], Builder]:
    return lambda node, items: lambda leaves: build(items(leaves))  # noqa: ARG005


_OWN: dict[NodeKind, Callable[[_Builders, Node], Builder]] = {
    NodeKind.PICKLE: _Builders._pickle,  # noqa: SLF001  this module's own
    NodeKind.MADE: _Builders._made,  # noqa: SLF001
    NodeKind.ATTRIBUTES: _Builders._attributes,  # noqa: SLF001
}
_CONTAINERS: dict[NodeKind, Callable[[Node, Builder], Builder]] = {
    NodeKind.LIST: lambda node, items: items,  # noqa: ARG005
    NodeKind.TUPLE: _of(tuple),
    NodeKind.SET: _of(set),
    NodeKind.FROZENSET: _of(frozenset),
    NodeKind.NAMEDTUPLE: _namedtuple,
    NodeKind.SEQUENCE: _class_of_items,
    NodeKind.DICT: _dict,
    NodeKind.MAPPING: _mapping,
    NodeKind.DEFAULTDICT: _defaultdict,
    NodeKind.DATACLASS: _dataclass,
}
