"""Encoding of a batch tree into bytes: a single walk of the tree writes the schema and collects views of the leaves.

A tensor, array or object that occurs twice in a batch is still a single object when it arrives, as in torch. Two views
of the same storage become two tensors with separate storages.
"""

from __future__ import annotations

import dataclasses
import io
import pickle
import types
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import torch

from dataloaderjob.batches import allowed, objects, special
from dataloaderjob.batches.special import StaysError, attributes_beside
from dataloaderjob.core import layout, values
from dataloaderjob.core.errors import UnsupportedBatch
from dataloaderjob.core.layout import ClassName, NodeKind
from dataloaderjob.shipping import user_code

BufferPart = bytes | memoryview
Schema = tuple[Any, ...]
_ZEROS = bytes(layout.ALIGNMENT)
_MAX_STEPS = 20
"""Maximum number of steps of a leaf's path in a message."""
_SMALL_NBYTES = 4096
"""Size in bytes below which adjacent parts are joined. Copying 4 KiB takes less time than a separate iovec."""
_KEYS = "numbers, strings, bytes and tuples of these"
_SAME = int(NodeKind.SAME)
_SEQUENCES: dict[type, NodeKind] = {
    list: NodeKind.LIST,
    tuple: NodeKind.TUPLE,
    set: NodeKind.SET,
    frozenset: NodeKind.FROZENSET,
}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EncodedBatch:
    """A batch that is ready to be sent. Its buffers are views of the tensors and keep the tensors alive."""

    nbytes: int
    buffers: list[BufferPart]
    """Non-empty, one-dimensional buffers, `nbytes` bytes in total."""


def encode(batch: Any, *, allow_pickle: bool) -> EncodedBatch:
    """Encodes a batch tree without copying its tensors and arrays.

    If a tensor is modified before the buffers are sent, the modified data is sent. Raises UnsupportedBatch, which names
    the leaf that cannot be sent and the option that allows it.
    """
    encoder = _Encoder(allow_pickle)
    try:
        schema = encoder.node(batch, 0) or encoder.value(batch)
    except _RefusedError as refused:
        raise UnsupportedBatch(refused.message(allow_pickle)) from refused.__cause__
    except RecursionError as exc:
        raise UnsupportedBatch(
            "this batch is nested deeper than Python's recursion limit allows: let collate_fn return a flatter one"
        ) from exc
    head = layout.pack_schema(schema)
    parts: list[BufferPart] = [head]
    at = len(head)
    for view, nbytes in encoder.buffers:
        offset = layout.aligned(at)
        parts.append(_ZEROS[: offset - at])
        if nbytes:
            parts.append(view)
        at = offset + nbytes
    if encoder.values:
        packed = values.pack_buffer(encoder.values)
        parts.append(packed)
        at += len(packed)
    return EncodedBatch(nbytes=at, buffers=_join_small(parts))


def _join_small(parts: Iterable[BufferPart]) -> list[BufferPart]:
    joined: list[BufferPart] = []
    small: list[BufferPart] = []
    for part in parts:
        if len(part) < _SMALL_NBYTES:
            small.append(part)
            continue
        if small:
            joined.append(b"".join(small))
            small = []
        joined.append(part)
    rest = b"".join(small)
    if rest:
        joined.append(rest)
    return joined


class _RefusedError(Exception):
    """The error for a leaf that cannot be sent. The path to the leaf is assembled as the error propagates up the
    tree."""

    def __init__(self, leaf: object, why: str) -> None:
        super().__init__(why)
        self.leaf = leaf
        self.why = why
        self.path: list[str] = []

    def message(self, allow_pickle: bool) -> str:
        steps = self.path[::-1]
        if len(steps) > _MAX_STEPS:
            steps[_MAX_STEPS:] = ["..."]
        path = "batch" + "".join(steps)
        found = f"{path}: {user_code.full_name(type(self.leaf))}{self.why}"
        if allow_pickle:
            return f"this leaf cannot be sent to another process, not even pickled: {found}"
        return (
            f"this leaf cannot be sent from a feeder to the trainer: {found}. Let collate_fn return "
            "tensors, arrays, numbers, strings, dates, paths, enums or plain objects in lists, tuples, "
            "dicts or dataclasses, or pass allow_pickle=True to the DataLoader, or to "
            "dataloaderjob.context() with another library's loader"
        )


