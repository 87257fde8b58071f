"""Children of a job as the API server shall have them, made from the job alone. Pure."""

from __future__ import annotations

from dataloaderjob.api import DataLoaderJob
from dataloaderjob_operator.kinds import Manifest
from dataloaderjob_operator.objects import network, settings, workloads
from dataloaderjob_operator.objects.settings import OperatorConfig, OwnPod
from dataloaderjob_operator.objects.workloads import trainers

__all__ = ["OperatorConfig", "OwnPod", "base", "feeding", "trainers"]


def base(job: DataLoaderJob, setup: OperatorConfig) -> list[Manifest]:
    """Makes what pods mount, how they find each other and who may connect to them: there before any of them."""
    return [
        settings.secret(job, setup),
        settings.config_map(job, setup),
        network.head_service(job),
        network.trainers_service(job),
        *network.policies(job, setup),
    ]


def feeding(job: DataLoaderJob, setup: OperatorConfig) -> list[Manifest]:
    """Makes head and feeders: there from the start to the end of the trainers."""
    return [workloads.head(job, setup), workloads.feeders(job, setup)]
