"""What keeps a pod from its work, from the statuses that Kubernetes gives it."""

from __future__ import annotations

from typing import Any

import pytest

from dataloaderjob_operator.decide import pod_troubles
from dataloaderjob_operator.kinds import transform


def pod(name: str = "mnist-feeders-a", restart: str = "Always", **status: Any) -> dict[str, Any]:
    return {"metadata": {"name": name}, "spec": {"restartPolicy": restart}, "status": status}


def waiting(reason: str, message: str = "", **more: Any) -> dict[str, Any]:
    return {"name": "feeder", "state": {"waiting": {"reason": reason, "message": message}}} | more


def ended(code: int, name: str = "feeder", **more: Any) -> dict[str, Any]:
    return {"name": name, "state": {"terminated": {"exitCode": code, **more}}}


@pytest.mark.parametrize(
    "status",
    [
        {},
        {"phase": "Pending", "conditions": [{"type": "PodScheduled", "status": "True"}]},
        {
            "containerStatuses": [waiting("ContainerCreating")],
            "initContainerStatuses": [waiting("PodInitializing")],
        },
        {"phase": "Running", "containerStatuses": [{"name": "feeder", "state": {"running": {}}}]},
        {"phase": "Succeeded", "containerStatuses": [ended(0)]},
        {"containerStatuses": None},
    ],
)
def test_starting_running_or_succeeded_pod_has_no_trouble(status):
    assert pod_troubles.trouble_of(pod(**status)) is None


@pytest.mark.parametrize(
    ("status", "reason", "text"),
    [
        (
            {
                "conditions": [
                    {
                        "type": "PodScheduled",
                        "status": "False",
                        "reason": "Unschedulable",
                        "message": "0/3 nodes are available",
                    }
                ]
            },
            "Unschedulable",
            "pod mnist-feeders-a: 0/3 nodes are available",
        ),
        (
            {"conditions": [{"type": "PodScheduled", "status": "False", "reason": "SchedulingGated"}]},
            "SchedulingGated",
            "pod mnist-feeders-a: no node fits",
        ),
        (
            {"containerStatuses": [waiting("ImagePullBackOff", 'Back-off pulling image "a:1"')]},
            "ImageNotPulled",
            'container feeder: ImagePullBackOff: Back-off pulling image "a:1"',
        ),
        (
            {"containerStatuses": [waiting("CreateContainerConfigError", 'secret "s3" not found')]},
            "ConfigMissing",
            'CreateContainerConfigError: secret "s3" not found',
        ),
        (
            {
                "containerStatuses": [
                    waiting(
                        "CrashLoopBackOff",
                        "back-off",
                        restartCount=4,
                        lastState={"terminated": {"exitCode": 2, "message": "no module\\n"}},
                    )
                ]
            },
            "ContainerCrashes",
            "exit code 2: no module",
        ),
        (
            {
                "containerStatuses": [
                    waiting(
                        "CrashLoopBackOff",
                        restartCount=1,
                        lastState={"terminated": {"exitCode": 137, "reason": "OOMKilled"}},
                    )
                ]
            },
            "OutOfMemory",
            "OOM-killed because its node ran out of memory; the container has no memory limit: set ",
        ),
        ({"containerStatuses": [waiting("CrashLoopBackOff")]}, "ContainerCrashes", "CrashLoopBackOff"),
        ({"initContainerStatuses": [ended(3, "fetch")]}, "ContainerCrashes", "container fetch: exit code 3"),
        ({"containerStatuses": [ended(139, signal=11)]}, "ContainerCrashes", "killed by signal 11"),
        (
            {"restart": "Never", "initContainerStatuses": [ended(3, "fetch")]},
            "ContainerFailed",
            "container fetch: exit code 3",
        ),
        (
            {"phase": "Failed", "reason": "Evicted", "message": "The node was low on memory"},
            "Evicted",
            "low on memory",
        ),
    ],
)
def test_a_trouble_names_pod_container_and_cause(status, reason, text):
    found = pod_troubles.trouble_of(pod(**status))
    assert found is not None
    assert found.reason == reason
    assert text in str(found)


def test_crashing_container_has_one_trouble_until_it_is_ready():
    last = {"terminated": {"exitCode": 7, "message": "no disk"}}
    turns = [
        {"name": "prepare", "state": last, "restartCount": 1},
        waiting("CrashLoopBackOff", "back-off 10s", name="prepare", lastState=last, restartCount=1),
        {"name": "prepare", "state": {"running": {}}, "ready": False, "lastState": last, "restartCount": 1},
    ]
    found = {pod_troubles.trouble_of(pod(initContainerStatuses=[turn])) for turn in turns}
    assert [(t.reason, t.message) for t in found if t] == [
        ("ContainerCrashes", "exit code 7: no disk, 1 restart")
    ]
    assert pod_troubles.trouble_of(pod(initContainerStatuses=[turns[-1] | {"ready": True}])) is None


def test_ended_sidecar_counts_as_restarting_in_a_never_restarted_pod():
    sick = pod(restart="Never", initContainerStatuses=[ended(9, "sidecar")])
    sick["spec"]["initContainers"] = [{"name": "sidecar", "restartPolicy": "Always"}]
    found = pod_troubles.trouble_of(sick)
    assert found is not None
    assert found.reason == "ContainerCrashes"


