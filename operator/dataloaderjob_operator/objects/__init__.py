"""Children of a job as the API server shall have them, made from the job alone. Pure.

Those of the jobs that were asked for last are made once: a job that changes is reconciled several times within seconds,
and to make its children was a third of a reconcile. Nobody alters what is returned.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from dataloaderjob.api import DataLoaderJob
from dataloaderjob_operator.kinds import Manifest
from dataloaderjob_operator.names import Role
from dataloaderjob_operator.objects import network, settings, workloads
from dataloaderjob_operator.objects.settings import OperatorConfig, OwnPod

__all__ = ["OperatorConfig", "OwnPod", "base", "feeding", "training"]


RECENT = 128
"""Jobs whose children are kept."""


@dataclass(frozen=True, slots=True, eq=False)
class _Given:
    """What children are made from. The job counts as the same only where it is the same object, as the cache hands it
    on until it changes."""

    job: DataLoaderJob
    setup: OperatorConfig
    attempt: int = 0

    def __hash__(self) -> int:
        return hash((id(self.job), self.attempt))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Given):
            return NotImplemented
        same_job = self.job is other.job and self.attempt == other.attempt
        return same_job and self.setup == other.setup


def base(job: DataLoaderJob, setup: OperatorConfig) -> tuple[Manifest, ...]:
    """Makes what pods mount, how they find each other and who may connect to them: there before any of them."""
    return _base(_Given(job, setup))


@lru_cache(RECENT)
def _base(given: _Given) -> tuple[Manifest, ...]:
    job, setup = given.job, given.setup
    return (
        settings.secret(job, setup),
        network.head_service(job),
        network.trainers_service(job),
        *network.policies(job, setup),
    )


def feeding(job: DataLoaderJob, setup: OperatorConfig) -> tuple[Manifest, ...]:
    """Makes head and feeders, and their settings: there from the start to the end of the trainers."""
    return _feeding(_Given(job, setup))


@lru_cache(RECENT)
def _feeding(given: _Given) -> tuple[Manifest, ...]:
    job, setup = given.job, given.setup
    return (
        settings.config_map(job, setup, Role.HEAD),
        settings.config_map(job, setup, Role.FEEDER),
        workloads.head(job, setup),
        workloads.feeders(job, setup),
    )


def training(job: DataLoaderJob, setup: OperatorConfig, attempt: int) -> tuple[Manifest, ...]:
    """Makes the trainers of an attempt, and the settings of their sidecars."""
    return _training(_Given(job, setup, attempt))


@lru_cache(RECENT)
def _training(given: _Given) -> tuple[Manifest, ...]:
    job, setup, attempt = given.job, given.setup, given.attempt
    return settings.config_map(job, setup, Role.TRAINER), workloads.trainers(job, setup, attempt)
