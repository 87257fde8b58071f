"""The injector's port, which anyone in the cluster may reach: limits on connections, on time and on memory."""

from __future__ import annotations

import asyncio
import contextlib
import json
import ssl
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from ports import reserve_port

from dataloaderjob.api.injection import LABEL
from dataloaderjob_operator import connections
from dataloaderjob_operator.injector import server as server_module
from dataloaderjob_operator.injector.admission import API_VERSION, Setup
from dataloaderjob_operator.injector.certificates import Renewal, renewed
from dataloaderjob_operator.injector.server import Injector, serving, webhook

STRANGER = "127.0.0.2"
INSECURE = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
INSECURE.check_hostname, INSECURE.verify_mode = False, ssl.CERT_NONE


class Api:
    """An API server without jobs. `read`: the namespaces and names that were requested."""

    def __init__(self, wait_s: float = 0.0) -> None:
        self.read_keys: list[tuple[str, ...]] = []
        self._wait_s = wait_s

    async def read(self, namespace: str, key: tuple[str, str]) -> None:
        self.read_keys.append((namespace, *key))
        await asyncio.sleep(self._wait_s)


def review(job: str = "mnist", namespace: str = "team", **pod: Any) -> dict[str, Any]:
    metadata = {"name": "a", "labels": {LABEL: job}}
    request = {"uid": "1", "namespace": namespace, "object": {"kind": "Pod", "metadata": metadata, **pod}}
    return {"apiVersion": API_VERSION, "kind": "AdmissionReview", "request": request}


@pytest.fixture
def context(tmp_path: Path) -> ssl.SSLContext:
    made = renewed(None, Renewal.AUTHORITY, ["localhost"], datetime.now(UTC))
    (tmp_path / "pair.pem").write_bytes(made.certificate + made.key)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "pair.pem")
    return context


@contextlib.asynccontextmanager
async def injector(
    context: ssl.SSLContext, api: Any
) -> AsyncIterator[tuple[aiohttp.ClientSession, str, int]]:
    """Yields a client of a running injector, its URL and its port."""
    port = reserve_port()
    async with (
        serving(webhook(Injector(api, Setup(sidecar_image="sidecar:1"))), port, context),
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=False)) as session,
        asyncio.timeout(60),
    ):
        yield session, f"https://127.0.0.1:{port}/inject", port


