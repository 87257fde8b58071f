"""What a batch cannot carry, what a body may not be, and the digest."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import datetime as dt
import enum
import shelve  # noqa: F401  a batch may name what is imported
import sys
import types
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from trees import Point, Sample, body, digest, trip

from dataloaderjob.batches.decoding import Decoder
from dataloaderjob.batches.encoding import encode
from dataloaderjob.core import layout
from dataloaderjob.core.errors import InputError, RemoteProtocolError, UnsupportedBatch
from dataloaderjob.core.layout import NodeKind, node


class Stays:
    def __setstate__(self, state: Any) -> None:
        pass


class Unpicklable:
    def __reduce__(self) -> Any:
        raise RuntimeError("not this one")


class TensorWithSlots(torch.Tensor):
    __slots__ = ("a",)


def with_slots() -> torch.Tensor:
    return torch.ones(1).as_subclass(TensorWithSlots)


class OwnDefaults(collections.defaultdict):  # type: ignore[type-arg]
    pass


def local_class() -> Any:
    @dataclasses.dataclass
    class Local:
        x: Any

    return Local


@pytest.mark.parametrize(
    ("batch", "said"),
    [
        pytest.param(object(), "batch: object.", id="root"),
        pytest.param([1, {"boxes": [Stays()]}], f'batch[1]["boxes"][0]: {__name__}.Stays', id="path"),
        pytest.param(Point(1, [object()]), "batch.y[0]: object", id="named-tuple"),
        pytest.param(Sample(torch.ones(1), object()), "batch.label: object", id="dataclass"),
        pytest.param({"a": np.array([Stays()])}, f"batch['a'][0]: {__name__}.Stays", id="objects"),
        pytest.param([np.array(["a"], "T")], "batch[0]: numpy.ndarray of dtype String", id="strings"),
        pytest.param([torch.ones(1, device="meta")], "meta", id="meta"),
        pytest.param([torch.ones(1, requires_grad=True) * 2], "call .detach()", id="grad-fn"),
        pytest.param([with_slots()], "TensorWithSlots, a Tensor subclass with a state", id="tensor-subclass"),
        pytest.param({Stays(): torch.ones(1)}, f"batch.keys()[0]: {__name__}.Stays", id="key"),
        pytest.param(OwnDefaults(list), "derives from collections.defaultdict", id="mapping-of-its-own-kind"),
        pytest.param(collections.defaultdict(lambda: 1), "a factory that is not a class", id="factory"),
        pytest.param([local_class()(1)], "defined inside a function", id="local-dataclass"),
        pytest.param([np.str_("a\0")], "NUL", id="numpy-string-that-ends-in-nul"),
        pytest.param([lambda: 1], "function", id="function"),
    ],
)
def test_a_leaf_that_cannot_travel_is_named_with_the_option(batch: Any, said: str) -> None:
    with pytest.raises(UnsupportedBatch) as caught:
        encode(batch, allow_pickle=False)
    assert said.replace('"', "'") in str(caught.value)
    assert "allow_pickle=True" in str(caught.value)


def test_unpicklable_leaf_is_named_with_the_reason() -> None:
    with pytest.raises(
        UnsupportedBatch, match=r"not even pickled: batch\['x'\]: .*Unpicklable .*not this one"
    ):
        encode({"x": Unpicklable()}, allow_pickle=True)


def test_a_batch_within_itself_is_refused() -> None:
    loop: list[Any] = [torch.ones(1)]
    loop.append(loop)
    with pytest.raises(UnsupportedBatch, match="within itself"):
        encode(loop, allow_pickle=False)


def test_tensor_subclass_travels_pickled_if_allowed() -> None:
    found = trip([torch.ones(2).as_subclass(TensorWithSlots)], allow_pickle=True)[0]
    assert type(found) is TensorWithSlots
    assert found.tolist() == [1, 1]


def test_a_trainer_that_did_not_allow_pickle_refuses_a_pickled_leaf() -> None:
    with pytest.raises(RemoteProtocolError, match="allow_pickle=True"):
        Decoder(allow_pickle=False).decode(body([Stays()], allow_pickle=True))


def test_class_missing_in_this_process_is_named() -> None:
    module = types.ModuleType("gone_module")
    module.Gone = dataclasses.make_dataclass("Gone", ["x"])  # type: ignore[attr-defined]
    module.Gone.__module__ = "gone_module"
    base = body([module.Gone(torch.ones(1))])
    with pytest.raises(InputError, match=r"gone_module\.Gone.*top level of a module"):
        Decoder(allow_pickle=False).decode(base)


def test_no_package_is_imported_because_a_feeder_names_it() -> None:
    assert "antigravity" not in sys.modules
    schema = node(NodeKind.NAMEDTUPLE, ("antigravity", "Point"), ())
    with pytest.raises(
        UnsupportedBatch, match=r"'antigravity' is not imported here.*training script imports"
    ):
        Decoder(allow_pickle=False).decode(forged(schema))
    assert "antigravity" not in sys.modules


def test_a_class_is_looked_up_among_loaded_modules_first(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("only_loaded")
    module.There = dataclasses.make_dataclass("There", ["x"])  # type: ignore[attr-defined]
    module.There.__module__ = "only_loaded"
    monkeypatch.setitem(sys.modules, "only_loaded", module)
    assert trip([module.There(torch.ones(1))])[0].x.tolist() == [1]


# Bodies of strangers


def forged(schema: tuple[Any, ...], more: int = 0) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return np.frombuffer(bytearray(layout.pack_schema(schema) + bytes(more)), np.uint8)


def leaf(dtype: Any, itemsize: int, *shape: int, kind: NodeKind = NodeKind.TENSOR) -> tuple[Any, ...]:
    return node(kind, dtype, itemsize, shape, None, 0)


def made(way: str, cls: Any, children: tuple[Any, ...]) -> tuple[Any, ...]:
    return node(NodeKind.MADE, way, cls, node(NodeKind.TUPLE, children))


class Colour(enum.IntEnum):
    RED = 1


@pytest.mark.parametrize(
    ("schema", "why"),
    [
        pytest.param(leaf("float32", 4, 100), "must have 464 bytes, but has 117", id="too-short"),
        pytest.param(leaf("float32", 8, 1), "no tensor dtype", id="wrong-itemsize"),
        pytest.param(leaf("float99", 4, 1), "no tensor dtype", id="unknown-dtype"),
        pytest.param(leaf(("float32",), 4, 1), "no tensor dtype", id="dtype-no-name"),
        pytest.param(leaf("|O", 8, 1, kind=NodeKind.ARRAY), "not allowed", id="objects"),
        pytest.param(leaf([("a", "|O")], 8, 1, kind=NodeKind.ARRAY), "not allowed", id="objects-within"),
        pytest.param(leaf("T", 16, 1, kind=NodeKind.ARRAY), "dtype", id="strings-elsewhere"),
        pytest.param(leaf("<f4", 8, 1, kind=NodeKind.ARRAY), "not allowed", id="array-of-wrong-itemsize"),
        pytest.param(leaf("nonsense", 4, 1, kind=NodeKind.ARRAY), "no array dtype", id="no-dtype"),
        pytest.param(
            leaf("<f4", 4, 2, kind=NodeKind.SCALAR), "a scalar cannot have shape", id="scalar-with-a-shape"
        ),
        pytest.param(
            node(NodeKind.LIST, (leaf("float32", 4, 0, 1 << 62, 1 << 62), node(NodeKind.VALUE, 0))),
            "a leaf of a batch cannot be created",
            id="empty-but-huge",
        ),
        pytest.param(
            node(NodeKind.LIST, (leaf("float32", 4, *[1] * 100), node(NodeKind.VALUE, 0))),
            "a leaf of a batch cannot be created",
            id="hundred-dimensions",
        ),
        pytest.param(
            node(NodeKind.NAMEDTUPLE, ("os", "system"), ()), "not a class", id="function-for-a-class"
        ),
        pytest.param(
            node(NodeKind.NAMEDTUPLE, ("builtins", "int"), ()),
            "not a named tuple",
            id="int-for-a-named-tuple",
        ),
        pytest.param(
            node(NodeKind.NAMEDTUPLE, ("trees", "Point"), (leaf("bool", 1, 0),)),
            "has no 1 fields",
            id="fields",
        ),
        pytest.param(
            node(NodeKind.SEQUENCE, ("builtins", "tuple"), ()),
            "not a collection that a batch may carry",
            id="no-sequence",
        ),
        pytest.param(
            node(NodeKind.MAPPING, ("subprocess", "Popen"), (), ()), "not a mapping that", id="no-mapping"
        ),
        pytest.param(
            node(NodeKind.MAPPING, ("shelve", "Shelf"), (), ()),
            "not a mapping that a batch may carry",
            id="mapping-that-unpickles",
        ),
        pytest.param(
            made("mapping", ("shelve", "DbfilenameShelf"), ()),
            "cannot be created as",
            id="mapping-that-opens",
        ),
        pytest.param(
            node(
                NodeKind.ATTRIBUTES,
                ("maps",),
                (node(NodeKind.MAPPING, ("collections", "ChainMap"), (), ()), node(NodeKind.LIST, ())),
            ),
            "cannot have attributes",
            id="attributes-of-a-library-s-mapping",
        ),
        pytest.param(
            made("instance", ("subprocess", "Popen"), ()), "cannot be created as", id="library-s-own"
        ),
        pytest.param(
            made("instance", ("tempfile", "TemporaryDirectory"), ()), "cannot be created", id="owns-things"
        ),
        pytest.param(made("instance", (__name__, "Stays"), ()), "cannot be created as", id="setstate"),
        pytest.param(
            made("instance", None, ()),
            "this process cannot create an object by the method",
            id="instance-of-no-class",
        ),
        pytest.param(made("int", (__name__, "Colour"), ()), "cannot be created as 'int'", id="enum-as-int"),
        pytest.param(made("enum", ("builtins", "int"), ()), "cannot be created as 'enum'", id="int-as-enum"),
        pytest.param(
            made("tensor", ("builtins", "list"), ()), "issubclass|cannot be created", id="list-as-tensor"
        ),
        pytest.param(made("mapping", (__name__, "Stays"), ()), "cannot be created", id="odd-mapping"),
        pytest.param(
            made("nonsense", None, ()), "this process cannot create an object by the method", id="unknown-way"
        ),
        pytest.param(
            made("datetime.date", ("os", "system"), ()),
            "this process cannot create an object by the method",
            id="class-not-asked-for",
        ),
        pytest.param(
            node(NodeKind.ATTRIBUTES, ("a",), (made("builtins.range", None, ()), node(NodeKind.LIST, ()))),
            "cannot have attributes",
            id="attributes-of-what-is-shared",
        ),
        pytest.param(
            node(NodeKind.DATACLASS, ("builtins", "list"), (), ()), "not a dataclass", id="no-dataclass"
        ),
        pytest.param(
            node(NodeKind.DEFAULTDICT, ("os", "abort"), (), ()), "not a class", id="function-for-a-factory"
        ),
    ],
)
def test_a_forged_schema_is_refused_with_the_reason(schema: Any, why: str) -> None:
    with pytest.raises((RemoteProtocolError, UnsupportedBatch), match=why):
        Decoder(allow_pickle=False).decode(forged(schema, 64))


@pytest.mark.parametrize(
    "schema",
    [
        pytest.param(made("builtins.range", None, ()), id="range-of-nothing"),
        pytest.param(made("torch.dtype", None, ()), id="dtype-of-no-name"),
        pytest.param(made("mapping", ("collections", "UserDict"), ()), id="mapping-of-no-dict"),
        pytest.param(
            made("objects", None, (node(NodeKind.LIST, ()), node(NodeKind.TUPLE, ()))), id="objects-too-few"
        ),
        pytest.param(
            node(NodeKind.SET, (made("collections.deque", None, (node(NodeKind.LIST, ()),)),)),
            id="unhashable",
        ),
    ],
)
def test_content_that_cannot_be_built_is_refused(schema: Any) -> None:
    with pytest.raises(RemoteProtocolError, match="cannot be"):
        Decoder(allow_pickle=False).decode(forged(schema))


def test_a_known_schema_with_a_shorter_body_is_refused() -> None:
    decoder, base = Decoder(allow_pickle=False), body([torch.ones(100), 5])
    decoder.decode(base)
    for size in (0, 4, 8, 50, 100, 300, len(base) - 1):
        with pytest.raises(RemoteProtocolError):
            decoder.decode(base[:size])


def test_excess_bytes_after_a_body_are_refused() -> None:
    base = np.append(body([torch.ones(100)]), np.zeros(1, np.uint8))
    with pytest.raises(RemoteProtocolError, match="must have 464 bytes, but has 465"):
        Decoder(allow_pickle=False).decode(base)


@given(st.binary(max_size=300))
def test_any_bytes_decode_or_are_refused(data: bytes) -> None:
    with contextlib.suppress(RemoteProtocolError, UnsupportedBatch):
        Decoder(allow_pickle=False).decode(np.frombuffer(bytearray(data), np.uint8))


@given(st.data())
@settings(deadline=None, max_examples=300)
def test_a_damaged_body_decodes_or_is_refused(data: st.DataObject) -> None:
    base = body([torch.ones(3), {"a": np.ones(2), "b": "text"}, Point(1, torch.ones(2).bfloat16()), [1, "x"]])
    base[data.draw(st.integers(0, len(base) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(RemoteProtocolError, UnsupportedBatch):
        Decoder(allow_pickle=False).decode(base)


# Digest


@pytest.mark.parametrize(
    ("a", "b"),
    [
        pytest.param([1], (1,), id="list-and-tuple"),
        pytest.param([1, 2], [[1, 2]], id="nesting"),
        pytest.param([[1], 2], [[1, 2]], id="place-of-a-bracket"),
        pytest.param(1, True, id="int-and-bool"),
        pytest.param(0.0, -0.0, id="signs-of-zero"),
        pytest.param("a", b"a", id="str-and-bytes"),
        pytest.param(["ab", "c"], ["a", "bc"], id="split-of-strings"),
        pytest.param({"a": 1, "b": 2}, {"b": 2, "a": 1}, id="order-of-keys"),
        pytest.param({"a": 1}, collections.OrderedDict(a=1), id="class-of-a-dict"),
        pytest.param(torch.zeros(2, 3), torch.zeros(3, 2), id="shape"),
        pytest.param(torch.zeros(2), torch.zeros(2, dtype=torch.int32), id="dtype"),
        pytest.param(torch.zeros(2), np.zeros(2, np.float32), id="tensor-and-array"),
        pytest.param(torch.tensor(1.0), 1.0, id="tensor-and-float"),
        pytest.param(np.float32(1), np.ones((), np.float32), id="scalar-and-array"),
        pytest.param(torch.zeros(2), torch.tensor([0.0, 1e-45]), id="smallest-difference"),
        pytest.param(torch.zeros(0, 2), torch.zeros(0, 3), id="shape-of-empties"),
        pytest.param(
            [[], *b"builtins.list 0\n"], [*b"builtins.list 0\n", []], id="numbers-that-spell-what-a-list-is"
        ),
    ],
)
def test_different_batches_have_different_digests(a: Any, b: Any) -> None:
    assert digest(a) != digest(b)


@pytest.mark.parametrize(
    ("a", "b"),
    [
        pytest.param(torch.tensor([float("nan")]), torch.tensor([float("nan")]), id="nan"),
        pytest.param({"x", "y", "z"}, {"z", "y", "x"}, id="order-of-a-set"),
        pytest.param(torch.ones(2, 3).T.contiguous().T, torch.ones(2, 3), id="strides"),
        pytest.param(torch.ones(2, requires_grad=True), torch.ones(2), id="requires-grad"),
        pytest.param(dt.date(2026, 1, 1), dt.date(2026, 1, 1), id="object"),
    ],
)
def test_equal_batches_have_equal_digests(a: Any, b: Any) -> None:
    assert digest(a) == digest(b)
