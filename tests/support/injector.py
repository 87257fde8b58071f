"""The chart's injector in front of a real API server: its rights, its webhook and its guard, in one namespace."""

from __future__ import annotations

import base64
import copy
import itertools
import os
import subprocess
import sys
import urllib.request
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml
from injecting import JOB_FILE, pod
from ports import reserve_port
from processes_of_operator import kubeconfig, until

from apiserver import ApiServer, Refused
from chart import render
from dataloaderjob.api import API_VERSION, PLURAL
from dataloaderjob.api.injection import for_policy, injection
from dataloaderjob.api.load import parse_object
from dataloaderjob_operator.injector.certificates import Certificates, from_stored

ADMISSION = "/apis/admissionregistration.k8s.io/v1"
BETA = "/apis/admissionregistration.k8s.io/v1beta1"
RBAC = "/apis/rbac.authorization.k8s.io/v1"
COUNTER = itertools.count()
OF_CLUSTER = (
    "MutatingWebhookConfiguration", "ValidatingAdmissionPolicy", "ValidatingAdmissionPolicyBinding",
    "ClusterRole", "ClusterRoleBinding",
)  # fmt: skip
IMAGE = "ghcr.io/dataloaderjob/sidecar:0.1.0"
GATE = (
    "--feature-gates=MutatingAdmissionPolicy=true",
    "--runtime-config=admissionregistration.k8s.io/v1beta1=true",
)
"""Options of an API server that offers admission policies that change objects."""
POLICY = (
    "--set",
    "injection.mode=policy",
    "--api-versions",
    "admissionregistration.k8s.io/v1beta1/MutatingAdmissionPolicy",
)
"""Helm's options for a chart that injects by such a policy."""


