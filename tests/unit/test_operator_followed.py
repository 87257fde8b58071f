"""The end of a followed object, as each controller reports it, and the lookups that read it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataloaderjob.api.attach import FollowSpec
from dataloaderjob_operator.client import ApiError
from dataloaderjob_operator.decide import followed
from dataloaderjob_operator.decide.followed import Followed, FollowedState
from dataloaderjob_operator.observe.followed_objects import GONE_READS, PERIOD_S, READS_PER_S, FollowedObjects

ACTIVE, COMPLETE, FAILED = FollowedState.ACTIVE, FollowedState.COMPLETE, FollowedState.FAILED
KEY = ("team", "mnist")


def spec(
    kind: str = "TrainJob", version: str = "trainer.kubeflow.org/v1alpha1", name: str = "bert"
) -> FollowSpec:
    return FollowSpec(api_version=version, kind=kind, name=name)


RAY = spec("RayJob", "ray.io/v1")


def conditions(*found: tuple[str, str], reason: str = "R", message: str = "m") -> dict[str, Any]:
    return {"conditions": [{"type": t, "status": s, "reason": reason, "message": message} for t, s in found]}


@pytest.mark.parametrize(
    ("follow", "status", "state", "text"),
    [
        pytest.param(spec(), {}, ACTIVE, "", id="new"),
        pytest.param(spec(), conditions(("Complete", "False"), ("Failed", "Unknown")), ACTIVE, "", id="not-yet"),
        pytest.param(spec(), conditions(("Suspended", "True")), ACTIVE, "", id="suspended"),
        pytest.param(spec(), conditions(("Complete", "True")), COMPLETE, "R: m", id="trainjob"),
        pytest.param(spec(), conditions(("Failed", "True")), FAILED, "R: m", id="trainjob-failed"),
        pytest.param(
            spec("Job", "batch/v1"), conditions(("SuccessCriteriaMet", "True")), COMPLETE, "R: m", id="job"
        ),
        pytest.param(spec("Job", "batch/v1"), conditions(("FailureTarget", "True")), FAILED, "R: m", id="job-failed"),
        pytest.param(spec("JobSet", "jobset.x-k8s.io/v1alpha2"), conditions(("Completed", "True")), COMPLETE, "R: m",
                     id="jobset"),
        pytest.param(
            spec("PyTorchJob", "kubeflow.org/v1"), conditions(("Running", "False"), ("Succeeded", "True")), COMPLETE,
            "R: m", id="pytorchjob",
        ),
        pytest.param(
            spec("PyTorchJob", "kubeflow.org/v1"), conditions(("Restarting", "True"), ("Running", "False")), ACTIVE, "",
            id="pytorchjob-restarts",
        ),
        pytest.param(RAY, {"jobStatus": "RUNNING", "jobDeploymentStatus": "Running"}, ACTIVE, "", id="rayjob-runs"),
        pytest.param(
            RAY, {"jobStatus": "SUCCEEDED", "jobDeploymentStatus": "Complete"}, COMPLETE, "jobStatus SUCCEEDED",
            id="rayjob",
        ),
        pytest.param(
            RAY, {"jobStatus": "FAILED", "jobDeploymentStatus": "Complete", "message": "exit 1"}, FAILED, "exit 1",
            id="rayjob-script-failed",
        ),
        pytest.param(
            RAY, {"jobStatus": "FAILED", "jobDeploymentStatus": "Retrying"}, ACTIVE, "", id="rayjob-retries"
        ),
        pytest.param(
            RAY, {"jobDeploymentStatus": "Failed", "reason": "DeadlineExceeded"}, FAILED, "DeadlineExceeded",
            id="rayjob-deadline",
        ),
        pytest.param(RAY, {"jobStatus": "STOPPED"}, FAILED, "jobStatus STOPPED", id="rayjob-old"),
        pytest.param(spec("Job", "batch.volcano.sh/v1alpha1"), {"state": {"phase": "Completed"}}, COMPLETE,
                     "phase Completed", id="volcano"),
        pytest.param(spec("Job", "batch.volcano.sh/v1alpha1"), {"state": {"phase": "Running"}}, ACTIVE, "",
                     id="volcano-runs"),
        pytest.param(spec("Pod", "v1"), {"phase": "Failed", "message": "evicted"}, FAILED, "evicted", id="pod"),
        pytest.param(spec("Workflow", "argoproj.io/v1alpha1"), {"phase": "Error"}, FAILED, "phase Error", id="argo"),
    ],
)  # fmt: skip
def test_end_is_read_as_each_controller_reports_it(
    follow: FollowSpec, status: dict[str, Any], state: FollowedState, text: str
) -> None:
    found = followed.read({"metadata": {"uid": "u"}, "status": status}, follow)
    assert found == Followed(state, text, "u")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(
        st.sampled_from(["conditions", "type", "status", "state", "phase", "jobStatus", "message", "x"]), inner
    ),
    max_leaves=12,
)  # fmt: skip


@given(st.dictionaries(st.sampled_from(["metadata", "status", "spec"]), JSON), st.sampled_from([RAY, spec()]))
def test_any_object_has_a_state(thing: dict[str, Any], follow: FollowSpec) -> None:
    found = followed.read(thing, follow)
    assert found.state in (ACTIVE, COMPLETE, FAILED)
    assert len(found.text) <= followed.MAX_TEXT


class Api:
    """An API server with one kind, whose objects and errors a test sets."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.errors: dict[str, int] = {}
        self.status: dict[str, Any] = {}

    async def get(self, path: str) -> dict[str, Any]:
        self.asked.append(path)
        for part, code in self.errors.items():
            if path.endswith(part):
                raise ApiError(code, "no")
        if path.count("/") <= 3:
            plural = [{"name": "trainjobs/status", "kind": "TrainJob", "namespaced": True},
                      {"name": "trainjobs", "kind": "TrainJob", "namespaced": True},
                      {"name": "runtimes", "kind": "Runtime", "namespaced": False}]  # fmt: skip
            return {"resources": plural}
        return {"metadata": {"uid": "u"}, "status": self.status}


