"""Values for the operator's pod reach it, and take nothing from it that the chart needs."""

from __future__ import annotations

from typing import Any

import pytest

from chart import render
from dataloaderjob_operator.options import parse

OPERATOR, TEST = ("Deployment", "r-operator"), ("Pod", "r-operator-test")


def template(*options: str) -> dict[str, Any]:
    return dict(render(*options)[OPERATOR]["spec"]["template"])


def pod_of(*options: str) -> dict[str, Any]:
    return dict(template(*options)["spec"])


@pytest.mark.parametrize(
    ("field", "value", "json"),
    [
        ("affinity", {"podAntiAffinity": {}}, '{"podAntiAffinity":{}}'),
        ("nodeSelector", {"pool": "system"}, '{"pool":"system"}'),
        ("tolerations", [{"operator": "Exists"}], '[{"operator":"Exists"}]'),
        ("priorityClassName", "system-cluster-critical", '"system-cluster-critical"'),
        (
            "topologySpreadConstraints",
            [{"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "ScheduleAnyway"}],
            '[{"maxSkew":1,"topologyKey":"zone","whenUnsatisfiable":"ScheduleAnyway"}]',
        ),
    ],
)
def test_scheduling_values_reach_the_pod(field: str, value: Any, json: str) -> None:
    assert field not in pod_of()
    assert pod_of("--set-json", f"{field}={json}")[field] == value


def test_pod_labels_and_annotations_keep_the_selector_labels() -> None:
    theirs = ["--set", "podLabels.team=data,podLabels.app\\.kubernetes\\.io/name=other,podAnnotations.a=b"]
    found = render(*theirs)[OPERATOR]["spec"]
    labels = found["template"]["metadata"]["labels"]
    assert labels["team"] == "data"
    assert found["selector"]["matchLabels"].items() <= labels.items()
    assert found["template"]["metadata"]["annotations"] == {"a": "b"}


def test_arguments_and_environment_are_added() -> None:
    spec = pod_of(
        "--set",
        "extraArgs={--resync-seconds=60}",
        "--set-json",
        'extraEnv=[{"name":"HTTPS_PROXY","value":"p:1"}]',
    )
    (only,) = spec["containers"]
    assert parse(only["args"]).resync_s == 60
    assert {"name": "HTTPS_PROXY", "value": "p:1"} in only["env"]


@pytest.mark.parametrize("name", [OPERATOR, TEST], ids=["operator", "test"])
def test_security_context_can_be_left_to_the_cluster(name: tuple[str, str]) -> None:
    """OpenShift refuses a pod that names others than the namespace's."""
    for options in ([], ["--set-json", "podSecurityContext=null", "--set-json", "securityContext=null"]):
        thing = render(*options)[name]
        spec = thing["spec"]["template"]["spec"] if name is OPERATOR else thing["spec"]
        (only,) = spec["containers"]
        fixed = {"fsGroup", "runAsUser", "runAsGroup", "supplementalGroups"}
        assert not fixed & {*spec.get("securityContext", {}), *only.get("securityContext", {})}
        if options:
            assert "securityContext" not in spec
            assert "securityContext" not in only


def test_custom_security_context_is_merged_with_the_charts() -> None:
    spec = pod_of("--set", "podSecurityContext.fsGroup=7,securityContext.runAsUser=8")
    assert spec["securityContext"] == {
        "fsGroup": 7, "runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"},
    }  # fmt: skip
    assert spec["containers"][0]["securityContext"]["runAsUser"] == 8


@pytest.mark.parametrize(
    ("value", "why"),
    [
        ('extraArgs=["resync"]', "extraArgs"),
        ('extraEnv=[{"key":"a"}]', "extraEnv"),
        ('podLabels={"a":1}', "podLabels"),
        ("securityContext=false", "securityContext"),
        ('topologySpreadConstraints=[{"maxSkew":1}]', "topologySpreadConstraints"),
        ('tolerations=["all"]', "tolerations"),
    ],
)
def test_value_of_wrong_form_is_refused_by_name(value: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        render("--set-json", value)
