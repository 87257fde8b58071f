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
    return granted(render()["ClusterRole", "ops-r-operator"]["rules"])


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
