"""Lists that find what the watches missed, and jobs that are not reconciled any more."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from dataloaderjob_operator.observe.cache import Cache, JobKey
from dataloaderjob_operator.observe.watch import prime, sweep
from dataloaderjob_operator.workqueue import NEVER, Workers

KEY = ("team", "mnist")


class Cluster:
    """What is there, by the last word of the path that lists it."""

    def __init__(self, **objects: list[dict[str, Any]]) -> None:
        self.objects = objects

    async def list(self, path: str, **_: str) -> AsyncIterator[dict[str, Any]]:
        for thing in self.objects.get(path.rpartition("/")[2], []):
            yield thing


def thing(name: str, uid: str, **labels: str) -> dict[str, Any]:
    return {"metadata": {"name": name, "namespace": "team", "uid": uid, "labels": labels}}


def service(uid: str) -> dict[str, Any]:
    return thing("mnist-head", uid, **{"dataloading.dev/job": "mnist"})


def primed(cluster: Cluster) -> tuple[Cache, list[JobKey]]:
    cache, reported = Cache(), []
    asyncio.run(prime(cluster, cache, reported.append, ()))
    return cache, reported


def test_all_existing_objects_are_known_before_any_decision():
    cache, reported = primed(Cluster(dataloaderjobs=[thing("mnist", "j")], services=[service("s")]))
    assert reported == [KEY]
    assert cache.child(KEY, ("Service", "mnist-head")) is not None


def test_missed_deletion_drops_the_object_and_reconciles_its_job():
    cluster = Cluster(dataloaderjobs=[thing("mnist", "j")], services=[service("s")])
    cache, reported = primed(cluster)
    cluster.objects["services"] = []
    reported.clear()
    asyncio.run(sweep(cluster, cache, reported.append, ()))
    assert cache.child(KEY, ("Service", "mnist-head")) is None
    assert reported == [KEY]
    cluster.objects["dataloaderjobs"] = []
    asyncio.run(sweep(cluster, cache, reported.append, ()))
    assert len(cache) == 0


def test_missed_creation_adds_the_object_and_reconciles_its_job():
    cluster = Cluster(dataloaderjobs=[thing("mnist", "j")])
    cache, reported = primed(cluster)
    cluster.objects["dataloaderjobs"].append(thing("other", "k"))
    cluster.objects["services"] = [service("s")]
    reported.clear()
    asyncio.run(sweep(cluster, cache, reported.append, ()))
    assert reported == [("team", "other"), KEY]
    assert cache.child(KEY, ("Service", "mnist-head")) is not None


def test_job_always_due_at_once_does_not_starve_other_tasks():
    beats = []

    async def reconcile(key: JobKey) -> float:
        return 0.0

    async def run() -> None:
        work = Workers(reconcile)
        work.add(KEY)
        task = asyncio.create_task(work.run())
        for _ in range(3):
            await asyncio.sleep(0.01)
            beats.append(1)
        task.cancel()

    asyncio.run(asyncio.wait_for(run(), 20))
    assert len(beats) == 3


def test_object_created_during_a_list_is_kept():
    cluster = Cluster(dataloaderjobs=[thing("mnist", "j")], services=[service("old")])
    cache, reported = primed(cluster)

    class Meanwhile(Cluster):
        async def list(self, path: str, **_: str) -> AsyncIterator[dict[str, Any]]:
            if path.endswith("services"):  # deleted and made anew, and the watch reports the new one first
                cache.put({**service("new"), "kind": "Service"})
                return
            async for found in super().list(path):
                yield found

    reported.clear()
    asyncio.run(sweep(Meanwhile(dataloaderjobs=[thing("mnist", "j")]), cache, reported.append, ()))
    found = cache.child(KEY, ("Service", "mnist-head"))
    assert found is not None
    assert found["metadata"]["uid"] == "new"
    assert reported == []


def test_deleted_job_is_not_requeued_and_others_are_at_each_resync():
    reconciled: list[JobKey] = []

    async def reconcile(key: JobKey) -> float | None:
        reconciled.append(key)
        return NEVER if key == KEY else None

    async def one_round() -> list[int]:
        work = Workers(reconcile)
        task = asyncio.create_task(work.run())
        left = []
        for key in (KEY, ("team", "other")):
            work.add(key)
            while key not in reconciled:
                await asyncio.sleep(0)
            await asyncio.sleep(0)
            left.append(len(work))
        task.cancel()
        return left

    assert asyncio.run(one_round()) == [0, 1]


def test_jobs_are_reconciled_at_the_configured_interval():
    reconciled: list[JobKey] = []

    async def reconcile(key: JobKey) -> float | None:
        reconciled.append(key)
        return 60.0 if key == KEY else None

    async def run() -> None:
        work = Workers(reconcile, resync_s=0.01)
        task = asyncio.create_task(work.run())
        for key in (KEY, ("team", "other")):
            work.add(key)
        async with asyncio.timeout(10):
            while min(reconciled.count(KEY), reconciled.count(("team", "other"))) < 3:
                await asyncio.sleep(0.001)
        task.cancel()

    asyncio.run(run())
