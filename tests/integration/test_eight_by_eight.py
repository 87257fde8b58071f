"""Eight trainer processes and eight feeders, as one node of eight GPUs has them: all real, over one sidecar."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from batches import Numbers
from rig import Rig, until
from torch.utils.data import get_worker_info

from dataloaderjob import DataLoader
from processes import rollup

RANKS, FEEDERS, BATCHES, BATCH = 8, 8, 40, 4
KB_OF_A_RECEIVER = 60_000
SAMPLE_S = 0.04
"""So that a feeder that gets no core for a moment is not taken for a slow one, whose tickets others get."""


class Signed(Numbers):
    """Draws, and says which feeder made a sample."""

    def __getitem__(self, i: int) -> tuple[int, torch.Tensor, np.ndarray, int]:
        info = get_worker_info()
        if info is not None:
            time.sleep(SAMPLE_S)
        return i, torch.randn(self.width), np.random.rand(3), -1 if info is None else info.id


def run_of(rank: int, workers: int, attached: Callable[[], object] = lambda: None) -> dict[str, Any]:
    """What a rank's loader gives: a digest of all but who made it, and who made each batch. `attached` is called
    between a batch that makes it connect and all the others."""
    torch.manual_seed(1000 + rank)
    order = [0] * BATCH
    loader = DataLoader(Signed(RANKS * BATCHES * BATCH), sampler=order, batch_size=BATCH, num_workers=workers)
    for _ in loader:
        pass
    attached()
    order[:] = torch.randperm(RANKS * BATCHES * BATCH)[rank::RANKS].tolist()
    digest, makers = hashlib.sha256(), []
    for keys, noise, more, made_by in loader:
        digest.update(keys.numpy().tobytes() + noise.numpy().tobytes() + more.numpy().tobytes())
        makers.append(int(made_by[0]))
    return {"digest": digest.hexdigest(), "makers": makers}


def forked(rank: int, go: int) -> tuple[int, int]:
    """(pid, descriptor with the result) of a trainer process; attached, it waits until `go` can be read."""
    told, tell = os.pipe()
    pid = os.fork()
    if pid:
        os.close(tell)
        return pid, told
    code = 1
    try:
        os.environ["RANK"] = str(rank)
        with os.fdopen(tell, "w") as out:
            json.dump(run_of(rank, FEEDERS, partial(os.read, go, 1)), out)
        code = 0
    finally:
        os._exit(code)


def connections(rig: Rig) -> list[int]:
    """Feeders that each rank's receiver is connected to."""
    return [receiver["feeders_up"] for receiver in rig.status()["receivers"]]


@pytest.mark.slow
def test_eight_ranks_and_eight_feeders_give_the_bytes_of_one_process_each() -> None:
    with Rig(feeders=FEEDERS, processes=RANKS, shared_memory_nbytes=RANKS << 26) as rig:
        go, gate = os.pipe()
        ranks = [forked(rank, go) for rank in range(RANKS)]
        # A rank that starts before a feeder is connected rightly does without it.
        until(
            lambda: connections(rig) == RANKS * [FEEDERS], 60.0, "the connections of all ranks to all feeders"
        )
        os.write(gate, bytes(RANKS))
        assert all(rollup(r["receiver"])["Pss_Anon"] < KB_OF_A_RECEIVER for r in rig.status()["receivers"])
        found = []
        for pid, told in ranks:
            with os.fdopen(told) as out:
                found.append(json.loads(out.read() or "{}"))
            assert os.waitpid(pid, 0)[1] == 0, rig.logs()
    os.close(gate)
    os.close(go)
    assert [one["digest"] for one in found] == [run_of(rank, 0)["digest"] for rank in range(RANKS)]
    # Not by the tenth batch already, which test_dispatch_scale tells in virtual time: while 64 builders start on two
    # cores, a feeder may be late by more than OVERDUE_FLOOR_S, and others make what it was asked for.
    assert [set(one["makers"]) for one in found] == RANKS * [set(range(FEEDERS))], (
        "each rank uses all feeders"
    )
    made = [maker for one in found for maker in one["makers"]]
    assert max(map(made.count, range(FEEDERS))) <= 2.5 * len(made) / FEEDERS
