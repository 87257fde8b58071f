"""The Ray cluster of a job: one head with the supervisor, and feeders, both as Deployments. Pure."""

from __future__ import annotations

from typing import Any

from dataloaderjob.api import DataLoaderJob
from dataloaderjob.api.feeders import CONTAINER
from dataloaderjob_operator import names
from dataloaderjob_operator.objects import meta, pods, settings

HEAD_MODULE = "dataloaderjob.pod.head"
FEEDER_MODULE = "dataloaderjob.pod.feeder"
STARTS = 60
"""Probes of a head that comes up, five seconds apart."""


def head(job: DataLoaderJob, setup: meta.OperatorConfig) -> meta.Manifest:
    """One pod, replaced and never doubled: two heads would place feeders twice."""
    user = job.spec.feeders.template
    container = pods.ray_container(
        job, names.Role.HEAD, HEAD_MODULE, "head.json", pods.resources(job.spec.ray.head_resources)
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
    made, _ = pods.scratch()
    spec = {
        **pods.shared_fields(job, user),
        "containers": [container],
        "volumes": [*pods.volumes(job), *made],
    }
    spec.pop("hostNetwork", None)  # the operator reaches it by a policy, which knows pods by their labels
    asked = [pods.asked(job, user), pods.resources(job.spec.ray.head_resources), settings.head(job)["tuning"]]
    return _deployment(job, setup, names.Role.HEAD, spec, asked, replicas=1, strategy={"type": "Recreate"})


def feeders(job: DataLoaderJob, setup: meta.OperatorConfig) -> meta.Manifest:
    """`replicas` pods that are all alike: one that goes is replaced by any other."""
    spec = job.spec.feeders
    theirs = pods.named(spec.template.spec.containers, CONTAINER)
    container = pods.add(
        pods.ray_container(
            job, names.Role.FEEDER, FEEDER_MODULE, "feeder.json", pods.resources(spec.resources)
        ),
        {} if theirs is None else pods.plain(theirs),
    )
    made, _ = pods.scratch()
    user = pods.plain(spec.template).get("spec", {})
    pod = {
        **pods.shared_fields(job, spec.template),
        "containers": [container, *(c for c in user.get("containers", []) if c["name"] != CONTAINER)],
        "volumes": [*pods.volumes(job), *made, *user.get("volumes", [])],
    }
    if "initContainers" in user:
        pod["initContainers"] = user["initContainers"]
    asked = [
        pods.asked(job, spec.template), pods.resources(spec.resources), settings.feeder(job)["tuning"],
        spec.processes_per_pod,
    ]  # fmt: skip
    rolling = {"type": "RollingUpdate", "rollingUpdate": {"maxUnavailable": "25%", "maxSurge": "25%"}}
    return _deployment(job, setup, names.Role.FEEDER, pod, asked, replicas=spec.replicas, strategy=rolling)


def _deployment(
    job: DataLoaderJob, setup: meta.OperatorConfig, role: names.Role, pod: meta.Manifest, asked: Any,
    *, replicas: int, strategy: meta.Manifest,
) -> meta.Manifest:  # fmt: skip
    name = names.head(job.name) if role is names.Role.HEAD else names.feeders(job.name)
    user = job.spec.feeders.template
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": meta.metadata(job, name, role),
        "spec": {
            "replicas": replicas,
            "revisionHistoryLimit": 2,
            "selector": {"matchLabels": names.labels(job.name, role)},
            "strategy": strategy,
            "template": pods.template(job, role, user, pod, asked=asked, version=setup.version),
        },
    }
