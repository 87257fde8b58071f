"""Batch trees to bytes and back."""

from __future__ import annotations

import dataclasses
import gc
import io
import types
import weakref
from collections import Counter, OrderedDict, UserDict, defaultdict
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis.extra import numpy as hnp
from trees import Point, Sample, body, digest, plain, same, trip

from dataloaderjob.batches.decoding import Decoder
from dataloaderjob.batches.encoding import encode
from dataloaderjob.batches.special import TENSOR_TYPES

T = TypeVar("T")


class Named(NamedTuple):
    image: Any
    label: Any


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    image: Any
    made: int = dataclasses.field(default=0, init=False)

    def __post_init__(self) -> None:
        raise AssertionError("rebuilding runs no __post_init__")


@dataclasses.dataclass
class Typed(Generic[T]):
    image: T


class Own(UserDict):  # type: ignore[type-arg]
    pass


class OwnDict(dict):  # type: ignore[type-arg]
    pass


def a_tensor(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """Of random bytes (NaN and all), or zeros and ones for bool."""
    if dtype is torch.bool:
        return torch.randint(0, 2, shape).bool()
    count = int(np.prod(shape, dtype=int)) * dtype.itemsize
    return torch.randint(0, 256, (count,), dtype=torch.uint8).view(dtype).view(shape)


def test_container_between_leaves_keeps_its_place_and_type() -> None:
    """Its leaves follow on those before it, so only the places in between show that it is no run of leaves."""
    for inner in ({"m": torch.arange(2)}, [torch.arange(2)], (torch.arange(2),), Point(torch.arange(2), 7)):
        for batch in ((torch.ones(1), inner, torch.zeros(1)), [torch.ones(1), inner, torch.zeros(1)]):
            found = trip(batch)
            assert (type(found), type(found[1])) == (type(batch), type(inner))
            assert digest(found) == digest(batch)


@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (1,), (5, 3), (2, 3, 4, 5)], ids=str)
@pytest.mark.parametrize("dtype", TENSOR_TYPES, ids=lambda d: str(d).removeprefix("torch."))
def test_tensor_of_every_dtype_keeps_bits_shape_and_dtype(dtype: torch.dtype, shape: Any) -> None:
    tensor = a_tensor(dtype, *shape)
    found = trip(tensor)
    assert (type(found), found.dtype, found.shape) == (torch.Tensor, dtype, tensor.shape)
    assert digest(found) == digest(tensor)
    assert found.untyped_storage().nbytes() == tensor.numel() * dtype.itemsize
    assert found.stride() == tensor.stride()


def test_no_torch_dtype_is_missing() -> None:
    every = {d for d in vars(torch).values() if isinstance(d, torch.dtype)}
    never = {d for d in every if "q" in str(d).split(".")[1] or str(d).split(".")[1].startswith("bits")}
    partial = {d for d in every if str(d).removeprefix("torch.u").removeprefix("torch.") in _SUB_BYTE}
    assert every - never - partial == set(TENSOR_TYPES)


_SUB_BYTE = {f"int{n}" for n in range(1, 8)}


@pytest.mark.parametrize(
    "tensor",
    [
        pytest.param(torch.rand(2, 3, 4, 5).to(memory_format=torch.channels_last), id="channels-last"),
        pytest.param(torch.rand(2, 1, 4, 5).to(memory_format=torch.channels_last), id="one-channel"),
        pytest.param(torch.rand(3, 4).T, id="transposed"),
        pytest.param(torch.rand(2, 3, 4).permute(2, 0, 1).bfloat16(), id="permuted-bf16"),
    ],
)
def test_dense_strides_are_kept(tensor: torch.Tensor) -> None:
    found = trip(tensor)
    for form in (torch.contiguous_format, torch.channels_last) if tensor.ndim == 4 else ():
        assert found.is_contiguous(memory_format=form) == tensor.is_contiguous(memory_format=form)
    assert found.stride() == tensor.stride() or 1 in tensor.shape
    assert torch.equal(found, tensor)
    assert found.untyped_storage().nbytes() == tensor.nbytes