async def stranger(port: int, *, tls: bool) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Opens a connection from another address, and sends a part of a request or of a TLS handshake."""
    reader, writer = await asyncio.open_connection(
        "127.0.0.1", port, local_addr=(STRANGER, 0), ssl=INSECURE if tls else None
    )
    writer.write(
        b"POST /inject HTTP/1.1\r\nHost: x\r\nContent-Length: 100000\r\n\r\n{" if tls else b"\x16\x03"
    )
    return reader, writer


async def has_ended(reader: asyncio.StreamReader) -> bool:
    with contextlib.suppress(ConnectionError):
        async with asyncio.timeout(10):
            return await reader.read() == b""
    return True


def verdict(found: dict[str, Any]) -> str:
    return str(found["response"]["status"]["message"])


@pytest.mark.parametrize("tls", [True, False], ids=["half-a-request", "half-a-handshake"])
def test_peer_that_sends_a_part_is_disconnected_in_time(
    tls: bool, context: ssl.SSLContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "TIMEOUT_S", 0.5)
    monkeypatch.setattr(server_module, "TIMEOUT_S", 0.3)
    monkeypatch.setattr(server_module, "DEADLINE_S", 0.2)

    async def run() -> None:
        async with injector(context, Api()) as (_, _, port):
            opened = [await stranger(port, tls=tls) for _ in range(5)]
            assert all([await has_ended(reader) for reader, _ in opened])

    asyncio.run(run())


@pytest.mark.parametrize("tls", [True, False], ids=["half-a-request", "half-a-handshake"])
def test_stranger_with_all_connections_displaces_only_its_own(
    tls: bool, context: ssl.SSLContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_module, "MAX_CONNECTIONS", 8)

    async def run() -> None:
        async with injector(context, Api()) as (session, url, port):
            async with session.post(url, json=review()) as found:
                assert "does not exist" in verdict(await found.json())
            opened = [await stranger(port, tls=tls) for _ in range(30)]
            async with session.post(url, json=review()) as found:
                assert "does not exist" in verdict(await found.json())
            assert len(session.connector._conns) == 1, "the API server's connection was kept"
            for _, writer in opened:
                writer.transport.abort()

    asyncio.run(run())


def test_connection_is_reused_after_the_deadline_of_its_first_request(
    context: ssl.SSLContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "TIMEOUT_S", 0.5)

    async def run() -> None:
        async with injector(context, Api()) as (session, url, _):
            for _ in range(2):
                async with session.post(url, json=review()) as found:
                    assert found.status == 200
                await asyncio.sleep(1.5)
                assert len(session.connector._conns) == 1
                assert all(
                    not handler.transport.is_closing()
                    for pool in session.connector._conns.values()
                    for handler, _ in pool
                )

    asyncio.run(run())


def test_large_reviews_beyond_the_memory_limit_are_refused(
    context: ssl.SSLContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_module, "MAX_BUFFERED", 300_000)
    monkeypatch.setattr(server_module, "MAX_NBYTES", 250_000)
    large = json.dumps(review(padding="x" * 200_000))

    async def run() -> list[int]:
        async with injector(context, Api(wait_s=1.0)) as (session, url, _):

            async def post(body: str) -> int:
                async with session.post(url, data=body) as found:
                    return found.status

            first = asyncio.create_task(post(large))
            await asyncio.sleep(0.3)
            others = [await post(large), await post(json.dumps(review()))]
            later = [await first, await post(large)]
            return [*others, *later, await post(json.dumps(review(padding="x" * 250_000)))]

    assert asyncio.run(run()) == [503, 200, 200, 200, 413]


def test_peer_that_leaves_during_a_review_frees_its_memory_quietly(
    context: ssl.SSLContext, caplog: pytest.LogCaptureFixture
) -> None:
    made = Injector(Api(wait_s=30.0), Setup(sidecar_image="sidecar:1"))
    whole = json.dumps(review()).encode()

    async def run() -> None:
        port = reserve_port()
        async with serving(webhook(made), port, context), asyncio.timeout(30):
            opened = [await stranger(port, tls=True) for _ in range(5)]
            for _ in range(3):  # a whole request, whose job takes long to read
                head = f"POST /inject HTTP/1.1\r\nHost: x\r\nContent-Length: {len(whole)}\r\n\r\n".encode()
                fresh = await asyncio.open_connection("127.0.0.1", port, ssl=INSECURE)
                fresh[1].write(head + whole)
                opened.append(fresh)
            await asyncio.sleep(1.0)
            assert made._buffered > 3 * len(whole)
            for _, writer in opened:
                writer.transport.abort()
            await asyncio.sleep(1.0)
            assert made._buffered == 0

    asyncio.run(run())
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


@pytest.mark.parametrize("metadata", [7, [1], {"labels": 7}, {"labels": [LABEL]}])
def test_review_of_a_malformed_pod_is_refused(metadata: Any, context: ssl.SSLContext) -> None:
    body = review()
    body["request"]["object"]["metadata"] = metadata

    async def run() -> int:
        async with injector(context, Api()) as (session, url, _), session.post(url, json=body) as found:
            return found.status

    assert asyncio.run(run()) == 400


@pytest.mark.parametrize(
    ("job", "namespace"),
    [
        ("../secrets", "team"),
        ("mnist", "../../api/v1/namespaces/ops"),
        ("..", "team"),
        ("a/b", "team"),
        ("mnist", "Team"),
    ],
)
def test_review_cannot_name_a_path_in_place_of_a_job(
    job: str, namespace: str, context: ssl.SSLContext
) -> None:
    api = Api()

    async def run() -> int:
        async with (
            injector(context, api) as (session, url, _),
            session.post(url, json=review(job, namespace)) as found,
        ):
            return found.status

    assert asyncio.run(run()) == 400
    assert api.read_keys == []
