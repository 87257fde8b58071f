"""Each kind of objects that the operator handles has its row in one table."""

from __future__ import annotations

import pytest
from observed_jobs import SETUP, job

from dataloaderjob.api import KIND
from dataloaderjob_operator import objects
from dataloaderjob_operator.kinds import (
    CHILDREN,
    KINDS,
    WATCHED,
    Comparison,
    Manifest,
    Source,
    manifest_to_send,
    sealed,
    transform,
)
from dataloaderjob_operator.observe import watch
from dataloaderjob_operator.observe.cache import Cache
from dataloaderjob_operator.observe.requests import Requests


def made() -> list[Manifest]:
    """All that the operator makes for a job."""
    return [
        *objects.base(job(), SETUP),
        *objects.feeding(job(), SETUP),
        *objects.training(job(), SETUP, 0),
    ]


@pytest.mark.parametrize("child", made(), ids=lambda child: f"{child['kind']}-{child['metadata']['name']}")
def test_every_child_kind_has_a_row_with_its_api_path_and_comparison(child):
    kind = KINDS[child["kind"]]
    assert kind.api_version == child["apiVersion"]
    assert kind in CHILDREN
    assert kind.source in (Source.WATCH, Source.NONE), "a child is watched, or only created"


def test_table_has_no_row_without_a_child():
    assert {child["kind"] for child in made()} == {kind.name for kind in CHILDREN}


@pytest.mark.parametrize("kind", CHILDREN, ids=lambda kind: kind.name)
def test_cache_keeps_all_that_the_comparison_needs(kind):
    for child in made():
        if child["kind"] == kind.name:
            live = transform(sealed(child))
            assert manifest_to_send(child, live) is None
            added = {**child["spec"], "added": 1} if "spec" in child else None
            if added is not None:
                changed = manifest_to_send({**child, "spec": added}, live)
                assert (changed is None) == (kind.compared is Comparison.CREATED_ONLY)


def test_jobs_are_listed_first_and_each_watched_kind_once():
    paths = watch.list_paths([])
    assert next(iter(paths)) == KIND
    assert list(paths) == [kind.name for kind in WATCHED]
    assert Requests(Cache(), watch.list_paths([])).expected == len(WATCHED)
    assert Requests(Cache(), watch.list_paths(["a", "b"])).expected == 2 * len(WATCHED)


@pytest.mark.parametrize(
    ("kind", "namespace", "path"),
    [
        ("Pod", None, "/api/v1/pods"),
        ("Pod", "team", "/api/v1/namespaces/team/pods"),
        ("Deployment", None, "/apis/apps/v1/deployments"),
        (KIND, "team", "/apis/dataloading.dev/v1alpha1/namespaces/team/dataloaderjobs"),
    ],
)
def test_a_path_follows_from_the_row(kind, namespace, path):
    assert KINDS[kind].path(namespace) == path
