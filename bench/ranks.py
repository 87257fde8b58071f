"""B16: the ranks of one node, each a trainer process with its own loader: CPU and memory of all processes on the node.

Every rank steps at the same pace and sleeps instead of computing. One process starts the ranks, which begin together
once all are warm. It measures the node's processes from outside: the CPU over the steps, and the memory after the last
step. Memory is the proportional set size, in which shared pages count once.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import psutil
import torch

from bench import endtoend, machine
from bench.work import Proof, sums

CHECKED = 2
"""Number of batches of each rank that are compared byte by byte with its dataset's."""


@dataclass(frozen=True, slots=True)
class Case:
    ranks: int
    batches: int
    step_s: float
    batch: int = 16
    smoke: bool = False

    @property
    def name(self) -> str:
        return f"{self.ranks} ranks"

    @property
    def steps(self) -> int:
        return 4 if self.smoke else self.batches

    @property
    def images(self) -> endtoend.Images:
        """The dataset, with enough images for each rank."""
        return endtoend.Images(endtoend.Case(1, 1.0, 1.0, batch=self.batch, batches=self.steps + 8))


def rank(case: Case, new_loader: Callable[[Any], Any]) -> None:
    """Runs one trainer process: warms up, reports that, waits for a line, steps, and prints its measurements."""
    dataset = case.images
    stream, proof = iter(new_loader(dataset)), Proof()
    for number in range(CHECKED):
        expected, _ = dataset.stacked(range(number * case.batch, (number + 1) * case.batch))
        proof.add(number, [next(stream)[0].numpy()], [sums(expected)])
    print("{}", flush=True)
    sys.stdin.readline()
    waited, began = 0.0, time.perf_counter()
    for number in range(case.steps):
        asked = time.perf_counter()
        pictures, _ = next(stream)
        waited += time.perf_counter() - asked
        time.sleep(max(0.0, began + (number + 1) * case.step_s - time.perf_counter()))
    wall_s = time.perf_counter() - began
    print(
        json.dumps(
            {"waited": waited / wall_s, "nbytes": case.steps * pictures.nbytes, "proof": proof.as_json()}
        ),
        flush=True,
    )
    sys.stdin.readline()  # until the memory of this process has been read


def measure(party: str, case: Case, also: Callable[[], Sequence[int]]) -> dict[str, Any]:
    """Runs the ranks with the loader of `party`. `also` returns further pids on the node, apart from descendants."""
    command = [sys.executable, "-m", "bench.ranks", party, json.dumps(asdict(case))]
    with started(command, case.ranks) as ranks:
        for process in ranks:
            answer(process)
        pids = [*_with_children(ranks), *also()]
        before, cpu = machine.snapshot(), machine.cpu_ns(pids)
        for process in ranks:
            go_on(process)
        found = [answer(process) for process in ranks]
        cpu_s = (machine.cpu_ns(pids) - cpu) / 1e9
        load = machine.between(before, machine.snapshot())
        memory = sum(psutil.Process(pid).memory_full_info().pss for pid in pids)
        for process in ranks:
            go_on(process)
    nbytes = sum(one["nbytes"] for one in found)
    figures = {
        "node_cpu_s_per_gb": cpu_s / nbytes * 1e9,
        "node_mb": memory / 1e6,
        "processes": float(len(pids)),
        "waited_share": sum(one["waited"] for one in found) / len(found),
        "machine_busy_share": load.busy_share,
    }
    return {"figures": {case.name: figures}, "proof": found[0]["proof"]}


@contextlib.contextmanager
def started(command: Sequence[str], count: int) -> Iterator[list[subprocess.Popen[str]]]:
    """Yields the processes of `count` ranks, which have to exit by themselves when the block ends."""
    ranks: list[subprocess.Popen[str]] = []
    try:
        for number in range(count):
            environment = {**os.environ, "RANK": str(number), "WORLD_SIZE": str(count)}
            ranks.append(
                subprocess.Popen(
                    command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
                )
            )
        yield ranks
        for process in ranks:
            process.wait(30)
    finally:
        for process in ranks:
            process.kill()
            process.wait()


def _with_children(ranks: Sequence[subprocess.Popen[str]]) -> list[int]:
    return [
        pid
        for r in ranks
        for pid in (r.pid, *(c.pid for c in psutil.Process(r.pid).children(recursive=True)))
    ]


def answer(process: subprocess.Popen[str]) -> dict[str, Any]:
    """Returns the next line that a rank prints, which is JSON. Raises RuntimeError if the rank has ended."""
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise RuntimeError(f"rank {process.args!r} ended with {process.wait()}")
    return dict(json.loads(line))


def go_on(process: subprocess.Popen[str]) -> None:
    """Ends the rank's wait for a line."""
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()


def main() -> None:
    party, case = sys.argv[1], Case(**json.loads(sys.argv[2]))
    if party == "ours":
        from dataloaderjob import DataLoader

        rank(case, lambda dataset: DataLoader(dataset, batch_size=case.batch))
    else:
        workers = int(party)
        rank(
            case,
            lambda dataset: torch.utils.data.DataLoader(dataset, batch_size=case.batch, num_workers=workers),
        )


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)
