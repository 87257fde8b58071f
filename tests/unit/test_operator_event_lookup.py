"""Who is asked for events, and how often."""

from __future__ import annotations

import asyncio
from typing import Any

from dataloaderjob_operator.client import ApiError
from dataloaderjob_operator.decide.event_causes import AGAIN_S, Question
from dataloaderjob_operator.observe.lookups import EventLookup

A, B = ("team", "a"), ("team", "b")
POD = Question("Pod", "p", "u-p")
MOUNT = {
    "type": "Warning",
    "reason": "FailedMount",
    "message": "no secret",
    "lastTimestamp": "2026-01-01T00:00:00Z",
}


class Told:
    """Events by uid; a request for one that is not there fails."""

    def __init__(self, events: dict[str, list[dict[str, Any]]]) -> None:
        self.events_, self.asked = events, list[tuple[str, str]]()

    async def events(self, namespace: str, uid: str) -> list[dict[str, Any]]:
        self.asked.append((namespace, uid))
        if uid not in self.events_:
            raise ApiError(500, "not now")
        return self.events_[uid]


class Asked:
    """An event lookup in virtual time, and the jobs that it put onto the workqueue."""

    def __init__(self, events: dict[str, list[dict[str, Any]]]) -> None:
        self.now, self.api, self.changed = 0.0, Told(events), list[tuple[str, str]]()
        self.lookup = EventLookup(self.api, self.changed.append, lambda: self.now)

    def turns(self) -> None:
        async def all_of_them() -> None:
            while await self.lookup.turn():
                pass

        asyncio.run(all_of_them())


def test_what_is_heard_is_there_at_the_next_look_which_comes_at_once():
    asked = Asked({"u-p": [MOUNT]})
    asked.lookup.ask(A, (POD,))
    assert asked.lookup.heard(A) == {}
    asked.turns()
    assert asked.changed == [A]
    assert asked.lookup.heard(A)["u-p"].reason == "VolumeNotMounted"
    assert asked.lookup.heard(B) == {}


def test_it_asks_again_only_after_a_while_and_says_nothing_of_the_same():
    asked = Asked({"u-p": [MOUNT]})
    for moment, requests in ((0, 1), (1, 1), (AGAIN_S / 2, 1), (AGAIN_S, 2), (AGAIN_S + 1, 2)):
        asked.now = moment
        asked.lookup.ask(A, (POD,))
        asked.turns()
        assert len(asked.api.asked) == requests
    assert asked.changed == [A], "nothing new the second time"
    asked.api.events_["u-p"] = []
    asked.now = 3 * AGAIN_S
    asked.lookup.ask(A, (POD,))
    asked.turns()
    assert asked.changed == [A, A]
    assert asked.lookup.heard(A) == {}


def test_jobs_take_turns_and_one_that_asks_twice_has_one():
    asked = Asked({"u-p": [], "u-q": []})
    asked.lookup.ask(A, (POD,))
    asked.lookup.ask(B, (Question("Pod", "q", "u-q"),))
    asked.lookup.ask(A, (POD,))
    asked.turns()
    assert asked.api.asked == [("team", "u-p"), ("team", "u-q")]


def test_a_job_that_asks_no_longer_is_forgotten():
    asked = Asked({"u-p": [MOUNT]})
    asked.lookup.ask(A, (POD,))
    asked.turns()
    asked.lookup.ask(A, ())
    assert asked.lookup.heard(A) == {}
    asked.lookup.ask(A, (POD,))
    asked.lookup.forget(A)
    asked.turns()
    assert len(asked.api.asked) == 1


def test_what_was_heard_of_an_object_that_is_asked_about_no_longer_is_forgotten():
    asked = Asked({"u-p": [MOUNT]})
    asked.lookup.ask(A, (POD,))
    asked.turns()
    asked.lookup.ask(A, (Question("Pod", "q", "u-q"),))
    assert asked.lookup.heard(A) == {}


def test_a_server_that_does_not_answer_changes_nothing_of_what_was_heard():
    asked = Asked({"u-p": [MOUNT]})
    asked.lookup.ask(A, (POD,))
    asked.turns()
    before = asked.lookup.heard(A)
    del asked.api.events_["u-p"]
    asked.now = AGAIN_S
    asked.lookup.ask(A, (POD,))
    asked.turns()
    assert asked.lookup.heard(A) == before


def test_it_runs_on_its_own():
    async def run() -> None:
        told, api = asyncio.Event(), Told({"u-p": [MOUNT]})
        lookup = EventLookup(api, lambda _: told.set())
        task = asyncio.create_task(lookup.run())
        await asyncio.sleep(0)
        lookup.ask(A, (POD,))
        async with asyncio.timeout(10):
            await told.wait()
        task.cancel()

    asyncio.run(run())
