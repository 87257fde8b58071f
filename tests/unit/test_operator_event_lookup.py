"""Whose events are listed, and how often."""

from __future__ import annotations

import asyncio
from typing import Any

from dataloaderjob_operator.client import ApiError
from dataloaderjob_operator.decide.health import AGAIN_S, EventQuery
from dataloaderjob_operator.observe.watch import EventLookup

A, B = ("team", "a"), ("team", "b")
POD = EventQuery("Pod", "p", "u-p")
MOUNT = {
    "type": "Warning",
    "reason": "FailedMount",
    "message": "no secret",
    "lastTimestamp": "2026-01-01T00:00:00Z",
}


class Events:
    """Events by uid; a request for one that is not there fails."""

    def __init__(self, events: dict[str, list[dict[str, Any]]]) -> None:
        self.events_, self.requests = events, list[tuple[str, str]]()

    async def events(self, namespace: str, uid: str) -> list[dict[str, Any]]:
        self.requests.append((namespace, uid))
        if uid not in self.events_:
            raise ApiError(500, "not now")
        return self.events_[uid]


class Lookup:
    """An event lookup in virtual time, and the jobs that it put onto the workqueue."""

    def __init__(self, events: dict[str, list[dict[str, Any]]]) -> None:
        self.now, self.api, self.changed = 0.0, Events(events), list[tuple[str, str]]()
        self.lookup = EventLookup(self.api, self.changed.append, lambda: self.now)

    def turns(self) -> None:
        async def all_of_them() -> None:
            while await self.lookup.turn():
                pass

        asyncio.run(all_of_them())


def test_cause_is_available_at_the_next_reconcile_which_is_immediate():
    made = Lookup({"u-p": [MOUNT]})
    made.lookup.request(A, (POD,))
    assert made.lookup.found(A) == {}
    made.turns()
    assert made.changed == [A]
    assert made.lookup.found(A)["u-p"].reason == "VolumeNotMounted"
    assert made.lookup.found(B) == {}


def test_events_are_relisted_only_after_a_while_and_repeats_are_ignored():
    made = Lookup({"u-p": [MOUNT]})
    for moment, requests in ((0, 1), (1, 1), (AGAIN_S / 2, 1), (AGAIN_S, 2), (AGAIN_S + 1, 2)):
        made.now = moment
        made.lookup.request(A, (POD,))
        made.turns()
        assert len(made.api.requests) == requests
    assert made.changed == [A], "nothing new the second time"
    made.api.events_["u-p"] = []
    made.now = 3 * AGAIN_S
    made.lookup.request(A, (POD,))
    made.turns()
    assert made.changed == [A, A]
    assert made.lookup.found(A) == {}


def test_jobs_take_turns_and_a_repeated_request_counts_once():
    made = Lookup({"u-p": [], "u-q": []})
    made.lookup.request(A, (POD,))
    made.lookup.request(B, (EventQuery("Pod", "q", "u-q"),))
    made.lookup.request(A, (POD,))
    made.turns()
    assert made.api.requests == [("team", "u-p"), ("team", "u-q")]


def test_job_without_requests_is_forgotten():
    made = Lookup({"u-p": [MOUNT]})
    made.lookup.request(A, (POD,))
    made.turns()
    made.lookup.request(A, ())
    assert made.lookup.found(A) == {}
    made.lookup.request(A, (POD,))
    made.lookup.forget(A)
    made.turns()
    assert len(made.api.requests) == 1


def test_cause_of_an_object_no_longer_held_up_is_dropped():
    made = Lookup({"u-p": [MOUNT]})
    made.lookup.request(A, (POD,))
    made.turns()
    made.lookup.request(A, (EventQuery("Pod", "q", "u-q"),))
    assert made.lookup.found(A) == {}


def test_unresponsive_server_changes_no_known_cause():
    made = Lookup({"u-p": [MOUNT]})
    made.lookup.request(A, (POD,))
    made.turns()
    before = made.lookup.found(A)
    del made.api.events_["u-p"]
    made.now = AGAIN_S
    made.lookup.request(A, (POD,))
    made.turns()
    assert made.lookup.found(A) == before


def test_lookup_runs_on_its_own():
    async def run() -> None:
        changed, api = asyncio.Event(), Events({"u-p": [MOUNT]})
        lookup = EventLookup(api, lambda _: changed.set())
        task = asyncio.create_task(lookup.run())
        await asyncio.sleep(0)
        lookup.request(A, (POD,))
        async with asyncio.timeout(10):
            await changed.wait()
        task.cancel()

    asyncio.run(run())
