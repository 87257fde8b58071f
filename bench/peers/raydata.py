"""The peer of B18: Ray Data's own way into a trainer."""

from __future__ import annotations

from typing import Any

from bench import endtoend, raydata
from bench.raybox import await_iterators, ray_box


def iter_torch_batches(case: raydata.Case) -> dict[str, Any]:
    """The trainer is the driver; driver and raylet are the node's processes."""
    with ray_box(num_cpus=raydata.cpus(case), store_nbytes=raydata.STORE_NBYTES) as pids:
        made = raydata.pipeline(case)
        stream = raydata.pairs(made.iter_torch_batches(batch_size=case.batch, prefetch_batches=2))
        try:
            return endtoend.measure(stream, case, node_pids=lambda: pids)
        finally:
            stream.close()  # ends the executor while Ray is still there
            await_iterators()


PEERS = {"iter_torch_batches": iter_torch_batches}
