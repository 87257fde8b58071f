"""Batches on their way to a device, which is simulated: a copy reads its memory late, and a place of the pool is filled
with other bytes as soon as nobody holds it."""

from __future__ import annotations

import dataclasses
import datetime as dt
import gc
import itertools
import logging
import os
import random
import threading
import time
import weakref
from collections import Counter, OrderedDict, UserDict
from collections.abc import Callable, Iterator, MutableMapping
from types import MappingProxyType, SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from late_device import LateDevice
from torch.nn.utils.rnn import pack_sequence, pad_packed_sequence

from dataloaderjob import DataLoader
from dataloaderjob.core.errors import InputError
from dataloaderjob.trainer.device import devices
from dataloaderjob.trainer.device.devices import device_of
from dataloaderjob.trainer.device.transfer import Sent, StageRunner, ToDevice, Way, seed_of
from dataloaderjob.trainer.device.trees import mapped
from dataloaderjob.trainer.session.pool import Mapping, Region

PLACES, WORDS = 3, 4
POISON = -1
INTERLEAVINGS = 100_000


class Pair(NamedTuple):
    x: int
    y: int


@dataclasses.dataclass(frozen=True)
class Sample:
    x: Any
    y: Any = 2


def which() -> str:
    return "batch 7"


class SmallPool:
    """Places that batches are lent from, poisoned when they come back."""

    def __init__(self, places: int = PLACES) -> None:
        self.memory = np.full((places, WORDS), POISON, np.int64)
        self.free = list(range(places))

    def lend(self, number: int) -> np.ndarray:
        place = self.free.pop()
        lent = np.ndarray((WORDS,), np.int64, self.memory, place * WORDS * 8)
        lent[:] = number
        weakref.finalize(lent, self._back, place)
        return lent

    def tensor(self, number: int) -> torch.Tensor:
        return torch.from_numpy(self.lend(number))

    def _back(self, place: int) -> None:
        self.memory[place] = POISON
        self.free.append(place)


class Careless(ToDevice):
    """Lets go of what it sends at once."""

    def send(self, batch: Any, digest: int, which: Any, lent: Any = None) -> Sent:
        sent = super().send(batch, digest, which, lent)
        self._held.clear()
        return sent


class HoldsBatches(ToDevice):
    """Holds the batch, and not where it lies."""

    def send(self, batch: Any, digest: int, which: Any, lent: Any = None) -> Sent:
        return super().send(batch, digest, which)


class Whole:
    """Nothing that can be taken apart."""

    def __init__(self, x: torch.Tensor) -> None:
        self.x = x


class Wrapped(MutableMapping[str, Any]):
    """Its copy has the same dict inside."""

    def __init__(self, **items: Any) -> None:
        self.items_inside = items

    def __getitem__(self, key: str) -> Any:
        return self.items_inside[key]

    def __setitem__(self, key: str, value: Any) -> None:
        self.items_inside[key] = value

    def __delitem__(self, key: str) -> None:
        del self.items_inside[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.items_inside)

    def __len__(self) -> int:
        return len(self.items_inside)


Form = tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]
"""What makes a batch of a tensor, and what finds it there again."""
FORMS: dict[str, Form] = {
    "a dict": (lambda x: {"x": x}, lambda batch: batch["x"]),
    "a list in a tuple": (lambda x: (0, [x]), lambda batch: batch[1][0]),
    "a named tuple": (lambda x: Pair(x, 1), lambda batch: batch.x),
    "a dataclass": (Sample, lambda batch: batch.x),
    "a mapping that shares": (lambda x: Wrapped(x=x), lambda batch: batch["x"]),
    "an object": (Whole, lambda batch: batch.x),
    "objects in an array": (lambda x: np.array([Whole(x)], object), lambda batch: batch[0].x),
}


def replacing(device: LateDevice) -> Any:
    """A stage that copies by itself, and puts the copy where it had what it reads from."""

    def stage(batch: Any, _: torch.Generator) -> Any:
        batch["x"] = device.copy(batch["x"])
        return batch

    return stage


