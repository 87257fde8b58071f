"""Whatever text a container or a user writes, through a real API server: it freezes no status and no restart."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from manifests import manifest
from operated import Operated

from apiserver import ApiServer
from dataloaderjob.api import KIND
from dataloaderjob_operator.client import ApiError
from dataloaderjob_operator.decide.conditions import MAX_MESSAGE, WITHHELD

GLOO = b"[/pytorch/gloo/pair.cc:534] Connection closed by peer \xf0\x9f\x98\xa2 \0 \xff\xfe \xed\xa0\xbd end"
"""torch's own words, an emoji and all, and what is no text."""
ODD = "\U0001f622 \0 \x1b[31m \x7f \x85 \x9b \u2028 \ufeff \ufffe \U0010ffff \r\n\t é end"
WORDS = st.one_of(
    st.text(st.characters()),
    st.binary().map(lambda raw: raw.decode(errors="replace")),
    st.text(st.sampled_from(ODD + "\ud83d\ude22\udcff\uffff\"'\\#:&*!|>%@`-?{}[]")),
    st.text(st.characters(), min_size=1, max_size=80).map(lambda text: 3000 * text),
)
"""Of a process that dies; the longest just fit into a request of 3 MiB."""
INTRODUCER = re.compile("[\x1b\x80-\x9f]")
"""A character that begins an escape sequence."""
PROPERTY = settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
ENV = "spec.trainers.job.template.spec.containers[0].env"


@pytest.fixture(scope="module")
def failing(server: ApiServer) -> Operated:
    """One whose trainer's pod has failed; nothing has been made of it yet."""
    job = Operated(server, manifest())
    job.settle()
    return job


@given(words=WORDS)
@PROPERTY
def test_any_last_output_reaches_the_status_and_is_written_once(failing: Operated, words: str) -> None:
    failing.last_words(words)
    failing.reconcile()
    reported = failing.conditions()["TrainersReady"]
    how, _, text = reported["message"].partition("exit code 1")
    assert (reported["reason"], how) == ("ContainerFailed", "pod mnist-trainer-0, container trainer: ")
    certain = INTRODUCER.split(words)[0]  # a sequence ends at a character that is readable by itself
    readable = [word for word in certain.split() if word.isascii() and word.isprintable()]
    assert all(word in text for word in readable) or len(words) > 400
    assert failing.reconcile() == 0, "it is there as it was sent"


@pytest.mark.parametrize("suffix", ["", " \ud83d"], ids=["bytes", "a-lone-surrogate"])
def test_trainer_with_undecodable_last_output_restarts_the_group(server: ApiServer, suffix: str) -> None:
    job = Operated(
        server, manifest({"spec.trainers.job.failurePolicy": {"maxRestarts": 1, "backoffSeconds": 0}})
    )
    job.settle()
    job.last_words(GLOO.decode(errors="replace") + suffix)
    job.ends("mnist-trainers-0", "Failed")
    job.reconcile()
    status = job.get(KIND, "mnist")["status"]
    assert (status["phase"], status["trainers"]["restarts"]) == ("Degraded", 1)
    reported = job.conditions()["Progressing"]["message"]
    assert "pair.cc:534] Connection closed by peer \U0001f622 \ufffd \ufffd" in reported
    assert reported.endswith("; restart 1 of 1")
    path = f"/api/v1/namespaces/{job.namespace}/events?fieldSelector=reason=Restarted"
    (event,) = server.request("GET", path)["items"]
    assert event["message"] == reported
    job.ends("mnist-trainers-0", "Failed")
    for _ in range(3):
        job.collect_garbage()
        job.reconcile()
    assert ("Job", "mnist-trainers-1") in job.children()


class Longwinded:
    """An API whose server gets the messages that have `word` in them longer than it takes them."""

    def __init__(self, api: Any, word: str) -> None:
        self._api, self._word, self.refused = api, word, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._api, name)

    async def apply_status(
        self, namespace: str, name: str, version: str, status: Mapping[str, Any]
    ) -> dict[str, Any]:
        reported = [self._long(condition) for condition in status["conditions"]]
        try:
            return dict(
                await self._api.apply_status(namespace, name, version, {**status, "conditions": reported})
            )
        except ApiError:
            self.refused += 1
            raise

    def _long(self, condition: Mapping[str, Any]) -> dict[str, Any]:
        message = condition["message"]
        return {**condition, "message": message + MAX_MESSAGE * "x" if self._word in message else message}


