"""The peer of B18: Ray Data's own way into a trainer."""

from __future__ import annotations

import functools
from typing import Any

from bench import endtoend, raydata
from bench.raybox import await_iterators, ray_box


def iter_torch_batches(case: raydata.Case, *, far_node: bool = True) -> dict[str, Any]:
    """The trainer is the driver; driver and its raylet are the node's processes. `far_node`: tasks run on another
    raylet, as they do where the trainer's node is for the trainer; blocks come through Ray's own transfer."""
    cpus = raydata.cpus(case)
    with ray_box(num_cpus=cpus, store_nbytes=raydata.STORE_NBYTES, far_node=far_node) as pids:
        made = raydata.pipeline(case)
        stream = raydata.pairs(made.iter_torch_batches(batch_size=case.batch, prefetch_batches=2))
        try:
            return endtoend.measure(stream, case, node_pids=lambda: pids)
        finally:
            stream.close()  # ends the executor while Ray is still there
            await_iterators()


PEERS = {
    "iter_torch_batches": iter_torch_batches,
    "iter_torch_batches, one raylet": functools.partial(iter_torch_batches, far_node=False),
}
