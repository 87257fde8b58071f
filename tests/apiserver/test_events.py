"""Events of a job on a real API server: each once, and none that fails a reconcile."""

from __future__ import annotations

from collections import Counter
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from manifests import manifest
from operated import Killed, Operated
from processes_of_operator import ALL

from apiserver import ApiServer
from dataloaderjob.api import KIND
from dataloaderjob_operator.client import ApiError


@pytest.fixture
def job(server: ApiServer) -> Operated:
    return Operated(
        server, manifest({"spec.trainers.job.failurePolicy": {"maxRestarts": 1, "backoffSeconds": 0}})
    )


def reported(job: Operated) -> list[dict[str, Any]]:
    """What `kubectl describe` shows of the job."""
    uid = job.get(KIND, job.name)["metadata"]["uid"]
    path = f"/api/v1/namespaces/{job.namespace}/events?fieldSelector=involvedObject.uid={uid}"
    return list(job.server.request("GET", path)["items"])


def reasons(job: Operated) -> Counter[str]:
    return Counter(event["reason"] for event in reported(job))


def test_starting_job_emits_exactly_one_event(job: Operated) -> None:
    job.settle()
    for _ in range(3):
        job.reconcile()
    (event,) = reported(job)
    assert (event["type"], event["reason"]) == ("Normal", "Started")
    assert event["involvedObject"]["kind"] == KIND
    assert event["source"]["component"] == "dataloaderjob-operator"


@pytest.mark.parametrize(("ends", "reason"), [("Complete", "Completed"), ("Failed", "Failed")])
def test_each_step_of_a_job_emits_one_event(job: Operated, ends: str, reason: str) -> None:
    job.settle()
    job.edit(suspend=True)
    job.settle()
    job.edit(suspend=False)
    job.settle()
    job.ends("mnist-trainers-0", "Failed")
    job.settle()
    job.ends("mnist-trainers-1", ends)
    job.settle()
    assert reasons(job) == Counter(["Started", "Suspended", "Resumed", "Restarted", reason])
    assert {event["count"] for event in reported(job)} == {1}


def test_status_not_yet_seen_by_the_watch_is_not_a_second_change(job: Operated) -> None:
    operator = job.operator()
    job.reconcile_with(operator)
    late = job.get(KIND, "mnist")
    job.ends("mnist-trainers-0", "Complete")
    job.reconcile_with(operator)
    assert operator.cache.put({**late, "kind": KIND}) is None
    operator.now = lambda: datetime.now(UTC) + timedelta(minutes=1)
    job.run(operator.reconcile(job.key))
    assert reasons(job) == Counter(["Started", "Completed"])


class FailingEvents:
    """What an API does with events: `error` is raised in place of them."""

    def __init__(self, api: Any, error: BaseException) -> None:
        self._api, self._error = api, error

    def __getattr__(self, name: str) -> Any:
        return getattr(self._api, name)

    async def create_event(self, event: dict[str, Any]) -> None:
        raise self._error


@pytest.mark.parametrize(
    "error", [ApiError(403, "forbidden"), ApiError(0, "no answer"), TimeoutError()], ids=str
)
def test_failure_to_send_an_event_blocks_nothing(job: Operated, error: Exception) -> None:
    operator = job.operator()
    operator.recorder.api = FailingEvents(operator.api, error)
    job.reconcile_with(operator)
    assert len(job.children()) == ALL
    assert reported(job) == []


def test_operator_killed_between_status_and_event_sends_no_duplicates(job: Operated) -> None:
    job.settle()
    job.ends("mnist-trainers-0", "Complete")
    operator = job.operator()
    operator.recorder.api = FailingEvents(operator.api, Killed())
    with pytest.raises(Killed):
        job.reconcile_with(operator)
    job.settle()
    assert job.get(KIND, job.name)["status"]["phase"] == "Complete"
    assert reasons(job) == Counter(["Started"]), "the conditions have what the event would have had"


def test_repeated_event_is_stored_once(job: Operated) -> None:
    job.settle()
    (event,) = reported(job)
    again = {key: event[key] for key in ("involvedObject", "reason", "message", "type")}
    again["metadata"] = {key: event["metadata"][key] for key in ("name", "namespace")}
    job.run(job.operator().api.create_event({"apiVersion": "v1", "kind": "Event", **again}))
    assert len(reported(job)) == 1