class Installed:
    """The chart's objects around injection, and a namespace for pods. The injector's process starts later."""

    def __init__(
        self, server: ApiServer, folder: Path, *options: str, labels: dict[str, str] | None = None
    ) -> None:
        number = next(COUNTER)
        self.server, self.folder = server, folder
        self.ops, self.namespace = f"injector-{number}", f"team-{number}"
        self.port, self.metrics_port = reserve_port(), reserve_port()
        self.processes: list[subprocess.Popen[bytes]] = []
        for name, more in ((self.ops, {}), (self.namespace, labels or {})):
            marks = {"name": name, "labels": {"kubernetes.io/metadata.name": name, **more}}
            server.request("POST", "/api/v1/namespaces", {"metadata": marks})
        values = f"namespaces={{{self.namespace}}},injection.mode=webhook"
        self.objects = render("--set", values, *options, release="r", namespace=self.ops)
        self.cluster = f"{self.ops}.r-injector"
        for (kind, name), thing in self.objects.items():
            if "injector" in name and (path := self._folder(kind, thing)):
                server.request("POST", path, self._local(thing))

    def _local(self, thing: dict[str, Any]) -> dict[str, Any]:
        """The API server reaches the injector at a port of this machine."""
        made = copy.deepcopy(thing)
        for webhook in made.get("webhooks", ()):
            webhook["clientConfig"] = {"url": f"https://127.0.0.1:{self.port}/inject"}
        return made

    def _folder(self, kind: str, thing: dict[str, Any]) -> str:
        namespace = thing["metadata"].get("namespace")
        return {
            "ServiceAccount": f"/api/v1/namespaces/{namespace}/serviceaccounts",
            "Role": f"{RBAC}/namespaces/{namespace}/roles",
            "RoleBinding": f"{RBAC}/namespaces/{namespace}/rolebindings",
            "ClusterRole": f"{RBAC}/clusterroles",
            "ClusterRoleBinding": f"{RBAC}/clusterrolebindings",
            "MutatingWebhookConfiguration": f"{ADMISSION}/mutatingwebhookconfigurations",
            "MutatingAdmissionPolicy": f"{BETA}/mutatingadmissionpolicies",
            "MutatingAdmissionPolicyBinding": f"{BETA}/mutatingadmissionpolicybindings",
            "ValidatingAdmissionPolicy": f"{ADMISSION}/validatingadmissionpolicies",
            "ValidatingAdmissionPolicyBinding": f"{ADMISSION}/validatingadmissionpolicybindings",
        }.get(kind, "")

    @property
    def arguments(self) -> list[str]:
        """The chart's arguments, for this machine."""
        (only,) = self.objects["Deployment", "r-injector"]["spec"]["template"]["spec"]["containers"]
        kept = [word for word in only["args"] if not word.startswith(("--dns-name", "--certificate-folder"))]
        return [*kept, "--dns-name=127.0.0.1", f"--metrics-port={self.metrics_port}", f"--port={self.port}"]

    def start(self, *options: str) -> subprocess.Popen[bytes]:
        """Starts a replica with the chart's rights alone."""
        path = f"/api/v1/namespaces/{self.ops}/serviceaccounts/r-injector/token"
        body = {"kind": "TokenRequest", "apiVersion": "authentication.k8s.io/v1", "spec": {}}
        token = str(self.server.request("POST", path, body)["status"]["token"])
        env = {**os.environ, "KUBECONFIG": str(kubeconfig(replace(self.server, token=token), self.folder))}
        command = [sys.executable, "-m", "dataloaderjob_operator.injector", *self.arguments, *options]
        with (self.folder / "injector.log").open("ab") as log:
            process = subprocess.Popen(command, env=env, stdout=log, stderr=log)
        self.processes.append(process)
        return process

    def started(self, *options: str) -> Installed:
        self.start(*options)
        until(self.ready, 30, "the injector is ready")
        return self

    def ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.metrics_port}/readyz", timeout=5) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    def metric(self, line: str) -> float:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.metrics_port}/metrics", timeout=5) as answer:
            found = [row for row in answer.read().decode().splitlines() if row.startswith(f"{line} ")]
        return float(found[0].rpartition(" ")[2]) if found else 0.0

    @property
    def log(self) -> str:
        return (self.folder / "injector.log").read_text()

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()
        for (kind, name), thing in self.objects.items():
            if "injector" in name and kind in OF_CLUSTER:
                self.server.request("DELETE", f"{self._folder(kind, thing)}/{name}")

    # Objects

    def job(self, name: str = "bert", **spec: Any) -> dict[str, Any]:
        data = yaml.safe_load(JOB_FILE.read_text())
        data["metadata"] |= {"name": name, "namespace": self.namespace}
        data["spec"].update(spec)
        return self.server.request("POST", f"/apis/{API_VERSION}/namespaces/{self.namespace}/{PLURAL}", data)

    def publish(self, live: dict[str, Any], **options: Any) -> dict[str, Any]:
        """Writes the status from which the policy injects, as the operator does. `options`: of `injection`."""
        parts = for_policy(injection(parse_object(live), image=IMAGE, **options))
        name = live["metadata"]["name"]
        path = f"/apis/{API_VERSION}/namespaces/{self.namespace}/{PLURAL}/{name}/status"
        return self.server.request("PUT", path, {**live, "status": {"injection": parts}})

    def injects(self) -> bool:
        """Returns True if a labeled pod gets the sidecar."""
        try:
            return "initContainers" in self.create(pod())["spec"]
        except Refused:
            return False

    def create(
        self, pod: dict[str, Any], *, dry: bool = True, server: ApiServer | None = None
    ) -> dict[str, Any]:
        """Creates a pod. Raises Refused."""
        made = {**pod, "metadata": {**pod["metadata"], "generateName": "p-", "namespace": self.namespace}}
        query = "?dryRun=All" if dry else ""
        path = f"/api/v1/namespaces/{self.namespace}/pods{query}"
        return (server or self.server).request("POST", path, made)

    def accepts(self, thing: dict[str, Any]) -> bool:
        """Creates an object. Returns False if it is refused."""
        try:
            self.create(thing)
            return True
        except Refused:
            return False

    def refusal(self, pod: dict[str, Any]) -> str:
        """The message with which a pod is refused."""
        try:
            self.create(pod)
        except Refused as exc:
            return exc.message
        raise AssertionError("the pod was accepted")

    # Certificates

    @property
    def secret(self) -> str:
        return f"/api/v1/namespaces/{self.ops}/secrets/r-injector-certificates"

    def certificates(self) -> Certificates:
        found = self.server.request("GET", self.secret)["data"]
        return from_stored({name: base64.b64decode(value) for name, value in found.items()})

    def bundle(self) -> bytes:
        path = f"{ADMISSION}/mutatingwebhookconfigurations/{self.cluster}"
        (webhook,) = self.server.request("GET", path)["webhooks"]
        return base64.b64decode(webhook["clientConfig"].get("caBundle", ""))

    def trust(self, bundle: bytes) -> None:
        """Writes the bundle, as cert-manager does."""
        change = [
            {
                "op": "add",
                "path": "/webhooks/0/clientConfig/caBundle",
                "value": base64.b64encode(bundle).decode(),
            }
        ]
        path = f"{ADMISSION}/mutatingwebhookconfigurations/{self.cluster}"
        self.server.request("PATCH", path, change, content_type="application/json-patch+json")

    def store(self, certificates: Certificates) -> None:
        data = {name: base64.b64encode(value).decode() for name, value in certificates.stored().items()}
        self.server.request("PATCH", self.secret, {"data": data}, content_type="application/merge-patch+json")
