"""The benchmark of the operator at scale: its arithmetic, and its supervisors as the operator hears them."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import itertools

from bench.operator_scale import claims, soak
from bench.operator_scale.figures import between, parse_metrics, reading, spread, what_changed
from bench.operator_scale.supervisors import Job, Mode, Supervisors
from bench.operator_scale.watching import Jobs

from dataloaderjob.core import supervision
from dataloaderjob.core.errors import AuthError
from dataloaderjob_operator import names
from dataloaderjob_operator.decide import supervisor_status
from dataloaderjob_operator.decide.observed import SupervisorStatus
from dataloaderjob_operator.monitoring import Metrics
from dataloaderjob_operator.observe import supervisor_poller

ROOT = b"r" * 32
NAME = ("team", "mnist")


def written(metrics: Metrics, *kinds: tuple[str, str]) -> str:
    """The operator's text after these writes."""
    for what in kinds:
        metrics.api_writes.labels(*what).inc()
    return metrics.text().decode()


def read(text: str, at: float) -> Any:
    return reading(parse_metrics(text), at=at, cpu_s=at / 10, peak_nbytes=1)


def test_operators_metrics_text_is_parsed_and_writes_are_attributed() -> None:
    metrics = Metrics()
    before = read(written(metrics, ("Job", "apply")), 10.0)
    metrics.reconciles.inc(4)
    metrics.queue_latency.observe(2.0)
    metrics.reconcile_duration.observe(1.0)
    after = read(written(metrics, ("Job", "apply"), ("Deployment", "apply")), 30.0)
    found = between(before, after)
    assert (found.wall_s, found.cpu_s, found.reconciles) == (20.0, 2.0, 4.0)
    assert (found.queued_s, found.looking_s) == (0.5, 0.25), "means of four looks"
    assert found.writes == {"Job apply": 1.0, "Deployment apply": 1.0}
    assert found.written == 2.0


def test_labels_with_commas_and_braces_are_parsed() -> None:
    assert parse_metrics('a{x="1,}",y="\\"2\\""} 3.5 1700\nb 1e3\n# HELP\n') == {
        ("a", (("x", "1,}"), ("y", '\\"2\\"'))): 3.5,
        ("b", ()): 1000.0,
    }


def test_malformed_sample_is_refused() -> None:
    with pytest.raises(ValueError, match="was expected, found 'a b c d'"):
        parse_metrics("a b c d")


CONDITIONS = [{"type": "Ready", "status": "True", "reason": "Serving", "lastTransitionTime": "t"}]
STATUS = {
    "observedGeneration": 1, "phase": "Running", "conditions": CONDITIONS, "feeders": {"ready": 2, "replicas": 2},
    "loader": {"gbPerSecond": "1"},
}  # fmt: skip


@pytest.mark.parametrize(
    ("change", "why"),
    [
        pytest.param({}, "", id="nothing"),
        pytest.param({"observedGeneration": 2, "loader": {}}, "generation", id="generation-before-figures"),
        pytest.param({"phase": "Degraded"}, "phase", id="phase"),
        pytest.param({"conditions": []}, "conditions", id="conditions"),
        pytest.param({"feeders": {"ready": 3, "replicas": 3}}, "feeders.ready", id="ready"),
        pytest.param({"feeders": {"ready": 2, "replicas": 3}}, "pod counts", id="pods"),
        pytest.param({"loader": {"gbPerSecond": "2"}}, "figures", id="figures"),
        pytest.param({"ray": {"version": "3"}}, "ray", id="ray"),
        pytest.param({"selector": "a=b"}, "other", id="other"),
    ],
)
def test_status_write_is_classified_by_its_change(change: dict[str, Any], why: str) -> None:
    assert what_changed(STATUS, STATUS | change) == why


