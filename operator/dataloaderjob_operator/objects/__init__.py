"""From a job to its children as the API server shall have them. Pure: nothing here has seen the cluster."""

from __future__ import annotations

from dataloaderjob.api import DataLoaderJob
from dataloaderjob_operator.objects import network, settings, workloads
from dataloaderjob_operator.objects.meta import Manifest, OperatorConfig, OwnPod
from dataloaderjob_operator.objects.workloads import trainers

__all__ = ["Manifest", "OperatorConfig", "OwnPod", "base", "feeding", "trainers"]


def base(job: DataLoaderJob, setup: OperatorConfig, *, feeders_at_start: int | None = None) -> list[Manifest]:
    """What pods mount, how they find each other and who may connect to them: there before any of them.

    `feeders_at_start`: what a supervisor that starts keeps in place until it is told; None: as the spec says.
    """
    return [
        settings.secret(job, setup),
        settings.config_map(job, feeders_at_start),
        network.head_service(job),
        network.trainers_service(job),
        *network.policies(job, setup),
    ]


def feeding(job: DataLoaderJob, setup: OperatorConfig) -> list[Manifest]:
    """Head and feeders: there from the start to the end of the trainers."""
    return [workloads.head(job, setup), workloads.feeders(job, setup)]
