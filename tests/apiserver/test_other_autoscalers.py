"""Kubernetes' own HorizontalPodAutoscaler scales a job by the recommended number, with the manifest of the documents.

KEDA makes such an object itself: an external metric with a target average.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from documents import manifest_of
from metrics_adapter import external_metric
from processes_of_operator import until
from scaled_job import ScaledJob

from apiserver import ApiServer
from dataloaderjob.api import KIND

PAGE = Path(__file__).resolve().parents[2] / "docs" / "kubernetes" / "autoscaling.md"


def documented(kind: str) -> dict[str, Any]:
    return manifest_of(PAGE, kind)


def test_documented_hpa_follows_the_recommended_number(server: ApiServer, tmp_path: Path) -> None:
    job = ScaledJob(server, {"mode": "Recommend"})
    namespace, manifest = job.job.namespace, documented("HorizontalPodAutoscaler")
    metric = manifest["spec"]["metrics"][0]["external"]["metric"]
    shown: list[float] = []
    path = f"/apis/autoscaling/v2/namespaces/{namespace}/horizontalpodautoscalers"

    def active() -> dict[str, Any]:
        status = server.request("GET", f"{path}/mnist").get("status") or {}
        return {c["type"]: c for c in status.get("conditions") or ()}.get("ScalingActive") or {}

    with external_metric(server, tmp_path, metric["name"], lambda: shown[-1] if shown else None) as adapter:
        server.request("POST", path, manifest)
        until(lambda: active().get("status") == "False", 30, "there is no number yet")
        assert (job.replicas, active()["reason"]) == (1, "FailedGetExternalMetric")
        job.until(60)
        shown.append(job.job.get(KIND, job.job.name)["status"]["loader"]["recommendedReplicas"])
        assert shown == [6]
        until(lambda: job.replicas == 6, 60, f"the job is scaled; the autoscaler's condition: {active()}")
        until(lambda: active()["status"] == "True", 10, "the autoscaler is active")
        assert adapter.asked == {(namespace, f"dataloaderjob_name={job.job.name}")}


def test_documented_scaledobject_asks_for_what_the_hpa_asks_for() -> None:
    keda, hpa = documented("ScaledObject")["spec"], documented("HorizontalPodAutoscaler")["spec"]
    assert keda["scaleTargetRef"] == hpa["scaleTargetRef"]
    assert (keda["minReplicaCount"], keda["maxReplicaCount"]) == (hpa["minReplicas"], hpa["maxReplicas"])
    (trigger,), (metric,) = keda["triggers"], hpa["metrics"]
    assert trigger["metricType"] == metric["external"]["target"]["type"] == "AverageValue"
    assert trigger["metadata"]["threshold"] == metric["external"]["target"]["averageValue"]
    assert metric["external"]["metric"]["name"] in trigger["metadata"]["query"]
