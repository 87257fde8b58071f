"""Requests to the API server, as JSON. This module interprets the responses, but makes no further decisions."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.request import getproxies_environment

import aiohttp
from kubernetes.aio import client as kubernetes
from kubernetes.aio import config

from dataloaderjob.api.job import API_VERSION, KIND
from dataloaderjob.core.texts import UNKNOWN
from dataloaderjob_operator.decide.observed import Key
from dataloaderjob_operator.kinds import KINDS, Manifest
from dataloaderjob_operator.monitoring import Metrics
from dataloaderjob_operator.names import MANAGER
from dataloaderjob_operator.write_gate import WriteGate

JSON = "application/json"
APPLY = "application/apply-patch+yaml; charset=utf-8"
"""The content type of server-side apply. The charset makes the client library send the body unchanged. Without it, the
library would escape the body to ASCII. The API server would then refuse characters beyond U+FFFF, because it accepts
their escapes only in bodies declared as JSON."""
MERGE = "application/merge-patch+json"
TIMEOUT_S = 30.0
CHUNK = 100
"""Number of objects per page of a list."""
SILENT_S = 150.0
"""Seconds without a byte after which a watch counts as broken. The API server sends a bookmark each minute."""
MAX_EVENTS = 100
"""Maximum number of events listed for one object. A starting pod has about ten."""
WARNINGS_CHUNK, MAX_WARNINGS = 500, 2000
"""Number of Warning events per page, and maximum number listed for one namespace. A Warning event takes about 1 kB."""
_SURROGATES = re.compile("[\ud800-\udfff]")
_NOT_IN_YAML = re.compile("[\x7f-\x9f\u2028\u2029\ufeff\ufffe\uffff]")
"""Characters that YAML 1.1 does not accept unescaped. `json` itself escapes characters below U+0020."""


class ApiError(Exception):
    """The API server refused a request, or did not answer (code 0)."""

    def __init__(self, code: int, message: str, retry_after_s: float = 0.0, reason: str = "") -> None:
        """`reason`: Kubernetes' name for the error, such as AlreadyExists or Conflict for 409."""
        super().__init__(f"{code}: {message}" if code else message)
        self.code, self.message, self.retry_after_s, self.reason = code, message, retry_after_s, reason