def test_the_cause_is_reported_before_its_consequence():
    both = pod(
        initContainerStatuses=[ended(3, "fetch")], containerStatuses=[waiting("CreateContainerError", "x")]
    )
    both["status"]["conditions"] = [{"type": "PodScheduled", "status": "False", "message": "gone"}]
    found = pod_troubles.trouble_of(both)
    assert found is not None
    assert found.reason == "Unschedulable"


def test_same_pod_of_several_is_always_reported():
    sick = [pod(f"p-{i}", containerStatuses=[ended(1)]) for i in (3, 1, 2)]
    for order in (sick, sick[::-1], [pod("p-0"), *sick]):
        assert str(pod_troubles.first_trouble(map(pod_troubles.trouble_of, order))).startswith("pod p-1,")
    assert pod_troubles.first_trouble([pod_troubles.trouble_of(pod())]) is None


def test_a_long_message_is_cut():
    found = pod_troubles.trouble_of(pod(containerStatuses=[waiting("ErrImagePull", "x" * 5000)]))
    assert found is not None
    assert len(found.message) <= pod_troubles.MAX_TROUBLE + 1


def test_end_of_a_containers_last_output_is_reported():
    traceback = (
        "Traceback (most recent call last):\n"
        + "  File train.py\n" * 200
        + "ValueError: sample 7 is broken\n"
    )
    found = pod_troubles.trouble_of(pod(containerStatuses=[ended(1, message=traceback)]))
    assert found is not None
    assert found.message.startswith("exit code 1: …")
    assert found.message.endswith("ValueError: sample 7 is broken")


def at(second: int, code: int = 1, name: str = "trainer", **more: Any) -> dict[str, Any]:
    return ended(code, name, finishedAt=f"2026-01-01T00:00:{second:02d}Z", **more)


def trainer(rank: int, *containers: dict[str, Any], **more: Any) -> dict[str, Any]:
    return pod(
        f"mnist-trainers-0-{rank}", "Never", phase="Failed", containerStatuses=list(containers), **more
    )


def culprit(*pods: dict[str, Any]) -> str:
    return str(pod_troubles.first_trouble(map(pod_troubles.trouble_of, pods)))


NCCL = "NCCL error: remote process exited"


def test_culprit_is_the_earliest_failure():
    assert "mnist-trainers-0-3" in culprit(
        trainer(0, at(9, message=NCCL)), trainer(3, at(1, message="KeyError"))
    )


def test_out_of_memory_precedes_its_consequences_within_the_same_second():
    killed = trainer(3, at(9, 137, reason="OOMKilled"))
    for second in (1, 9):
        assert "OOM-killed" in culprit(trainer(0, at(second, message=NCCL)), killed)


def test_disrupted_pod_precedes_its_consequences():
    since = {"lastTransitionTime": "2026-01-01T00:00:01Z", "message": "preempted by team/big"}
    target = {"type": "DisruptionTarget", "status": "True", "reason": "PreemptionByScheduler", **since}
    preempted = trainer(3, at(31, 143), conditions=[target])
    assert (
        culprit(trainer(0, at(9, message=NCCL)), preempted) == "pod mnist-trainers-0-3: preempted by team/big"
    )
    evicted = trainer(3, reason="Evicted", message="The node was low on resource: memory")
    assert "low on resource" in culprit(trainer(0, at(9, message=NCCL)), evicted)


def test_oom_killed_container_precedes_its_consequences_within_a_pod():
    last = {"terminated": {"exitCode": 137, "reason": "OOMKilled", "finishedAt": "2026-01-01T00:00:07Z"}}
    sidecar = {"name": "dataloaderjob-sidecar", "state": {"running": {}}, "ready": True, "lastState": last}
    found = pod_troubles.trouble_of(
        trainer(0, at(9, message="sidecar is gone"), initContainerStatuses=[sidecar])
    )
    assert found is not None
    assert (found.container, found.reason) == ("dataloaderjob-sidecar", "OutOfMemory")
    long_after = trainer(
        0, ended(1, "trainer", finishedAt="2026-01-01T00:30:00Z"), initContainerStatuses=[sidecar]
    )
    assert "container trainer" in str(pod_troubles.trouble_of(long_after))
    both = trainer(0, at(9, name="a", message=NCCL), at(3, name="b", message="KeyError"))
    assert "container b" in culprit(both)


@pytest.mark.parametrize(
    ("role", "container", "field"),
    [
        pytest.param("feeder", "feeder", "spec.feeders.resources.limits.memory", id="feeder"),
        pytest.param("head", "head", "spec.ray.managed.head.resources.limits.memory", id="head"),
        pytest.param("trainer", "dataloaderjob-sidecar", "spec.sidecar.resources.limits.memory", id="sidecar"),
        pytest.param(
            "trainer", "train", "resources.limits.memory of container train in spec.trainers.job.template", id="trainer"
        ),
        pytest.param(
            "feeder", "logs", "resources.limits.memory of container logs in spec.feeders.template", id="users-own"
        ),
    ],
)  # fmt: skip
def test_oom_killed_container_names_its_limit_and_field(role: str, container: str, field: str):
    limits = {"name": container, "resources": {"limits": {"memory": "420Mi", "cpu": "1"}}}
    killed = {
        "kind": "Pod",
        "metadata": {"name": "p", "labels": {"dataloading.dev/role": role}},
        "spec": {"containers": [limits]},
        "status": {"containerStatuses": [ended(137, container, reason="OOMKilled")]},
    }
    found = pod_troubles.trouble_of(transform(killed))
    assert found is not None
    assert found.reason == "OutOfMemory"
    assert found.message == f"OOM-killed with a memory limit of 420Mi: raise {field}"
