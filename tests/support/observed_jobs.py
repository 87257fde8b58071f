"""Jobs as the operator observes them, for tests of what it decides."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

from manifests import manifest

from dataloaderjob.api import parse_object
from dataloaderjob.api.sidecar import SIDECAR
from dataloaderjob.api.status import ConditionType, RayStatus
from dataloaderjob_operator import names, objects
from dataloaderjob_operator.decide.decision import Decision, decide
from dataloaderjob_operator.decide.observed import Observed, SupervisorStatus

SETUP = objects.OperatorConfig(version="1.0", sidecar_image="example/sidecar:1", root_key=b"r" * 32)
T0 = datetime(2026, 1, 1, tzinfo=UTC)
RAY = RayStatus(version="2.60.0", worker_register_timeout_seconds=120)
SUPERVISOR = SupervisorStatus(desired=1, ready=1, ray=RAY)
"""Of a supervisor whose only feeder serves."""
HEAD, FEEDERS = ("Deployment", "mnist-head"), ("Deployment", "mnist-feeders")
TRAINERS = ("Job", "mnist-trainers-0")
BASE = {
    ("Secret", names.key_secret("mnist", "u", SETUP.root_key)),
    ("Service", "mnist-head"),
    ("Service", "mnist-trainers"),
    ("NetworkPolicy", "mnist-head"),
    ("NetworkPolicy", "mnist-feeder"),
    ("NetworkPolicy", "mnist-trainer"),
}


def job(**spec: Any):
    changes = {"metadata.uid": "u", "metadata.namespace": "team", "metadata.generation": 1}
    return parse_object(manifest({**changes, **{f"spec.{name}": value for name, value in spec.items()}}))


def pod(role: str, *, attempt: int = 0, started: bool = True, **status: Any) -> dict[str, Any]:
    containers = [{"name": SIDECAR, "started": started}] if role == "trainer" else []
    return {
        "metadata": {"name": f"mnist-{role}-{attempt}", "labels": {"dataloading.dev/role": role}},
        "status": {
            "phase": "Running" if started else "Pending",
            "initContainerStatuses": containers,
            **status,
        },
    }


def live(*names: tuple[str, str], **status: Any) -> dict[tuple[str, str], dict[str, Any]]:
    return {name: {"metadata": {"name": name[1]}, "status": status} for name in names}


def serving(**more: Any) -> Observed:
    """A job whose parts all serve."""
    children = (
        live(*BASE)
        | live(HEAD, FEEDERS, readyReplicas=1, replicas=1, updatedReplicas=1)
        | live(TRAINERS, active=1)
    )
    found = {"pods": (pod("head"), pod("feeder"), pod("trainer")), "supervisor": SUPERVISOR, **more}
    return Observed(job=job(), children=children, **found)


def decided(observed: Observed, seconds: float = 0) -> Decision:
    found = decide(observed, SETUP, T0 + timedelta(seconds=seconds))
    assert found is not None
    return found


def after(observed: Observed, decision: Decision, **changes: Any) -> Observed:
    return replace(observed, status=decision.status, **changes)


def condition(decision: Decision, kind: ConditionType):
    return next(c for c in decision.status.conditions if c.type == kind)


def keys(decision: Decision) -> set[tuple[str, str]]:
    """The children to apply, but settings: test_operator_pinned.py is about these."""
    found = {(child["kind"], child["metadata"]["name"]) for child in decision.apply}
    return {key for key in found if key[0] != "ConfigMap"}


def failed_trainers(observed: Observed, attempt: int = 0) -> Observed:
    ended = [{"name": "trainer", "state": {"terminated": {"exitCode": 7, "message": "CUDA error"}}}]
    name = ("Job", f"mnist-trainers-{attempt}")
    return replace(
        observed,
        children={
            **{k: v for k, v in observed.children.items() if k[0] != "Job"},
            **live(name, conditions=[{"type": "Failed", "status": "True"}]),
        },
        pods=(pod("trainer", attempt=attempt, containerStatuses=ended),),
    )
