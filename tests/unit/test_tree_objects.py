"""Objects that travel without a pickle: taken apart, and made again by name."""

from __future__ import annotations

import array
import collections
import contextlib
import dataclasses
import datetime as dt
import enum
import functools
import pathlib
import sys
import types
import uuid
import zoneinfo
from decimal import Decimal
from fractions import Fraction
from typing import Any, NamedTuple, Self

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from trees import Point, body, digest, trip

from dataloaderjob.batches.decoding import Decoder
from dataloaderjob.batches.encoding import encode
from dataloaderjob.core import layout, values
from dataloaderjob.core.errors import RemoteProtocolError, UnsupportedBatch


class Colour(enum.Enum):
    RED = "r"
    BLUE = "b"


class Number(enum.IntEnum):
    ONE = 1


class Word(enum.StrEnum):
    YES = "yes"


class Bits(enum.Flag):
    A = 1
    B = 2


class IntBits(enum.IntFlag):
    A = 1
    B = 2


class Batch:
    """As users write them."""

    def __init__(self, samples: Any) -> None:
        self.inp = torch.stack(list(samples))
        self.names = ["a", "b"]
        self._hidden = {"kind": Colour.RED}

    def pin_memory(self) -> Batch:
        self.inp = self.inp.pin_memory()
        return self


class BoxFormat(enum.Enum):
    XYXY = "XYXY"


class TVTensor(torch.Tensor):
    """As torchvision's: made by as_subclass, operations give plain tensors."""

    @classmethod
    def _wrap(cls, tensor: torch.Tensor) -> Any:
        return tensor.as_subclass(cls)

    def __new__(cls, data: Any) -> Any:
        return cls._wrap(torch.as_tensor(data))

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


class Boxes(TVTensor):
    format: BoxFormat
    canvas_size: tuple[int, int]

    def __new__(cls, data: Any, *, format: BoxFormat, canvas_size: tuple[int, int]) -> Any:  # noqa: A002
        boxes = cls._wrap(torch.as_tensor(data))
        boxes.format, boxes.canvas_size = format, canvas_size
        return boxes


class OwnParameter(torch.nn.Parameter):
    pass


class Dispatching(torch.Tensor):
    """A wrapper: what it shows is not where it is."""

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Any:
        made = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*[a.inner if isinstance(a, cls) else a for a in args], **(kwargs or {}))


class OwnList(list):  # type: ignore[type-arg]
    def __init__(self, a: Any, b: Any) -> None:
        super().__init__([a, b])
        self.note = "made with two"

    def __iter__(self) -> Any:
        raise AssertionError("an override is not asked")


class OwnDict(dict):  # type: ignore[type-arg]
    def __init__(self, a: Any, b: Any) -> None:
        super().__init__(a=a, b=b)


class AttrDict(dict):  # type: ignore[type-arg]
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.__dict__ = self


class OwnStr(str):
    def __new__(cls, text: str, source: str) -> Self:
        made = super().__new__(cls, text)
        made.source = source  # type: ignore[attr-defined]
        return made

    def __str__(self) -> str:
        return "another text"


class OwnInt(int):
    pass


class OwnFloat(float):
    pass


class OwnSet(set):  # type: ignore[type-arg]
    pass


class OwnTuple(tuple):  # type: ignore[type-arg]
    pass


class Encodings(collections.UserDict):  # type: ignore[type-arg]
    """As Hugging Face's BatchEncoding."""

    def __init__(self, data: Any = None, encoding: Any = None) -> None:
        super().__init__(data)
        self._encodings = encoding

    @property
    def encodings(self) -> Any:
        return self._encodings


class Pair(NamedTuple):
    a: Any
    b: Any


class NotedPair(Pair):
    pass


class Image8(np.ndarray):  # type: ignore[type-arg]
    pass


@dataclasses.dataclass
class ListOfRecords(list):  # type: ignore[type-arg]
    name: str = "x"


