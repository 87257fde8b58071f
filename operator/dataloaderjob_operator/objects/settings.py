"""The operator's own settings, and the job's Secret and ConfigMaps: the settings files that head, feeders and sidecars
read at their start. Pure.

Each role's file is in a ConfigMap that has the digest of the file in its name and never gets another: pods read what
they were started with for as long as they live, whatever becomes of the spec or the operator. Who reads a file may be
of an older version than this operator: keys are only added, and `tests/contract/test_skew.py` has those of each
release.
"""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dataloaderjob.api import DataLoaderJob
from dataloaderjob.api.base import Quantity
from dataloaderjob.api.job import MANAGED_BY
from dataloaderjob.api.pods import PodTemplate
from dataloaderjob.core.sockets import EVERYWHERE
from dataloaderjob_operator import names
from dataloaderjob_operator.kinds import Manifest, digest

KEY_FOLDER = "/etc/dataloaderjob/key"
SETTINGS_FOLDER = "/etc/dataloaderjob/settings"
RUN_FOLDER = "/run/dataloaderjob"
"""Shared by the containers of a trainer pod: the socket, and the user's code and data on their way."""
SOCKET = f"{RUN_FOLDER}/s"
GCS_PORT = 6379
SUPERVISOR_PORT = 6400
METRICS_PORT = 9400
MASTER_PORT = 29500
SCRATCH_SIZE = "10Gi"
TMP = "/tmp"  # noqa: S108  a path in a pod
USER = 65532
"""User of our own images, and group of the pods' files: see `OperatorConfig.fs_group`."""
HOST_PORTS = range(20_000, 28_000, 2)
"""Pairs of ports for trainers that share their node's: below those that Services and connections draw, and not those of
dcgm-exporter (9400) or of any other job's torchrun."""
JOB_KEY = "links"
COUNT_FILE = "feeders"
"""The number of feeders as it is now: the one thing of the head's settings that changes while it runs."""
RAY_TOKEN = "ray"  # noqa: S105  the name of a file
FILES = {names.Role.HEAD: "head.json", names.Role.FEEDER: "feeder.json", names.Role.TRAINER: "sidecar.json"}
"""Settings files by the role of the pods that read them."""


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
    sidecar_pull_secrets: tuple[str, ...] = ()
    """Secrets of the jobs' namespaces with which `sidecar_image` is pulled."""
    metrics_from: tuple[Manifest, ...] = ()
    """Who may collect the sidecars' metrics, as peers of a NetworkPolicy; empty: nobody."""
    fs_group: int | None = USER
    """Group for templates that give none: it makes key and token readable, and trainer and sidecar share the socket,
    whoever they run as. None: namespaces give one, as OpenShift's do."""
    cluster_domain: str = ""
    """Domain of the cluster's names, such as cluster.local; empty: pods add it themselves."""
    managed_by: str = ""
    """Only jobs that name this in `spec.managedBy` are this operator's; empty: those that name none, or MANAGED_BY."""

    def manages(self, named: str | None) -> bool:
        """Checks whether a job is this operator's, by what its `spec.managedBy` names."""
        return named == self.managed_by if self.managed_by else named in (None, MANAGED_BY)


@dataclass(frozen=True, slots=True)
class Ports:
    """Ports of a trainer pod that others have to know."""

    metrics: int
    """The sidecar's."""
    master: int
    """The first rank's, where the others find it."""


def ports(job: DataLoaderJob) -> Ports:
    """The manifest's ports, else the usual ones; on the node's network, a pair made of the job's uid.

    So trainers of several jobs may share a node. Of two pods of one job the scheduler puts only one onto a node there.
    """
    first, second = METRICS_PORT, MASTER_PORT
    if job.spec.trainers.job.template.spec.host_network:
        number = int.from_bytes(hashlib.sha256((job.metadata.uid or "").encode()).digest()[:4])
        first = HOST_PORTS[number % len(HOST_PORTS)]
        second = first + 1
    return Ports(job.spec.sidecar.metrics_port or first, job.spec.trainers.job.master_port or second)


def service_host(job: DataLoaderJob, service: str, setup: OperatorConfig) -> str:
    """The full name of a Service: also a pod without the cluster's search list finds it."""
    domain = f".{setup.cluster_domain}" if setup.cluster_domain else ""
    return f"{service}.{job.metadata.namespace}.svc{domain}"


def cluster_domain(resolv_conf: str) -> str:
    """The cluster's domain as the search list of a pod's resolv.conf has it; empty where it has none."""
    for line in resolv_conf.splitlines():
        if line.split()[:1] == ["search"]:
            for name in line.split()[1:]:
                if name.startswith("svc."):
                    return name.removeprefix("svc.").rstrip(".")
    return ""


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


def config_map(job: DataLoaderJob, setup: OperatorConfig, role: names.Role) -> Manifest:
    """Makes the settings of a role's pods as JSON."""
    data = _files(job, setup, role)
    made = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": names.metadata(job, names.settings_map(job.name, digest(data)), role),
    }
    if role is names.Role.HEAD:
        return {**made, "data": {**data, COUNT_FILE: count(job)}}
    return {**made, "immutable": True, "data": data}


