"""Watches and lists: what they report goes into the cache, and its job onto the queue.

kopf keeps the watches open. Only its `on.event` is used: it writes no handler state, finalizer or annotation. Lists
come before anything is decided, and again now and then for what the watches missed.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from typing import Any, Protocol

import kopf

from dataloaderjob.api import KIND
from dataloaderjob_operator.client import ApiError
from dataloaderjob_operator.kinds import WATCHED
from dataloaderjob_operator.names import LABEL_JOB
from dataloaderjob_operator.objects import Manifest
from dataloaderjob_operator.observe.cache import Cache, JobKey

log = logging.getLogger(__name__)

CHUNK = 100
"""Objects in a page of a list: with 500, pages of pods in the hands of kopf were 40 MB."""
IDLE_S = 0.5
"""kopf keeps a task for each object that something happened to, for so long after it."""
RETRY_S = 5.0
"""Pause after a list that failed before the first decision."""
SWEEP_S = 600.0
"""Interval between two lists for what the watches missed."""
TASK = "watcher for "
"""Beginning of the names of those tasks of kopf's that keep one watch open each."""


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


def expected(namespaces: Sequence[str]) -> int:
    """The number of watches that there shall be."""
    return len(WATCHED) * max(1, len(set(namespaces)))


def alive() -> int:
    """The number of watches that kopf keeps open now, in the loop that runs."""
    return sum(task.get_name().startswith(TASK) for task in asyncio.all_tasks() if not task.done())


def configure(settings: kopf.OperatorSettings) -> None:
    """Sets kopf up: a dead connection is noticed, the server filters, nothing is posted."""
    settings.posting.enabled = False
    settings.scanning.disabled = True
    settings.watching.server_timeout = 300
    settings.watching.client_timeout = 330
    settings.watching.chunk_size = CHUNK
    settings.queueing.idle_timeout = IDLE_S
    settings.persistence.diffbase_storage = _NoDiffs()
    for kind in WATCHED:
        if kind.name != KIND:
            settings.watching.label_selectors[kind.resource] = LABEL_JOB


def registry(
    cache: Cache, changed: Callable[[JobKey, bool], None], gone: Callable[[JobKey], None],
    received: Callable[[str], None],
) -> kopf.OperatorRegistry:  # fmt: skip
    """Makes handlers that only put what they receive into the cache. `changed` gets a job, and whether it or a child of
    it changed; `gone` a job; `received` the kind of each object."""
    made = kopf.OperatorRegistry()

    async def note(event: Any, resource: Any, **_: Any) -> None:
        thing = {**event["object"], "kind": event["object"].get("kind") or resource.kind}
        received(thing["kind"])
        if event["type"] == "DELETED":
            key = cache.remove(thing)
            if key is not None and thing["kind"] == KIND and cache.uid(key) is None:
                gone(key)
                return
        else:
            key = cache.put(thing)
        if key is not None:
            changed(key, thing["kind"] == KIND)

    async def login(**known: Any) -> kopf.ConnectionInfo | None:
        return kopf.login_with_service_account(**known) or kopf.login_with_kubeconfig(**known)

    kopf.on.login(registry=made, id="login")(login)
    for kind in WATCHED:
        labels = None if kind.name == KIND else {LABEL_JOB: kopf.PRESENT}
        kopf.on.event(*kind.resource, registry=made, id=kind.name.lower(), labels=labels)(note)
    return made


class Lister(Protocol):
    """A lister of objects."""

    def list(self, path: str, **query: str) -> AsyncIterator[Manifest]:
        """Lists all objects of a kind, in pages. Raises ApiError."""


async def prime(
    lister: Lister, cache: Cache, add: Callable[[JobKey], None], namespaces: Sequence[str]
) -> None:
    """Lists everything into the cache: what a watch has not reported yet would else seem to be gone."""
    for kind, paths in list_paths(namespaces).items():
        for path in paths:
            while True:
                try:
                    async for thing in _listed(lister, path, kind):
                        if (key := cache.put(thing)) is not None and kind == KIND:
                            add(key)
                    break
                except ApiError as exc:
                    log.warning("cannot list %s, try again in %.0f s: %s", path, RETRY_S, exc)
                    await asyncio.sleep(RETRY_S)


async def sweep(
    lister: Lister, cache: Cache, add: Callable[[JobKey], None], namespaces: Sequence[str]
) -> None:
    """Lists everything again, for what the watches missed. Drops what has gone: a watch that reconnects reports what is
    there, and not what is not. Takes in what is there and not known at all.

    Raises ApiError; kinds that were not listed by then are left as they are.
    """
    for kind, paths in list_paths(namespaces).items():
        before = cache.all_of(kind)
        there = set()
        for path in paths:
            async for thing in _listed(lister, path, kind):
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
    lister: Lister, cache: Cache, add: Callable[[JobKey], None], namespaces: Sequence[str]
) -> None:
    """Sweeps now and then, until it is cancelled."""
    while True:
        await asyncio.sleep(SWEEP_S)
        try:
            await sweep(lister, cache, add, namespaces)
        except ApiError as exc:
            log.warning("cannot list for what the watches missed, try again in %.0f s: %s", SWEEP_S, exc)


async def _listed(lister: Lister, path: str, kind: str) -> AsyncIterator[Manifest]:
    query = {"limit": str(CHUNK)} | ({} if kind == KIND else {"labelSelector": LABEL_JOB})
    async for thing in lister.list(path, **query):
        yield {**thing, "kind": kind}
