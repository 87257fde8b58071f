"""The operator's own settings, and the job's Secret and ConfigMap: the settings files that head, feeders and sidecars
read at their start. Pure.
"""

from __future__ import annotations

import base64
import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dataloaderjob.api import DataLoaderJob
from dataloaderjob_operator import names
from dataloaderjob_operator.kinds import Manifest

KEY_FOLDER = "/etc/dataloaderjob/key"
SETTINGS_FOLDER = "/etc/dataloaderjob/settings"
RUN_FOLDER = "/run/dataloaderjob"
"""Shared by the containers of a trainer pod: the socket, and the user's code and data on their way."""
SOCKET = f"{RUN_FOLDER}/s"
GCS_PORT = 6379
SUPERVISOR_PORT = 6400
METRICS_PORT = 9400
JOB_KEY = "links"
HEAD_FILE = "head.json"
FEEDERS = "num_feeders"
RAY_TOKEN = "ray"  # noqa: S105  the name of a file


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnPod:
    """The operator's pod, as a NetworkPolicy selects it."""

    namespace: str
    labels: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorConfig:
    """Settings of the operator for all jobs."""

    version: str
    """The operator's."""
    sidecar_image: str
    """Image for manifests that name none."""
    root_key: bytes
    """Key from which jobs' keys are derived."""
    operator: OwnPod | None = None
    """None: it is in none of the cluster's pods, and policies let it in nowhere."""


def secret(job: DataLoaderJob, setup: OperatorConfig) -> Manifest:
    """Makes the Secret with both keys of the job."""
    uid = job.metadata.uid or ""
    metadata = names.metadata(job, names.key_secret(job.name, uid))
    values = {
        JOB_KEY: names.job_key(setup.root_key, uid),
        RAY_TOKEN: names.ray_token(setup.root_key, uid).encode(),
    }
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": metadata,
        "type": "Opaque",
        "immutable": True,
        "data": {name: base64.b64encode(value).decode() for name, value in values.items()},
    }


def config_map(job: DataLoaderJob, feeders_at_start: int | None = None) -> Manifest:
    """Makes the settings as JSON, one file for each kind of process."""
    for_head = head(job) | ({} if feeders_at_start is None else {FEEDERS: feeders_at_start})
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": names.metadata(job, names.settings_map(job.name)),
        "data": {
            "sidecar.json": _json(sidecar(job)),
            HEAD_FILE: _json(for_head),
            "feeder.json": _json(feeder(job)),
        },
    }


def feeders_at_start(live: Mapping[str, Any] | None) -> int | None:
    """Reads the number in a live ConfigMap; None if it has none."""
    try:
        found = json.loads((live or {})["data"][HEAD_FILE])[FEEDERS]
    except (KeyError, TypeError, ValueError):
        return None
    return found if type(found) is int and found >= 0 else None


def unique(job: DataLoaderJob) -> str:
    """The job's name on its connections."""
    return names.unique(job.metadata.namespace or "", job.name, job.metadata.uid or "")


def sidecar(job: DataLoaderJob) -> dict[str, Any]:
    """Fields of `dataloaderjob.core.settings.SidecarSettings`."""
    return {
        "job": unique(job),
        "socket": SOCKET,
        "key_path": f"{KEY_FOLDER}/{JOB_KEY}",
        "blobs": f"{RUN_FOLDER}/blobs",
        "supervisor_host": names.head(job.name),
        "supervisor_port": SUPERVISOR_PORT,
        **dataclasses.asdict(job.spec.loader_settings()),
        "metrics_host": "0.0.0.0",  # noqa: S104  probes and Prometheus come from outside the pod
        "metrics_port": METRICS_PORT,
    }


def head(job: DataLoaderJob) -> dict[str, Any]:
    """Settings of the head's pod: Ray's own, and those of the supervisor."""
    return {
        "job": unique(job),
        "key_path": f"{KEY_FOLDER}/{JOB_KEY}",
        "token_path": f"{KEY_FOLDER}/{RAY_TOKEN}",
        "host": names.head(job.name),
        "gcs_port": GCS_PORT,
        "supervisor_port": SUPERVISOR_PORT,
        FEEDERS: job.spec.feeders.count,
        "tuning": dataclasses.asdict(job.spec.ray.tuning.settings()),
    }


def feeder(job: DataLoaderJob) -> dict[str, Any]:
    """Settings with which a feeder's pod joins."""
    return {
        "job": unique(job),
        "token_path": f"{KEY_FOLDER}/{RAY_TOKEN}",
        "head": f"{names.head(job.name)}:{GCS_PORT}",
        "processes": job.spec.feeders.processes_per_pod,
        "tuning": dataclasses.asdict(job.spec.ray.tuning.settings()),
    }


def _json(value: dict[str, Any]) -> str:
    return json.dumps(value, indent=1, sort_keys=True) + "\n"
