"""Jobs with attached trainers as the operator observes them, and the pods of other controllers."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any

from manifests import ATTACHED, FOLLOW, manifest
from observed_jobs import FEEDERS, HEAD, SETUP, SUPERVISOR, T0, live, pod

from dataloaderjob.api import DataLoaderJob, parse_object
from dataloaderjob.api.sidecar import SIDECAR
from dataloaderjob_operator.decide.decision import Decision, decide
from dataloaderjob_operator.decide.observed import Observed

STARTED = "2026-01-01T00:00:00Z"


def job(**spec: Any) -> DataLoaderJob:
    """A job with attached trainers; the keywords are fields below spec.trainers.attach, or dotted paths below spec."""
    changes = {
        **ATTACHED, "metadata.uid": "u", "metadata.namespace": "team", "metadata.generation": 1,
        **{f"spec.{n}" if "." in n else f"spec.trainers.attach.{n}": value for n, value in spec.items()},
    }  # fmt: skip
    return parse_object(manifest(changes))


def following(**more: Any) -> DataLoaderJob:
    return job(follow=FOLLOW, **more)


def attached_pod(name: str = "a", *, started: bool = True, **status: Any) -> dict[str, Any]:
    """A labeled pod with a sidecar, which listens if the pod has started."""
    state = {"running": {"startedAt": STARTED}} if started else {"waiting": {"reason": "PodInitializing"}}
    return {
        "kind": "Pod",
        "metadata": {
            "name": name, "namespace": "team", "uid": f"uid-{name}", "labels": {"dataloading.dev/inject": "mnist"},
        },
        "spec": {"initContainers": [{"name": SIDECAR, "restartPolicy": "Always"}], "nodeName": "n"},
        "status": {
            "phase": "Running" if started else "Pending",
            "conditions": [{"type": "PodScheduled", "status": "True", "lastTransitionTime": STARTED}],
            "initContainerStatuses": [{"name": SIDECAR, "started": started, "state": state}],
            "containerStatuses": [{"name": "node", "state": {"running": {}} if started else {"waiting": {}}}],
            **status,
        },
    }  # fmt: skip


def with_spec(found: dict[str, Any], **spec: Any) -> dict[str, Any]:
    return {**found, "spec": {**found["spec"], **spec}}


def serving(*pods: dict[str, Any], **more: Any) -> Observed:
    """A job whose head and feeders serve, with these pods attached, whose sidecars are connected."""
    supervisor = replace(SUPERVISOR, sidecars=len(pods), ranks=8 * len(pods))
    found: dict[str, Any] = {
        "job": job(), "supervisor": supervisor, "pods": (pod("head"), pod("feeder")), "attached": pods,
        "children": live(HEAD, FEEDERS, readyReplicas=1, replicas=1, updatedReplicas=1),
    }  # fmt: skip
    return Observed(**{**found, **more})


def starting(*pods: dict[str, Any], **more: Any) -> Observed:
    """A job that has no children yet."""
    return serving(*pods, **{"children": {}, "pods": (), "supervisor": None, **more})


def decided(observed: Observed, seconds: float = 0) -> Decision:
    found = decide(observed, SETUP, T0 + timedelta(seconds=seconds))
    assert found is not None
    return found


def later(observed: Observed, seconds: float, *, before: float = 0) -> Decision:
    """The decision some seconds after an earlier one, whose status was written."""
    return decided(replace(observed, status=decided(observed, before).status), seconds)


def feeder_replicas(decision: Decision) -> int | None:
    found = [c["spec"]["replicas"] for c in decision.apply if (c["kind"], c["metadata"]["name"]) == FEEDERS]
    return found[0] if found else None
