"""The workloads of a job: Deployments of head and feeders, which are its Ray cluster, and the trainers' Indexed Job,
whose pods have the sidecar beside the user's containers. Pod specs are the user's template with the operator's
containers, volumes and restrictions put in. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from dataloaderjob.api import DataLoaderJob
from dataloaderjob.api.base import Quantity
from dataloaderjob.api.feeders import CONTAINER
from dataloaderjob.api.trainer import Container, PodTemplate
from dataloaderjob.core.places import SOCKET_VARIABLE
from dataloaderjob_operator import names
from dataloaderjob_operator.kinds import Manifest, digest
from dataloaderjob_operator.objects import settings

HEAD_MODULE = "dataloaderjob.pod.head"
FEEDER_MODULE = "dataloaderjob.pod.feeder"
STARTS = 60
"""Probes of a head that comes up, five seconds apart."""
MASTER_PORT = 29500
SIDECAR = "dataloaderjob-sidecar"
INDEX = {"fieldRef": {"fieldPath": "metadata.annotations['batch.kubernetes.io/job-completion-index']"}}
BY_INDEX = ("PET_NODE_RANK", "RANK")
_RUN = {"name": "dataloaderjob-run", "mountPath": settings.RUN_FOLDER}
SHM_SIZE = "256Mi"
"""Ray's object store, of which the data path uses nothing, and torch's own."""
TMP_SIZE = "10Gi"
"""Ray's sockets and logs, and the arrays of the dataset."""
FS_GROUP = 65532
"""Group for templates that give none: it makes key and token readable, and trainer and sidecar share the socket,
whoever they run as."""
INHERITED = ("imagePullSecrets", "securityContext")
"""Fields of the trainers' pods that head and feeders take over: by default they run the trainers' image."""
RESTRICTED = {
    "allowPrivilegeEscalation": False,
    "capabilities": {"drop": ["ALL"]},
    "readOnlyRootFilesystem": True,
    "seccompProfile": {"type": "RuntimeDefault"},
}
LAST_WORDS = {"terminationMessagePolicy": "FallbackToLogsOnError"}
"""Puts what a container printed last into its status, and from there into the job's conditions."""
_OWNED = ("containers", "initContainers", "volumes", "restartPolicy")
SCRATCH_VOLUMES = (
    {"name": "dataloaderjob-tmp", "emptyDir": {"sizeLimit": TMP_SIZE}},
    {"name": "dataloaderjob-shm", "emptyDir": {"medium": "Memory", "sizeLimit": SHM_SIZE}},
)
"""Volumes of what Ray writes, /tmp and /dev/shm, of a size."""
SCRATCH_MOUNTS = (
    {"name": "dataloaderjob-tmp", "mountPath": "/tmp"},  # noqa: S108  a volume of the pod's own
    {"name": "dataloaderjob-shm", "mountPath": "/dev/shm"},  # noqa: S108
)
MOUNTS = (
    {"name": "dataloaderjob-key", "mountPath": settings.KEY_FOLDER, "readOnly": True},
    {"name": "dataloaderjob-settings", "mountPath": settings.SETTINGS_FOLDER, "readOnly": True},
)


def head(job: DataLoaderJob, setup: settings.OperatorConfig) -> Manifest:
    """One pod, replaced and never doubled: two heads would place feeders twice."""
    user = job.spec.feeders.template
    container = ray_container(
        job, names.Role.HEAD, HEAD_MODULE, "head.json", resources(job.spec.ray.head_resources)
    )
    probe = {"tcpSocket": {"port": "supervisor"}, "periodSeconds": 5}
    container |= {
        "ports": [
            {"name": "gcs", "containerPort": settings.GCS_PORT},
            {"name": "supervisor", "containerPort": settings.SUPERVISOR_PORT},
        ],
        "startupProbe": {**probe, "failureThreshold": STARTS},
        "readinessProbe": {**probe, "failureThreshold": 3},
    }
    spec = {
        **shared_fields(job, user),
        "containers": [container],
        "volumes": [*volumes(job), *SCRATCH_VOLUMES],
    }
    spec.pop("hostNetwork", None)  # the operator reaches it by a policy, which knows pods by their labels
    asked = [user_part(job, user), resources(job.spec.ray.head_resources), settings.head(job)["tuning"]]
    return _deployment(job, setup, names.Role.HEAD, spec, asked, replicas=1, strategy={"type": "Recreate"})


def feeders(job: DataLoaderJob, setup: settings.OperatorConfig) -> Manifest:
    """`replicas` pods that are all alike: one that goes is replaced by any other."""
    spec = job.spec.feeders
    theirs = next((c for c in spec.template.spec.containers if c.name == CONTAINER), None)
    container = add(
        ray_container(job, names.Role.FEEDER, FEEDER_MODULE, "feeder.json", resources(spec.resources)),
        {} if theirs is None else plain(theirs),
    )
    user = plain(spec.template).get("spec", {})
    pod = {
        **shared_fields(job, spec.template),
        "containers": [container, *(c for c in user.get("containers", []) if c["name"] != CONTAINER)],
        "volumes": [*volumes(job), *SCRATCH_VOLUMES, *user.get("volumes", [])],
    }
    if "initContainers" in user:
        pod["initContainers"] = user["initContainers"]
    asked = [
        user_part(job, spec.template), resources(spec.resources), settings.feeder(job)["tuning"],
        spec.processes_per_pod,
    ]  # fmt: skip
    rolling = {"type": "RollingUpdate", "rollingUpdate": {"maxUnavailable": "25%", "maxSurge": "25%"}}
    return _deployment(job, setup, names.Role.FEEDER, pod, asked, replicas=spec.replicas, strategy=rolling)