@pytest.mark.parametrize(
    "tensor",
    [
        pytest.param(torch.rand(8, 8)[::2, 1:5], id="slice"),
        pytest.param(torch.rand(4, 1).expand(4, 3), id="expanded"),
        pytest.param(torch.rand(10)[3:7], id="part-of-a-storage"),
        pytest.param(torch.rand(3, 4, dtype=torch.complex64).conj(), id="conjugate"),
        pytest.param(torch.rand(3, dtype=torch.complex64).conj().imag, id="negative-bit"),
        pytest.param(torch.rand(6).unfold(0, 3, 1), id="overlapping"),
    ],
)
def test_other_strides_become_contiguous(tensor: torch.Tensor) -> None:
    found = trip(tensor)
    assert found.is_contiguous()
    assert torch.equal(found, tensor.resolve_conj())
    assert found.untyped_storage().nbytes() == tensor.numel() * tensor.itemsize


def test_requires_grad_and_parameters_are_kept() -> None:
    leaf, parameter = (
        torch.rand(3, requires_grad=True),
        torch.nn.Parameter(torch.rand(2), requires_grad=False),
    )
    found = trip([leaf, parameter, torch.nn.Parameter(torch.rand(1)), torch.rand(1)])
    assert [t.requires_grad for t in found] == [True, False, True, False]
    assert [type(t) for t in found] == [torch.Tensor, torch.nn.Parameter, torch.nn.Parameter, torch.Tensor]


@given(
    hnp.arrays(
        hnp.scalar_dtypes()
        | hnp.unicode_string_dtypes()
        | hnp.byte_string_dtypes()
        | hnp.datetime64_dtypes(),
        hnp.array_shapes(min_dims=0, min_side=0, max_dims=4),
    )
)
@settings(deadline=None)
def test_array_keeps_bits_shape_and_dtype(array: np.ndarray[Any, Any]) -> None:
    found = trip(array)
    assert (type(found), found.dtype, found.shape) == (np.ndarray, array.dtype, array.shape)
    assert found.tobytes() == array.tobytes()


@pytest.mark.parametrize(
    "array",
    [
        pytest.param(np.arange(6, dtype=">i4").reshape(2, 3), id="big-endian"),
        pytest.param(np.asfortranarray(np.arange(24.0).reshape(2, 3, 4)), id="fortran"),
        pytest.param(np.arange(24.0).reshape(2, 3, 4).transpose(1, 2, 0), id="permuted"),
        pytest.param(np.arange(10)[::-1], id="reversed"),
        pytest.param(np.arange(20).reshape(4, 5)[::2, 1:3], id="slice"),
        pytest.param(np.broadcast_to(np.float32(3), (2, 2)), id="broadcast"),
        pytest.param(np.zeros(3, [("a", "f4"), ("b", "i8", (2, 2)), ("c", [("d", "S3")])]), id="structured"),
        pytest.param(np.zeros(3, np.dtype([("a", "i1"), ("b", "f8")], align=True)), id="structured-aligned"),
        pytest.param(np.array(["a", "long"]), id="str"),
        pytest.param(np.array(["2026-01-01", "NaT"], "M8[ns]"), id="datetime"),
        pytest.param(np.zeros((2, 0), [("a", "f4")]), id="structured-of-no-item"),
    ],
)
def test_arrays_of_any_order_and_dtype_round_trip(array: np.ndarray[Any, Any]) -> None:
    found = trip(array)
    assert found.dtype == array.dtype
    assert found.tobytes() == array.tobytes()
    assert found.flags.writeable


def test_fortran_order_is_kept() -> None:
    assert trip(np.asfortranarray(np.ones((3, 4)))).flags.f_contiguous


