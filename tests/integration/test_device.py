"""`device=` over a real service. Simulated: the device is one of `late_device`, whose copies come late."""

from __future__ import annotations

import ctypes
import gc
import json
import os
import queue
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from batches import Augmented, InBatches, Numbers, Sized, fingerprint, ids
from late_device import BusyDevice, forget_what_copies_read
from rig import Rig, until
from staged_data import Photos, developed
from torch.utils import data

from dataloaderjob import DataLoader, InputError
from dataloaderjob.core.control import W_REGISTERED
from dataloaderjob.trainer.device import devices
from dataloaderjob.trainer.epochs.ahead import AheadTaker
from dataloaderjob.trainer.session.pool import Pool, Region

ROOT = Path(__file__).resolve().parents[2]
Loaders = dict[str, Callable[..., DataLoader]]


@pytest.fixture(scope="module", params=[1, 3])
def rig(request: pytest.FixtureRequest) -> Iterator[Rig]:
    with Rig(feeders=request.param) as made:
        yield made


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> Iterator[BusyDevice]:
    device = BusyDevice(seed=3)
    monkeypatch.setattr(devices, "device_of", lambda named, _: device if named == "late" else None)
    poison_what_comes_back(monkeypatch)
    yield device
    gc.collect()
    device.close()


def poison_what_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever reads a place of the pool later than it may finds no batch there, whether it is filled anew or not."""
    lend = Pool.lend

    def lends(pool: Pool, number: int, region: Region, entry: Any, **how: Any) -> Any:
        lent = lend(pool, number, region, entry, **how)
        # This is called before the lease ends: references are told in turn, the latest first.
        weakref.finalize(lent, ctypes.memset, lent.ctypes.data, 0xA5, lent.nbytes).atexit = False
        return lent

    monkeypatch.setattr(Pool, "lend", lends)


def noisy(batch: Any, generator: torch.Generator) -> Any:
    """A stage that draws."""
    first = batch[0] if isinstance(batch, list) else batch
    return {"batch": batch, "noise": torch.rand(3, generator=generator), "sum": first.double().sum()}


LOADERS: Loaders = {
    "map": lambda **o: DataLoader(Augmented(90), 2, shuffle=True, **o),
    "in batches": lambda **o: DataLoader(InBatches(90), 2, shuffle=True, **o),
    "parts": lambda **o: DataLoader(Augmented(90), 6, shuffle=True, parts=3, **o),
    "slots": lambda **o: DataLoader(Counted(90), 2, num_workers=2, **o),
    "staged": lambda **o: DataLoader(Photos(41), stage=developed, batch_size=4, num_workers=1, **o),
    "persistent": lambda **o: DataLoader(Augmented(90), 2, num_workers=2, persistent_workers=True, **o),
}


class Counted(data.IterableDataset):
    def __init__(self, n: int) -> None:
        self.n = n

    def __iter__(self) -> Iterator[Any]:
        info = data.get_worker_info()
        assert info is not None
        for i in range(info.id, self.n, info.num_workers):
            yield i, torch.rand(5)


def epochs(made: Callable[..., DataLoader], count: int = 2, **options: Any) -> tuple[list[str], str]:
    """Fingerprints of all batches of some epochs, and the loader's digest."""
    torch.manual_seed(7)
    loader = made(**options)
    return [str(fingerprint(batch)) for _ in range(count) for batch in loader], loader.digest


def in_order(batches: Any) -> list[int]:
    return [int(i) for batch in batches for i in batch[0]]


