"""The operator's autoscaler: what it sees of a job, what it reports, and when it leaves a job alone."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest
from observed_jobs import FEEDERS, SUPERVISOR, after, condition, decided, job, live, serving

from dataloaderjob.api.status import ConditionType
from dataloaderjob_operator.autoscaler import CANNOT_CHECK, CHECK_S, Autoscalers, targets
from dataloaderjob_operator.client import ApiError
from dataloaderjob_operator.decide import events
from dataloaderjob_operator.decide.autoscale import ScalingTarget
from dataloaderjob_operator.decide.observed import ScalingReport

KEY = ("team", "mnist")
TARGET = ScalingTarget(least=2, most=8, replicas=1, per_pod=2)
KIND = ConditionType.AUTOSCALING_ACTIVE
HPA = {
    "metadata": {"name": "theirs"},
    "spec": {
        "scaleTargetRef": {"kind": "DataLoaderJob", "name": "mnist", "apiVersion": "dataloading.dev/v1alpha1"}
    },
}


class Cluster:
    """The API server's autoscalers and scale subresource, in memory."""

    def __init__(self, *found: dict[str, Any]) -> None:
        self.found, self.scaled, self.lists, self.now = list(found), list[int](), 0, 0.0
        self.refuses: ApiError | None = None
        self.reports: list[tuple[str, str]] = []
        self.scalers = Autoscalers(
            self, lambda key: SUPERVISOR, lambda key: "7", self.reports.append, clock=lambda: self.now
        )  # type: ignore[arg-type]

    async def autoscalers(self, namespace: str) -> list[dict[str, Any]]:
        self.lists += 1
        if self.refuses is not None:
            raise self.refuses
        return self.found

    async def scale(self, namespace: str, name: str, version: str, replicas: int) -> None:
        assert (namespace, name, version) == (*KEY, "7")
        self.scaled.append(replicas)

    def tick(self, seconds: float = 10.0) -> None:
        self.now += seconds
        asyncio.run(self.scalers.tick())


def auto(**more: Any) -> Any:
    return job(**{"feeders.autoscaling": {"mode": "Auto", **more}})


def test_a_job_below_its_minimum_is_scaled_in_whole_pods():
    cluster = Cluster()
    cluster.scalers.want(KEY, TARGET)
    cluster.tick()
    assert cluster.scaled == [2]
    assert cluster.scalers.report(KEY).message.startswith("replicas 1 -> 2: ")
    assert cluster.reports == [KEY]


def test_an_unchanged_report_is_not_repeated():
    cluster = Cluster()
    cluster.scalers.want(KEY, replace(TARGET, replicas=4))
    for _ in range(5):
        cluster.tick()
    assert cluster.scaled == []
    assert cluster.reports == [KEY]
    assert cluster.scalers.report(KEY) == ScalingReport(True, "Scaling", "between 2 and 8 replicas")


def test_autoscalers_are_listed_once_a_minute():
    cluster = Cluster()
    cluster.scalers.want(KEY, TARGET)
    for _ in range(int(CHECK_S / 10) + 1):
        cluster.tick()
    assert cluster.lists == 2


def test_a_list_that_is_refused_blocks_and_is_tried_again():
    cluster = Cluster()
    cluster.refuses = ApiError(403, "forbidden")
    cluster.scalers.want(KEY, TARGET)
    cluster.tick()
    assert cluster.scalers.report(KEY) == ScalingReport(False, "NotAllowed", CANNOT_CHECK)
    cluster.refuses = None
    cluster.tick()
    assert cluster.scaled == [2]


def test_another_autoscaler_blocks_until_it_is_gone():
    cluster = Cluster(HPA)
    cluster.scalers.want(KEY, TARGET)
    cluster.tick()
    assert cluster.scaled == []
    assert cluster.scalers.report(KEY).reason == "HorizontalPodAutoscaler"
    cluster.found.clear()
    cluster.tick(CHECK_S)
    assert cluster.scaled == [2]


def test_a_job_that_is_gone_is_forgotten():
    cluster = Cluster()
    cluster.scalers.want(KEY, TARGET)
    cluster.scalers.want(KEY, None)
    cluster.tick()
    assert (cluster.scaled, cluster.lists, cluster.scalers.report(KEY)) == ([], 0, None)


