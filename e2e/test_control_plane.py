"""The cluster's control plane in trouble: its API server starts anew, a webhook of somebody's answers 500."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest
import yaml
from cluster import FEEDER, Cluster, CommandFailed, Manifest, run, until
from jobs import RESTRICTED, RESTRICTED_POD, TRAINER, Job, job
from nodes import await_api_server
from streams import longest_gap_s, stream, stream_here, takes_batches

pytestmark = [pytest.mark.slow, pytest.mark.alone, pytest.mark.timeout(600)]
MAX_GAP_S = 5.0
"""Between two batches, of which there is one a second."""
SAYS = "the policy is out of order"
SERVER = f"""
import http.server, ssl
class Answer(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(500)
        self.end_headers()
        self.wfile.write(b"{SAYS}")
server = http.server.HTTPServer(("", 8443), Answer)
context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
context.load_cert_chain("/tls/tls.crt", "/tls/tls.key")
server.socket = context.wrap_socket(server.socket, server_side=True)
server.serve_forever()
"""


def api_server(cluster: Cluster) -> str:
    """The number of its process on the first node; empty while there is none."""
    try:
        return run(
            ["docker", "exec", f"{cluster.name}-control-plane", "pgrep", "-x", "kube-apiserver"]
        ).strip()
    except CommandFailed:
        return ""


@pytest.mark.nightly
def test_job_streams_through_an_api_server_restart_and_is_managed_again(operator: Cluster, start):
    streams: Job = start(stream("streams"))
    until(lambda: takes_batches(streams), timeout_s=180, what="batches", also=streams.why)
    before, began = api_server(operator), datetime.now(UTC)
    run(["docker", "exec", f"{operator.name}-control-plane", "kill", "-9", before])
    until(lambda: api_server(operator) not in {"", before}, timeout_s=120, what="another API server")
    await_api_server(operator)
    operator.kubectl("scale", "dlj", "streams", "-n", streams.namespace, "--replicas=2")
    until(
        lambda: streams.status()["feeders"]["summary"] == "2/2", timeout_s=90, what="2/2 feeders", also=streams.why
    )  # fmt: skip
    assert longest_gap_s(streams, began, datetime.now(UTC)) < MAX_GAP_S
    streams.await_phase("Complete", timeout_s=240)
    assert streams.status()["trainers"]["restarts"] == 0
    assert streams.digest() == stream_here()


def certificate(folder: Path, host: str) -> tuple[str, str]:
    """A certificate that is its own authority, and its key."""
    run([
        "openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=broken",
        "-addext", f"subjectAltName=DNS:{host}", "-keyout", str(folder / "tls.key"), "-out", str(folder / "tls.crt"),
    ])  # fmt: skip
    return (folder / "tls.crt").read_text(), (folder / "tls.key").read_text()


@pytest.fixture
def webhook(operator: Cluster, namespace: str, tmp_path: Path) -> Iterator[Manifest]:
    """A server in a pod that answers 500, and what sends it all new objects of jobs in this namespace."""
    crt, key = certificate(tmp_path, f"broken.{namespace}.svc")
    container = {
        "name": "server", "image": FEEDER, "command": ["python", "-c", SERVER], "securityContext": RESTRICTED,
        "readinessProbe": {"tcpSocket": {"port": 8443}, "periodSeconds": 1},
        "volumeMounts": [{"name": "tls", "mountPath": "/tls"}],
    }  # fmt: skip
    operator.apply(
        namespace,
        {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "tls"},
         "stringData": {"tls.crt": crt, "tls.key": key}},
        {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "broken"},
         "spec": {"selector": {"app": "broken"}, "ports": [{"port": 443, "targetPort": 8443}]}},
        {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "broken", "labels": {"app": "broken"}},
         "spec": {"securityContext": RESTRICTED_POD, "containers": [container], "terminationGracePeriodSeconds": 0,
                  "volumes": [{"name": "tls", "secret": {"secretName": "tls"}}]}},
    )  # fmt: skip
    operator.kubectl("wait", "--for=condition=Ready", "pod/broken", "-n", namespace, "--timeout=60s")
    rule = {"operations": ["CREATE"], "apiGroups": ["*"], "apiVersions": ["*"], "scope": "Namespaced"}
    hook = {
        "name": "broken.example.com", "sideEffects": "None", "admissionReviewVersions": ["v1"], "timeoutSeconds": 5,
        "failurePolicy": "Fail",
        "clientConfig": {
            "service": {"name": "broken", "namespace": namespace}, "caBundle": base64.b64encode(crt.encode()).decode(),
        },
        "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": namespace}},
        "objectSelector": {"matchExpressions": [{"key": "dataloading.dev/job", "operator": "Exists"}]},
        "rules": [rule],
    }  # fmt: skip
    yield {
        "apiVersion": "admissionregistration.k8s.io/v1", "kind": "ValidatingWebhookConfiguration",
        "metadata": {"name": namespace}, "webhooks": [hook],
    }  # fmt: skip
    remove(operator, namespace)


def remove(cluster: Cluster, name: str) -> None:
    cluster.kubectl("delete", "validatingwebhookconfiguration", name, "--ignore-not-found")


REFUSED = {
    "configmaps": ("Ready", "ChildRefused"),
    "pods": ("HeadReady", "FailedCreate"),
}
"""Kinds of objects: those of the operator itself, and those of Kubernetes' controllers."""


@pytest.mark.parametrize("kind", REFUSED)
def test_failing_webhook_is_reported_and_the_job_starts_once_it_is_removed(
    operator: Cluster, namespace: str, start, webhook: Manifest, kind: str
):
    webhook["webhooks"][0]["rules"][0]["resources"] = [kind]
    operator.apply("default", webhook)
    until(lambda: refuses(operator, namespace, kind), timeout_s=30, what="the webhook in force")
    held: Job = start(job("held"))
    condition, reason = REFUSED[kind]
    found = held.await_condition(condition, lambda found: "broken.example.com" in found.get("message", ""))
    assert (found["status"], found["reason"]) == ("False", reason), found
    assert SAYS in found["message"], found
    remove(operator, namespace)
    held.await_phase("Running", timeout_s=180)
    assert all(pod["status"]["phase"] == "Running" for pod in held.pods(TRAINER))


def refuses(cluster: Cluster, namespace: str, kind: str) -> bool:
    """Whether the webhook is asked by now; what is tried is not made."""
    labels = {"dataloading.dev/job": "probe"}
    tried: Manifest = {"apiVersion": "v1", "metadata": {"name": "probe", "labels": labels}}
    if kind == "pods":
        container = {"name": "probe", "image": FEEDER, "securityContext": RESTRICTED}
        tried |= {"kind": "Pod", "spec": {"securityContext": RESTRICTED_POD, "containers": [container]}}
    else:
        tried |= {"kind": "ConfigMap"}
    try:
        cluster.kubectl("create", "--dry-run=server", "-n", namespace, "-f", "-", stdin=yaml.safe_dump(tried))
    except CommandFailed as exc:
        return SAYS in str(exc)
    return False
