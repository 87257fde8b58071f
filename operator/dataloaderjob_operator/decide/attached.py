"""Attached pods, which other controllers create. Their label makes them trainers of a job. Pure.

The operator does not create, restart or delete such pods. It only reports them. Feeders exist only while pods are
attached, and for some time afterwards. A starting pod does not degrade the job. Neither does a failure of a pod's own
containers or of its node, because the pod's controller is responsible for these. A failing sidecar does degrade the
job.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from datetime import datetime, timedelta

from dataloaderjob.api import DataLoaderJob
from dataloaderjob.api.sidecar import SIDECAR
from dataloaderjob_operator import names
from dataloaderjob_operator.by_job import cached_by_job
from dataloaderjob_operator.decide.followed import CANNOT, MISSING, FollowedState
from dataloaderjob_operator.decide.health import ConditionState, Health, sidecar_listens, trains
from dataloaderjob_operator.decide.observed import Observed, Pod, Trouble, leaving, parse_time
from dataloaderjob_operator.decide.pod_troubles import first_trouble, lost_node, node_silent_since, trouble_of
from dataloaderjob_operator.names import Role

NO_PODS = "NoPods"
"""Condition reason while no pod is attached."""
NOT_INJECTED = "NotInjected"
"""Condition reason if a pod has the label but no sidecar."""
NOT_CONNECTED = "NotConnected"
"""Condition reason if sidecars run but do not reach the supervisor."""
CONNECTS_S = 60.0
"""Seconds that a sidecar has to reach the supervisor after its start. The kubelet takes up to a minute to propagate a
new Secret to a running pod."""
ENDED = frozenset({"Succeeded", "Failed"})


def pods(observed: Observed) -> list[Pod]:
    """Returns the attached pods: those that have not ended, are not being deleted and are not held back by a queue."""
    return present(observed.attached)


def present(found: Iterable[Pod]) -> list[Pod]:
    """Returns the pods that have not ended, are not being deleted and are not held back by a queue."""
    return [pod for pod in found if not _over(pod) and not _gated(pod)]


def with_sidecar(observed: Observed) -> list[Pod]:
    """Returns the attached pods whose specs contain a sidecar that can work."""
    return [pod for pod in pods(observed) if _lack(pod) is None]


def idle_since(observed: Observed, now: datetime) -> datetime | None:
    """Returns the time since which no pod has been attached; None if pods are attached."""
    if pods(observed):
        return None
    known = observed.status.trainers.idle_since
    return now if known is None else parse_time(known)


def idles_at(observed: Observed, now: datetime) -> datetime | None:
    """Returns the time at which the job becomes idle unless a pod attaches first; None if pods are attached."""
    since, spec = idle_since(observed, now), observed.job.spec.trainers.attach
    return None if since is None or spec is None else since + timedelta(seconds=spec.idle_seconds)


def is_idle(observed: Observed, now: datetime) -> bool:
    """Returns True if the job needs no feeders because no pod has been attached for long enough."""
    at = idles_at(observed, now)
    return at is not None and at <= now


def as_needed(observed: Observed, now: datetime) -> Observed:
    """Returns the job as it should run now. An idle job has zero feeders, regardless of its spec."""
    idle = observed.job.spec.trainers.attached and is_idle(observed, now)
    return replace(observed, job=_without_feeders(observed.job)) if idle else observed


@cached_by_job
def _without_feeders(job: DataLoaderJob) -> DataLoaderJob:
    feeders = job.spec.feeders.model_copy(update={"replicas": 0, "min_available": 0})
    return job.model_copy(update={"spec": job.spec.model_copy(update={"feeders": feeders})})


def listening(observed: Observed) -> int:
    """Returns the number of attached pods whose sidecar listens."""
    return sum(_answers(pod) and sidecar_listens(pod.get("status") or {}) for pod in pods(observed))


def with_attached(health: Health, observed: Observed, now: datetime) -> Health:
    """Returns `health` with the attached pods as the job's trainers."""
    event_trouble = health.roles[Role.TRAINER].event_trouble
    return replace(
        health, sidecars=sidecars(observed, event_trouble, now), trainer_pods=trainers(observed, event_trouble),
        trainers_running=running(observed),
    )  # fmt: skip


def sidecars(observed: Observed, event_trouble: Trouble | None, now: datetime) -> ConditionState:
    """Returns the state of the condition SidecarsReady. The condition holds if the sidecars of all attached pods listen
    and have reached the supervisor."""
    mine = pods(observed)
    if not mine:
        return ConditionState(True, NO_PODS, "no pod is attached")
    found, count = listening(observed), f"{listening(observed)} of {len(mine)} sidecars are listening"
    trouble = first_trouble(map(sidecar_trouble, mine)) or (event_trouble if found < len(mine) else None)
    if trouble is not None:
        return ConditionState(False, trouble.reason, str(trouble))
    lost = _not_connected(observed, now)
    if lost:
        return ConditionState(False, NOT_CONNECTED, lost)
    unreachable = first_trouble(map(lost_node, mine))
    if unreachable is not None:
        return ConditionState(False, unreachable.reason, f"{count}; {unreachable}")
    return ConditionState(found >= len(mine), "Serving" if found >= len(mine) else "PodsStart", count)