def test_a_refused_scale_is_tried_again():
    cluster = Cluster()
    cluster.scalers.want(KEY, TARGET)
    works, cluster.scale = cluster.scale, None  # type: ignore[method-assign,assignment]

    async def refuses(*_: Any) -> None:
        raise ApiError(409, "changed")

    cluster.scale = refuses  # type: ignore[method-assign]
    cluster.tick()
    cluster.scale = works  # type: ignore[method-assign]
    cluster.tick()
    assert cluster.scaled == [2]


def test_a_job_that_cannot_be_processed_does_not_end_the_others():
    cluster = Cluster()
    cluster.scalers.want(("team", "odd"), None)
    cluster.scalers.want(("team", "odd"), replace(TARGET, per_pod=0))
    cluster.scalers.want(KEY, TARGET)
    cluster.tick()
    assert cluster.scaled == [2]


@pytest.mark.parametrize(
    "ref",
    [
        {"kind": "Deployment", "name": "mnist", "apiVersion": "apps/v1"},
        {"kind": "DataLoaderJob", "name": "mnist", "apiVersion": "example.com/v1"},
        {},
        None,
    ],
)
def test_autoscalers_of_other_objects_do_not_count(ref):
    assert (
        targets([{"metadata": {"name": "a"}, "spec": {"scaleTargetRef": ref}}, {"metadata": {"name": "b"}}])
        == {}
    )
    assert targets([HPA]) == {"mnist": "theirs"}


def test_a_running_job_in_mode_auto_is_a_target():
    found = decided(replace(serving(), job=auto(maxReplicas=9, minReplicas=2))).scaling
    assert found == ScalingTarget(least=2, most=9, replicas=1, per_pod=1)
    assert decided(serving()).scaling is None
    assert decided(replace(serving(), job=auto()), 0).scaling.frozen == ""


@pytest.mark.parametrize(
    ("fields", "bounds"),
    [
        ({}, (1, 32)),
        ({"minReplicas": 3}, (3, 32)),
        ({"maxReplicas": 5}, (1, 5)),
        ({"costCeiling": 7}, (1, 7)),
        ({"costCeiling": 7, "minReplicas": 9}, (9, 9)),
    ],
)
def test_bounds_follow_from_the_spec(fields, bounds):
    assert auto(**fields).spec.feeders.autoscaling_bounds() == bounds


def test_the_ceiling_counts_requested_cpus():
    resources = {"requests": {"cpu": "2500m", "memory": "1Gi"}, "limits": {"memory": "1Gi"}}
    spec = {"feeders.autoscaling": {"mode": "Auto", "costCeiling": 10}, "feeders.resources": resources}
    assert job(**spec).spec.feeders.autoscaling_bounds() == (1, 4)


def test_a_job_that_starts_or_rolls_out_is_frozen():
    starting = replace(serving(), job=auto(), pods=(), supervisor=None, children={})
    assert decided(starting).scaling.frozen == "the job is starting"
    children = serving().children | live(FEEDERS, readyReplicas=2, replicas=2, updatedReplicas=1)
    assert (
        decided(replace(serving(), job=auto(), children=children)).scaling.frozen
        == "feeders are being replaced"
    )


def test_the_condition_tells_modes_apart():
    assert condition(decided(serving()), KIND).reason == "Recommend"
    off = replace(serving(), job=job(**{"feeders.autoscaling": {"mode": "Off"}}))
    assert condition(decided(off), KIND).reason == "Off"
    on = replace(serving(), job=auto())
    assert condition(decided(on), KIND).status == "Unknown"
    scaled = replace(on, scaling=ScalingReport(True, "Scaling", "replicas 1 -> 4: training waits"))
    assert condition(decided(scaled), KIND).status == "True"


def test_each_change_is_an_event():
    on = replace(serving(), job=auto())
    before = decided(on)
    scaled = replace(
        after(on, before), scaling=ScalingReport(True, "Scaling", "replicas 1 -> 4: training waits")
    )
    made = decided(scaled, 10)
    (event,) = events.events_of(before.status, made.status)
    assert (event.reason, event.message) == (events.Reason.SCALED, "replicas 1 -> 4: training waits")
    assert events.events_of(made.status, decided(after(scaled, made), 20).status) == ()