def map_name(job: DataLoaderJob, setup: OperatorConfig, role: names.Role) -> str:
    """The ConfigMap with the settings that pods of a role are to start with."""
    return names.settings_map(job.name, digest(_files(job, setup, role)))


def count(job: DataLoaderJob) -> str:
    """What COUNT_FILE has."""
    return str(job.spec.feeders.count)


def _files(job: DataLoaderJob, setup: OperatorConfig, role: names.Role) -> dict[str, str]:
    made = {names.Role.HEAD: head, names.Role.FEEDER: feeder, names.Role.TRAINER: sidecar}[role]
    return {FILES[role]: _json(made(job, setup))}


def unique(job: DataLoaderJob) -> str:
    """The job's name on its connections."""
    return names.unique(job.metadata.namespace or "", job.name, job.metadata.uid or "")


def sidecar(job: DataLoaderJob, setup: OperatorConfig) -> dict[str, Any]:
    """Fields of `dataloaderjob.core.settings.SidecarSettings`."""
    return {
        "job": unique(job),
        "socket": SOCKET,
        "key_path": f"{KEY_FOLDER}/{JOB_KEY}",
        "blobs": f"{RUN_FOLDER}/blobs",
        "scratch": scratch(job),
        "supervisor_host": service_host(job, names.head_service(job.name), setup),
        "supervisor_port": SUPERVISOR_PORT,
        **dataclasses.asdict(job.spec.loader_settings()),
        "metrics_host": EVERYWHERE,  # probes and Prometheus come from outside the pod
        "metrics_port": ports(job).metrics,
    }


def head(job: DataLoaderJob, setup: OperatorConfig) -> dict[str, Any]:
    """Settings of the head's pod: Ray's own, and those of the supervisor."""
    return {
        "job": unique(job),
        "key_path": f"{KEY_FOLDER}/{JOB_KEY}",
        "token_path": f"{KEY_FOLDER}/{RAY_TOKEN}",
        "host": service_host(job, names.head_service(job.name), setup),
        "gcs_port": GCS_PORT,
        "supervisor_port": SUPERVISOR_PORT,
        "num_feeders": 1,  # where COUNT_FILE is not read; the operator soon says how many
        "count_path": f"{SETTINGS_FOLDER}/{COUNT_FILE}",
        "ray_version": job.spec.ray.managed.version,
        "tuning": tuning(job),
    }


def feeder(job: DataLoaderJob, setup: OperatorConfig) -> dict[str, Any]:
    """Settings with which a feeder's pod joins."""
    return {
        "job": unique(job),
        "token_path": f"{KEY_FOLDER}/{RAY_TOKEN}",
        "head": f"{service_host(job, names.head_service(job.name), setup)}:{GCS_PORT}",
        "processes": job.spec.feeders.processes_per_pod,
        "tuning": tuning(job),
        **tasks(job),
    }


def tasks(job: DataLoaderJob) -> dict[str, Any]:
    """Room for Ray tasks of user code; empty where there is none, as it was before there was any."""
    found = job.spec.ray.managed.room()
    return {"tasks": dataclasses.asdict(found)} if found.cpus else {}


def scratch(job: DataLoaderJob) -> dict[str, int]:
    """Bytes for user code and data in trainer pods, and in those of feeders and head: each field that says how many."""
    found = {}
    parts = {"sidecar": job.spec.sidecar.scratch}
    shared = any(mount.mount_path.rstrip("/") == TMP for mount in job.spec.data.volume_mounts)
    own = shared or _own_tmp(job.spec.feeders.template, "feeder")
    if not (own and _own_tmp(job.spec.ray.managed.head.template, "head")):
        parts["feeders"] = job.spec.feeders.scratch
    for part, spec in parts.items():
        field, size = "size", str(spec.size or SCRATCH_SIZE)
        if spec.volume is not None:
            field, size = "volume", _volume_size(spec.volume)
        with contextlib.suppress(ValueError):
            found[f"spec.{part}.scratch.{field}"] = Quantity(size).nbytes
    return found


def _own_tmp(user: PodTemplate, name: str) -> bool:
    """Checks whether the user's container of this name mounts a volume of his at /tmp."""
    found = (mount for c in user.spec.containers if c.name == name for mount in c.volume_mounts)
    return TMP in {mount.mount_path.rstrip("/") for mount in found}


def _volume_size(volume: Mapping[str, Any]) -> str:
    """What the volume says of its size; empty where it says nothing."""
    claim = _at(volume, "ephemeral", "volumeClaimTemplate", "spec", "resources", "requests", "storage")
    return str(claim or _at(volume, "emptyDir", "sizeLimit") or "")


def _at(thing: Any, *names: str) -> Any:
    for name in names:
        thing = thing.get(name) if isinstance(thing, Mapping) else None
    return thing


def tuning(job: DataLoaderJob) -> dict[str, Any]:
    """Fields of `dataloaderjob.core.settings.RayTuning`."""
    return dataclasses.asdict(job.spec.ray.managed.tuning.settings())


def _json(value: dict[str, Any]) -> str:
    return json.dumps(value, indent=1, sort_keys=True) + "\n"
