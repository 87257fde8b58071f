"""The input from the API server. Objects from watches, lists and lookups go into the cache, and their jobs onto the
queue.

kopf keeps the watches open. The operator uses only kopf's `on.event`, which writes no handler state, finalizer or
annotation. Everything is listed before the first decision. It is listed again from time to time, to find changes that
the watches missed. No watch reports events, so `EventLookup` lists the events of objects that hold up a job.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Container, Iterable, Mapping, Sequence
from typing import Any

import kopf

from dataloaderjob.api import KIND
from dataloaderjob_operator.client import ApiClient, ApiError
from dataloaderjob_operator.decide.health import AGAIN_S, EventQuery, meaning
from dataloaderjob_operator.decide.observed import Trouble
from dataloaderjob_operator.kinds import KINDS, WATCHED, Manifest
from dataloaderjob_operator.monitoring import about_job
from dataloaderjob_operator.names import LABEL_JOB
from dataloaderjob_operator.observe.cache import Cache, JobKey
from dataloaderjob_operator.observe.requests import WATCH_S, Requests

log = logging.getLogger(__name__)

CHUNK = 100
"""Number of objects per page of a list. With 500, pages of pods took 40 MB in kopf."""
IDLE_S = 0.5
"""Seconds for which kopf keeps an object's task after the object's last event."""
RETRY_S = 5.0
"""Pause in seconds after a failed list."""
ENDS_S = 15.0
"""Seconds from a fatal error of a watch until the process is killed, so that the kubelet restarts it. kopf does not
survive every error, and may hang after one."""
SWEEP_S = 600.0
"""Seconds between two lists that find changes that the watches missed."""


class _NoDiffs(kopf.DiffBaseStorage):
    """A storage that disables kopf's own tracking of changes. No handler of the operator uses this tracking, which took
    a fifth of the CPU time of a cold start."""

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
    """Returns the paths at which all objects of each kind are listed, in all namespaces if none is named."""
    return {kind.name: [kind.path(name) for name in namespaces] or [kind.path(None)] for kind in WATCHED}


def configure(settings: kopf.OperatorSettings) -> None:
    """Configures kopf to notice dead connections, to filter on the server and to post no events."""
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
    """Registers handlers that only put received objects into the cache. `changed` is called with a job and a flag: True
    if the job itself changed, False if a child did. `gone` is called with a job, and `received` with the kind and uid
    of each object. `requests` records kopf's requests."""
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
        if found in refused:  # if the credentials are rejected, kopf logs in again at once
            await asyncio.sleep(RETRY_S)
        refused[:] = [found]
        return requests.session(found)

    kopf.on.login(registry=made, id="login")(login)
    for kind in WATCHED:
        labels = None if kind.name == KIND else {LABEL_JOB: kopf.PRESENT}
        kopf.on.event(*kind.resource, registry=made, id=kind.name.lower(), labels=labels)(note)
    return made


async def prime(
    client: ApiClient, cache: Cache, add: Callable[[JobKey], None], namespaces: Sequence[str]
) -> None:
    """Lists everything into the cache. Without these lists, objects that no watch has reported yet would seem to be
    gone."""
    for kind, paths in list_paths(namespaces).items():
        for path in paths:
            while True:
                try:
                    async for thing in _listed(client, path, kind):
                        if (key := cache.put(thing)) is not None and kind == KIND:
                            add(key)
                    break
                except ApiError as exc:
                    log.warning("cannot list %s, retry in %.0f s: %s", path, RETRY_S, exc)
                    await asyncio.sleep(RETRY_S)


async def sweep(
    client: ApiClient,
    cache: Cache,
    add: Callable[[JobKey], None],
    namespaces: Sequence[str],
    kinds: Container[str] = KINDS,
) -> None:
    """Lists all objects of these kinds again, to find changes that the watches missed. Adds unknown objects. Drops
    objects that are gone, because a watch that reconnects reports only existing ones.

    Raises ApiError. Kinds that are not listed by then stay unchanged.
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
                        "the watch missed the creation of %s %s; a list found it",
                        kind,
                        thing["metadata"]["name"],
                    )
                    add(key)
        for thing in before:
            if thing["metadata"].get("uid") not in there and cache.has(thing):
                log.warning(
                    "the watch missed the deletion of %s %s; a list found it", kind, thing["metadata"]["name"]
                )
                if (key := cache.remove(thing)) is not None:
                    add(key)


async def keep_sweeping(
    client: ApiClient,
    cache: Cache,
    add: Callable[[JobKey], None],
    namespaces: Sequence[str],
    requests: Requests,
) -> None:
    """Sweeps every SWEEP_S until it is cancelled. Sweeps early if one of kopf's lists lacks a known object."""
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
            log.warning("relist failed, retry in %.0f s: %s", RETRY_S, exc)


async def _listed(client: ApiClient, path: str, kind: str) -> AsyncIterator[Manifest]:
    query = {"limit": str(CHUNK)} | ({} if kind == KIND else {"labelSelector": LABEL_JOB})
    async for thing in client.list(path, **query):
        yield {**thing, "kind": kind}


class EventLookup:
    """The lookup of causes that appear only in events. Reconciles call `request`, which does not wait, and `found`.
    `run` lists events, one request at a time, until it is cancelled. It queues a job when it finds a different
    cause."""

    def __init__(
        self, api: ApiClient, changed: Callable[[JobKey], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._api, self._changed, self._clock = api, changed, clock
        self._requested: dict[JobKey, tuple[EventQuery, ...]] = {}
        """Jobs whose events must be listed, in the order of their requests."""
        self._found: dict[JobKey, dict[str, Trouble]] = {}
        self._not_before: dict[JobKey, float] = {}
        self._more = asyncio.Event()

    def found(self, key: JobKey) -> Mapping[str, Trouble]:
        """Returns the problems that events reported about a job's objects, keyed by uid."""
        return self._found.get(key, {})

    def request(self, key: JobKey, queries: tuple[EventQuery, ...]) -> None:
        """Requests a list of these objects' events. If `queries` is empty, the job is no longer held up, and its
        problems are dropped."""
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
        """Drops all state of a job that is gone or no longer held up."""
        for known in (self._requested, self._found, self._not_before):
            known.pop(key, None)

    async def run(self) -> None:
        while True:
            self._more.clear()
            while await self.turn():
                pass
            await self._more.wait()

    async def turn(self) -> bool:
        """Lists the events for the job that has waited longest. Returns False if no job waits."""
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
                log.warning("cannot list the events that may explain a problem: %s", exc)
                return True
        if key in self._not_before and found != self._found.get(key, {}):
            self._found[key] = found
            self._changed(key)
        return True
