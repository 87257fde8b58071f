"""`pin_memory=True`. Simulated: no accelerator is at hand, so torch's word for one and its copy are replaced."""

from __future__ import annotations

import gc
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from batches import Gated, Numbers, Sized, ids
from rig import Rig, until
from staged_data import Photos, developed
from torch.utils import data

from dataloaderjob import DataLoader
from dataloaderjob.core.errors import DeadlineExceeded


@pytest.fixture(scope="module")
def rig() -> Iterator[Rig]:
    with Rig(feeders=2) as made:
        yield made


@pytest.fixture
def pinned(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """An accelerator as torch would report it; gets the threads that pinned."""
    threads: list[str] = []

    def copied(tensor: torch.Tensor, *_: Any) -> torch.Tensor:
        threads.append(threading.current_thread().name)
        made = tensor.clone()
        made.was_pinned = True
        return made

    monkeypatch.setattr(torch.accelerator, "is_available", lambda *_: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda *_: torch.device("xpu"))
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 0)
    monkeypatch.setattr(torch.accelerator, "set_device_index", lambda _: None)
    monkeypatch.setattr(torch.Tensor, "pin_memory", copied)
    return threads


def test_simulated_pinning_thread_uses_one_core_and_the_trainer_its_own(
    rig: Rig, pinned: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    counts: list[int] = []
    copied = torch.Tensor.pin_memory

    def counted(tensor: torch.Tensor, *how: Any) -> torch.Tensor:
        torch.zeros(1 << 16).add_(1)  # large enough for several threads
        counts.append(torch.get_num_threads())
        return copied(tensor, *how)

    monkeypatch.setattr(torch.Tensor, "pin_memory", counted)
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        for _ in DataLoader(Numbers(40), batch_size=4, pin_memory=True):
            assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)
    assert counts
    assert set(counts) == {1}


def threads_of_ours() -> int:
    return sum(thread.name == "dlj-ahead" for thread in threading.enumerate())


def no_thread() -> None:
    gc.collect()
    until(lambda: not threads_of_ours(), what="the end of the threads that pin")


def test_simulated_batches_are_pinned_in_a_thread_ahead_of_the_trainer(rig: Rig, pinned: list[str]) -> None:
    loader = DataLoader(Numbers(40), batch_size=4, pin_memory=True)
    iterator = iter(loader)
    until(lambda: len(pinned) >= 4, what="two batches of two tensors pinned before any is asked for")
    time.sleep(0.05)
    assert len(pinned) == 4, "and no more"
    batches = list(iterator)
    assert ids(batches) == list(range(40))
    assert all(tensor.was_pinned for batch in batches for tensor in batch)
    assert set(pinned) == {"dlj-ahead"}
    assert len(iterator._client.pool.leases) == 0, "the places of the pool came back when they were copied"
    no_thread()


def test_simulated_pinning_keeps_order_over_epochs_and_after_breaks(rig: Rig, pinned: list[str]) -> None:
    for options in ({}, {"num_workers": 2, "persistent_workers": True}):
        loader = DataLoader(Numbers(60), batch_size=3, pin_memory=True, **options)
        for stop in (0, 5, 1):
            for step, batch in enumerate(loader):
                assert batch[0].tolist() == [3 * step, 3 * step + 1, 3 * step + 2]
                if step == stop:
                    break
        assert ids(loader) == list(range(60))
    del loader, batch
    no_thread()
    until(lambda: not rig.status()["receivers"], what="the end of the connection")


def test_simulated_pinning_of_batches_that_a_stage_makes(rig: Rig, pinned: list[str]) -> None:
    loader = DataLoader(Photos(41), stage=developed, batch_size=4, num_workers=1, pin_memory=True)
    for _ in range(2):
        batches = list(loader)
        assert torch.cat(batches)[:, 0].tolist() == list(range(41))
        assert all(batch.was_pinned for batch in batches)
    assert set(pinned) == {"dlj-ahead"}
    next(iter(loader))
    no_thread()


class Own:
    """A batch that pins itself."""

    def __init__(self, samples: Any) -> None:
        self.ids = [i for i, _ in samples]

    def pin_memory(self) -> Any:
        if self.ids[0] == 5:
            raise MemoryError("no pinned memory is left")
        return self.ids, threading.current_thread().name


class Failing(Numbers):
    def __getitem__(self, i: int) -> Any:
        if i == 3:
            raise KeyError("mine")
        return super().__getitem__(i)


