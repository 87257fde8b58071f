"""What is learned of the API server: what watches, lists and lookups report goes into the cache, and its job onto the
queue.

kopf keeps the watches open. Only its `on.event` is used: it writes no handler state, finalizer or annotation. Lists
come before anything is decided, and again now and then for what the watches missed. What no watch reports is looked up
with a bounded number of requests: `EventLookup` lists the events of objects that hold a job up.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Container, Iterable, Mapping, Sequence
from typing import Any

import kopf

from dataloaderjob.api import KIND
from dataloaderjob_operator.client import ApiError, Client
from dataloaderjob_operator.decide.health import AGAIN_S, EventQuery, meaning
from dataloaderjob_operator.decide.observed import Trouble
from dataloaderjob_operator.kinds import KINDS, WATCHED, Manifest
from dataloaderjob_operator.monitoring import about_job
from dataloaderjob_operator.names import LABEL_JOB
from dataloaderjob_operator.observe.cache import Cache, JobKey
from dataloaderjob_operator.observe.requests import WATCH_S, Requests

log = logging.getLogger(__name__)

CHUNK = 100
"""Objects in a page of a list: with 500, pages of pods in the hands of kopf were 40 MB."""
IDLE_S = 0.5
"""kopf keeps a task for each object that something happened to, for so long after it."""
RETRY_S = 5.0
"""Pause after a list that failed."""
ENDS_S = 15.0
"""kopf does not survive each error of a watch, nor always return after one: so long after it the process is killed, and
started again by the kubelet."""
SWEEP_S = 600.0
"""Interval between two lists for what the watches missed."""


class _NoDiffs(kopf.DiffBaseStorage):
    """Switches off kopf's own bookkeeping of what changed, which the handlers here do not use: it took a fifth of the
    CPU of a cold start."""

    def build(
        self,
        *,
        body: kopf.Body,  # noqa: ARG002
        extra_fields: Iterable[kopf.FieldSpec] | None = None,  # noqa: ARG002
    ) -> kopf.BodyEssence:
        return kopf.BodyEssence()

    def fetch(self, *, body: kopf.Body) -> None:  # noqa: ARG002
        return None

    def store(self, *, body: kopf.Body, patch: kopf.Patch, essence: kopf.BodyEssence) -> None:  # noqa: ARG002
        return None


def list_paths(namespaces: Sequence[str]) -> dict[str, list[str]]:
    """Paths at which all objects of a kind are listed; in all namespaces if none is named."""
    return {kind.name: [kind.path(name) for name in namespaces] or [kind.path(None)] for kind in WATCHED}


def configure(settings: kopf.OperatorSettings) -> None:
    """Sets kopf up: a dead connection is noticed, the server filters, nothing is posted."""
    settings.posting.enabled = False
    settings.scanning.disabled = True
    settings.watching.server_timeout = WATCH_S
    settings.watching.client_timeout = WATCH_S + 30
    settings.watching.chunk_size = CHUNK
    settings.queueing.idle_timeout = IDLE_S
    settings.persistence.diffbase_storage = _NoDiffs()
    settings.process.ultimate_exiting_timeout = ENDS_S
    for kind in WATCHED:
        if kind.name != KIND:
            settings.watching.label_selectors[kind.resource] = LABEL_JOB


def registry(
    cache: Cache, changed: Callable[[JobKey, bool], None], gone: Callable[[JobKey], None],
    received: Callable[[str, str], None], requests: Requests,
) -> kopf.OperatorRegistry:  # fmt: skip
    """Makes handlers that only put what they receive into the cache. `changed` gets a job, and whether it or a child of
    it changed; `gone` a job; `received` kind and uid of each object; `requests` is told of kopf's."""
    made = kopf.OperatorRegistry()

    async def note(event: Any, resource: Any, **_: Any) -> None:
        thing = {**event["object"], "kind": event["object"].get("kind") or resource.kind}
        received(thing["kind"], thing["metadata"].get("uid", ""))
        if event["type"] == "DELETED":
            key = cache.remove(thing)
            if key is not None and thing["kind"] == KIND and cache.uid(key) is None:
                gone(key)
                return
        else:
            key = cache.put(thing)
        if key is not None:
            changed(key, thing["kind"] == KIND)

    refused: list[kopf.ConnectionInfo] = []

    async def login(**known: Any) -> kopf.AiohttpSession | None:
        found = kopf.login_with_service_account(**known) or kopf.login_with_kubeconfig(**known)
        if found is None:
            return None
        if found in refused:  # kopf comes at once with each answer that the credentials are not taken
            await asyncio.sleep(RETRY_S)
        refused[:] = [found]
        return requests.session(found)

    kopf.on.login(registry=made, id="login")(login)
    for kind in WATCHED:
        labels = None if kind.name == KIND else {LABEL_JOB: kopf.PRESENT}
        kopf.on.event(*kind.resource, registry=made, id=kind.name.lower(), labels=labels)(note)
    return made