class _Encoder:
    """One walk over a batch. `node` returns the schema of an item, or None for a tree of plain values."""

    def __init__(self, allow_pickle: bool) -> None:
        self.allow_pickle = allow_pickle
        self.buffers: list[tuple[BufferPart, int]] = []
        self.values: list[Any] = []
        # (schema, object) by the object's id. The object is kept alive so that no other object gets the same id.
        self.seen: dict[int, tuple[Schema, Any]] = {}
        self.num_made = 0

    def node(self, item: Any, depth: int) -> Schema | None:
        kind = type(item)
        if kind in values.SCALARS:
            return None
        if depth > layout.MAX_DEPTH:
            raise _RefusedError(item, f", nested deeper than {layout.MAX_DEPTH} levels (or within itself)")
        return _HANDLERS.get(kind, _Encoder._other)(self, item, depth)

    def value(self, item: Any) -> Schema:
        """Adds a whole tree of plain values and returns its schema. The schema does not depend on the values."""
        self.values.append(item)
        return layout.node(NodeKind.VALUE, len(self.values) - 1)

    def refuse(self, item: Any, why: str = "") -> Schema:
        """Pickles the leaf if that is allowed. Raises _RefusedError otherwise."""
        if not self.allow_pickle:
            raise _RefusedError(item, why)
        out = io.BytesIO()
        try:
            _LeafPickler(out, protocol=5).dump(item)
        except Exception as exc:  # user code: __reduce__ and __getstate__
            raise _RefusedError(item, f"{why} ({type(exc).__name__}: {exc})") from exc
        self.values.append(out.getvalue())
        return layout.node(NodeKind.PICKLE, len(self.values) - 1)

    def children(
        self, items: Iterable[Any], depth: int, label: Callable[[int], str], *, plain: bool = False
    ) -> tuple[Schema, ...] | None:
        """Returns the schemas of the children. If all children are plain values, and the parent may be one too
        (`plain`), returns None."""
        items = list(items)
        found: list[Schema | None] = []
        try:
            for item in items:
                # If an item is refused, the length of `found` is the item's index.
                found.append(self.node(item, depth + 1))
        except _RefusedError as refused:
            refused.path.append(label(len(found)))
            raise
        if plain and not any(found):
            return None
        return tuple([s or self.value(i) for s, i in zip(found, items, strict=True)])

    # Leaves

    def _tensor(self, t: torch.Tensor, depth: int, flags: int = 0) -> Schema:
        again = self.seen.get(id(t))
        if again is not None:
            return again[0]
        known = special.TENSOR_TYPES.get(t.dtype)
        if known is None or not t.is_cpu or t.layout is not torch.strided or t.is_nested:
            return self._object(t, depth)
        whole = t
        if t.requires_grad:
            if not t.is_leaf:
                return self.refuse(
                    t, " with a grad_fn (an autograd graph cannot leave its process: call .detach())"
                )
            flags |= layout.REQUIRES_GRAD
            t = t.detach()
        if t.is_conj() or t.is_neg():
            t = t.resolve_conj().resolve_neg()
        shape, strides = tuple(t.shape), None
        if not t.is_contiguous():
            if layout.is_dense(shape, t.stride()):
                strides = t.stride()
                t = t.as_strided((t.numel(),), (1,))
            else:
                t = t.contiguous()
        flat = (t.view(known.carrier) if known.carrier else t).numpy()
        self.seen[id(whole)] = (_SAME, len(self.buffers)), whole
        self._buffer(flat)
        return layout.node(NodeKind.TENSOR, known.name, flat.itemsize, shape, strides, flags)

    def _array(self, a: np.ndarray[Any, Any], depth: int, kind: NodeKind = NodeKind.ARRAY) -> Schema:
        again = self.seen.get(id(a))
        if again is not None:
            return again[0]
        descr = special.describe(a.dtype)
        if descr is None:
            return self._object(a, depth)
        self.seen[id(a)] = (_SAME, len(self.buffers)), a
        shape, itemsize, strides = a.shape, a.itemsize, None
        if not a.flags.c_contiguous:
            strides = tuple([s // itemsize for s in a.strides]) if itemsize else ()
            whole = all(s % itemsize == 0 for s in a.strides) if itemsize else False
            if a.size and whole and layout.is_dense(shape, strides):
                a = a.transpose(np.argsort(a.strides, kind="stable")[::-1])
            if not a.flags.c_contiguous:
                a, strides = np.ascontiguousarray(a), None
        self._buffer(a)
        return layout.node(kind, descr, itemsize, shape, strides, 0)

    def _scalar(self, s: np.generic) -> Schema:
        a = np.asarray(s)
        if a.dtype.kind in "SU" and a[()] != s:
            return self.refuse(s, " that ends with NUL characters, which numpy drops")
        return self._array(a, 0, NodeKind.SCALAR)

    def _buffer(self, a: np.ndarray[Any, Any]) -> None:
        """Adds the bytes of `a`, which is in C order."""
        nbytes = a.nbytes
        self.buffers.append((a.reshape(-1).view(special.BYTE).data if nbytes else b"", nbytes))

    # Containers

    def _sequence(self, items: Any, depth: int) -> Schema | None:
        if set(map(type, items)) <= values.SCALARS:
            return None
        children = self.children(items, depth, lambda i: f"[{i}]", plain=True)
        return children and layout.node(_SEQUENCES[type(items)], children)

    def _dict(self, items: dict[Any, Any], depth: int) -> Schema | None:
        keys = self._keys(items)
        if keys is None:
            return self._pairs(items, depth)
        children = self.children(items.values(), depth, lambda i: f"[{keys[i]!r}]", plain=True)
        return children and layout.node(NodeKind.DICT, keys, children)

    def _pairs(self, items: Mapping[Any, Any], depth: int) -> Schema:
        """Encodes a dict with keys that are not plain values, such as enums, named tuples or paths."""
        keys = self._part(list(items), depth, ".keys()")
        own = self.children(items.values(), depth + 1, lambda i: f"[{list(items)[i]!r}]")
        pairs = layout.node(NodeKind.TUPLE, (keys, layout.node(NodeKind.LIST, own)))
        return self._made("pairs", None, pairs)

    def _mapping(self, items: Mapping[Any, Any], depth: int) -> Schema:
        cls = user_code.class_name(type(items))
        if cls is None:
            return self.refuse(items, objects.LOCAL)
        own = {key: items[key] for key in items}
        made = None if objects.is_own_dict(items) else objects.made_from_dict(type(items), own)
        if made is None:
            return self._object(items, depth, ", which cannot be created from a dict")
        try:
            attributes = attributes_beside(items, made)
        except StaysError as exc:
            return self.refuse(items, str(exc))
        if attributes and not objects.takes_attributes(type(items)):
            return self.refuse(items, f" with attributes ({', '.join(attributes)})")
        keys = self._keys(own)
        if keys is None:
            found = self._made("mapping", cls, self._pairs(own, depth + 1))
        else:
            children = self.children(own.values(), depth, lambda i: f"[{keys[i]!r}]")
            found = layout.node(NodeKind.MAPPING, cls, keys, children)
        return self._attributes(found, attributes, depth)

    def _defaultdict(self, items: defaultdict[Any, Any], depth: int) -> Schema:
        factory: Any = items.default_factory
        keys = self._keys(items)
        name = user_code.class_name(factory) if isinstance(factory, type) else None
        if factory is not None and name is None:
            return self.refuse(items, " with a factory that is not a class")
        if factory is not None and not allowed.is_factory(factory):
            return self.refuse(
                items, f" with the factory {user_code.full_name(factory)}, which batches do not carry"
            )
        if keys is None:
            if name is None:
                return self.refuse(items, f" with keys other than {_KEYS}")
            return self._made("defaultdict", name, self._pairs(items, depth + 1))
        children = self.children(items.values(), depth, lambda i: f"[{keys[i]!r}]")
        return layout.node(NodeKind.DEFAULTDICT, name, keys, children)

    def _keys(self, items: Mapping[Any, Any]) -> tuple[Any, ...] | None:
        keys = tuple(items)
        return keys if all(map(values.is_key, keys)) else None

    def _namedtuple(self, items: Any, depth: int) -> Schema:
        cls, fields = user_code.class_name(type(items)), type(items)._fields
        if cls is None or len(fields) != len(items):
            return self.refuse(items, objects.LOCAL if cls is None else " with more items than fields")
        if not objects.is_namedtuple(type(items)):
            return self.refuse(items, allowed.why_not(type(items), tuple))
        try:
            attributes = attributes_beside(items)
        except StaysError as exc:
            return self.refuse(items, str(exc))
        children = self.children(items, depth, lambda i: f".{fields[i]}")
        return self._attributes(layout.node(NodeKind.NAMEDTUPLE, cls, children), attributes, depth)

    def _class_of_items(self, items: tuple[Any, ...], depth: int) -> Schema:
        cls = user_code.class_name(type(items))
        return layout.node(NodeKind.SEQUENCE, cls, self.children(items, depth, lambda i: f"[{i}]"))

    def _dataclass(self, item: Any, depth: int) -> Schema:
        cls = user_code.class_name(type(item))
        if cls is None:
            return self.refuse(item, objects.LOCAL)
        if not objects.is_dataclass_of_batches(type(item)):
            return self.refuse(item, allowed.why_not(type(item)))
        names = [f.name for f in dataclasses.fields(item) if hasattr(item, f.name)]
        # Attributes in addition to fields, except the one added by typing (__orig_class__).
        names += [n for n in getattr(item, "__dict__", ()) if n not in names and not n.startswith("__")]
        if more := objects.not_fields(type(item), names):
            return self.refuse(
                item, f", a library's dataclass with an attribute {more[0]!r} that is not a field"
            )
        own = [getattr(item, name) for name in names]
        return layout.node(
            NodeKind.DATACLASS, cls, tuple(names), self.children(own, depth, lambda i: f".{names[i]}")
        )

    # Decomposed objects

    def _object(self, item: Any, depth: int, why: str = "") -> Schema:
        again = self.seen.get(id(item))
        if again is not None:
            return again[0]
        try:
            way, cls, content, attributes = objects.take_apart(item)
        except StaysError as exc:
            return self.refuse(item, str(exc) or why)
        try:
            child = self.node(content, depth + 1) or self.value(content)
        except _RefusedError as refused:
            if type(content) is tuple and way != "tuple":
                del refused.path[-1:]  # an index into the content is not an index into the object
            raise
        if objects.CARRIERS[way].shared:
            # This comes before the object's attributes, because they may refer back to the object.
            self.seen[id(item)] = layout.node(NodeKind.AGAIN, self.num_made), item
        return self._attributes(self._made(way, cls, child), attributes, depth)

    def _made(self, way: str, cls: ClassName | None, child: Schema) -> Schema:
        self.num_made += 1
        return layout.node(NodeKind.MADE, way, cls, child)

    def _attributes(self, node: Schema, attributes: dict[str, Any], depth: int) -> Schema:
        if not attributes:
            return node
        names = tuple(attributes)
        children = self.children(attributes.values(), depth, lambda i: f".{names[i]}")
        return layout.node(NodeKind.ATTRIBUTES, names, (node, *(children or ())))

    def _part(self, item: Any, depth: int, label: str) -> Schema:
        try:
            return self.node(item, depth + 1) or self.value(item)
        except _RefusedError as refused:
            refused.path.append(label)
            raise

    def _other(self, item: Any, depth: int) -> Schema | None:
        """Encodes an item whose type `_HANDLERS` does not list, such as an object of a subclass."""
        if isinstance(item, np.generic):
            return self._scalar(item)
        if isinstance(item, np.memmap):
            return self._array(np.asarray(item), depth)
        if isinstance(item, Mapping):
            return self._mapping(item, depth)
        if isinstance(item, tuple):
            if hasattr(item, "_fields"):
                return self._namedtuple(item, depth)
            if is_class_of_items(type(item)):
                return self._class_of_items(item, depth)
        if objects.is_dataclass(item):
            return self._dataclass(item, depth)
        return self._object(item, depth)


def is_class_of_items(cls: type) -> bool:
    """Returns True for torch.Size, and for tuple classes implemented in C, such as torch.return_types.max. Their
    constructors accept one iterable."""
    own = allowed.own_names(cls)
    return cls is torch.Size or (
        allowed.mro(cls) == (cls, tuple, object)
        and type(own.get("n_sequence_fields")) is int
        and type(own.get("__new__")) is types.BuiltinMethodType
    )


class _LeafPickler(pickle.Pickler):
    """A pickler of one leaf in a feeder. It pickles classes by name, even those that the feeder received by value."""

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, type) and obj.__module__ != "builtins" and "<locals>" not in obj.__qualname__:
            return user_code.find_class, (obj.__module__, obj.__qualname__)
        return NotImplemented


_HANDLERS: dict[type, Callable[[_Encoder, Any, int], Schema | None]] = {
    torch.Tensor: _Encoder._tensor,  # noqa: SLF001  this module's own
    torch.nn.Parameter: lambda e, t, depth: e._tensor(t, depth, layout.PARAMETER),  # noqa: SLF001
    np.ndarray: _Encoder._array,  # noqa: SLF001
    **dict.fromkeys(_SEQUENCES, _Encoder._sequence),  # noqa: SLF001
    dict: _Encoder._dict,  # noqa: SLF001
    OrderedDict: _Encoder._mapping,  # noqa: SLF001
    defaultdict: _Encoder._defaultdict,  # noqa: SLF001
    types.MappingProxyType: _Encoder._mapping,  # noqa: SLF001
}
