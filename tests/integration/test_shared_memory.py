"""Batches that a receiver copies out of the memory of feeders on its machine are those that feeders send over TCP."""

from __future__ import annotations

import contextlib
import os
import random
import signal
from pathlib import Path

import pytest
import torch
from batches import Numbers
from rig import Rig, until
from services import Service, serving

from dataloaderjob import DataLoader
from processes import children

WIDTH = 100_000
"""Floats of a sample: a body of four is 1.6 MB."""
BUFFER = "dlj-body"
"""What the memory of feeders' batches is called."""
FAULTS = 12


def assert_whole(numbers: torch.Tensor, floats: torch.Tensor, first: int) -> None:
    assert numbers.tolist() == list(range(first, first + len(numbers)))
    assert torch.equal(floats, torch.arange(WIDTH) * 0.5 + numbers[:, None].float())


def maps(pid: int) -> int:
    return Path(f"/proc/{pid}/maps").read_text().count(BUFFER)


def strike(service: Service, chance: random.Random, how: signal.Signals) -> int | None:
    """The feeder that it hit; None where that had ended since the service knew of it."""
    pids = service.feeder_pids()
    try:
        os.kill(victim := chance.choice(pids), how)
    except (ProcessLookupError, IndexError):
        return None
    return victim


@pytest.mark.parametrize("shares_memory", [True, False])
def test_receiver_reads_batches_from_shared_memory_or_over_tcp(shares_memory: bool) -> None:
    with Rig(2, shares_memory=shares_memory) as rig:
        loader = DataLoader(Numbers(60, width=WIDTH), batch_size=4)
        for _ in range(8):
            for step, (numbers, floats) in enumerate(loader):
                assert_whole(numbers, floats, 4 * step)
            (receiver,) = children(rig.sidecar.pid)
            assert bool(maps(receiver)) == shares_memory
        if shares_memory:  # buffers of the epochs before are given up
            until(lambda: maps(receiver) <= 8, what="no more than the last epochs' buffers")


@pytest.mark.thorough
def test_no_batch_is_torn_while_feeders_die_and_freeze(tmp_path: Path) -> None:
    chance = random.Random(7)
    with serving(tmp_path, "local", 3) as service:
        frozen: list[int] = []
        batches = iter(DataLoader(Numbers(100_000, width=WIDTH), batch_size=4))
        step = 0
        for fault in range(FAULTS):
            for _ in range(chance.randrange(10, 40)):
                assert_whole(*next(batches), 4 * step)
                step += 1
            for pid in frozen:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)
            what = signal.SIGSTOP if fault % 3 == 2 else signal.SIGKILL
            victim = until(lambda how=what: strike(service, chance, how), what="a feeder that lives")
            frozen = [victim] if what == signal.SIGSTOP else []
        for _ in range(40):
            assert_whole(*next(batches), 4 * step)
            step += 1
