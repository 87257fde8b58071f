"""Mode Auto on a real API server: the operator scales a job as `kubectl scale` does, unless another autoscaler does."""

from __future__ import annotations

from typing import Any

import pytest
from manifests import manifest
from operated import Operated
from scaled_job import ScaledJob

from apiserver import ApiServer, Refused
from dataloaderjob.api import KIND
from dataloaderjob_operator.autoscaler import CHECK_S

AUTO = {"mode": "Auto", "maxReplicas": 16}


def test_a_job_in_mode_auto_is_scaled_up_and_down(server: ApiServer) -> None:
    job = ScaledJob(server, AUTO)
    job.until(90)
    assert job.replicas == 6
    assert (job.condition["status"], job.condition["reason"]) == ("True", "Scaling")
    assert job.condition["message"].startswith("replicas 4 -> 6: training waits for")
    managers = {
        (entry["manager"], entry.get("subresource"))
        for entry in job.job.get(KIND, job.job.name)["metadata"]["managedFields"]
        if "f:replicas" in str(entry["fieldsV1"].get("f:spec"))
    }
    assert ("dataloaderjob-operator", "scale") in managers
    job.sim.step_s = lambda now: 0.2
    job.until(90 + 360)
    assert job.replicas == 3


@pytest.mark.parametrize("mode", ["Recommend", "Off"])
def test_a_job_in_another_mode_is_not_scaled(server: ApiServer, mode: str) -> None:
    job = ScaledJob(server, {"mode": mode})
    job.until(60)
    assert job.replicas == 1
    assert (job.condition["status"], job.condition["reason"]) == ("False", mode)


def test_a_horizontal_pod_autoscaler_blocks_mode_auto(server: ApiServer) -> None:
    job = ScaledJob(server, AUTO)
    job.hpa("another")
    job.hpa(job.job.name)
    job.until(60)
    assert job.replicas == 1
    assert (job.condition["status"], job.condition["reason"]) == ("False", "HorizontalPodAutoscaler")
    assert f"HorizontalPodAutoscaler for-{job.job.name} scales this job" in job.condition["message"]
    path = f"/apis/autoscaling/v2/namespaces/{job.job.namespace}/horizontalpodautoscalers/for-{job.job.name}"
    job.job.server.request("DELETE", path)
    job.until(60 + CHECK_S + 90)
    assert job.replicas == 6
    assert job.condition["status"] == "True"


def test_a_number_outside_the_bounds_is_corrected_at_once(server: ApiServer) -> None:
    job = ScaledJob(server, {"mode": "Auto", "minReplicas": 3, "maxReplicas": 5})
    job.until(10)
    assert job.replicas == 3


def test_a_suspended_job_is_left_alone(server: ApiServer) -> None:
    job = ScaledJob(server, AUTO)
    job.job.edit(suspend=True)
    job.until(60)
    assert job.replicas == 1
    assert (job.condition["status"], job.condition["reason"]) == ("Unknown", "NotMeasured")


def test_a_job_recreated_meanwhile_is_not_scaled(server: ApiServer) -> None:
    job = ScaledJob(server, AUTO)
    job.scalers._version = lambda key: "1"
    job.until(60)
    assert job.replicas == 1


@pytest.mark.parametrize(
    ("autoscaling", "said"),
    [
        ({"minReplicas": 9, "maxReplicas": 4}, "use at most maxReplicas"),
        ({"mode": "Sometimes"}, "Unsupported value"),
        ({"costCeiling": 0}, "greater than or equal to 1"),
        ({"mode": "Auto", "maxReplicas": 0}, "greater than or equal to 1"),
    ],
)
def test_bounds_that_make_no_sense_are_refused(
    server: ApiServer, autoscaling: dict[str, Any], said: str
) -> None:
    with pytest.raises(Refused) as refused:
        Operated(server, manifest({"spec.feeders.autoscaling": autoscaling}))
    assert said in str(refused.value)


def test_a_maximum_below_min_available_is_refused_in_mode_auto_only(server: ApiServer) -> None:
    def spec(mode: str) -> dict[str, Any]:
        feeders = {"replicas": 4, "minAvailable": 4, "autoscaling": {"mode": mode, "maxReplicas": 2}}
        return manifest({"spec.feeders": feeders})

    Operated(server, spec("Recommend"))
    with pytest.raises(Refused, match="use at least minAvailable, and at most"):
        Operated(server, spec("Auto"))
