"""Pods whose label names a job that does not exist, or has trainers of its own: an event for each controller."""

from __future__ import annotations

import asyncio
from typing import Any

from attached_jobs import attached_pod, job
from manifests import manifest

from dataloaderjob.api import parse_object
from dataloaderjob.api.job import Metadata
from dataloaderjob_operator.decide.events import JobEvent, Reason
from dataloaderjob_operator.decide.observed import Observed
from dataloaderjob_operator.pod_reports import MISSING_S, PodReports
from dataloaderjob_operator.workqueue import NEVER

KEY = ("team", "mnist")
GONE = (
    "the label dataloading.dev/inject names DataLoaderJob team/mnist, which does not exist, so no feeder makes batches"
    " for these pods: create the job, or remove the label"
)


def owned(name: str, by: str | None = "train", **more: Any) -> dict[str, Any]:
    found = attached_pod(name)
    owner = {"apiVersion": "batch/v1", "kind": "Job", "name": by, "uid": f"uid-{by}", "controller": True}
    return {**found, "metadata": {**found["metadata"], "ownerReferences": [owner] if by else [], **more}}


class World:
    """The labeled pods of one job in virtual time, and the events that they lead to."""

    def __init__(self, *pods: dict[str, Any]) -> None:
        self.seconds, self.found = 0.0, list(pods)
        self.sent, self.remarks = list[tuple[str, str, str]](), set[JobEvent]()
        self.reports = PodReports(self, lambda: self.seconds)  # type: ignore[arg-type]

    async def send(self, key: tuple[str, str], about: Metadata, event: JobEvent) -> None:
        assert event.about is not None
        assert (event.reason, event.type) == (Reason.NOT_ATTACHED, "Warning")
        self.sent.append((event.about.kind, event.about.name, event.message))

    async def remark(self, key: tuple[str, str], about: Metadata, event: JobEvent) -> None:
        if event not in self.remarks:
            self.remarks.add(event)
            await self.send(key, about, event)

    def missing(self, after_s: float = 0.0) -> float:
        """Reports on the job that does not exist. Returns the seconds until the next time."""
        self.seconds += after_s
        return asyncio.run(self.reports.report_missing(KEY, self.found))

    def there(self, observed: Observed) -> None:
        asyncio.run(self.reports.report(KEY, observed, self.found))


def test_missing_job_is_told_once_to_each_controller_and_to_bare_pods() -> None:
    world = World(owned("a"), owned("b"), owned("c", "eval"), owned("d", None))
    assert world.missing() == MISSING_S
    assert world.sent == []
    assert world.missing(MISSING_S) == NEVER
    assert world.sent == [("Job", "train", GONE), ("Job", "eval", GONE), ("Pod", "d", GONE)]
    world.found.append(owned("e", "late"))
    world.missing(MISSING_S)
    assert world.sent[3:] == [("Job", "late", GONE)]


def test_job_that_follows_its_pods_is_not_reported_as_missing() -> None:
    world = World(owned("a"))
    world.missing()
    world.there(Observed(job=job()))
    assert world.missing(MISSING_S) == MISSING_S, "it waits anew"
    assert world.sent == []


def test_pods_that_end_or_are_deleted_miss_no_job() -> None:
    leaving = owned("a", deletionTimestamp="2026-01-01T00:00:00Z")
    ended = {**owned("b"), "status": {"phase": "Succeeded"}}
    world = World(leaving, ended)
    assert world.missing() == NEVER


def test_job_with_trainers_of_its_own_is_told_once_to_each_controller() -> None:
    world = World(owned("a"), owned("b"))
    own = Observed(job=parse_object(manifest({"metadata.uid": "u", "metadata.namespace": "team"})))
    world.there(own)
    world.there(own)
    ((kind, name, text),) = world.sent
    assert (kind, name) == ("Job", "train")
    assert "DataLoaderJob mnist, which creates its own trainers (spec.trainers.job)" in text
    assert text.endswith("name a job with spec.trainers.attach, or remove the label")