class Reads:
    """The lookups of one operator, at moments of the test's choice."""

    def __init__(self, follow: FollowSpec | None = None) -> None:
        self.api, self.now, self.changed = Api(), 0.0, 0
        self.objects = FollowedObjects(self.api, self._change, lambda: self.now)  # type: ignore[arg-type]
        self.objects.want(KEY, follow or spec())

    def _change(self, key: Any) -> None:
        self.changed += 1

    def at(self, *moments: float) -> Followed | None:
        for self.now in moments:
            while asyncio.run(self.objects.turn()):
                pass
        return self.objects.found(KEY)


def test_object_is_read_by_the_plural_that_the_api_server_lists() -> None:
    reads = Reads()
    found = reads.at(0.0, 1.0, PERIOD_S)
    root = "/apis/trainer.kubeflow.org/v1alpha1"
    path = f"{root}/namespaces/team/trainjobs/bert"
    assert (found, reads.api.asked) == (Followed(ACTIVE, "", "u"), [root, path, path])
    assert reads.changed == 1, "the same state again changes nothing"
    reads.api.status = conditions(("Complete", "True"))
    assert reads.at(3 * PERIOD_S) == Followed(COMPLETE, "R: m", "u")
    assert reads.changed == 2


@pytest.mark.parametrize(
    ("follow", "errors", "text"),
    [
        pytest.param(spec(), {"v1alpha1": 404}, "install its CustomResourceDefinition", id="no-definition"),
        pytest.param(spec("Train"), {}, "the API server does not know kind Train in trainer", id="other-kind"),
        pytest.param(spec("Runtime"), {}, "does not know kind Runtime", id="cluster-wide-kind"),
        pytest.param(spec("Secret", "v1"), {}, "does not know kind Secret", id="no-secrets"),
        pytest.param(
            spec(), {"bert": 403}, "add trainjobs.trainer.kubeflow.org to the chart's value follow.resources",
            id="no-rights",
        ),
    ],
)  # fmt: skip
def test_object_that_cannot_be_read_is_told_with_the_remedy(
    follow: FollowSpec, errors: dict[str, int], text: str
) -> None:
    reads = Reads(follow)
    reads.api.errors = errors
    found = reads.at(0.0)
    assert found is not None
    assert found.state is FollowedState.UNREADABLE
    assert text in found.text
    assert not any("secrets" in path for path in reads.api.asked)
    reads.api.errors = {}
    if errors:
        assert reads.at(PERIOD_S) == Followed(ACTIVE, "", "u"), "it recovers without a restart"


def test_object_counts_as_missing_after_several_reads() -> None:
    reads = Reads()
    reads.at(0.0)
    reads.api.errors = {"bert": 404}
    times = [n * PERIOD_S for n in range(1, GONE_READS + 1)]
    assert reads.at(*times[:-1]) == Followed(ACTIVE, "", "u")
    found = reads.at(times[-1])
    assert found is not None
    assert (found.state, found.uid) == (FollowedState.MISSING, "")
    assert "TrainJob bert does not exist" in found.text


def test_object_created_again_at_once_is_followed_on() -> None:
    reads = Reads()
    reads.at(0.0)
    reads.api.errors = {"bert": 404}
    reads.at(PERIOD_S)
    reads.api.errors = {}
    assert reads.at(2 * PERIOD_S) == Followed(ACTIVE, "", "u")


@pytest.mark.parametrize("code", [0, 429, 500, 503])
def test_server_that_fails_leaves_the_last_state(code: int) -> None:
    reads = Reads()
    reads.at(0.0)
    reads.api.errors = {"bert": code}
    assert reads.at(*(n * PERIOD_S for n in range(1, 10))) == Followed(ACTIVE, "", "u")


def test_many_followers_share_a_bounded_rate() -> None:
    reads = Reads()
    for n in range(1000):
        reads.objects.want(("team", f"j{n}"), spec(name=f"t{n}"))
    reads.at(0.0)
    first = len(reads.api.asked)
    reads.at(PERIOD_S, 2 * PERIOD_S)
    assert len(reads.api.asked) == first, "the next reads come a thousand twentieths of a second later"
    assert 1001 / READS_PER_S > 2 * PERIOD_S


def test_change_of_pods_has_the_object_read_within_a_second() -> None:
    reads = Reads()
    reads.at(0.0)
    before = len(reads.api.asked)
    for tenth in range(5, 45):
        reads.objects.wake(KEY)
        reads.at(tenth / 10)
    assert 3 <= len(reads.api.asked) - before <= 5


def test_job_that_no_longer_follows_is_forgotten() -> None:
    reads = Reads()
    reads.at(0.0)
    reads.objects.want(KEY, None)
    assert reads.at(PERIOD_S) is None
    reads.objects.want(KEY, spec(name="other"))
    assert reads.objects.found(KEY) is None, "another object is read before it counts"
