"""Lists of all that is there: before anything is decided, and again now and then for what the watches missed."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Protocol

from dataloaderjob.api import KIND
from dataloaderjob_operator.client import ApiError
from dataloaderjob_operator.names import LABEL_JOB
from dataloaderjob_operator.objects import Manifest
from dataloaderjob_operator.observe import watch
from dataloaderjob_operator.observe.cache import Cache, JobKey

log = logging.getLogger(__name__)

RETRY_S = 5.0
EVERY_S = 600.0


class Lister(Protocol):
    """What lists are asked of."""

    def list(self, path: str, **query: str) -> AsyncIterator[Manifest]:
        """All objects of a kind, in pages. Raises ApiError."""


async def prime(
    lister: Lister, cache: Cache, add: Callable[[JobKey], None], namespaces: Sequence[str]
) -> None:
    """Into the cache, until all of it is there: else what a watch has not told yet would look gone."""
    for kind, paths in watch.list_paths(namespaces).items():
        for path in paths:
            while True:
                try:
                    async for thing in _listed(lister, path, kind):
                        if (key := cache.put(thing)) is not None and kind == KIND:
                            add(key)
                    break
                except ApiError as exc:
                    log.warning("%s cannot be listed, again in %.0f s: %s", path, RETRY_S, exc)
                    await asyncio.sleep(RETRY_S)


async def sweep(
    lister: Lister, cache: Cache, add: Callable[[JobKey], None], namespaces: Sequence[str]
) -> None:
    """Forgets what has gone while no watch told: one that reconnects tells what is there, and not what is not. Takes in
    what is there and not known at all.

    Raises ApiError; kinds that were not listed by then are left as they are.
    """
    for kind, paths in watch.list_paths(namespaces).items():
        before = cache.all_of(kind)
        there = set()
        for path in paths:
            async for thing in _listed(lister, path, kind):
                there.add(thing["metadata"].get("uid"))
                if not cache.has_name(thing) and (key := cache.put(thing)) is not None:
                    log.warning("%s %s is there, and no watch has told", kind, thing["metadata"]["name"])
                    add(key)
        for thing in before:
            if thing["metadata"].get("uid") not in there and cache.has(thing):
                log.warning("%s %s has gone, and no watch has told", kind, thing["metadata"]["name"])
                if (key := cache.remove(thing)) is not None:
                    add(key)


async def keep_sweeping(
    lister: Lister, cache: Cache, add: Callable[[JobKey], None], namespaces: Sequence[str]
) -> None:
    """Until cancelled."""
    while True:
        await asyncio.sleep(EVERY_S)
        try:
            await sweep(lister, cache, add, namespaces)
        except ApiError as exc:
            log.warning("what has gone untold is looked for again in %.0f s: %s", EVERY_S, exc)


async def _listed(lister: Lister, path: str, kind: str) -> AsyncIterator[Manifest]:
    query = {"limit": str(watch.CHUNK)} | ({} if kind == KIND else {"labelSelector": LABEL_JOB})
    async for thing in lister.list(path, **query):
        yield {**thing, "kind": kind}
