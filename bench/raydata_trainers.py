"""One of several trainers of ours in B18, by RANK: `python -m bench.raydata_trainers '{"producers": ...}' SIDECAR_PID`.

It prints its measurements as JSON and stays until it receives a line, because another trainer counts its processes.
"""

from __future__ import annotations

import functools
import json
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any

import torch

from bench import endtoend, ranks, raydata
from bench.raydata import Case
from bench.service import on_trainer_node


def measure(case: Case, sidecar: int, node_pids: Callable[[], list[int]]) -> dict[str, Any]:
    """Runs the trainers. `sidecar` is a pid. `node_pids` returns the node's pids if the only trainer is this
    process."""
    if case.trainers == 1:
        return _measured(_batches(case), case, 0, node_pids)
    command = [sys.executable, "-m", "bench.raydata_trainers", json.dumps(asdict(case)), str(sidecar)]
    with ranks.started(command, case.trainers) as trainers:
        found = [ranks.answer(trainer) for trainer in trainers]
        for trainer in trainers:
            ranks.go_on(trainer)
    return raydata.together(case, found)


def _batches(case: Case) -> Iterator[Any]:
    from dataloaderjob import DataLoader, RayData

    source = RayData(functools.partial(raydata.pipeline, case), batch_size=case.batch)
    torch.manual_seed(0)
    tail = "drop" if case.trainers > 1 else None
    return raydata.pairs(DataLoader(source, batch_size=None, num_workers=1, tail=tail))


def _measured(
    stream: Iterator[Any], case: Case, rank: int, node_pids: Callable[[], list[int]]
) -> dict[str, Any]:
    return endtoend.measure(
        stream, case, node_pids=node_pids, share=case.dealt(rank), checked=case.checked(rank)
    )


def main() -> None:
    case, rank = Case(**json.loads(sys.argv[1])), int(os.environ["RANK"])
    sidecar = int(sys.argv[2])
    on_node = functools.partial(on_trainer_node, sidecar) if rank == 0 else lambda: [os.getpid()]
    stream = _batches(case)  # kept until the end, to keep the receiver, whose CPU another trainer counts
    print(json.dumps(_measured(stream, case, rank, on_node)), flush=True)
    sys.stdin.readline()


if __name__ == "__main__":
    main()
    os._exit(0)
