"""What kopf's own requests say of its watches and lists."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from dataloaderjob_operator.observe import requests, watch
from dataloaderjob_operator.observe.cache import Cache
from dataloaderjob_operator.observe.requests import LAST_WORD_S, Requests

PODS, SERVICES = "/api/v1/pods", "/api/v1/services"
WATCH = {"watch": "true"}


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture(autouse=True)
def _fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requests, "SETTLE_S", 0.01)


def service(name: str, uid: str) -> dict[str, Any]:
    labels = {"dataloading.dev/job": "mnist"}
    return {"kind": "Service", "metadata": {"name": name, "namespace": "team", "uid": uid, "labels": labels}}


def test_watch_counts_as_open_by_its_latest_response():
    clock = Clock()
    made = Requests(Cache(), watch.list_paths([]), clock)
    assert (made.open(), made.expected) == (0, 7)
    for path in (PODS, "/behind/a/proxy" + SERVICES, "/version"):
        made.began(path, WATCH)
        made.answered(path, WATCH, 200)
    assert made.open() == 2
    made.failed(PODS)
    assert made.open() == 1, "the API server is gone, whatever kopf's task does"
    made.answered(PODS, WATCH, 200)
    made.answered(SERVICES, WATCH, 403)
    assert made.open() == 1, "rights were taken away"
    made.answered(SERVICES, {}, 200)
    assert made.open() == 1, "a list is no watch"
    clock.now = LAST_WORD_S + 1
    assert made.open() == 0, "each is opened anew every five minutes, if there is anybody to open it"


def relists(made: Requests, *reported: str) -> frozenset[str]:
    """kopf lists Services, hands these on, and opens its watch."""
    made.began(SERVICES, {})
    for uid in reported:
        made.reported("Service", uid)
    made.began(SERVICES, {"continue": "x"})
    made.began(SERVICES, WATCH)

    async def waits() -> frozenset[str]:
        async with asyncio.timeout(5):
            return await made.relisted()

    return asyncio.run(waits())


def test_only_objects_missing_from_a_relist_are_looked_up():
    cache = Cache()
    for name in "ab":
        cache.put(service(name, f"u-{name}"))
    made = Requests(cache, watch.list_paths([]))
    assert relists(made, "u-a", "u-b") == frozenset()
    assert relists(made, "u-a") == {"Service"}
    cache.remove(service("b", "u-b"))
    assert relists(made, "u-a") == frozenset(), "a watch has reported it as deleted"


def test_lists_of_one_namespace_do_not_affect_another():
    cache = Cache()
    cache.put(service("a", "u-a"))
    made = Requests(cache, watch.list_paths(["other", "team"]))
    made.began("/api/v1/namespaces/other/services", {})
    made.began("/api/v1/namespaces/other/services", WATCH)
    assert asyncio.run(asyncio.wait_for(made.relisted(), 5)) == frozenset()


class Cluster:
    """Has nothing, and notes what is listed."""

    def __init__(self) -> None:
        self.listed: list[str] = []

    async def list(self, path: str, **_: str) -> AsyncIterator[dict[str, Any]]:
        self.listed.append(path)
        for thing in ():
            yield thing


def test_object_deleted_while_no_watch_was_open_is_dropped_after_relist():
    cache, cluster, added = Cache(), Cluster(), list[tuple[str, str]]()
    cache.put(service("a", "u-a"))
    made = Requests(cache, watch.list_paths([]))

    async def scenario() -> None:
        sweeping = asyncio.create_task(watch.keep_sweeping(cluster, cache, added.append, (), made))
        made.began(SERVICES, {})
        made.began(SERVICES, WATCH)
        async with asyncio.timeout(5):
            while not added:
                await asyncio.sleep(0.01)
        sweeping.cancel()

    asyncio.run(scenario())
    assert added == [("team", "mnist")]
    assert cluster.listed == [SERVICES], "only what may be missing is listed"
