"""Children of a job as the API server shall have them, made from the job alone. Pure."""

from __future__ import annotations

from dataloaderjob.api import DataLoaderJob
from dataloaderjob_operator.kinds import Manifest
from dataloaderjob_operator.names import Role
from dataloaderjob_operator.objects import network, settings, workloads
from dataloaderjob_operator.objects.settings import OperatorConfig, OwnPod

__all__ = ["OperatorConfig", "OwnPod", "base", "feeding", "training"]


def base(job: DataLoaderJob, setup: OperatorConfig) -> list[Manifest]:
    """Makes what pods mount, how they find each other and who may connect to them: there before any of them."""
    return [
        settings.secret(job, setup),
        network.head_service(job),
        network.trainers_service(job),
        *network.policies(job, setup),
    ]


def feeding(job: DataLoaderJob, setup: OperatorConfig) -> list[Manifest]:
    """Makes head and feeders, and their settings: there from the start to the end of the trainers."""
    return [
        settings.config_map(job, setup, Role.HEAD),
        settings.config_map(job, setup, Role.FEEDER),
        workloads.head(job, setup),
        workloads.feeders(job, setup),
    ]


def training(job: DataLoaderJob, setup: OperatorConfig, attempt: int) -> list[Manifest]:
    """Makes the trainers of an attempt, and the settings of their sidecars."""
    return [settings.config_map(job, setup, Role.TRAINER), workloads.trainers(job, setup, attempt)]
