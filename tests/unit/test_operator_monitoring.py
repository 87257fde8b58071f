"""Health, metrics and logs of the operator's process."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging

import aiohttp
import pytest
from flood import flooded
from ports import reserve_port

from dataloaderjob_operator import connections
from dataloaderjob_operator.client import ApiError
from dataloaderjob_operator.monitoring import (
    WITHOUT_WATCHES_S,
    ErrorKind,
    LogFormat,
    Metrics,
    ProcessHealth,
    about_job,
    add_log_fields,
    error_kind,
    log_formatter,
    mark_record,
    serve,
)
from dataloaderjob_operator.workqueue import Workers


def health(watches: int, *, listed: bool = True) -> ProcessHealth:
    return ProcessHealth(watches=lambda: watches, expected=6, listed=listed)


def test_operator_is_ready_once_the_first_list_is_done():
    assert "initial list" in health(0, listed=False).not_ready()
    assert health(0).not_ready() == ""


def test_watch_may_be_closed_for_a_limited_time():
    lame = health(5)
    assert lame.not_alive(0) == ""
    assert lame.not_alive(WITHOUT_WATCHES_S) == ""
    assert lame.not_alive(WITHOUT_WATCHES_S + 1) == "only 5 of 6 watches have been open for 301 s"
    assert health(6).not_alive(1e6) == ""


def test_reopened_watch_resets_the_clock():
    count = [5]
    lame = ProcessHealth(watches=lambda: count[0], expected=6, listed=True)
    lame.not_alive(0)
    count[0] = 6
    assert lame.not_alive(200) == ""
    count[0] = 5
    assert lame.not_alive(WITHOUT_WATCHES_S + 100) == ""


def test_watches_not_open_before_the_first_list_are_no_fault():
    waiting = health(0, listed=False)
    assert waiting.not_alive(0) == ""
    assert waiting.not_alive(1e6) == ""


def test_ended_task_is_reported_by_name():
    async def run() -> str:
        ended = health(6)
        ended.tasks.append(asyncio.create_task(asyncio.sleep(0), name="event lookups"))
        assert ended.not_alive(0) == ""
        await ended.tasks[0]
        return ended.not_alive(0)

    assert asyncio.run(run()) == "the task event lookups has ended"


async def answer(served: ProcessHealth, path: str) -> tuple[int, str]:
    """What the process answers there over HTTP."""
    port = reserve_port()
    async with (
        serve(port, Metrics(), served),
        aiohttp.ClientSession() as session,
        session.get(f"http://127.0.0.1:{port}{path}") as found,
    ):
        return found.status, await found.text()


def test_healthz_names_jobs_with_unwritable_status_without_failing():
    remark = "cannot write the status of team/mnist for 31 s"

    async def run() -> None:
        served = ProcessHealth(watches=lambda: 6, expected=6, listed=True, remark=lambda: remark)
        assert await answer(served, "/healthz") == (200, f"ok\n{remark}\n")
        assert await answer(served, "/readyz") == (200, "ok\n")
        served.tasks.append(asyncio.create_task(asyncio.sleep(0), name="sweeps"))
        await served.tasks[0]
        assert await answer(served, "/healthz") == (503, f"the task sweeps has ended\n{remark}\n")
        served.remark = str
        assert await answer(served, "/healthz") == (503, "the task sweeps has ended\n")

    asyncio.run(run())


def test_requests_that_never_end_and_surplus_connections_are_closed(monkeypatch):
    monkeypatch.setattr(connections, "TIMEOUT_S", 0.5)
    monkeypatch.setattr(connections, "MAX_CONNECTIONS", 8)
    port = reserve_port()

    async def ended(reader: asyncio.StreamReader) -> bool:
        with contextlib.suppress(ConnectionError):
            async with asyncio.timeout(5):
                return await reader.read() == b""
        return True

    async def run() -> None:
        async with serve(port, Metrics(), health(6)), asyncio.timeout(20):
            slow = [await asyncio.open_connection("127.0.0.1", port) for _ in range(4)]
            for _, writer in slow:
                writer.write(b"GET /healthz HTTP/1.1\r\nHost: x\r\nX-")
            assert all([await ended(reader) for reader, _ in slow])
            many = [await asyncio.open_connection("127.0.0.2", port) for _ in range(30)]
            async with (
                aiohttp.ClientSession() as session,
                session.get(f"http://127.0.0.1:{port}/healthz") as found,
            ):
                assert found.status == 200
            assert all([await ended(reader) for reader, _ in many])
            for _, writer in (*slow, *many):
                writer.close()

    asyncio.run(run())


def test_request_with_a_large_header_is_refused():
    port = reserve_port()

    async def run() -> None:
        async with serve(port, Metrics(), health(6)), aiohttp.ClientSession() as session:
            for headers, path in (({"X": "x" * 5000}, "/healthz"), ({}, "/" + "x" * 5000)):
                async with session.get(f"http://127.0.0.1:{port}{path}", headers=headers) as found:
                    assert found.status == 400

    asyncio.run(run())


@pytest.mark.nightly
def test_probes_are_answered_through_a_flood_of_connections():
    port = reserve_port()

    async def run() -> None:
        async with serve(port, Metrics(), health(6)):
            with flooded("127.0.0.1", port):
                for _ in range(20):
                    assert await answer_at(port, "/healthz") == 200

    asyncio.run(run())


async def answer_at(port: int, path: str) -> int:
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=5)) as session:
        for _ in range(3):  # as a kubelet tries again
            with contextlib.suppress(aiohttp.ClientError):
                async with session.get(f"http://127.0.0.1:{port}{path}") as found:
                    return found.status
    return 0


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (None, ErrorKind.BUG), (0, ErrorKind.UNREACHABLE), (409, ErrorKind.CONFLICT), (422, ErrorKind.REFUSED),
        (403, ErrorKind.REFUSED), (404, ErrorKind.GONE), (429, ErrorKind.THROTTLED), (500, ErrorKind.SERVER),
        (503, ErrorKind.SERVER), (418, ErrorKind.OTHER),
    ],
)  # fmt: skip
def test_an_error_is_counted_by_its_kind(code, kind):
    assert error_kind(code) is kind


def sample(metrics: Metrics, name: str, **labels: str) -> float | None:
    return metrics.registry.get_sample_value(f"dataloaderjob_operator_{name}", labels)


def test_workers_count_reconciles_and_the_kinds_of_errors():
    metrics, observed = Metrics(), list[str]()

    async def reconcile(key: tuple[str, str]) -> float | None:
        observed.append(key[1])
        if key[1] == "refused":
            raise ApiError(422, "no")
        if key[1] == "bug":
            raise ZeroDivisionError
        return None

    async def run() -> None:
        work = Workers(reconcile, workers=2, metrics=metrics)
        for name in ("fine", "refused", "bug"):
            work.add(("team", name))
        assert sample(metrics, "queue_depth") == 3
        task = asyncio.create_task(work.run())
        async with asyncio.timeout(10):
            while len(observed) < 3 or sample(metrics, "reconcile_duration_seconds_count") != 3:
                await asyncio.sleep(0)
        assert sample(metrics, "queue_depth") == 0, "a later reconcile is not due"
        task.cancel()

    asyncio.run(run())
    assert sample(metrics, "reconciles_total") == 3
    assert sample(metrics, "queue_latency_seconds_count") == 3
    assert sample(metrics, "reconcile_errors_total", kind="refused") == 1
    assert sample(metrics, "reconcile_errors_total", kind="bug") == 1


def test_jobs_are_counted_by_phase_including_empty_phases():
    metrics = Metrics()
    loader = {"limit": "feeders", "inputBoundPercent": "38", "recommendedReplicas": 12}
    loaders = [(("team", "mnist"), loader), (("team", "new"), {}), (("team", "odd"), {"limit": 7, "x": None})]
    metrics.describe(version="1", kopf="2", phases=lambda: {"Running": 3}, loaders=lambda: loaders)
    assert sample(metrics, "jobs", phase="Running") == 3
    assert sample(metrics, "jobs", phase="Failed") == 0


def lines(kind: LogFormat, caplog: pytest.LogCaptureFixture) -> list[str]:
    """What would be written of the records so far."""
    for record in caplog.records:
        mark_record(record)
    return [log_formatter(kind).format(record) for record in caplog.records]


def test_log_line_about_a_job_has_name_namespace_uid_and_generation(caplog):
    log = logging.getLogger("dataloaderjob_operator.test")
    caplog.set_level(logging.INFO)
    caplog.handler.addFilter(mark_record)
    with about_job("team", "mnist"):
        add_log_fields(uid="u", generation=3)
        log.info("wrote %s", "it", extra={"pods": 2})
    log.info("of no job")
    first, second = (json.loads(line) for line in lines(LogFormat.JSON, caplog))
    time = first.pop("time")
    assert first == {
        "level": "INFO", "logger": "dataloaderjob_operator.test", "message": "wrote it", "job": "mnist",
        "namespace": "team", "uid": "u", "generation": 3, "pods": 2,
    }  # fmt: skip
    assert time.endswith("+00:00"), "UTC"
    assert "job" not in second
    assert "wrote it [team/mnist]" in lines(LogFormat.TEXT, caplog)[0]


def test_kopf_log_records_keep_only_the_objects_reference(caplog):
    ref = {"kind": "DataLoaderJob", "namespace": "team", "name": "mnist", "uid": "u"}
    extra = {"k8s_ref": ref, "settings": object(), "k8s_skip": True}
    logging.getLogger("kopf.test").warning("a handler failed", extra=extra)
    pod = {**ref, "kind": "Pod", "name": "p"}
    logging.getLogger("kopf.test").warning("another", extra={**extra, "k8s_ref": pod})
    first, second = (json.loads(line) for line in lines(LogFormat.JSON, caplog))
    assert (first["job"], first["namespace"], first["uid"]) == ("mnist", "team", "u")
    assert second["object"] == "Pod team/p"
    assert not {"settings", "k8s_ref", "k8s_skip"} & {*first, *second}


def test_concurrent_tasks_do_not_mix_up_their_jobs(caplog):
    log = logging.getLogger("dataloaderjob_operator.test")
    caplog.set_level(logging.INFO)
    caplog.handler.addFilter(mark_record)

    async def one(name: str) -> None:
        with about_job("team", name):
            await asyncio.sleep(0)
            log.info(name)

    async def both() -> None:
        await asyncio.gather(one("a"), one("b"))

    asyncio.run(both())
    assert all(record.job == record.message for record in caplog.records)
