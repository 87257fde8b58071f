"""The operator's own settings, and the job's Secret and ConfigMaps. These hold the settings files that the head, the
feeders and the sidecars read when they start. Pure.

Each role's file is in a ConfigMap whose name contains the file's digest, so the file never changes. A pod therefore
reads the same settings throughout its life, even if the spec or the operator changes. Attached pods are the exception:
their Secret and their ConfigMap are named after the job alone.

The process that reads a file may be older than this operator. A release may therefore add keys, but never remove them.
`tests/contract/test_skew.py` lists the keys of each release.
"""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from dataloaderjob.api import DataLoaderJob
from dataloaderjob.api.base import Quantity
from dataloaderjob.api.environment import feeder_env
from dataloaderjob.api.job import MANAGED_BY
from dataloaderjob.api.ray import ExternalRaySpec
from dataloaderjob.api.sidecar import KEY_FOLDER as KEY_FOLDER
from dataloaderjob.api.sidecar import METRICS_PORT as METRICS_PORT
from dataloaderjob.api.sidecar import RUN_FOLDER as RUN_FOLDER
from dataloaderjob.api.sidecar import SCRATCH_SIZE as SCRATCH_SIZE
from dataloaderjob.api.sidecar import SETTINGS_FILE, TLS_FOLDER
from dataloaderjob.api.sidecar import SETTINGS_FOLDER as SETTINGS_FOLDER
from dataloaderjob.api.sidecar import SOCKET as SOCKET
from dataloaderjob.api.sidecar import USER as USER
from dataloaderjob.core import keys
from dataloaderjob.core.generations import PERIOD, Schedule
from dataloaderjob.core.keys import Holder
from dataloaderjob.core.sockets import EVERYWHERE
from dataloaderjob_operator import names
from dataloaderjob_operator.kinds import Manifest, digest

GCS_PORT = 6379
SUPERVISOR_PORT = 6400
RAYLET_PORT = 6401
"""Port of the raylet in the supervisor's pod. It is used on an existing Ray cluster."""
MASTER_PORT = 29500
HOST_PORTS = range(20_000, 28_000, 2)
"""First ports of the port pairs for trainers on the host network. They are below the ranges for Services and outgoing
connections. They avoid dcgm-exporter's port (9400) and the ports of other jobs' torchrun."""
JOB_KEY = "links"
"""Name of the file with the key of a pod's role. In the job's Secret, this field holds the job's own key."""
COUNT_FILE = "feeders"
"""File with the current number of feeders. Only this setting of the head changes while the head runs."""
RAY_TOKEN = "ray"  # noqa: S105  the name of a file
TOKEN_FOLDER = "/etc/dataloaderjob/ray"  # noqa: S105  a path in a pod
"""Folder with the token of an existing Ray cluster."""
FILES = {names.Role.HEAD: "head.json", names.Role.FEEDER: "feeder.json", names.Role.TRAINER: SETTINGS_FILE}
"""Settings files by the role of the pods that read them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnPod:
    """The operator's pod, as a NetworkPolicy selects it."""

    namespace: str
    labels: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorConfig:
    """The operator's settings for all jobs."""

    version: str
    """The operator's version."""
    sidecar_image: str
    """Sidecar image for manifests that name none."""
    root_key: bytes
    """Key from which jobs' keys are derived."""
    previous_root: bytes | None = None
    """The root key before the current one. Live pods with keys derived from it keep those keys."""
    operator: OwnPod | None = None
    """The operator's own pod. None if the operator does not run in a pod of the cluster; then no policy admits it."""
    sidecar_pull_secrets: tuple[str, ...] = ()
    """Pull secrets for `sidecar_image` in the jobs' namespaces."""
    metrics_from: tuple[Manifest, ...] = ()
    """NetworkPolicy peers that may collect the sidecars' metrics; if empty, none may."""
    fs_group: int | None = USER
    """Group for templates that do not set one. It can read the key and the token, and lets the trainer and the sidecar
    share the socket whichever users they run as. None if namespaces set a group, as on OpenShift."""
    cluster_domain: str = ""
    """DNS domain of the cluster, such as cluster.local; if empty, pods add it themselves."""
    tls_period: timedelta = PERIOD
    """Interval after which a job's certificates are replaced."""
    managed_by: str = ""
    """The operator manages only jobs with this `spec.managedBy`. If it is empty, the operator manages jobs that set
    none, or MANAGED_BY."""

    def manages(self, named: str | None) -> bool:
        """Returns True if this operator manages a job with this `spec.managedBy`."""
        return named == self.managed_by if self.managed_by else named in (None, MANAGED_BY)


