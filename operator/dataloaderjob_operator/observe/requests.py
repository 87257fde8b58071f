"""The record of the requests that kopf sends for its watches, kept by hooks in kopf's HTTP session. It shows which
watches are open and which lists were repeated. kopf itself reports neither, because its tasks survive every lost
connection.

A repeated list reports the objects that exist, but not those that are gone. If a known object is not reported before
the watch opens, the operator requests a list of its own.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Container, Mapping, Sequence
from types import SimpleNamespace

import aiohttp
import kopf

from dataloaderjob_operator.kinds import KINDS, Manifest
from dataloaderjob_operator.observe.cache import Cache

WATCH_S = 300
"""Seconds after which the API server ends each watch and kopf reopens it. The last request of an open watch is
therefore never older than this."""
LAST_WORD_S = WATCH_S + 60.0
"""Seconds for which a watch counts as open after its last request was answered."""
SETTLE_S = 3.0
"""Seconds from the end of a list until kopf's tasks have passed on all listed objects."""


class Requests:
    """Requests for lists and watches, by path."""

    def __init__(
        self, cache: Cache, paths: Mapping[str, Sequence[str]], clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`paths`: for each kind, the paths at which its objects are listed."""
        self.cache, self._clock = cache, clock
        self._kinds = {path: kind for kind, found in paths.items() for path in found}
        self._opened: dict[str, float] = {}
        """Watches whose last request was answered, each with the time of the answer."""
        self._unreported: dict[str, set[str]] = {}
        """Uids of objects that were known when a list began and have not been reported since, by path."""
        self._listed: set[str] = set()
        """Paths with a complete list."""
        self._changed = asyncio.Event()

    @property
    def expected(self) -> int:
        """The number of watches that should be open."""
        return len(self._kinds)

    def open(self) -> int:
        """Returns the number of watches that are open, judging by their last request."""
        now = self._clock()
        return sum(now - moment <= LAST_WORD_S for moment in self._opened.values())

    def began(self, path: str, query: Container[str]) -> None:
        """Records that kopf is sending a request."""
        if (ours := self._known(path)) is None:
            return
        if "watch" in query:
            if ours in self._unreported:
                self._listed.add(ours)
                self._changed.set()
        elif "continue" not in query:
            known = self.cache.all_of(self._kinds[ours])
            self._unreported[ours] = {thing["metadata"].get("uid", "") for thing in known}
            self._listed.discard(ours)

    def answered(self, path: str, query: Container[str], status: int) -> None:
        """Records that the API server has begun to answer a request."""
        if (ours := self._known(path)) is None:
            return
        if status >= 400:
            self._opened.pop(ours, None)
        elif "watch" in query:
            self._opened[ours] = self._clock()

    def failed(self, path: str) -> None:
        """Records that a request got no answer."""
        self._opened.pop(self._known(path) or "", None)

    def _known(self, path: str) -> str | None:
        """Returns the listed path to which a request belongs, without any prefix of the server's URL; None for other
        requests."""
        return next((ours for ours in self._kinds if path.endswith(ours)), None)

    def reported(self, kind: str, uid: str) -> None:
        """Records that a watch, or the list before it, reported an object."""
        for path, uids in self._unreported.items():
            if self._kinds[path] == kind:
                uids.discard(uid)

    async def relisted(self) -> frozenset[str]:
        """Waits until a repeated list is complete. Returns the kinds of the known objects that the list did not
        report."""
        await self._changed.wait()
        await asyncio.sleep(SETTLE_S)
        self._changed.clear()
        found = set()
        for path in sorted(self._listed):
            kind, uids = self._kinds[path], self._unreported.pop(path)
            mine = (thing for thing in self.cache.all_of(kind) if self._is_at(thing, path))
            if any(thing["metadata"].get("uid") in uids for thing in mine):
                found.add(kind)
        self._listed.clear()
        return frozenset(found)

    def _is_at(self, thing: Manifest, path: str) -> bool:
        """Checks whether an object is listed at this path."""
        kind = KINDS[thing["kind"]]
        return path in (kind.path(None), kind.path(thing["metadata"].get("namespace")))

    def session(self, found: kopf.ConnectionInfo) -> kopf.AiohttpSession:
        """Creates the HTTP session for kopf's requests, with these credentials."""
        trace = aiohttp.TraceConfig()

        async def began(
            _: aiohttp.ClientSession, __: SimpleNamespace, sent: aiohttp.TraceRequestStartParams
        ) -> None:
            self.began(sent.url.path, sent.url.query)

        async def answered(
            _: aiohttp.ClientSession, __: SimpleNamespace, sent: aiohttp.TraceRequestEndParams
        ) -> None:
            self.answered(sent.url.path, sent.url.query, sent.response.status)

        async def failed(
            _: aiohttp.ClientSession, __: SimpleNamespace, sent: aiohttp.TraceRequestExceptionParams
        ) -> None:
            self.failed(sent.url.path)

        trace.on_request_start.append(began)
        trace.on_request_end.append(answered)
        trace.on_request_exception.append(failed)
        session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, ssl=found.as_ssl_context()), headers=found.as_http_headers(),
            proxy=found.proxy_url, trust_env=found.trust_env, trace_configs=[trace],
        )  # fmt: skip
        return kopf.AiohttpSession(
            server=found.server, priority=found.priority, default_namespace=found.default_namespace,
            expiration=found.expiration, aiohttp_session=session,
        )  # fmt: skip
