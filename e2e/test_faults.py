"""What dies while the main job runs on a cluster: the batches stay the same, and the job ends by itself."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster import PLACE, RELEASE, SYSTEM, Cluster, Manifest, run, until
from jobs import FEEDERS, HEAD, SMALL, TRAINER, Job, changed, example
from main_job import run_here

pytestmark = [pytest.mark.alone, pytest.mark.timeout(1500)]
PAUSE_S = 60.0
OPERATOR = f"deployment/{RELEASE}-operator"


def spread(**options: str) -> Manifest:
    """The main job with its trainers on one worker and feeders on both. `options`: of train.py."""
    apart = {
        "maxSkew": 1, "topologyKey": "kubernetes.io/hostname", "whenUnsatisfiable": "DoNotSchedule",
        "labelSelector": {"matchLabels": {"dataloading.dev/job": "fashion-mnist", "dataloading.dev/role": "feeder"}},
    }  # fmt: skip
    made = changed(
        example(),
        spec__feeders__template={"spec": {"topologySpreadConstraints": [apart]}},
        spec__feeders__resources=SMALL,
        spec__sidecar__resources={"requests": {"cpu": "50m"}},
        spec__ray={"managed": {"head": {"resources": SMALL}}},
        spec__trainers__job__template__spec__nodeSelector={PLACE: "trainers"},
        spec__trainers__job__template__spec__containers__0__resources=SMALL,
    )
    made["spec"]["trainers"]["job"]["template"]["spec"]["containers"][0]["env"] += [
        {"name": f"FASHION_{name.upper()}", "value": value} for name, value in options.items()
    ]
    return made


def await_epoch(job: Job, number: int, timeout_s: float = 300.0) -> None:
    until(
        lambda: f"epoch {number}:" in job.logs(TRAINER, "trainer"), timeout_s=timeout_s, every_s=2.0,
        what=f"epoch {number}", also=job.why,
    )  # fmt: skip


def kill(job: Job, role: str) -> str:
    """A pod of that role, without a good-bye. Returns its name."""
    name = str(job.pods(role)[-1]["metadata"]["name"])
    job.cluster.kubectl("delete", "pod", name, "-n", job.namespace, "--grace-period=0", "--force")
    return name


@pytest.fixture
def feeders_node(operator: Cluster) -> Iterator[str]:
    """The worker that gets feeders only: it takes no pod until the test uncordons it."""
    node = operator.node("feeders")
    operator.kubectl("cordon", node)
    yield node
    operator.kubectl("uncordon", node)


def test_batches_are_unchanged_by_losing_a_feeder_the_head_and_a_node(
    operator: Cluster, start, feeders_node: str, local_digest: str
):
    job = start(spread())
    until(
        lambda: all(pod["spec"].get("nodeName") for pod in job.pods(HEAD)) and job.pods(HEAD),
        timeout_s=60, what="the head on the trainers' node", also=job.why,
    )  # fmt: skip
    operator.kubectl("uncordon", feeders_node)
    job.await_phase("Running")
    assert {pod["spec"]["nodeName"] for pod in job.pods(FEEDERS)} == {operator.node("trainers"), feeders_node}
    kill(job, FEEDERS)
    await_epoch(job, 1)
    old = kill(job, HEAD)
    await_epoch(job, 2)
    assert [pod["metadata"]["name"] for pod in job.pods(HEAD)] != [old]
    run(["docker", "pause", feeders_node])
    try:
        time.sleep(PAUSE_S)
    finally:
        run(["docker", "unpause", feeders_node])
    job.await_phase("Complete", timeout_s=900)
    assert job.digest() == local_digest
    assert job.status()["trainers"]["restarts"] == 0


def sidecar_restarts(job: Job) -> list[int]:
    return [pod["status"]["initContainerStatuses"][0]["restartCount"] for pod in job.pods(TRAINER)]


@pytest.mark.slow
def test_dead_trainer_restarts_the_group_once_without_the_operator(operator: Cluster, start, tmp_path: Path):
    """Dead sidecars restart nothing but themselves."""
    options = {"epochs": "2", "limit": "12000"}
    job = start(spread(**options))
    job.await_phase("Running")
    run(["docker", "exec", operator.node("trainers"), "pkill", "-9", "-f", "dataloaderjob.sidecar"])
    until(lambda: sidecar_restarts(job) == [1, 1], timeout_s=60, what="new sidecars", also=job.why)
    await_epoch(job, 1)
    assert job.status()["trainers"]["restarts"] == 0
    kill(job, TRAINER)
    until(lambda: job.status()["trainers"]["restarts"] == 1, timeout_s=60, what="a restart", also=job.why)
    until(lambda: len(job.pods(TRAINER)) == 2, timeout_s=90, what="both trainers anew", also=job.why)
    assert {pod["metadata"]["labels"]["dataloading.dev/attempt"] for pod in job.pods(TRAINER)} == {"1"}
    try:
        operator.kubectl("scale", OPERATOR, "-n", SYSTEM, "--replicas=0")
        kill(job, FEEDERS)
        until(
            lambda: [pod["status"]["phase"] for pod in job.pods(TRAINER)] == ["Succeeded"] * 2,
            timeout_s=300, every_s=2.0, what="the trainers' end, nobody looking", also=job.why,
        )  # fmt: skip
    finally:
        operator.kubectl("scale", OPERATOR, "-n", SYSTEM, "--replicas=1")
    job.await_phase("Complete", timeout_s=60)
    assert job.status()["trainers"]["restarts"] == 1
    assert job.digest() == run_here(tmp_path, **options)
