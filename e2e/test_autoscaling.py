"""Mode Auto on a cluster: up from one feeder, calm under a constant load, down once the load halves; and a report.

A batch costs waiting and no CPU, so a small cluster has room for several feeders.
"""

from __future__ import annotations

import math
import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import pytest
from cluster import ROOT, Manifest, run, until
from documents import manifest_of
from external_metrics import external_metric, requests_of_autoscalers
from jobs import TRAINER, Job, changed, job

from dataloaderjob.core.sizing import HEADROOM

pytestmark = [pytest.mark.slow, pytest.mark.alone, pytest.mark.timeout(1800)]
PAGE = ROOT / "docs" / "kubernetes" / "autoscaling.md"
STEP_S, COST_S = 0.1, 0.3
BEST = 1 / STEP_S
"""Batches per second of a loop that never waits."""
NEEDED = math.ceil(BEST * COST_S / HEADROOM)
MOST = math.ceil(1.25 * NEEDED)
CONSTANT_S = float(os.environ.get("E2E_CONSTANT_S") or 180)
"""Seconds of constant load, during which at most two changes are allowed. The promise is about ten minutes."""
SLOWER = "/tmp/slower"
PROGRAM = f"""
import os, signal, time, torch
from dataloaderjob import DataLoader
signal.signal(signal.SIGTERM, lambda *_: os._exit(143))
class Set(torch.utils.data.Dataset):
    def __len__(self): return 10**6
    def __getitem__(self, i):
        time.sleep({COST_S / 4})
        return i
for number, _ in enumerate(DataLoader(Set(), 4), 1):
    time.sleep({STEP_S} * (2 if os.path.exists({SLOWER!r}) else 1))
    print("at", time.time(), flush=True)
"""
AT = re.compile(r"^at ([0-9.]+)$", re.MULTILINE)


def manifest(**paths: object) -> Manifest:
    return changed(
        job("auto", program=PROGRAM),
        spec__trainers__job__template__spec__terminationGracePeriodSeconds=5,
        **paths,
    )


class Scaled:
    """A job in mode Auto, and the numbers of its replicas: (time, number)."""

    def __init__(self, start: Callable[[Manifest], Job]) -> None:
        self.job = start(manifest(spec__feeders__autoscaling={"mode": "Auto", "maxReplicas": 16}))
        self.numbers: list[tuple[float, int]] = []

    def batches(self) -> list[float]:
        """Times of the batches that the trainer has taken so far."""
        return [float(at) for at in AT.findall(self.job.logs(TRAINER, "trainer"))]

    def rate(self, seconds: float = 10.0) -> float:
        """Batches per second lately."""
        now = time.time()
        return sum(at > now - seconds for at in self.batches()) / seconds

    def look(self) -> int:
        number = int(self.job.live()["spec"]["feeders"]["replicas"])
        self.numbers.append((time.time(), number))
        return number

    def watch(self, seconds: float) -> Iterator[int]:
        """Yields the number of replicas every few seconds."""
        end = time.time() + seconds
        while time.time() < end:
            yield self.look()
            time.sleep(3.0)

    def changes(self, since: float = 0.0) -> int:
        numbers = [number for at, number in self.numbers if at >= since]
        return sum(a != b for a, b in pairwise(numbers))

    def reach(self) -> float:
        """Waits for nine tenths of the best rate. Returns the seconds since the first batch."""
        self.job.await_phase("Running", timeout_s=180)
        until(self.batches, timeout_s=120, what="a batch", also=self.job.why)
        first = self.batches()[0]

        def look() -> bool:
            self.look()
            return self.rate() >= 0.9 * BEST

        until(look, timeout_s=240, every_s=1.0, what="nine tenths of the best rate", also=self.job.why)
        return time.time() - first - 10.0  # the rate is of the last ten seconds

    def told(self) -> str:
        """Returns what happened, for the log of a test."""
        (began, first), rows = self.numbers[0], []
        for (_, before), (at, after) in pairwise(self.numbers):
            rows += [f"{after} after {at - began:.0f} s"] if after != before else []
        return ", ".join([f"replicas {first}", *rows])


def test_one_feeder_becomes_as_many_as_training_needs(start: Callable[[Manifest], Job]) -> None:
    scaled = Scaled(start)
    took_s = scaled.reach()
    highest = max(scaled.watch(30))
    sys.stdout.write(f"best rate after {took_s:.0f} s, at most {highest} feeders; {scaled.told()}\n")
    assert took_s <= 90
    assert NEEDED <= highest <= MOST
    condition = scaled.job.condition("AutoscalingActive")
    assert (condition["status"], condition["reason"]) == ("True", "Scaling"), scaled.job.why()


