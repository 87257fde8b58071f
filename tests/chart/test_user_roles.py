"""Who may view, edit or administer a namespace may do so with its DataLoaderJobs."""

from __future__ import annotations

from typing import Any

import pytest
from rights import Right, granted

from chart import render

PREFIX = "rbac.authorization.k8s.io/aggregate-to-"
VIEW, EDIT = ("ClusterRole", "ops.r-operator-view"), ("ClusterRole", "ops.r-operator-edit")
READS, WRITES = {"get", "list", "watch"}, {"create", "update", "patch", "delete", "deletecollection"}


def aggregated(role: str, found: dict[Any, Any]) -> set[Right]:
    """What the cluster's own role gets by the labels of the chart's."""
    return {
        right
        for (kind, _), thing in found.items()
        if kind == "ClusterRole" and thing["metadata"]["labels"].get(PREFIX + role) == "true"
        for right in granted(thing["rules"])
    }


def verbs(rights: set[Right], resource: str) -> set[str]:
    return {verb for group, named, verb in rights if (group, named) == ("dataloading.dev", resource)}


def test_view_role_reads_jobs_and_changes_none() -> None:
    rights = aggregated("view", render())
    assert {verb for _, _, verb in rights} == READS
    assert verbs(rights, "dataloaderjobs") == verbs(rights, "dataloaderjobs/scale") == READS


@pytest.mark.parametrize("role", ["edit", "admin"])
def test_edit_and_admin_roles_manage_jobs_but_write_no_status(role: str) -> None:
    rights = aggregated(role, render())
    assert verbs(rights, "dataloaderjobs") == READS | WRITES
    assert {"update", "patch"} <= verbs(rights, "dataloaderjobs/scale")
    assert verbs(rights, "dataloaderjobs/status") == READS, "the operator's alone"
    assert {group for group, _, _ in rights} == {"dataloading.dev"}, "a right on nothing else comes with it"


def test_user_roles_exist_with_namespaces_and_can_be_disabled() -> None:
    assert {VIEW, EDIT} <= set(render("--set", "namespaces={a,b}"))
    assert not {VIEW, EDIT} & set(render("--set", "rbac.aggregateClusterRoles=false"))
