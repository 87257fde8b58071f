"""Two hours of an operator with 1,000 jobs: `python -m bench.operator_scale.soak [--minutes M] [--jobs N]`.

Figures of all jobs move. Each second one job is changed: its feeders, a deadline, or, each tenth time, the whole job,
which is deleted and created again. The operator's memory (resident set) is printed 120 times. The exit code is 1 if the
memory rises by more than 1 MB an hour after the first quarter.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import sys
import tempfile
import time
from pathlib import Path

import aiohttp
import psutil

from bench import machine
from bench.operator_scale.api import Api, connected
from bench.operator_scale.cluster import Cluster, cluster
from bench.operator_scale.jobs import Shape, change, folder, manifest
from bench.operator_scale.phases import Bench, Timing
from bench.operator_scale.process import Process
from bench.operator_scale.supervisors import Mode
from bench.operator_scale.watching import Name
from bench.run import say
from bench.stats import median

MB_PER_HOUR = 1.0
EVERY_S = 1.0
SAMPLES = 120
REPLACED = 10
"""One in REPLACED changes replaces its job."""
TRIES, AGAIN_S = 60, 0.5
"""Attempts to create the new job, and seconds between them. Its name is free once the deleted job is gone."""

Sample = tuple[float, float]
"""Seconds since the start, and bytes."""


async def change_all(api: Api, shape: Shape) -> None:
    """Changes one job after the other until cancelled. In each round, a job gets another change."""
    for number in itertools.count():
        began, around = time.monotonic(), number // shape.jobs
        name = shape.names[(number + around) % shape.jobs]
        if number % REPLACED == 0:
            await replace(api, shape, name)
        elif number % 2:
            await change(api, name, {"feeders": {"replicas": shape.feeders - 1 + around % 2}})
        else:
            await change(api, name, {"loader": {"batchTimeoutSeconds": 200 + number}})
        await asyncio.sleep(max(0.0, began + EVERY_S - time.monotonic()))


async def replace(api: Api, shape: Shape, name: Name) -> None:
    """Deletes the job and creates it again. Raises aiohttp.ClientResponseError if the old job stays."""
    await api.request("DELETE", f"{folder(name)}/{name[1]}")
    for left in reversed(range(TRIES)):
        try:
            await api.request("POST", folder(name), manifest(shape, name))
            return
        except aiohttp.ClientResponseError as exc:
            if exc.status != 409 or not left:
                raise
        await asyncio.sleep(AGAIN_S)


async def sampled(operator: Process, minutes: float) -> list[Sample]:
    samples: list[Sample] = []
    began, every_s = time.monotonic(), max(1.0, minutes * 60 / SAMPLES)
    while (elapsed_s := time.monotonic() - began) < minutes * 60:
        operator.check()
        samples.append((elapsed_s, psutil.Process(operator.pid).memory_info().rss))
        say(f"{elapsed_s / 60:6.1f} min: {samples[-1][1] / 1e6:.1f} MB")
        await asyncio.sleep(every_s)
    return samples


def mb_per_hour(samples: list[Sample]) -> float:
    """Returns the median slope between any two samples after the first quarter. A step or a peak is no trend."""
    kept = samples[len(samples) // 4 :]
    return median(
        [(b[1] - a[1]) / 1e6 / ((b[0] - a[0]) / 3600) for a, b in itertools.combinations(kept, 2)] or [0.0]
    )


async def soaked(running: Cluster, shape: Shape, minutes: float) -> list[Sample]:
    async with connected(running.server.url, running.server.token) as api:
        made, operator = Bench(running, api, shape, Timing()), Process(running)
        following = asyncio.create_task(made.jobs.follow(api))
        try:
            await made.from_nothing(operator)
            running.figures(Mode.MOVING.value)
            async with asyncio.TaskGroup() as group:
                changing = group.create_task(change_all(api, shape))
                samples = await sampled(operator, minutes)
                changing.cancel()
            say(
                f"statuses reported, by what was new: {dict(made.jobs.written)}; jobs: {dict(made.jobs.phases())}"
            )
            return samples
        finally:
            operator.kill()
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.operator_scale.soak", description=__doc__.split("\n")[0]
    )
    parser.add_argument("--minutes", type=float, default=120.0)
    parser.add_argument("--jobs", type=int, default=1000)
    options = parser.parse_args(arguments)
    shape = Shape(options.jobs, 10)
    machine.unwind_on_signals()
    machine.adopt_orphans()
    with tempfile.TemporaryDirectory(prefix="dataloaderjob-bench-") as scratch:
        try:
            with cluster(Path(scratch), feeders=shape.feeders) as running:
                found = mb_per_hour(asyncio.run(soaked(running, shape, options.minutes)))
        finally:
            machine.end_children(0.0)
    say(f"{found:+.2f} MB an hour (at most {MB_PER_HOUR:g} are right)")
    return 1 if found > MB_PER_HOUR else 0


if __name__ == "__main__":
    sys.exit(main())