def objects() -> list[Any]:
    utc, tokyo = dt.UTC, zoneinfo.ZoneInfo("Asia/Tokyo")
    return [
        pathlib.Path("/a/b.png"), pathlib.PurePosixPath("a"), pathlib.PureWindowsPath("c:/a"),
        dt.date(2026, 1, 2), dt.time(1, 2, 3, 4, tzinfo=utc), dt.datetime(2026, 1, 2, 3, 4, 5, 6),
        dt.datetime(2026, 1, 2, tzinfo=tokyo, fold=1), dt.timedelta(days=-1, microseconds=5),
        utc, dt.timezone(dt.timedelta(hours=2), "CEST"), tokyo,
        Decimal("1.10"), Decimal("sNaN123"), Decimal("-Infinity"), Fraction(1, 3), uuid.UUID(int=4 << 99),
        Colour.RED, Number.ONE, Word.YES, Bits.A | Bits.B, Bits(0), IntBits.A | IntBits.B,
        range(1, 10, 3), slice(None, 3, "x"), ..., complex(1, -0.0), torch.Size([1, 2]),
        torch.float8_e4m3fn, torch.qint8, torch.device("cuda", 1), torch.sparse_csr, torch.channels_last,
        np.dtype("<f4"), np.dtype([("a", "O"), ("b", "f8")]), np.dtype("M8[ns]"),
        bytearray(b"x"), collections.Counter("aab"), collections.deque([1, Colour.RED], maxlen=3),
        array.array("d", [1.5, 2]), types.SimpleNamespace(a=1, b=[Colour.BLUE]),
    ]  # fmt: skip


@pytest.mark.parametrize("item", objects(), ids=lambda i: f"{type(i).__name__}-{i}"[:40])
def test_library_value_keeps_its_type_and_equality(item: Any) -> None:
    tensor, found, within = trip([torch.ones(1), item, {"deep": (item,)}])
    assert type(found) is type(item)
    assert repr(found) == repr(item)
    assert repr(within["deep"][0]) == repr(item)
    assert digest(found) == digest(item)
    assert tensor.tolist() == [1]


def test_enum_members_keep_their_identity() -> None:
    found = trip([Colour.RED, Number.ONE, Word.YES, Bits.A])
    assert all(a is b for a, b in zip(found, [Colour.RED, Number.ONE, Word.YES, Bits.A], strict=True))


@pytest.mark.parametrize(
    "batch",
    [
        {Colour.RED: torch.ones(2), Colour.BLUE: 1},
        {Number.ONE: 1, 1.5: 2},
        {Point(1, "x"): [torch.ones(1)], (Colour.RED, 1): 2},
        {pathlib.Path("a"): {Colour.RED: 1}},
        collections.OrderedDict({Colour.RED: torch.ones(1)}),
        collections.defaultdict(list, {Colour.RED: [torch.ones(1)]}),
        {Colour.RED, Number.ONE, "x"},
        frozenset({pathlib.Path("a")}),
    ],
    ids=lambda b: f"{type(b).__name__}-{sorted(map(str, b))}"[:40],
)
def test_keys_and_members_may_be_enums_named_tuples_and_paths(batch: Any) -> None:
    found = trip([torch.zeros(1), batch])[1]
    assert type(found) is type(batch)
    assert [type(key) for key in found] == [type(key) for key in batch] or isinstance(batch, set)
    assert set(found) == set(batch)
    assert digest(found) == digest(batch)


def test_labels_that_change_do_not_miss_the_schema_cache() -> None:
    decoder = Decoder(allow_pickle=False)
    for i in range(20):
        batch = [
            torch.ones(1),
            Colour.RED if i % 2 else Colour.BLUE,
            pathlib.Path(str(i)),
            dt.date(2026, 1, i + 1),
        ]
        assert decoder.decode(body(batch))[1:] == batch[1:]
    assert len(decoder._plans) == 1


# Tensors and arrays


def test_a_tensor_subclass_keeps_its_class_and_attributes() -> None:
    boxes = Boxes([[1.0, 2, 3, 4]], format=BoxFormat.XYXY, canvas_size=(5, 6))
    boxes.anchor = torch.ones(2)
    found = trip({"image": TVTensor(torch.ones(3)), "boxes": boxes})
    assert [type(t) for t in found.values()] == [TVTensor, Boxes]
    assert (found["boxes"].format, found["boxes"].canvas_size) == (BoxFormat.XYXY, (5, 6))
    assert found["boxes"].anchor.tolist() == [1, 1]
    assert found["boxes"].tolist() == [[1, 2, 3, 4]]
    assert digest(found["boxes"]) == digest(boxes)
    other = Boxes(boxes, format=BoxFormat.XYXY, canvas_size=(5, 7))
    assert digest(other) != digest(boxes)


