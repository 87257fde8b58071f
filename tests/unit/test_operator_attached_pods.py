"""The watch of attached pods: lists, events, outages, and labels that change."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import AsyncIterator
from typing import Any

import pytest
from attached_jobs import attached_pod

from dataloaderjob_operator.client import ApiError
from dataloaderjob_operator.observe import attached_pods
from dataloaderjob_operator.observe.attached_pods import AttachedPods

KEY, OTHER = ("team", "mnist"), ("team", "other")
Event = tuple[str, dict[str, Any]]


def pod(name: str, *, version: int = 1, job: str = "mnist", **status: Any) -> dict[str, Any]:
    made = copy.deepcopy(attached_pod(name, **status))
    made["metadata"] |= {"resourceVersion": str(version), "labels": {"dataloading.dev/inject": job}}
    return made


class Api:
    """Answers lists and watches in turn with what a test gave; then it cancels the watcher."""

    def __init__(self, *answers: list[dict[str, Any]] | list[Event] | ApiError) -> None:
        self.answers, self.asked = list(answers), list[tuple[str, str]]()

    def _next(self, verb: str, version: str = "") -> Any:
        self.asked.append((verb, version))
        if not self.answers:
            raise asyncio.CancelledError
        answer = self.answers.pop(0)
        if isinstance(answer, ApiError):
            raise answer
        return answer

    async def snapshot(self, path: str, **query: str) -> tuple[list[dict[str, Any]], str]:
        return self._next("list"), "100"

    async def watch(self, path: str, seconds: int, **query: str) -> AsyncIterator[dict[str, Any]]:
        for kind, thing in self._next("watch", query["resourceVersion"]):
            yield {"type": kind, "object": thing}


def watched(*answers: Any) -> tuple[AttachedPods, Api, list[Any]]:
    """After all answers have been used."""
    api, changed = Api(*answers), list[Any]()
    pods = AttachedPods(api, changed.append)  # type: ignore[arg-type]

    async def run() -> None:
        await pods.prime()
        await pods.run()

    asyncio.run(run())
    return pods, api, changed


def names(pods: AttachedPods, key: tuple[str, str] = KEY) -> list[str]:
    return [str(found["metadata"]["name"]) for found in pods.of(key)]


@pytest.fixture(autouse=True)
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attached_pods, "RETRY_S", 0.0)


def test_pods_are_listed_then_watched_from_the_version_of_the_list() -> None:
    events = [("ADDED", pod("b", version=101)), ("BOOKMARK", {"metadata": {"resourceVersion": "150"}})]
    pods, api, changed = watched([pod("a")], events)
    assert names(pods) == ["a", "b"]
    assert api.asked == [("list", ""), ("watch", "100"), ("watch", "150")]
    assert changed == [KEY, KEY]


def test_same_pod_again_changes_nothing() -> None:
    _, _, changed = watched([pod("a")], [("MODIFIED", pod("a"))])
    assert changed == [KEY]


def test_deleted_and_ended_pods_are_dropped() -> None:
    events = [("DELETED", pod("a")), ("MODIFIED", pod("b", version=102, phase="Succeeded"))]
    pods, _, changed = watched([pod("a"), pod("b"), pod("c", phase="Failed")], events)
    assert (names(pods), changed) == ([], [KEY] * 4)


@pytest.mark.parametrize("code", [410, 0, 500])
def test_pod_that_left_during_an_outage_is_found_by_the_next_list(code: int) -> None:
    pods, api, changed = watched([pod("a"), pod("b")], ApiError(code, "too old"), [pod("b")])
    assert names(pods) == ["b"]
    assert [verb for verb, _ in api.asked] == ["list", "watch", "list", "watch"]
    assert changed[2:] == [KEY]


def test_pods_stay_known_while_the_api_server_is_gone() -> None:
    pods, _, changed = watched([pod("a")], ApiError(0, "gone"), ApiError(0, "gone"), ApiError(0, "gone"))
    assert (names(pods), changed) == (["a"], [KEY]), "a job must not become idle because of an outage"


def test_first_list_is_repeated_until_it_succeeds() -> None:
    pods, _, _ = watched(ApiError(0, "not up yet"), ApiError(403, "no"), [pod("a")])
    assert names(pods) == ["a"]


def test_pod_whose_label_changes_moves_to_the_other_job() -> None:
    pods, _, changed = watched([pod("a")], [("MODIFIED", pod("a", version=101, job="other"))])
    assert (names(pods), names(pods, OTHER)) == ([], ["a"])
    assert changed == [KEY, KEY, OTHER]


def test_pods_of_two_namespaces_do_not_drop_each_other() -> None:
    made = AttachedPods(Api([pod("a")], []), lambda _: None, ["team", "two"])  # type: ignore[arg-type]
    asyncio.run(made.prime())
    assert names(made) == ["a"], "the list of the other namespace is empty"
