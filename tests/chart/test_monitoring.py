"""PodMonitors find the pods that have metrics, at the port that serves them."""

from __future__ import annotations

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


def trainers() -> dict[str, Any]:
    job = parse_object(manifest({"metadata.uid": "u", "metadata.namespace": "team"}))
    return dict(objects.trainers(job, SETUP, 0)["spec"]["template"])


def test_there_is_none_unless_it_is_asked_for() -> None:
    assert not {OPERATOR, SIDECARS} & set(render())


def test_each_finds_its_pods_and_not_the_others() -> None:
    found = render(*ON)
    operator = found["Deployment", "r-operator"]["spec"]["template"]
    assert finds(found[OPERATOR], operator)
    assert finds(found[SIDECARS], trainers())
    assert not finds(found[OPERATOR], trainers())
    assert not finds(found[SIDECARS], operator)


def test_its_monitor_is_where_jobs_are() -> None:
    assert render(*ON)[SIDECARS]["spec"]["namespaceSelector"] == {"any": True}
    named = render(*ON, "--set", "namespaces={a,b}")[SIDECARS]
    assert named["spec"]["namespaceSelector"] == {"matchNames": ["a", "b"]}


def test_labels_and_interval_are_those_of_the_values() -> None:
    found = render(*ON, "--set", "podMonitor.labels.release=prom", "--set", "podMonitor.interval=5s")
    for name in (OPERATOR, SIDECARS):
        assert found[name]["metadata"]["labels"]["release"] == "prom"
        assert found[name]["spec"]["podMetricsEndpoints"][0]["interval"] == "5s"
