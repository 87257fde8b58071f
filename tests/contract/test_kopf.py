"""What the operator relies on of kopf, which holds its watches: a real kopf, set up as the operator does it, and an API
server reduced to discovery, lists and watches. Whoever raises the bound on kopf's version reads here what must hold.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import kopf
import pytest
from aiohttp import web
from processes_of_operator import kubeconfig

from apiserver import ApiServer
from dataloaderjob.api import KIND
from dataloaderjob_operator.kinds import KINDS, WATCHED, Manifest
from dataloaderjob_operator.names import LABEL_JOB
from dataloaderjob_operator.observe import requests, watch
from dataloaderjob_operator.observe.cache import Cache, JobKey
from dataloaderjob_operator.observe.requests import WATCH_S, Requests
from dataloaderjob_operator.workqueue import NEVER, Workers

PODS = KINDS["Pod"].path(None)
WITHIN_S = 10.0
END_S = 4.0
"""kopf itself waits 5 s for tasks that it takes for its own."""
OTHERS = (
    ("", "v1", "namespaces", "Namespace"), ("", "v1", "events", "Event"), ("", "v1", "secrets", "Secret"),
    ("apiextensions.k8s.io", "v1", "customresourcedefinitions", "CustomResourceDefinition"),
    ("kopf.dev", "v1", "clusterkopfpeerings", "ClusterKopfPeering"),
)  # fmt: skip
"""Resources that are there, and that kopf leaves alone."""


def discovery() -> dict[str, Any]:
    """What the API server says of itself, by path."""
    found: dict[str, Any] = {"/api": {"versions": ["v1"]}, "/apis": {"groups": []}}
    for group, version, plural, kind in (*((*kind.resource, kind.name) for kind in WATCHED), *OTHERS):
        path = f"/apis/{group}/{version}" if group else f"/api/{version}"
        if group and path not in found:
            served = {"groupVersion": f"{group}/{version}", "version": version}
            found["/apis"]["groups"] += [{"name": group, "versions": [served], "preferredVersion": served}]
        row = {"name": plural, "singularName": "", "namespaced": True, "kind": kind}
        row["verbs"] = ["create", "delete", "get", "list", "patch", "watch"]
        found.setdefault(path, {"resources": []})["resources"].append(row)
    return found


class Server:
    """The API server. It notes method, path, query and token of each request."""

    def __init__(self, folder: Path, namespaces: Sequence[str]) -> None:
        self.kinds = {path: kind for kind, paths in watch.list_paths(namespaces).items() for path in paths}
        self.discovery = discovery()
        self.requests: list[tuple[str, str, dict[str, str], str]] = []
        self.objects: defaultdict[str, list[Manifest]] = defaultdict(list)
        self.refusals: dict[str, int] = {}
        """Statuses that answer a watch, by path; 0: the connection is closed without an answer."""
        self.token, self.version = "first", 100
        self._folder, self._port = folder, 0
        self._lines: dict[str, asyncio.Queue[bytes | None]] = {}

    async def up(self) -> None:
        server = web.Server(self._answer, handler_cancellation=True)
        self._runner = web.ServerRunner(server, shutdown_timeout=0.05)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", self._port).start()
        self._port = self._runner.addresses[0][1]
        self.take_only(self.token)

    async def down(self) -> None:
        """Drops all connections, and refuses further ones."""
        await self._runner.cleanup()

    def take_only(self, token: str) -> None:
        """Refuses all tokens but this one, which is in the kubeconfig from now on."""
        self.token = token
        kubeconfig(ApiServer(f"http://127.0.0.1:{self._port}", token, self._folder), self._folder)

    def queries(self, path: str) -> list[dict[str, str]]:
        return [query for _, asked, query, _ in self.requests if asked == path]

    def send(self, kind: str, thing: Manifest) -> None:
        """Sends an event to whoever watches pods."""
        self._lines[PODS].put_nowait(json.dumps({"type": kind, "object": thing}).encode() + b"\n")

    def end(self) -> None:
        """Ends the watch of pods, as after `timeoutSeconds`."""
        self._lines[PODS].put_nowait(None)

    async def _answer(self, request: web.BaseRequest) -> web.StreamResponse:
        path, query = request.path, dict(request.query)
        token = request.headers.get("Authorization", "").removeprefix("Bearer ")
        self.requests.append((request.method, path, query, token))
        status = 401 if token != self.token else self.refusals.get(path, 200) if "watch" in query else 200
        if status == 0 and request.transport is not None:
            request.transport.abort()
        if status != 200 or path not in {*self.kinds, *self.discovery}:
            return web.json_response({"kind": "Status", "code": status}, status=status or 404)
        if path in self.discovery:
            return web.json_response(self.discovery[path])
        return await self._watch(request) if "watch" in query else self._page(path, query)

    async def _watch(self, request: web.BaseRequest) -> web.StreamResponse:
        lines = self._lines[request.path] = asyncio.Queue()
        response = web.StreamResponse()
        await response.prepare(request)
        while (line := await lines.get()) is not None:
            await response.write(line)
        return response

    def _page(self, path: str, query: dict[str, str]) -> web.Response:
        """A page of a list. Its objects have no kind of their own, as in Kubernetes."""
        there, first, kind = self.objects[path], int(query.get("continue", 0)), KINDS[self.kinds[path]]
        last = first + int(query.get("limit", len(there)))
        items = [{k: v for k, v in it.items() if k not in ("apiVersion", "kind")} for it in there[first:last]]
        page = {"kind": f"{kind.name}List", "apiVersion": kind.api_version, "items": items}
        about = {"resourceVersion": str(self.version), "continue": str(last) if last < len(there) else ""}
        return web.json_response({**page, "metadata": about})


class Seen(Cache):
    """Notes what the handler hands on. It fails at objects of one name."""

    def __init__(self) -> None:
        super().__init__()
        self.log: list[tuple[str, Manifest]] = []

    def put(self, thing: Manifest) -> JobKey | None:
        self.log.append(("there", thing))
        if thing["metadata"]["name"] == "fails":
            raise ValueError("an error in the handler, as the test wants it")
        return super().put(thing)

    def remove(self, thing: Manifest) -> JobKey | None:
        self.log.append(("gone", thing))
        return super().remove(thing)


@dataclass(frozen=True)
class Operated:
    """kopf at work, and what it reports to."""

    server: Server
    cache: Seen
    requests: Requests
    kopf: asyncio.Task[None]

    async def open(self, less: int = 0) -> None:
        """Waits until all watches are open, or all but so many."""
        await until(lambda: self.requests.open() == self.requests.expected - less)

    async def over(self) -> None:
        """Waits until kopf has ended. Raises what it raised."""
        async with asyncio.timeout(END_S):
            await asyncio.shield(self.kopf)


async def until(condition: Callable[[], Any]) -> None:
    async with asyncio.timeout(WITHIN_S):
        while not condition():
            await asyncio.sleep(0.01)


@contextlib.asynccontextmanager
async def operated(
    folder: Path, namespaces: Sequence[str] = (), objects: dict[str, list[Manifest]] | None = None, **changed: float
) -> AsyncIterator[Operated]:  # fmt: skip
    """Starts kopf as the operator does, and waits until all watches are open. `changed`: settings of the test's own."""
    server, cache, settings = Server(folder, namespaces), Seen(), kopf.OperatorSettings()
    server.objects.update(objects or {})
    await server.up()
    reported = Requests(cache, watch.list_paths(namespaces))
    watch.configure(settings)
    settings.networking.error_backoffs = [0.05] * 1000
    for name, value in changed.items():
        setattr(settings.watching if hasattr(settings.watching, name) else settings.process, name, value)
    running = kopf.operator(
        registry=watch.registry(cache, lambda *_: None, lambda _: None, reported.reported, reported),
        settings=settings, standalone=True, clusterwide=not namespaces, namespaces=namespaces,
    )  # fmt: skip
    made = Operated(server, cache, reported, asyncio.create_task(running))
    try:
        await made.open()
        yield made
    finally:
        for _ in range(8):
            made.kopf.cancel()
            await asyncio.wait([made.kopf], timeout=END_S / 8)
        await server.down()
    assert made.kopf.done()