def test_a_tensor_subclass_that_requires_grad_still_does() -> None:
    leaf = TVTensor(torch.ones(2)).requires_grad_()
    for batch in (leaf, OwnParameter(torch.ones(2)), OwnParameter(torch.ones(2), requires_grad=False)):
        found = trip([batch])[0]
        assert (type(found), found.requires_grad, found.is_leaf) == (type(batch), batch.requires_grad, True)
    with pytest.raises(UnsupportedBatch, match=r"TVTensor with a grad_fn.*detach"):
        encode([TVTensor(torch.ones(2).requires_grad_() * 2)], allow_pickle=False)


def test_a_tensor_subclass_is_a_view_of_the_body() -> None:
    base = body([TVTensor(torch.zeros(3))])
    Decoder(allow_pickle=False).decode(base)[0].add_(1)
    assert Decoder(allow_pickle=False).decode(base)[0].tolist() == [1, 1, 1]


@pytest.mark.filterwarnings("ignore:.*:UserWarning")
@pytest.mark.parametrize(
    "tensor",
    [
        torch.sparse_coo_tensor([[0, 0, 1]], [1.0, 2, 3], (4,)),
        torch.eye(3).to_sparse(),
        torch.eye(3).bfloat16().to_sparse().requires_grad_(),
        torch.eye(4).to_sparse_csr(),
        torch.eye(4).to_sparse_csc(),
        torch.eye(4).to_sparse_bsr((2, 2)),
        torch.eye(4).to_sparse_bsc((2, 2)),
        torch.zeros(0, 3).to_sparse(),
    ],
    ids=lambda t: f"{t.layout}-{t.dtype}",
)
def test_sparse_tensor_round_trips(tensor: torch.Tensor) -> None:
    found = trip([tensor])[0]
    for what in ("layout", "dtype", "shape", "requires_grad"):
        assert getattr(found, what) == getattr(tensor, what)
    assert tensor.layout is not torch.sparse_coo or found.is_coalesced() == tensor.is_coalesced()
    assert torch.equal(found.to_dense(), tensor.to_dense())
    assert digest(found) == digest(tensor)


@pytest.mark.filterwarnings("ignore:.*:UserWarning")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged], ids=str)
def test_nested_tensor_round_trips(layout: torch.layout) -> None:
    tensor = torch.nested.nested_tensor([torch.ones(2, 3), torch.zeros(4, 3)], layout=layout)
    found = trip([tensor])[0]
    assert (type(found), found.is_nested, found.layout) == (type(tensor), True, layout)
    assert [t.tolist() for t in found.unbind()] == [t.tolist() for t in tensor.unbind()]


@pytest.mark.filterwarnings("ignore:.*quantize.*")
@pytest.mark.parametrize(
    "tensor",
    [
        torch.quantize_per_tensor(torch.rand(3), 0.1, 2, torch.qint8),
        torch.quantize_per_channel(
            torch.rand(2, 3), torch.tensor([0.1, 0.2]), torch.tensor([0, 1]), 0, torch.quint8
        ),
    ],
    ids=lambda t: str(t.qscheme()),
)
def test_quantised_tensor_round_trips(tensor: torch.Tensor) -> None:
    found = trip([tensor])[0]
    assert found.dtype == tensor.dtype
    assert found.equal(tensor)


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda: np.rec.array([(1, 2.5)], dtype=[("a", "i4"), ("b", "f8")]), id="record"),
        pytest.param(lambda: np.array([[None, "a"], [Colour.RED, [1, 2]]], object), id="objects"),
        pytest.param(lambda: np.array(Colour.RED, object), id="objects-without-dimension"),
        pytest.param(
            lambda: np.ma.array([1, 2, 3], mask=[0, 1, 0], fill_value=7, hard_mask=True), id="masked"
        ),
        pytest.param(lambda: np.ma.array([1.5]), id="masked-of-no-mask"),
        pytest.param(lambda: np.asmatrix([[1, 2]]), id="matrix"),
        pytest.param(lambda: np.arange(4).view(Image8), id="user"),
    ],
)
def test_array_of_a_special_kind_round_trips(make: Any) -> None:
    item = make()
    found = trip([item])[0]
    assert type(found) is type(item)
    assert (found.dtype, found.shape, found.tolist()) == (item.dtype, item.shape, item.tolist())
    assert digest(found) == digest(item)
    if isinstance(item, np.recarray):
        assert found[0].b == 2.5
    if isinstance(item, np.ma.MaskedArray):
        assert (found.fill_value, found.hardmask) == (item.fill_value, item.hardmask)
        assert (found.mask is np.ma.nomask) == (item.mask is np.ma.nomask)


