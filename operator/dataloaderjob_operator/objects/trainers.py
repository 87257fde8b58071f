"""The trainers: an Indexed Job whose pods have the sidecar beside the user's containers. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dataloaderjob.api import DataLoaderJob
from dataloaderjob.api.base import Quantity
from dataloaderjob.core.settings import SOCKET_VARIABLE
from dataloaderjob_operator import names
from dataloaderjob_operator.objects import meta, pods, settings

MASTER_PORT = 29500
SIDECAR = "dataloaderjob-sidecar"
INDEX = {"fieldRef": {"fieldPath": "metadata.annotations['batch.kubernetes.io/job-completion-index']"}}
BY_INDEX = ("PET_NODE_RANK", "RANK")
_RUN = {"name": "dataloaderjob-run", "mountPath": settings.RUN_FOLDER}


def trainers(job: DataLoaderJob, setup: meta.OperatorConfig, attempt: int) -> meta.Manifest:
    """All replicas, started together. One that fails ends them all: the operator starts them anew, or not."""
    name = names.trainers(job.name, attempt)
    template = job.spec.trainer.template
    metadata = meta.metadata(job, name, names.Role.TRAINER)
    pod = pods.template(
        job, names.Role.TRAINER, template, _pod(job, setup, name), asked=pods.plain(template), version=setup.version
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


def _pod(job: DataLoaderJob, setup: meta.OperatorConfig, name: str) -> meta.Manifest:
    user = pods.plain(job.spec.trainer.template)["spec"]
    trainer, *others = user["containers"]
    return {
        **pods.shared_fields(job, job.spec.trainer.template),
        "subdomain": names.trainers_service(job.name),
        "restartPolicy": "Never",
        "initContainers": [sidecar(job, setup), *user.get("initContainers", [])],
        "containers": [_trainer(job, trainer, name), *others],
        "volumes": [
            *pods.volumes(job),
            {"name": "dataloaderjob-run", "emptyDir": {"sizeLimit": pods.TMP_SIZE}},
            *user.get("volumes", []),
        ],
    }


def _trainer(job: DataLoaderJob, theirs: dict[str, Any], name: str) -> meta.Manifest:
    """The user's container with the launch's variables before his own, which may refer to them."""
    namespace = job.metadata.namespace
    master = f"{name}-0.{names.trainers_service(job.name)}.{namespace}"
    launch = job.spec.trainer.launch_environment(replica=0, master_addr=master, master_port=MASTER_PORT)
    ours = [
        {"name": variable, "valueFrom": INDEX} if variable in BY_INDEX else {"name": variable, "value": value}
        for variable, value in launch.items()
    ]
    ours += meta.environment({SOCKET_VARIABLE: settings.SOCKET, **job.spec.loader_environment()})
    return {
        **pods.LAST_WORDS,
        **theirs,
        "env": meta.by_name(ours, theirs.get("env", [])),
        "volumeMounts": [_RUN, *theirs.get("volumeMounts", [])],
    }


def sidecar(job: DataLoaderJob, setup: meta.OperatorConfig) -> meta.Manifest:
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
        "securityContext": {**pods.RESTRICTED, "runAsNonRoot": True},
        "startupProbe": {
            "httpGet": {"path": "/healthz", "port": "metrics"}, "periodSeconds": 1, "failureThreshold": 120,
        },
        "volumeMounts": [*pods.MOUNTS, _RUN],
        **pods.LAST_WORDS,
    }  # fmt: skip


def _resources(job: DataLoaderJob) -> dict[str, Any]:
    """As asked for; memory left out is what the pools and the sidecar itself need: memfds count as its own."""
    spec = job.spec.sidecar
    made = pods.resources(spec.resources)
    overhead = spec.overhead_nbytes(job.spec.trainer.processes_per_replica)
    memory = str(spec.shared_memory.nbytes + overhead)
    limits = {"memory": memory, **made.get("limits", {})}
    requests = {"memory": limits["memory"], **made.get("requests", {})}
    if _guaranteed(pods.plain(job.spec.trainer.template)["spec"]):
        requests |= limits
        limits |= requests
    return {"requests": requests, "limits": limits}


def _guaranteed(user: Mapping[str, Any]) -> bool:
    """Whether a pod of the user's containers alone has Kubernetes' quality of service of that name: the sidecar shall
    not take it away."""
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
