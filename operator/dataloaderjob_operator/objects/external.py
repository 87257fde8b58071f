"""The supervisor's pod of a job on an existing Ray cluster. One container joins the cluster, and another runs the
supervisor. Such a job has neither a Ray head nor feeder pods: its feeders are actors in the cluster's pods. Pure."""

from __future__ import annotations

from typing import Any

from dataloaderjob.api import DataLoaderJob
from dataloaderjob.api.plain import plain, resources
from dataloaderjob.api.pods import RESERVED_PREFIX
from dataloaderjob.api.ray import ExternalRaySpec
from dataloaderjob_operator import names
from dataloaderjob_operator.kinds import Manifest
from dataloaderjob_operator.objects import settings, supervisor
from dataloaderjob_operator.objects.pods import inherited, ray_container, ray_pod, template
from dataloaderjob_operator.objects.workloads import deployment, head_probes

MODULE = "dataloaderjob.pod.driver"
TOKEN_VOLUME = f"{RESERVED_PREFIX}ray-token"


def head(job: DataLoaderJob, setup: settings.OperatorConfig, ray: ExternalRaySpec) -> Manifest:
    """Builds the Deployment of the supervisor's pod. The pod is replaced but never duplicated."""
    spec = job.spec.ray.head
    of_ray, _ = supervisor.split(resources(spec.resources))
    container = ray_container(job, names.Role.HEAD, MODULE, "head.json", of_ray)
    container |= {
        "ports": [{"name": "raylet", "containerPort": settings.RAYLET_PORT}],
        **head_probes("raylet"),
    }
    token = _token_volume(ray)
    if token is not None:
        mount = {"name": TOKEN_VOLUME, "mountPath": settings.TOKEN_FOLDER, "readOnly": True}
        container["volumeMounts"] = [*container["volumeMounts"], mount]
    taken = inherited(job.spec.feeders.template, job.spec.trainers.template)
    pod = ray_pod(setup, job, container, spec.template, taken)
    if token is not None:
        pod["volumes"] = [*pod["volumes"], token]
    asked = [
        plain(spec.template), taken, resources(spec.resources), plain(job.spec.feeders.scratch),
        settings.on_external_ray(job, ray), token,
    ]  # fmt: skip
    made = template(job, names.Role.HEAD, spec.template, pod, asked=asked, version=setup.version)
    metadata = names.metadata(job, names.head(job.name), names.Role.HEAD, spec.metadata)
    return deployment(metadata, made, replicas=1, strategy={"type": "Recreate"})


def _token_volume(ray: ExternalRaySpec) -> dict[str, Any] | None:
    """Builds the volume with the Ray cluster's token; None if the cluster has no token. The operator itself does not
    read the token's Secret."""
    ref = ray.token_secret_ref
    if ref is None:
        return None
    items = [{"key": ref.key, "path": settings.RAY_TOKEN}]
    return {"name": TOKEN_VOLUME, "secret": {"secretName": ref.name, "defaultMode": 0o440, "items": items}}
