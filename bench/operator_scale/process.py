"""The operator's process, which the benchmark starts, reads and kills."""

from __future__ import annotations

import asyncio
import re
import time
from pathlib import Path

import psutil

from bench.operator_scale import cluster as cluster_of
from bench.operator_scale.figures import Reading, parse_metrics, reading

from processes_of_operator import Operator  # isort: skip  bench.operator_scale.cluster puts its folder on the path

LOOK_S = 0.25
"""Interval of readings during a wait. Each reading takes the operator some milliseconds."""


class Process:
    """The operator's process. At most one runs at a time."""

    def __init__(self, cluster: cluster_of.Cluster) -> None:
        self._operator = Operator(cluster.server, cluster.folder)
        self._cluster = cluster
        self.started_at = 0.0

    @property
    def pid(self) -> int:
        assert self._operator.process is not None
        return self._operator.process.pid

    @property
    def alive(self) -> bool:
        return self._operator.process is not None and self._operator.process.poll() is None

    def start(self, *options: str) -> None:
        self.started_at = time.monotonic()
        self._operator.start("--log-format", "json", *options)

    def kill(self) -> None:
        if self.alive:
            self._operator.end(kill=True)

    async def ready(self) -> bool:
        """Returns True if the operator has listed all objects."""
        return (await asyncio.to_thread(self._operator.ask, "/readyz"))[0] == 200

    async def read(self) -> Reading:
        """Reads the operator's counters. Raises RuntimeError if it has ended."""
        self.check()
        code, text = await asyncio.to_thread(self._operator.ask, "/metrics")
        used = psutil.Process(self.pid).cpu_times()
        return reading(
            parse_metrics(text) if code == 200 else {}, at=time.monotonic(), cpu_s=used.user + used.system,
            peak_nbytes=peak_nbytes(self.pid),
        )  # fmt: skip

    async def worked_off(self, jobs: int, seconds: float) -> Reading:
        """Waits until `jobs` reconciles are done and no job is queued. Raises TimeoutError."""
        deadline = time.monotonic() + seconds
        while True:
            found = await self.read()
            if found.reconciles >= jobs and found.queue_depth == 0 and await self.ready():
                return found
            if time.monotonic() > deadline:
                raise TimeoutError(f"{jobs} jobs were not looked at within {seconds:.0f} s: {found}")
            await asyncio.sleep(LOOK_S)

    def check(self) -> None:
        """Raises RuntimeError if the operator or a part of the cluster has ended."""
        self._cluster.check()
        if not self.alive:
            raise RuntimeError(f"the operator ended; it said:\n{self._operator.log[-3000:]}")


def peak_nbytes(pid: int) -> int:
    """Returns the peak resident memory (VmHWM)."""
    text = Path(f"/proc/{pid}/status").read_text()
    match = re.search(r"VmHWM:\s+(\d+) kB", text)
    return int(match.group(1)) * 1024 if match else 0
