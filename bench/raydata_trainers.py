"""Our trainers of B18: `python -m bench.raydata_trainers '{"producers": ...}' SIDECAR_PID` is one of several, by RANK.

It prints what it measured, as JSON, and stays until it is killed: what another one counts must not end meanwhile.
"""

from __future__ import annotations

import functools
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import psutil
import torch

from bench import endtoend, raydata
from bench.raydata import Case


def measure(case: Case, sidecar: int, node_pids: Callable[[], list[int]]) -> dict[str, Any]:
    """`sidecar`: its pid; `node_pids`: those of the trainer's node where the trainer is this process."""
    if case.trainers == 1:
        return _measured(case, 0, node_pids)
    command = [sys.executable, "-m", "bench.raydata_trainers", json.dumps(asdict(case)), str(sidecar)]
    trainers = [
        subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True,
            env={**os.environ, "RANK": str(rank), "WORLD_SIZE": str(case.trainers)},
        )
        for rank in range(case.trainers)
    ]  # fmt: skip
    try:
        printed = [_line(trainer) for trainer in trainers]
    finally:
        for trainer in trainers:
            trainer.kill()
            trainer.wait()
    return raydata.together(case, [json.loads(text) for text in printed])


def _line(trainer: subprocess.Popen[str]) -> str:
    assert trainer.stdout is not None
    if line := trainer.stdout.readline():
        return line
    raise RuntimeError(f"trainer {trainer.args!r} ended with {trainer.wait()}")


def _measured(case: Case, rank: int, node_pids: Callable[[], list[int]]) -> dict[str, Any]:
    from dataloaderjob import DataLoader, RayData

    source = RayData(functools.partial(raydata.pipeline, case), batch_size=case.batch)
    torch.manual_seed(0)
    tail = "drop" if case.trainers > 1 else None
    stream = raydata.pairs(DataLoader(source, batch_size=None, num_workers=1, tail=tail))
    return endtoend.measure(stream, case, node_pids=node_pids, share=(rank, case.trainers))


def main() -> None:
    case, rank = Case(**json.loads(sys.argv[1])), int(os.environ["RANK"])
    sidecar = psutil.Process(int(sys.argv[2]))

    def on_node() -> list[int]:
        shared = [sidecar, *sidecar.children()] if rank == 0 else []
        return [os.getpid(), *(process.pid for process in shared)]

    print(json.dumps(_measured(case, rank, on_node)), flush=True)
    signal.pause()


if __name__ == "__main__":
    main()