# The user's classes


def test_user_class_instance_round_trips_without_running_init() -> None:
    batch = Batch([torch.ones(2), torch.zeros(2)])
    found = trip(batch)
    assert type(found) is Batch
    assert found.inp.tolist() == [[1, 1], [0, 0]]
    assert (found.names, found._hidden) == (["a", "b"], {"kind": Colour.RED})
    assert digest(found) == digest(batch)
    batch._hidden["kind"] = Colour.BLUE
    assert digest(found) != digest(batch)


@pytest.mark.parametrize(
    "item",
    [
        OwnList(torch.ones(1), Colour.RED),
        OwnDict(1, torch.ones(2)),
        OwnStr("text", source="file"),
        OwnInt(2**80),
        OwnFloat(-0.0),
        OwnSet({1, Colour.RED}),
        OwnTuple((1, torch.ones(1))),
        ListOfRecords("name"),
        NotedPair(1, torch.ones(1)),
    ],
    ids=lambda i: type(i).__name__,
)
def test_a_subclass_of_a_built_in_type_keeps_class_content_and_attributes(item: Any) -> None:
    item.beside = [torch.ones(1), "x"]
    found = trip([item])[0]
    assert type(found) is type(item)
    assert digest(found) == digest(item)
    assert found.beside[0].tolist() == [1]
    assert set(vars(found)) == set(vars(item))


def test_overridden_methods_do_not_change_the_encoded_value() -> None:
    found = trip([OwnStr("text", source="file")])[0]
    assert str.__eq__(found, "text")
    assert found.source == "file"


def test_attributes_outside_a_mappings_items_travel_or_are_refused() -> None:
    found = trip(Encodings({"ids": torch.ones(2)}, encoding=[{"offsets": (0, 1)}]))
    assert found["ids"].tolist() == [1, 1]
    assert found.encodings == [{"offsets": (0, 1)}]
    assert digest(found) != digest(Encodings({"ids": torch.ones(2)}))
    assert vars(trip(Encodings({"a": 1}))) == {"data": {"a": 1}, "_encodings": None}
    with pytest.raises(
        UnsupportedBatch, match=r"batch\._encodings\[0\]: object, .*|batch\._encodings\[0\]: object"
    ):
        encode(Encodings({"a": 1}, encoding=[object()]), allow_pickle=False)


def test_dict_that_is_its_own_attribute_dict_stays_so() -> None:
    found = trip(AttrDict(image=torch.ones(1)))
    assert found.image is found["image"]
    found.more = 1
    assert found["more"] == 1


def test_tokenizer_encodings_travel_by_their_state(monkeypatch: pytest.MonkeyPatch) -> None:
    class Encoding:
        def __getstate__(self) -> bytes:
            return b'{"ids":[1]}'

        def __setstate__(self, state: bytes) -> None:
            self.found = state

    Encoding.__module__, Encoding.__qualname__ = "tokenizers", "Encoding"
    module = types.ModuleType("tokenizers")
    module.Encoding = Encoding  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "tokenizers", module)
    assert trip(Encodings({"a": 1}, encoding=[Encoding()])).encodings[0].found == b'{"ids":[1]}'


