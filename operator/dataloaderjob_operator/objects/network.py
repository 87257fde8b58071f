"""Services by which the pods of a job find each other. Pure."""

from __future__ import annotations

from dataloaderjob.api import DataLoaderJob
from dataloaderjob_operator import names
from dataloaderjob_operator.objects import meta, settings


def head_service(job: DataLoaderJob) -> meta.Manifest:
    """The head, by name. Also before it is ready: without that, DNS answers late on a fresh cluster."""
    return _headless(
        job,
        names.head(job.name),
        names.Role.HEAD,
        {"gcs": settings.GCS_PORT, "supervisor": settings.SUPERVISOR_PORT},
    )


def trainers_service(job: DataLoaderJob) -> meta.Manifest:
    """Trainer pods, each by the name that its Indexed Job gives it."""
    return _headless(
        job, names.trainers_service(job.name), names.Role.TRAINER, {"metrics": settings.METRICS_PORT}
    )


def _headless(job: DataLoaderJob, name: str, role: names.Role, ports: dict[str, int]) -> meta.Manifest:
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": meta.metadata(job, name),
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": names.labels(job.name, role),
            "ports": [
                {"name": port, "port": number, "protocol": "TCP", "appProtocol": "tcp"}
                for port, number in ports.items()
            ],
        },
    }