def _deployment(
    job: DataLoaderJob, setup: settings.OperatorConfig, role: names.Role, pod: Manifest, asked: Any,
    *, replicas: int, strategy: Manifest,
) -> Manifest:  # fmt: skip
    name = names.head(job.name) if role is names.Role.HEAD else names.feeders(job.name)
    user = job.spec.feeders.template
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": names.metadata(job, name, role),
        "spec": {
            "replicas": replicas,
            "revisionHistoryLimit": 2,
            "selector": {"matchLabels": names.labels(job.name, role)},
            "strategy": strategy,
            "template": template(job, role, user, pod, asked=asked, version=setup.version),
        },
    }


def trainers(job: DataLoaderJob, setup: settings.OperatorConfig, attempt: int) -> Manifest:
    """Makes all replicas, started together. One that fails ends them all: the operator starts them anew, or not."""
    name = names.trainers(job.name, attempt)
    user = job.spec.trainer.template
    metadata = names.metadata(job, name, names.Role.TRAINER)
    pod = template(
        job, names.Role.TRAINER, user, _pod(job, setup, name), asked=plain(user), version=setup.version
    )  # fmt: skip
    for labelled in (metadata, pod["metadata"]):
        labelled["labels"][names.LABEL_ATTEMPT] = str(attempt)
    replicas = job.spec.trainer.replicas
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": metadata,
        "spec": {
            "completionMode": "Indexed",
            "completions": replicas,
            "parallelism": replicas,
            "backoffLimit": 0,
            "template": pod,
        },
    }


def _pod(job: DataLoaderJob, setup: settings.OperatorConfig, name: str) -> Manifest:
    user = plain(job.spec.trainer.template)["spec"]
    trainer, *others = user["containers"]
    return {
        **shared_fields(job, job.spec.trainer.template),
        "subdomain": names.trainers_service(job.name),
        "restartPolicy": "Never",
        "initContainers": [sidecar(job, setup), *user.get("initContainers", [])],
        "containers": [_trainer(job, trainer, name), *others],
        "volumes": [
            *volumes(job),
            {"name": "dataloaderjob-run", "emptyDir": {"sizeLimit": TMP_SIZE}},
            *user.get("volumes", []),
        ],
    }


def _trainer(job: DataLoaderJob, theirs: dict[str, Any], name: str) -> Manifest:
    """The user's container with the launch's variables before his own, which may refer to them."""
    namespace = job.metadata.namespace
    master = f"{name}-0.{names.trainers_service(job.name)}.{namespace}"
    launch = job.spec.trainer.launch_environment(replica=0, master_addr=master, master_port=MASTER_PORT)
    ours = [
        {"name": variable, "valueFrom": INDEX} if variable in BY_INDEX else {"name": variable, "value": value}
        for variable, value in launch.items()
    ]
    ours += _environment({SOCKET_VARIABLE: settings.SOCKET, **job.spec.loader_environment()})
    return {
        **LAST_WORDS,
        **theirs,
        "env": _joined(ours, theirs.get("env", [])),
        "volumeMounts": [_RUN, *theirs.get("volumeMounts", [])],
    }


def sidecar(job: DataLoaderJob, setup: settings.OperatorConfig) -> Manifest:
    """First of the init containers, so that the others may read batches too; it outlives none of the trainers."""
    spec = job.spec.sidecar
    return {
        "name": SIDECAR,
        "image": spec.image or setup.sidecar_image,
        "restartPolicy": "Always",
        "command": ["python", "-m", "dataloaderjob.sidecar"],
        "args": ["--settings", f"{settings.SETTINGS_FOLDER}/sidecar.json"],
        "ports": [{"name": "metrics", "containerPort": settings.METRICS_PORT}],
        "resources": _resources(job),
        "securityContext": {**RESTRICTED, "runAsNonRoot": True},
        "startupProbe": {
            "httpGet": {"path": "/healthz", "port": "metrics"}, "periodSeconds": 1, "failureThreshold": 120,
        },
        "volumeMounts": [*MOUNTS, _RUN],
        **LAST_WORDS,
    }  # fmt: skip


def _resources(job: DataLoaderJob) -> dict[str, Any]:
    """Requests and limits of the sidecar. Memory left out is what pools and sidecar need: memfds count as its own."""
    spec = job.spec.sidecar
    made = resources(spec.resources)
    overhead = spec.overhead_nbytes(job.spec.trainer.processes_per_replica)
    memory = str(spec.shared_memory.nbytes + overhead)
    limits = {"memory": memory, **made.get("limits", {})}
    requests = {"memory": limits["memory"], **made.get("requests", {})}
    if _guaranteed(plain(job.spec.trainer.template)["spec"]):
        requests |= limits
        limits |= requests
    return {"requests": requests, "limits": limits}


