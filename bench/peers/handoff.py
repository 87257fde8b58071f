"""Peers of B1: torch DataLoader, SPDL's shared-memory segment pool, ray.get."""

from __future__ import annotations

import functools
import warnings
from collections import deque
from collections.abc import Iterator
from typing import Any

import torch

from bench.handoff import Case, ReadyBatches, measure
from bench.raybox import ray_box


def torch_loader(case: Case, *, strategy: str) -> dict[str, Any]:
    """Uses one worker, with `case.window` batches ahead. The sharing strategy is a setting of torch."""
    torch.multiprocessing.set_sharing_strategy(strategy)
    loader = torch.utils.data.DataLoader(
        ReadyBatches(case), batch_size=None, num_workers=1, prefetch_factor=case.window
    )
    stream = iter(loader)
    figures = measure(stream, case)
    del stream
    return figures


def spdl_pool(case: Case) -> dict[str, Any]:
    from spdl.pipeline import SharedMemorySegmentPool, iterate_in_subprocess

    # a segment holds one batch, each part on a line of its own; the last burst is still held
    pool = SharedMemorySegmentPool(case.nbytes + 256 * case.tensors, case.window + case.burst + 2)
    batches = iterate_in_subprocess(
        functools.partial(_all_batches, case), buffer_size=case.window, arena=pool, mp_context="fork"
    )
    stream = iter(batches)
    figures = measure(stream, case)
    for _ in stream:
        pass
    return figures


class _AllBatches:
    def __init__(self, case: Case) -> None:
        self._dataset = ReadyBatches(case)

    def __iter__(self) -> Iterator[Any]:
        for number in range(len(self._dataset)):
            yield self._dataset[number]


def _all_batches(case: Case) -> _AllBatches:
    return _AllBatches(case)


class Producer:
    """A Ray actor that makes batches as numpy arrays, which Ray hands out without a copy."""

    def __init__(self, case: Case) -> None:
        self._dataset = ReadyBatches(case)

    def make(self, number: int) -> Any:
        arrays = self._dataset.arrays(number)
        return arrays[0] if len(arrays) == 1 else arrays


def ray_get(case: Case) -> dict[str, Any]:
    import ray

    store = (2 * case.window + case.burst + 4) * case.nbytes
    with ray_box(num_cpus=1, store_nbytes=store):
        actor = ray.remote(num_cpus=1)(Producer).remote(case)
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return measure(_fetched(actor, case), case)


def _fetched(actor: Any, case: Case) -> Iterator[Any]:
    import ray

    asked = iter(range(case.batches))
    out: deque[Any] = deque(actor.make.remote(i) for _, i in zip(range(case.window), asked, strict=False))
    while out:
        value = ray.get(out.popleft())
        for i in asked:
            out.append(actor.make.remote(i))
            break
        # the frame must not keep a batch that the caller releases
        if isinstance(value, list):
            value = [torch.from_numpy(a) for a in value]
        else:
            value = torch.from_numpy(value)
        yield value
        del value


def on_our_feeders(case: Case) -> dict[str, Any]:
    """Uses torch's own iterator, with our context instead of worker processes."""
    from bench.ours import handoff_service

    with handoff_service(case):
        from dataloaderjob import context

        loader = torch.utils.data.DataLoader(
            ReadyBatches(case), batch_size=None, num_workers=1, prefetch_factor=case.window,
            multiprocessing_context=context(),
        )  # fmt: skip
        return measure(iter(loader), case)


PEERS = {
    "DataLoader, file_descriptor": functools.partial(torch_loader, strategy="file_descriptor"),
    "DataLoader, file_system": functools.partial(torch_loader, strategy="file_system"),
    "SPDL segment pool": spdl_pool,
    "ray.get": ray_get,
    "torch's iterator on our feeders": on_our_feeders,
}
