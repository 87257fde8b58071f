"""Whether a live object already is as it shall be."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from dataloaderjob_operator.kinds import covers, keep_template, manifest_to_send, sealed


@pytest.mark.parametrize(
    ("live", "wanted"),
    [
        ({"a": 1, "b": 2}, {"a": 1}),
        ({"spec": {"replicas": 1, "progressDeadlineSeconds": 600}}, {"spec": {"replicas": 1}}),
        (
            {"ports": [{"name": "b", "port": 2}, {"name": "a", "port": 1, "protocol": "TCP"}]},
            {"ports": [{"name": "a", "port": 1}]},
        ),
        ({"args": ["x", "y"]}, {"args": ["x", "y"]}),
        ({"requests": {"cpu": "1", "memory": "2Gi"}}, {"requests": {"cpu": "1000m", "memory": "2048Mi"}}),
        ({"limits": {"cpu": "500m"}}, {"limits": {"cpu": 0.5}}),
        ({"emptyDir": {"sizeLimit": "1Gi"}}, {"emptyDir": {"sizeLimit": "1024Mi"}}),
        (
            {
                "volumeMounts": [
                    {"name": "d", "mountPath": "/a", "subPath": "a"},
                    {"name": "d", "mountPath": "/b"},
                ]
            },
            {
                "volumeMounts": [
                    {"name": "d", "mountPath": "/a", "subPath": "a"},
                    {"name": "d", "mountPath": "/b"},
                ]
            },
        ),
        (
            {"tolerations": [{"key": "a", "effect": "E"}, {"key": "a", "effect": "S"}, {"key": "b"}]},
            {"tolerations": [{"key": "a", "effect": "E"}, {"key": "a", "effect": "S"}]},
        ),
        (
            {"tolerations": [{"key": "a", "effect": "E"}, {"key": "a"}]},
            {"tolerations": [{"key": "a", "effect": "E"}]},
        ),
        (
            {"ports": [{"containerPort": 53, "protocol": "UDP"}, {"containerPort": 53, "protocol": "TCP"}]},
            {"ports": [{"containerPort": 53, "protocol": "UDP"}, {"containerPort": 53, "protocol": "TCP"}]},
        ),
        ({}, {"readOnly": False, "labels": {}, "items": [], "value": ""}),
    ],
)
def test_defaults_order_units_and_foreign_fields_are_no_difference(live: Any, wanted: Any):
    assert covers(live, wanted)


@pytest.mark.parametrize(
    ("live", "wanted"),
    [
        ({"a": 2}, {"a": 1}),
        ({}, {"a": 1}),
        ({"a": None}, {"a": {"b": 1}}),
        ({"args": ["y", "x"]}, {"args": ["x", "y"]}),
        ({"args": ["x", "y", "z"]}, {"args": ["x", "y"]}),
        ({"ports": [{"name": "b", "port": 1}]}, {"ports": [{"name": "a", "port": 1}]}),
        ({"ports": None}, {"ports": [{"name": "a"}]}),
        (
            {"tolerations": [{"key": "a", "effect": "E"}, {"key": "a", "effect": "S"}]},
            {"tolerations": [{"key": "a", "effect": "E"}, {"key": "a", "effect": "X"}]},
        ),
        (
            {"volumeMounts": [{"name": "d", "mountPath": "/a"}, {"name": "d", "mountPath": "/b"}]},
            {
                "volumeMounts": [
                    {"name": "d", "mountPath": "/a", "subPath": "x"},
                    {"name": "d", "mountPath": "/b"},
                ]
            },
        ),
        ({"requests": {"cpu": "1"}}, {"requests": {"cpu": "2"}}),
        ({"limits": {"memory": "lots"}}, {"limits": {"memory": "2Gi"}}),
        ({"cpu": "1"}, {"cpu": "1000m"}),
    ],
)
def test_different_value_order_or_absence_is_a_difference(live: Any, wanted: Any):
    assert not covers(live, wanted)


def child(**spec: Any) -> dict[str, Any]:
    return {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "a"}, "spec": spec}


def test_unchanged_child_is_not_sent_again():
    live = sealed(child(a=1, b=2))
    assert manifest_to_send(child(a=1, b=2), live) is None
    assert manifest_to_send(child(a=1, b=3), live) is not None
    assert manifest_to_send(child(a=1), live) is not None, (
        "a field that is taken back is no difference in the values"
    )


def test_immutable_child_is_only_created():
    job = {**child(a=1), "kind": "Job"}
    assert manifest_to_send(job, None) is not None
    assert manifest_to_send({**job, "spec": {"a": 2}}, sealed(job)) is None


def policy(**peer: Any) -> dict[str, Any]:
    rule = {"from": [{"podSelector": {"matchLabels": {"a": "1"}}, **peer}], "ports": [{"protocol": "TCP"}]}
    spec = {"podSelector": {}, "policyTypes": ["Ingress"], "ingress": [rule]}
    return {"kind": "NetworkPolicy", "metadata": {"name": "p"}, "spec": spec}


def test_additions_within_a_policy_count_but_foreign_fields_do_not():
    live = sealed(policy())
    assert manifest_to_send(policy(), live) is None
    assert manifest_to_send(policy(), {**live, "spec": {**live["spec"], "egress": [{}]}}) is None, (
        "not in policyTypes"
    )
    for opened in (policy(namespaceSelector={}), policy(podSelector={})):
        assert manifest_to_send(policy(), {**live, "spec": opened["spec"]}) is not None
    assert manifest_to_send(
        policy(namespaceSelector={}), {**sealed(policy(namespaceSelector={})), "spec": live["spec"]}
    ), "an empty selector is not a missing one"


def deployment(asked: str, made_by: str, image: str) -> dict[str, Any]:
    annotations = {"dataloading.dev/template": asked, "dataloading.dev/made-by": made_by}
    template = {"metadata": {"annotations": annotations}, "spec": {"image": image}}
    return {"kind": "Deployment", "metadata": {"name": "d"}, "spec": {"replicas": 1, "template": template}}


def test_newer_operator_keeps_pods_while_the_users_spec_is_unchanged():
    live = sealed(deployment("x", "1.0", "old"))
    kept = manifest_to_send(keep_template(deployment("x", "2.0", "new"), live), live)
    assert kept is None
    scaled = deployment("x", "2.0", "new")
    scaled["spec"]["replicas"] = 5
    sent = manifest_to_send(keep_template(scaled, live), live)
    assert sent is not None
    assert sent["spec"]["template"] == live["spec"]["template"]
    assert sent["spec"]["replicas"] == 5
    changed = manifest_to_send(keep_template(deployment("y", "2.0", "new"), live), live)
    assert changed is not None
    assert changed["spec"]["template"]["spec"]["image"] == "new"


def test_comparison_changes_neither_side():
    live, wanted = sealed(deployment("x", "1.0", "old")), deployment("x", "2.0", "new")
    before = copy.deepcopy((live, wanted))
    manifest_to_send(keep_template(wanted, live), live)
    assert (live, wanted) == before
