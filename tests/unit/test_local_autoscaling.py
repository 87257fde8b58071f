"""Mode Auto of a run on one machine."""

from __future__ import annotations

import pytest
from manifests import manifest
from sim_job import SimJob

from dataloaderjob.api import parse_object
from dataloaderjob.core.autoscaling import Bounds
from dataloaderjob.local.autoscaling import RunAutoscaler, bounds_of, within_cpus
from dataloaderjob.local.status import Snapshot


def bounds(**feeders: object) -> Bounds | None:
    return bounds_of(parse_object(manifest({"spec.feeders": feeders})).spec.feeders)


def test_bounds_count_feeders_of_all_replicas():
    auto = {"mode": "Auto", "minReplicas": 2, "maxReplicas": 3}
    assert bounds(autoscaling=auto, processesPerPod=4) == Bounds(least=8, most=12)
    assert bounds() is None
    assert bounds(autoscaling={"mode": "Off"}) is None


@pytest.mark.parametrize(("idle", "desired", "most"), [(0.0, 1, 4), (0.5, 1, 8), (0.95, 1, 32), (0.0, 7, 7)])
def test_feeders_do_not_exceed_the_cpus_that_they_use(idle, desired, most):
    found = SimJob(idle=idle).run(90)
    assert within_cpus(Bounds(least=1, most=32), found, desired, 4).most == most


def test_the_minimum_holds_on_a_small_machine():
    assert within_cpus(Bounds(least=6, most=32), None, 1, 2) == Bounds(least=6, most=6)


def drive(sim: SimJob, seconds: float, cpus: int = 64, frozen: str = "") -> list[str]:
    said: list[str] = []
    scaler = RunAutoscaler(Bounds(least=1, most=32), 1, cpus, scale=sim.scale, say=said.append)
    while sim.now < seconds:
        found = sim.run(1)
        supervisor = {"desired": sim.desired, "ready": sim.ready, "measures": found and found.as_dict()}
        scaler.look(sim.now, Snapshot(at=sim.now, supervisor=supervisor), frozen=frozen)
    return said


def test_a_run_is_scaled_to_what_training_needs():
    sim = SimJob()
    said = drive(sim, 90)
    assert sim.desired == 6
    assert said[0].startswith("feeders 1 -> 4: training waits for 80% of the time")


def test_a_run_is_not_scaled_beyond_its_machine():
    sim = SimJob()
    drive(sim, 200, cpus=2)
    assert sim.desired == 2


def test_a_run_without_trainers_is_not_scaled():
    sim = SimJob()
    assert drive(sim, 90, frozen="no trainer runs") == []


def test_a_supervisor_that_does_not_answer_changes_nothing():
    scaler = RunAutoscaler(Bounds(), 1, 4, scale=pytest.fail, say=pytest.fail)
    scaler.look(100.0, Snapshot(at=100.0), frozen="")