@dataclass(frozen=True, slots=True)
class Ports:
    """Ports of a trainer pod that other pods or tools need."""

    metrics: int
    """The sidecar's metrics port."""
    master: int
    """The first rank's port, to which the other ranks connect."""


def ports(job: DataLoaderJob) -> Ports:
    """Returns the ports that the manifest sets, or the defaults. On the host network, the default is a pair derived
    from the job's uid, so that trainers of several jobs can share a node. Two pods of one job are never on the same
    node."""
    first, second = METRICS_PORT, MASTER_PORT
    if job.spec.trainers.template.spec.host_network:
        number = int.from_bytes(hashlib.sha256((job.metadata.uid or "").encode()).digest()[:4])
        first = HOST_PORTS[number % len(HOST_PORTS)]
        second = first + 1
    own = job.spec.trainers.job
    return Ports(job.spec.sidecar.metrics_port or first, (own.master_port if own else None) or second)


def service_host(job: DataLoaderJob, service: str, setup: OperatorConfig) -> str:
    """Returns the full name of a Service. It resolves even in a pod without the cluster's DNS search list."""
    domain = f".{setup.cluster_domain}" if setup.cluster_domain else ""
    return f"{service}.{job.metadata.namespace}.svc{domain}"


def cluster_domain(resolv_conf: str) -> str:
    """Returns the cluster's domain from the search list in a resolv.conf; empty if the list does not contain it."""
    for line in resolv_conf.splitlines():
        if line.split()[:1] == ["search"]:
            for name in line.split()[1:]:
                if name.startswith("svc."):
                    return name.removeprefix("svc.").rstrip(".")
    return ""


def secret(job: DataLoaderJob, setup: OperatorConfig) -> Manifest:
    """Builds the Secret with all of the job's keys. Pods of a role get only the keys that `key_items` selects."""
    uid = job.metadata.uid or ""
    key = names.job_key(setup.root_key, uid)
    values = {
        JOB_KEY: key,
        **{holder.value: keys.derive(key, holder) for holder in (Holder.FEEDER, Holder.SIDECAR)},
        RAY_TOKEN: names.ray_token(setup.root_key, uid).encode(),
    }
    return {
        **secret_of_values(job, names.key_secret(job.name, uid, setup.root_key), values),
        "immutable": True,
    }


def attach_secret(job: DataLoaderJob, setup: OperatorConfig) -> Manifest:
    """Builds the Secret for sidecars in attached pods. It contains only the sidecars' own key. It is not immutable:
    otherwise, the kubelet would not update the mount when this Secret replaces the Secret of an earlier job of the same
    name."""
    key = names.job_key(setup.root_key, job.metadata.uid or "")
    return secret_of_values(job, names.attachment(job.name), {JOB_KEY: keys.derive(key, Holder.SIDECAR)})


def secret_of_values(job: DataLoaderJob, name: str, values: Mapping[str, bytes]) -> Manifest:
    """Builds a Secret that the job owns."""
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": names.metadata(job, name),
        "type": "Opaque",
        "data": {name: base64.b64encode(value).decode() for name, value in values.items()},
    }


def attach_map(job: DataLoaderJob, setup: OperatorConfig, ended: str) -> Manifest:
    """Builds the ConfigMap with the settings of sidecars in attached pods. A sidecar reads the current settings each
    time that it starts. `ended`: the reason why the job has ended; empty if it has not."""
    made = {**sidecar(job, setup), **({"ended": ended} if ended else {})}
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": names.metadata(job, names.attachment(job.name)),
        "data": {FILES[names.Role.TRAINER]: _json(made)},
    }