def test_status_refused_for_its_text_is_written_without_it(server: ApiServer) -> None:
    job = Operated(
        server, manifest({"spec.trainers.job.failurePolicy": {"maxRestarts": 1, "backoffSeconds": 0}})
    )
    job.settle()
    operator = job.operator()
    operator.api = api = Longwinded(operator.api, "pair.cc")
    job.last_words(GLOO.decode(errors="replace"))
    job.ends("mnist-trainers-0", "Failed")
    for _ in range(4):
        job.collect_garbage()
        job.reconcile_with(operator)
    status = job.get(KIND, "mnist")["status"]
    assert (status["phase"], status["trainers"]["restarts"]) == ("Degraded", 1)
    assert ("Job", "mnist-trainers-1") in job.children()
    assert job.conditions()["TrainersReady"]["message"] == WITHHELD
    assert api.refused < 4, "what is known to be refused is not tried again"
    path = f"/api/v1/namespaces/{job.namespace}/events?fieldSelector=reason=Restarted"
    assert len(server.request("GET", path)["items"]) == 1
    version, refused = job.get(KIND, "mnist")["metadata"]["resourceVersion"], api.refused
    for _ in range(3):
        job.reconcile_with(operator)
    assert (job.get(KIND, "mnist")["metadata"]["resourceVersion"], api.refused) == (version, refused)


@pytest.mark.parametrize(("code", "writes"), [(400, 2), (422, 2), (403, 1), (500, 1), (0, 1)])
def test_refused_status_is_retried_without_texts_only_if_they_may_matter(
    server: ApiServer, code: int, writes: int
) -> None:
    tried: list[int] = []

    def refuses(number: int) -> Exception:
        tried.append(number)
        return ApiError(code, "refused")

    with pytest.raises(ApiError):
        Operated(server, manifest()).reconcile(refuses)
    others = 12 if code else 0
    assert tried == list(range(1, writes + others + 1)), "children are made all the same"


def test_conflicting_status_write_creates_no_children(server: ApiServer) -> None:
    tried: list[int] = []

    def refuses(number: int) -> Exception:
        tried.append(number)
        return ApiError(409, "the object has been modified")

    with pytest.raises(ApiError):
        Operated(server, manifest()).reconcile(refuses)
    assert tried == [1], "its children are decided anew"


def test_odd_characters_of_a_template_reach_the_children_unchanged(server: ApiServer) -> None:
    job = Operated(
        server,
        manifest(
            {
                ENV: [{"name": "ODD", "value": ODD}],
                "spec.trainers.job.template.spec.containers[0].args": [ODD, "\U0001f622"],
                "spec.trainers.job.template.metadata.annotations": {"a": ODD},
                "spec.feeders.template.metadata.annotations": {"a": ODD},
            }
        ),
    )
    job.settle()
    template = job.get("Job", "mnist-trainers-0")["spec"]["template"]
    container = template["spec"]["containers"][0]
    assert {"name": "ODD", "value": ODD} in container["env"]
    assert container["args"] == [ODD, "\U0001f622"]
    assert template["metadata"]["annotations"]["a"] == ODD
    feeders = job.get("Deployment", "mnist-feeders")["spec"]["template"]
    assert feeders["metadata"]["annotations"]["a"] == ODD
    assert "ChildRefused" not in {c["reason"] for c in job.conditions().values()}


@given(text=WORDS.map(lambda text: text[:4000]))
@PROPERTY
def test_any_text_of_a_template_reaches_its_child_unchanged(failing: Operated, text: str) -> None:
    variables = [{"name": "ODD", "value": text}]
    container = {"name": "feeder", "env": variables}
    failing.edit(feeders={"template": {"spec": {"containers": [container]}}})
    (asked,) = failing.get(KIND, "mnist")["spec"]["feeders"]["template"]["spec"]["containers"]
    failing.reconcile()
    made = failing.get("Deployment", "mnist-feeders")["spec"]["template"]["spec"]["containers"][0]["env"]
    (got,) = [v.get("value", "") for v in made if v["name"] == "ODD"]
    assert got == asked["env"][0].get("value", "")
    assert failing.reconcile() == 0, "it is there as it was sent"


@pytest.mark.parametrize(
    ("changes", "reason", "words"),
    [
        pytest.param(
            {"spec.trainers.job.template.spec.initContainers": 7},
            "InvalidSpec",
            "spec.trainers.job.template.spec.initContainers: found 7; use a list",
            id="a-wrong-type",
        ),
        pytest.param(
            {"spec.trainers.job.template.spec.hostnetwork": True},
            "ChildRefused",
            "hostNetwork",
            id="a-wrong-case",
        ),
        pytest.param(
            {"spec.feeders.resources": {"requests": {"memory": "10E"}}},
            "InvalidSpec",
            "memory",
            id="a-quantity",
        ),
    ],
)
def test_operator_error_about_a_job_sets_a_condition(
    server: ApiServer, changes: dict[str, Any], reason: str, words: str
) -> None:
    job = Operated(server, manifest(changes))
    operator = job.operator()
    for _ in range(2):
        with contextlib.suppress(ApiError):
            job.reconcile_with(operator)
    ready = job.conditions()["Ready"]
    assert (ready["status"], ready["reason"]) == ("False", reason)
    assert words in ready["message"]
    version = job.get(KIND, "mnist")["metadata"]["resourceVersion"]
    with contextlib.suppress(ApiError):
        job.reconcile_with(operator)
    assert job.get(KIND, "mnist")["metadata"]["resourceVersion"] == version, "it is written once"
    job.delete(KIND, "mnist")  # else the operator of another test fails at it, too