def test_simulated_pinning_honours_classes_with_their_own_pin_memory(rig: Rig, pinned: list[str]) -> None:
    loader = DataLoader(Numbers(6), batch_size=3, collate_fn=Own, pin_memory=True, allow_pickle=True)
    assert list(loader) == [([0, 1, 2], "dlj-ahead"), ([3, 4, 5], "dlj-ahead")]


def test_simulated_sample_and_pinning_errors_are_raised_in_turn(rig: Rig, pinned: list[str]) -> None:
    loader = DataLoader(Failing(8), collate_fn=Own, pin_memory=True, allow_pickle=True)
    iterator, found = iter(loader), []
    for _ in range(8):
        try:
            found += next(iterator)[0]
        except (KeyError, MemoryError) as exc:
            found.append(type(exc))
    assert found == [0, 1, 2, KeyError, 4, MemoryError, 6, 7]
    with pytest.raises(StopIteration):
        next(iterator)


@pytest.mark.thorough
def test_simulated_timeout_counts_from_when_the_trainer_waits(
    rig: Rig, pinned: list[str], tmp_path: Any
) -> None:
    gate = tmp_path / "gate"
    iterator = iter(DataLoader(Gated(gate, at=2, n=6), timeout=3, pin_memory=True))
    assert ids([next(iterator), next(iterator)]) == [0, 1]
    time.sleep(3.2)
    for _ in range(2):
        with pytest.raises(DeadlineExceeded, match=r"timed out after 3 seconds: batch 2 is not ready"):
            next(iterator)
    gate.touch()
    time.sleep(0.3)
    assert ids(iterator) == [2, 3, 4, 5], "nothing is lost"


def test_simulated_sidecar_death_loses_no_batch(rig: Rig, pinned: list[str]) -> None:
    iterator = iter(DataLoader(Numbers(200), batch_size=2, pin_memory=True))
    found = ids([next(iterator) for _ in range(10)])
    rig.kill_sidecar()
    rig.start_sidecar()
    assert found + ids(iterator) == list(range(200))


def test_simulated_two_loaders_pin_at_once(rig: Rig, pinned: list[str]) -> None:
    loaders = [DataLoader(Sized(1 << 16, 80), batch_size=4, pin_memory=True) for _ in range(2)]
    for step, (a, b) in enumerate(zip(*loaders, strict=True)):
        assert a[:, 0].tolist() == b[:, 0].tolist() == list(range(4 * step, 4 * step + 4))


def test_simulated_pinning_in_the_process_itself(pinned: list[str]) -> None:
    batches = list(DataLoader(Numbers(4), batch_size=2, num_workers=0, pin_memory=True))
    assert all(tensor.was_pinned for batch in batches for tensor in batch)
    assert set(pinned) == {"MainThread"}


def test_pin_memory_without_an_accelerator_warns_as_in_torch(rig: Rig) -> None:
    if torch.accelerator.is_available():
        pytest.skip("there is one")
    no_thread()
    for kind in (data.DataLoader, DataLoader):
        with pytest.warns(
            UserWarning, match="'pin_memory' argument is set as true but no accelerator is found"
        ):
            assert ids(kind(Numbers(5), pin_memory=True)) == list(range(5))
    assert threads_of_ours() == 0


SCRIPT = """
    import sys
    import torch
    from batches import Numbers
    from dataloaderjob import DataLoader
    torch.accelerator.is_available = lambda *_: True
    torch.accelerator.current_accelerator = lambda *_: torch.device("xpu")
    torch.accelerator.current_device_index = lambda: 0
    torch.accelerator.set_device_index = lambda _: None
    torch.Tensor.pin_memory = lambda tensor, *_: tensor.clone()
    iterator = iter(DataLoader(Numbers(2000), batch_size=2, pin_memory=True))
    kept = [next(iterator) for _ in range(5)]
    {ending}
"""


@pytest.mark.parametrize(("ending", "code"), [("", 0), ("sys.exit(3)", 3)])
def test_simulated_pinning_leaves_no_trouble_at_process_exit(rig: Rig, ending: str, code: int) -> None:
    text = textwrap.dedent(SCRIPT).format(ending=ending)
    found = subprocess.run(
        [sys.executable, "-c", text], env={**rig.env, "DATALOADERJOB_SOCKET": rig.socket},
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert (found.returncode, found.stdout, found.stderr) == (code, "", "")