def test_simulated_copies_without_the_event_corrupt_batches(
    rig: Rig, late: BusyDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What shows that the tests here can fail."""
    assert in_order(DataLoader(Numbers(90), 2, device="late")) == list(range(90))
    forget_what_copies_read(monkeypatch)
    assert in_order(DataLoader(Numbers(90), 2, device="late")) != list(range(90))


def lies_in(tensor: torch.Tensor, regions: dict[int, int]) -> bool:
    return any(begin <= tensor.data_ptr() < begin + nbytes for begin, nbytes in regions.items())


def test_simulated_loader_next_to_one_with_a_device_gets_copies(
    late: BusyDevice, capfd: pytest.CaptureFixture[str]
) -> None:
    """A view of registered memory that the user copies without blocking is read after the view is gone."""
    with Rig():  # a pool that no device has read yet
        beside_a_device(late, capfd)


def beside_a_device(late: BusyDevice, capfd: pytest.CaptureFixture[str]) -> None:
    plain = iter(DataLoader(Numbers(40), batch_size=4))
    before = next(plain)
    for _ in DataLoader(Numbers(40), batch_size=4, device="late"):
        pass
    assert not lies_in(before[0], late.registered), "the user had a view of it"
    del before
    for _ in DataLoader(Numbers(40), batch_size=4, device="late"):
        pass
    assert late.registered, "nobody has a view of it any more"
    assert plain._client.control.words[W_REGISTERED], "the sidecar leaves its pages where they are"
    assert "a loader in this process uses device=" not in capfd.readouterr().err
    rest = list(plain)
    assert in_order(rest) == list(range(4, 40))
    assert not any(lies_in(batch[0], late.registered) for batch in rest)
    assert capfd.readouterr().err.count("a loader in this process uses device=") == 1


FOUND: dict[tuple[str, bool], tuple[list[str], str]] = {}
"""Batches and digest of each kind of loader, of those tests that came first."""


def is_the_same_everywhere(kind: str, *, staged: bool, found: tuple[list[str], str]) -> bool:
    """Whether other tests, with other numbers of feeders, had the same."""
    return FOUND.setdefault((kind, staged), found) == found


@pytest.mark.thorough
@pytest.mark.cover(1)
@pytest.mark.parametrize("kind", LOADERS)
@pytest.mark.quick("map", "slots", "staged")
def test_simulated_batches_on_a_device_equal_the_hosts(rig: Rig, late: BusyDevice, kind: str) -> None:
    plain = epochs(LOADERS[kind])
    assert epochs(LOADERS[kind], device="late") == plain
    assert late.copies > 0
    staged = epochs(LOADERS[kind], device="cpu", device_stage=noisy)
    assert epochs(LOADERS[kind], device="late", device_stage=noisy) == staged
    assert epochs(LOADERS[kind], device="late", device_stage=noisy, prefetch_device=5) == staged
    assert len(set(staged[0])) == len(staged[0])
    assert staged[1] == plain[1], "the digest is that of what feeders made"
    assert is_the_same_everywhere(kind, staged=False, found=plain)
    assert is_the_same_everywhere(kind, staged=True, found=staged)


@pytest.mark.quick("1")
def test_simulated_stage_gives_the_same_in_process_and_over_the_service(rig: Rig, late: BusyDevice) -> None:
    options: dict[str, Any] = {"device": "late", "device_stage": noisy}
    for kind in ("map", "in batches"):
        assert epochs(LOADERS[kind], num_workers=0, **options) == epochs(LOADERS[kind], **options)


def test_simulated_stage_draws_differ_for_unsendable_batches(late: BusyDevice) -> None:
    def drawn() -> list[str]:
        torch.manual_seed(1)
        loader = DataLoader(
            Numbers(12), 2, num_workers=0, device="late", collate_fn=with_a_function,
            device_stage=lambda _, generator: torch.rand(3, generator=generator),
        )  # fmt: skip
        return [str(batch.tolist()) for batch in loader]

    found = drawn()
    assert len(set(found)) == len(found) == 6
    assert drawn() == found


def with_a_function(samples: list[Any]) -> Any:
    return torch.tensor([i for i, *_ in samples]), lambda: None


def test_simulated_signal_handler_exception_loses_no_waiting_batch(
    rig: Rig, late: BusyDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It comes when the batch is about to be taken, and again behind each: the loop goes on after it."""
    whole = in_order(DataLoader(Numbers(60), 4, device="late"))
    iterator = iter(DataLoader(Numbers(60), 4, device="late"))
    found: list[int] = []
    for _ in range(15):
        with monkeypatch.context() as patch, pytest.raises(TimeoutError):
            patch.setattr(AheadTaker, "_accept", interrupted)
            next(iterator)
        found += in_order([next(iterator)])
    assert found == whole
    with pytest.raises(StopIteration):
        next(iterator)


@pytest.mark.cover(1)
@pytest.mark.parametrize("kind", ["map", "slots", "staged"])
def test_simulated_errors_without_a_batch_come_before_all_batches(
    rig: Rig, late: BusyDevice, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More of them than batches are sent ahead."""
    torch.manual_seed(7)
    whole = [str(fingerprint(batch)) for batch in LOADERS[kind](device="late", timeout=20)]
    failures = iter(range(5))

    def fails_at_first() -> None:
        if next(failures, None) is not None:
            raise RuntimeError("the device is in use")

    monkeypatch.setattr(late, "begin", fails_at_first)
    torch.manual_seed(7)
    iterator = iter(LOADERS[kind](device="late", timeout=20))
    for _ in range(5):
        with pytest.raises(RuntimeError, match="is in use"):
            next(iterator)
    assert [str(fingerprint(batch)) for batch in iterator] == whole


def interrupted(*_: Any) -> Any:
    raise TimeoutError("of a watchdog")


class Endless(data.IterableDataset):
    """What no feeder can have: it refers to a lock."""

    def __init__(self) -> None:
        self.lock = threading.Lock()

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(torch.arange(12).split(2))


@pytest.mark.parametrize("workers", [0, 1])
def test_simulated_stream_made_by_torch_reaches_the_device_too(
    rig: Rig, late: BusyDevice, workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(DataLoader, "_is_made_here", lambda _: True)
    loader = DataLoader(Endless(), batch_size=3, num_workers=workers, device="late", device_stage=noisy)
    torch.manual_seed(1)
    first = [batch["batch"].flatten().tolist() for batch in loader]
    assert first == [[0, 1, 2, 3, 4, 5], [6, 7, 8, 9, 10, 11]]
    assert late.copies == 6


def test_simulated_stage_draws_differ_each_epoch_of_persistent_workers(
    rig: Rig, late: BusyDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(DataLoader, "_is_made_here", lambda _: True)

    def drawn() -> list[list[list[float]]]:
        torch.manual_seed(1)
        loader = DataLoader(
            Endless(), batch_size=3, num_workers=1, persistent_workers=True, device="late", device_stage=noisy
        )
        return [[batch["noise"].tolist() for batch in loader] for _ in range(3)]

    epochs_of_one = drawn()
    assert drawn() == epochs_of_one
    noises = [str(noise) for epoch in epochs_of_one for noise in epoch]
    assert len(set(noises)) == len(noises) == 6


def test_simulated_extents_are_returned_while_the_trainer_is_busy(rig: Rig, late: BusyDevice) -> None:
    loader = DataLoader(Sized(1 << 16, 80), batch_size=4, device="late")
    iterator = iter(loader)
    next(iterator)
    until(lambda: not iterator._client.pool.leases, what="all places back")
    assert [b[0, 0].item() for b in iterator] == list(range(4, 80, 4))


@pytest.mark.thorough
@pytest.mark.cover(1)
@pytest.mark.parametrize("feeders", [1, 3])
@pytest.mark.parametrize("stage", [None, noisy])
@pytest.mark.parametrize(
    ("kind", "ahead"), [("map", 2), ("map", 5), ("slots", 5), ("staged", 5), ("parts", 2)]
)
def test_simulated_kills_and_a_resume_change_no_batch_of_a_device(
    late: BusyDevice, feeders: int, stage: Callable[..., Any] | None, kind: str, ahead: int
) -> None:
    options: dict[str, Any] = {
        "device": "late", "device_stage": stage, "prefetch_device": ahead, "dataset_id": "killed",
    }  # fmt: skip

    def made() -> DataLoader:
        torch.manual_seed(7)
        return LOADERS[kind](**options)

    with Rig(feeders=feeders) as rig:
        expected, digest = epochs(LOADERS[kind], 1, **options)
        assert is_the_same_everywhere(f"killed, {kind}", staged=stage is not None, found=(expected, digest))
        steps = len(expected) // 2
        loader, found = made(), []
        iterator = iter(loader)
        for step in range(steps):
            found.append(str(fingerprint(next(iterator))))
            if step == 2:
                rig.feeders[0][0].kill()
                rig.feeders[0][0].wait()
                if feeders == 1:
                    rig.add_feeders(1)
            if step == (2 if feeders == 1 else 4):
                rig.kill_sidecar()
                rig.start_sidecar()
        state = json.loads(json.dumps(loader.state_dict()))
        assert state["batches"] == steps, "what lies ahead on the device does not count"
        del iterator, loader
        again = made()
        again.load_state_dict(state)
        found += [str(fingerprint(batch)) for batch in again]
        assert found == expected
        assert again.digest == digest


def test_simulated_stage_error_is_raised_in_turn_with_its_origin(rig: Rig, late: BusyDevice) -> None:
    def fails(batch: Any, generator: torch.Generator) -> Any:
        if 3 in batch[0]:
            raise LookupError("of the user")
        return batch

    iterator = iter(DataLoader(Numbers(8), batch_size=2, device="late", device_stage=fails))
    assert ids([next(iterator)]) == [0, 1]
    with pytest.raises(LookupError, match="of the user") as raised:
        next(iterator)
    (note,) = raised.value.__notes__
    assert note == "raised by device_stage, in the trainer's process, for batch 1, indices [2, 3]"
    assert ids([next(iterator), next(iterator)]) == [4, 5, 6, 7]
    with pytest.raises(StopIteration):
        next(iterator)


@pytest.mark.cover(1)
@pytest.mark.parametrize(
    ("kind", "named"),
    [
        ("map", "batch 1, indices ["),
        ("parts", "batch 1, indices ["),
        ("slots", "batch 0 of slot 1"),
        ("in this process", "batch 1, indices ["),
    ],
)
def test_simulated_stage_error_names_the_batchs_origin(
    rig: Rig, late: BusyDevice, kind: str, named: str
) -> None:
    def fails(batch: Any, generator: torch.Generator) -> Any:
        count.append(1)
        if len(count) == 2:
            raise LookupError("of the user")
        return batch

    count: list[int] = []
    options: dict[str, Any] = {"device": "late", "device_stage": fails, "prefetch_device": 1}
    if kind == "in this process":
        loader = LOADERS["map"](num_workers=0, **options)
    else:
        loader = LOADERS[kind](**options)
    iterator = iter(loader)
    next(iterator)
    with pytest.raises(LookupError) as raised:
        next(iterator)
    (note,) = raised.value.__notes__
    assert note.startswith(f"raised by device_stage, in the trainer's process, for {named}")


class Lost(BusyDevice):
    """From the third batch on all calls fail, as those of a GPU do after an error of a kernel."""

    def query(self, event: Any) -> bool:
        if self.copies > 4:
            raise RuntimeError("the device is lost")
        return super().query(event)


def test_simulated_device_loss_is_raised_and_ends_the_thread(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = Lost(seed=1)
    monkeypatch.setattr(devices, "device_of", lambda *_: device)
    iterator = iter(DataLoader(Numbers(40), batch_size=2, device="late"))
    for _ in range(2):
        with pytest.raises(RuntimeError, match="the device is lost"):
            for _ in range(20):
                next(iterator)
    began = time.process_time()
    time.sleep(0.5)
    assert time.process_time() - began < 0.25, "nobody spins"
    del iterator
    gc.collect()
    until(
        lambda: not any(thread.name == "dlj-ahead" for thread in threading.enumerate()),
        what="the end of the thread that sends",
    )
    device.close()


def test_a_cpu_stage_does_not_take_the_trainers_threads(rig: Rig) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        counts: list[int] = []

        def stage(batch: Any, _: torch.Generator) -> Any:
            counts.append(torch.get_num_threads())
            return batch

        for workers in (None, 0):
            for _ in DataLoader(
                Numbers(8), batch_size=4, num_workers=workers, device="cpu", device_stage=stage
            ):
                assert torch.get_num_threads() == 3
                with ThreadPoolExecutor(1) as later:
                    assert later.submit(torch.get_num_threads).result() == 3
        assert counts == [1] * 4
    finally:
        torch.set_num_threads(before)


ENDS_DURING_A_STAGE = """
import sys, time, torch
sys.path.append({support!r})
from batches import Numbers
from dataloaderjob import DataLoader

def stage(batch, generator):
    began = time.monotonic()
    while time.monotonic() - began < 3.0:
        torch.rand(64, 64) @ torch.rand(64, 64)
    print("made", flush=True)
    return batch

for batch in DataLoader(Numbers(40), batch_size=4, num_workers=1, device="cpu", device_stage=stage):
    break
del batch
"""


@pytest.mark.thorough
@pytest.mark.quick("1")
def test_script_ending_during_a_stage_waits_for_it_and_exits_0(rig: Rig) -> None:
    script = ENDS_DURING_A_STAGE.format(support=str(ROOT / "tests" / "support"))
    done = subprocess.run(
        [sys.executable, "-c", script],
        env=dict(os.environ),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert 2 <= done.stdout.count("made") <= 3, "that of the batch it had, and of those ahead"


def test_simulated_queue_empty_raised_in_a_stage_is_not_swallowed(rig: Rig, late: BusyDevice) -> None:
    def stage(batch: Any, _: torch.Generator) -> Any:
        return queue.Queue[int]().get_nowait()

    iterator = iter(DataLoader(Numbers(8), batch_size=2, device="late", device_stage=stage))
    for _ in range(4):
        with pytest.raises(queue.Empty) as raised:
            next(iterator)
        assert "raised by device_stage" in raised.value.__notes__[0]
    with pytest.raises(StopIteration):
        next(iterator)


def test_simulated_caught_stage_error_holds_no_batch(rig: Rig, late: BusyDevice) -> None:
    def stage(batch: Any, _: torch.Generator) -> Any:
        raise ValueError("a broken picture")

    loader = DataLoader(Numbers(60), batch_size=2, device="late", device_stage=stage)
    iterator, failed = iter(loader), 0
    gc.collect()
    gc.disable()
    try:
        while True:
            try:
                next(iterator)
            except ValueError:
                failed += 1
            except StopIteration:
                break
        assert failed == 30
        client = loader._client
        assert client is not None
        until(lambda: len(client.pool.leases) <= 3, what="the places of batches that failed")
    finally:
        gc.enable()


def test_simulated_breaks_leave_no_thread(rig: Rig, late: BusyDevice) -> None:
    for _ in range(5):
        for batch in DataLoader(Numbers(60), batch_size=3, device="late"):
            assert batch[0].tolist() == [0, 1, 2]
            break
    del batch
    gc.collect()
    until(
        lambda: not any(thread.name == "dlj-ahead" for thread in threading.enumerate()),
        what="the end of the threads that send",
    )


def test_stage_without_a_device_or_a_callable_is_refused() -> None:
    with pytest.raises(InputError, match="device_stage= needs device="):
        DataLoader(Numbers(4), device_stage=noisy)
    with pytest.raises(TypeError, match="is of type str"):
        DataLoader(Numbers(4), device="cpu", device_stage="noisy")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="prefetch_device must be a number from 1"):
        DataLoader(Numbers(4), device="cpu", prefetch_device=0)


def test_missing_device_is_refused_at_iter(rig: Rig) -> None:
    if torch.accelerator.is_available():
        pytest.skip("there is one")
    with pytest.raises(InputError, match="device='cuda' must be a device that torch can use here"):
        iter(DataLoader(Numbers(4), device="cuda"))
