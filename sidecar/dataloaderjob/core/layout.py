"""The bytes of a batch: header, schema, leaf buffers, values. Pure: imports neither torch nor numpy.

    u64 digest, u64 identity
    u16 magic, u8 version, u8 0, u32 schema bytes, u64 digest of the schema
    schema          one value of `core.values`: the tree, with a tuple for each node
    leaf buffers    in the order of the tree, depth first, each at a multiple of 64 bytes
    values          one list of `core.values`: the plain values of the tree, to the end of the body; absent if none

The first two words are the seal of a batch (`core.digests`). The digest covers every byte after it. The identity stands
for the ticket and the keys of the batch.

The schema describes the structure, types, shapes and offsets, but no content. Therefore, the header after the seal,
which includes the schema's digest, is the same for every batch of one kind. A decoder caches the parsed schema under
this header. Numbers and strings, which vary, follow in the values.

A node is a tuple that starts with its kind:

| node | meaning |
|------|---------|
| (VALUE, i) | value number i, which may be a large tree of plain values |
| (PICKLE, i) | value number i is a pickle |
| (TENSOR ARRAY SCALAR, dtype, itemsize, shape, strides, flags) | a leaf buffer; see `Buffer` |
| (LIST TUPLE SET FROZENSET, children) | |
| (NAMEDTUPLE SEQUENCE, class, children) | SEQUENCE: built from an iterable, such as torch.Size |
| (DICT, keys, children) | |
| (MAPPING, class, keys, children) | rebuilt as class(dict) |
| (DEFAULTDICT, factory or None, keys, children) | |
| (DATACLASS, class, names, children) | |
| (MADE, way, class or None, child) | an object that `batches.objects` creates in this way from this content |
| (ATTRIBUTES, names, children) | the first child, with the others in its `__dict__` |
| (SAME, i) | leaf buffer number i again: one tensor or array in two places |
| (AGAIN, i) | MADE object number i again; MADE objects are numbered in the order in which their contents end |

A class is (module, qualified name).
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

from dataloaderjob.core import values
from dataloaderjob.core.errors import RemoteProtocolError

MAGIC = 0x4A42
VERSION = 5
SEAL = struct.Struct("<QQ")
HEADER = struct.Struct("<QQHBBIQ")
ALIGNMENT = 64
MAX_SCHEMA_NBYTES = 64 * 1024 * 1024
MAX_DEPTH = values.MAX_DEPTH // 2 - 8
"""Maximum depth of a batch: 200. Each level takes two levels of the schema's value. The rest are for keys and
dtypes."""


class NodeKind(IntEnum):
    VALUE = 0
    PICKLE = 1
    TENSOR = 2
    ARRAY = 3
    SCALAR = 4
    """A numpy scalar: an array without dimensions."""
    SAME = 5
    AGAIN = 6
    LIST = 8
    TUPLE = 9
    SET = 10
    FROZENSET = 11
    NAMEDTUPLE = 12
    SEQUENCE = 13
    DICT = 14
    MAPPING = 15
    DEFAULTDICT = 16
    DATACLASS = 17
    MADE = 18
    ATTRIBUTES = 19


REQUIRES_GRAD = 1
PARAMETER = 2
"""Bits of a TENSOR's flags."""

_BUFFERS = frozenset({NodeKind.TENSOR, NodeKind.ARRAY, NodeKind.SCALAR})
_BARE = frozenset({NodeKind.LIST, NodeKind.TUPLE, NodeKind.SET, NodeKind.FROZENSET})
_WITH_CLASS = frozenset({NodeKind.NAMEDTUPLE, NodeKind.SEQUENCE})
_WITH_ATTRIBUTES = frozenset({NodeKind.NAMEDTUPLE, NodeKind.MAPPING, NodeKind.MADE})

