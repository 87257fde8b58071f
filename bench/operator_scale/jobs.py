"""The jobs of the benchmark and the changes that are made to them."""

from __future__ import annotations

import asyncio
import copy
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from bench.operator_scale.api import MERGE, Api
from bench.operator_scale.watching import Name
from dataloaderjob.api import GROUP, PLURAL, VERSION

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "fashion-mnist" / "dataloaderjob.yaml"
TRAINERS, HEADS = 2, 1
NAMESPACES = 20
AT_ONCE = 8
STARTUP_S = 3600
"""Startup deadline, longer than the benchmark, so that a slow machine fails no job."""


@dataclass(frozen=True, slots=True)
class Shape:
    """The number of jobs, and the number of pods of each."""

    jobs: int
    pods_per_job: int

    @property
    def feeders(self) -> int:
        return self.pods_per_job - HEADS - TRAINERS

    @property
    def names(self) -> list[Name]:
        return [(f"team-{number % NAMESPACES}", f"train-{number}") for number in range(self.jobs)]


def manifest(shape: Shape, name: Name) -> dict[str, Any]:
    """Returns the example's manifest with the shape's number of feeders."""
    made: dict[str, Any] = copy.deepcopy(yaml.safe_load(EXAMPLE.read_text()))
    made["metadata"] = {"namespace": name[0], "name": name[1], "labels": {"team": name[0]}}
    spec = made["spec"]
    spec["feeders"] |= {"replicas": shape.feeders, "minAvailable": 1}
    spec["trainers"]["job"]["replicas"] = TRAINERS
    spec["startupDeadlineSeconds"] = STARTUP_S
    return made


def folder(name: Name) -> str:
    return f"/apis/{GROUP}/{VERSION}/namespaces/{name[0]}/{PLURAL}"


async def create(api: Api, shape: Shape) -> None:
    """Creates all namespaces and jobs, a few at a time."""
    for namespace in sorted({name[0] for name in shape.names}):
        await api.request("POST", "/api/v1/namespaces", {"metadata": {"name": namespace}})
    gate = asyncio.Semaphore(AT_ONCE)

    async def one(name: Name) -> None:
        async with gate:
            await api.request("POST", folder(name), manifest(shape, name))

    async with asyncio.TaskGroup() as group:
        for name in shape.names:
            group.create_task(one(name))


@dataclass(frozen=True, slots=True)
class Change:
    """A change that the API server has accepted."""

    name: Name
    generation: int
    at: float
    """Time of its answer, in seconds of the monotonic clock."""


async def change(api: Api, name: Name, spec: dict[str, Any]) -> Change:
    answer = await api.request("PATCH", f"{folder(name)}/{name[1]}", {"spec": spec}, MERGE)
    return Change(name, answer["metadata"]["generation"], time.monotonic())


async def change_steadily(
    api: Api, names: list[Name], specs: list[dict[str, Any]], per_s: float
) -> list[Change]:
    """Changes jobs one after the other at this pace, each to its own spec. A slow answer does not delay later
    changes."""
    start = time.monotonic()

    async def one(number: int) -> Change:
        await asyncio.sleep(max(0.0, start + number / per_s - time.monotonic()))
        return await change(api, names[number], specs[number])

    return list(await asyncio.gather(*(one(number) for number in range(len(names)))))