@pytest.mark.parametrize(
    "scalar",
    [
        np.float32(1.5), np.int64(-3), np.bool_(True), np.complex64(1j), np.str_("text"), np.str_(""),
        np.bytes_(b"raw"), np.datetime64("2026-01-01"), np.timedelta64(3, "s"), np.float16("nan"),
        np.zeros(1, [("a", "i4"), ("b", "f4")])[0],
    ],
    ids=lambda s: f"{type(s).__name__}-{s}",
)  # fmt: skip
def test_a_numpy_scalar_keeps_its_type(scalar: np.generic) -> None:
    found = trip({"s": scalar})["s"]
    assert type(found) is type(scalar)
    assert found.dtype == scalar.dtype or scalar.dtype.itemsize == 0
    assert found.tobytes() == scalar.tobytes()


@given(plain)
@settings(deadline=None)
def test_plain_values_round_trip_alone_and_next_to_a_tensor(value: Any) -> None:
    assert same(trip(value), value)
    tensor, found = trip([torch.ones(2), value])
    assert same(found, value)
    assert tensor.tolist() == [1, 1]


def the_containers() -> list[Any]:
    t = torch.arange(6.0).view(2, 3)
    return [
        [t, [t, (t,)], []],
        (t, 1, "text", None),
        {"a": t, 1: t, None: [1, t], (1, "x"): 2.5, b"k": t, 1.5: True},
        OrderedDict(b=t, a=1),
        defaultdict(list, {"a": [t]}),
        defaultdict(None, {"a": t}),
        Counter(a=2, b=1),
        Own({"a": t}),
        OwnDict(a=t, b={"c": 1}),
        types.MappingProxyType({"a": t}),
        Point(t, Point(1, t)),
        Named(image=t, label=[1, 2]),
        Sample(t, label={"deep": (t, "s")}),
        Typed(t),
        {np.float32(1.5), 3, ("a", 1)},
        frozenset({Point(1, 2)}),
        t.shape,
        [torch.Size([1, 2]), t],
        torch.max(t, dim=0),
        torch.nn.utils.rnn.pack_sequence([torch.ones(3), torch.ones(1)]),
    ]


@pytest.mark.parametrize("batch", the_containers(), ids=lambda b: type(b).__name__)
def test_containers_round_trip(batch: Any) -> None:
    found = trip(batch)
    assert type(found) is type(batch)
    assert digest(found) == digest(batch)


def test_a_defaultdict_keeps_its_factory() -> None:
    found = trip(defaultdict(list, {"a": [torch.ones(1)]}))
    assert found["new"] == []


def test_a_frozen_dataclass_is_rebuilt_without_running_its_init() -> None:
    made = Frozen.__new__(Frozen)
    object.__setattr__(made, "image", torch.ones(2))
    object.__setattr__(made, "made", 7)
    found = trip(made)
    assert type(found) is Frozen
    assert (found.image.tolist(), found.made) == ([1, 1], 7)


def test_attributes_outside_a_dataclasss_fields_travel() -> None:
    sample = Sample(torch.ones(1))
    sample.extra = "beside"  # type: ignore[attr-defined]
    assert trip(sample).extra == "beside"
    assert trip(Typed[int](3)).image == 3


def test_a_generic_alias_leaves_no_trace() -> None:
    assert not hasattr(trip(Typed[Any](torch.ones(1))), "__orig_class__")


def test_memmap_arrives_as_an_array(tmp_path: Any) -> None:
    np.arange(10.0).tofile(tmp_path / "data")
    found = trip(np.memmap(tmp_path / "data", dtype=np.float64, mode="r"))
    assert type(found) is np.ndarray
    assert found.tolist() == list(range(10))


def test_object_of_another_type_travels_pickled_if_allowed() -> None:
    batch = {"f": [complex, 1 + 2j], "d": torch.device("cpu"), "t": torch.ones(2), "r": range(3)}
    found = trip(batch, allow_pickle=True)
    assert found["d"] == torch.device("cpu")
    assert found["f"][0] is complex
    assert found["r"] == range(3)


def test_a_pickled_object_has_the_class_of_this_process() -> None:
    class_of = trip([Point], allow_pickle=True)[0]
    assert class_of is Point


# Views


