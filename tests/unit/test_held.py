"""Which generators are found, and what seeds them."""

from __future__ import annotations

import collections
import copy
import functools
import random
import time
import weakref
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dataloaderjob.core import ticket_codec
from dataloaderjob.local.mapping.rows import Apply, inputs
from dataloaderjob.making.fetcher import Fetcher, seed_generators
from dataloaderjob.making.held import MOST_ITEMS, HeldGenerators, find, state_of, states_of_classes
from dataloaderjob.trainer.resume import held_draws

KINDS: dict[str, Any] = {
    "RandomState": lambda: np.random.RandomState(1),
    "RandomState of PCG64": lambda: np.random.RandomState(np.random.PCG64(1)),
    "PCG64": lambda: np.random.default_rng(1),
    "PCG64DXSM": lambda: np.random.Generator(np.random.PCG64DXSM(1)),
    "MT19937": lambda: np.random.Generator(np.random.MT19937(1)),
    "Philox": lambda: np.random.Generator(np.random.Philox(1)),
    "SFC64": lambda: np.random.Generator(np.random.SFC64(1)),
    "Random": lambda: random.Random(1),
    "torch": lambda: torch.Generator().manual_seed(1),
}
kinds = pytest.mark.parametrize("make", KINDS.values(), ids=KINDS)


def draw(generator: Any) -> float:
    if isinstance(generator, torch.Generator):
        return torch.rand(1, generator=generator, dtype=torch.float64).item()
    if isinstance(generator, np.random.RandomState):
        return generator.rand()
    return float(generator.random())


def gaussians(generator: Any) -> list[float]:
    if isinstance(generator, torch.Generator):
        return torch.randn(3, generator=generator).tolist()
    normal = getattr(generator, "normal", None) or generator.gauss
    return [normal(0.0, 1.0) for _ in range(3)]


@kinds
def test_seed_gives_the_same_draws_regardless_of_earlier_draws(make: Any) -> None:
    one, other = make(), make()
    here, there = HeldGenerators([one]), HeldGenerators({"a": (other,)})
    gaussians(other)  # half of a pair may be kept
    for held in (here, there):
        held.seed(12345, 9)
    assert gaussians(one) == gaussians(other)
    assert draw(one) == draw(other)


@kinds
def test_seeds_give_distinct_draws_and_the_old_state_is_restored(make: Any) -> None:
    one = make()
    held, before, expected = HeldGenerators(one), state_of(find(one)[0][0]), draw(copy.deepcopy(one))
    found = set()
    with held.preserved():
        for seed in range(2000):
            held.seed(seed, 9)
            found.add(draw(one))
    assert len(found) == 2000
    assert state_of(find(one)[0][0]) == before
    assert draw(one) == expected


@kinds
def test_generators_with_different_states_draw_differently(make: Any) -> None:
    one, other = make(), make()
    draw(other)
    held = [HeldGenerators(one), HeldGenerators(other)]
    for each in held:
        each.seed(7, 9)
    assert draw(one) != draw(other)


@given(st.integers(0, 2**64 - 1))
def test_any_seed_can_be_set(seed: int) -> None:
    HeldGenerators([make() for make in KINDS.values()]).seed(seed, 9)


def found(*roots: Any) -> list[Any]:
    return [one for one, _ in find(*roots)]


def test_a_generator_is_found_once_wherever_it_lies() -> None:
    rng = random.Random(1)
    places: list[Any] = [
        [rng], (rng,), {rng}, frozenset([rng]), {"a": rng}, {rng: 1}, collections.deque([rng]),
        collections.OrderedDict(a=[[rng]]), functools.partial(print, rng), functools.partial(print, end=rng),
        SimpleNamespace(a=SimpleNamespace(b=rng)), rng.random, collections.UserDict(a=rng), lambda: rng,
    ]  # fmt: skip
    for place in places:
        assert found(place) == [rng], place
    assert found(places) == [rng]


def test_bit_generator_shared_by_two_is_found_once() -> None:
    bits = np.random.PCG64(1)
    assert found(np.random.Generator(bits), np.random.Generator(bits)) == [bits]


class Proxy:
    """As of a lazy import: whoever asks what it is has it loaded."""

    @property
    def __class__(self) -> Any:  # type: ignore[override]
        raise AssertionError("it was asked what it is")

    def __getattribute__(self, name: str) -> Any:
        raise AssertionError(f"it was asked for {name}")


class Lazy(list[Any]):
    """Its items are read when they are asked for."""

    def __iter__(self) -> Any:
        raise AssertionError("its items were read")


class LazyDict(dict[Any, Any]):
    def items(self) -> Any:
        raise AssertionError("its items were read")

    __iter__ = items


class HalfMade:
    __slots__ = ("set", "unset")

    def __init__(self, rng: Any) -> None:
        self.set = rng