@dataclass(slots=True)
class ApiClient:
    """A client that sends requests over HTTP. Methods that read or write raise ApiError."""

    api: kubernetes.ApiClient
    writes: int = 0
    metrics: Metrics = field(default_factory=Metrics)
    gate: WriteGate = field(default_factory=WriteGate)
    """The gate for writes. It is shut while this operator must not write."""

    @classmethod
    async def connect(cls, metrics: Metrics | None = None) -> ApiClient:
        """Creates a client. It uses the service account if this process runs in a pod, and the kubeconfig otherwise."""
        configuration = kubernetes.Configuration()
        try:
            config.load_incluster_config(client_configuration=configuration)
        except config.ConfigException:
            await config.load_kube_config(client_configuration=configuration)
        # Otherwise aiohttp looks for a proxy and reads ~/.netrc on each request, in threads that compete with the loop.
        configuration.client_session_kwargs = {"trust_env": bool(getproxies_environment())}
        return cls(kubernetes.ApiClient(configuration), metrics=metrics or Metrics())

    async def close(self) -> None:
        await self.api.close()

    async def read(self, namespace: str, key: Key) -> Manifest | None:
        """Reads an object. Returns None if it does not exist."""
        try:
            return await self._request("GET", _path(namespace, *key))
        except ApiError as exc:
            if exc.code == 404:
                return None
            raise

    async def create(self, manifest: Manifest) -> bool:
        """Creates an object. Returns False if an object of the same name exists."""
        path = _path(manifest["metadata"]["namespace"], manifest["kind"])
        try:
            await self._send("POST", path, manifest, fieldManager=MANAGER)
        except ApiError as exc:
            if exc.reason == "AlreadyExists":
                return False
            raise
        self._count(manifest["kind"], "create")
        return True

    async def apply(self, manifest: Manifest) -> Manifest:
        """Applies an object by server-side apply."""
        return await self._apply("apply", manifest)

    async def try_apply(self, manifest: Manifest) -> None:
        """Applies an object as a dry run. Raises ApiError if the API server would refuse it."""
        await self._apply("dry_run", manifest, dryRun="All")

    async def try_create(self, manifest: Manifest) -> None:
        """Creates an object as a dry run. Raises ApiError if the API server would refuse it."""
        path = _path(manifest["metadata"]["namespace"], manifest["kind"])
        what = (manifest["kind"], "dry_run")
        await self._write(what, "POST", path, manifest, fieldManager=MANAGER, dryRun="All")

    async def apply_status(
        self, namespace: str, name: str, version: str, status: Mapping[str, Any]
    ) -> Manifest:
        """Applies a job's status. Returns the whole job. Raises ApiError with code 409 if the job's resourceVersion
        differs, for instance because the job was recreated."""
        body = {
            "apiVersion": API_VERSION, "kind": KIND,
            "metadata": {"name": name, "namespace": namespace, "resourceVersion": version}, "status": dict(status),
        }  # fmt: skip
        return await self._apply("apply_status", body, below="/status", fieldManager=f"{MANAGER}-status")

    async def delete(self, namespace: str, key: Key, uid: str = "") -> Manifest | None:
        """Deletes an object with foreground propagation, if it has this uid. Returns the object while it is being
        deleted; None if it is gone."""
        kind = key[0]
        try:
            how = {"propagationPolicy": "Foreground", "preconditions": {"uid": uid} if uid else {}}
            left = await self._write((kind, "delete"), "DELETE", _path(namespace, *key), how)
        except ApiError as exc:
            if exc.code == 404 or (exc.code == 409 and uid):  # 409: another object has the name
                return None
            raise
        return left if left.get("kind") == kind else None

    async def create_event(self, event: Manifest) -> None:
        """Creates an event, unless it exists already."""
        try:
            path = _path(event["metadata"]["namespace"], "Event")
            await self._write(("Event", "create"), "POST", path, event)
        except ApiError as exc:
            if exc.code != 409:
                raise

    async def events(self, namespace: str, uid: str) -> Sequence[Manifest]:
        """Lists the events of one object, at most MAX_EVENTS."""
        query = {"fieldSelector": f"involvedObject.uid={uid}", "limit": str(MAX_EVENTS)}
        page = await self._request("GET", _path(namespace, "Event"), **query)
        self.metrics.event_lookups.inc()
        return list(page["items"])

    async def warnings(self, namespace: str) -> list[Manifest]:
        """Lists the Warning events in a namespace, at most MAX_WARNINGS."""
        found = list[Manifest]()
        query = {"fieldSelector": "type=Warning", "limit": str(WARNINGS_CHUNK)}
        async for event in self.list(_path(namespace, "Event"), **query):
            found.append(event)
            if len(found) >= MAX_WARNINGS:
                break
        return found

    async def autoscalers(self, namespace: str) -> list[Mapping[str, Any]]:
        """Lists a namespace's HorizontalPodAutoscalers."""
        path = _path(namespace, "HorizontalPodAutoscaler")
        return [item async for item in self.list(path, limit=str(MAX_EVENTS))]

    async def scale(self, namespace: str, name: str, version: str, replicas: int) -> None:
        """Sets the number of a job's feeder pods. Raises ApiError with code 409 if the job's resourceVersion
        differs."""
        body = {"metadata": {"resourceVersion": version}, "spec": {"replicas": replicas}}
        path = _path(namespace, KIND, name) + "/scale"
        await self._write((KIND, "scale"), "PATCH", path, body, MERGE, fieldManager=MANAGER)

    async def list(self, path: str, **query: str) -> AsyncIterator[Manifest]:
        """Yields all objects of a kind, requesting one page at a time."""
        while True:
            page = await self._request("GET", path, **query)
            for item in page["items"]:
                yield item
            if not (rest := page["metadata"].get("continue")):
                return
            query = {**query, "continue": rest}

    async def request(self, method: str, path: str, body: Any = None, kind: str = JSON) -> Manifest:
        """Sends a request about an object that does not belong to a job. Returns the object in the response."""
        return await self._request(method, path, body, kind)

    async def get(self, path: str) -> Manifest:
        """Reads the object or list at a path."""
        return await self._request("GET", path)

    async def snapshot(self, path: str, **query: str) -> tuple[Sequence[Manifest], str]:
        """Lists all objects of a kind. Returns the objects, and the resourceVersion from which a watch can continue."""
        items, query = list[Manifest](), {"limit": str(CHUNK), **query}
        while True:
            page = await self._request("GET", path, **query)
            items += page["items"]
            if not (rest := page["metadata"].get("continue")):
                return items, str(page["metadata"].get("resourceVersion") or "")
            query = {**query, "continue": rest}

    async def watch(self, path: str, seconds: int, **query: str) -> AsyncIterator[Manifest]:
        """Yields the events of a watch until the API server ends it. Raises ApiError if a request fails, or if an event
        reports an error."""
        query |= {"watch": "true", "allowWatchBookmarks": "true", "timeoutSeconds": str(seconds)}
        timeout = aiohttp.ClientTimeout(total=seconds + 30, sock_read=SILENT_S)
        sent = await self.api.param_serialize(
            "GET", path, query_params=list(query.items()), auth_settings=["BearerToken"],
            header_params={"Accept": JSON},
        )  # fmt: skip
        try:
            response = (await self.api.call_api(*sent[:3], _request_timeout=timeout)).response
            async with response:
                if response.status >= 400:
                    raise ApiError(response.status, _message(await response.read()))
                rest = b""
                async for part in response.content.iter_any():
                    *lines, rest = (rest + part).split(b"\n")
                    for line in lines:
                        yield _event(line)
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as exc:
            raise ApiError(0, f"the API server did not answer GET {path}: {exc!r}") from exc

    async def _apply(self, verb: str, manifest: Manifest, *, below: str = "", **query: str) -> Manifest:
        """Applies an object. `below`: the subresource, such as /status."""
        kind, metadata = manifest["kind"], manifest["metadata"]
        path = _path(metadata["namespace"], kind, metadata["name"]) + below
        query = {"fieldManager": MANAGER, "force": "true", **query}
        return await self._write((kind, verb), "PATCH", path, manifest, APPLY, **query)

    async def _write(
        self, what: tuple[str, str], method: str, path: str, body: Any, kind: str = JSON, **query: str
    ) -> Manifest:
        """Sends a request and counts it. `what`: kind and verb, for the metrics."""
        self._count(*what)
        return await self._send(method, path, body, kind, **query)

    async def _send(
        self, method: str, path: str, body: Any = None, kind: str = JSON, **query: str
    ) -> Manifest:
        """Sends a request that writes. Raises ApiError if the gate is shut while the request is in flight."""
        try:
            async with self.gate.passing():
                return await self._request(method, path, body, kind, **query)
        except TimeoutError as exc:
            raise ApiError(0, f"abandoned {method} {path}: the operator could not renew its Lease") from exc

    def _count(self, kind: str, verb: str) -> None:
        self.writes += 1
        self.metrics.api_writes.labels(kind, verb).inc()

    async def _request(
        self, method: str, path: str, body: Any = None, kind: str = JSON, **query: str
    ) -> Manifest:
        sent = await self.api.param_serialize(
            method, path, query_params=list(query.items()), auth_settings=["BearerToken"],
            body=apply_body(body) if kind == APPLY else body,
            header_params={"Accept": JSON, "Content-Type": kind},
        )  # fmt: skip
        verb, url, headers, data, _ = sent
        try:
            response = await self.api.call_api(verb, url, headers, data, _request_timeout=TIMEOUT_S)
            text = await response.read()
        except (aiohttp.ClientError, TimeoutError, OSError) as exc:
            raise ApiError(0, f"the API server did not answer {method} {path}: {exc!r}") from exc
        if response.status >= 400:
            wait_s = _seconds(response.getheaders().get("Retry-After"))
            raise ApiError(response.status, _message(text), wait_s, _field(text, "reason") or "")
        return dict(json.loads(text))


