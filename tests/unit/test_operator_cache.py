"""What the operator knows of a cluster: from watches, and from its own writes."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from manifests import manifest

from dataloaderjob_operator import names
from dataloaderjob_operator.decide.pod_troubles import trouble_of
from dataloaderjob_operator.kinds import transform
from dataloaderjob_operator.names import Role
from dataloaderjob_operator.observe.cache import GONE, RECENT, WRITE_WINS_S, Cache

KEY, MAP = ("team", "mnist"), ("ConfigMap", "mnist-settings")


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


JOB = {
    "kind": "DataLoaderJob", "metadata": {"name": "mnist", "namespace": "team", "uid": "j", "resourceVersion": "1"},
}  # fmt: skip
ENDED = {
    "type": "Complete", "status": "True", "reason": "TrainersSucceeded", "lastTransitionTime": "2026-01-01T00:00:00Z",
}  # fmt: skip


def settings(version: str = "1", uid: str = "u", **data: str) -> dict[str, Any]:
    metadata = {
        "name": MAP[1], "namespace": "team", "uid": uid, "resourceVersion": version,
        "labels": {"dataloading.dev/job": "mnist"},
    }  # fmt: skip
    return {"kind": "ConfigMap", "metadata": metadata, "data": data}


def data(cache: Cache) -> dict[str, str] | None:
    found = cache.child(KEY, MAP)
    return None if found is None else found["data"]


def test_write_is_known_before_the_watch_and_not_undone_by_old_versions():
    cache = Cache(Clock())
    cache.put(settings("3", a="old"))
    cache.put_written(settings("7", a="new"))
    assert cache.put(settings("5", a="between")) is None
    assert data(cache) == {"a": "new"}
    assert cache.put(settings("7", a="new")) is None, "nothing new"
    assert cache.put(settings("9", a="theirs")) == KEY
    assert data(cache) == {"a": "theirs"}


def test_newer_watch_event_wins_over_a_late_write_response():
    cache = Cache(Clock())
    cache.put(settings("9", a="theirs"))
    cache.put_written(settings("7", a="ours"))
    assert data(cache) == {"a": "theirs"}


def test_older_versions_are_accepted_again_after_a_while():
    clock = Clock()
    cache = Cache(clock)
    cache.put_written(settings("700", a="lost with etcd"))
    clock.now = WRITE_WINS_S
    assert cache.put(settings("5", a="restored")) == KEY
    assert data(cache) == {"a": "restored"}


def test_object_deleted_before_its_write_response_stays_deleted():
    cache = Cache(Clock())
    cache.put(settings("3"))
    cache.remove(settings("4"))
    cache.put_written(settings("3"))
    assert data(cache) is None
    cache.put_written(settings("9", uid="another"))
    assert data(cache) == {}


def test_deletion_of_an_earlier_object_keeps_its_namesake():
    cache = Cache(Clock())
    cache.put_written(settings("9", uid="new"))
    assert cache.remove(settings("8", uid="old")) == KEY
    assert data(cache) == {}


def test_number_of_remembered_deletions_is_bounded():
    cache = Cache(Clock())
    for number in range(GONE + 1):
        cache.remove(settings(uid=str(number)))
    cache.put_written(settings(uid=str(GONE)))
    assert data(cache) is None
    cache.put_written(settings(uid="0"))
    assert data(cache) == {}


def test_versions_that_are_not_numbers_are_left_to_the_watches():
    cache = Cache(Clock())
    cache.put(settings("a", a="2"))
    cache.put_written(settings("b", a="1"))
    assert data(cache) == {"a": "2"}


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=100),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=10,
)


@given(spec=st.dictionaries(st.text(max_size=8), JSON, max_size=4))
def test_compared_child_is_kept_whole_except_managed_fields(spec):
    thing = {
        "kind": "Deployment",
        "metadata": {"name": "a", "managedFields": [{"manager": "m"}]},
        "spec": spec,
    }
    assert transform(thing) == {"kind": "Deployment", "metadata": {"name": "a"}, "spec": spec}


def test_troubles_of_a_pod_are_kept():
    last = {"terminated": {"exitCode": 7, "message": "no disk"}}
    container = {
        "name": "prepare",
        "image": "i",
        "state": {"running": {}},
        "lastState": last,
        "restartCount": 2,
    }
    pod = {
        "kind": "Pod",
        "metadata": {"name": "p", "namespace": "team", "annotations": {"a": "b"}},
        "spec": {
            "restartPolicy": "Never",
            "initContainers": [{"name": "prepare", "restartPolicy": "Always"}],
        },
        "status": {"initContainerStatuses": [container], "hostIP": "10.0.0.1"},
    }
    small = transform(pod)
    assert trouble_of(small) == trouble_of(pod) is not None
    assert "annotations" not in small["metadata"]
    assert "image" not in small["status"]["initContainerStatuses"][0]


def test_late_events_of_an_object_do_not_evict_its_namesake():
    cache = Cache(Clock())
    cache.put(settings("2", uid="old", a="1"))
    cache.put(settings("5", uid="new", a="2"))
    assert cache.put(settings("3", uid="old", a="1")) is None
    assert cache.remove(settings("4", uid="old")) == KEY
    assert data(cache) == {"a": "2"}


def test_write_without_a_change_does_not_admit_older_versions():
    cache = Cache(Clock())
    cache.put_written(settings("7", a="ours"))
    cache.put_written(settings("7", a="ours"))
    cache.put(settings("7", a="ours"))
    assert cache.put(settings("5", a="before")) is None


MADE = "2026-01-01T00:00:00Z"


def of_job(kind: str, owner_name: str, owner_uid: str, **more: Any) -> dict[str, Any]:
    """An object with the job's label, made by a controller."""
    labels = {"dataloading.dev/job": "mnist", "dataloading.dev/role": "trainer"}
    owner = {"kind": kind, "name": owner_name, "uid": owner_uid, "controller": True}
    metadata = {
        "name": "p", "namespace": "team", "labels": labels, "uid": "p", "creationTimestamp": MADE,
        "ownerReferences": [owner],
    }  # fmt: skip
    return {"kind": "Pod", "metadata": {**metadata, **more}, "status": {}}