def with_root_of(setup: OperatorConfig, job: str, uid: str, secret: str | None) -> OperatorConfig:
    """Returns the operator's settings with the root key from which the name of this Secret is derived. Returns them
    unchanged if the name is derived from neither root key, for instance for a job from an earlier release."""
    previous = setup.previous_root
    if previous is None or secret is None or secret != names.key_secret(job, uid, previous):
        return setup
    return dataclasses.replace(setup, root_key=previous, previous_root=None)


def key_items(role: names.Role) -> list[Manifest]:
    """Selects the keys that a role's pods get. The role's own key is at the same path in the pods of every role."""
    own, more = {
        names.Role.HEAD: (JOB_KEY, []),
        names.Role.FEEDER: (Holder.FEEDER.value, [RAY_TOKEN]),
        names.Role.TRAINER: (Holder.SIDECAR.value, []),
    }[role]
    return [{"key": own, "path": JOB_KEY}, *({"key": name, "path": name} for name in more)]


def ray_items(job: DataLoaderJob) -> list[Manifest]:
    """Selects the only part of the Secret that Ray's container in the head's pod gets. This is the token of the job's
    own Ray cluster. On an existing cluster, it is the feeders' key, which actors get as an argument."""
    name = RAY_TOKEN if job.spec.ray.external is None else Holder.FEEDER.value
    return [{"key": name, "path": name}]


def config_map(job: DataLoaderJob, setup: OperatorConfig, role: names.Role) -> Manifest:
    """Builds the ConfigMap with the settings of a role's pods as JSON."""
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
    """Returns the name of the ConfigMap with the settings of a role's new pods."""
    return names.settings_map(job.name, digest(_files(job, setup, role)))


def count(job: DataLoaderJob) -> str:
    """Returns the content of COUNT_FILE."""
    return str(job.spec.feeders.count)


def _files(job: DataLoaderJob, setup: OperatorConfig, role: names.Role) -> dict[str, str]:
    made = {names.Role.HEAD: head, names.Role.FEEDER: feeder, names.Role.TRAINER: sidecar}[role]
    return {FILES[role]: _json(made(job, setup))}


def unique(job: DataLoaderJob) -> str:
    """Returns the name that identifies the job on its connections."""
    return names.unique(job.metadata.namespace or "", job.name, job.metadata.uid or "")


def sidecar(job: DataLoaderJob, setup: OperatorConfig) -> dict[str, Any]:
    """Builds the fields of `dataloaderjob.core.settings.SidecarSettings`."""
    return {
        "job": unique(job),
        "socket": SOCKET,
        "key_path": f"{KEY_FOLDER}/{JOB_KEY}",
        "blobs": f"{RUN_FOLDER}/blobs",
        "scratch": scratch(job),
        "supervisor_host": service_host(job, names.head_service(job.name), setup),
        "supervisor_port": SUPERVISOR_PORT,
        **dataclasses.asdict(job.spec.loader_settings()),
        **({"anyone": True} if job.spec.trainers.attached else {}),
        **tls(job),
        "metrics_host": EVERYWHERE,  # probes and Prometheus come from outside the pod
        "metrics_port": ports(job).metrics,
    }


def head(job: DataLoaderJob, setup: OperatorConfig) -> dict[str, Any]:
    """Builds the settings of the head's pod: those of Ray and of the supervisor."""
    ray = job.spec.ray.external
    return {
        "job": unique(job),
        "key_path": f"{KEY_FOLDER}/{JOB_KEY}",
        "token_path": f"{KEY_FOLDER}/{RAY_TOKEN}",
        "host": service_host(job, names.head_service(job.name), setup),
        "gcs_port": GCS_PORT,
        "supervisor_port": SUPERVISOR_PORT,
        "num_feeders": 1,  # a required field; the pod reads COUNT_FILE instead
        "count_path": f"{SETTINGS_FOLDER}/{COUNT_FILE}",
        "ray_version": job.spec.ray.own.version,
        "tuning": tuning(job),
        **tls(job),
        **({} if ray is None else on_external_ray(job, ray)),
    }


