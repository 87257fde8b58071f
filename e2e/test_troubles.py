"""What a user sees when something is wrong: a condition with the pod, the container and the cause, within 30 s."""

from __future__ import annotations

import time

import pytest
from cluster import FEEDER, Cluster, Manifest, until
from jobs import FEEDERS, RESTRICTED, TRAINER, Job, changed, job

pytestmark = pytest.mark.timeout(300)
TOLD_S = 30.0
CONTAINER = "spec__trainers__job__template__spec__containers__0"
NO_IMAGE = "example.invalid/nowhere:1"
BATCHES = """
import torch
from dataloaderjob import DataLoader
class Set(torch.utils.data.Dataset):
    def __len__(self): return 64
    def __getitem__(self, i):
        {body}
        return torch.tensor([i])
for batch in DataLoader(Set(), batch_size=4): pass
"""


def told(of: Job, kind: str, *words: str, within_s: float = TOLD_S) -> Manifest:
    """The condition, once its reason and message have all the words."""

    def look(found: Manifest) -> bool:
        text = f"{found['reason']} {found.get('message', '')}".lower()
        return all(word.lower() in text for word in words)

    return of.await_condition(kind, look, within_s)


def warned(of: Job, reason: str) -> bool:
    """Whether an event of the job tells of this cause."""
    found = of.cluster.list("events", of.namespace)
    return any(
        (event["involvedObject"]["kind"], event["involvedObject"]["name"]) == ("DataLoaderJob", of.name)
        and (event["type"], event["reason"]) == ("Warning", "NotReady") and reason in event["message"]
        for event in found
    )  # fmt: skip


def settled(of: Job, kind: str) -> None:
    """Nothing is made over and over: the same objects, the same condition, for ten seconds."""
    before, children = of.condition(kind), of.children()
    time.sleep(10)
    after = of.condition(kind)
    assert (after["lastTransitionTime"], after["reason"]) == (before["lastTransitionTime"], before["reason"])
    assert len(of.children()) == len(children)


LONGER = {"workerRegisterTimeoutSeconds": 60}
PATIENT = {"spec__startupDeadlineSeconds": 600}
STARTS: dict[str, tuple[Manifest, str, tuple[str, ...]]] = {
    "the trainers' image cannot be pulled": (
        changed(job("wrong"), **{f"{CONTAINER}__image": NO_IMAGE}, spec__feeders__image=FEEDER),
        "Ready", ("ImageNotPulled", "wrong-trainers-0-0", "container trainer", NO_IMAGE),
    ),
    "the feeders' image cannot be pulled": (
        changed(job("wrong"), spec__feeders__image=NO_IMAGE),
        "FeedersReady", ("ImageNotPulled", "wrong-feeders-", "container feeder", NO_IMAGE),
    ),
    "no node has room": (
        changed(job("wrong"), spec__feeders__resources={"requests": {"cpu": "900"}, "limits": {"cpu": "900"}}),
        "FeedersReady", ("Unschedulable", "wrong-feeders-", "Insufficient cpu"),
    ),
    "a Secret of the environment is missing": (
        changed(
            job("wrong"),
            **{f"{CONTAINER}__env": [
                {"name": "TOKEN", "valueFrom": {"secretKeyRef": {"name": "absent", "key": "token"}}}
            ]},
        ),
        "Ready", ("ConfigMissing", "wrong-trainers-0-0", "container trainer", 'secret "absent" not found'),
    ),
    "a Secret that is a volume is missing": (
        changed(
            job("wrong"),
            spec__trainers__job__template__spec__volumes=[{"name": "data", "secret": {"secretName": "absent"}}],
            **{f"{CONTAINER}__volumeMounts": [{"name": "data", "mountPath": "/data"}]},
        ),
        "SidecarsReady", ("wrong-trainers-0-0", "absent", "not found"),
    ),
    "an init container fails": (
        changed(
            job("wrong"),
            spec__feeders__template={"spec": {"initContainers": [
                {"name": "prepare", "image": FEEDER, "command": ["python", "-c", "raise SystemExit(7)"],
                 "securityContext": RESTRICTED}
            ]}},
        ),
        "FeedersReady", ("wrong-feeders-", "container prepare", "exit code 7"),
    ),
}  # fmt: skip


SLOW = ("a Secret of the environment is missing", "the trainers' image cannot be pulled")
"""The Secret of a volume, and the image of the feeders, are told by the same code."""