def _event(line: bytes) -> Manifest:
    """Parses an event of a watch. Raises ApiError if the event reports an error."""
    event = dict(json.loads(line))
    if event.get("type") == "ERROR":
        status = event.get("object") or {}
        raise ApiError(int(status.get("code") or 0), str(status.get("message") or "the watch ended"))
    return event


def apply_body(value: Any) -> bytes:
    """Returns JSON that means the same when it is parsed as YAML.

    The API server reads the body of a server-side apply as YAML. JSON is a subset of YAML except in strings. YAML
    rejects escaped surrogate pairs and some unescaped characters, and turns unusual line endings into spaces. A
    character is therefore sent as UTF-8 if YAML accepts it, and escaped otherwise. A lone surrogate is valid in neither
    format, and is replaced.
    """
    text = _SURROGATES.sub(UNKNOWN, json.dumps(value, ensure_ascii=False))
    return _NOT_IN_YAML.sub(lambda found: f"\\u{ord(found[0]):04x}", text).encode()


def _path(namespace: str, kind: str, *name: str) -> str:
    """Returns the path of a kind's objects, or of one object. Raises ValueError for a name that would lead to another
    path."""
    for part in (namespace, *name):
        if part in ("", ".", "..") or "/" in part or "%" in part:  # Kubernetes' own rule for names in paths
            raise ValueError(f"{part!r} is not the name of a namespace or an object")
    return "/".join((KINDS[kind].path(namespace), *name))


def _message(text: bytes) -> str:
    return _field(text, "message") or text.decode(errors="replace")[:500]


def _field(status: bytes, name: str) -> str | None:
    """Returns a field of the Status object that the API server sends with an error; None if the field is missing."""
    try:
        return str(json.loads(status)[name])
    except (ValueError, KeyError, TypeError):
        return None


def _seconds(text: str | None) -> float:
    try:
        return max(0.0, float(text or 0))
    except ValueError:
        return 0.0
