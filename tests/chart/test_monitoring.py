"""PodMonitors find the pods that have metrics, at the port that serves them."""

from __future__ import annotations

import re
from typing import Any

from manifests import manifest

from chart import render
from dataloaderjob.api import parse_object
from dataloaderjob_operator import objects

ON = ("--set", "podMonitor.enabled=true")
OPERATOR, SIDECARS = ("PodMonitor", "r-operator"), ("PodMonitor", "r-sidecars")
SETUP = objects.OperatorConfig(version="1.0", sidecar_image="example/sidecar:1", root_key=b"r" * 32)


def finds(monitor: dict[str, Any], pod: dict[str, Any]) -> bool:
    """Whether its labels and the name of its port are those of the pod."""
    labels = pod["metadata"]["labels"]
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    ports = [
        port["name"]
        for group in ("initContainers", "containers")
        for container in pod["spec"].get(group, [])
        for port in container.get("ports", [])
    ]
    return endpoint["port"] in ports and monitor["spec"]["selector"]["matchLabels"].items() <= labels.items()


def relabeled(monitor: dict[str, Any], served: dict[str, str], pod: dict[str, str]) -> dict[str, str] | None:
    """The labels that Prometheus stores of a sample, by its documented order; None if it drops the sample."""
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    target = {"namespace": pod["__meta_kubernetes_namespace"]} | {
        rule["targetLabel"]: pod[rule["sourceLabels"][0]] for rule in endpoint["relabelings"]
    }
    assert not endpoint["honorLabels"]
    labels = {
        f"exported_{name}" if name in target else name: value for name, value in served.items()
    } | target
    for rule in endpoint["metricRelabelings"]:
        if rule.get("action") == "keep" and not re.fullmatch(rule["regex"], labels[rule["sourceLabels"][0]]):
            return None
        if rule.get("action") == "labeldrop":
            labels = {name: value for name, value in labels.items() if not re.fullmatch(rule["regex"], name)}
    return labels


def trainers() -> dict[str, Any]:
    job = parse_object(manifest({"metadata.uid": "u", "metadata.namespace": "team"}))
    return dict(objects.training(job, SETUP, 0)[-1]["spec"]["template"])


def test_monitors_are_off_by_default() -> None:
    assert not {OPERATOR, SIDECARS} & set(render())


def test_each_monitor_selects_only_its_own_pods() -> None:
    found = render(*ON)
    operator = found["Deployment", "r-operator"]["spec"]["template"]
    assert finds(found[OPERATOR], operator)
    assert finds(found[SIDECARS], trainers())
    assert not finds(found[OPERATOR], trainers())
    assert not finds(found[SIDECARS], operator)


def test_sidecar_monitor_selects_the_jobs_namespaces() -> None:
    assert render(*ON)[SIDECARS]["spec"]["namespaceSelector"] == {"any": True}
    named = render(*ON, "--set", "namespaces={a,b}")[SIDECARS]
    assert named["spec"]["namespaceSelector"] == {"matchNames": ["a", "b"]}


def test_trainers_pod_cannot_forge_metrics_of_other_jobs_or_names() -> None:
    monitor = render(*ON)[SIDECARS]
    pod = {"__meta_kubernetes_namespace": "team", "__meta_kubernetes_pod_label_dataloading_dev_job": "mnist"}
    forged = {
        "__name__": "dataloaderjob_sidecar_feeders", "dataloaderjob_namespace": "other",
        "dataloaderjob_name": "theirs", "namespace": "other", "rank": "0",
    }  # fmt: skip
    assert relabeled(monitor, forged, pod) == {
        "__name__": "dataloaderjob_sidecar_feeders", "dataloaderjob_namespace": "team",
        "dataloaderjob_name": "mnist", "namespace": "team", "rank": "0",
    }  # fmt: skip
    assert relabeled(monitor, {**forged, "__name__": "kube_pod_info"}, pod) is None
    assert relabeled(monitor, {**forged, "__name__": "dataloaderjob_operator_jobs"}, pod) is None
    assert monitor["spec"]["sampleLimit"] > 0


def test_service_monitor_replaces_the_operators_pod_monitor() -> None:
    found = render(*ON, "--set", "serviceMonitor.enabled=true,serviceMonitor.labels.release=prom")
    assert OPERATOR not in found, "else each metric would be there twice"
    assert SIDECARS in found
    monitor, service = found["ServiceMonitor", "r-operator"], found["Service", "r-operator-metrics"]
    assert monitor["metadata"]["labels"]["release"] == "prom"
    assert monitor["spec"]["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()
    (port,), (endpoint,) = service["spec"]["ports"], monitor["spec"]["endpoints"]
    assert port["name"] == endpoint["port"]
    pod = found["Deployment", "r-operator"]["spec"]["template"]
    assert service["spec"]["selector"].items() <= pod["metadata"]["labels"].items()
    assert port["targetPort"] in [p["name"] for p in pod["spec"]["containers"][0]["ports"]]
    assert ("ServiceMonitor", "r-operator") not in render(*ON)


def test_monitor_labels_and_interval_come_from_the_values() -> None:
    found = render(*ON, "--set", "podMonitor.labels.release=prom", "--set", "podMonitor.interval=5s")
    for name in (OPERATOR, SIDECARS):
        assert found[name]["metadata"]["labels"]["release"] == "prom"
        assert found[name]["spec"]["podMetricsEndpoints"][0]["interval"] == "5s"