@pytest.mark.nightly
def test_documented_hpa_scales_a_job_to_the_recommended_number(start: Callable[[Manifest], Job]) -> None:
    """The autoscaler of the documentation, with the operator's own metric, and a stand-in for the adapter."""
    hpa = manifest_of(PAGE, "HorizontalPodAutoscaler")
    hpa["spec"]["scaleTargetRef"]["name"] = "auto"
    metric = hpa["spec"]["metrics"][0]["external"]["metric"]
    metric["selector"]["matchLabels"]["dataloaderjob_name"] = "auto"
    live = start(manifest(spec__feeders__autoscaling={"mode": "Recommend"}))
    with external_metric(live.cluster, metric["name"]):
        live.cluster.apply(live.namespace, hpa)

        def scaled() -> bool:
            found = live.live()
            loader = (found.get("status") or {}).get("loader") or {}
            return loader.get("recommendedReplicas") == found["spec"]["feeders"]["replicas"]

        def why() -> str:
            asked = requests_of_autoscalers(live.cluster)[-300:]
            return f"{live.cluster.kubectl('get', 'hpa', '-n', live.namespace)}{asked}{live.why()}"

        until(
            lambda: live.live()["spec"]["feeders"]["replicas"] > 1,
            timeout_s=300,
            what="more feeders",
            also=why,
        )
        until(scaled, timeout_s=120, what="as many feeders as recommended", also=why)
        replicas = live.live()["spec"]["feeders"]["replicas"]
        asked = requests_of_autoscalers(live.cluster)
    sys.stdout.write(f"the HorizontalPodAutoscaler set {replicas} feeders\n")
    assert NEEDED <= replicas <= MOST
    assert f"{live.namespace} dataloaderjob_name=auto [{replicas}]" in asked


def test_report_of_a_live_job_shows_waiting_feeders_and_verdict(
    start: Callable[[Manifest], Job], tmp_path: Path
) -> None:
    live = start(manifest())
    live.await_phase("Running", timeout_s=180)
    until(lambda: "at " in live.logs(TRAINER, "trainer"), timeout_s=120, what="a batch", also=live.why)

    def column() -> str | None:
        rows = live.cluster.kubectl("get", "dlj", "-n", live.namespace).splitlines()
        at = rows[0].index("INPUT")
        found = rows[1][at:].split("  ")[0].strip()
        return None if found in ("", "unknown") else found

    assert until(column, timeout_s=150, what="a verdict in the table", also=live.why) == f"storage {NEEDED}"
    assert live.condition("InputBound")["status"] == "True"
    page = tmp_path / "report.html"
    words = ["report", "-n", live.namespace, live.name, "--seconds", "20", "-o", str(page)]
    said = run(
        [sys.executable, "-m", "dataloaderjob.local.cli", *words],
        env={"KUBECONFIG": str(live.cluster.kubeconfig)},
    )
    assert "report of" in said
    shown = " ".join(
        re.sub(r"<style.*?</style>|<svg.*?</svg>|<[^>]+>", " ", page.read_text(), flags=re.S).split()
    )
    assert re.search(r"A job on a cluster, watched for (19|20|21) s", shown)
    assert re.search(r"Limited by input: training waited for input for [67]\d%", shown), shown
    assert "storage is the limit; 4 feeders instead of 1 would make it" in shown
    assert re.search(r"Feeders made \d\d+ batches", shown)
    assert "feeder-0, making batches" in shown
    assert re.search(r"The slowest samples .* index \d+ ", shown)


@pytest.mark.nightly
def test_a_constant_load_is_left_alone_and_half_of_it_scales_down(start: Callable[[Manifest], Job]) -> None:
    scaled = Scaled(start)
    took_s = scaled.reach()
    settled = time.time()
    before = list(scaled.watch(CONSTANT_S))[-1]
    changes, rate = scaled.changes(settled), scaled.rate(60.0)
    (pod,) = scaled.job.pods(TRAINER)
    name = pod["metadata"]["name"]
    scaled.job.cluster.kubectl(
        "exec", name, "-n", scaled.job.namespace, "-c", "trainer", "--", "touch", SLOWER
    )
    halved, down_s = time.time(), math.inf
    for number in scaled.watch(420):
        if number <= math.ceil(NEEDED / 2):
            down_s = time.time() - halved
            break
    sys.stdout.write(
        f"best rate after {took_s:.0f} s; {changes} changes in {CONSTANT_S:.0f} s, then {rate:.2f} batches/s; "
        f"{before} -> {number} feeders {down_s:.0f} s after the load halved; {scaled.told()}\n"
    )
    assert took_s <= 90
    assert changes <= 2
    assert rate >= 0.9 * BEST
    assert max(number for _, number in scaled.numbers) <= MOST
    assert down_s <= 360