def _guaranteed(user: Mapping[str, Any]) -> bool:
    """Checks whether a pod of the user's containers alone has Kubernetes' quality of service of that name: the sidecar
    shall not take it away."""
    for container in (*user["containers"], *user.get("initContainers", ())):
        asked = container.get("resources") or {}
        limits = asked.get("limits") or {}
        requests = {**limits, **(asked.get("requests") or {})}
        if not all(
            name in limits and Quantity(str(limits[name])) == Quantity(str(requests[name]))
            for name in ("cpu", "memory")
        ):
            return False
    return True


def plain(model: PodTemplate | Container) -> dict[str, Any]:
    """Dumps a model as the user wrote it."""
    return model.model_dump(mode="json", by_alias=True, exclude_unset=True)


def image(job: DataLoaderJob) -> str:
    """The image of head and feeders."""
    return job.spec.feeders.image or job.spec.trainer.container.image or ""


def template(
    job: DataLoaderJob, role: names.Role, user: PodTemplate, spec: Manifest, *, asked: Any, version: str
) -> Manifest:
    """Makes a pod template. `asked`: all that the user decides about it, whose change replaces the pods."""
    annotations = {
        **user.metadata.annotations,
        names.ANNOTATION_TEMPLATE: digest(asked),
        names.ANNOTATION_MADE_BY: version,
    }
    labels = {**user.metadata.labels, **names.child_labels(job, role)}
    return {"metadata": {"labels": labels, "annotations": annotations}, "spec": spec}


def shared_fields(job: DataLoaderJob, user: PodTemplate) -> dict[str, Any]:
    """The pod's own fields: the user's, what head and feeders take from the trainers, no token of the cluster."""
    found = {name: value for name, value in plain(user).get("spec", {}).items() if name not in _OWNED}
    found = {**_inherited(job), **found}
    found["securityContext"] = {"fsGroup": FS_GROUP, **found.get("securityContext", {})}
    found.setdefault("automountServiceAccountToken", False)
    found["enableServiceLinks"] = False
    return found


def user_part(job: DataLoaderJob, user: PodTemplate) -> list[Any]:
    """The user's part of the pods of head or feeders, as written: a later operator finds the same."""
    return [image(job), plain(user), _inherited(job)]


def _inherited(job: DataLoaderJob) -> dict[str, Any]:
    trainer = plain(job.spec.trainer.template)["spec"]
    return {name: trainer[name] for name in INHERITED if name in trainer}


def volumes(job: DataLoaderJob) -> list[Manifest]:
    """Key and settings, for every pod of the job."""
    return [
        {
            "name": "dataloaderjob-key",
            "secret": {
                "secretName": names.key_secret(job.name, job.metadata.uid or ""),
                "defaultMode": 0o440,
            },
        },
        {"name": "dataloaderjob-settings", "configMap": {"name": names.settings_map(job.name)}},
    ]


def ray_container(
    job: DataLoaderJob, role: names.Role, module: str, file: str, resources: Mapping[str, Any]
) -> Manifest:
    """The container of a Ray node of the job: head or feeders."""
    return {
        "name": role.value,
        "image": image(job),
        "command": ["python", "-m", module, "--settings", f"{settings.SETTINGS_FOLDER}/{file}"],
        "env": [
            {"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
            *_environment({"HOME": "/tmp", "PYTHONUNBUFFERED": "1"}),  # noqa: S108  as above
        ],
        "resources": dict(resources),
        "securityContext": dict(RESTRICTED),
        "volumeMounts": [*MOUNTS, *SCRATCH_MOUNTS],
        **LAST_WORDS,
    }


def add(container: Manifest, theirs: Mapping[str, Any]) -> Manifest:
    """A container of the operator's with what the user's of the same name adds to it."""
    made = {**container, **{k: v for k, v in theirs.items() if k not in container}}
    for field in ("env", "volumeMounts"):
        key = "name" if field == "env" else "mountPath"
        made[field] = _joined(container.get(field, []), theirs.get(field, []), key)
    if "securityContext" in theirs:
        made["securityContext"] = {**container.get("securityContext", {}), **theirs["securityContext"]}
    return made


def resources(model: Any) -> dict[str, Any]:
    """Requests and limits of a spec, without those that are empty."""
    dumped = model.model_dump(mode="json", by_alias=True)
    return {kind: values for kind, values in dumped.items() if values}


def _joined(ours: Iterable[Manifest], theirs: Iterable[Manifest], key: str = "name") -> list[Manifest]:
    """Joins things with keys, such as variables and volumes: ours first, then theirs whose keys are not ours."""
    found = {item[key]: item for item in ours}
    return [*found.values(), *(item for item in theirs if item[key] not in found)]


def _environment(variables: Mapping[str, str]) -> list[Manifest]:
    return [{"name": name, "value": value} for name, value in variables.items()]
