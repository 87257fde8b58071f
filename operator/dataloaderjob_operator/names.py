"""Names and labels of a job's children. Pure: the same job has the same names, so nothing is ever made twice."""

from __future__ import annotations

from enum import StrEnum

MANAGER = "dataloaderjob-operator"
"""Field manager of everything that the operator applies."""
LABEL_JOB = "dataloading.dev/job"
LABEL_ROLE = "dataloading.dev/role"
LABEL_ATTEMPT = "dataloading.dev/attempt"
"""On trainers: how often they were all started before."""
ANNOTATION_TEMPLATE = "dataloading.dev/template"
"""Hash of what the user's part of a pod template asks for: pods are replaced when it changes, and only then."""
ANNOTATION_MADE_BY = "dataloading.dev/made-by"
"""Version of the operator that made the pod template."""


class Role(StrEnum):
    """What a pod of the job is for."""

    HEAD = "head"
    FEEDER = "feeder"
    TRAINER = "trainer"


def unique(namespace: str, job: str, uid: str) -> str:
    """The job's name on its links: no other job, nor an earlier one of this name, has it."""
    return f"{namespace}/{job}/{uid}"


def key_secret(job: str) -> str:
    return f"{job}-key"


def settings_map(job: str) -> str:
    return f"{job}-settings"


def head(job: str) -> str:
    """The head's Deployment and its Service."""
    return f"{job}-head"


def feeders(job: str) -> str:
    return f"{job}-feeders"


def trainers(job: str, attempt: int) -> str:
    """The Indexed Job; its pods' host names are this, a hyphen and the replica's number."""
    return f"{job}-trainers-{attempt}"


def trainers_service(job: str) -> str:
    """The headless Service under which trainer pods find each other."""
    return f"{job}-trainers"


def policy(job: str, role: Role) -> str:
    """The NetworkPolicy of a role's pods."""
    return f"{job}-{role.value}"


def labels(job: str, role: Role | None = None) -> dict[str, str]:
    """Labels of a child; also the selector of its pods."""
    found = {LABEL_JOB: job}
    return found if role is None else {**found, LABEL_ROLE: role.value}


def selector(job: str, role: Role) -> str:
    """The same as text, for the scale subresource."""
    return ",".join(f"{name}={value}" for name, value in sorted(labels(job, role).items()))