Scenario = Callable[[Operated], Awaitable[None]]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Runs a scenario while kopf runs; `earlier` in the same loop, from before kopf on."""
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "kubeconfig"))

    async def runs(scenario: Scenario, earlier: Callable[[], Awaitable[None]] | None, **options: Any) -> None:
        before = None if earlier is None else asyncio.ensure_future(earlier())
        await asyncio.sleep(0)
        async with operated(tmp_path, **options) as it:
            await scenario(it)
        if before is not None:
            before.cancel()

    return lambda scenario, earlier=None, **options: asyncio.run(runs(scenario, earlier, **options))


def thing(kind: str, name: str, version: int = 1, **more: Any) -> Manifest:
    metadata = {"name": name, "namespace": "team", "uid": f"uid-{kind}-{name}"}
    metadata |= {"labels": {LABEL_JOB: "mnist"}, "resourceVersion": str(version), **more.pop("metadata", {})}
    return {"apiVersion": KINDS[kind].api_version, "kind": kind, "metadata": metadata, **more}


@pytest.mark.parametrize("namespaces", [(), ("team", "other")], ids=["all", "some"])
def test_each_kind_is_listed_in_pages_and_watched_from_that_version(run, namespaces, monkeypatch):
    monkeypatch.setattr(watch, "CHUNK", 2)
    paths = {path: kind for kind, found in watch.list_paths(namespaces).items() for path in found}
    objects = {path: [thing(kind, f"{path}-{i}") for i in range(3)] for path, kind in paths.items()}

    async def scenario(it: Operated) -> None:
        for path, kind in paths.items():
            ours = {} if kind == KIND else {"labelSelector": LABEL_JOB}
            opened = {"watch": "true", "allowWatchBookmarks": "true", "timeoutSeconds": str(WATCH_S)}
            assert it.server.queries(path) == [
                {"limit": "2", **ours},
                {"limit": "2", "continue": "2", **ours},
                {"resourceVersion": "100", **opened, **ours},
            ]
        await until(lambda: len(it.cache.log) == 3 * len(paths))

    run(scenario, namespaces=namespaces, objects=objects)


def test_listed_objects_and_events_reach_the_handler_in_order(run):
    odd = {"spec": {"text": "ünicode \U0001f600\n", "null": None, "list": [{}, [1, 2.5, True]]}, "status": {}}
    first = [thing("Pod", name, **odd) for name in "abcd"]
    sent = [("ADDED", thing("Pod", name, 2, **odd)) for name in "efgh"]
    sent += [("MODIFIED", thing("Pod", name, v, **odd)) for v in range(3, 60) for name in "abcdefgh"]
    sent += [("DELETED", thing("Pod", name, 60, **odd)) for name in "abcdefgh"]
    sent += [("ADDED", thing("Pod", "a", 61, metadata={"uid": "another"}))]
    told = [("there", pod) for pod in first]
    told += [("gone" if kind == "DELETED" else "there", pod) for kind, pod in sent]

    def by_uid(log: list[tuple[str, Manifest]]) -> dict[str, list[tuple[str, Manifest]]]:
        return {uid: [row for row in log if row[1]["metadata"]["uid"] == uid] for uid in uids}

    uids = {pod["metadata"]["uid"] for _, pod in told}

    async def scenario(it: Operated) -> None:
        for kind, pod in sent:
            it.server.send(kind, pod)
        await until(lambda: len(it.cache.log) >= len(told))
        assert by_uid(it.cache.log) == by_uid(told)

    run(scenario, objects={PODS: first})


def test_closed_watch_reopens_from_the_last_event_or_bookmark(run):
    async def scenario(it: Operated) -> None:
        for count, (kind, version) in enumerate((("ADDED", 107), ("BOOKMARK", 120)), start=3):
            it.server.send(kind, thing("Pod", "a", version))
            it.server.end()
            await until(lambda count=count: len(it.server.queries(PODS)) == count)
            assert it.server.queries(PODS)[-1]["resourceVersion"] == str(version)
            await it.open()
        assert [pod["metadata"]["resourceVersion"] for _, pod in it.cache.log] == ["107"]

    run(scenario)


def test_silent_watch_reopens_after_the_inactivity_timeout(run):
    assert kopf.OperatorSettings().watching.inactivity_timeout == 70.0

    async def scenario(it: Operated) -> None:
        await until(lambda: len(it.server.queries(PODS)) >= 4)
        assert [query.get("resourceVersion") for query in it.server.queries(PODS)[1:4]] == ["100"] * 3

    run(scenario, inactivity_timeout=0.3)


def test_watch_relists_after_410_without_reporting_deletions(run, monkeypatch):
    monkeypatch.setattr(requests, "SETTLE_S", 0.3)
    pods = [thing("Pod", name) for name in "ab"]

    async def scenario(it: Operated) -> None:
        await until(lambda: len(it.cache.log) == 2)
        it.server.objects[PODS], it.server.version = pods[:1], 200
        it.server.send("ERROR", {"kind": "Status", "code": 410, "reason": "Expired"})
        async with asyncio.timeout(WITHIN_S):
            while "Pod" not in await it.requests.relisted():
                pass
        listed, opened = it.server.queries(PODS)[-2:]
        assert ("watch" in listed, opened["resourceVersion"]) == (False, "200")
        assert it.cache.log[2:] == [("there", pods[0])], "the deletion is left to a list of ours"

    run(scenario, objects={PODS: pods})


@pytest.mark.parametrize("fault", ["410 as the status", "500 in the stream"])
def test_process_is_killed_if_a_watch_fails_for_good(run, fault, monkeypatch):
    """The tasks of its other watches may outlive it: kopf does not always return after such an error."""
    killed = list[signal.Signals]()
    monkeypatch.setattr(signal, "pthread_kill", lambda _, number: killed.append(number))

    async def scenario(it: Operated) -> None:
        if "status" in fault:
            it.server.refusals[PODS] = 410
            it.server.end()
        else:
            it.server.send("ERROR", {"kind": "Status", "code": 500})
        await until(lambda: killed == [signal.SIGKILL])

    monkeypatch.setattr(watch, "ENDS_S", 0.2)
    run(scenario)


def test_refused_credentials_are_retried_after_a_pause(run, monkeypatch):
    async def scenario(it: Operated) -> None:
        monkeypatch.setattr(it.server, "token", "another")
        tried = len(it.server.requests)
        it.server.end()
        await until(lambda: len(it.server.requests) > tried + 1)
        await asyncio.sleep(3 * watch.RETRY_S)
        assert len(it.server.requests) - tried <= 6 * it.requests.expected
        it.server.take_only("another")
        await it.open()

    monkeypatch.setattr(watch, "RETRY_S", 0.5)
    run(scenario)


@pytest.mark.parametrize("status", [0, 403, 429, 500], ids=["no answer", "403", "429", "500"])
def test_refused_watch_is_retried_and_counts_as_closed_meanwhile(run, status):
    async def scenario(it: Operated) -> None:
        it.server.refusals[PODS] = status
        it.server.end()
        await it.open(less=1)
        tried = len(it.server.queries(PODS))
        await until(lambda: len(it.server.queries(PODS)) > tried + 1)
        del it.server.refusals[PODS]
        await it.open()
        it.server.send("ADDED", thing("Pod", "a"))
        await until(lambda: it.cache.log)

    run(scenario)


def test_all_watches_count_as_closed_while_the_server_is_down(run):
    async def scenario(it: Operated) -> None:
        await it.server.down()
        await it.open(less=it.requests.expected)
        await it.server.up()
        await it.open()
        assert all("watch" in it.server.queries(path)[-1] for path in it.server.kinds)

    run(scenario)


def test_refused_token_is_reread_and_later_requests_are_still_observed(run):
    async def scenario(it: Operated) -> None:
        it.server.take_only("second")
        it.server.end()
        await until(lambda: {p for _, p, _, t in it.server.requests if t == "second"} >= {*it.server.kinds})
        await it.open()
        it.server.refusals[PODS] = 500
        it.server.end()
        await it.open(less=1)

    run(scenario)


def test_kopf_only_reads_and_requests_only_discovery_and_our_kinds(run):
    going = {"deletionTimestamp": "2026-01-01T00:00:00Z", "finalizers": ["example.com/theirs"]}

    async def scenario(it: Operated) -> None:
        it.server.send("MODIFIED", thing("Pod", "a", 2, metadata=going))
        it.server.send("MODIFIED", thing("Pod", "fails", 2))
        it.server.send("DELETED", thing("Pod", "a", 3, metadata=going))
        it.server.send("MODIFIED", thing("Pod", "fails", 3))
        await until(lambda: len(it.cache.log) == 6)
        assert {method for method, *_ in it.server.requests} == {"GET"}
        assert {path for _, path, *_ in it.server.requests} <= {*it.server.kinds, *it.server.discovery}
        await it.open()

    run(scenario, objects={PODS: [thing("Pod", "a"), thing("Pod", "fails")]})


@pytest.mark.parametrize("way", ["a signal", "cancellation"])
def test_shutdown_is_prompt_and_leaves_running_workers_alone(run, way):
    reconciled: list[JobKey] = []

    async def reconcile(key: JobKey) -> float:
        reconciled.append(key)
        return NEVER

    async def scenario(it: Operated) -> None:
        if way == "a signal":
            assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL, "kopf has set its own"
            os.kill(os.getpid(), signal.SIGTERM)
            await it.over()
        else:
            later = asyncio.create_task(asyncio.Event().wait())
            it.kopf.cancel()
            with pytest.raises(asyncio.CancelledError):
                await it.over()
            assert later.cancelled()
        workers.add(("team", "mnist"))
        await until(lambda: reconciled)

    workers = Workers(reconcile)
    run(scenario, workers.run)