async def prime(
    client: Client, cache: Cache, add: Callable[[JobKey], None], namespaces: Sequence[str]
) -> None:
    """Lists everything into the cache: what a watch has not reported yet would else seem to be gone."""
    for kind, paths in list_paths(namespaces).items():
        for path in paths:
            while True:
                try:
                    async for thing in _listed(client, path, kind):
                        if (key := cache.put(thing)) is not None and kind == KIND:
                            add(key)
                    break
                except ApiError as exc:
                    log.warning("cannot list %s, try again in %.0f s: %s", path, RETRY_S, exc)
                    await asyncio.sleep(RETRY_S)


async def sweep(
    client: Client,
    cache: Cache,
    add: Callable[[JobKey], None],
    namespaces: Sequence[str],
    kinds: Container[str] = KINDS,
) -> None:
    """Lists everything of these kinds again, for what the watches missed. Drops what has gone: a watch that reconnects
    reports what is there, and not what is not. Takes in what is there and not known at all.

    Raises ApiError; kinds that were not listed by then are left as they are.
    """
    listed = {kind: paths for kind, paths in list_paths(namespaces).items() if kind in kinds}
    for kind, paths in listed.items():
        before = cache.all_of(kind)
        there = set()
        for path in paths:
            async for thing in _listed(client, path, kind):
                there.add(thing["metadata"].get("uid"))
                if not cache.has_name(thing) and (key := cache.put(thing)) is not None:
                    log.warning(
                        "missed the creation of %s %s: the list has it", kind, thing["metadata"]["name"]
                    )
                    add(key)
        for thing in before:
            if thing["metadata"].get("uid") not in there and cache.has(thing):
                log.warning(
                    "missed the deletion of %s %s: the list no longer has it", kind, thing["metadata"]["name"]
                )
                if (key := cache.remove(thing)) is not None:
                    add(key)


async def keep_sweeping(
    client: Client, cache: Cache, add: Callable[[JobKey], None], namespaces: Sequence[str], requests: Requests
) -> None:
    """Sweeps now and then, and what a list of kopf's did not have right after it, until it is cancelled."""
    loop = asyncio.get_running_loop()
    due, kinds = loop.time() + SWEEP_S, frozenset[str]()
    while True:
        try:
            async with asyncio.timeout(RETRY_S if kinds else due - loop.time()):
                kinds |= await requests.relisted()
        except TimeoutError:
            if loop.time() >= due:
                due, kinds = loop.time() + SWEEP_S, frozenset(KINDS)
        if not kinds:
            continue
        try:
            await sweep(client, cache, add, namespaces, kinds)
            kinds = frozenset()
        except ApiError as exc:
            log.warning("cannot list for what the watches missed, try again in %.0f s: %s", RETRY_S, exc)


async def _listed(client: Client, path: str, kind: str) -> AsyncIterator[Manifest]:
    query = {"limit": str(CHUNK)} | ({} if kind == KIND else {"labelSelector": LABEL_JOB})
    async for thing in client.list(path, **query):
        yield {**thing, "kind": kind}


class EventLookup:
    """Causes that only events have. Reconciles call `request`, which waits for nothing, and `found`; `run` lists, one
    request at a time, and puts a job of which it found another cause onto the queue, until it is cancelled."""

    def __init__(
        self, api: Client, changed: Callable[[JobKey], None], clock: Callable[[], float] = time.monotonic
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