def test_generations_that_one_status_skips_are_observed_by_it() -> None:
    jobs = Jobs()
    for now, generation in ((1.0, 1), (2.0, 4), (3.0, 4)):
        metadata = {"namespace": NAME[0], "name": NAME[1]}
        jobs.told({"metadata": metadata, "status": STATUS | {"observedGeneration": generation}}, now)
    assert jobs.observed_at == {(NAME, 1): 1.0, (NAME, 2): 2.0, (NAME, 3): 2.0, (NAME, 4): 2.0}
    assert jobs.written == {"generation": 2}
    assert jobs.phases() == {"Running": 1}


def test_spread_of_latencies_is_computed_from_them() -> None:
    assert spread([0.1 * n for n in range(101)]) == pytest.approx({"p50_s": 5.0, "p99_s": 9.9, "max_s": 10.0})


@pytest.mark.parametrize("per_hour", [-3.0, 0.0, 0.5, 8.0])
def test_memory_growth_ignores_warm_up_and_peaks(per_hour: float) -> None:
    peaks = {40: 30e6, 41: 30e6, 90: 5e6}
    samples = [
        (60.0 * n, 200e6 + min(n, 25) * 2e6 + per_hour * 1e6 * n / 60 + peaks.get(n, 0.0) + 1e5 * (n % 3))
        for n in range(120)
    ]
    assert soak.mb_per_hour(samples) == pytest.approx(per_hour, abs=0.05)
    assert soak.mb_per_hour(samples[:1]) == 0.0


def test_unmeasured_figures_are_missing_and_missed_floors_are_reported() -> None:
    made = claims.rows({claims.COLD: {"looked_at_s": 61.0, "writes": 0.0}})
    met = {row["case"]: row["met"] for row in made}
    assert met[f"{claims.COLD}: from process start until each job was reconciled once"] == "no"
    assert met[f"{claims.COLD}: writes, except of metrics"] == "target"
    assert not any("ours_low" in row for row in made), "one round has no interval"
    assert met[f"{claims.MEMORY}: peak resident memory after the cold start"] == "missing"


def converse(root: bytes, *wanted: int) -> list[SupervisorStatus]:
    """What the operator hears of one supervisor, asking for so many feeders in turn."""
    uid = "u-1"

    async def run() -> list[dict[str, Any]]:
        async with Supervisors(ROOT, feeders=2).serving("127.0.0.1", 0) as port:
            head = supervisor_poller.Head("127.0.0.1", f"team/mnist/{uid}", names.job_key(root, uid))
            return [
                (
                    await supervisor_poller._exchange(
                        head, port, supervisor_poller._Job(feeders), asyncio.Semaphore(1)
                    )
                ).status
                for feeders in wanted
            ]

    return asyncio.run(run())


def test_operator_hears_a_supervisor_and_controls_it() -> None:
    found = converse(ROOT, 2, 3, 3)
    assert [(status.desired, status.ready) for status in found] == [(2, 2), (2, 2), (3, 3)]
    assert found[0].ray.version
    assert found[0].cause is None


def test_an_operator_with_another_root_key_is_refused() -> None:
    with pytest.raises(AuthError):
        converse(b"x" * 32, 2)


def figures(mode: Mode, seconds: float) -> list[supervision.Rates]:
    """Of ten spans of so many seconds."""
    job = Job("team/mnist/u", 2, mode)
    observed = []
    for number in range(11):
        job.go_on(number * seconds)
        observed.append(supervisor_status.readings(job.status()))
    return [supervision.between(before, after, seconds) for before, after in itertools.pairwise(observed)]


def test_steady_figures_cost_one_write_and_moving_ones_more() -> None:
    written = {
        mode: [supervisor_status.loader_status(found) for found in figures(mode, 10.0)] for mode in Mode
    }
    notable = {
        mode: sum(supervisor_status.notable(a, b) for a, b in itertools.pairwise(of))
        for mode, of in written.items()
    }
    assert notable[Mode.STEADY] == 0
    assert notable[Mode.MOVING] > 3
