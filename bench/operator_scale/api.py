"""Requests from the harness to the API server, many at a time, and watches."""

from __future__ import annotations

import contextlib
import json
import ssl
import sys
from collections.abc import AsyncIterator
from typing import Any

import aiohttp

MERGE = "application/merge-patch+json"
WHOLE = "application/json"
METADATA = "application/json;as=PartialObjectMetadata;g=meta.k8s.io;v=v1"
"""Media type that requests names and labels instead of whole objects."""
WATCH_S = 3600
LONGEST_LINE_NBYTES = 4 * 1024 * 1024
CONNECTIONS = 32
GONE = 410


class _TooOldError(Exception):
    """The server no longer has the events after the last one reported."""


class Api:
    """A client for JSON over persistent connections."""

    def __init__(self, session: aiohttp.ClientSession, url: str) -> None:
        self._session, self._url = session, url

    async def request(self, method: str, path: str, body: Any = None, kind: str = WHOLE) -> dict[str, Any]:
        """Returns the object in the answer. Raises aiohttp.ClientResponseError with the server's message."""
        data = None if body is None else json.dumps(body)
        async with self._session.request(
            method, self._url + path, data=data, headers={"Content-Type": kind}
        ) as answer:
            text = await answer.text()
            if answer.status >= 400:
                raise aiohttp.ClientResponseError(
                    answer.request_info, answer.history, status=answer.status, message=text[:500]
                )
            return dict(json.loads(text))

    async def watch(self, path: str, *, accept: str = WHOLE) -> AsyncIterator[dict[str, Any]]:
        """Yields events, first those of existing objects. A watch that the server ends, as it does with slow readers,
        resumes at its last event. If that is impossible, all existing objects are reported again."""
        version = "0"
        while True:
            try:
                async for event in self._watch_once(path, version, accept):
                    version = event["object"]["metadata"]["resourceVersion"]
                    yield event
            except _TooOldError:
                version = "0"
            except aiohttp.ClientPayloadError as exc:
                print(f"the watch of {path} broke: {exc!r}", file=sys.stderr, flush=True)

    async def _watch_once(self, path: str, version: str, accept: str) -> AsyncIterator[dict[str, Any]]:
        query = f"{'&' if '?' in path else '?'}watch=1&resourceVersion={version}&timeoutSeconds={WATCH_S}"
        async with self._session.get(self._url + path + query, headers={"Accept": accept}) as answer:
            if answer.status == GONE:
                raise _TooOldError
            answer.raise_for_status()
            async for line in answer.content:
                event = json.loads(line)
                if event["type"] == "ERROR":
                    raise _TooOldError
                yield event


@contextlib.asynccontextmanager
async def connected(url: str, token: str) -> AsyncIterator[Api]:
    """Connects to this machine's API server, whose certificate is self-made and not verified."""
    trusting = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    trusting.check_hostname, trusting.verify_mode = False, ssl.CERT_NONE
    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(ssl=trusting, limit=CONNECTIONS),
        headers={"Authorization": f"Bearer {token}"},
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=30),
        read_bufsize=LONGEST_LINE_NBYTES,
    ) as session:
        yield Api(session, url)