def test_search_runs_no_code_of_the_objects() -> None:
    rng = random.Random(1)
    gone: Any = weakref.proxy(random.Random(2))
    assert found([Proxy(), gone, mock.MagicMock(), Lazy([rng]), LazyDict(a=1), HalfMade(rng)]) == [rng]


def test_search_ends_on_circular_references() -> None:
    loop: dict[str, Any] = {}
    loop["self"] = [loop]
    assert found(loop) == []


@pytest.mark.parametrize(
    "own",
    [
        vars(np.random.mtrand)["_rand"],
        vars(random)["_inst"],
        torch.default_generator,
        random.SystemRandom(),
        np.random.rand,
        random.random,
    ],
)
def test_global_generators_are_not_seeded_twice(own: Any) -> None:
    assert found([own]) == []


def test_search_does_not_walk_through_data() -> None:
    data = [{"path": str(n), "label": n, "box": [1, 2, 3, 4]} for n in range(300_000)]
    rng = random.Random(1)
    began = time.process_time()
    assert found(SimpleNamespace(data=data, array=np.zeros(10**6), transform=[rng])) == [rng]
    assert time.process_time() - began < 2, "of 300,000 items 1,000 are looked at"
    assert found([*range(MOST_ITEMS), rng]) == []


class Library:
    """As MONAI's Randomizable: it is installed, so that its objects travel without its class."""

    R = np.random.RandomState(3)


Library.__module__ = "monai.transforms.transform"


def test_generator_of_a_library_class_gets_the_shipped_state(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dataloaderjob.shipping.user_code.is_users", lambda cls: cls is not Library)
    item = Library()
    ((one, where),) = find(item)
    assert (one, where) == (Library.R, "monai.transforms.transform.Library.R")
    here = HeldGenerators(item)
    assert states_of_classes(item) == {where: state_of(Library.R)}
    here.seed(5, 9)
    expected = Library.R.rand()
    monkeypatch.setattr(Library, "R", np.random.RandomState())  # of another process
    HeldGenerators(item, of_classes={where: state_of(np.random.RandomState(3))}).seed(5, 9)
    assert Library.R.rand() == expected


@pytest.mark.parametrize("drawn", [0, 1, 5, 700])
@kinds
def test_mark_changes_no_later_draw(make: Any, drawn: int) -> None:
    one, other = make(), make()
    for _ in range(drawn):
        assert draw(one) == draw(other)
    held = HeldGenerators(one)
    held.mark()
    assert [draw(one) for _ in range(1500)] == [draw(other) for _ in range(1500)]
    assert gaussians(one) == gaussians(other)


MERSENNE = {
    "RandomState": lambda seed: (one := np.random.RandomState(seed), lambda: one.seed(seed)),
    "Random": lambda seed: (one := random.Random(seed), lambda: one.seed(seed)),
    "torch": lambda seed: (one := torch.Generator().manual_seed(seed), lambda: one.manual_seed(seed)),
}


@pytest.mark.parametrize("make", MERSENNE.values(), ids=MERSENNE)
def test_generator_reseeded_with_its_own_seed_counts_as_reseeded(make: Any) -> None:
    """As by worker_init_fn of worker 0, where others get other numbers."""
    found = []
    for seed in (3, 4):
        one, seed_again = make(seed)
        held = HeldGenerators(one)
        held.mark()
        seed_again()
        held.look_again()
        held.seed(5, 9)
        found.append(draw(one))
    assert found[0] == found[1], "it follows from the epoch's base seed"
    one, _ = make(3)
    held = HeldGenerators(one)
    held.mark()
    held.look_again()
    held.seed(5, 9)
    assert draw(one) != found[0], "nobody has seeded it"


def test_reseeded_generator_follows_the_base_seed_of_each_epoch() -> None:
    kept, seeded = random.Random(1), random.Random(2)
    held = HeldGenerators([kept, seeded])
    held.seed(5, 9)
    of_kept, of_seeded = kept.random(), seeded.random()
    holder = [random.Random(1), random.Random(2)]
    again = HeldGenerators(holder)
    again.mark()
    holder[1].seed(77)
    again.look_again()
    draws = []
    for base_seed in (9, 10):
        again.seed(5, base_seed)
        assert holder[0].random() == of_kept
        draws.append(holder[1].random())
    assert len({*draws, of_seeded}) == 3


def test_generator_put_in_place_later_is_seeded() -> None:
    draws = []
    for _ in range(2):
        holder = SimpleNamespace(rng=random.Random(1))
        held = HeldGenerators(holder)
        holder.rng = random.Random()  # of the clock
        held.look_again()
        held.seed(5, 9)
        draws.append(holder.rng.random())
    assert draws[0] == draws[1]


@given(st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1), st.integers(0, ticket_codec.MAX_DRAWS))
def test_ticket_carries_the_number_of_draws(keys: list[int], draws: int) -> None:
    packed = ticket_codec.with_draws(ticket_codec.pack_ticket(7, 3, keys), draws)
    assert ticket_codec.unpack_ticket(packed) == ticket_codec.Ticket(7, 3, False, keys, draws)
    assert ticket_codec.ints_of(packed) == keys
    assert ticket_codec.with_draws(packed, 0) == ticket_codec.pack_ticket(7, 3, keys)


