"""Peers of B3: torch DataLoader, Ray Data's iter_torch_batches, Ray actors with ray.get."""

from __future__ import annotations

import os
import threading
import time
import warnings
from collections import deque
from collections.abc import Generator, Iterator
from typing import Any

import psutil
import torch

from bench.endtoend import SIDE, Case, Images, measure, numbers_of
from bench.raybox import ray_box

_STORE_NBYTES = 1_000_000_000
_END_TIMEOUT_S = 20.0


def torch_loader(case: Case) -> dict[str, Any]:
    """`producers` workers, torch's default prefetch; trainer and workers are the node's processes."""
    loader = torch.utils.data.DataLoader(Images(case), batch_size=case.batch, num_workers=case.producers)
    stream = iter(loader)
    return measure(
        stream, case, node_pids=lambda: [os.getpid(), *(p.pid for p in psutil.Process().children())]
    )


class Maker:
    """Makes whole batches in Ray: an actor by index, or a callable for map_batches."""

    def __init__(self, case: Case) -> None:
        self._case, self._dataset = case, Images(case)

    def make(self, batch: int) -> Any:
        return self._dataset.stacked(numbers_of(self._case, batch))

    def __call__(self, rows: dict[str, Any]) -> dict[str, Any]:
        pictures, indices = self._dataset.stacked(rows["id"])
        return {"pictures": pictures, "indices": indices}


def ray_data(case: Case) -> dict[str, Any]:
    """One block a batch, order kept, as everywhere else; driver and raylet are the node's processes."""
    import ray

    # the tasks that make the ranges of indices need a slot beside the actors, else nothing ever runs
    with ray_box(num_cpus=case.producers + 1, store_nbytes=_STORE_NBYTES) as pids:
        context = ray.data.DataContext.get_current()
        context.enable_progress_bars = False
        context.execution_options.preserve_order = True
        rows = ray.data.range(case.batch * case.batches, override_num_blocks=case.batches)
        made = rows.map_batches(
            Maker, fn_constructor_args=(case,), batch_size=case.batch,
            num_cpus=1, compute=ray.data.ActorPoolStrategy(size=case.producers),
        )  # fmt: skip
        stream = _reshaped(made.iter_torch_batches(batch_size=case.batch, prefetch_batches=2))
        try:
            return measure(stream, case, node_pids=lambda: pids)
        finally:
            stream.close()  # ends the executor while Ray is still there
            _await_iterators()


def _await_iterators() -> None:
    """Threads of Ray Data that still ask Ray when it is gone end the process before its figures are written."""
    deadline = time.monotonic() + _END_TIMEOUT_S
    while any(t.name == "iter_threaded" for t in threading.enumerate()) and time.monotonic() < deadline:
        time.sleep(0.05)


def _reshaped(batches: Any) -> Generator[Any, None, None]:
    for batch in batches:
        yield batch["pictures"].reshape(-1, 3, SIDE, SIDE), batch["indices"]


def ray_actors(case: Case) -> dict[str, Any]:
    """Actors asked in turn, two batches ahead each; driver and raylet are the node's processes."""
    import ray

    warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
    with ray_box(num_cpus=case.producers, store_nbytes=_STORE_NBYTES) as pids:
        actors = [ray.remote(num_cpus=1)(Maker).remote(case) for _ in range(case.producers)]
        return measure(_asked(actors, case), case, node_pids=lambda: pids)


def _asked(actors: list[Any], case: Case) -> Iterator[Any]:
    import ray

    numbers = iter(range(case.batches))
    out: deque[Any] = deque()
    for i in numbers:
        out.append(actors[i % len(actors)].make.remote(i))
        if len(out) < 2 * len(actors):
            continue
        pictures, indices = ray.get(out.popleft())
        yield torch.from_numpy(pictures), torch.from_numpy(indices)


PEERS = {
    "DataLoader": torch_loader,
    "Ray Data": ray_data,
    "Ray actors": ray_actors,
}
