"""The supervisor's container in the head's pod, and the volumes that keep the job's key from Ray's container. Pure.

Anyone who holds Ray's token can run code in Ray's container. Therefore, only the supervisor's container has the job's
key, and only Ray's container has Ray's token. This also applies on an existing Ray cluster. The two containers share
the pod's network and one folder. The folder contains the socket through which the supervisor reaches Ray. The
supervisor cannot write to the folder.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from dataloaderjob.api import DataLoaderJob
from dataloaderjob.api.base import Quantity
from dataloaderjob.api.pods import RESERVED_PREFIX, ScratchSpec
from dataloaderjob.api.ray import SUPERVISOR_CONTAINER
from dataloaderjob.api.sidecar import KEY_FOLDER, KEY_VOLUME, LAST_WORDS, MOUNTS, scratch_volume
from dataloaderjob.core.settings import LINK_FOLDER
from dataloaderjob_operator import names
from dataloaderjob_operator.kinds import Manifest
from dataloaderjob_operator.objects import settings

MODULE = "dataloaderjob.pod.supervisor"
CPU_SHARE, MEMORY_SHARE = 5, 8
"""The supervisor gets a fifth of the head's CPUs, and an eighth of the head's memory."""
LEAST_NBYTES = 128 * 1024**2
"""Minimum memory of the supervisor. Its two processes start with 23 MB each."""
RAY_VOLUME = f"{RESERVED_PREFIX}token"
"""Volume with the part of the Secret that Ray's container gets."""
TMP: Manifest = {"name": f"{RESERVED_PREFIX}supervisor", "mountPath": "/tmp"}  # noqa: S108  a volume of the container's own
"""The supervisor's own /tmp. Python loads packages from the home folder, so Ray's container must not be able to write
to it."""
LINK: Manifest = {"name": f"{RESERVED_PREFIX}link", "mountPath": LINK_FOLDER}
COPIED = ("imagePullPolicy", "securityContext", "env")
"""Fields that the supervisor's container copies from Ray's container."""
OWN_PROCESSES: Manifest = {"hostPID": False, "shareProcessNamespace": False}
"""Pod fields that keep each container from reading the other's files and memory in /proc."""
Amounts = Mapping[str, Mapping[str, Any]]


def container(ray: Manifest, asked: Amounts) -> Manifest:
    """Builds the supervisor's container. `ray`: Ray's container, already complete. `asked`: the resources of the whole
    head."""
    own = {"name": "PYTHONNOUSERSITE", "value": "1"}
    env = [v for v in ray["env"] if not str(v["name"]).startswith("RAY_") and v["name"] != own["name"]]
    probe = ray["startupProbe"] | {"tcpSocket": {"port": "supervisor"}}
    return {
        **{name: ray[name] for name in COPIED if name in ray},
        "name": SUPERVISOR_CONTAINER,
        "image": ray["image"],
        "command": [
            "python", "-P", "-m", MODULE, "--settings", f"{settings.SETTINGS_FOLDER}/{settings.FILES[names.Role.HEAD]}",
        ],
        "env": [*env, own],
        "ports": [{"name": "supervisor", "containerPort": settings.SUPERVISOR_PORT}],
        "startupProbe": probe,
        "readinessProbe": {**probe, "failureThreshold": 3},
        "resources": split(asked)[1],
        "volumeMounts": [*map(dict, MOUNTS), {**LINK, "readOnly": True}, dict(TMP)],
        **LAST_WORDS,
    }  # fmt: skip


def ray_mounts() -> list[Manifest]:
    """Returns the mounts of Ray's container, without its scratch volumes."""
    part = {"name": RAY_VOLUME, "mountPath": KEY_FOLDER, "readOnly": True}
    return [part, *(dict(mount) for mount in MOUNTS if mount["name"] != KEY_VOLUME), dict(LINK)]


def volumes(job: DataLoaderJob, setup: settings.OperatorConfig) -> list[Manifest]:
    """Builds the volumes that only the head's pod has."""
    secret = names.key_secret(job.name, job.metadata.uid or "", setup.root_key)
    return [
        {
            "name": RAY_VOLUME,
            "secret": {"secretName": secret, "defaultMode": 0o440, "items": settings.ray_items(job)},
        },
        {"name": LINK["name"], "emptyDir": {"sizeLimit": "1Mi"}},
        scratch_volume(TMP["name"], job.spec.feeders.scratch),
    ]


def ray_scratch(name: str) -> Manifest:
    """Builds the scratch volume of Ray's container. It contains only Ray's own files."""
    return scratch_volume(name, ScratchSpec())


def split(asked: Amounts) -> tuple[dict[str, dict[str, str]], dict[str, dict[str, str]]]:
    """Divides the head's resources between Ray's container and the supervisor's. The shares add up to more than the
    head's resources only if the supervisor's memory has to be raised to LEAST_NBYTES."""
    ray: dict[str, dict[str, str]] = {}
    supervisor: dict[str, dict[str, str]] = {}
    for kind, amounts in asked.items():
        ray[kind], supervisor[kind] = {name: str(amount) for name, amount in amounts.items()}, {}
        if (cpu := amounts.get("cpu")) is not None:
            milli = Quantity(str(cpu)).value * 1000
            part = math.ceil(milli / CPU_SHARE)
            ray[kind]["cpu"], supervisor[kind]["cpu"] = f"{math.ceil(milli - part)}m", f"{part}m"
        if (memory := amounts.get("memory")) is not None:
            nbytes = Quantity(str(memory)).nbytes
            part = nbytes // MEMORY_SHARE
            ray[kind]["memory"] = _nbytes(nbytes - part)
            supervisor[kind]["memory"] = _nbytes(max(part, LEAST_NBYTES))
    return ray, {kind: amounts for kind, amounts in supervisor.items() if amounts}


def _nbytes(amount: int) -> str:
    return f"{amount // 1024**2}Mi" if amount % 1024**2 == 0 else str(amount)