def tls(job: DataLoaderJob) -> dict[str, Any]:
    """Returns the setting for the folder with a pod's certificates; empty if the job does not use TLS, as in releases
    without TLS."""
    return {"tls_folder": TLS_FOLDER} if job.spec.loader.tls else {}


def schedule(job: DataLoaderJob, setup: OperatorConfig) -> Schedule | None:
    """Returns the schedule of a job's generations of certificates; None if the job does not use TLS. Raises ValueError
    for a job that is not on a cluster."""
    if not job.spec.loader.tls:
        return None
    created = job.metadata.creation_timestamp
    if created is None:
        raise ValueError(f"job {job.name} has no creationTimestamp, because it is not on a cluster")
    return Schedule(datetime.fromisoformat(created), setup.tls_period)


def on_external_ray(job: DataLoaderJob, ray: ExternalRaySpec) -> dict[str, Any]:
    """Builds the settings of the head's pod that exist only for an existing Ray cluster."""
    return {
        "token_path": None if ray.token_secret_ref is None else f"{TOKEN_FOLDER}/{RAY_TOKEN}",
        "feeder_key_path": f"{KEY_FOLDER}/{Holder.FEEDER.value}",
        "external": {
            "address": ray.address or "",
            "feeder_resources": job.spec.feeders.ray_resources(),
            "feeder_env": feeder_env(job.spec, {}),
            "raylet_port": RAYLET_PORT,
        },
    }


def feeder(job: DataLoaderJob, setup: OperatorConfig) -> dict[str, Any]:
    """Builds the settings of a feeder's pod, with which it joins Ray."""
    return {
        "job": unique(job),
        "token_path": f"{KEY_FOLDER}/{RAY_TOKEN}",
        "head": f"{service_host(job, names.head_service(job.name), setup)}:{GCS_PORT}",
        "processes": job.spec.feeders.processes_per_pod,
        "tuning": tuning(job),
        **tasks(job),
    }


def tasks(job: DataLoaderJob) -> dict[str, Any]:
    """Returns the settings for Ray tasks of user code; empty if the manifest leaves no room for tasks, as in releases
    without tasks."""
    found = job.spec.ray.own.room()
    return {"tasks": dataclasses.asdict(found)} if found.cpus else {}


def scratch(job: DataLoaderJob) -> dict[str, int]:
    """Returns the scratch space of the job's pods in bytes, by the manifest field that sets it."""
    found = {}
    parts = {"sidecar": job.spec.sidecar.scratch, "feeders": job.spec.feeders.scratch}
    for part, spec in parts.items():
        field, size = "size", str(spec.size or SCRATCH_SIZE)
        if spec.volume is not None:
            field, size = "volume", _volume_size(spec.volume)
        with contextlib.suppress(ValueError):
            found[f"spec.{part}.scratch.{field}"] = Quantity(size).nbytes
    return found


def _volume_size(volume: Mapping[str, Any]) -> str:
    """Returns the size that a volume sets; empty if it sets none."""
    claim = _at(volume, "ephemeral", "volumeClaimTemplate", "spec", "resources", "requests", "storage")
    return str(claim or _at(volume, "emptyDir", "sizeLimit") or "")


def _at(thing: Any, *names: str) -> Any:
    for name in names:
        thing = thing.get(name) if isinstance(thing, Mapping) else None
    return thing


def tuning(job: DataLoaderJob) -> dict[str, Any]:
    """Builds the fields of `dataloaderjob.core.settings.RayTuning`."""
    return dataclasses.asdict(job.spec.ray.own.tuning.settings())


def _json(value: dict[str, Any]) -> str:
    return json.dumps(value, indent=1, sort_keys=True) + "\n"