@pytest.mark.parametrize("mode", ["RGB", "L", "P", "1", "RGBA", "I;16", "F"])
def test_image_round_trips(mode: str) -> None:
    image = Image.new(mode, (5, 3))
    image.info["dpi"] = (72, 72)
    found = trip([image])[0]
    assert (type(found), found.mode, found.size, found.info) == (type(image), mode, (5, 3), image.info)
    assert found.tobytes() == image.tobytes()
    assert digest(found) == digest(image)


@pytest.mark.parametrize("form", ["PNG", "JPEG", "GIF"])
def test_image_opened_from_a_file_round_trips(form: str, tmp_path: pathlib.Path) -> None:
    path = tmp_path / "image"
    Image.radial_gradient("L").save(path, form)
    with Image.open(path) as image:
        found = trip([image])[0]
        assert type(found) is type(image)
        assert found.tobytes() == image.tobytes()


# One object, two names


def test_tensor_or_array_with_two_names_arrives_as_one() -> None:
    t, a, b = torch.ones(2), np.ones(2), TVTensor(torch.ones(1))
    encoded = encode({"x": t, "y": [t, a]}, allow_pickle=False)
    assert encoded.nbytes < 500
    found = trip({"x": t, "y": [t, a], "z": a, "u": b, "v": (b, torch.ones(2))})
    assert found["x"] is found["y"][0]
    assert found["z"] is found["y"][1]
    assert found["u"] is found["v"][0]
    assert found["v"][1] is not found["x"]
    assert trip([t, t])[0] is not None


def test_temporary_objects_are_not_mistaken_for_one_another() -> None:
    class Fresh(collections.UserDict):  # type: ignore[type-arg]
        def __getitem__(self, key: int) -> Any:
            return torch.full((2,), float(key))

    Fresh.__qualname__ = "Fresh"
    sys.modules[__name__].Fresh = Fresh  # type: ignore[attr-defined]
    encoded = encode([Fresh({1: 0, 2: 0}), Fresh({3: 0, 4: 0})], allow_pickle=False)
    assert encoded.nbytes > 4 * 64


def test_object_that_refers_to_itself_travels() -> None:
    parent, child = types.SimpleNamespace(), Batch([torch.ones(1)])
    parent.child, child.parent = child, parent  # type: ignore[attr-defined]
    found = trip({"root": parent, "child": child})
    assert found["root"].child.parent is found["root"]
    assert found["child"] is found["root"].child
    assert digest(found) == digest({"root": parent, "child": child})


def test_a_batch_may_be_nested_deeply() -> None:
    deep: Any = torch.ones(1)
    for i in range(150):
        deep = {"a": deep} if i % 2 else [deep, i]
    assert digest(trip(deep)) == digest(deep)


# What stays


class WithSlots:
    __slots__ = ("a",)


class WithSetstate:
    def __setstate__(self, state: Any) -> None:
        raise AssertionError("not run")


class WithDel:
    def __del__(self) -> None:
        pass


class SlotList(list):  # type: ignore[type-arg]
    __slots__ = ("a",)


@pytest.mark.parametrize(
    ("item", "said"),
    [
        pytest.param(WithSlots(), "WithSlots", id="slots"),
        pytest.param(SlotList(), "SlotList", id="slots-of-a-list"),
        pytest.param(WithSetstate(), "WithSetstate", id="setstate"),
        pytest.param(WithDel(), "WithDel", id="del"),
        pytest.param(types.SimpleNamespace(__class__x=1), "with an attribute '__class__x'", id="dunder"),
        pytest.param(Dispatching(torch.ones(1)), "Dispatching, a Tensor subclass with a state", id="wrapper"),
        pytest.param(uuid, "module", id="module"),
        pytest.param(Colour, "enum.EnumType", id="class"),
        pytest.param((i for i in ()), "generator", id="generator"),
        pytest.param(torch.Generator(), "torch._C.Generator", id="torch-generator"),
    ],
)
def test_object_with_hidden_content_is_refused(item: Any, said: str) -> None:
    with pytest.raises(UnsupportedBatch) as caught:
        encode([item], allow_pickle=False)
    assert f"batch[0]: {said}" in str(caught.value) or said in str(caught.value)
    assert "allow_pickle=True" in str(caught.value)


