"""Batches as a hostile feeder would write them: byte by byte, with classes and content of its own choice."""

from __future__ import annotations

import collections
import copy
import dataclasses
import enum
import fractions
import importlib.util
import pathlib
import sys
import types
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from trees import body, trip

from dataloaderjob.batches import special
from dataloaderjob.batches.decoding import Decoder
from dataloaderjob.batches.encoding import encode
from dataloaderjob.core import layout, values
from dataloaderjob.core.errors import DataLoaderJobError, RemoteProtocolError, UnsupportedBatch
from dataloaderjob.core.layout import NodeKind, node

RAN: list[str] = []
"""Code of the classes below that ran."""
VALUE = node(NodeKind.VALUE, 0)


@pytest.fixture(autouse=True)
def nothing_ran() -> Iterator[None]:
    RAN.clear()
    yield
    assert RAN == []


class Meta(type):
    def __getattr__(cls, name: str) -> Any:
        RAN.append(f"Meta.__getattr__ {name}")
        return Sample


class Lazy(metaclass=Meta):
    pass


class Descriptor:
    def __get__(self, item: Any, owner: Any = None) -> Any:
        RAN.append("Descriptor.__get__")
        return Sample


class Holder:
    inner = Descriptor()

    class Nested:
        pass


@dataclasses.dataclass
class Sample:
    x: Any
    y: Any = None

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        RAN.append("Sample.__new__")
        return super().__new__(cls)

    def __post_init__(self) -> None:
        RAN.append("Sample.__post_init__")

    @property
    def z(self) -> Any:
        return 1

    @z.setter
    def z(self, value: Any) -> None:
        RAN.append("Sample.z")

    def __setstate__(self, state: Any) -> None:
        RAN.append("Sample.__setstate__")


class Pair(NamedTuple):
    a: Any
    b: Any


class OwnPair(Pair):
    @classmethod
    def _make(cls, iterable: Any) -> Any:
        RAN.append("OwnPair._make")
        return super()._make(iterable)

    def __new__(cls, *args: Any) -> Any:
        RAN.append("OwnPair.__new__")
        return super().__new__(cls, *args)


class OwnDict(dict):  # type: ignore[type-arg]
    def __init__(self, *args: Any) -> None:
        RAN.append("OwnDict.__init__")
        super().__init__(*args)

    def __setitem__(self, key: Any, value: Any) -> None:
        RAN.append("OwnDict.__setitem__")

    def __getattr__(self, name: str) -> Any:
        return self[name]


class OwnOrdered(collections.OrderedDict):  # type: ignore[type-arg]
    def __setitem__(self, key: Any, value: Any) -> None:
        RAN.append("OwnOrdered.__setitem__")


class OwnUserDict(collections.UserDict):  # type: ignore[type-arg]
    def __init__(self, *args: Any) -> None:
        RAN.append("OwnUserDict.__init__")
        super().__init__(*args)


class Index:
    """An object of the user's that would run code where a number is expected."""

    def __index__(self) -> int:
        RAN.append("Index.__index__")
        return 1

    def __fspath__(self) -> str:
        RAN.append("Index.__fspath__")
        return "/"

    def __iter__(self) -> Any:
        RAN.append("Index.__iter__")
        return iter(())


class Bits(enum.IntFlag):
    A = 1


class OddBits(enum.Flag):
    A = 1

    @classmethod
    def _missing_(cls, value: object) -> Any:
        RAN.append("OddBits._missing_")
        return cls.A


class Files(torch.utils.data.Dataset):  # type: ignore[type-arg]
    """As in every script: what it opens is what its attributes say."""

    def __init__(self, folder: str) -> None:
        self.folder = folder

    def __getitem__(self, key: str) -> bytes:
        RAN.append("Files.__getitem__")
        return (pathlib.Path(self.folder) / key).read_bytes()


class OwnDefaults(collections.defaultdict):  # type: ignore[type-arg]
    pass


class Structlike(tuple):
    __slots__ = ()
    n_sequence_fields = 1

    def __new__(cls, items: Any) -> Any:
        RAN.append("Structlike.__new__")
        return super().__new__(cls, items)


class Ending:
    """Acts when it is no longer needed, without anybody calling it."""

    def __del__(self) -> None:
        RAN.append(f"{type(self).__name__}.__del__")


class EndingDict(Ending, dict):  # type: ignore[type-arg]
    pass