def doubling(_: LateDevice) -> Any:
    return lambda batch, _: {"x": batch["x"] * 2 - batch["x"]}


def wrong(
    kind: type[ToDevice],
    choices: Iterator[int],
    form: Form = FORMS["a dict"],
    stage: Callable[[LateDevice], Any] | None = None,
    batches: int = 3,
) -> bool:
    """Whether any batch of one interleaving is another one."""
    device, pool = LateDevice(), SmallPool()
    transfer = kind(device, None if stage is None else StageRunner(stage(device), 0))
    made, found_in = form
    on_its_way: list[Sent] = []
    sent = accepted = 0
    while accepted < batches:
        choice = next(choices)
        if choice == 0 and sent < batches and pool.free:
            lent = pool.lend(sent)
            on_its_way.append(transfer.send(made(torch.from_numpy(lent)), sent, which, lent))
            del lent
            sent += 1
        elif choice == 1:
            device.step()
        elif choice == 2:
            transfer.let_go()
        elif choice == 3 and on_its_way:
            found = found_in(transfer.accept(on_its_way.pop(0)))
            if found.tolist() != [accepted] * WORDS:
                return True
            accepted += 1
    transfer.end()
    return len(pool.free) != PLACES


def by_chance(seed: int) -> Iterator[int]:
    chance = random.Random(seed)
    return iter(lambda: chance.randrange(4), None)


@pytest.mark.parametrize("part", [0, *(pytest.param(n, marks=pytest.mark.nightly) for n in range(1, 5))])
def test_no_interleaving_changes_a_batch(part: int):
    assert not any(wrong(ToDevice, by_chance(seed)) for seed in range(part, INTERLEAVINGS, 5))


def test_without_the_event_most_interleavings_corrupt_the_batch():
    """What shows that the test above can fail."""
    assert sum(wrong(Careless, by_chance(seed)) for seed in range(1000)) > 500


@settings(max_examples=500, deadline=None)
@given(
    st.lists(st.integers(0, 3)),
    st.one_of(
        st.tuples(st.sampled_from(sorted(FORMS)), st.none()),
        st.tuples(
            st.sampled_from(["a dict", "a mapping that shares"]), st.sampled_from([replacing, doubling])
        ),
    ),
)
def test_no_interleaving_changes_a_batch_in_any_container_or_stage(choices: list[int], how: tuple[str, Any]):
    assert not wrong(ToDevice, itertools.chain(choices, itertools.cycle(range(4))), FORMS[how[0]], how[1])


@pytest.mark.parametrize("form", FORMS)
def test_without_the_event_batches_in_any_container_are_corrupted(form: str):
    assert any(wrong(Careless, by_chance(seed), FORMS[form]) for seed in range(50))


def test_holding_the_batch_is_not_enough_if_a_stage_replaces_its_copies():
    assert any(wrong(HoldsBatches, by_chance(seed), stage=replacing) for seed in range(50))


def test_extent_is_returned_exactly_when_its_copy_has_finished():
    device, pool = LateDevice(), SmallPool()
    transfer = ToDevice(device, None)
    sent = transfer.send(pool.tensor(7), 0, which)
    assert transfer.let_go() is not None
    assert len(pool.free) == PLACES - 1
    while device.step():
        pass
    assert transfer.let_go() is None
    assert len(pool.free) == PLACES
    assert transfer.accept(sent).tolist() == [7] * WORDS


def test_all_copies_are_awaited_at_the_end():
    device, pool = LateDevice(), SmallPool()
    transfer = ToDevice(device, None)
    sent = [transfer.send(pool.tensor(number), 0, which) for number in range(PLACES)]
    transfer.end()
    assert len(pool.free) == PLACES
    assert [transfer.accept(one)[0].item() for one in sent] == list(range(PLACES))