def test_tensors_are_views_of_the_body_and_writable() -> None:
    base = body([torch.zeros(3), np.zeros(3)])
    tensor, array = Decoder(allow_pickle=False).decode(base)
    tensor += 1
    array[:] = 2
    again = Decoder(allow_pickle=False).decode(base)
    assert again[0].tolist() == [1, 1, 1]
    assert again[1].tolist() == [2, 2, 2]


def test_every_leaf_is_aligned_to_64_bytes() -> None:
    base = body([torch.zeros(3, dtype=torch.uint8), torch.zeros(5), np.zeros(1, "S3"), torch.zeros(1)])
    a, b, c, d = Decoder(allow_pickle=False).decode(base)
    assert all(address % 64 == 0 for address in (a.data_ptr(), b.data_ptr(), c.ctypes.data, d.data_ptr()))


class Lease:
    """Lends memory as the pool does: the array interface on an object of our own."""

    def __init__(self, data: np.ndarray[Any, Any]) -> None:
        self.data = data
        self.__array_interface__ = data.__array_interface__


@pytest.mark.parametrize(
    "leaf", [torch.ones(3), torch.ones(3).bfloat16(), np.ones(3)], ids=["f4", "bf16", "np"]
)
def test_any_view_keeps_the_lease_and_the_last_one_ends_it(leaf: Any) -> None:
    lease = Lease(body([leaf, leaf]))
    alive = weakref.ref(lease)
    first, second = Decoder(allow_pickle=False).decode(np.asarray(lease))
    del lease
    part = second[1:]
    del first, second
    gc.collect()
    assert alive() is not None
    assert float(part[0]) == 1
    del part
    gc.collect()
    assert alive() is None


def test_scalars_and_strings_keep_no_lease() -> None:
    structured = np.zeros(1, [("a", "i4")])[0]
    lease = Lease(body([torch.ones(1), np.float32(2), structured, "text", b"x" * 100_000]))
    alive = weakref.ref(lease)
    rest = Decoder(allow_pickle=False).decode(np.asarray(lease))[1:]
    del lease
    gc.collect()
    assert alive() is None
    assert len(rest) == 4


def test_a_saved_tensor_takes_its_own_bytes_only() -> None:
    found = trip([torch.zeros(1000), torch.zeros(100_000)])
    out = io.BytesIO()
    torch.save(found[0], out)
    assert len(out.getvalue()) < 10_000


# Encoding


def test_large_tensors_are_sent_without_a_copy() -> None:
    tensor, data = torch.zeros(10_000), b"x" * 10_000
    encoded = encode([tensor, data], allow_pickle=False)
    tensor += 1
    found = Decoder(allow_pickle=False).decode(np.frombuffer(bytearray(b"".join(encoded.buffers)), np.uint8))
    assert (found[0] == 1).all()
    assert found[1] == data


def test_an_encoded_batch_keeps_its_tensors_alive() -> None:
    encoded = encode([torch.full((10_000,), 7.0) for _ in range(3)], allow_pickle=False)
    gc.collect()
    junk = [torch.zeros(10_000) for _ in range(3)]
    found = Decoder(allow_pickle=False).decode(np.frombuffer(bytearray(b"".join(encoded.buffers)), np.uint8))
    assert all((t == 7).all() for t in found)
    del junk


def test_many_small_leaves_make_few_buffers() -> None:
    assert len(encode([torch.ones(2) for _ in range(500)], allow_pickle=False).buffers) <= 2


def test_scalars_and_strings_that_change_do_not_miss_the_schema_cache() -> None:
    decoder = Decoder(allow_pickle=False)
    for i in range(20):
        batch = {
            "image": torch.rand(2, 3),
            "name": f"image {i}" * i,
            "n": i**i,
            "meta": {"ids": list(range(i))},
        }
        assert digest(decoder.decode(body(batch))) == digest(batch)
    assert len(decoder._plans) == 1


def test_the_schema_cache_is_bounded() -> None:
    decoder = Decoder(allow_pickle=False)
    for i in range(600):
        assert decoder.decode(body(torch.ones(i))).shape == (i,)
    assert len(decoder._plans) <= 256