class Data(list[Any]):
    """That a weak reference can be made to."""


class Wrapper:
    """As torch's Subset."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset


def test_each_loader_of_a_dataset_has_its_own_range_of_draws() -> None:
    data, other = Data(), Data()
    wrapped = Wrapper(Wrapper(data))
    firsts = [held_draws.next_range(one) // held_draws.EPOCHS for one in (data, wrapped, other, data)]
    assert firsts == [0, 1, 0, 2]


def test_resumed_loader_keeps_its_range_of_draws_and_the_next_differs() -> None:
    data = Data()
    held_draws.go_on(data, 3 * held_draws.EPOCHS)
    assert held_draws.next_range(data) == 4 * held_draws.EPOCHS
    held_draws.go_on(data, 0)
    assert held_draws.next_range(data) == 5 * held_draws.EPOCHS


def test_attribute_named_dataset_need_not_be_a_dataset() -> None:
    for inner in ("cifar10", [1, 2], {"a": 1}, None):
        data = Wrapper(inner)
        assert [held_draws.next_range(data) // held_draws.EPOCHS for _ in range(2)] == [0, 1], inner


def test_draw_numbers_fit_a_ticket_and_iterators_have_their_own() -> None:
    data = Data()
    ranges = [held_draws.next_range(data) for _ in range(100)]
    numbers = [held_draws.next_number(data) for _ in range(200)]
    assert len(set(numbers)) == 200
    assert not set(ranges) & set(numbers)
    assert max(*ranges, *numbers) <= ticket_codec.MAX_DRAWS
    held_draws.go_on(data, held_draws.OF_ITERATORS + 500)
    assert held_draws.next_number(data) == held_draws.OF_ITERATORS + 501


class Meta(type):
    def __eq__(cls, other: object) -> bool:
        return cls is other

    __hash__ = None  # type: ignore[assignment]


class Unhashable(metaclass=Meta):
    pass


class OfHardware(random.Random):
    def getstate(self) -> Any:
        raise NotImplementedError("it has none")


def test_uninspectable_or_stateless_generators_are_left_alone() -> None:
    rng = random.Random(1)
    held = HeldGenerators([Unhashable(), OfHardware(), rng])
    held.seed(5, 9)
    expected = rng.random()
    held.look_again()
    held.seed(5, 9)
    assert held
    assert expected == expected


def test_recreated_dataset_starts_its_draws_from_zero() -> None:
    for _ in range(3):
        assert held_draws.next_range(Data()) == 0
    assert held_draws.next_range([1]) == 0


def test_opencvs_generator_is_seeded() -> None:
    cv2 = pytest.importorskip("cv2")
    drawn = []
    for seed in (5, 6, 5):
        seed_generators(seed)
        drawn.append(cv2.randu(np.zeros(4, np.float32), 0.0, 1.0).tolist())
    assert drawn[0] == drawn[2] != drawn[1]


class Drawn:
    """A dataset for `dataloaderjob map`."""

    def __init__(self) -> None:
        self.rng = random.Random(3)

    def __len__(self) -> int:
        return 20

    def __getitem__(self, i: int) -> float:
        return self.rng.random()


class DrawnInBatches(Drawn):
    def __getitems__(self, keys: list[int]) -> list[float]:
        return [self.rng.random() for _ in keys]


@pytest.mark.parametrize("kind", [Drawn, DrawnInBatches])
def test_map_draws_by_the_index_of_a_row_wherever_it_stopped(kind: type) -> None:
    found = []
    for first, number, draws in ((0, 0, 0), (12, 3, 5)):
        dataset = inputs(kind())
        fetcher = Fetcher(dataset, list, HeldGenerators(dataset))
        found.append(fetcher.fetch(number, ticket_codec.Ticket(7, first, False, [4, 5, 6], draws)))
    assert found[0] == found[1]
    assert len({sample for _, sample in found[0]}) == 3


class Noisy:
    """A function that is made in each process."""

    def __init__(self) -> None:
        self.rng = np.random.default_rng(1)

    def __call__(self, batch: torch.Tensor) -> dict[str, Any]:
        return {"x": self.rng.random(len(batch))}


def test_class_instantiated_per_process_by_map_draws_by_the_row() -> None:
    one, other = Apply(Noisy, None), Apply(Noisy, None)
    one([(0, 1), (1, 2)])
    assert one([(4, 1), (5, 2)]).tobytes() == other([(4, 1), (5, 2)]).tobytes()
