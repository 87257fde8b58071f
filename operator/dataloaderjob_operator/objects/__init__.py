"""Children of a job as the API server shall have them, made from the job alone. Pure.

Those of the jobs that were asked for last are made once: a job that changes is reconciled several times within seconds,
and to make its children was a third of a reconcile. Nobody alters what is returned.
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
"""Jobs whose children are kept."""


Make = TypeVar("Make", bound=Callable[..., Sequence[Manifest]])


@dataclass(frozen=True, slots=True, eq=False)
class _Given:
    """What children are made from. The job counts as the same only where it is the same object, as the cache hands it
    on until it changes."""

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
    """Keeps what was made of the jobs that were asked for last."""

    @lru_cache(RECENT)
    def made(given: _Given) -> Sequence[Manifest]:
        return tuple(make(given.job, given.setup, *given.more))

    @wraps(make)
    def found(job: DataLoaderJob, setup: OperatorConfig, *more: Any) -> Sequence[Manifest]:
        return made(_Given(job, setup, more))

    return cast("Make", found)


@_made_once
def base(job: DataLoaderJob, setup: OperatorConfig) -> Sequence[Manifest]:
    """Makes what pods mount, how they find each other and who may connect to them: there before any of them."""
    return [
        settings.secret(job, setup),
        network.head_service(job),
        network.trainers_service(job),
        *network.policies(job, setup),
    ]


@_made_once
def feeding(job: DataLoaderJob, setup: OperatorConfig) -> Sequence[Manifest]:
    """Makes head and feeders, and their settings: there from the start to the end of the trainers."""
    return [
        settings.config_map(job, setup, Role.HEAD),
        settings.config_map(job, setup, Role.FEEDER),
        workloads.head(job, setup),
        workloads.feeders(job, setup),
    ]


@_made_once
def training(job: DataLoaderJob, setup: OperatorConfig, attempt: int) -> Sequence[Manifest]:
    """Makes the trainers of an attempt, and the settings of their sidecars."""
    return [settings.config_map(job, setup, Role.TRAINER), workloads.trainers(job, setup, attempt)]
