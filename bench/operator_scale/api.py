"""Requests of the harness to the API server: many at a time, and watches."""

from __future__ import annotations

import contextlib
import json
import ssl
from collections.abc import AsyncIterator
from typing import Any

import aiohttp

MERGE = "application/merge-patch+json"
WHOLE = "application/json"
METADATA = "application/json;as=PartialObjectMetadata;g=meta.k8s.io;v=v1"
"""Instead of whole objects, where their names do."""
WATCH_S = 3600
LONGEST_LINE_NBYTES = 4 * 1024 * 1024
CONNECTIONS = 32


class Api:
    """JSON over kept connections."""

    def __init__(self, session: aiohttp.ClientSession, url: str) -> None:
        self._session, self._url = session, url

    async def request(self, method: str, path: str, body: Any = None, kind: str = WHOLE) -> dict[str, Any]:
        """The object in the answer. Raises aiohttp.ClientResponseError with what the server said."""
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
        """Events, those of what is there already first. Raises RuntimeError when it ends: nothing may be missed."""
        query = f"{'&' if '?' in path else '?'}watch=1&resourceVersion=0&timeoutSeconds={WATCH_S}"
        async with self._session.get(self._url + path + query, headers={"Accept": accept}) as answer:
            answer.raise_for_status()
            async for line in answer.content:
                event = json.loads(line)
                if event["type"] == "ERROR":
                    raise RuntimeError(f"the watch of {path} failed: {event['object']}")
                yield event
        raise RuntimeError(f"the watch of {path} ended")


@contextlib.asynccontextmanager
async def connected(url: str, token: str) -> AsyncIterator[Api]:
    """For the API server of this machine: its certificate is one that it made for itself a moment ago."""
    trusting = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    trusting.check_hostname, trusting.verify_mode = False, ssl.CERT_NONE
    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(ssl=trusting, limit=CONNECTIONS),
        headers={"Authorization": f"Bearer {token}"},
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=30),
        read_bufsize=LONGEST_LINE_NBYTES,
    ) as session:
        yield Api(session, url)
