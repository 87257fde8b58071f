"""Batches on their way to a device, which is simulated: a copy reads its memory late, and a place of the pool is filled
with other bytes as soon as nobody holds it."""

from __future__ import annotations

import gc
import random
import weakref
from collections import OrderedDict
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from late_device import LateDevice

from dataloaderjob.core.errors import InputError
from dataloaderjob.trainer.devices import Host, device_of
from dataloaderjob.trainer.transfer import Sent, ToDevice, Way, seed_of
from dataloaderjob.trainer.trees import mapped

PLACES, WORDS = 3, 4
POISON = -1
INTERLEAVINGS = 100_000


class Pair(NamedTuple):
    x: int
    y: int


def which() -> str:
    return "batch 7"


class SmallPool:
    """Places that batches are lent from, poisoned when they come back."""

    def __init__(self) -> None:
        self.memory = np.full((PLACES, WORDS), POISON, np.int64)
        self.free = list(range(PLACES))

    def lend(self, number: int) -> torch.Tensor:
        place = self.free.pop()
        lent = np.ndarray((WORDS,), np.int64, self.memory, place * WORDS * 8)
        lent[:] = number
        weakref.finalize(lent, self._back, place)
        return torch.from_numpy(lent)

    def _back(self, place: int) -> None:
        self.memory[place] = POISON
        self.free.append(place)


class Careless(ToDevice):
    """Lets go of what it sends at once."""

    def send(self, batch: Any, digest: int, which: Any) -> Sent:
        sent = super().send(batch, digest, which)
        self._held.clear()
        return sent


def wrong(kind: type[ToDevice], seed: int, batches: int = 3) -> bool:
    """Whether any batch of one interleaving is another one."""
    device, pool, chance = LateDevice(), SmallPool(), random.Random(seed)
    transfer = kind(device, None, 0, list)
    on_its_way: list[Sent] = []
    sent = accepted = 0
    while accepted < batches:
        choice = chance.randrange(4)
        if choice == 0 and sent < batches and pool.free:
            on_its_way.append(transfer.send({"x": pool.lend(sent)}, sent, which))
            sent += 1
        elif choice == 1:
            device.step()
        elif choice == 2:
            transfer.let_go()
        elif choice == 3 and on_its_way:
            found = transfer.accept(on_its_way.pop(0))["x"].tolist()
            if found != [accepted] * WORDS:
                return True
            accepted += 1
    transfer.end()
    return len(pool.free) != PLACES


def test_no_interleaving_gives_another_batch():
    assert not any(wrong(ToDevice, seed) for seed in range(INTERLEAVINGS))


def test_without_the_event_most_interleavings_do():
    """What shows that the test above can fail."""
    assert sum(wrong(Careless, seed) for seed in range(1000)) > 500


def test_a_place_comes_back_when_the_copy_has_come_and_no_sooner():
    device, pool = LateDevice(), SmallPool()
    transfer = ToDevice(device, None, 0, list)
    sent = transfer.send(pool.lend(7), 0, which)
    assert transfer.let_go() is not None
    assert len(pool.free) == PLACES - 1
    while device.step():
        pass
    assert transfer.let_go() is None
    assert len(pool.free) == PLACES
    assert transfer.accept(sent).tolist() == [7] * WORDS


def test_at_the_end_all_copies_are_waited_for():
    device, pool = LateDevice(), SmallPool()
    transfer = ToDevice(device, None, 0, list)
    sent = [transfer.send(pool.lend(number), 0, which) for number in range(PLACES)]
    transfer.end()
    assert len(pool.free) == PLACES
    assert [transfer.accept(one)[0].item() for one in sent] == list(range(PLACES))


def test_what_a_stage_reads_and_makes_stays_until_its_copies_have_come():
    device, pool = LateDevice(), SmallPool()
    made: list[weakref.ref[torch.Tensor]] = []

    def stage(batch: torch.Tensor, generator: torch.Generator) -> dict[str, Any]:
        double = batch * 2
        made.append(weakref.ref(double))
        return {"whole": device.copy(batch), "double": double}

    transfer = ToDevice(device, stage, 0, list)
    sent = transfer.send(pool.lend(4), 0, which)
    gc.collect()
    assert made[0]() is not None
    found = transfer.accept(sent)
    assert (found["whole"].tolist(), found["double"].tolist()) == ([4] * WORDS, [8] * WORDS)
    transfer.let_go()
    assert (made[0](), len(pool.free)) == (None, PLACES)


def test_a_stage_that_raises_keeps_what_it_had_begun_to_copy():
    device, pool = LateDevice(), SmallPool()

    def stage(batch: torch.Tensor, generator: torch.Generator) -> Any:
        device.copy(batch)
        raise ZeroDivisionError("of the user")

    transfer = ToDevice(device, stage, 0, list)
    with pytest.raises(ZeroDivisionError) as raised:
        transfer.send(pool.lend(4), 0, which)
    assert raised.value.__notes__ == ["raised by device_stage, in the trainer's process, for batch 7"]
    del raised
    gc.collect()
    assert len(pool.free) == PLACES - 1
    transfer.end()
    assert len(pool.free) == PLACES


def test_a_stages_generator_depends_on_the_epoch_and_the_batch_alone():
    drawn: list[int] = []

    def stage(batch: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        drawn.append(int(torch.randint(2**62, (), generator=generator)))
        return batch

    for epoch, digest in ((1, 5), (1, 6), (2, 5), (1, 5)):
        ToDevice(LateDevice(), stage, epoch, list).send(torch.zeros(1), digest, which)
    assert drawn[0] == drawn[3]
    assert len(set(drawn)) == 3
    assert 0 <= seed_of(2**64 - 1, 2**64 - 1) < 2**63


def test_each_region_of_the_pool_is_registered():
    device = LateDevice()
    owner = object()
    transfer = ToDevice(device, None, 0, lambda: [(4096, 8192, owner)])
    transfer.send(torch.zeros(1), 0, which)
    assert device.registered == {4096: 8192}


def test_on_the_host_batches_stay_and_the_stage_runs():
    transfer = ToDevice(Host(), lambda batch, _: batch + 1, 0, list)
    batch = torch.zeros(2)
    assert transfer.accept(transfer.send(batch, 0, which)).tolist() == [1.0, 1.0]
    stays = ToDevice(Host(), None, 0, list)
    assert stays.accept(stays.send(batch, 0, which)) is batch
    assert stays.let_go() is None


def test_a_device_that_is_not_there_is_refused_with_what_to_do():
    with pytest.raises(InputError, match="found no accelerator: device='cpu'"):
        device_of("cuda")
    with pytest.raises(InputError, match="such as 'cuda', found 'gpu'"):
        device_of("gpu")
    assert isinstance(device_of("cpu"), Host)
    assert Way().transfer(0, list) is None


class Own(dict[str, Any]):
    """A container with an attribute of its own."""


def test_leaves_are_replaced_in_all_containers_that_pin_memory_goes_into():
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
