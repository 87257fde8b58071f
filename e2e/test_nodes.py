"""Nodes that are lost, drained or wanted by others: trainers start elsewhere, or the job says why they do not."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from cluster import PLACE, Cluster, Manifest, run, until
from jobs import FEEDERS, SMALL, TRAINER, Job, changed, job
from nodes import (
    drain,
    filler,
    free_millicores,
    keep_operator_off,
    not_ready_since,
    seconds_since,
    start_again,
)
from streams import stream, stream_here, takes_batches

pytestmark = [pytest.mark.slow, pytest.mark.alone, pytest.mark.timeout(900)]
TOLD_S = 90.0
"""From the moment at which the node is not ready."""
NODE_OF_TRAINERS = "spec__trainers__job__template__spec__nodeSelector"
NO_RESTART = {"spec__trainers__job__failurePolicy": {"maxRestarts": 0, "backoffSeconds": 1}}


@pytest.fixture
def stopped_for_good(operator: Cluster) -> Iterator[str]:
    """The trainers' worker, without the operator: what stops it leaves it to this fixture to start it again."""
    node = operator.node("trainers")
    keep_operator_off(operator, node)
    yield node
    operator.kubectl("uncordon", operator.node("feeders"))
    start_again(operator, node)


def counts(of: Job) -> tuple[int, int]:
    """Failures and disruptions since the last progress."""
    found = of.status()["trainers"]
    return found.get("failures", 0), found.get("disruptions", 0)


def nodes_of(of: Job, role: str) -> set[str | None]:
    return {pod["spec"].get("nodeName") for pod in of.pods(role)}


def runs(of: Job, attempt: int) -> bool:
    """Whether all trainers of this attempt run."""
    pods = of.pods(TRAINER)
    return bool(pods) and all(
        pod["metadata"]["labels"]["dataloading.dev/attempt"] == str(attempt) and pod["status"]["phase"] == "Running"
        for pod in pods
    )  # fmt: skip


@pytest.mark.nightly
def test_trainers_leave_a_dead_node_or_the_job_reports_why_they_cannot(
    operator: Cluster, start, stopped_for_good: str, record_property
):
    """The head and a feeder of each job are on that node too."""
    node, other = stopped_for_good, operator.node("feeders")
    operator.kubectl("cordon", other)
    free: Job = start(changed(stream("free", pace_s=0.4), **NO_RESTART))
    bound: Job = start(changed(job("bound"), **{NODE_OF_TRAINERS: {PLACE: "trainers"}}, **NO_RESTART))
    for each in (free, bound):
        each.await_phase("Running", timeout_s=180)
    until(lambda: takes_batches(free), timeout_s=60, what="batches", also=free.why)
    operator.kubectl("uncordon", other)
    run(["docker", "stop", node])
    until(lambda: not_ready_since(operator, node), timeout_s=120, what=f"{node} not ready")
    since = not_ready_since(operator, node)
    assert since is not None

    def said() -> bool:
        """Not `Running 1/1`, but the node that is lost."""
        ready = bound.condition("Ready")
        return ready["status"] == "False" and ready["reason"] in {"Unschedulable", "NodeUnreachable"}

    until(said, timeout_s=TOLD_S - seconds_since(since), what="what becomes of bound", also=bound.why)
    until(
        lambda: runs(free, 1) and nodes_of(free, TRAINER) == {other},
        timeout_s=TOLD_S - seconds_since(since), what="trainers elsewhere", also=free.why,
    )  # fmt: skip
    record_property("elsewhere_after_s", round(seconds_since(since)))
    assert counts(free) == (0, 1)
    found = bound.await_condition("Ready", lambda found: found["reason"] == "Unschedulable", timeout_s=60)
    assert "bound-trainers-1-0" in found["message"], found
    assert "node" in found["message"], found
    assert bound.phase() == "Queued"
    free.await_phase("Complete", timeout_s=240)
    assert free.digest() == stream_here()
    start_again(operator, node)
    bound.await_phase("Running", timeout_s=180)
    assert counts(bound) == (0, 1)


@pytest.mark.nightly
def test_trainers_drained_twice_move_without_counting_failures(operator: Cluster, start):
    moved: Job = start(changed(stream("moved", pace_s=0.4), **NO_RESTART))
    for attempt in (1, 2):
        until(lambda: takes_batches(moved), timeout_s=180, what="batches", also=moved.why)
        (node,) = nodes_of(moved, TRAINER)
        assert node is not None
        try:
            drain(operator, node)
            until(
                lambda attempt=attempt: runs(moved, attempt), timeout_s=120, what=f"attempt {attempt}", also=moved.why
            )  # fmt: skip
            assert node not in nodes_of(moved, TRAINER)
        finally:
            operator.kubectl("uncordon", node)
        assert counts(moved) == (0, attempt)
    moved.await_phase("Complete", timeout_s=240)
    assert moved.status()["trainers"]["restarts"] == 2
    assert moved.digest() == stream_here()


URGENT: Manifest = {
    "apiVersion": "scheduling.k8s.io/v1", "kind": "PriorityClass", "metadata": {"name": "e2e-urgent"}, "value": 1000,
}  # fmt: skip


@pytest.fixture
def urgent(operator: Cluster) -> Iterator[str]:
    operator.apply("default", URGENT)
    yield "e2e-urgent"
    operator.kubectl("delete", "priorityclass", "e2e-urgent", "--ignore-not-found")


@pytest.mark.nightly
def test_preempted_trainers_queue_and_restart_without_counting_failures(
    operator: Cluster, namespace: str, start, urgent: str
):
    node, large = operator.node("trainers"), 900
    assert free_millicores(operator, node) >= large, (
        "the trainers' node has no room for the trainer of this row"
    )
    elsewhere = {"spec": {"nodeSelector": {PLACE: "feeders"}}}
    displaced: Job = start(
        changed(
            stream("displaced"),
            **{NODE_OF_TRAINERS: {PLACE: "trainers"}},
            **NO_RESTART,
            spec__feeders__template=elsewhere,
            spec__ray__managed__head__template=elsewhere,
            spec__trainers__job__template__spec__containers__0__resources={
                "requests": {"cpu": f"{large}m", "memory": "256Mi"}, "limits": SMALL["limits"],
            },
        )
    )  # fmt: skip
    until(lambda: takes_batches(displaced), timeout_s=180, what="batches", also=displaced.why)
    room = free_millicores(operator, node) + large - 50
    operator.apply(namespace, filler("displaces", node, room, priorityClassName=urgent))
    until(lambda: counts(displaced) == (0, 1), timeout_s=60, what="a disruption", also=displaced.why)
    displaced.await_phase("Queued", timeout_s=60)
    assert "Insufficient cpu" in displaced.condition("Ready")["message"], displaced.why()
    operator.kubectl("delete", "pod", "displaces", "-n", namespace)
    displaced.await_phase("Complete", timeout_s=240)
    assert counts(displaced) == (0, 1)
    assert displaced.digest() == stream_here()
    assert nodes_of(displaced, FEEDERS) == set(), "feeders leave at the end"
