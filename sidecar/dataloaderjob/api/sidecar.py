"""The sidecar's container, and the names of its volumes and files. Pure.

Everything that puts a sidecar into a pod uses this module: the operator, the webhook, and `dataloaderjob inject`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dataloaderjob.api.base import Quantity
from dataloaderjob.api.job import DataLoaderJobSpec
from dataloaderjob.api.plain import Object, plain, resources
from dataloaderjob.api.pods import RESERVED_PREFIX, ScratchSpec
from dataloaderjob.core.generations import FILES
from dataloaderjob.core.keys import Part

SIDECAR = f"{RESERVED_PREFIX}sidecar"
KEY_VOLUME = f"{RESERVED_PREFIX}key"
SETTINGS_VOLUME = f"{RESERVED_PREFIX}settings"
RUN_VOLUME = f"{RESERVED_PREFIX}run"
KEY_FOLDER = "/etc/dataloaderjob/key"
SETTINGS_FOLDER = "/etc/dataloaderjob/settings"
SETTINGS_FILE = "sidecar.json"
RUN_FOLDER = "/run/dataloaderjob"
"""Folder shared by the containers of a trainer pod. It holds the socket, and the user's code and data in transit."""
SOCKET = f"{RUN_FOLDER}/s"
METRICS_PORT = 9400
SCRATCH_SIZE = "10Gi"
USER = 65532
"""User ID of the process in this project's images."""
RESTRICTED: Object = {
    "allowPrivilegeEscalation": False,
    "capabilities": {"drop": ["ALL"]},
    "readOnlyRootFilesystem": True,
    "seccompProfile": {"type": "RuntimeDefault"},
}
LAST_WORDS: Object = {"terminationMessagePolicy": "FallbackToLogsOnError"}
"""Makes Kubernetes copy a container's last output into its status. The operator copies it into the job's conditions."""
MOUNTS: tuple[dict[str, Any], ...] = (
    {"name": KEY_VOLUME, "mountPath": KEY_FOLDER, "readOnly": True},
    {"name": SETTINGS_VOLUME, "mountPath": SETTINGS_FOLDER, "readOnly": True},
)
RUN: dict[str, Any] = {"name": RUN_VOLUME, "mountPath": RUN_FOLDER}


TLS_NAME = "tls"
TLS_FOLDER = f"{KEY_FOLDER}/{TLS_NAME}"
"""Folder with a pod's certificates, if the job uses TLS (`core.tls`)."""
AUTHORITIES = "ca.crt"
"""The field with the authorities' certificates in a Secret of certificates. All parts of a job need it."""


def certificate_fields(part: Part) -> tuple[str, str]:
    """Returns the names of the fields that hold a part's certificate and key."""
    return f"{part.value}.crt", f"{part.value}.key"


def key_volume(
    secret: str, mode: int, part: Part, *, items: Sequence[Object] = (), certificates: Sequence[str] = ()
) -> dict[str, Any]:
    """Builds the volume with a pod's key. `part` is the pod's part of the job, and `items` are the Secret's items to
    include, if not all.

    If the job uses TLS, `certificates` names the Secrets with the generations of certificates. Later generations do not
    exist yet when the pod starts. The kubelet adds each one once it exists.
    """
    chosen = {"items": list(items)} if items else {}
    if not certificates:
        return {"name": KEY_VOLUME, "secret": {"secretName": secret, "defaultMode": mode, **chosen}}
    certificate, key = certificate_fields(part)
    fields = dict(zip((AUTHORITIES, certificate, key), FILES, strict=True))
    sources: list[dict[str, Any]] = [{"secret": {"name": secret, **chosen}}]
    for generation, name in enumerate(certificates):
        paths = [{"key": field, "path": f"{TLS_NAME}/{generation}/{file}"} for field, file in fields.items()]
        later = {"optional": True} if generation else {}
        sources.append({"secret": {"name": name, "items": paths, **later}})
    return {"name": KEY_VOLUME, "projected": {"defaultMode": mode, "sources": sources}}


