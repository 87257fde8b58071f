"""The peer of B18: Ray Data's own way into a trainer, or into several."""

from __future__ import annotations

import contextlib
import os
import warnings
from typing import Any

import psutil

from bench import endtoend, raydata
from bench.raybox import await_iterators, ray_box

COORDINATOR = "ray::SplitCoordinator"


def iter_torch_batches(case: raydata.Case) -> dict[str, Any]:
    """Measures a trainer that is the driver, or several that are actors without a CPU, as in Ray Train.

    The trainers and their raylet are the node's processes. Tasks elsewhere run on another raylet, and their blocks
    arrive through Ray's own transfer.
    """
    cpus = raydata.cpus(case)
    with ray_box(num_cpus=cpus, store_nbytes=raydata.STORE_NBYTES, far_node=case.elsewhere) as pids:
        made = raydata.pipeline(case)
        if case.trainers > 1:
            return _several(made, case, raylet=pids[1])
        stream = raydata.pairs(made.iter_torch_batches(batch_size=case.batch, prefetch_batches=2))
        try:
            return endtoend.measure(stream, case, node_pids=lambda: pids)
        finally:
            stream.close()  # ends the executor while Ray still runs
            await_iterators()


def _several(made: Any, case: raydata.Case, raylet: int) -> dict[str, Any]:
    """Runs several trainers. Their coordinator runs on the node that calls `streaming_split`, next to them."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    actor = ray.remote(num_cpus=0, scheduling_strategy=here)(Trainer)
    trainers = [actor.remote(case, rank, raylet) for rank in range(case.trainers)]
    parts = made.streaming_split(case.trainers, equal=True)
    measured = [trainer.measure.remote(part) for trainer, part in zip(trainers, parts, strict=True)]
    return raydata.together(case, ray.get(measured))


class Trainer:
    """One of several trainers, which receive blocks in turn."""

    def __init__(self, case: raydata.Case, rank: int, raylet: int) -> None:
        self._case, self._rank, self._raylet = case, rank, raylet

    def measure(self, part: Any) -> dict[str, Any]:
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        stream = raydata.pairs(part.iter_torch_batches(batch_size=self._case.batch, prefetch_batches=2))
        rank, case = self._rank, self._case
        return endtoend.measure(
            stream, case, node_pids=lambda: [os.getpid(), *([] if rank else [self._raylet])],
            besides=tuple if rank else _coordinator,
            share=case.dealt(rank, together=case.batches_per_block), checked=case.checked(rank),
        )  # fmt: skip


def _coordinator() -> list[int]:
    """Returns the coordinator's pid."""
    (pid,) = (p.pid for p in psutil.process_iter() if _title(p).startswith(COORDINATOR))
    return [pid]


def _title(process: psutil.Process) -> str:
    with contextlib.suppress(psutil.Error):
        return " ".join(process.cmdline())
    return ""


PEERS = {"iter_torch_batches": iter_torch_batches}
