"""The workloads of a job: the Deployments of the head and the feeders, and the trainers' Indexed Job. The head and the
feeders form the job's Ray cluster. Each trainer pod runs the sidecar next to the user's containers. Pure."""

from __future__ import annotations

from typing import Any

from dataloaderjob.api import DataLoaderJob
from dataloaderjob.api.plain import plain, resources
from dataloaderjob.api.sidecar import LAST_WORDS, RUN, scratch_volume, sidecar_container, sidecar_plan
from dataloaderjob.core.places import SOCKET_VARIABLE
from dataloaderjob.core.settings import NODE_FOLDER, NODE_READY, TEMP_DIR
from dataloaderjob_operator import names
from dataloaderjob_operator.kinds import Manifest
from dataloaderjob_operator.objects import settings, supervisor
from dataloaderjob_operator.objects.pods import (
    SHM,
    environment,
    image,
    inherited,
    joined,
    mounts,
    ray_container,
    ray_pod,
    shared_fields,
    template,
    volumes,
    with_data,
)

HEAD_MODULE = "dataloaderjob.pod.head"
FEEDER_MODULE = "dataloaderjob.pod.feeder"
STARTS = 60
"""Number of failed startup probes, five seconds apart, after which the head is restarted."""
_NODE = f"{TEMP_DIR}/{NODE_FOLDER}"
READINESS: Manifest = {
    # Earlier images do not create this file. They are ready once the socket for the feeders' output exists.
    "exec": {"command": ["test", "-e", f"{_NODE}/{NODE_READY}", "-o", "-S", f"{_NODE}/output"]},
    "initialDelaySeconds": 2,  # before that, the file may be a previous container's
    "periodSeconds": 2,
    "timeoutSeconds": 5,
    "failureThreshold": 1,
}
PROGRESS_S = 900
"""Seconds after which a new feeder pod that is still not ready is reported. Images may be large, and the head may start
late."""
INDEX = {"fieldRef": {"fieldPath": "metadata.annotations['batch.kubernetes.io/job-completion-index']"}}
BY_INDEX = ("PET_NODE_RANK", "RANK")


def head(job: DataLoaderJob, setup: settings.OperatorConfig) -> Manifest:
    """Builds the head's Deployment. Its pod runs Ray in one container and the supervisor in another. The pod is
    replaced but never duplicated, because two heads would place feeders twice. A replacement restarts all feeders, so a
    new image alone does not replace the pod."""
    spec = job.spec.ray.head
    of_ray, _ = supervisor.split(resources(spec.resources))
    container = ray_container(job, names.Role.HEAD, HEAD_MODULE, "head.json", of_ray)
    container |= {
        "ports": [{"name": "gcs", "containerPort": settings.GCS_PORT}],
        **head_probes("gcs"),
    }
    taken = inherited(job.spec.feeders.template, job.spec.trainers.template)
    pod = ray_pod(setup, job, container, spec.template, taken)
    asked = [
        plain(spec.template), taken, resources(spec.resources), settings.tuning(job),
        plain(job.spec.feeders.scratch), job.spec.ray.own.version,
    ]  # fmt: skip
    made = template(job, names.Role.HEAD, spec.template, pod, asked=asked, version=setup.version)
    metadata = names.metadata(job, names.head(job.name), names.Role.HEAD, spec.metadata)
    return deployment(metadata, made, replicas=1, strategy={"type": "Recreate"})


def head_probes(port: str) -> dict[str, Any]:
    """Builds the probes of a container of the head's pod. `port`: the name of the container's port."""
    probe = {"tcpSocket": {"port": port}, "periodSeconds": 5}
    return {
        "startupProbe": {**probe, "failureThreshold": STARTS},
        "readinessProbe": {**probe, "failureThreshold": 3},
    }


def feeders(job: DataLoaderJob, setup: settings.OperatorConfig) -> Manifest:
    """Builds the feeders' Deployment: `replicas` interchangeable pods."""
    spec = job.spec.feeders
    container = ray_container(job, names.Role.FEEDER, FEEDER_MODULE, "feeder.json", resources(spec.resources))
    container["readinessProbe"] = READINESS
    taken, data = inherited(job.spec.trainers.template), plain(job.spec.data)
    pod = ray_pod(setup, job, container, spec.template, taken, data)
    asked = [
        image(job), plain(spec.template), taken, resources(spec.resources), settings.tuning(job),
        spec.processes_per_pod, plain(spec.scratch), *([data] if data else []), *settings.tasks(job).values(),
    ]  # fmt: skip
    rolling = {"type": "RollingUpdate", "rollingUpdate": {"maxUnavailable": 0, "maxSurge": "10%"}}
    made = template(job, names.Role.FEEDER, spec.template, pod, asked=asked, version=setup.version)
    metadata = names.metadata(job, names.feeders(job.name), names.Role.FEEDER, spec.metadata)
    rolled = deployment(metadata, made, replicas=spec.replicas, strategy=rolling)
    rolled["spec"]["progressDeadlineSeconds"] = PROGRESS_S
    return rolled


