"""A cluster in memory for one job: its controllers, kubelets and garbage collector act when a test says so, pods can
stick, nodes can be lost, and the API server can fail, or refuse one kind of children. It knows what is in the way of
the job, and until when, so that a status can be compared with that.

Time is virtual. The operator reconciles when a watch reports something and when it has asked for it, and at no other
time: the queue's resync would hide what nobody has asked for."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from memory_api import KEY, Job, MemoryApi, Supervisors, Write
from observed_jobs import SETUP, T0

from dataloaderjob.api.sidecar import SIDECAR
from dataloaderjob_operator import names
from dataloaderjob_operator.client import ApiError
from dataloaderjob_operator.decide.observed import (
    SupervisorStatus,
    condition_of,
    has_condition,
    leaving,
    parse_time,
    show_time,
)
from dataloaderjob_operator.kinds import Manifest
from dataloaderjob_operator.names import Role
from dataloaderjob_operator.reconcile import Reconciler

PASSES = 12
"""Reconciles in a row after which none may be due at once."""
AT_ONCE_S = 1.0
REPEATED_S = 60.0
"""Seconds after which a reconcile that failed is repeated, unless a watch reports something before."""
GRACE_S = 30
STUCK_S = 60
"""Seconds from the end of its grace period for which a pod is waited for whose node answers."""
JUDGED_S = 10
"""Seconds from the failure of an attempt within which it is judged."""
TRAINERS = 2
DEPLOYMENTS = {Role.HEAD: "mnist-head", Role.FEEDER: "mnist-feeders"}
RUNS = {"containerStatuses": [{"name": "c", "state": {"running": {}}}], "phase": "Running"}
WORKS = frozenset({"runs", "disrupted"})
"""States of pods that do their work."""
REFUSAL = ApiError(403, "exceeded quota: team-quota")


class ClusterApi(MemoryApi):
    """What is deleted in the foreground is there until its pods have gone."""

    moment: datetime = T0

    async def delete(self, namespace: str, key: tuple[str, str], uid: str = "") -> dict[str, Any] | None:
        self._write("delete", *key)
        if key not in self.objects:
            return None
        gone = copy.deepcopy(self.objects[key])
        gone["metadata"]["deletionTimestamp"] = show_time(self.moment)
        return self.add(gone)


@dataclass(frozen=True, slots=True)
class Restart:
    """A further attempt of the trainers, as the status told it, and what was in the way of the one before."""

    reason: str
    message: str
    culprits: Mapping[str, str]


class Cluster(Job):
    """A job of two trainers and two feeders, of which one has to serve."""

    due: datetime | None = None
    """The moment at which the operator reconciles next; None: it waits for a watch."""

    def __init__(self) -> None:
        super().__init__(
            {"spec.feeders": {"replicas": 2, "minAvailable": 1}, "spec.trainers.job.replicas": TRAINERS}
        )
        made, self.api = self.api, ClusterApi(self._fault)
        self.api.objects = made.objects
        self.reported: SupervisorStatus | None = None
        self.failing: list[ApiError | None] = []
        """What becomes of the next writes: None lets one pass."""
        self.refused_kind: str | None = None
        """Children of this kind are refused until somebody changes that."""
        self.refusals = 0
        """Reconciles in a row in which a child was refused, and no other write failed."""
        self.disturbed = False
        """A write of the last reconcile failed for a reason that passes."""
        self.restarts: list[Restart] = []
        self.count = 0
        self.states: dict[str, str] = {}
        """What pods do, by name; nothing of those that wait for their node."""
        self.causes: dict[str, str] = {}
        """Words by which one recognizes what is wrong with a pod."""
        self.sticks: set[str] = set()
        """Pods that do not go when they are deleted."""
        self.restart_operator()

    def _fault(self, write: Write) -> ApiError | None:
        if self.failing and (error := self.failing.pop(0)) is not None:
            self.disturbed = True
            return error
        verb, kind, _ = write
        return REFUSAL if kind == self.refused_kind and verb in ("try", "create", "apply") else None

    # The operator

    def restart_operator(self) -> None:
        """Nothing is kept but what is on the API server."""
        self.supervisors = Supervisors()
        self.operator = Reconciler(self.api, self.cache, SETUP, self.supervisors, now=lambda: self.api.moment)
        self.refusals, self.due = 0, T0

    def operate(self) -> None:
        """Reconciles until that is no longer due. What is refused is repeated soon once, since counts are written once
        a second, and from then on seldom."""
        self.supervisors.reported, soon = self.reported, True
        for _ in range(PASSES):
            if self.due is None or self.due > self.api.moment:
                return
            attempt, culprits = self.attempt(), self.culprits()
            self.disturbed = False
            try:
                wait_s = self.reconcile()
            except ApiError as exc:
                refused = exc is REFUSAL and not self.disturbed
                self.refusals = self.refusals + 1 if refused else 0
                wait_s = AT_ONCE_S if refused and soon else REPEATED_S
                soon = soon and not refused
            else:
                self.refusals = 0
            if self.attempt() > attempt:
                told = self.condition("Progressing")
                self.restarts.append(Restart(told["reason"], told["message"], culprits))
            self.due = None if wait_s is None else self.api.moment + timedelta(seconds=wait_s)
            if wait_s is not None and wait_s <= AT_ONCE_S:
                self.api.moment += timedelta(seconds=wait_s)
        raise AssertionError(f"due at once after {PASSES} reconciles: {self.api.writes}")

    def pass_time(self, seconds: float) -> None:
        """Nothing happens meanwhile but what the operator has asked for."""
        end = self.api.moment + timedelta(seconds=seconds)
        while self.due is not None and self.due <= end:
            self.api.moment = max(self.api.moment, self.due)
            self.operate()
        self.api.moment = max(self.api.moment, end)

    def put(self, thing: Mapping[str, Any]) -> None:
        super().put(thing)
        self.due = T0  # at once, as that has passed

    def say(self, report: SupervisorStatus | None) -> None:
        """The supervisor reports this from now on."""
        if report != self.reported:
            self.reported, self.due = report, T0

    # What is there

    def attempt(self) -> int:
        return int(self.status.get("trainers", {}).get("restarts", 0))

    def pods(self, role: Role | None = None) -> list[Manifest]:
        found = [thing for (kind, _), thing in sorted(self.api.objects.items()) if kind == "Pod"]
        return [
            pod for pod in found if role is None or pod["metadata"]["labels"][names.LABEL_ROLE] == role.value
        ]

    def trainers(self) -> Manifest | None:
        """The Job of the present attempt."""
        return self.api.objects.get(("Job", names.trainers("mnist", self.attempt())))

    def works(self, role: Role) -> bool:
        """Checks whether enough pods of a role do their work: those of a Deployment as its controller counts them."""
        if role is Role.TRAINER:
            there = [pod for pod in self.pods(role) if not leaving(pod)]
            return sum(self.states.get(_name(pod)) in WORKS for pod in there) >= TRAINERS
        live = self.api.objects.get(("Deployment", DEPLOYMENTS[role]), {})
        return int(live.get("status", {}).get("readyReplicas") or 0) >= 1

    def in_the_way(self, role: Role) -> dict[str, str]:
        """Pods for which a role does not do its work, and words of the cause. What leaves, or has ended and has a
        successor, is in the way only of those with which nothing is wrong."""
        wrong, late = dict[str, str](), dict[str, str]()
        for pod in self.pods(role):
            name = _name(pod)
            if leaving(pod):
                late[name] = "has been terminating"
            elif name in self.causes:
                (late if _failed(pod) and role in DEPLOYMENTS else wrong)[name] = self.causes[name]
        return wrong or late

    def culprits(self) -> dict[str, str]:
        """Pods of the present attempt, and words of what is wrong with them."""
        mine = self._pods_of(names.trainers("mnist", self.attempt()))
        return {_name(pod): self.causes.get(_name(pod), "") for pod in mine}

    def bounds(self, role: Role | None = None) -> Iterator[datetime]:
        """Moments from which nothing waits any longer for pods that are being deleted."""
        for pod in filter(leaving, self.pods(role)):
            answers = self.states.get(_name(pod)) != "lost"
            yield _deleted_at(pod) + timedelta(seconds=STUCK_S if answers else 0)

    def name_bounds(self) -> Iterator[datetime]:
        """Moments from which nothing waits any longer for names of Jobs that are being deleted and have no pod."""
        for (kind, name), live in self.api.objects.items():
            if kind == "Job" and leaving(live) and not self._pods_of(name):
                yield _deleted_at(live) + timedelta(seconds=STUCK_S)

    def judged_by(self) -> datetime | None:
        """The moment until which the failure of the present attempt is judged; None: there is none to judge."""
        live = self.trainers()
        failed = None if live is None or leaving(live) else condition_of(live, "Failed")
        if failed is None:
            return None
        return parse_time(failed["lastTransitionTime"]) + timedelta(seconds=JUDGED_S)

    def to_be_made(self, role: Role) -> bool:
        """Checks whether a role has no pod yet for want of a controller that acts: it does, or says why it cannot."""
        return role in DEPLOYMENTS and all(leaving(pod) or _failed(pod) for pod in self.pods(role))

    def garbage(self) -> bool:
        """Checks whether there are pods that the garbage collector has not deleted yet."""
        return any(
            not leaving(pod)
            for (kind, name), live in self.api.objects.items()
            if kind != "Pod" and leaving(live)
            for pod in self._pods_of(name)
        )

    # What the cluster does

    def control(self) -> None:
        """The controllers: pods for what shall have some, and their counts."""
        for role, key in DEPLOYMENTS.items():
            live = self.api.objects.get(("Deployment", key))
            if live is not None:
                self._control_deployment(role, key, live)
        for (kind, name), live in list(self.api.objects.items()):
            if kind == "Job" and not leaving(live):
                self._control_job(name, live)

    def _control_deployment(self, role: Role, key: str, live: Manifest) -> None:
        there = [pod for pod in self.pods(role) if not leaving(pod) and not _failed(pod)]
        wanted = len(there) if leaving(live) else int(live["spec"]["replicas"])
        for _ in range(wanted - len(there)):
            self._make(role, "ReplicaSet", f"{key}-7c", "r")
        for pod in there[wanted:]:
            self.delete(pod)
        ready = sum(self.states.get(_name(pod)) in WORKS for pod in there[:wanted])
        self._count(live, replicas=wanted, updatedReplicas=wanted, readyReplicas=ready)

    def _control_job(self, name: str, live: Manifest) -> None:
        mine = self._pods_of(name)
        if has_condition(live, "Failed"):
            return
        if live["spec"].get("suspend"):
            self._count(live, conditions=[{"type": "Suspended", "status": "True"}])
            return
        if any(leaving(pod) or _failed(pod) for pod in mine):  # its backoffLimit is 0
            over = {"type": "Failed", "status": "True", "lastTransitionTime": show_time(self.api.moment)}
            self._count(live, failed=1, conditions=[over])
            for pod in mine:
                if not _failed(pod):
                    self.delete(pod)
            return
        for _ in range(TRAINERS - len(mine)):
            self._make(Role.TRAINER, "Job", name, live["metadata"]["uid"])
        self._count(live, active=TRAINERS)

    def _count(self, live: Manifest, **status: Any) -> None:
        """A controller writes a status, if it is another than before."""
        if live.get("status") != status:
            self.put({**live, "status": status})

    def _make(self, role: Role, kind: str, owner: str, uid: str) -> None:
        self.count += 1
        labels = names.labels("mnist", role)
        if role is Role.TRAINER:
            labels |= {names.LABEL_ATTEMPT: owner.rpartition("-")[2]}
        now = show_time(self.api.moment)
        metadata = {
            "name": f"mnist-{role.value}-p{self.count}", "namespace": KEY[0], "labels": labels,
            "ownerReferences": [{"kind": kind, "name": owner, "uid": uid, "controller": True}],
            "creationTimestamp": now,
        }  # fmt: skip
        placed = {"type": "PodScheduled", "status": "True", "lastTransitionTime": now}
        self.put(
            {
                "kind": "Pod", "metadata": metadata, "spec": {"nodeName": f"node-{self.count}"},
                "status": {"phase": "Pending", "conditions": [placed]},
            }
        )  # fmt: skip

    def report(self, pod: Manifest, state: str, cause: str = "", **status: Any) -> None:
        """A kubelet, or the scheduler, says so of a pod."""
        name = _name(pod)
        if self.states.get(name) == "lost":  # its node is back
            self.sticks.discard(name)
        self.states[name] = state
        self.causes.pop(name, None)
        if cause:
            self.causes[name] = cause
        started = [{"name": SIDECAR, "started": status.get("phase", "Pending") != "Pending"}]
        self.put({**pod, "status": {"phase": "Pending", "initContainerStatuses": started, **status}})

    def lose_node(self, pod: Manifest) -> None:
        """Its node is given up: the pod is no longer ready, and does not go when it is deleted."""
        ready = {"type": "Ready", "status": "False", "lastTransitionTime": show_time(self.api.moment)}
        given_up = [{"type": "ContainersReady", "status": "True"}, ready]
        cause = f"its node {pod['spec']['nodeName']} does not respond"
        self.report(pod, "lost", cause, **RUNS, conditions=given_up)
        self.sticks.add(_name(pod))

    def delete(self, pod: Manifest) -> None:
        if leaving(pod):
            return
        about = {
            **pod["metadata"],
            "deletionTimestamp": show_time(self.api.moment + timedelta(seconds=GRACE_S)),
            "deletionGracePeriodSeconds": GRACE_S,
        }
        self.put({**pod, "metadata": about})

    def suspend(self, held: bool) -> None:
        """Kueue takes the trainers' leave to run, or gives it back."""
        for (kind, name), live in list(self.api.objects.items()):
            if kind == "Job" and not has_condition(live, "Failed"):
                self.put({**live, "spec": {**live["spec"], "suspend": held}, "status": {}})
                for pod in self._pods_of(name) if held else ():
                    self.delete(pod)

    def collect_garbage(self) -> None:
        """Pods of what is being deleted go, as do those of lost nodes, but those that stick; then what had them."""
        for (kind, name), live in list(self.api.objects.items()):
            for pod in self._pods_of(name) if kind != "Pod" and leaving(live) else ():
                self.delete(pod)
        for pod in self.pods():
            if self.states.get(_name(pod)) == "lost":
                self.delete(pod)
            elif leaving(pod) and _name(pod) not in self.sticks:
                self._remove(("Pod", _name(pod)))
        for key, live in list(self.api.objects.items()):
            if key[0] != "Pod" and leaving(live) and not self._pods_of(key[1]):
                self._remove(key)

    def _pods_of(self, workload: str) -> list[Manifest]:
        return [
            pod
            for pod in self.pods()
            if pod["metadata"]["ownerReferences"][0]["name"].removesuffix("-7c") == workload
        ]

    def _remove(self, key: tuple[str, str]) -> None:
        self.cache.remove(self.api.objects.pop(key))
        self.due = T0


def _name(pod: Manifest) -> str:
    return str(pod["metadata"]["name"])


def _failed(pod: Manifest) -> bool:
    return bool(pod["status"].get("phase") == "Failed")


def _deleted_at(thing: Manifest) -> datetime:
    return parse_time(thing["metadata"]["deletionTimestamp"])
