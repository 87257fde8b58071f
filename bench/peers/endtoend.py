"""Peers of B3: torch DataLoader, Ray Data's iter_torch_batches, Ray actors with ray.get."""

from __future__ import annotations

import dataclasses
import os
import warnings
from collections import deque
from collections.abc import Iterator
from typing import Any

import psutil
import torch

from bench import raydata
from bench.endtoend import Case, Images, measure, numbers_of
from bench.peers.raydata import iter_torch_batches
from bench.raybox import ray_box

_STORE_NBYTES = 1_000_000_000


def torch_loader(case: Case) -> dict[str, Any]:
    """Uses `producers` workers and torch's default prefetch. Trainer and workers are the node's processes."""
    loader = torch.utils.data.DataLoader(Images(case), batch_size=case.batch, num_workers=case.producers)
    stream = iter(loader)
    return measure(
        stream, case, node_pids=lambda: [os.getpid(), *(p.pid for p in psutil.Process().children())]
    )


class Maker:
    """An actor that makes whole batches."""

    def __init__(self, case: Case) -> None:
        self._case, self._dataset = case, Images(case)

    def make(self, batch: int) -> Any:
        return self._dataset.stacked(numbers_of(self._case, batch))


def ray_data(case: Case) -> dict[str, Any]:
    """Uses one block per batch and keeps the order, as elsewhere. Driver and raylet are the node's processes."""
    return iter_torch_batches(raydata.Case(**dataclasses.asdict(case)))


def ray_actors(case: Case) -> dict[str, Any]:
    """Asks actors in turn, two batches ahead for each. Driver and raylet are the node's processes."""
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