def deployment(metadata: Manifest, pod: Manifest, *, replicas: int, strategy: Manifest) -> Manifest:
    """Builds a Deployment of these pods. Its selector is the job's name and the role."""
    selecting = {name: metadata["labels"][name] for name in (names.LABEL_JOB, names.LABEL_ROLE)}
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": metadata,
        "spec": {
            "replicas": replicas,
            "revisionHistoryLimit": 2,
            "selector": {"matchLabels": selecting},
            "strategy": strategy,
            "template": pod,
        },
    }


def trainers(job: DataLoaderJob, setup: settings.OperatorConfig, attempt: int) -> Manifest:
    """Builds the Indexed Job with all replicas, which start together. If one replica fails, Kubernetes terminates all
    of them, and the operator decides whether to restart them."""
    name = names.trainers(job.name, attempt)
    user = job.spec.trainers.own.template
    metadata = names.metadata(job, name, names.Role.TRAINER, job.spec.trainers.own.metadata)
    pod = template(
        job, names.Role.TRAINER, user, _pod(job, setup, name), asked=plain(user), version=setup.version
    )  # fmt: skip
    for labeled in (metadata, pod["metadata"]):
        labeled["labels"][names.LABEL_ATTEMPT] = str(attempt)
    replicas = job.spec.trainers.own.replicas
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
    user = plain(job.spec.trainers.own.template)["spec"]
    theirs, *others = user["containers"]
    data = plain(job.spec.data)
    trainer = _trainer(job, setup, with_data(theirs, data), name)
    # The default of 64 MiB is too little for NCCL between ranks of one pod. Shared memory counts toward the container's
    # memory.
    shm = [{"name": SHM["name"], "emptyDir": {"medium": "Memory"}}] if SHM in trainer["volumeMounts"] else []
    shared = shared_fields(setup, job.spec.trainers.own.template)
    if job.spec.sidecar.image is None:  # the operator's own image, which the user may not know
        known = shared.get("imagePullSecrets", [])
        more = [{"name": name} for name in setup.sidecar_pull_secrets if {"name": name} not in known]
        shared |= {"imagePullSecrets": [*known, *more]} if more else {}
    return {
        **shared,
        "subdomain": names.trainers_service(job.name),
        "restartPolicy": "Never",
        "initContainers": [sidecar(job, setup), *user.get("initContainers", [])],
        "containers": [trainer, *others],
        "volumes": [
            *volumes(job, setup, names.Role.TRAINER),
            scratch_volume(RUN["name"], job.spec.sidecar.scratch),
            *shm,
            *data.get("volumes", []),
            *user.get("volumes", []),
        ],
    }


def _trainer(
    job: DataLoaderJob, setup: settings.OperatorConfig, theirs: dict[str, Any], name: str
) -> Manifest:
    """Adds the launch variables to the user's container. They come before the container's own variables, which may
    refer to them."""
    master = f"{name}-0.{settings.service_host(job, names.trainers_service(job.name), setup)}"
    port = settings.ports(job).master
    launch = job.spec.trainers.own.launch_environment(replica=0, master_addr=master, master_port=port)
    ours = [
        {"name": variable, "valueFrom": INDEX} if variable in BY_INDEX else {"name": variable, "value": value}
        for variable, value in launch.items()
    ]
    ours += environment({SOCKET_VARIABLE: settings.SOCKET, **job.spec.loader_environment()})
    return {
        **LAST_WORDS,
        **theirs,
        "env": joined(ours, theirs.get("env", [])),
        "volumeMounts": mounts([RUN, SHM], theirs.get("volumeMounts", [])),
    }


def sidecar(job: DataLoaderJob, setup: settings.OperatorConfig) -> Manifest:
    """Builds the sidecar. It is the first init container, so that the user's init containers can read batches, too."""
    plan = sidecar_plan(
        job.spec, image=setup.sidecar_image, metrics_port=settings.ports(job).metrics,
        processes=job.spec.trainers.own.processes_per_pod,
    )  # fmt: skip
    return sidecar_container(plan, plain(job.spec.trainers.own.template)["spec"])
