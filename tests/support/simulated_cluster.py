"""A cluster in memory for one job: its controllers, kubelets and garbage collector act when a test says so, pods can
stick, and the API server can fail. Time is virtual."""

from __future__ import annotations

import copy
from datetime import datetime, timedelta
from typing import Any

from memory_api import KEY, Job, MemoryApi, Supervisors
from observed_jobs import SETUP, T0

from dataloaderjob_operator import names
from dataloaderjob_operator.client import ApiError
from dataloaderjob_operator.decide.observed import SupervisorStatus, has_condition, leaving, show_time
from dataloaderjob_operator.kinds import Manifest
from dataloaderjob_operator.names import Role
from dataloaderjob_operator.objects.workloads import SIDECAR
from dataloaderjob_operator.reconcile import Reconciler

PASSES = 12
"""Reconciles in a row after which nothing may be left to write."""
AT_ONCE_S = 1.0
GRACE_S = 30
RUNS = {"containerStatuses": [{"name": "c", "state": {"running": {}}}], "phase": "Running"}


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


class Cluster(Job):
    """A job of two trainers and two feeders, of which one has to serve."""

    def __init__(self) -> None:
        super().__init__(
            {"spec.feeders": {"replicas": 2, "minAvailable": 1}, "spec.trainers.job.replicas": 2}
        )
        made, self.api = self.api, ClusterApi()
        self.api.objects = made.objects
        self.reported: SupervisorStatus | None = None
        self.failing: list[ApiError | None] = []
        """What becomes of the next writes: None lets one pass."""
        self.count = 0
        self.states: dict[str, str] = {}
        """Pods that do not simply run, by name: what is the matter with them."""
        self.restart_operator()

    def restart_operator(self) -> None:
        """Nothing is kept but what is on the API server."""
        self.supervisors = Supervisors()
        self.operator = Reconciler(self.api, self.cache, SETUP, self.supervisors, now=lambda: self.api.moment)

    def settle(self) -> tuple[float | None, ApiError | None]:
        """Reconciles until nothing is written. Returns when the operator looks again, and the error that it repeats
        for; one of both only."""
        self.api.fault = lambda _: self.failing.pop(0) if self.failing else None
        self.supervisors.reported = self.reported
        wait = None
        for _ in range(PASSES):
            try:
                wait = self.reconcile()
            except ApiError as exc:
                return None, exc
            if wait is not None and wait <= AT_ONCE_S:
                self.pass_time(wait)  # counts are written once a second: that is no deadline
            elif not self.api.writes:
                return wait, None
        raise AssertionError(f"writes after {PASSES} reconciles: {self.api.writes}")

    def pass_time(self, seconds: float) -> None:
        self.api.moment += timedelta(seconds=seconds)

    def pods(self, role: Role | None = None) -> list[Manifest]:
        found = [thing for (kind, _), thing in sorted(self.api.objects.items()) if kind == "Pod"]
        return [
            pod for pod in found if role is None or pod["metadata"]["labels"][names.LABEL_ROLE] == role.value
        ]

    # What the cluster does

    def control(self) -> None:
        """The controllers: pods for what shall have some, and their counts."""
        for role, key in ((Role.HEAD, "mnist-head"), (Role.FEEDER, "mnist-feeders")):
            live = self.api.objects.get(("Deployment", key))
            if live is not None and not leaving(live):
                there = [pod for pod in self.pods(role) if not leaving(pod)]
                for _ in range(int(live["spec"]["replicas"]) - len(there)):
                    self._make(role, "ReplicaSet", f"{key}-7c", "r")
                ready = sum(
                    self.states.get(pod["metadata"]["name"]) in ("runs", "disrupted") for pod in there
                )
                self.put({**live, "status": {"replicas": len(there), "readyReplicas": ready}})
        for (kind, name), live in list(self.api.objects.items()):
            if kind == "Job" and not leaving(live):
                self._control_job(name, live)

    def _control_job(self, name: str, live: Manifest) -> None:
        mine = [p for p in self.pods(Role.TRAINER) if p["metadata"]["ownerReferences"][0]["name"] == name]
        if has_condition(live, "Failed"):
            return
        if live["spec"].get("suspend"):
            self.put({**live, "status": {"conditions": [{"type": "Suspended", "status": "True"}]}})
            return
        if any(pod["status"].get("phase") == "Failed" for pod in mine):
            over = {"type": "Failed", "status": "True", "lastTransitionTime": show_time(self.api.moment)}
            self.put({**live, "status": {"failed": 1, "conditions": [over]}})
            return
        there = [pod for pod in mine if not leaving(pod)]
        for _ in range(int(live["spec"]["completions"]) - len(there)):
            self._make(Role.TRAINER, "Job", name, live["metadata"]["uid"])
        self.put({**live, "status": {"active": int(live["spec"]["completions"])}})

    def _make(self, role: Role, kind: str, owner: str, uid: str) -> None:
        self.count += 1
        labels = names.labels("mnist", role)
        if role is Role.TRAINER:
            labels |= {names.LABEL_ATTEMPT: owner.rpartition("-")[2]}
        now = show_time(self.api.moment)
        metadata = {
            "name": f"mnist-{role.value}-{self.count}", "namespace": KEY[0], "labels": labels,
            "ownerReferences": [{"kind": kind, "name": owner, "uid": uid, "controller": True}],
            "creationTimestamp": now,
        }  # fmt: skip
        placed = {"type": "PodScheduled", "status": "True", "lastTransitionTime": now}
        self.put(
            {"kind": "Pod", "metadata": metadata, "status": {"phase": "Pending", "conditions": [placed]}}
        )

    def report(self, pod: Manifest, state: str, **status: Any) -> None:
        """A kubelet, or the scheduler, says so of a pod."""
        started = [{"name": SIDECAR, "started": True}]
        self.states[pod["metadata"]["name"]] = state
        self.put({**pod, "status": {"phase": "Pending", "initContainerStatuses": started, **status}})

    def lose_node(self, pod: Manifest) -> None:
        """Its node is given up: it is no longer ready, is deleted, and never goes."""
        ready = {"type": "Ready", "status": "False", "lastTransitionTime": show_time(self.api.moment)}
        self.report(pod, "lost", **RUNS, conditions=[{"type": "ContainersReady", "status": "True"}, ready])
        self.delete(self.api.objects["Pod", pod["metadata"]["name"]])

    def delete(self, pod: Manifest) -> None:
        about = {
            **pod["metadata"],
            "deletionTimestamp": show_time(self.api.moment + timedelta(seconds=GRACE_S)),
            "deletionGracePeriodSeconds": GRACE_S,
        }
        self.put({**pod, "metadata": about})

    def suspend(self, held: bool) -> None:
        """Kueue takes the trainers' leave to run, or gives it back."""
        for (kind, _), live in list(self.api.objects.items()):
            if kind == "Job" and not has_condition(live, "Failed"):
                self.put({**live, "spec": {**live["spec"], "suspend": held}, "status": {}})
                for pod in self.pods(Role.TRAINER) if held else ():
                    self.delete(pod)

    def collect_garbage(self) -> None:
        """Pods of what is being deleted go, but those that are stuck, and then what had them."""
        for key, live in list(self.api.objects.items()):
            if key[0] in ("Deployment", "Job") and leaving(live):
                mine = [p for p in self.pods() if self._owner(p) == key[1]]
                for pod in mine:
                    self.delete(pod) if not leaving(pod) else None
        for pod in self.pods():
            if leaving(pod) and self.states.get(pod["metadata"]["name"]) not in ("lost", "stuck"):
                self._remove(("Pod", pod["metadata"]["name"]))
        for key, live in list(self.api.objects.items()):
            held = key[0] != "Pod" and any(self._owner(pod) == key[1] for pod in self.pods())
            if key[0] != "Pod" and leaving(live) and not held:
                self._remove(key)

    def _owner(self, pod: Manifest) -> str:
        return str(pod["metadata"]["ownerReferences"][0]["name"]).removesuffix("-7c")

    def _remove(self, key: tuple[str, str]) -> None:
        self.cache.remove(self.api.objects.pop(key))