def with_pod(pod: dict[str, Any]) -> list[str]:
    """The pods that a job with this one in its namespace has."""
    cache = Cache(Clock())
    on_cluster = {"metadata.uid": "u", "metadata.namespace": "team", "metadata.creationTimestamp": MADE}
    cache.put({**manifest(on_cluster), "kind": "DataLoaderJob"})
    trainers = of_job("DataLoaderJob", "mnist", "u", name="mnist-trainers-0", uid="t")
    cache.put({**trainers, "kind": "Job"})
    cache.put(pod)
    observed = cache.observed(("team", "mnist"))
    assert observed is not None
    found = [pod["metadata"]["name"] for pod in cache.of_role(("team", "mnist"), Role.TRAINER)]
    assert [pod["metadata"]["name"] for pod in observed.pods] == found
    return found


@pytest.mark.parametrize(
    "owner",
    [
        ("Job", "mnist-trainers-0", "t"), ("Job", "mnist-trainers-7", "gone"), ("ReplicaSet", "mnist-head-7c", "r"),
        ("ReplicaSet", "mnist-feeders-7c", "r"),
    ],
)  # fmt: skip
def test_pod_made_by_a_child_of_the_job_belongs_to_the_job(owner):
    assert with_pod(of_job(*owner)) == ["p"]


def test_pods_of_a_job_named_with_a_leading_digit_are_its_own():
    """Its Services have other names than those of other jobs."""
    cache = Cache(Clock())
    on_cluster = {"metadata.uid": "u", "metadata.namespace": "team", "metadata.creationTimestamp": MADE}
    cache.put({**manifest({**on_cluster, "metadata.name": "1mnist"}), "kind": "DataLoaderJob"})
    labels = {"dataloading.dev/job": "1mnist", "dataloading.dev/role": "trainer"}
    trainers = of_job(
        "DataLoaderJob", "1mnist", "u", name=names.trainers("1mnist", 0), uid="t", labels=labels
    )
    cache.put({**trainers, "kind": "Job"})
    cache.put(of_job("Job", names.trainers("1mnist", 0), "t", labels=labels))
    assert [pod["metadata"]["name"] for pod in cache.of_role(("team", "1mnist"), Role.TRAINER)] == ["p"]