@pytest.mark.parametrize(
    "what", [pytest.param(s, marks=[pytest.mark.slow] if s in SLOW else []) for s in STARTS]
)
def test_job_that_cannot_start_reports_why(start, what: str):
    manifest, kind, words = STARTS[what]
    wrong: Job = start(changed(manifest, **PATIENT))
    found = told(wrong, kind, *words)
    assert found["status"] != "True"
    until(lambda: warned(wrong, found["reason"]), timeout_s=20, what=f"an event {found['reason']}")
    settled(wrong, kind)


def test_job_over_its_quota_reports_it(operator: Cluster, namespace: str, start):
    quota = {
        "apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "small"},
        "spec": {"hard": {"pods": "1"}},
    }  # fmt: skip
    operator.apply(namespace, quota)
    until(
        lambda: (operator.get("resourcequota", "small", namespace) or {}).get("status", {}).get("hard"),
        timeout_s=20, what="the quota in force",
    )  # fmt: skip
    wrong: Job = start(changed(job("wrong"), **PATIENT, spec__feeders__minAvailable=0))
    told(wrong, "Ready", "exceeded quota: small")
    told(wrong, "SidecarsReady", "exceeded quota: small")
    settled(wrong, "Ready")


def test_limit_range_violated_by_feeders_is_reported_before_creation(
    operator: Cluster, namespace: str, start
):
    limit = {
        "apiVersion": "v1", "kind": "LimitRange", "metadata": {"name": "small"},
        "spec": {"limits": [{"type": "Container", "max": {"memory": "8Gi"}}]},
    }  # fmt: skip
    operator.apply(namespace, limit)
    feeders = {"requests": {"memory": "9Gi", "cpu": "100m"}, "limits": {"memory": "9Gi", "cpu": "1"}}
    wrong: Job = start(changed(job("wrong"), **PATIENT, spec__feeders__resources=feeders))
    told(wrong, "Ready", "ChildRefused", "limit is 9Gi", "spec.feeders.resources")
    assert not wrong.pods(FEEDERS)
    operator.kubectl("delete", "limitrange", "small", "-n", namespace)
    until(lambda: wrong.pods(FEEDERS), timeout_s=90, what="feeders, now that they may be")


def test_dataset_that_raises_fails_the_job_with_its_message(start):
    program = BATCHES.format(body="raise ValueError(f'sample {i} is broken')")
    wrong: Job = start(
        changed(job("wrong", program=program), spec__trainers__job__failurePolicy={"maxRestarts": 0})
    )
    wrong.await_phase("Failed", timeout_s=90)
    found = wrong.condition("Failed")
    assert "wrong-trainers-0-0" in found["message"], found
    assert "exit code 1" in found["message"]
    assert "sample 0 is broken" in wrong.logs(TRAINER, "trainer")
    assert "sample 0 is broken" in found["message"], found


def test_module_missing_in_feeders_is_named(start):
    manifest = changed(
        job("wrong", program=BATCHES.format(body="import fashion_of_nowhere"), image="fashion-mnist:1"),
        spec__trainers__job__failurePolicy={"maxRestarts": 0},
    )
    wrong: Job = start(manifest)
    wrong.await_phase("Failed", timeout_s=90)
    assert "fashion_of_nowhere" in wrong.condition("Failed")["message"]


LARGE = """
import torch
from dataloaderjob import DataLoader
class Set(torch.utils.data.Dataset):
    def __init__(self): self.data = torch.zeros(300 << 18)
    def __len__(self): return 64
    def __getitem__(self, i): return self.data[i]
for batch in DataLoader(Set(), batch_size=4, WORKERS): pass
"""
"""300 MiB of data."""


@pytest.mark.parametrize(
    ("part", "workers"),
    [
        ("feeders", "num_workers=1"), pytest.param("feeders", "", marks=pytest.mark.slow), ("sidecar", "num_workers=1"),
    ],
    ids=["of feeders", "of feeders, num_workers left out", "of the sidecar"],
)  # fmt: skip
def test_dataset_larger_than_scratch_is_refused_naming_the_field(start, part, workers):
    manifest = changed(
        job("wrong", program=LARGE.replace("WORKERS", workers)), spec__trainers__job__failurePolicy={"maxRestarts": 0},
        **{f"spec__{part}__scratch": {"size": "256Mi"}},
    )  # fmt: skip
    wrong: Job = start(manifest)
    wrong.await_phase("Failed", timeout_s=120)
    found = wrong.condition("Failed")
    assert "wrong-trainers-0-0" in found["message"], found
    assert f"scratch has 256 MiB: raise spec.{part}.scratch.size" in found["message"], found
    evicted = ["get", "events", "-n", wrong.namespace, "--field-selector=reason=Evicted", "-o", "name"]
    assert wrong.cluster.kubectl(*evicted) == "", "nothing is evicted"


