"""The builders of a job's wanted children. Their only inputs are the job and the operator's settings. Pure.

The children of recent jobs are cached (`by_job`), so callers must not modify the results.
"""

from __future__ import annotations

from collections.abc import Sequence

from dataloaderjob.api import DataLoaderJob
from dataloaderjob_operator.by_job import cached_by_job
from dataloaderjob_operator.kinds import Manifest
from dataloaderjob_operator.names import Role
from dataloaderjob_operator.objects import external, network, settings, workloads
from dataloaderjob_operator.objects.settings import OperatorConfig, OwnPod

__all__ = ["OperatorConfig", "OwnPod", "base", "feeding", "training"]


@cached_by_job
def base(job: DataLoaderJob, setup: OperatorConfig, ended: str = "") -> Sequence[Manifest]:
    """Builds the children that must exist before any pod: Secrets, Services, NetworkPolicies and the settings of
    attached pods. `ended`: the reason why the job has ended; empty if it has not."""
    attached = job.spec.trainers.attached
    return (
        settings.secret(job, setup),
        *([settings.attach_secret(job, setup), settings.attach_map(job, setup, ended)] if attached else []),
        network.head_service(job),
        *([] if attached else [network.trainers_service(job)]),
        *network.policies(job, setup),
    )


@cached_by_job
def feeding(job: DataLoaderJob, setup: OperatorConfig) -> Sequence[Manifest]:
    """Builds the head and the feeders with their settings. They exist from the job's start until the trainers end. On
    an existing Ray cluster, builds only the supervisor's pod, once the cluster's address is known."""
    ray = job.spec.ray.external
    if ray is not None:
        known = ray.address is not None
        return (settings.config_map(job, setup, Role.HEAD), external.head(job, setup, ray)) if known else ()
    return (
        settings.config_map(job, setup, Role.HEAD),
        settings.config_map(job, setup, Role.FEEDER),
        workloads.head(job, setup),
        workloads.feeders(job, setup),
    )


@cached_by_job
def training(job: DataLoaderJob, setup: OperatorConfig, attempt: int) -> Sequence[Manifest]:
    """Builds the trainers of an attempt with the settings of their sidecars."""
    return settings.config_map(job, setup, Role.TRAINER), workloads.trainers(job, setup, attempt)
