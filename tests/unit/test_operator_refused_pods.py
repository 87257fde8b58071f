"""Refusals of labeled pods: the job that each concerns, its text, and how often it is reported."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import Any

import pytest
from attached_jobs import job
from observed_jobs import SETUP, T0

from dataloaderjob.api.job import Metadata
from dataloaderjob_operator.client import ApiError
from dataloaderjob_operator.decide.events import JobEvent, Reason
from dataloaderjob_operator.decide.observed import Observed
from dataloaderjob_operator.decide.refused_pods import (
    AGAIN_S,
    LOST,
    event_of,
    explained,
    label_of,
    refused_pods,
)
from dataloaderjob_operator.names import MANAGER
from dataloaderjob_operator.observe.refused_pods import MAX_REPORTS, PERIOD_S, RefusedPods

GUARD = (
    "Error creating: pods \"train-x7k2p\" is forbidden: ValidatingAdmissionPolicy 'ops.r-injector-guard' with binding"
    " 'ops.r-injector-guard' denied request: the label dataloading.dev/inject asks for the sidecar of DataLoaderJob"
    " mnist, and the pod has 0 sidecars: see that the job exists and that the injector of the DataLoaderJob operator"
    " runs, or inject the template with dataloaderjob inject"
)
OVER = (
    'Error creating: admission webhook "inject.dataloading.dev" denied the request: DataLoaderJob team/mnist is'
    " Complete: create a new job, or remove the label dataloading.dev/inject"
)
DOWN = (
    'Error creating: Internal error occurred: failed calling webhook "inject.dataloading.dev": failed to call webhook:'
    ' Post "https://r-injector.ops.svc:443/inject?timeout=5s": dial tcp 10.96.7.1:443: connect: connection refused'
)
CELL = (
    "create Pod web-0 in StatefulSet web failed error: pods \"web-0\" is forbidden: ValidatingAdmissionPolicy 'g' with"
    " binding 'g' denied request: the sidecar of DataLoaderJob mnist has lost its restartPolicy Always"
)
STRIPPED = (
    'Error creating: Pod "train-x7k2p" is invalid: spec.initContainers[0].startupProbe: Forbidden: may not be set for'
    " init containers without restartPolicy=Always"
)
OTHERS = (
    'Error creating: pods "a" is forbidden: exceeded quota: team, requested: limits.memory=1140850688',
    'Error creating: admission webhook "pods.example.com" denied the request: use our registry',
    'Error creating: Internal error occurred: failed calling webhook "pods.example.com": no endpoints available',
    "Back-off restarting failed container",
)
TRAIN = {
    "kind": "Job",
    "spec": {"template": {
        "metadata": {"labels": {"dataloading.dev/inject": "mnist"}},
        "spec": {"containers": [{"name": "a", "image": "i"}, {"name": "b", "image": "i"}]},
    }},
}  # fmt: skip


def warning(
    text: str, at_s: float = 0, *, kind: str = "Job", name: str = "train", **more: Any
) -> dict[str, Any]:
    """The event of a controller that could not create a pod."""
    return {
        "type": "Warning", "reason": "FailedCreate", "message": text,
        "involvedObject": {"kind": kind, "name": name, "uid": f"uid-{name}"},
        "lastTimestamp": (T0 + timedelta(seconds=at_s)).isoformat().replace("+00:00", "Z"), **more,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("text", "named", "cause"),
    [
        pytest.param(
            OVER, "mnist",
            "DataLoaderJob team/mnist is Complete: create a new job, or remove the label dataloading.dev/inject",
            id="webhook",
        ),
        pytest.param(
            CELL, "mnist", "the sidecar of DataLoaderJob mnist has lost its restartPolicy Always", id="guard"
        ),
        pytest.param(
            DOWN, "",
            "the injector does not respond (connection refused): see the pods labeled "
            "app.kubernetes.io/name=dataloaderjob-injector in the operator's namespace; the controller "
            "will retry",
            id="webhook-down",
        ),
        pytest.param(STRIPPED, "", LOST, id="kubernetes"),
    ],
)  # fmt: skip
def test_refusal_has_its_job_and_its_cause(text: str, named: str, cause: str) -> None:
    (found,) = refused_pods([warning(text)])
    assert (found.job, found.cause) == (named, cause)
    event = event_of(found, found.cause)
    assert (event.type, event.reason) == ("Warning", Reason.POD_REFUSED)
    assert event.message == f"Job train cannot create its pods: {cause}"


@pytest.mark.parametrize(
    "event",
    [
        *(pytest.param(warning(text), id=text[:24]) for text in OTHERS),
        pytest.param(warning(OVER, kind="DataLoaderJob", name="mnist"), id="about-a-job"),
        pytest.param(warning(OVER, source={"component": MANAGER}), id="the-operators-own"),
        pytest.param({**warning(OVER), "type": "Normal"}, id="no-warning"),
        pytest.param({"type": "Warning"}, id="empty"),
    ],
)
def test_other_events_are_no_refusals(event: dict[str, Any]) -> None:
    assert refused_pods([event]) == ()


def test_attempts_of_one_controller_are_one_refusal() -> None:
    attempts = [warning(GUARD, 5), warning(GUARD.replace("x7k2p", "abcde"), 20), warning(GUARD, 10)]
    (found,) = refused_pods(attempts)
    assert found.at == T0 + timedelta(seconds=20)
    assert len(refused_pods([*attempts, warning(OVER), warning(GUARD, name="other")])) == 3


def test_general_sentence_of_the_guard_becomes_the_precise_cause() -> None:
    (found,) = refused_pods([warning(GUARD)])
    told = explained(found, TRAIN, job(), SETUP)
    assert "cannot add the sidecar of DataLoaderJob mnist: the pod has the containers a, b" in told
    assert "set spec.trainers.attach.container to the name of the one that trains" in told
    assert explained(found, None, job(), SETUP) == found.cause
    assert explained(found, TRAIN, job(container="a"), SETUP) == found.cause, "another reason"
    (over,) = refused_pods([warning(OVER)])
    assert explained(over, TRAIN, job(), SETUP) == over.cause


@pytest.mark.parametrize(
    ("kind", "name", "source"),
    [
        ("Job", "train", ("Job", "train")),
        ("ReplicaSet", "notebook-7c9f", ("Deployment", "notebook")),
        ("ReplicaSet", "alone", None),
        ("StatefulSet", "web", None),
        ("Job", "../../secrets/key", None),
    ],
)
def test_template_is_read_where_the_operator_may(
    kind: str, name: str, source: tuple[str, str] | None
) -> None:
    (found,) = refused_pods([warning(GUARD, kind=kind, name=name)])
    assert found.source == source


def test_label_of_a_template_names_the_job() -> None:
    assert (label_of(TRAIN), label_of({"kind": "Job"})) == ("mnist", "")


class World:
    """Refusals in virtual time, and the events that they lead to."""

    def __init__(self, *jobs: str) -> None:
        self.seconds, self.warnings_ = 0.0, list[dict[str, Any]]()
        self.lists, self.sent = list[str](), list[tuple[str, str]]()
        self.owners: dict[tuple[str, str], dict[str, Any]] = {("Job", "train"): TRAIN}
        self.refused = RefusedPods(
            self, self, SETUP, self.report, lambda: self.seconds, lambda: T0 + timedelta(seconds=self.seconds)
        )
        for name in jobs:
            self.refused.want(("team", name), True)

    async def warnings(self, namespace: str) -> list[dict[str, Any]]:
        self.lists.append(namespace)
        if not self.warnings_:
            raise ApiError(500, "not now")
        return self.warnings_

    async def read(self, namespace: str, key: tuple[str, str]) -> dict[str, Any] | None:
        return self.owners.get(key)

    def uid(self, key: tuple[str, str]) -> str:
        return f"uid-{key[1]}"

    def observed(self, key: tuple[str, str]) -> Observed:
        found = job()
        named = found.metadata.model_copy(update={"name": key[1]})
        return Observed(job=found.model_copy(update={"metadata": named}))

    async def report(self, key: tuple[str, str], about: Metadata, event: JobEvent) -> None:
        self.sent.append((about.name, event.once))

    def at(self, seconds: float, *warnings: dict[str, Any]) -> list[str]:
        """The names of the jobs that get an event at this moment."""
        self.seconds, self.warnings_ = seconds, list(warnings)
        before = len(self.sent)
        while asyncio.run(self.refused.turn()):
            pass
        return [name for name, _ in self.sent[before:]]


def test_repeated_refusal_is_reported_every_ten_minutes() -> None:
    world = World("mnist")
    assert world.at(0, warning(OVER)) == ["mnist"]
    for minute in range(1, 10):
        assert world.at(60 * minute, warning(OVER, 60 * minute)) == []
    assert world.at(AGAIN_S, warning(OVER, AGAIN_S)) == ["mnist"]
    assert world.at(AGAIN_S + 900, warning(OVER, AGAIN_S + 10)) == [], "it has ended since"
    assert len({once for _, once in world.sent}) == 2


def test_new_operator_reports_no_refusal_that_is_over() -> None:
    world = World("mnist")
    assert world.at(AGAIN_S + 1, warning(OVER, 0)) == []


def test_operator_that_starts_again_sends_the_same_event() -> None:
    first, second = World("mnist"), World("mnist")
    first.at(10, warning(OVER, 5))
    second.at(60, warning(OVER, 50))
    assert first.sent == second.sent


def test_refusal_without_a_name_concerns_the_job_of_the_template() -> None:
    world = World("mnist", "other")
    assert world.at(0, warning(DOWN)) == ["mnist"]
    assert world.at(PERIOD_S, warning(DOWN, name="gone")) == ["mnist", "other"], "its template is not there"


def test_refusal_of_any_pod_concerns_the_job_of_a_labeled_template_alone() -> None:
    world = World("mnist", "other")
    assert world.at(0, warning(STRIPPED)) == ["mnist"]
    assert world.at(PERIOD_S, warning(STRIPPED, name="gone")) == [], "nothing tells that it has the label"
    unlabeled = {"kind": "Job", "spec": {"template": {"spec": TRAIN["spec"]["template"]["spec"]}}}
    world.owners["Job", "bare"] = unlabeled
    assert world.at(2 * PERIOD_S, warning(STRIPPED, name="bare")) == []


def test_probe_that_the_template_itself_has_wrong_is_no_webhooks_doing() -> None:
    world, template = World("mnist"), TRAIN["spec"]["template"]
    wrong = {"name": "wait", "image": "i", "startupProbe": {"exec": {"command": ["true"]}}}
    spec = {**template["spec"], "initContainers": [wrong]}
    world.owners["Job", "train"] = {"kind": "Job", "spec": {"template": {**template, "spec": spec}}}
    assert world.at(0, warning(STRIPPED)) == []


def test_refusal_that_names_a_job_of_its_own_concerns_no_other() -> None:
    world = World("other")
    assert world.at(0, warning(OVER)) == []


def test_one_list_leads_to_few_reports_and_the_next_one_to_more() -> None:
    world = World("mnist")
    many = [warning(OVER, name=f"cron-{number}") for number in range(MAX_REPORTS + 3)]
    assert len(world.at(0, *many)) == MAX_REPORTS
    assert len(world.at(PERIOD_S, *many)) == 3


def test_namespaces_are_listed_one_by_one_and_at_a_pace() -> None:
    world = World("mnist")
    world.refused.want(("b", "x"), True)
    assert world.at(0) == []
    assert sorted(world.lists) == ["b", "team"], "an API server that fails holds up nothing"
    world.at(PERIOD_S / 2)
    assert len(world.lists) == 2
    world.refused.want(("b", "x"), False)
    world.at(PERIOD_S)
    assert world.lists[2:] == ["team"]