def test_failing_trainer_is_restarted_as_often_as_allowed(start):
    wrong: Job = start(
        changed(
            job("wrong", program="raise SystemExit(3)"), spec__trainers__job__failurePolicy={"maxRestarts": 1}
        )
    )
    wrong.await_phase("Failed", timeout_s=120)
    found = wrong.condition("Failed")
    assert found["reason"] == "MaxRestartsExceeded"
    assert "exit code 3" in found["message"]
    assert wrong.status()["trainers"]["restarts"] == 1
    until(lambda: not wrong.pods(FEEDERS), timeout_s=15, what="feeders gone")


LAST_WORDS = r"""
import os, signal, socket
if socket.gethostname().endswith("-1"):
    signal.sigwait([signal.SIGTERM])
    raise SystemExit
said = b"pair.cc:534 closed by peer " + os.environb[b"MOOD"] + b" \0 \xff\xfe \xed\xa0\xbd \x1b[31m the end"
os.write(2, said + b"\n")
raise SystemExit(3)
"""
"""Of rank 0, as torch's gloo has them, with what is no text besides."""


@pytest.mark.slow
def test_undecodable_last_output_is_reported_and_blocks_no_restart(start):
    manifest = changed(
        job("wrong", program=LAST_WORDS, trainers=2), spec__trainers__job__failurePolicy={"maxRestarts": 1},
        **{f"{CONTAINER}__env": [{"name": "MOOD", "value": "\U0001f622"}]},
    )  # fmt: skip
    wrong: Job = start(manifest)
    until(
        lambda: wrong.status().get("trainers", {}).get("restarts") == 1,
        timeout_s=120,
        what="a restart",
        also=wrong.why,
    )
    until(
        lambda: any(pod["metadata"]["name"].startswith("wrong-trainers-1-") for pod in wrong.pods(TRAINER)),
        timeout_s=90, what="trainers made anew", also=wrong.why,
    )  # fmt: skip
    wrong.await_phase("Failed", timeout_s=120)
    (restarted,) = [
        event for event in wrong.cluster.list("events", wrong.namespace)
        if (event["involvedObject"]["kind"], event["reason"]) == ("DataLoaderJob", "Restarted")
    ]  # fmt: skip
    found = wrong.condition("Failed")
    assert found["reason"] == "MaxRestartsExceeded"
    for message in (restarted["message"], found["message"]):
        assert "container trainer: exit code 3: " in message, message
        assert "pair.cc:534 closed by peer \U0001f622 " in message, message
        assert message.partition(" the end")[1], message
        assert not {"\0", "\x1b"} & set(message), message
    assert wrong.status()["trainers"]["restarts"] == 1


def test_job_that_does_not_start_in_time_fails_with_the_cause(start):
    manifest = changed(
        job("wrong"), spec__startupDeadlineSeconds=15, spec__feeders__image=NO_IMAGE,
        spec__ray={"managed": {"tuning": {"workerRegisterTimeoutSeconds": 10}}},
    )  # fmt: skip
    wrong: Job = start(manifest)
    wrong.await_phase("Failed", timeout_s=60)
    found = wrong.condition("Failed")
    assert found["reason"] == "StartupDeadlineExceeded"
    assert NO_IMAGE in found["message"]
    until(
        lambda: not wrong.pods(TRAINER),
        timeout_s=60,
        what="trainers gone, and what they held",
        also=wrong.why,
    )


@pytest.mark.slow
def test_low_worker_register_timeout_is_named_and_raising_it_helps(start):
    slow = {"requests": {"cpu": "50m", "memory": "256Mi"}, "limits": {"cpu": "250m", "memory": "2Gi"}}
    low = changed(
        job("wrong"), spec__ray__managed__tuning={"workerRegisterTimeoutSeconds": 1}, spec__feeders__resources=slow
    )  # fmt: skip
    wrong: Job = start(low)
    told(wrong, "FeedersReady", "workerRegisterTimeoutSeconds", within_s=90)
    assert wrong.status()["ray"]["workerRegisterTimeoutSeconds"] == 1
    wrong.cluster.patch("dlj", "wrong", wrong.namespace, {"spec": {"ray": {"managed": {"tuning": LONGER}}}})
    wrong.await_phase("Running", timeout_s=120)
    until(
        lambda: wrong.status()["ray"]["workerRegisterTimeoutSeconds"] == 60, timeout_s=60, what="60 in force"
    )
