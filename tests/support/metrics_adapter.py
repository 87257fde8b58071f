"""An adapter that serves one external metric to the API server, as prometheus-adapter and KEDA do. Kubernetes' own
controller scales by it."""

from __future__ import annotations

import contextlib
import json
import os
import ssl
import subprocess
import threading
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

from processes_of_operator import kubeconfig, until

from apiserver import ApiServer, assets
from dataloaderjob_operator.injector.certificates import Renewal, renewed

GROUP = "external.metrics.k8s.io"
VERSION = "v1beta1"
PATH = f"/apis/{GROUP}/{VERSION}"
SERVICES = "/apis/apiregistration.k8s.io/v1/apiservices"
NAMESPACE = "/api/v1/namespaces/default/services"


class Adapter:
    """Serves the value of `metric` for each namespace and label selector. `asked`: both, for each request."""

    def __init__(self, folder: Path, metric: str, value: Callable[[], float | None]) -> None:
        self.asked: set[tuple[str, str]] = set()
        self._metric, self._value = metric, value
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        made = renewed(None, Renewal.AUTHORITY, ["localhost"], datetime.now(UTC))
        pem = folder / "adapter.pem"
        pem.write_bytes(made.certificate + made.key)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(pem)
        self._server.socket = context.wrap_socket(self._server.socket, server_side=True)
        self.port = int(self._server.server_address[1])
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def answer(self, url: str) -> dict[str, object] | None:
        """Returns the answer to a request; None if there is no such resource."""
        found = urlsplit(url)
        if found.path == PATH:
            resource = {"name": self._metric, "singularName": "", "namespaced": True, "verbs": ["get"],
                        "kind": "ExternalMetricValueList"}  # fmt: skip
            return {"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": f"{GROUP}/{VERSION}",
                    "resources": [resource]}  # fmt: skip
        namespace, _, metric = found.path.removeprefix(f"{PATH}/namespaces/").partition("/")
        if metric != self._metric:
            return None
        self.asked.add((namespace, parse_qs(found.query).get("labelSelector", [""])[0]))
        value, now = self._value(), datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        items = (
            []
            if value is None
            else [{"metricName": metric, "metricLabels": {}, "timestamp": now, "value": str(int(value))}]
        )
        return {
            "kind": "ExternalMetricValueList",
            "apiVersion": f"{GROUP}/{VERSION}",
            "metadata": {},
            "items": items,
        }

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        adapter = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                found = adapter.answer(self.path)
                body = json.dumps(found or {}).encode()
                self.send_response(200 if found else 404)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                pass

        return Handler


@contextlib.contextmanager
def external_metric(
    server: ApiServer, folder: Path, metric: str, value: Callable[[], float | None]
) -> Iterator[Adapter]:
    """Registers an adapter, and runs the controller of HorizontalPodAutoscalers, for this block. `value` returns None
    while nothing is known."""
    adapter = Adapter(folder, metric, value)
    service = {"metadata": {"name": "adapter"}, "spec": {"type": "ExternalName", "externalName": "localhost"}}
    server.request("POST", NAMESPACE, service)
    spec = {
        "group": GROUP, "version": VERSION, "groupPriorityMinimum": 100, "versionPriority": 100,
        "insecureSkipTLSVerify": True,
        "service": {"namespace": "default", "name": "adapter", "port": adapter.port},
    }  # fmt: skip
    server.request("POST", SERVICES, {"metadata": {"name": f"{VERSION}.{GROUP}"}, "spec": spec})
    try:
        until(lambda: _available(server), 30, "the API server reaches the adapter")
        with _controller(server, folder):
            yield adapter
    finally:
        server.request("DELETE", f"{SERVICES}/{VERSION}.{GROUP}")
        server.request("DELETE", f"{NAMESPACE}/adapter")
        adapter.close()


def _available(server: ApiServer) -> bool:
    status = server.request("GET", f"{SERVICES}/{VERSION}.{GROUP}").get("status") or {}
    return any(c["type"] == "Available" and c["status"] == "True" for c in status.get("conditions") or ())


def _program() -> Path:
    """Raises FileNotFoundError with what to do."""
    name = "kube-controller-manager"
    for folder in (assets(), Path(__file__).resolve().parents[2] / ".envtest"):
        if os.access(folder / name, os.X_OK):
            return folder / name
    raise FileNotFoundError(f"{name} is needed in {assets()} for tests of autoscalers: run `make apiserver`")


@contextlib.contextmanager
def _controller(server: ApiServer, folder: Path) -> Iterator[None]:
    command = [
        _program(), f"--kubeconfig={kubeconfig(server, folder)}",
        "--controllers=horizontal-pod-autoscaler-controller", "--horizontal-pod-autoscaler-sync-period=1s",
        "--leader-elect=false", "--secure-port=0", f"--cert-dir={folder}",
    ]  # fmt: skip
    with (folder / "kube-controller-manager.log").open("wb") as log:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    try:
        yield
    finally:
        process.terminate()
        process.wait(20)
