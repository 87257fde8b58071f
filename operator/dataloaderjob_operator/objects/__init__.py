"""Builds a job's wanted children from the job alone. Pure.

The children of recent jobs are cached: a job that changes is reconciled several times within seconds, and building the
children was a third of a reconcile. Callers must not modify them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, wraps
from typing import Any, TypeVar, cast

from dataloaderjob.api import DataLoaderJob
from dataloaderjob_operator.kinds import Manifest
from dataloaderjob_operator.names import Role
from dataloaderjob_operator.objects import network, settings, workloads
from dataloaderjob_operator.objects.settings import OperatorConfig, OwnPod

__all__ = ["OperatorConfig", "OwnPod", "base", "feeding", "training"]


RECENT = 128
"""Number of jobs whose children are cached."""


Make = TypeVar("Make", bound=Callable[..., Sequence[Manifest]])


@dataclass(frozen=True, slots=True, eq=False)
class _Given:
    """The input from which children are built. Two jobs are equal only if they are the same object: the cache returns
    the same object until the job changes."""

    job: DataLoaderJob
    setup: OperatorConfig
    more: tuple[Any, ...]

    def __hash__(self) -> int:
        return hash((id(self.job), self.more))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Given):
            return NotImplemented
        return self.job is other.job and (self.setup, self.more) == (other.setup, other.more)


def _made_once(make: Make) -> Make:
    """Caches the children of the RECENT most recently requested jobs."""

    @lru_cache(RECENT)
    def made(given: _Given) -> Sequence[Manifest]:
        return tuple(make(given.job, given.setup, *given.more))

    @wraps(make)
    def found(job: DataLoaderJob, setup: OperatorConfig, *more: Any) -> Sequence[Manifest]:
        return made(_Given(job, setup, more))

    return cast("Make", found)


@_made_once
def base(job: DataLoaderJob, setup: OperatorConfig, ended: str = "") -> Sequence[Manifest]:
    """Builds the children that must exist before any pod: the Secrets, the Services and the NetworkPolicies, and the
    settings of attached pods. `ended`: the reason why the job has ended; empty while it lives."""
    attached = job.spec.trainers.attached
    return [
        settings.secret(job, setup),
        *([settings.attach_secret(job, setup), settings.attach_map(job, setup, ended)] if attached else []),
        network.head_service(job),
        *([] if attached else [network.trainers_service(job)]),
        *network.policies(job, setup),
    ]


@_made_once
def feeding(job: DataLoaderJob, setup: OperatorConfig) -> Sequence[Manifest]:
    """Builds head and feeders with their settings; they exist from the job's start until the trainers end."""
    return [
        settings.config_map(job, setup, Role.HEAD),
        settings.config_map(job, setup, Role.FEEDER),
        workloads.head(job, setup),
        workloads.feeders(job, setup),
    ]


@_made_once
def training(job: DataLoaderJob, setup: OperatorConfig, attempt: int) -> Sequence[Manifest]:
    """Builds the trainers of an attempt with the settings of their sidecars."""
    return [settings.config_map(job, setup, Role.TRAINER), workloads.trainers(job, setup, attempt)]
