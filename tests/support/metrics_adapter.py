"""An adapter that serves one external metric to the API server, as prometheus-adapter and KEDA do. Kubernetes' own
controller scales by it."""

from __future__ import annotations

import contextlib
import os
import subprocess
import threading
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path

from metrics_adapter_pod import GROUP, VERSION, serving
from processes_of_operator import kubeconfig, until

from apiserver import ApiServer, assets
from dataloaderjob_operator.injector.certificates import Renewal, renewed

SERVICES = "/apis/apiregistration.k8s.io/v1/apiservices"
NAMESPACE = "/api/v1/namespaces/default/services"


class Adapter:
    """Serves the value of `metric` for each namespace and label selector. `asked`: both, for each request."""

    def __init__(self, folder: Path, metric: str, value: Callable[[], float | None]) -> None:
        self.asked: set[tuple[str, str]] = set()
        self._value = value
        made = renewed(None, Renewal.AUTHORITY, ["localhost"], datetime.now(UTC))
        pem = folder / "adapter.pem"
        pem.write_bytes(made.certificate + made.key)
        self._server = serving(("127.0.0.1", 0), str(pem), str(pem), metric, self._values)
        self.port = int(self._server.server_address[1])
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def _values(self, namespace: str, selector: str) -> list[int]:
        self.asked.add((namespace, selector))
        value = self._value()
        return [] if value is None else [int(value)]


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
