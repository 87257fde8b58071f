"""Jobs whose feeders run on an existing Ray cluster: finding the cluster's address, waiting for it, and refusing a
cluster with other versions of Ray or Python. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from typing import Any

from dataloaderjob.api import DataLoaderJob
from dataloaderjob.api.ray import HEAD_CONTAINER, ExternalRaySpec
from dataloaderjob.api.status import Condition, RayStatus
from dataloaderjob.core.supervision import EXIT_RAY_REFUSED
from dataloaderjob_operator import names
from dataloaderjob_operator.by_job import cached_by_job
from dataloaderjob_operator.decide.health import ConditionState, Health
from dataloaderjob_operator.decide.observed import Observed, leaving, parse_time
from dataloaderjob_operator.names import Role

WAITS = "WaitsForRayCluster"
"""Condition reason while the address of a RayCluster is not known."""
LOOKS = "LooksForRayCluster"
"""Condition reason until the first lookup of a RayCluster has ended."""
DIFFERS = "RayVersionMismatch"
"""Condition reason if the cluster has a different version of Ray, or a different minor version of Python."""
ENDS_S = 15.0
"""Maximum number of seconds for which the supervisor's pod is kept after the job's end. The supervisor answers within 5
s, and Ray needs a few more seconds."""
HEAD_FIELD, OWN_FIELD = "spec.ray.managed.head.resources", "spec.ray.external.resources"


def resolved(observed: Observed) -> Observed:
    """Returns the job with the address of its RayCluster, once the address is known."""
    ray = observed.job.spec.ray.external
    if ray is None or ray.ray_cluster is None or not (address := _address(observed, ray.ray_cluster)):
        return observed
    return replace(observed, job=_with_address(observed.job, address))


def _address(observed: Observed, cluster: str) -> str:
    """Returns the RayCluster's address; empty if it is unknown. A job keeps a known address, so its pods survive the
    deletion of the RayCluster."""
    known, found = observed.status.ray, observed.ray_cluster
    if known.address and known.ray_cluster == cluster:
        return known.address
    return found.address if found is not None and found.name == cluster else ""


@cached_by_job
def _with_address(job: DataLoaderJob, address: str) -> DataLoaderJob:
    ray = job.spec.ray
    external = (ray.external or ExternalRaySpec(address=address)).model_copy(update={"address": address})
    spec = job.spec.model_copy(update={"ray": ray.model_copy(update={"external": external})})
    return job.model_copy(update={"spec": spec})


def to_look_up(observed: Observed) -> str | None:
    """Returns the RayCluster whose address the job still needs; None if it needs none."""
    ray = observed.job.spec.ray.external
    return ray.ray_cluster if ray is not None and ray.address is None else None


def waits(observed: Observed) -> ConditionState | None:
    """Returns the condition state of a job that waits for its RayCluster; None if the job does not wait."""
    name = to_look_up(observed)
    if name is None:
        return None
    found = observed.ray_cluster
    if found is None or found.name != name:
        return ConditionState(False, LOOKS, f"the operator looks for RayCluster {name}")
    return ConditionState(False, WAITS, found.missing)


def refusal(observed: Observed) -> str:
    """Returns the supervisor's message if it cannot use the Ray cluster because their versions differ; empty
    otherwise."""
    if observed.job.spec.ray.external is None:
        return ""
    return next(_refusals(observed), "")


def _refusals(observed: Observed) -> Iterator[str]:
    for pod in observed.of_role(Role.HEAD):
        for container in pod.get("status", {}).get("containerStatuses") or ():
            states = [container.get("state") or {}, container.get("lastState") or {}]
            ended: Mapping[str, Any] = next((s["terminated"] for s in states if "terminated" in s), {})
            is_refused = ended.get("exitCode") == EXIT_RAY_REFUSED and container["name"] == HEAD_CONTAINER
            if is_refused and not container.get("ready") and not leaving(pod):
                default = "the Ray cluster has a different version of Ray or Python than the job"
                yield " ".join(str(ended.get("message") or default).split())


def with_actors(observed: Observed, health: Health) -> Health:
    """Returns the health of a job whose feeders are actors on an existing Ray cluster. The operator does not see their
    pods, so only the supervisor reports these feeders."""
    if observed.job.spec.ray.external is None:
        return health
    head = waits(observed) or health.head_pods
    if text := refusal(observed):
        head = ConditionState(False, DIFFERS, text)
    feeders = ConditionState(True, "Serving", "feeders run as actors in an existing Ray cluster")
    return replace(health, head_pods=head, feeder_pods=feeders)


def ends_s(observed: Observed, now: datetime) -> float | None:
    """Returns the seconds for which the supervisor's pod is still kept after the job's end. The supervisor ends the
    actors in this time. Returns None if the supervisor has ended the actors or does not answer. In the latter case,
    they end when their lease expires."""
    live = observed.children.get(("Deployment", names.head(observed.job.name)))
    supervisor = observed.supervisor
    if observed.job.spec.ray.external is None or live is None or leaving(live):
        return None
    if supervisor is None or supervisor.silent or supervisor.ended:
        return None
    ended = observed.status.completion_time
    left_s = ENDS_S if ended is None else ENDS_S - (now - parse_time(ended)).total_seconds()
    return left_s if left_s > 0 else None


def ray_status(observed: Observed) -> RayStatus:
    """Returns the status of Ray, with the existing cluster's address."""
    supervisor, ray = observed.supervisor, observed.job.spec.ray.external
    found = supervisor.ray if supervisor is not None and supervisor.ray.version else observed.status.ray
    address, cluster = ("", "") if ray is None else (ray.address or "", ray.ray_cluster or "")
    return found.model_copy(update={"address": address, "ray_cluster": cluster if address else ""})


def with_own_fields(job: DataLoaderJob, made: Sequence[Condition]) -> tuple[Condition, ...]:
    """Adapts the conditions' messages to an existing Ray cluster, where another field sets the supervisor's
    resources."""
    if job.spec.ray.external is None:
        return tuple(made)
    return tuple(c.model_copy(update={"message": c.message.replace(HEAD_FIELD, OWN_FIELD)}) for c in made)