@dataclass(frozen=True, slots=True, kw_only=True)
class SidecarPlan:
    """The settings of one job's sidecar that do not depend on the pod that it joins."""

    image: str
    metrics_port: int
    requests: Mapping[str, str]
    limits: Mapping[str, str]
    env: Sequence[Object]
    security_context: Object


def sidecar_plan(spec: DataLoaderJobSpec, *, image: str, metrics_port: int, processes: int) -> SidecarPlan:
    """Builds the plan from a manifest. `image` is used if the manifest names none. `processes` is the number of trainer
    processes in a pod.

    The default memory covers the pools and the sidecar itself, because the sidecar is charged for the memfds.
    """
    asked = plain(spec.sidecar)
    made = resources(spec.sidecar.resources)
    memory = spec.loader.memory_per_process.nbytes * processes + spec.sidecar.overhead_nbytes(processes)
    limits = {"memory": str(memory), **made.get("limits", {})}
    requests = {"memory": limits["memory"], **made.get("requests", {})}
    return SidecarPlan(
        image=spec.sidecar.image or image, metrics_port=metrics_port, requests=requests, limits=limits,
        env=asked.get("env", []), security_context=asked.get("securityContext", {}),
    )  # fmt: skip


def sidecar_container(plan: SidecarPlan, pod: Object) -> dict[str, Any]:
    """Builds the sidecar for a pod whose spec, `pod`, has no sidecar yet. The sidecar does not keep the pod running
    after the other containers have exited."""
    return {
        "name": SIDECAR,
        "image": plan.image,
        "restartPolicy": "Always",
        "command": ["python", "-m", "dataloaderjob.sidecar"],
        "args": ["--settings", f"{SETTINGS_FOLDER}/{SETTINGS_FILE}"],
        "ports": [{"name": "metrics", "containerPort": plan.metrics_port}],
        "resources": _resources(plan, pod),
        **({"env": [dict(variable) for variable in plan.env]} if plan.env else {}),
        "securityContext": {**RESTRICTED, "runAsNonRoot": True, **_user(pod), **plan.security_context},
        "startupProbe": {
            "httpGet": {"path": "/healthz", "port": "metrics"}, "periodSeconds": 1, "failureThreshold": 120,
        },
        "volumeMounts": [dict(mount) for mount in (*MOUNTS, RUN)],
        **LAST_WORDS,
    }  # fmt: skip


def _user(pod: Object) -> dict[str, int]:
    """Returns a user for the sidecar if the pod's user is root, because the sidecar must not run as root. Otherwise,
    the sidecar's image, the pod or the namespace determines the user."""
    return {"runAsUser": USER} if (pod.get("securityContext") or {}).get("runAsUser") == 0 else {}


def _resources(plan: SidecarPlan, pod: Object) -> dict[str, dict[str, str]]:
    requests, limits = dict(plan.requests), dict(plan.limits)
    if is_guaranteed(pod):
        requests |= limits
        limits |= requests
    return {"requests": requests, "limits": limits}


def is_guaranteed(pod: Object) -> bool:
    """Checks whether a pod has the Guaranteed quality of service, which the sidecar must preserve."""
    for container in (*pod["containers"], *(pod.get("initContainers") or ())):
        asked = container.get("resources") or {}
        limits = asked.get("limits") or {}
        requests = {**limits, **(asked.get("requests") or {})}
        if not all(
            limits.get(name) is not None
            and requests.get(name) is not None
            and Quantity(str(limits[name])) == Quantity(str(requests[name]))
            for name in ("cpu", "memory")
        ):
            return False
    return True


def scratch_volume(name: str, scratch: ScratchSpec) -> dict[str, Any]:
    if scratch.volume is not None:
        return {**scratch.volume, "name": name}
    return {"name": name, "emptyDir": {"sizeLimit": str(scratch.size or SCRATCH_SIZE)}}
