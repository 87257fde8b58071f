"""Too little room: a job queues for as long as it takes, and one that serves with fewer feeders says how many lack."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator

import pytest
from cluster import PLACE, Cluster, until
from jobs import FEEDERS, SMALL, Job, changed, job
from nodes import filler, free_millicores
from streams import stream, stream_here

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
DEADLINE_S = 45
SLOT = "example.com/slot"


@pytest.mark.nightly
@pytest.mark.alone
def test_job_queueing_beyond_its_startup_deadline_runs_once_there_is_room(
    operator: Cluster, namespace: str, start
):
    node, needs = operator.node("trainers"), 800
    operator.apply(namespace, filler("fills", node, free_millicores(operator, node) - needs // 2))
    operator.kubectl("wait", "--for=condition=Ready", "pod/fills", "-n", namespace, "--timeout=60s")
    elsewhere = {"spec": {"nodeSelector": {PLACE: "feeders"}}}
    queued: Job = start(
        changed(
            stream("queued", samples=40),
            spec__startupDeadlineSeconds=DEADLINE_S,
            spec__ray__managed__tuning={"workerRegisterTimeoutSeconds": DEADLINE_S},
            spec__feeders__minAvailable=0,
            spec__feeders__template=elsewhere,
            spec__ray__managed__head__template=elsewhere,
            spec__trainers__job__template__spec__nodeSelector={PLACE: "trainers"},
            spec__trainers__job__template__spec__containers__0__resources={
                "requests": {"cpu": f"{needs}m", "memory": "256Mi"}, "limits": SMALL["limits"],
            },
        )
    )  # fmt: skip
    queued.await_phase("Queued", timeout_s=30)
    deadline = time.monotonic() + DEADLINE_S + 20
    while time.monotonic() < deadline:
        assert queued.phase() == "Queued", queued.why()
        time.sleep(2)
    for kind in ("Ready", "Progressing"):
        found = queued.condition(kind)
        assert "queued-trainers-0-0" in found["message"], found
        assert "Insufficient cpu" in found["message"], found
    operator.kubectl("delete", "pod", "fills", "-n", namespace)
    queued.await_phase("Complete", timeout_s=180)
    assert queued.digest() == stream_here(40)


@pytest.fixture
def slots(operator: Cluster) -> Iterator[str]:
    """A resource of which the trainers' worker has seven."""
    node = operator.node("trainers")
    _slots(operator, node, 7)
    yield node
    path = SLOT.replace("/", "~1")
    gone = json.dumps([{"op": "remove", "path": f"/status/capacity/{path}"}])
    operator.kubectl("patch", "node", node, "--subresource=status", "--type=json", "-p", gone)


def _slots(cluster: Cluster, node: str, number: int) -> None:
    more = json.dumps({"status": {"capacity": {SLOT: str(number)}}})
    cluster.kubectl("patch", "node", node, "--subresource=status", "--type=merge", "-p", more)
    until(
        lambda: (cluster.get("node", node, "default") or {})["status"]["allocatable"].get(SLOT) == str(number),
        timeout_s=30, what=f"{number} of {SLOT}",
    )  # fmt: skip


def test_job_with_one_unschedulable_feeder_of_eight_serves_and_names_it(operator: Cluster, start, slots: str):
    one = {"requests": {"cpu": "20m", "memory": "200Mi", SLOT: "1"}, "limits": {"memory": "1Gi", SLOT: "1"}}
    few: Job = start(changed(job("few", feeders=8), spec__feeders__resources=one))
    few.await_phase("Running", timeout_s=180)
    until(
        lambda: few.status()["feeders"]["summary"] == "7/8", timeout_s=240, what="7/8 feeders", also=few.why
    )
    assert few.condition("Ready")["status"] == "True", few.why()
    found = few.await_condition("Progressing", lambda found: "7 of 8" in found["message"], timeout_s=30)
    assert (found["status"], found["reason"]) == ("True", "FeedersMissing")
    assert f"Insufficient {SLOT}" in found["message"], found
    (waits,) = [pod["metadata"]["name"] for pod in few.pods(FEEDERS) if not pod["spec"].get("nodeName")]
    assert waits in found["message"], found
    _slots(operator, slots, 8)
    until(
        lambda: few.status()["feeders"]["summary"] == "8/8", timeout_s=120, what="8/8 feeders", also=few.why
    )
    few.await_condition("Progressing", lambda found: found["status"] == "False", timeout_s=30)