def trainers(observed: Observed, event_trouble: Trouble | None) -> ConditionState:
    """Returns the state of the condition TrainersReady. The condition holds if the containers of all attached pods
    run."""
    mine = pods(observed)
    if not mine:
        return ConditionState(True, NO_PODS, "no pod is attached")
    found = sum(_answers(pod) and trains(pod.get("status") or {}) for pod in mine)
    count = f"{found} of {len(mine)} attached pods are running"
    if found >= len(mine):
        return ConditionState(True, "Serving", count)
    trouble = first_trouble(map(_own_trouble, mine)) or event_trouble
    return ConditionState(False, trouble.reason if trouble else "PodsStart", str(trouble or count))


def running(observed: Observed) -> int:
    """Returns the number of attached pods whose containers run."""
    return sum(_answers(pod) and trains(pod.get("status") or {}) for pod in pods(observed))


def sidecar_trouble(pod: Pod) -> Trouble | None:
    """Returns the problem with an attached pod's sidecar, including a missing sidecar; None if nothing is wrong."""
    return _lack(pod) or trouble_of(_with_containers(pod, sidecar=True))


def _lack(pod: Pod) -> Trouble | None:
    """Returns the problem if a pod has no sidecar, or one that cannot work; None if the sidecar can work."""
    containers = (pod.get("spec") or {}).get("initContainers") or ()
    mine = [c for c in containers if c.get("name") == SIDECAR]
    name, label = str(pod["metadata"]["name"]), names.LABEL_INJECT
    if not mine:
        why = (
            f"it has the label {label} but no sidecar, because injection was off when it was created: "
            "delete the pod so that its owner recreates it, or inject its template with `dataloaderjob "
            "inject`"
        )
        return Trouble(name, "", NOT_INJECTED, why)
    if mine[0].get("restartPolicy") != "Always":
        why = (
            "its sidecar lacks restartPolicy Always, which another webhook has removed, so the pod never leaves its"
            " init containers: exclude the pod from that webhook, and delete the pod"
        )
        return Trouble(name, SIDECAR, NOT_INJECTED, why)
    return None


def cannot_follow(observed: Observed) -> ConditionState | None:
    """Returns a condition state if the followed object is missing or cannot be read; None if nothing is wrong."""
    found = observed.followed
    if found is None or found.state not in (FollowedState.MISSING, FollowedState.UNREADABLE):
        return None
    return ConditionState(True, MISSING if found.state is FollowedState.MISSING else CANNOT, found.text)


def connects_at(observed: Observed, now: datetime) -> datetime | None:
    """Returns the next deadline for a sidecar to reach the supervisor; None if no sidecar is starting."""
    moments = (_sidecar_since(pod) for pod in pods(observed))
    due = (since + timedelta(seconds=CONNECTS_S) for since in moments if since is not None)
    return min((at for at in due if at > now), default=None)


def summary(count: int, ranks: int) -> str:
    """Formats the numbers of pods and ranks for the output of `kubectl get`."""
    pods_text = f"{count} pod{'' if count == 1 else 's'}"
    return f"{pods_text}, {ranks} rank{'' if ranks == 1 else 's'}" if count else pods_text


def _not_connected(observed: Observed, now: datetime) -> str:
    """Describes running sidecars that do not reach the supervisor although it answers; empty if there are none."""
    supervisor = observed.supervisor
    if supervisor is None or supervisor.silent:
        return ""
    since = (_sidecar_since(pod) for pod in pods(observed) if _answers(pod))
    due = sum(at is not None and at + timedelta(seconds=CONNECTS_S) <= now for at in since)
    if supervisor.sidecars >= due:
        return ""
    key = names.attachment(observed.job.name)
    return (
        f"{supervisor.sidecars} of {due} sidecars have reached the supervisor: see the log of container "
        f"{SIDECAR} in the attached pods. If it reports that the key was refused, delete Secret {key}, "
        "which the operator did not create; the operator will then create its own"
    )


def _sidecar_since(pod: Pod) -> datetime | None:
    for status in (pod.get("status") or {}).get("initContainerStatuses") or ():
        started = (status.get("state") or {}).get("running") or {}
        if status.get("name") == SIDECAR and status.get("started") and started.get("startedAt"):
            return parse_time(started["startedAt"])
    return None


def _own_trouble(pod: Pod) -> Trouble | None:
    """Returns the problem with a pod's containers other than the sidecar; None if there is none."""
    return trouble_of(_with_containers(pod, sidecar=False))


def _with_containers(pod: Pod, *, sidecar: bool) -> Pod:
    """Returns the pod with only the sidecar's status if `sidecar` is True, and without the sidecar's status
    otherwise."""
    status = pod.get("status") or {}
    init = [c for c in status.get("initContainerStatuses") or () if (c.get("name") == SIDECAR) is sidecar]
    if not sidecar:
        return {**pod, "status": {**status, "initContainerStatuses": init}}
    return {**pod, "status": {"initContainerStatuses": init}}


def _over(pod: Pod) -> bool:
    return leaving(pod) or (pod.get("status") or {}).get("phase") in ENDED


def _gated(pod: Pod) -> bool:
    """Returns True if a queue such as Kueue holds the pod back. Such a pod holds no GPU, so it needs no feeders yet."""
    conditions: Iterable[Mapping[str, str]] = (pod.get("status") or {}).get("conditions") or ()
    return any(
        (c.get("type"), c.get("status"), c.get("reason")) == ("PodScheduled", "False", "SchedulingGated")
        for c in conditions
    )


def _answers(pod: Pod) -> bool:
    return node_silent_since(pod) is None