ClassName = tuple[str, str]
"""(module, qualified name)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Buffer:
    """One leaf buffer: its place in the body and its interpretation."""

    kind: NodeKind
    dtype: Any
    """torch's name for a tensor's dtype, or numpy's descriptor of an array's dtype, as a plain value."""
    itemsize: int
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None
    """Strides in items, or None for C order."""
    flags: int
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One node of a parsed schema."""

    kind: NodeKind
    index: int = -1
    """Number of the value, of the leaf buffer or of the MADE object."""
    cls: ClassName | None = None
    way: str = ""
    """Name of the carrier that creates a MADE node (`batches.objects`)."""
    keys: tuple[Any, ...] = ()
    """Keys of a dict, names of a dataclass's fields, or names of attributes."""
    children: tuple[Node, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """A parsed schema: the tree, and the offsets of buffers and values. Offsets are relative to the body."""

    root: Node
    buffers: tuple[Buffer, ...]
    num_values: int
    num_made: int
    values_offset: int
    """Offset of the end of the last leaf buffer. The body has at least this many bytes."""


def node(kind: NodeKind, *rest: Any) -> tuple[Any, ...]:
    """Builds a schema's node from the parts listed in the table above."""
    return (int(kind), *rest)


def aligned(offset: int) -> int:
    return -(-offset // ALIGNMENT) * ALIGNMENT


def pack_schema(node: tuple[Any, ...]) -> bytes:
    """Returns the header and the schema, which are the first bytes of a body. The seal is not filled in yet."""
    schema = values.pack(node)
    return HEADER.pack(0, 0, MAGIC, VERSION, 0, len(schema), digest(schema)) + schema


def digest(schema: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(schema, digest_size=8).digest(), "little")


def key_nbytes(head: bytes | memoryview) -> int:
    """Reads the total size of header and schema from the first bytes of a body. Raises RemoteProtocolError if they are
    not a batch's."""
    if len(head) < HEADER.size:
        raise RemoteProtocolError(f"a batch must have at least {HEADER.size} bytes, but has {len(head)}")
    _, _, magic, version, _, nbytes, _ = HEADER.unpack_from(head)
    if magic != MAGIC or version != VERSION:
        found = bytes(head[SEAL.size : SEAL.size + 3]).hex()
        raise RemoteProtocolError(
            f"expected a batch of version {VERSION}, got one with {found} after its digests"
        )
    if nbytes > MAX_SCHEMA_NBYTES:
        raise RemoteProtocolError(f"a batch's schema of {nbytes} bytes exceeds {MAX_SCHEMA_NBYTES}")
    return HEADER.size + int(nbytes)


def parse(key: bytes) -> Layout:
    """Checks and parses a header and schema. Raises RemoteProtocolError on anything else."""
    if len(key) != key_nbytes(key):
        raise RemoteProtocolError(f"a batch's schema ends after {len(key)} of {key_nbytes(key)} bytes")
    if HEADER.unpack_from(key)[-1] != digest(key[HEADER.size :]):
        raise RemoteProtocolError("a batch's schema does not match its digest")
    schema = values.unpack(key[HEADER.size :])
    parser = _Parser(end=len(key))
    try:
        root = parser.node(schema, 0)
    except (TypeError, ValueError, LookupError, RecursionError) as exc:
        raise RemoteProtocolError(f"a batch's schema is malformed: {exc}") from exc
    if parser.indices != set(range(len(parser.indices))):
        raise RemoteProtocolError("a batch's schema omits some of its values")
    return Layout(
        root=root,
        buffers=tuple(parser.buffers),
        num_values=len(parser.indices),
        num_made=parser.num_made,
        values_offset=parser.end,
    )


@dataclass(slots=True)
class _Parser:
    end: int
    buffers: list[Buffer] = field(default_factory=list)
    indices: set[int] = field(default_factory=set)
    num_made: int = 0

    def node(self, schema: tuple[Any, ...], depth: int) -> Node:
        if type(schema) is not tuple:
            raise TypeError(f"a node must be a tuple, but is a {type(schema).__name__}")
        if depth > MAX_DEPTH:
            raise ValueError(f"its nodes are nested deeper than {MAX_DEPTH} levels")
        kind = NodeKind(schema[0])
        if kind in _BUFFERS:
            return self._buffer(kind, *schema[1:])
        if kind in (NodeKind.VALUE, NodeKind.PICKLE):
            (index,) = schema[1:]
            self.indices.add(_natural(index))
            return Node(kind=kind, index=index)
        if kind in (NodeKind.SAME, NodeKind.AGAIN):
            return self._named_twice(kind, *schema[1:])
        if kind is NodeKind.MADE:
            return self._made(*schema[1:], depth=depth)
        if kind is NodeKind.ATTRIBUTES:
            return self._attributes(*schema[1:], depth=depth)
        cls: ClassName | None = None
        keys: tuple[Any, ...] = ()
        if kind in _BARE:
            (children,) = schema[1:]
        elif kind in _WITH_CLASS:
            cls, children = _class_name(schema[1]), schema[2]
        elif kind is NodeKind.DICT:
            _, keys, children = schema
        else:
            _, cls, keys, children = schema
            cls = None if kind is NodeKind.DEFAULTDICT and cls is None else _class_name(cls)
        if keys or kind >= NodeKind.DICT:
            _check_keys(kind, keys, len(children))
        return Node(kind=kind, cls=cls, keys=keys, children=self._children(children, depth))

    def _children(self, children: tuple[Any, ...], depth: int) -> tuple[Node, ...]:
        nodes = []
        for child in _sized(children):  # a comprehension would add a frame for each level
            nodes.append(self.node(child, depth + 1))
        return tuple(nodes)

    def _named_twice(self, kind: NodeKind, index: int) -> Node:
        """Returns a node that refers to an earlier one. The earlier node exists when this one is assembled."""
        if _natural(index) >= (len(self.buffers) if kind is NodeKind.SAME else self.num_made):
            raise ValueError(f"{kind.name} refers to number {index}, which does not come before it")
        return Node(kind=self.buffers[index].kind if kind is NodeKind.SAME else kind, index=index)

    def _made(self, way: str, cls: tuple[str, ...] | None, child: tuple[Any, ...], *, depth: int) -> Node:
        if type(way) is not str:
            raise TypeError(f"{way!r} is not a way to create an object")
        name = None if cls is None else _class_name(cls)
        content = self.node(child, depth + 1)
        self.num_made += 1
        return Node(kind=NodeKind.MADE, index=self.num_made - 1, way=way, cls=name, children=(content,))

    def _attributes(self, names: tuple[Any, ...], children: tuple[Any, ...], *, depth: int) -> Node:
        if len(_sized(names)) != len(_sized(children)) - 1 or not names:
            raise ValueError(
                f"expected attributes, and one child more than attributes, got {len(names)} attributes and "
                f"{len(children)} children"
            )
        if not all(map(_is_attribute, names)):
            raise ValueError("an attribute has an invalid name")
        if children[0][0] not in _WITH_ATTRIBUTES:
            raise ValueError("a node has attributes, but cannot have any")
        return Node(kind=NodeKind.ATTRIBUTES, keys=names, children=self._children(children, depth))

    def _buffer(
        self,
        kind: NodeKind,
        dtype: Any,
        itemsize: int,
        shape: tuple[int, ...],
        strides: tuple[int, ...] | None,
        flags: int,
    ) -> Node:
        nbytes = _natural(itemsize)
        for size in _sized(shape):
            nbytes *= _natural(size)
        if strides is not None and not is_dense(shape, _sized(strides)):
            raise ValueError(f"strides {strides} for shape {shape} leave gaps or overlap")
        offset = aligned(self.end)
        self.end = offset + nbytes
        self.buffers.append(
            Buffer(
                kind=kind, dtype=dtype, itemsize=itemsize, shape=shape, strides=strides,
                flags=_natural(flags), offset=offset, nbytes=nbytes,
            )
        )  # fmt: skip
        return Node(kind=kind, index=len(self.buffers) - 1)


def is_dense(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Returns True if the items fill one block of memory without gaps or overlaps, in any order of dimensions."""
    if len(shape) != len(strides):
        return False
    expected = 1
    long = [(stride, size) for stride, size in zip(strides, shape, strict=True) if size != 1]
    for stride, size in sorted(long):
        if stride != expected:
            return False
        expected *= size
    return all(stride >= 0 for stride in strides)


def _natural(number: int) -> int:
    if type(number) is not int or number < 0:
        raise ValueError(f"{number!r} is not a natural number")
    return number


def _sized(items: tuple[Any, ...]) -> tuple[Any, ...]:
    if type(items) is not tuple:
        raise TypeError(f"expected a tuple, got a {type(items).__name__}")
    return items


def _class_name(name: tuple[str, ...]) -> ClassName:
    module, qualname = _sized(name)
    if type(module) is not str or type(qualname) is not str:
        raise TypeError(f"{name!r} does not name a class")
    return module, qualname


def _check_keys(kind: NodeKind, keys: tuple[Any, ...], count: int) -> None:
    if len(_sized(keys)) != count:
        raise ValueError(f"{count} children must have one key each, but {len(keys)} keys were found")
    if not all(map(values.is_key, keys)):
        raise ValueError("a key of a mapping has an invalid type")
    if kind is NodeKind.DATACLASS and not all(map(_is_attribute, keys)):
        raise ValueError("a field of a dataclass has an invalid name")


def _is_attribute(name: object) -> bool:
    return type(name) is str and not name.startswith("__")
