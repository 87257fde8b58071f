"""A pod that serves one metric of the operator to autoscalers, in place of prometheus-adapter.

The pod reads the metric from the operator's own endpoint. It answers Kubernetes' HorizontalPodAutoscaler controller
through the API `external.metrics.k8s.io`.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from cluster import FEEDER, SYSTEM, Cluster, Manifest
from jobs import RESTRICTED, RESTRICTED_POD
from metrics_adapter_pod import GROUP, VERSION

from dataloaderjob_operator.injector.certificates import Renewal, renewed

NAME = "external-metrics"
API_SERVICE = f"{VERSION}.{GROUP}"
OPERATORS = "app.kubernetes.io/name=dataloaderjob-operator"
PROGRAM = Path(__file__).with_name("metrics_adapter_pod.py")


@contextlib.contextmanager
def external_metric(cluster: Cluster, metric: str) -> Iterator[None]:
    """Serves `metric` for this block."""
    pods = cluster.list("pods", SYSTEM, OPERATORS)
    addresses = [str(pod["status"]["podIP"]) for pod in pods]
    cluster.apply(SYSTEM, *_manifests(metric, addresses))
    try:
        cluster.kubectl(
            "wait", "-n", SYSTEM, f"deployment/{NAME}", "--for=condition=Available", "--timeout=120s"
        )
        cluster.kubectl("wait", f"apiservice/{API_SERVICE}", "--for=condition=Available", "--timeout=120s")
        yield
    finally:
        cluster.kubectl("delete", "apiservice", API_SERVICE, "--ignore-not-found")
        cluster.kubectl("delete", "deployment,service,secret", NAME, "-n", SYSTEM, "--ignore-not-found")


def requests_of_autoscalers(cluster: Cluster) -> str:
    """Returns a line for each request that the pod answered: namespace, label selector and values."""
    return cluster.logs(f"deployment/{NAME}", SYSTEM)


def _manifests(metric: str, addresses: list[str]) -> list[Manifest]:
    labels = {"app": NAME}
    made = renewed(None, Renewal.AUTHORITY, [NAME], datetime.now(UTC))
    pair = {"tls.key": made.key.decode(), "tls.crt": made.certificate.decode()}
    secret = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": NAME}, "stringData": pair}
    service = {
        "apiVersion": "v1", "kind": "Service", "metadata": {"name": NAME},
        "spec": {"selector": labels, "ports": [{"port": 443, "targetPort": 6443}]},
    }  # fmt: skip
    container: dict[str, Any] = {
        "name": "adapter", "image": FEEDER, "command": ["python", "-u", "-c", PROGRAM.read_text()],
        "securityContext": RESTRICTED,
        "env": [{"name": "METRIC", "value": metric}, {"name": "OPERATORS", "value": json.dumps(addresses)}],
        "volumeMounts": [{"name": "tls", "mountPath": "/tls"}],
        "readinessProbe": {"tcpSocket": {"port": 6443}},
    }  # fmt: skip
    pod = {
        "securityContext": {**RESTRICTED_POD, "fsGroup": 65532}, "terminationGracePeriodSeconds": 0,
        "containers": [container], "volumes": [{"name": "tls", "secret": {"secretName": NAME}}],
    }  # fmt: skip
    deployment = {
        "apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": NAME},
        "spec": {"selector": {"matchLabels": labels}, "template": {"metadata": {"labels": labels}, "spec": pod}},
    }  # fmt: skip
    registration = {
        "apiVersion": "apiregistration.k8s.io/v1", "kind": "APIService", "metadata": {"name": API_SERVICE},
        "spec": {
            "group": GROUP, "version": VERSION, "groupPriorityMinimum": 100,
            "versionPriority": 100, "insecureSkipTLSVerify": True, "service": {"name": NAME, "namespace": SYSTEM},
        },
    }  # fmt: skip
    return [secret, service, deployment, registration]
