"""Feeders out of memory, and children that another job has left: what a user sees, within 30 s."""

from __future__ import annotations

import pytest
from cluster import Cluster, until
from jobs import FEEDERS, TRAINER, Job, changed, job

pytestmark = pytest.mark.timeout(300)
FIELD = "spec.feeders.resources.limits.memory"
TOLD_S = 30.0
PIPELINES = "0e2b1f1c-8f0a-4d5e-9a57-3f1f3c0e7d11"
HUNGRY = """
import time, torch, dataloaderjob
class Hungry(torch.utils.data.Dataset):
    def __len__(self): return 64
    def __getitem__(self, i):
        if i == 13:
            print("takes all", flush=True)
            taken = []
            while True:
                taken.append(bytearray(20_000_000))
                for k in range(0, len(taken[-1]), 4096): taken[-1][k] = 1
                time.sleep(PAUSE)
        return torch.tensor([i])
try:
    for batch in dataloaderjob.DataLoader(Hungry(), batch_size=4):
        print("batch", batch[0].item(), flush=True)
except dataloaderjob.OutOfMemory as error:
    print("told:", error, flush=True)
    raise
"""
TIGHT = {"requests": {"cpu": "50m", "memory": "256Mi"}, "limits": {"memory": "900Mi"}}


def hungry(pause_s: float, **spec: object) -> dict:
    return changed(
        job("hungry", program=HUNGRY.replace("PAUSE", str(pause_s))), spec__feeders__resources=TIGHT,
        spec__trainers__job__failurePolicy={"maxRestarts": 0}, **spec,
    )  # fmt: skip


def reason(of: Job) -> str:
    """What the column REASON of `kubectl get` shows."""
    return str(of.status().get("reason", ""))


def warned(of: Job, *words: str) -> bool:
    """Whether a warning of the job's events has all these words."""
    found = of.cluster.list("events", of.namespace)
    return any(
        event["involvedObject"]["kind"] == "DataLoaderJob"
        and all(word in f"{event['reason']} {event['message']}" for word in words)
        for event in found
    )


@pytest.mark.parametrize(
    ("killer", "pause_s", "words", "spec"),
    [
        pytest.param("the kernel", 0.0, "the kernel killed it; its pod may use 900 MiB", {}, id="kernel"),
        pytest.param(
            "Ray's memory monitor", 0.2, "Ray's memory monitor killed its process",
            {"spec__ray__managed__tasks": {"cpus": 1}}, id="rays-monitor",
        ),
    ],
)  # fmt: skip
def test_sample_exhausting_memory_is_reported_with_limit_and_field(
    start, killer: str, pause_s: float, words: str, spec: dict
):
    of: Job = start(hungry(pause_s, **spec))
    until(lambda: "takes all" in of.logs(FEEDERS), timeout_s=150, what="the sample that takes all")
    until(lambda: reason(of) == "OutOfMemory", timeout_s=TOLD_S, what=f"{killer} as the reason")
    until(lambda: warned(of, "OutOfMemory", words, FIELD), timeout_s=TOLD_S, what="an event with the field")
    of.await_phase("Failed", timeout_s=120)
    told = of.logs(TRAINER, "trainer")
    assert "told: 3 feeder processes ended while making index 13 of batch 3 (feeder-0: " in told
    assert FIELD in told
    assert FIELD in of.condition("Failed")["message"]


def test_feeders_with_a_limit_too_small_to_serve_report_it(start):
    tiny = {"requests": {"cpu": "50m", "memory": "200Mi"}, "limits": {"memory": "260Mi"}}
    named = {"metadata__name": PIPELINES}  # a name that begins with a digit, as pipelines give them
    of: Job = start(
        changed(hungry(0.0), spec__feeders__resources=tiny, spec__startupDeadlineSeconds=600, **named)
    )
    until(lambda: of.pods(FEEDERS), timeout_s=60, what="the pod of feeders")
    found = of.await_condition("FeedersReady", lambda c: c["reason"] == "OutOfMemory", 120)
    assert FIELD in found["message"]
    assert "260Mi" in found["message"] or "260 MiB" in found["message"]
    assert reason(of) == "OutOfMemory"


def test_a_job_named_by_a_uuid_trains_and_completes(start):
    program = "import torch, dataloaderjob\nfor b in dataloaderjob.DataLoader(torch.arange(64), 4): print(b.tolist())"
    of: Job = start(job(PIPELINES, program=program, trainers=2))
    of.await_phase("Complete", timeout_s=200)
    assert "60, 61, 62, 63" in of.logs(TRAINER, "trainer")


@pytest.mark.slow
def test_children_left_by_a_deleted_job_are_refused_by_name(operator: Cluster, namespace: str, start):
    of: Job = start(job("left"))
    of.await_phase("Running", timeout_s=150)
    operator.kubectl("delete", "dlj", "left", "-n", namespace, "--cascade=orphan")
    until(lambda: operator.get("dlj", "left", namespace) is None, timeout_s=30, what="the job is gone")
    again: Job = start(job("left"))
    text = "already exists but does not belong to this job: delete it"
    until(lambda: text in again.condition("Ready").get("message", ""), timeout_s=TOLD_S, what="the refusal")
    operator.kubectl("delete", "job", "left-trainers-0", "-n", namespace, "--wait=true")
    again.await_phase("Running", timeout_s=150)
