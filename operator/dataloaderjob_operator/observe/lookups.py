"""What is asked of the API server beside the watches, a bounded number of requests at a time.

`EventLookup` lists the events of objects that hold a job up: one request at a time, however many jobs wait. Reconciles
call `request`, which waits for nothing; a cause is there at a later reconcile, for which its job is put onto the
workqueue.

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
from dataloaderjob_operator.decide.health import AGAIN_S, EventQuery, meaning
from dataloaderjob_operator.decide.observed import Key
from dataloaderjob_operator.decide.troubles import Trouble
from dataloaderjob_operator.kinds import KINDS, Source
from dataloaderjob_operator.monitoring import about_job
from dataloaderjob_operator.objects import Manifest
from dataloaderjob_operator.observe.cache import JobKey

log = logging.getLogger(__name__)

EVERY_S = 8.0
LEAST_S = 0.1


class EventReader(Protocol):
    """A reader of events."""

    async def events(self, namespace: str, uid: str) -> Sequence[Mapping[str, Any]]:
        """Lists a bounded number of events of one object. Raises ApiError."""


class EventLookup:
    """Causes that only events have. Reconciles call `request` and `found`; `run` works until it is cancelled."""

    def __init__(
        self, api: EventReader, changed: Callable[[JobKey], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._api, self._changed, self._clock = api, changed, clock
        self._requested: dict[JobKey, tuple[EventQuery, ...]] = {}
        """Jobs whose events are to be listed, first come first."""
        self._found: dict[JobKey, dict[str, Trouble]] = {}
        self._not_before: dict[JobKey, float] = {}
        self._more = asyncio.Event()

    def found(self, key: JobKey) -> Mapping[str, Trouble]:
        """The troubles that events reported of a job's objects, by their uids."""
        return self._found.get(key, {})

    def request(self, key: JobKey, queries: tuple[EventQuery, ...]) -> None:
        """Lists the events of these objects soon. Without any, the job is held up no longer, and what was found is
        dropped."""
        if not queries:
            self.forget(key)
            return
        uids = {query.uid for query in queries}
        if key in self._found:
            self._found[key] = {uid: trouble for uid, trouble in self._found[key].items() if uid in uids}
        if self._clock() >= self._not_before.get(key, 0.0):
            self._requested[key] = queries
            self._more.set()

    def forget(self, key: JobKey) -> None:
        """The job is gone, or held up no longer."""
        for known in (self._requested, self._found, self._not_before):
            known.pop(key, None)

    async def run(self) -> None:
        while True:
            self._more.clear()
            while await self.turn():
                pass
            await self._more.wait()

    async def turn(self) -> bool:
        """Serves the job that has waited longest. Returns False if none waits."""
        key = next(iter(self._requested), None)
        if key is None:
            return False
        queries = self._requested.pop(key)
        self._not_before[key] = self._clock() + 0.9 * AGAIN_S
        with about_job(*key):
            try:
                found = {
                    query.uid: trouble
                    for query in queries
                    if (trouble := meaning(query, await self._api.events(key[0], query.uid))) is not None
                }
            except ApiError as exc:
                log.warning("cannot list the events that may name a cause: %s", exc)
                return True
        if key in self._not_before and found != self._found.get(key, {}):
            self._found[key] = found
            self._changed(key)
        return True


class Reader(Protocol):
    """A reader of single objects."""

    async def read(self, namespace: str, key: Key) -> Manifest | None:
        """Reads an object, None if it is not there. Raises ApiError."""


class SecretPoller:
    """Secrets known to be there; `run` finds out which are no longer, until it is cancelled."""

    def __init__(
        self,
        api: Reader,
        changed: Callable[[JobKey], None],
        ended: Callable[[JobKey], bool] = lambda _: False,
    ) -> None:
        """`ended`: checks whether a job is over, so that no pod needs its Secret any more."""
        self._api, self._changed, self._ended = api, changed, ended
        self._there: dict[JobKey, dict[Key, str]] = {}

    def __contains__(self, what: tuple[JobKey, Key]) -> bool:
        key, child = what
        return child in self._there.get(key, ())

    def track(self, key: JobKey, thing: Manifest) -> None:
        """Remembers an object that is there or has just been made, if its kind is polled."""
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
                await self.check(key, child)

    async def check(self, key: JobKey, child: Key) -> None:
        """Reads one of them."""
        try:
            found = await self._api.read(key[0], child)
        except ApiError as exc:
            log.warning("cannot read %s %s/%s: %s", child[0], key[0], child[1], exc)
            return
        mine = self._there.get(key, {})
        if child in mine and (found is None or found["metadata"].get("uid") != mine[child]):
            del mine[child]
            self._changed(key)
