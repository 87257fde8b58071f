"""Pods of other controllers with one label, the job that serves them, and what the tests ask of both."""

from __future__ import annotations

import json

from cluster import FEEDER, Cluster, Manifest, until
from controllers import LABEL
from jobs import DIGEST, RESTRICTED, RESTRICTED_POD, SMALL
from streams import stream

SAMPLES = 80


def attached(name: str, **attach: object) -> Manifest:
    """A job for pods of other controllers, that finds room beside the main job."""
    spec = {
        "feeders": {"replicas": 1, "image": FEEDER, "resources": SMALL},
        "ray": {"managed": {"head": {"resources": SMALL}}},
        "sidecar": {"resources": {"requests": {"cpu": "50m"}}},
        "trainers": {"attach": attach},
    }
    return {
        "apiVersion": "dataloading.dev/v1alpha1", "kind": "DataLoaderJob", "metadata": {"name": name}, "spec": spec,
    }  # fmt: skip


def template(
    name: str, *, label: bool = True, samples: int = SAMPLES, pace_s: float = 0.0, **spec: object
) -> Manifest:
    """A pod template whose container prints a digest of all batches, as `stream_here` does."""
    user = stream(name, samples=samples, pace_s=pace_s)["spec"]["trainers"]["job"]["template"]["spec"]
    (trainer,) = user["containers"]
    trainer = {**trainer, "name": "node", "securityContext": RESTRICTED, "resources": SMALL}
    pod = {"restartPolicy": "Never", "securityContext": RESTRICTED_POD, "containers": [trainer], **spec}
    return {"metadata": {"labels": {LABEL: name}} if label else {}, "spec": pod}


def plain_job(name: str, *, of: str = "", **more: object) -> Manifest:
    """A Job whose pod gets its batches from a job; `of`: the name of that job, if it is another one."""
    spec = {"backoffLimit": 0, "template": template(of or name, **more)}
    return {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": name}, "spec": spec}


def bare_pod(name: str, *, of: str = "") -> Manifest:
    """A pod without a controller. `of`: the name of the job that serves it, if it is another one."""
    found = template(of or name)
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, **found["metadata"]},
        "spec": found["spec"],
    }


def events(cluster: Cluster, namespace: str, reason: str) -> list[Manifest]:
    """The events with this reason."""
    words = ["get", "events", "-n", namespace, "--field-selector", f"reason={reason}", "-o", "json"]
    return list(json.loads(cluster.kubectl(*words))["items"])


def digests(cluster: Cluster, namespace: str, name: str) -> dict[str, str]:
    """The digests that pods with this job's label have printed, by pod."""
    found = {}
    for pod in cluster.list("pods", namespace, f"{LABEL}={name}"):
        (container,) = pod["spec"]["containers"]
        if seen := DIGEST.findall(cluster.logs(pod["metadata"]["name"], namespace, container["name"])):
            found[str(pod["metadata"]["name"])] = str(seen[-1])
    return found


def printed(cluster: Cluster, namespace: str, name: str, *, timeout_s: float = 240) -> str:
    """Waits for the digest that the pod with this job's label prints."""

    def look() -> str | None:
        return next(iter(digests(cluster, namespace, name).values()), None)

    return str(until(look, timeout_s=timeout_s, what=f"the digest of {name}"))
