"""What is asked of the API server beside the watches, a bounded number of requests at a time.

`EventLookup` lists the events of objects that hold a job up: one request at a time, however many jobs ask. `ask` comes
from reconciles and waits for nothing; the answers are there at a later reconcile, for which a job that has new events
is put onto the workqueue.

`SecretPoller` reads children that no watch reports: Secrets, which nobody should have to list. Each is read by its
name, in turns. With up to EVERY_S / LEAST_S jobs that have not ended, a deletion is noticed within EVERY_S; with more
the turn takes longer, and the API server is asked no more often.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from dataloaderjob_operator.client import ApiError
from dataloaderjob_operator.decide.event_causes import AGAIN_S, Question, meaning
from dataloaderjob_operator.decide.observed import Key
from dataloaderjob_operator.decide.troubles import Trouble
from dataloaderjob_operator.kinds import KINDS, Source
from dataloaderjob_operator.monitoring import about_job
from dataloaderjob_operator.objects import Manifest
from dataloaderjob_operator.observe.cache import JobKey

log = logging.getLogger(__name__)

EVERY_S = 8.0
LEAST_S = 0.1
Heard = Mapping[str, Trouble]
"""By uid of the object."""


class EventReader(Protocol):
    """Where events come from."""

    async def events(self, namespace: str, uid: str) -> Sequence[Mapping[str, Any]]:
        """Of one object, a bounded number. Raises ApiError."""


class EventLookup:
    """`ask` and `heard` from reconciles, `run` until cancelled."""

    def __init__(
        self, api: EventReader, changed: Callable[[JobKey], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._api, self._changed, self._clock = api, changed, clock
        self._asked: dict[JobKey, tuple[Question, ...]] = {}
        """In the order in which it was asked."""
        self._heard: dict[JobKey, dict[str, Trouble]] = {}
        self._not_before: dict[JobKey, float] = {}
        self._more = asyncio.Event()

    def heard(self, key: JobKey) -> Heard:
        return self._heard.get(key, {})

    def ask(self, key: JobKey, questions: tuple[Question, ...]) -> None:
        """What a job wants to know now. No question: it is held up no longer, and what was heard is forgotten."""
        if not questions:
            self.forget(key)
            return
        uids = {question.uid for question in questions}
        if key in self._heard:
            self._heard[key] = {uid: trouble for uid, trouble in self._heard[key].items() if uid in uids}
        if self._clock() >= self._not_before.get(key, 0.0):
            self._asked[key] = questions
            self._more.set()

    def forget(self, key: JobKey) -> None:
        for known in (self._asked, self._heard, self._not_before):
            known.pop(key, None)

    async def run(self) -> None:
        while True:
            self._more.clear()
            while await self.turn():
                pass
            await self._more.wait()

    async def turn(self) -> bool:
        """Asks for the job that waits longest. Returns False if none does."""
        key = next(iter(self._asked), None)
        if key is None:
            return False
        questions = self._asked.pop(key)
        self._not_before[key] = self._clock() + 0.9 * AGAIN_S
        with about_job(*key):
            try:
                found = {
                    q.uid: trouble for q in questions if (trouble := await self._one(key[0], q)) is not None
                }
            except ApiError as exc:
                log.warning("cannot list the events that may name a cause: %s", exc)
                return True
        if key in self._not_before and found != self._heard.get(key, {}):
            self._heard[key] = found
            self._changed(key)
        return True

    async def _one(self, namespace: str, question: Question) -> Trouble | None:
        return meaning(question, await self._api.events(namespace, question.uid))


class Reader(Protocol):
    """What they are asked of."""

    async def read(self, namespace: str, key: Key) -> Manifest | None:
        """An object as it is now, None if it is not there. Raises ApiError."""


class SecretPoller:
    """Those known to be there. `run` until cancelled finds out which are no longer."""

    def __init__(
        self,
        api: Reader,
        changed: Callable[[JobKey], None],
        ended: Callable[[JobKey], bool] = lambda _: False,
    ) -> None:
        """`ended`: jobs of which no pod needs any more."""
        self._api, self._changed, self._ended = api, changed, ended
        self._there: dict[JobKey, dict[Key, str]] = {}

    def __contains__(self, what: tuple[JobKey, Key]) -> bool:
        key, child = what
        return child in self._there.get(key, ())

    def saw(self, key: JobKey, thing: Manifest) -> None:
        """It is there, or has just been made. One of a kind that is watched is not remembered."""
        if KINDS[thing["kind"]].source is Source.POLL:
            metadata = thing["metadata"]
            self._there.setdefault(key, {})[thing["kind"], metadata["name"]] = metadata.get("uid", "")

    def forget(self, key: JobKey) -> None:
        """The job is gone."""
        self._there.pop(key, None)

    async def run(self) -> None:
        while True:
            there = {key: children for key, children in self._there.items() if not self._ended(key)}
            turn = [(key, child) for key, children in there.items() for child in children]
            if not turn:
                await asyncio.sleep(EVERY_S)
            for key, child in turn:
                await asyncio.sleep(max(LEAST_S, EVERY_S / len(turn)))
                await self.look(key, child)

    async def look(self, key: JobKey, child: Key) -> None:
        """Once, at one of them."""
        try:
            found = await self._api.read(key[0], child)
        except ApiError as exc:
            log.warning("cannot read %s %s/%s: %s", child[0], key[0], child[1], exc)
            return
        mine = self._there.get(key, {})
        if child in mine and (found is None or found["metadata"].get("uid") != mine[child]):
            del mine[child]
            self._changed(key)