class EndingOrdered(Ending, collections.OrderedDict):  # type: ignore[type-arg]
    pass


class EndingCounter(Ending, collections.Counter):  # type: ignore[type-arg]
    pass


class EndingUserDict(Ending, collections.UserDict):  # type: ignore[type-arg]
    pass


class EndingPair(Pair):
    __del__ = Ending.__del__


class EndingPairOfPairs(EndingPair):
    pass


@dataclasses.dataclass
class EndingSample(Ending):
    x: Any


class EndingList(Ending, list):  # type: ignore[type-arg]
    pass


ENDING_MAPPINGS = ("EndingDict", "EndingOrdered", "EndingCounter", "EndingUserDict")


class Watching:
    """Learns of each access to an attribute."""

    def __getattribute__(self, name: str) -> Any:
        RAN.append(f"__getattribute__ {name}")
        return super().__getattribute__(name)


@dataclasses.dataclass
class Watched(Watching):
    x: Any


class WatchedDict(Watching, collections.UserDict):  # type: ignore[type-arg]
    pass


def decoded(schema: Any, *content: Any) -> Any:
    head = layout.pack_schema(schema) + (values.pack(list(content)) if content else b"")
    return Decoder(allow_pickle=False).decode(np.frombuffer(bytearray(head), np.uint8))


def made(way: str, cls: Any, *content: Any) -> Any:
    name = None if cls is None else (cls.__module__, cls.__qualname__)
    return decoded(node(NodeKind.MADE, way, name, VALUE), *content)


def named(kind: NodeKind, module: str, qualname: str) -> Any:
    return decoded(node(kind, (module, qualname), ("x",), (VALUE,)), 1)


# Names