def test_indivisible_object_is_pickled_if_allowed() -> None:
    found = trip([Batch([torch.ones(1)]), WithSlots()], allow_pickle=True)
    assert [type(item) for item in found] == [Batch, WithSlots]


# Bodies of strangers


def subtrees(schema: Any) -> list[Any]:
    found = [schema]
    if type(schema) is tuple:
        for part in schema:
            found += subtrees(part)
    return found


def replaced(schema: Any, number: int, other: Any) -> Any:
    """`schema` with its subtree of that number replaced."""
    count = iter(range(1_000_000))

    def copy(part: Any) -> Any:
        if next(count) == number:
            return other
        return tuple(copy(one) for one in part) if type(part) is tuple else part

    return copy(schema)


@functools.cache
def a_body() -> bytes:
    return body(a_batch()).tobytes()


def a_batch() -> list[Any]:
    tensor, node_ = TVTensor(torch.ones(2)), types.SimpleNamespace()
    node_.self = node_
    return [
        tensor, tensor, Colour.RED, Bits.A, dt.datetime(2026, 1, 1, tzinfo=dt.UTC), OwnTuple((1, 2)),
        Batch([torch.ones(1)]), torch.eye(2).to_sparse(), torch.eye(2).to_sparse_csr(), {Colour.RED: 1}, node_,
        np.array([None, 1], object), np.ma.array([1, 2], mask=[0, 1]), Encodings({"a": 1}, [2]), OwnStr("a", "b"),
        torch.nested.nested_tensor([torch.ones(1)]), {1, Colour.RED}, pathlib.Path("a"), torch.float32, Decimal(1),
        collections.deque([1]), NotedPair(1, torch.ones(1)), OwnParameter(torch.ones(1)), torch.ones(1).numpy()[0],
    ]  # fmt: skip


def schema_of(body: np.ndarray) -> tuple[Any, int]:
    """The schema of a body, and its bytes with the header."""
    head = layout.key_nbytes(body[: layout.HEADER.size].tobytes())
    return values.unpack(body[layout.HEADER.size : head].tobytes()), head


def decode_or_refuse(body: np.ndarray, place: int, other: Any) -> None:
    """Decodes `body` with another part at a place of its schema."""
    schema, head = schema_of(body)
    forged = layout.pack_schema(replaced(schema, place, other))
    # The rest stays where it was, relative to the leaves, so that most leaves and values are whole.
    whole = forged.ljust(layout.aligned(len(forged)), b"\0") + body[layout.aligned(head) :].tobytes()
    with contextlib.suppress(RemoteProtocolError, UnsupportedBatch):
        Decoder(allow_pickle=False).decode(np.frombuffer(bytearray(whole), np.uint8))


@pytest.mark.filterwarnings("ignore")
@given(st.data())
@settings(deadline=None, max_examples=300)
def test_schema_with_misplaced_parts_decodes_or_is_refused(data: st.DataObject) -> None:
    base = np.frombuffer(bytearray(a_body()), np.uint8)
    parts = subtrees(schema_of(base)[0])
    other = data.draw(
        st.integers(0, len(parts) - 1).map(parts.__getitem__) | st.sampled_from([None, -1, (), "a", 99])
    )
    decode_or_refuse(base, data.draw(st.integers(0, len(parts) - 1)), other)


@pytest.mark.filterwarnings("ignore")
def test_schema_with_a_string_in_any_place_decodes_or_is_refused() -> None:
    base = np.frombuffer(bytearray(a_body()), np.uint8)
    for place in range(len(subtrees(schema_of(base)[0]))):
        decode_or_refuse(base, place, "a")


@pytest.mark.filterwarnings("ignore")
@given(st.data())
@settings(deadline=None, max_examples=200)
def test_a_damaged_body_of_objects_decodes_or_is_refused(data: st.DataObject) -> None:
    base = np.frombuffer(bytearray(a_body()), np.uint8)
    head = layout.key_nbytes(base[: layout.HEADER.size].tobytes())
    base[data.draw(st.integers(head, len(base) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(RemoteProtocolError, UnsupportedBatch):
        Decoder(allow_pickle=False).decode(base)
