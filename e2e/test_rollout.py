"""Feeders are replaced while a job runs: a bad image stops at the first pod, a good change goes through, and batches go
on all the time."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime

import pytest
from cluster import TRAINER as IMAGE
from cluster import Cluster, Manifest, until
from jobs import FEEDERS, TRAINER, Job, job
from streams import longest_gap_s

pytestmark = [pytest.mark.slow, pytest.mark.alone, pytest.mark.timeout(1500)]
BAD = "example.com/feeder:not-there"
SETTLE_S = 60.0
"""The bad image has so long to take a second pod."""
STEADY_GAP_S = 5.0
"""Between two lines of the trainer, three of which come a second, while no feeder moves."""
MAX_GAP_S = 20.0
"""The same while a feeder of two is moved."""
PROGRAM = """
import time, torch
from dataloaderjob import DataLoader

class Squares(torch.utils.data.Dataset):
    def __len__(self): return 4096
    def __getitem__(self, i): return torch.full((256,), i * i)

for epoch in range(100000):
    for number, batch in enumerate(DataLoader(Squares(), batch_size=32)):
        assert batch[3, 0] == (32 * number + 3) ** 2, "the batch is another one"
        if number % 16 == 0:
            print("taken", epoch, number, flush=True)
        time.sleep(0.02)
"""


def streaming() -> Manifest:
    """Two feeders, and a trainer that takes batches until it is told to end and compares each one."""
    made = job("rolled", program=PROGRAM, image=IMAGE, feeders=2)
    made["spec"]["feeders"] |= {"image": IMAGE, "template": {"spec": {"containers": [{"name": "feeder"}]}}}
    return made


@contextmanager
def taken(of: Job, max_gap_s: float) -> Iterator[None]:
    """Fails if batches stop for longer than that within the block."""
    began = datetime.now(UTC)
    yield
    gap_s = longest_gap_s(of, began, datetime.now(UTC))
    assert gap_s < max_gap_s, f"no batch for {gap_s:.1f} s"


def by_name(of: Job) -> dict[str, bool]:
    """Whether each pod of feeders is ready."""
    return {
        pod["metadata"]["name"]: any(
            c["type"] == "Ready" and c["status"] == "True" for c in pod["status"].get("conditions", ())
        )
        for pod in of.pods(FEEDERS)
    }


@pytest.mark.nightly
def test_rollout_of_a_bad_image_stops_at_one_pod_and_batches_continue(operator: Cluster, start):
    made: Job = start(streaming())
    made.await_phase("Running", timeout_s=180)
    until(lambda: list(by_name(made).values()) == [True, True], timeout_s=60, what="two ready", also=made.why)
    old = set(by_name(made))
    until(lambda: "taken" in made.logs(TRAINER, "trainer"), timeout_s=90, what="batches", also=made.why)

    def feeders(**change: object) -> None:
        operator.patch("dlj", made.name, made.namespace, {"spec": {"feeders": change}})

    with taken(made, STEADY_GAP_S):
        feeders(image=BAD)
        told = made.await_condition("Progressing", lambda c: c["reason"] == "RolloutStuck", timeout_s=90)
        deadline = time.monotonic() + SETTLE_S
        while time.monotonic() < deadline:
            pods = by_name(made)
            assert old <= set(pods), "an old feeder was given up"
            (bad,) = set(pods) - old
            assert [pods[name] for name in sorted(pods)].count(True) == 2
            time.sleep(2.0)
        assert told["status"] == "True"
        assert f"pod {bad}, container feeder" in made.condition("Progressing")["message"]
        assert made.condition("Ready")["status"] == "True", made.why()
        feeders(image=IMAGE)
        made.await_condition("Progressing", lambda c: c["status"] == "False", timeout_s=90)
        assert set(by_name(made)) == old, "they serve as before"

    with taken(made, MAX_GAP_S):
        template = {"spec": {"containers": [{"name": "feeder", "env": [{"name": "ROUND", "value": "2"}]}]}}
        feeders(template=template)
        until(
            lambda: old.isdisjoint(pods := by_name(made)) and list(pods.values()) == [True, True],
            timeout_s=300, what="both pods replaced", also=made.why,
        )  # fmt: skip
        made.await_condition("Progressing", lambda c: c["status"] == "False", timeout_s=90)
        until(
            lambda: made.status()["feeders"]["summary"] == "2/2", timeout_s=90,
            what="the feeder that moved last", also=made.why,
        )  # fmt: skip
    assert made.status()["trainers"]["restarts"] == 0
