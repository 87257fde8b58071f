"""Batches on a GPU of NVIDIA's: `make test-gpu`. CI has no such machine; what it runs is simulated, in tests/."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from batches import Augmented, Numbers, Sized
from late_device import forget_what_copies_read
from rig import Rig

from dataloaderjob import DataLoader
from dataloaderjob.trainer.device.devices import Accelerator
from dataloaderjob.trainer.session.pool import Mapping

BATCHES = 100_000
NBYTES = 38_535_168
"""A batch of 256 pictures of 224 x 224."""
COPIES, ROUNDS = 20, 5


@pytest.fixture(scope="module")
def rig() -> Iterator[Rig]:
    with Rig(feeders=2) as made:
        yield made


def noisy(batch: Any, generator: torch.Generator) -> Any:
    """A stage that draws what does not depend on the device."""
    seed = torch.full((1,), generator.initial_seed(), device=batch[0].device)
    return [batch[0] + seed % 1000, *batch[1:]]


def summed(batches: Iterator[Any], device: str) -> list[int]:
    """Sums of all batches, each of which counts by its place; the trainer's stream is never waited for."""
    total, order = torch.zeros((), dtype=torch.int64, device=device), 1
    for batch in batches:
        bits = [
            leaf.contiguous().view(torch.uint8).long().sum()
            for leaf in batch
            if isinstance(leaf, torch.Tensor)
        ]
        for found in bits:
            total += found * order
            order = order * 6364136223846793005 % (1 << 61) + 1
    return [int(total.cpu()), order]


@pytest.mark.timeout(3000)
@pytest.mark.parametrize("stage", [None, noisy])
def test_hundred_thousand_batches_on_the_device_equal_the_hosts(
    rig: Rig, stage: Callable[..., Any] | None
) -> None:
    def sums(device: str) -> list[int]:
        torch.manual_seed(1)
        loader = DataLoader(Numbers(1000), batch_size=1, num_workers=2, device=device, device_stage=stage)
        epochs = (batch for _ in itertools.count() for batch in loader)
        return summed(itertools.islice(epochs, BATCHES), device)

    assert sums("cuda") == sums("cpu")


LARGE, BUSY_CYCLES = 400, 3_000_000
"""Batches of 4 MB, beside kernels that keep a stream busy for a millisecond or two."""


def busy(batch: Any, _: torch.Generator) -> Any:
    """A stage behind which the copies of its batch have to wait."""
    torch.cuda._sleep(BUSY_CYCLES)
    return batch


def large(device: str) -> list[int]:
    """The first number of each batch and its sum, taken behind a busy stream of the trainer's, which waits for nobody;
    the batch itself is dropped at once."""
    loader = DataLoader(
        Sized(1 << 18, LARGE * 4), batch_size=4, num_workers=2, device=device,
        device_stage=busy if device == "cuda" else None,
    )  # fmt: skip
    found = []
    for batch in loader:
        if device == "cuda":
            torch.cuda._sleep(BUSY_CYCLES)
        found += [batch[0, 0] + 0, batch.double().sum()]
        del batch
    return [float(one.cpu()) for one in found]


def test_batches_used_late_on_the_device_equal_the_hosts(rig: Rig) -> None:
    assert large("cuda") == large("cpu")


def test_without_the_event_batches_are_corrupted(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """What shows that the test above can fail."""
    forget_what_copies_read(monkeypatch)
    assert large("cuda") != large("cpu")


def test_without_being_kept_for_the_trainers_stream_they_are_corrupted(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Accelerator, "keep", lambda self, tensor: None)
    assert large("cuda") != large("cpu")


def test_pool_memory_copies_at_nine_tenths_of_the_pinned_rate() -> None:
    region = Mapping(-1, NBYTES)
    shared = torch.frombuffer(region, dtype=torch.uint8)
    shared.fill_(7)
    device = Accelerator(torch.empty(0, device="cuda").device)
    device.begin()
    device.register(shared.data_ptr(), NBYTES, region)
    assert shared.is_pinned(), "cudaHostRegister did not take it"
    pinned = torch.full((NBYTES,), 7, dtype=torch.uint8).pin_memory()

    def seconds(source: torch.Tensor) -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        begin.record()
        for _ in range(COPIES):
            source.to("cuda", non_blocking=True)
        end.record()
        torch.cuda.synchronize()
        return begin.elapsed_time(end)

    seconds(shared), seconds(pinned)
    ratios = sorted(seconds(pinned) / seconds(shared) for _ in range(ROUNDS))
    assert ratios[ROUNDS // 2] >= 0.9, ratios
    assert torch.equal(shared.to("cuda").cpu(), pinned)


@pytest.mark.parametrize("feeders", [1, 3])
def test_kills_and_a_resume_change_no_batch(feeders: int) -> None:
    def made() -> DataLoader:
        torch.manual_seed(7)
        return DataLoader(Augmented(90), 2, shuffle=True, device="cuda", dataset_id="killed")

    def host(batch: Any) -> Any:
        return [leaf.cpu() if isinstance(leaf, torch.Tensor) else leaf for leaf in batch]

    with Rig(feeders=feeders) as rig:
        torch.manual_seed(7)
        plain = DataLoader(Augmented(90), 2, shuffle=True, dataset_id="killed")
        expected = [str(batch) for batch in plain]
        loader, found = made(), []
        iterator = iter(loader)
        for step in range(20):
            found.append(str(host(next(iterator))))
            if step == 5:
                rig.feeders[0][0].kill()
                rig.feeders[0][0].wait()
                rig.add_feeders(1)
                rig.kill_sidecar()
                rig.start_sidecar()
        state = loader.state_dict()
        del iterator, loader
        again = made()
        again.load_state_dict(state)
        assert found + [str(host(batch)) for batch in again] == expected
        assert again.digest == plain.digest
