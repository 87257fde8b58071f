"""The chart grants what each row of the operator's table of kinds needs; `tests/apiserver` has what is really used."""

from __future__ import annotations

import pytest
from rights import Right, granted

from chart import render
from dataloaderjob.api import KIND
from dataloaderjob_operator.kinds import CHILDREN, KINDS, ObjectKind, Source

VERBS = {
    Source.WATCH: {"list", "watch"},
    Source.NONE: set(),
    Source.LOOKUP: {"list"},
}


@pytest.fixture(scope="module")
def rights() -> set[Right]:
    return granted(render()["ClusterRole", "ops.r-operator"]["rules"])


@pytest.mark.parametrize("kind", KINDS.values(), ids=lambda kind: kind.name)
def test_chart_grants_exactly_the_verbs_of_each_kind(kind: ObjectKind, rights: set[Right]) -> None:
    wanted = set(VERBS[kind.source])
    if kind in CHILDREN:
        wanted |= {"create"} if kind.source is Source.NONE else {"get", "create", "patch", "delete"}
    if kind.name == KIND:
        wanted |= {"delete"}
    if kind.name in ("Event", "Pod"):
        wanted |= {"create"}
    assert {
        verb for group, resource, verb in rights if (group, resource) == (kind.group, kind.plural)
    } == wanted


def test_no_kind_missing_from_the_table_is_granted(rights: set[Right]) -> None:
    known = {(kind.group, kind.plural) for kind in KINDS.values()}
    assert {(group, resource.partition("/")[0]) for group, resource, _ in rights} <= known


FOLLOWED = {("jobset.x-k8s.io", "jobsets", "get"), ("trainer.kubeflow.org", "trainjobs", "get"),
            ("kubeflow.org", "pytorchjobs", "get"), ("ray.io", "rayjobs", "get"),
            ("ray.io", "rayclusters", "get")}  # fmt: skip


def test_objects_that_jobs_follow_may_be_read_and_nothing_else() -> None:
    found = render()
    whole, known = (
        found["ClusterRole", "ops.r-operator-follow"],
        found["ClusterRole", "ops.r-operator-follow-known"],
    )
    assert granted(known["rules"]) == FOLLOWED
    (chosen,) = whole["aggregationRule"]["clusterRoleSelectors"]
    assert chosen["matchLabels"].items() <= known["metadata"]["labels"].items()
    binding = found["ClusterRoleBinding", "ops.r-operator-follow"]
    assert binding["roleRef"]["name"] == whole["metadata"]["name"]
    assert binding["subjects"] == found["ClusterRoleBinding", "ops.r-operator"]["subjects"]


def test_other_kinds_may_be_followed_by_a_value() -> None:
    found = render("--set", "follow.resources={jobs.batch.volcano.sh,pods}")
    assert granted(found["ClusterRole", "ops.r-operator-follow-known"]["rules"]) == {
        ("batch.volcano.sh", "jobs", "get"), ("", "pods", "get"),
    }  # fmt: skip
    none = render("--set", "follow.resources=null")
    assert ("ClusterRole", "ops.r-operator-follow-known") not in none
    assert ("ClusterRole", "ops.r-operator-follow") in none, "roles of others still count"


def test_operator_of_named_namespaces_reads_followed_objects_only_there() -> None:
    found = render("--set", "namespaces={one}")
    role, binding = found["Role", "r-operator-follow"], found["RoleBinding", "r-operator-follow"]
    assert (role["metadata"]["namespace"], granted(role["rules"])) == ("one", FOLLOWED)
    assert binding["roleRef"] == {
        "apiGroup": "rbac.authorization.k8s.io",
        "kind": "Role",
        "name": "r-operator-follow",
    }
    assert binding["subjects"] == found["RoleBinding", "r-operator"]["subjects"]
    assert not any(kind in ("ClusterRole", "ClusterRoleBinding") and "follow" in name for kind, name in found)


@pytest.mark.parametrize("wrong", ["Jobs", "*", "jobs.*", "a/b", ""])
def test_resource_that_is_no_name_is_refused(wrong: str) -> None:
    with pytest.raises(ValueError, match="resources"):
        render("--set-json", f'follow.resources=["{wrong}"]')


OWN_OBJECTS = ("ValidatingAdmissionPolicy", "ops.r-operator-own-objects")


@pytest.mark.parametrize(
    ("options", "there"),
    [
        ((), True),
        (("--kube-version", "1.29.3"), False),
        (("--set", "ownObjectsPolicy.mode=off"), False),
        (("--set", "namespaces={team}"), False),
        (("--set", "namespaces={team},ownObjectsPolicy.mode=on"), True),
    ],
)
def test_policy_for_own_objects_is_there_where_it_can_be(options: tuple[str, ...], there: bool) -> None:
    assert (OWN_OBJECTS in render(*options)) == there


def test_policy_for_own_objects_asks_for_a_version_that_has_it() -> None:
    with pytest.raises(ValueError, match=r"ownObjectsPolicy.mode is on, which needs .* Kubernetes 1\.30"):
        render("--set", "ownObjectsPolicy.mode=on", "--kube-version", "1.29.3")


def test_policy_for_own_objects_covers_all_that_the_operator_writes() -> None:
    found = render()
    spec = found[OWN_OBJECTS]["spec"]
    covered = {
        (group, resource)
        for rule in spec["matchConstraints"]["resourceRules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
    }
    written = {
        (group, resource)
        for group, resource, verb in granted(found["ClusterRole", "ops.r-operator"]["rules"])
        if verb in ("create", "patch", "update", "delete") and group != "dataloading.dev"
    }
    assert written - covered == {("", "events")}
    account = found["ServiceAccount", "r-operator"]["metadata"]
    name = f"system:serviceaccount:{account['namespace']}:{account['name']}"
    assert f"== '{name}'" in spec["matchConditions"][0]["expression"]