def test_inputs_and_results_of_a_stage_live_until_their_copies_finish():
    device, pool = LateDevice(), SmallPool()
    made: list[weakref.ref[torch.Tensor]] = []

    def stage(batch: torch.Tensor, generator: torch.Generator) -> dict[str, Any]:
        double = batch * 2
        made.append(weakref.ref(double))
        return {"whole": device.copy(batch), "double": double}

    transfer = ToDevice(device, StageRunner(stage, 0))
    sent = transfer.send(pool.tensor(4), 0, which)
    gc.collect()
    assert made[0]() is not None
    found = transfer.accept(sent)
    assert (found["whole"].tolist(), found["double"].tolist()) == ([4] * WORDS, [8] * WORDS)
    transfer.let_go()
    assert (made[0](), len(pool.free)) == (None, PLACES)


def test_failing_stage_keeps_data_alive_until_started_copies_finish():
    device, pool = LateDevice(), SmallPool()

    def stage(batch: torch.Tensor, generator: torch.Generator) -> Any:
        device.copy(batch)
        raise ZeroDivisionError("of the user")

    transfer = ToDevice(device, StageRunner(stage, 0))
    with pytest.raises(ZeroDivisionError) as raised:
        transfer.send(pool.tensor(4), 0, which)
    assert raised.value.__notes__ == ["raised by device_stage, in the trainer's process, for batch 7"]
    del raised
    gc.collect()
    assert len(pool.free) == PLACES - 1
    transfer.end()
    assert len(pool.free) == PLACES


