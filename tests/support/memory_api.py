"""The API server in memory, as a reconcile needs it, for tests of what becomes of its answers."""

from __future__ import annotations

import asyncio
import copy
import itertools
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from manifests import manifest
from observed_jobs import SETUP, T0

from dataloaderjob.api import KIND
from dataloaderjob.core.generations import Schedule
from dataloaderjob_operator.decide.observed import SupervisorStatus
from dataloaderjob_operator.observe.cache import Cache, JobKey
from dataloaderjob_operator.reconcile import Reconciler

KEY = ("team", "mnist")
Write = tuple[str, str, str]
"""Verb, kind and name."""


class MemoryApi:
    """Takes every object. `fault` is asked before each write, and what it returns is raised."""

    def __init__(self, fault: Callable[[Write], BaseException | None] = lambda _: None) -> None:
        self.fault = fault
        self.objects: dict[tuple[str, str], dict[str, Any]] = {}
        self.writes: list[Write] = []
        self.events: list[dict[str, Any]] = []
        self._versions = itertools.count(1)
        self._made: Counter[tuple[str, str]] = Counter()

    def _write(self, *write: str) -> None:
        verb, kind, name = write
        self.writes.append((verb, kind, name))
        if (error := self.fault((verb, kind, name))) is not None:
            raise error

    def add(self, thing: Mapping[str, Any]) -> dict[str, Any]:
        key = thing["kind"], thing["metadata"]["name"]
        old = self.objects.get(key, {})
        self._made[key] += not old
        again = f"-{self._made[key]}" if self._made[key] > 1 else ""  # no uid is ever used twice
        uid = old.get("metadata", {}).get("uid") or f"uid-{key[1]}{again}"
        generation = old.get("metadata", {}).get("generation", 0) + (old.get("spec") != thing.get("spec"))
        metadata = {
            "uid": uid,
            "generation": generation,
            **thing["metadata"],
            "resourceVersion": str(next(self._versions)),
        }
        status = {"status": old["status"]} if "status" in old else {}
        self.objects[key] = copy.deepcopy({**status, **thing, "metadata": metadata})
        return copy.deepcopy(self.objects[key])

    async def read(self, namespace: str, key: tuple[str, str]) -> dict[str, Any] | None:
        return copy.deepcopy(self.objects.get(key))

    async def apply(self, wanted: dict[str, Any]) -> dict[str, Any]:
        self._write("apply", wanted["kind"], wanted["metadata"]["name"])
        return self.add(wanted)

    async def create(self, wanted: dict[str, Any]) -> bool:
        key = wanted["kind"], wanted["metadata"]["name"]
        self._write("create", *key)
        if key in self.objects:
            return False
        self.add(wanted)
        return True

    async def try_apply(self, wanted: dict[str, Any]) -> None:
        self._write("try", wanted["kind"], wanted["metadata"]["name"])

    async def try_create(self, wanted: dict[str, Any]) -> None:
        self._write("try", wanted["kind"], wanted["metadata"]["generateName"])

    async def apply_status(
        self, namespace: str, name: str, version: str, status: Mapping[str, Any]
    ) -> dict[str, Any]:
        self._write("status", KIND, name)
        return self.add({**self.objects[KIND, name], "status": dict(status)})

    async def delete(self, namespace: str, key: tuple[str, str], uid: str = "") -> dict[str, Any] | None:
        self._write("delete", *key)
        self.objects.pop(key, None)
        return None

    async def create_event(self, event: dict[str, Any]) -> None:
        self.events.append(event)


class Supervisors:
    """Has what a test says."""

    reported: SupervisorStatus | None = None

    def status(self, key: JobKey) -> SupervisorStatus | None:
        return self.reported

    def want(
        self, key: JobKey, feeders: int | None, certificates: Schedule | None = None, *, ends: bool = False
    ) -> None:
        pass


class Job:
    """One job, its operator and the API server; time stands still."""

    def __init__(
        self,
        changes: Mapping[str, Any] | None = None,
        fault: Callable[[Write], BaseException | None] = lambda _: None,
    ) -> None:
        self.api, self.cache = MemoryApi(fault), Cache()
        on_cluster = {"metadata.uid": "u", "metadata.namespace": "team", "metadata.generation": 1}
        alone = {"spec.feeders.minAvailable": 0}  # no feeder ever serves here
        self.put(manifest({**on_cluster, **alone, **(changes or {})}))
        self.operator = Reconciler(self.api, self.cache, SETUP, Supervisors(), now=lambda: T0)

    def put(self, thing: Mapping[str, Any]) -> None:
        """As if somebody wrote it, and a watch reported it."""
        self.cache.put(self.api.add(thing))

    def edit(self, **spec: Any) -> None:
        live = self.api.objects[KIND, "mnist"]
        generation = live["metadata"]["generation"] + 1
        self.put(
            {
                **live,
                "spec": {**live["spec"], **spec},
                "metadata": {**live["metadata"], "generation": generation},
            }
        )

    def reconcile(self) -> float | None:
        self.api.writes.clear()
        return asyncio.run(self.operator.reconcile(KEY))

    @property
    def status(self) -> dict[str, Any]:
        return dict(self.api.objects[KIND, "mnist"].get("status") or {})

    def condition(self, kind: str) -> dict[str, Any]:
        return next(c for c in self.status["conditions"] if c["type"] == kind)

    def made(self) -> set[str]:
        return {f"{kind}/{name}" for kind, name in self.api.objects if kind != KIND}