@pytest.mark.parametrize(
    "pod",
    [
        pytest.param(of_job("Job", "mnist-trainers-0", "t", ownerReferences=[]), id="a-copy-for-debugging"),
        pytest.param(of_job("Job", "mnist-trainers-0", "old"), id="of-an-earlier-job"),
        pytest.param(of_job("Job", "their-own", "x"), id="of-another-controller"),
        pytest.param(of_job("ReplicaSet", "mnist-web-7c", "x"), id="of-another-deployment"),
        pytest.param(of_job("StatefulSet", "mnist-head-7c", "x"), id="of-another-kind"),
        pytest.param(
            of_job("ReplicaSet", "mnist-head-7c", "r", creationTimestamp="2025-12-31T23:59:59Z"),
            id="older-than-the-job",
        ),
    ],
)
def test_labels_alone_do_not_make_a_pod_a_jobs(pod):
    assert with_pod(pod) == []


LATER: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"speed": 1}, {}),
    ({"trainers": {"restarts": 3, "spare": {"a": 1}}}, {}),
    ({"phase": "Hibernating"}, {"phase": "Pending"}),
    ({"feeders": 7}, {}),
    (
        {"conditions": [ENDED | {"weight": 1}, {"type": "Odd"}, ENDED | {"type": "New", "status": "Maybe"}]},
        {},
    ),
]


@pytest.mark.parametrize(("more", "read"), LATER, ids=["field", "inner", "word", "type", "conditions"])
def test_status_of_a_later_operator_is_read_except_unknown_fields(more: dict[str, Any], read: dict[str, Any]):
    found = {"phase": "Complete", "trainers": {"restarts": 3}, "conditions": [ENDED]}
    cache = Cache(Clock())
    cache.put({**JOB, "status": {**found, **more}})
    status = cache.status(KEY)
    assert status.trainers.restarts == 3, "the count of attempts"
    assert status.phase == read.get("phase", "Complete")
    assert [(condition.type, condition.status) for condition in status.conditions] == [("Complete", "True")]


@pytest.mark.parametrize("found", [None, {}, {"trainers": [{"restarts": 3}]}, {"conditions": {"a": 1}}])
def test_malformed_status_is_replaced_by_a_fresh_one(found: Any):
    cache = Cache(Clock())
    cache.put({**JOB, "status": found})
    assert cache.status(KEY).trainers.restarts == 0


def test_job_is_parsed_once_while_only_its_status_changes():
    cache, made = Cache(), manifest()
    made["metadata"] |= {"namespace": "team", "uid": "j", "generation": 1}

    def read(version: str, **changes: Any) -> Any:
        cache.put({**made, **changes, "metadata": {**made["metadata"], "resourceVersion": version}})
        observed = cache.observed(KEY)
        assert observed is not None
        return observed

    first = read("1").job
    later = read("2", status={"phase": "Running"})
    assert later.job is first
    assert later.status.phase == "Running"
    assert (
        read("3", spec={**made["spec"], "startupDeadlineSeconds": 777}).job.spec.startup_deadline_seconds
        == 777
    )
    made["metadata"]["uid"] = "anew"
    assert read("4").job.metadata.uid == "anew"


def test_number_of_cached_parsed_jobs_is_bounded():
    cache = Cache()
    for number in range(3 * RECENT):
        made = manifest()
        made["metadata"] |= {"namespace": "team", "name": f"mnist-{number}", "uid": str(number)}
        cache.put(made)
        cache.observed(("team", f"mnist-{number}"))
    assert len(cache._parsed) == RECENT