def test_generator_of_a_stage_depends_only_on_epoch_and_batch():
    drawn: list[int] = []

    def stage(batch: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        drawn.append(int(torch.randint(2**62, (), generator=generator)))
        return batch

    for epoch, digest in ((1, 5), (1, 6), (2, 5), (1, 5)):
        ToDevice(LateDevice(), StageRunner(stage, epoch)).send(torch.zeros(1), digest, which)
    assert drawn[0] == drawn[3]
    assert len(set(drawn)) == 3
    assert 0 <= seed_of(2**64 - 1, 2**64 - 1) < 2**63


@pytest.mark.parametrize("takes", [True, False])
def test_pool_regions_are_registered_or_users_get_views_of_them(takes: bool):
    device = LateDevice()
    regions = [Region(n, 8192, False, -1, Mapping(-1, 8192), 4096 * n) for n in (1, 3)]
    for region in regions:
        region.map.is_claimed = True
    transfer = ToDevice(device, None, lambda: regions)
    device.takes_memory = takes
    transfer.send(torch.zeros(1), 0, which)
    assert device.registered == ({4096: 8192, 12288: 8192} if takes else {})
    assert [region.map.is_claimed for region in regions] == [takes, takes]


def test_host_stage_runs_with_one_thread_and_without_gradients():
    threads: list[tuple[int, bool]] = []

    def stage(batch: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        threads.append((torch.get_num_threads(), torch.is_grad_enabled()))
        return batch + torch.rand(2, generator=generator)

    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        transfer = Way(None, stage).transfer(3)
        assert transfer is not None
        found = transfer.accept(transfer.send(torch.zeros(2), 5, which))
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
    expected = torch.rand(2, generator=torch.Generator().manual_seed(seed_of(3, 5)))
    assert torch.equal(found, expected)
    assert threads == [(1, False)]
    assert transfer.let_go() is None
    assert Way().transfer(0) is None, "without a stage nothing is to be done"


def test_stop_iteration_in_a_stage_does_not_end_the_epoch():
    def stage(batch: torch.Tensor, _: torch.Generator) -> Any:
        return next(iter(()))

    with pytest.raises(RuntimeError, match="device_stage raised StopIteration for batch 7") as raised:
        ToDevice(LateDevice(), StageRunner(stage, 0)).send(torch.zeros(1), 0, which)
    assert isinstance(raised.value.__cause__, StopIteration)


def test_stage_that_returns_none_is_reported():
    with pytest.raises(TypeError, match="device_stage must return a batch, but returned None") as raised:
        ToDevice(LateDevice(), StageRunner(lambda batch, generator: None, 0)).send(torch.zeros(1), 0, which)
    assert raised.value.__notes__ == ["raised by device_stage, in the trainer's process, for batch 7"]


def test_tensors_in_objects_reach_the_device_and_the_rest_leaves_the_pool():
    device, pool = LateDevice(), SmallPool()
    transfer = ToDevice(device, None)
    day = dt.date(2026, 1, 1)
    x = pool.tensor(1).double().requires_grad_()
    batch = {"whole": Whole(x), "array": pool.lend(2), "name": "a", "n": 3, "none": None, "day": day}
    found = transfer.accept(transfer.send(batch, 0, which))
    del batch
    transfer.end()
    gc.collect()
    assert len(pool.free) == PLACES
    assert found["whole"].x.was_copied
    assert found["whole"].x.requires_grad
    assert (found["whole"].x.tolist(), found["array"].tolist()) == ([1] * WORDS, [2] * WORDS)
    assert (found["name"], found["n"], found["none"], found["day"]) == ("a", 3, None, day)


def test_uncopyable_result_of_a_stage_is_refused_by_name():
    stage = StageRunner(lambda batch, generator: (row for row in batch), 0)
    with pytest.raises(
        TypeError, match=r"a generator in a batch cannot be copied .*: have device_stage= return"
    ):
        ToDevice(LateDevice(), stage).send(torch.zeros(1), 0, which)


def test_error_during_transfer_names_the_batch(monkeypatch: pytest.MonkeyPatch):
    device = LateDevice()
    monkeypatch.setattr(device, "copy", lambda _: torch.zeros(3)[7])
    with pytest.raises(IndexError) as raised:
        ToDevice(device, None).send([torch.zeros(1)], 0, which)
    assert raised.value.__notes__ == ["raised during the copy to the device, for batch 7"]


def test_stage_calls_do_not_overlap():
    """The thread of an iterator that was given up may be in its last call."""
    inside, entered, most = threading.Semaphore(0), threading.Semaphore(0), []

    def stage(batch: torch.Tensor, _: torch.Generator) -> torch.Tensor:
        most.append(1)
        entered.release()
        inside.acquire()
        most.pop()
        return batch

    way = Way(None, stage, turn=threading.Lock())
    transfers = [way.transfer(epoch) for epoch in range(2)]
    threads = [
        threading.Thread(target=transfer.send, args=(torch.zeros(1), 0, which))
        for transfer in transfers
        if transfer is not None
    ]
    for thread in threads:
        thread.start()
    entered.acquire()
    assert not entered.acquire(timeout=0.1)
    assert most == [1]
    inside.release(2)
    for thread in threads:
        thread.join()


def test_missing_or_invalid_device_is_refused_with_a_remedy(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    with pytest.raises(InputError, match="torch has no accelerator: device='cpu'"):
        device_of("cuda", {})
    with pytest.raises(InputError, match="such as 'cuda', but is 'gpu'"):
        device_of("gpu", {})
    assert device_of("cpu", {}) is None


def test_leaves_of_dataclasses_are_replaced_too():
    assert mapped({"s": Sample(1, [3])}, lambda leaf: leaf * 10) == {"s": Sample(10, [30])}


def test_a_packed_sequence_keeps_the_sizes_of_its_batches_on_the_host():
    packed = pack_sequence([torch.tensor([1.0, 2.0]), torch.tensor([3.0])])
    device = LateDevice()
    transfer = ToDevice(device, None)
    found = transfer.accept(transfer.send(packed, 0, which))
    assert not hasattr(found.batch_sizes, "was_copied")
    padded, lengths = pad_packed_sequence(found, batch_first=True)
    assert (padded.tolist(), lengths.tolist()) == ([[1.0, 2.0], [3.0, 0.0]], [2, 1])


class Own(dict[str, Any]):
    """A container with an attribute of its own."""


def test_attributes_of_containers_and_tensor_subclasses_are_copied():
    device, pool = LateDevice(), SmallPool(places=8)
    transfer = ToDevice(device, None)
    own = Own(x=pool.tensor(1))
    own.lengths = [pool.tensor(2)]  # type: ignore[attr-defined]
    own.rows = pool.lend(3)  # type: ignore[attr-defined]
    own.opened = open(os.devnull)  # type: ignore[attr-defined]  # noqa: SIM115  what cannot be copied
    box = pool.tensor(4).as_subclass(Box)
    box.size, box.corner = (2, 3), pool.tensor(5)
    own.me, own.shape = own, torch.Size([2, 3])  # type: ignore[attr-defined]
    own.sparse = torch.sparse_coo_tensor(torch.arange(WORDS)[None], pool.tensor(6), (WORDS,))  # type: ignore[attr-defined]
    own.space = SimpleNamespace(x=pool.tensor(7), name="kept")  # type: ignore[attr-defined]
    own.ordered = OrderedDict(pair=Pair(pool.tensor(8), 2))  # type: ignore[attr-defined]
    found, box_found = transfer.accept(transfer.send([own, box], 0, which))
    found.opened.close()
    assert found.me is own, "what cannot be copied is as it was"
    assert type(found.shape) is torch.Size
    del own.me, found.me, own, box  # type: ignore[attr-defined]
    transfer.end()
    gc.collect()
    assert len(pool.free) == 8, "nothing of the pool is in the trainer's hands"
    assert type(found) is Own
    told = [found["x"], *found.lengths, found.rows, box_found, box_found.corner, found.sparse.to_dense()]
    told += [found.space.x, found.ordered["pair"].x]
    assert [one[0].item() for one in told] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert found.space.x.was_copied
    assert found.ordered["pair"].x.was_copied
    assert found.space.name == "kept"
    assert type(box_found) is Box
    assert box_found.size == (2, 3)


def test_tensor_that_a_batch_has_twice_is_copied_once():
    class Attributes(dict[str, Any]):
        def __init__(self, **items: Any) -> None:
            super().__init__(items)
            self.__dict__ = self

    device, pool = LateDevice(), SmallPool()
    transfer = ToDevice(device, None)
    x = pool.tensor(1)
    found, again = transfer.accept(transfer.send([Attributes(x=x), x], 0, which))
    transfer.end()
    assert found["x"] is found.x is again
    assert device.copies == 1


class Box(torch.Tensor):
    """As torchvision's tensors it keeps its class in few operations, and its attributes in none."""

    size: Any
    corner: Any
    me: Any
    mask: Any

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            return function(*args, **(kwargs or {}))


class Slots:
    __slots__ = "__x"

    def __init__(self, x: torch.Tensor) -> None:
        self.__x = x


class Meta(LateDevice):
    """torch's device without memory, where nothing is copied."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[torch.Tensor] = []

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to("meta")

    def keep(self, tensor: torch.Tensor) -> None:
        self.kept.append(tensor)


def test_device_tensors_made_by_a_stage_are_kept_for_the_trainers_stream():
    device = Meta()
    made = [torch.empty(3, device="meta") for _ in range(7)]

    def stage(batch: torch.Tensor, generator: torch.Generator) -> Any:
        own = Own(x=made[0])
        own.mask, own.space = made[1], SimpleNamespace(x=made[2])  # type: ignore[attr-defined]
        box = torch.zeros(1).as_subclass(Box)
        box.corner, box.size, box.me = made[3], SimpleNamespace(x=made[4]), box
        box.mask = torch.nn.Parameter(made[5])  # which makes deep copies of itself in its own way
        made.append(box.mask)
        own.slots = Slots(made[6])  # type: ignore[attr-defined]
        return [own, box]

    transfer = ToDevice(device, StageRunner(stage, 0))
    transfer.accept(transfer.send(torch.zeros(1), 0, which))
    kept = {id(tensor) for tensor in device.kept}
    del made[5]  # the Parameter has its memory
    assert {id(tensor) for tensor in made} <= kept


def test_immediate_transfers_follow_the_trainers_stream():
    class Following(LateDevice):
        followed = 0

        def follow(self) -> None:
            self.followed += 1

    device = Following()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(devices, "device_of", lambda *_: device)
        assert len(list(DataLoader(torch.arange(6), 2, num_workers=0, device="late"))) == 3
    assert device.followed == 1 + 3


@dataclasses.dataclass
class Packed:
    words: Any


def test_packed_sequence_in_any_container_keeps_batch_sizes_on_the_host():
    packed = pack_sequence([torch.tensor([1.0, 2.0]), torch.tensor([3.0])])
    own = Own(x=1)
    own.words = packed  # type: ignore[attr-defined]
    transfer = ToDevice(Meta(), None)
    found = transfer.accept(transfer.send([Packed(packed), UserDict(words=packed), own], 0, which))
    for words in (found[0].words, found[1]["words"], found[2].words):
        assert (words.data.device.type, words.batch_sizes.device.type) == ("meta", "cpu")


@dataclasses.dataclass
class Node:
    before: Any
    after: Any = None


def test_objects_that_refer_to_each_other_are_visited_once_each():
    lists: list[Any] = []
    lists += [{"siblings": lists} for _ in range(20)]
    root = SimpleNamespace(children=[], log=logging.getLogger(__name__), lists=lists)
    root.children += [SimpleNamespace(parent=root) for _ in range(50)]
    for child in root.children:
        child.siblings = root.children
    chain = [Node(None)]
    for _ in range(40):
        chain.append(Node(chain[-1]))
        chain[-2].after = chain[-1]
    own, began = Own(x=1), time.monotonic()
    own.root, own.chain, own.lists = root, chain[0], lists  # type: ignore[attr-defined]
    found = mapped(own, lambda leaf: leaf)
    assert time.monotonic() - began < 5
    assert found.root is root
    assert found.chain is chain[0]
    assert found.lists is lists
    lists.append(torch.zeros(1))
    chain[-1].after = torch.zeros(1)
    root.children[7].x = torch.zeros(1)
    copied = ToDevice(LateDevice(), None).send(own, 0, which).batch
    assert copied.root.children[7].x.was_copied
    assert copied.root.children[9].parent is copied.root
    assert copied.lists[-1].was_copied
    assert copied.lists[3]["siblings"] is copied.lists
    node = copied.chain
    while isinstance(node, Node):
        node = node.after
    assert node.was_copied


def test_counter_and_unset_dataclass_field_are_left_unchanged():
    @dataclasses.dataclass
    class Cached:
        x: Any
        cache: Any = dataclasses.field(init=False)

    found = mapped([Counter(a=3), Cached(1)], lambda leaf: leaf)
    assert found[0] == Counter(a=3)
    assert type(found[0]) is Counter
    assert (found[1].x, hasattr(found[1], "cache")) == (1, False)


def test_leaves_are_replaced_in_all_containers_supported_by_pin_memory():
    own = Own(x=1)
    own.name = "kept"  # type: ignore[attr-defined]
    batch = [
        {"a": 1}, (2, 3), Pair(4, 5), [6], "text", b"bytes", OrderedDict(b=7), MappingProxyType({"c": 8}), own,
    ]  # fmt: skip
    found = mapped(batch, lambda leaf: leaf * 10)
    assert found == [
        {"a": 10}, (20, 30), Pair(40, 50), [60], "text", b"bytes", {"b": 70}, {"c": 80}, {"x": 10},
    ]  # fmt: skip
    assert [type(item) for item in found] == [type(item) for item in batch]
    assert found[-1].name == "kept"
    assert batch[0] == {"a": 1}