def test_a_name_does_not_call_a_modules_getattr(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("lazily")
    module.__getattr__ = lambda name: RAN.append(name) or Sample  # type: ignore[attr-defined,func-returns-value]
    monkeypatch.setitem(sys.modules, "lazily", module)
    with pytest.raises(UnsupportedBatch, match="'lazily' has no such name"):
        named(NodeKind.DATACLASS, "lazily", "Sample")


def test_a_name_does_not_load_a_lazy_module(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    (tmp_path / "on_demand.py").write_text("import sys\nsys.modules['on_demand_ran'] = sys\nclass A: pass\n")
    spec = importlib.util.spec_from_file_location("on_demand", tmp_path / "on_demand.py")
    assert spec is not None
    assert spec.loader is not None
    spec.loader = importlib.util.LazyLoader(spec.loader)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setitem(sys.modules, "on_demand", module)
    with pytest.raises(DataLoaderJobError):
        named(NodeKind.DATACLASS, "on_demand", "A")
    assert "on_demand_ran" not in sys.modules
    assert module.A is not None, "somebody who may load it does"
    del sys.modules["on_demand_ran"]


def test_a_name_does_not_import_a_module_of_an_imported_package() -> None:
    assert "concurrent.futures.process" not in sys.modules or "xml.sax.expatreader" not in sys.modules
    name = next(n for n in ("xml.sax.expatreader", "json.tool", "unittest.__main__") if n not in sys.modules)
    __import__(name.rpartition(".")[0])
    with pytest.raises(UnsupportedBatch, match="is not imported here"):
        named(NodeKind.DATACLASS, name, "A")
    assert name not in sys.modules


@pytest.mark.parametrize("name", ["Lazy.inner", "Holder.inner", "Sample.z", "Holder.__class__", "Holder.mro"])
def test_a_dotted_name_finds_nested_classes_only(name: str) -> None:
    with pytest.raises((UnsupportedBatch, RemoteProtocolError)):
        named(NodeKind.DATACLASS, __name__, name)


def test_a_nested_class_still_travels() -> None:
    item = Holder.Nested()
    item.x = torch.ones(1)  # type: ignore[attr-defined]
    assert trip([item])[0].x.tolist() == [1]


# Classes


def test_no_code_of_a_dataclass_runs() -> None:
    found = decoded(
        node(NodeKind.DATACLASS, (__name__, "Sample"), ("x", "z"), (VALUE, node(NodeKind.VALUE, 1))), 5, 6
    )
    assert (type(found), found.x, vars(found)["z"]) == (Sample, 5, 6)


def test_no_code_of_a_named_tuple_runs() -> None:
    found = decoded(node(NodeKind.NAMEDTUPLE, (__name__, "OwnPair"), (VALUE, VALUE)), 5)
    assert (type(found), found.a, found.b) == (OwnPair, 5, 5)


@pytest.mark.parametrize("cls", [OwnDict, OwnOrdered, OwnUserDict])
def test_no_code_of_a_mapping_runs(cls: Any) -> None:
    for found in (named(NodeKind.MAPPING, __name__, cls.__name__), made("mapping", cls, {"x": 1})):
        assert (type(found), dict(found)) == (cls, {"x": 1})


@pytest.mark.parametrize(
    ("schema", "content"),
    [
        *((node(NodeKind.MAPPING, (__name__, name), ("x",), (VALUE,)), 1) for name in ENDING_MAPPINGS),
        *((node(NodeKind.MADE, "mapping", (__name__, name), VALUE), {"x": 1}) for name in ENDING_MAPPINGS),
        (node(NodeKind.MADE, "dict", (__name__, "EndingDict"), VALUE), {"x": 1}),
        (node(NodeKind.MADE, "own dict", (__name__, "EndingDict"), VALUE), {"x": 1}),
        (node(NodeKind.NAMEDTUPLE, (__name__, "EndingPair"), (VALUE, VALUE)), 1),
        (node(NodeKind.NAMEDTUPLE, (__name__, "EndingPairOfPairs"), (VALUE, VALUE)), 1),
        (node(NodeKind.DATACLASS, (__name__, "EndingSample"), ("x",), (VALUE,)), 1),
        (node(NodeKind.MADE, "list", (__name__, "EndingList"), VALUE), [1]),
        (node(NodeKind.MADE, "instance", (__name__, "Ending"), VALUE), None),
    ],
    ids=lambda one: f"{one.kind.name}-{one.way}-{one.cls[1]}" if isinstance(one, layout.Node) else "",
)
def test_a_class_with_del_gets_no_content_of_a_feeder(schema: Any, content: Any) -> None:
    with pytest.raises((RemoteProtocolError, UnsupportedBatch)):
        decoded(schema, content)


def test_a_class_with_del_is_refused_in_the_feeder_with_the_reason() -> None:
    for item in (EndingDict(x=1), EndingPair(1, 2), EndingList([1])):
        with pytest.raises(UnsupportedBatch, match=rf"{type(item).__name__}, whose __del__ would run"):
            encode([item], allow_pickle=False)
        assert type(trip([item], allow_pickle=True)[0]) is type(item)
    del item
    RAN.clear()


def test_attributes_are_set_without_getattribute() -> None:
    for schema, content in (
        (node(NodeKind.DATACLASS, (__name__, "Watched"), ("x",), (VALUE,)), 1),
        (
            node(NodeKind.ATTRIBUTES, ("x",), (node(NodeKind.MADE, "instance", (__name__, "Watching"), VALUE), VALUE)),
            None,
        ),
        (node(NodeKind.MAPPING, (__name__, "WatchedDict"), ("x",), (VALUE,)), 1),
    ):  # fmt: skip
        decoded(schema, content)


@pytest.mark.parametrize(
    "name", ["__array_interface__", "__array_struct__", "__array__", "__cuda_array_interface__"]
)
def test_numpy_is_told_of_no_memory_by_a_batch(name: str) -> None:
    memory = {"shape": (8,), "typestr": "|u1", "data": (id(None), True), "version": 3}
    for cls in (OwnDict, OwnUserDict):
        with pytest.raises(RemoteProtocolError, match="cannot have the key"):
            decoded(node(NodeKind.MAPPING, (__name__, cls.__name__), (name,), (VALUE,)), memory)
    for way in ("dict", "own dict", "mapping"):
        with pytest.raises(RemoteProtocolError, match="cannot have the key"):
            made(way, OwnDict, {name: memory})
    namespace = node(NodeKind.MADE, "types.SimpleNamespace", None, VALUE)
    with pytest.raises(RemoteProtocolError, match="attribute"):
        decoded(node(NodeKind.ATTRIBUTES, (name,), (namespace, VALUE)), memory)


@pytest.mark.parametrize(
    ("way", "cls"),
    [
        ("instance", Files),
        ("dict", OwnDefaults),
        ("mapping", OwnDefaults),
        ("instance", Lazy),
        ("enum", OddBits),
    ],
    ids=lambda one: getattr(one, "__name__", one),
)
def test_a_class_of_the_users_with_foreign_code_is_not_made(way: str, cls: Any) -> None:
    content = {"enum": (None, 6), "instance": None}.get(way, {})
    if cls is Lazy:  # has nothing foreign: it is made, and its metaclass does not learn of it
        assert type(made(way, cls, content)) is Lazy
        return
    with pytest.raises(RemoteProtocolError):
        made(way, cls, content)


@pytest.mark.parametrize(
    "name",
    [("subprocess", "Popen"), ("tempfile", "TemporaryDirectory"), ("pathlib", "Path"), ("builtins", "object"),
     ("logging", "FileHandler"), ("torch.nn", "Linear"), ("threading", "Thread"), (__name__, "Structlike")],
    ids=".".join,
)  # fmt: skip
def test_no_factory_of_a_defaultdict_acts(name: tuple[str, str]) -> None:
    __import__(name[0])
    if name[1] != "Structlike":  # the user's own class may be one, as with torch
        with pytest.raises(RemoteProtocolError, match="not a factory"):
            decoded(node(NodeKind.DEFAULTDICT, name, (), ()))
        with pytest.raises(RemoteProtocolError, match="cannot be created"):
            decoded(node(NodeKind.MADE, "defaultdict", name, VALUE), {})


def test_a_tuple_that_claims_to_be_a_struct_is_not_called() -> None:
    with pytest.raises(RemoteProtocolError, match="not a collection that a batch may carry"):
        decoded(node(NodeKind.SEQUENCE, (__name__, "Structlike"), (VALUE,)), 1)


@pytest.mark.parametrize("cls", [collections.UserDict, collections.ChainMap, collections.OrderedDict])
def test_a_standard_mapping_gets_no_attributes(cls: Any) -> None:
    mapping = node(NodeKind.MAPPING, ("collections", cls.__name__), ("x",), (VALUE,))
    with pytest.raises(RemoteProtocolError, match="cannot have attributes"):
        decoded(node(NodeKind.ATTRIBUTES, ("data",), (mapping, VALUE)), 1)


def test_a_librarys_dataclass_gets_its_fields_only() -> None:
    import transformers.generation.stopping_criteria  # noqa: F401  a library

    name = "torch.distributed.checkpoint.metadata", "MetadataIndex"
    __import__(name[0])
    fields = ("fqn", "offset", "index")
    assert decoded(node(NodeKind.DATACLASS, name, fields, (VALUE,) * 3), 1).fqn == 1
    with pytest.raises(RemoteProtocolError, match="has no field 'to'"):
        decoded(node(NodeKind.DATACLASS, name, ("to",), (VALUE,)), 1)


def test_a_librarys_dataclass_may_have_been_copied_before() -> None:
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata as Chunk

    copy.copy(Chunk(torch.Size([1]), torch.Size([1])))
    assert "__slotnames__" in vars(Chunk), "copying notes the slots in the class"
    name = Chunk.__module__, Chunk.__qualname__
    made = decoded(node(NodeKind.DATACLASS, name, ("offsets", "sizes"), (VALUE,) * 2), 1)
    assert (made.offsets, made.sizes) == (1, 1)


# Content


def instance(cls: type) -> Any:
    return node(NodeKind.MADE, "instance", (cls.__module__, cls.__qualname__), node(NodeKind.VALUE, 1))


@pytest.mark.parametrize(
    ("way", "parts"),
    [
        ("datetime.date", 3), ("datetime.timedelta", 3), ("builtins.range", 3), ("pathlib.PosixPath", 0),
        ("pathlib.PurePosixPath", 0), ("uuid.UUID", 2), ("fractions.Fraction", 2), ("collections.deque", 2),
        ("array.array", 2), ("decimal.Decimal", 0), ("zoneinfo.ZoneInfo", 0), ("torch.device", 0), ("objects", 2),
        ("pairs", 2), ("numpy.dtype", 0), ("sparse", 5), ("masked", 4), ("nested", 3), ("quantized", 3),
    ],
    ids=lambda one: str(one),
)  # fmt: skip
def test_no_object_takes_the_place_of_a_number_or_text(way: str, parts: int) -> None:
    child = instance(Index) if not parts else node(NodeKind.TUPLE, (instance(Index),) * parts)
    with pytest.raises(RemoteProtocolError, match="cannot be created"):
        decoded(node(NodeKind.TUPLE, (VALUE, node(NodeKind.MADE, way, None, child))), 0, None)


@pytest.mark.parametrize(
    ("way", "content"),
    [
        pytest.param("fractions.Fraction", ("1e99999999", 1), id="text-that-takes-hours"),
        pytest.param("fractions.Fraction", (1 << (1 << 21), 3), id="numbers-that-take-hours"),
        pytest.param("zoneinfo.ZoneInfo", "../../etc/passwd", id="zone-outside"),
        pytest.param("zoneinfo.ZoneInfo", "tzdata.zoneinfo/x.y", id="zone-that-is-a-module"),
        pytest.param("zoneinfo.ZoneInfo", "/etc/localtime", id="zone-by-path"),
        pytest.param("torch.dtype", "torch.nn", id="dtype-that-is-a-module"),
        pytest.param("torch.dtype", "torch.compiler", id="dtype-of-another-kind"),
        pytest.param("objects", ([1, 2], (-1, -2)), id="negative-shape"),
        pytest.param("objects", ([1], (1.0,)), id="shape-of-floats"),
        pytest.param("pairs", ([[]], [1]), id="unhashable"),
    ],
)
def test_content_that_would_cost_or_choose_is_refused(way: str, content: Any) -> None:
    with pytest.raises(RemoteProtocolError, match="cannot be created"):
        made(way, None, content)


@pytest.mark.parametrize(
    ("size", "mode", "data"),
    [((60000, 60000), "RGB", b"x"), ((-1, 1), "L", b""), ((1, 1), "nonsense", b"x"), ((2, 2), "L", b"x" * 5),
     ((1, "1"), "L", b"x"), ((1 << 40, 0), "L", b"")],
    ids=str,
)  # fmt: skip
def test_an_image_has_the_pixels_that_it_claims(size: Any, mode: str, data: bytes) -> None:
    from PIL import Image

    assert made("PIL.Image", Image.Image, ({}, "L", (1, 1), None, b"x", [])).getpixel((0, 0)) == ord("x")
    with pytest.raises(RemoteProtocolError, match="cannot be created"):
        made("PIL.Image", Image.Image, ({}, mode, size, None, data, []))


NUMBERS, SCALES, ZEROS = (
    torch.zeros(2, 3, dtype=torch.int32),
    torch.ones(3, dtype=torch.float64),
    torch.zeros(3, dtype=torch.int64),
)
ODD_PARTS = {
    "quantised": lambda: torch._make_per_tensor_quantized_tensor(NUMBERS, 1.0, 0),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    "sparse": lambda: torch.eye(2).to_sparse(),
    "compressed": lambda: torch.eye(2).to_sparse_csr(),
}
"""Parts that no encoder sends within a tensor."""


def quantised(*content: Any) -> Any:
    return special.CARRIERS["quantized"].make(None, content)


@pytest.mark.filterwarnings("ignore")
def test_quantised_tensors_of_an_encoder_are_made() -> None:
    for dtype in (torch.qint8, torch.quint8, torch.qint32):
        one = torch.quantize_per_tensor(torch.rand(2, 3), 0.1, 2, dtype)
        other = torch.quantize_per_channel(torch.rand(2, 3), SCALES, ZEROS, 1, dtype)
        assert [found.dtype for found in trip([one, other])] == [dtype] * 2


@pytest.mark.parametrize(
    "content",
    [
        pytest.param((NUMBERS, SCALES, ZEROS.double(), 1), id="zero-points-of-float64"),
        pytest.param((NUMBERS, SCALES, ZEROS.float(), 1), id="zero-points-of-float32"),
        pytest.param((NUMBERS, SCALES, ZEROS.int(), 1), id="zero-points-of-int32"),
        pytest.param((NUMBERS, SCALES.float(), ZEROS, 1), id="scales-of-float32"),
        pytest.param((NUMBERS, ZEROS, ZEROS, 1), id="scales-of-int64"),
        pytest.param((NUMBERS.float(), SCALES, ZEROS, 1), id="numbers-of-float32"),
        pytest.param((NUMBERS.long(), SCALES, ZEROS, 1), id="numbers-of-int64"),
        pytest.param((NUMBERS, SCALES, ZEROS, -1), id="axis-below-0"),
        pytest.param((NUMBERS, SCALES, ZEROS, 2), id="axis-beyond-the-last"),
        pytest.param((NUMBERS, SCALES, ZEROS, 2**70), id="axis-of-71-bits"),
        pytest.param((NUMBERS, SCALES, ZEROS, 0), id="three-scales-for-two"),
        pytest.param((NUMBERS, SCALES[:, None], ZEROS, 1), id="scales-of-two-dimensions"),
        pytest.param((NUMBERS, SCALES, ZEROS[:2], 1), id="zero-points-are-short"),
        pytest.param((NUMBERS[0, 0], SCALES[0], ZEROS[0], 0), id="no-dimension"),
        pytest.param((NUMBERS.bool(), 1.0, 0), id="numbers-of-bool"),
        pytest.param((NUMBERS, 1.0, 2**62), id="zero-point-of-63-bits"),
        pytest.param((NUMBERS, 1.0, -(2**70)), id="zero-point-of-71-bits"),
    ],
)
def test_quantised_tensor_of_other_types_is_not_made(content: Any) -> None:
    """Its use could end the process: with zero points of floats, repr() meets an illegal instruction."""
    with pytest.raises((TypeError, ValueError)):
        quantised(*content)


@pytest.mark.parametrize("odd", ODD_PARTS)
@pytest.mark.filterwarnings("ignore")
def test_tensor_is_not_made_of_parts_that_are_no_blocks_of_memory(odd: str) -> None:
    part, two, index = ODD_PARTS[odd](), torch.ones(2), torch.tensor([0, 1])
    for way, content in (
        ("quantized", (part, 1.0, 0)),
        ("quantized", (NUMBERS, part, ZEROS, 1)),
        ("quantized", (NUMBERS, SCALES, part, 1)),
        ("nested", ([part, part], "torch.strided", False)),
        ("nested", ([two, part], "torch.jagged", False)),
        ("sparse", (index[None], part, (2, 2, 3), True, False)),
        ("sparse", (part, two, (2, 2), True, False)),
        ("compressed", ("torch.sparse_csr", torch.tensor([0, 1, 2]), index, part, (2, 2), False)),
        ("compressed", ("torch.sparse_csr", part, index, two, (2, 2), False)),
    ):
        with pytest.raises(TypeError, match=r"expected a tensor of .*, got one of "):
            special.CARRIERS[way].make(None, content)


def test_a_flag_takes_bits_of_a_number_only() -> None:
    assert made("enum", Bits, (None, 5)) == Bits(5)
    for content in ((None, "5"), (None, 1 << 65), ("_missing_", None), ("__class__", None), (None, None)):
        with pytest.raises(RemoteProtocolError, match="cannot be created"):
            made("enum", Bits, content)


def test_values_that_claim_to_be_huge_are_refused() -> None:
    claims = b"\xdd\x00\x0f\xff\xff" * 400 + bytes(1 << 20)  # each level has room for a million items
    with pytest.raises(RemoteProtocolError):
        values.unpack(claims)


def test_an_error_of_the_users_hash_is_a_refusal() -> None:
    schema = node(NodeKind.SET, (node(NodeKind.MADE, "instance", (__name__, "BadHash"), VALUE),))
    with pytest.raises(RemoteProtocolError, match="cannot be assembled"):
        decoded(schema, None)


class BadHash:
    def __hash__(self) -> int:
        raise OSError("no hash")


# What stays allowed, and how a refusal reads


class Consenting(dict):  # type: ignore[type-arg]
    pass


def test_a_librarys_class_may_consent(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("installed")
    module.__file__ = next(p for p in sys.path if p.endswith("site-packages")) + "/installed.py"
    for name in ("Yes", "No"):
        own = {"__module__": "installed", **({"__dataloaderjob_data__": True} if name == "Yes" else {})}
        setattr(module, name, type(name, (dict,), own))
    monkeypatch.setitem(sys.modules, "installed", module)
    item = module.Yes(a=torch.ones(1))  # type: ignore[attr-defined]
    assert trip([item])[0]["a"].tolist() == [1]
    with pytest.raises(
        UnsupportedBatch, match=r"batch\[0\]: installed\.No, .*a library.*__dataloaderjob_data__ = True"
    ):
        encode([module.No(a=1)], allow_pickle=False)  # type: ignore[attr-defined]
    with pytest.raises(
        UnsupportedBatch, match=r"Files, which derives from torch\.utils\.data\.dataset\.Dataset"
    ):
        encode([Files("/")], allow_pickle=False)


def test_a_fraction_and_a_number_still_travel() -> None:
    assert trip([fractions.Fraction(1, 3), range(True)]) == [fractions.Fraction(1, 3), range(1)]
    assert len(body([fractions.Fraction(1, 3)])) > 0
