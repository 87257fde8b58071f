"""Manifests for tests: one that works, tables of changes that spoil it, and of some that do not."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest

GOOD: dict[str, Any] = {
    "apiVersion": "dataloading.dev/v1alpha1",
    "kind": "DataLoaderJob",
    "metadata": {"name": "mnist"},
    "spec": {
        "trainers": {
            "job": {
                "template": {
                    "spec": {
                        "containers": [
                            {"name": "trainer", "image": "example/mnist:1", "command": ["python", "train.py"]}
                        ]
                    }
                }
            }
        }
    },
}
ABSENT = object()
CONTAINER = "spec.trainers.job.template.spec.containers[0]"
ATTACHED: dict[str, Any] = {"spec.trainers": {"attach": {}}, "spec.feeders.image": "example/mnist:1"}
"""Changes that make the trainers attached pods."""
FOLLOW = {"apiVersion": "trainer.kubeflow.org/v1alpha1", "kind": "TrainJob", "name": "bert"}


def manifest(changes: dict[str, Any] | None = None) -> dict[str, Any]:
    """GOOD with values set at dotted paths such as `spec.feeders.replicas`; ABSENT removes one."""
    data = copy.deepcopy(GOOD)
    for path, value in (changes or {}).items():
        *parents, last = [int(p) if p.isdigit() else p for p in re.findall(r"[^.\[\]]+", path)]
        node: Any = data
        for part in parents:
            node = node[part] if isinstance(part, int) else node.setdefault(part, {})
        if value is ABSENT:
            del node[last]
        else:
            node[last] = copy.deepcopy(value)
    return data


FEEDER = "spec.feeders.template.spec.containers"
HEAD = "spec.ray.managed.head.template.spec.containers"
REGISTER = "spec.ray.managed.tuning.workerRegisterTimeoutSeconds"
TASKS = "spec.ray.managed.tasks"
CHECK = "spec.ray.managed.tuning.healthCheck"

REFUSED_FIELDS = [
    # names and kinds
    pytest.param({"metadata.name": ABSENT}, "metadata.name: found nothing; use a name of", id="no-name"),
    pytest.param(
        {"metadata": ABSENT}, "metadata: found nothing; use a mapping with the fields name", id="no-meta"
    ),
    pytest.param(
        {"spec": ABSENT}, "spec: found nothing; use a mapping with the fields ray, feeders", id="no-spec"
    ),
    pytest.param({"spec": []}, "spec: found an empty list; use a mapping", id="spec-is-a-list"),
    pytest.param(
        {"metadata.labels": {"a": True}}, "metadata.labels.a: found true; use a string", id="label-bool"
    ),
    # unknown fields
    pytest.param({"spec.feeders.minAvailabe": 1}, "found an unknown field; use minAvailable", id="near-name"),
    pytest.param(
        {"spec.managed_by": "a/b"}, "spec.managed_by: found an unknown field; use managedBy", id="snake"
    ),
    pytest.param({"spec.prefetch": 4}, "found an unknown field; use spec.loader.prefetch", id="wrong-level"),
    pytest.param(
        {"spec.trainers.job.image": "x"},
        "found an unknown field; use spec.trainers.job.template.spec.containers[].image",
        id="image-of-the-template",
    ),
    pytest.param(
        {"spec.ray.managed.tuning.numHeartbeatsTimeout": 30},
        "found an unknown field; use healthCheck.failureThreshold, which replaced it in Ray",
        id="old-name-of-ray",
    ),
    pytest.param(
        {"spec.feeders.minReplicas": 1}, "found an unknown field; use spec.feeders.minAvailable", id="least"
    ),
    pytest.param(
        {"spec.ray.managed.headResources": {}},
        "found an unknown field; use spec.ray.managed.head.resources",
        id="old-head",
    ),
    pytest.param(
        {"spec.xyzzy": 1}, "found an unknown field; use one of ray, feeders, sidecar", id="no-such-name"
    ),
    pytest.param(
        {f"{CONTAINER}.comand": ["a"]}, "comand: found an unknown field; use command", id="near-in-free-part"
    ),
    pytest.param(
        {"metadata.nmae": "x"}, "metadata.nmae: found an unknown field; use name", id="metadata-typo"
    ),
    # types
    pytest.param(
        {"spec.feeders.replicas": "2"}, 'found "2"; use a whole number from 0 to 1024', id="text-number"
    ),
    pytest.param({"spec.feeders.replicas": True}, "found true; use a whole number", id="bool-number"),
    pytest.param({"spec.feeders.replicas": 1.0}, "found 1.0; use a whole number", id="float-number"),
    pytest.param({"spec.loader.checksum": "yes"}, 'found "yes"; use true or false', id="text-bool"),
    pytest.param({"spec.suspend": 1}, "spec.suspend: found 1; use true or false", id="number-bool"),
    pytest.param(
        {"spec.ray.managed.version": 2.6},
        'found 2.6; use a version in quotes such as "2.60.0"',
        id="float-version",
    ),
    pytest.param(
        {f"{CONTAINER}.command": "python t.py"}, 'found "python t.py"; use a list of strings', id="shell"
    ),
    pytest.param(
        {f"{CONTAINER}.command": ["a", 1]}, "command[1]: found 1; use a string", id="number-in-command"
    ),
    pytest.param(
        {f"{CONTAINER}.env": [{"name": "A", "value": 1}]},
        "env[0].value: found 1; use a string (numbers and true or false in quotes)",
        id="env-number",
    ),
    pytest.param(
        {"spec.feeders": "two"}, 'spec.feeders: found "two"; use a mapping with the fields', id="no-mapping"
    ),
    # bounds
    pytest.param({"spec.loader.prefetch": 1}, "found 1; use a whole number from 2 to 512", id="prefetch-low"),
    pytest.param(
        {"spec.loader.prefetch": 513}, "found 513; use a whole number from 2 to 512", id="prefetch-high"
    ),
    pytest.param({"spec.trainers.job.replicas": 0}, "found 0; use a whole number from 1", id="no-trainers"),
    pytest.param(
        {"spec.trainers.job.processesPerPod": 0}, "found 0; use a whole number from 1", id="no-ranks"
    ),
    pytest.param({"spec.loader.batchTimeoutSeconds": 0}, "found 0; use a whole number from 1", id="batch-0"),
    pytest.param(
        {"spec.startupDeadlineSeconds": -1}, "found -1; use a whole number from 1", id="startup-negative"
    ),
    pytest.param({"spec.activeDeadlineSeconds": 0}, "found 0; use a whole number from 1", id="active-0"),
    pytest.param({"spec.loader.warnAfterSeconds": 0}, "found 0; use a whole number", id="progress-0"),
    pytest.param(
        {"spec.trainers.job.failurePolicy": {"maxRestarts": -1}},
        "found -1; use a whole number from 0",
        id="restarts-negative",
    ),
    pytest.param(
        {"spec.ttlSecondsAfterFinished": -1}, "found -1; use a whole number from 0", id="ttl-negative"
    ),
    pytest.param({REGISTER: 0}, "found 0; use a whole number from 1 to 3600", id="register-0"),
    pytest.param({f"{CHECK}.timeoutMs": 0}, "found 0; use a whole number from 100", id="check-timeout-0"),
    # quantities
    pytest.param({"spec.loader.memoryPerProcess": "2GB"}, 'found "2GB"; use a size such as "512Mi"', id="GB"),
    pytest.param(
        {"spec.loader.memoryPerProcess": "-1Gi"}, 'found "-1Gi"; use a size such as', id="negative-size"
    ),
    pytest.param({"spec.loader.memoryPerProcess": "1500m"}, "found ", id="parts-of-a-byte"),
    pytest.param(
        {"spec.feeders.resources": {"limits": {"cpu": 1.5}}}, "limits.cpu: found 1.5; use a quant", id="cpu"
    ),
    # the template
    pytest.param(
        {f"{CONTAINER}.name": "T_1"}, 'name: found "T_1"; use lower-case letters, digits', id="container-name"
    ),
    pytest.param(
        {"spec.trainers": ABSENT},
        "spec.trainers: found nothing; use a mapping with the fields job, attach",
        id="no-trainers-at-all",
    ),
    pytest.param(
        {**ATTACHED, "spec.trainers.attach.processesPerPod": 65},
        "found 65; use a whole number from 1 to 64",
        id="attach-many-processes",
    ),
    pytest.param(
        {**ATTACHED, "spec.trainers.attach.idleSeconds": -1}, "found -1; use a whole number", id="attach-idle"
    ),
    pytest.param(
        {**ATTACHED, "spec.trainers.attach.container": "A_b"},
        'container: found "A_b"; use lower-case letters',
        id="attach-container",
    ),
    pytest.param(
        {**ATTACHED, "spec.trainers.attach.follow": {"kind": "Job", "name": "a"}},
        "follow.apiVersion: found nothing; use a group and a version such as",
        id="follow-no-version",
    ),
    pytest.param(
        {**ATTACHED, "spec.trainers.attach.follow": {**FOLLOW, "apiVersion": "../v1"}},
        'follow.apiVersion: found "../v1"; use a group and a version such as',
        id="follow-odd-version",
    ),
    pytest.param(
        {**ATTACHED, "spec.trainers.attach.follow": {**FOLLOW, "kind": "trainjob"}},
        'follow.kind: found "trainjob"; use the name of a kind such as TrainJob',
        id="follow-odd-kind",
    ),
    pytest.param(
        {**ATTACHED, "spec.trainers.attach.follow": {**FOLLOW, "name": "../a"}},
        'follow.name: found "../a"; use the name of an object',
        id="follow-odd-name",
    ),
    pytest.param(
        {"spec.trainers.job.template.spec.containers": []},
        "containers: found an empty list; use a list with at least one entry",
        id="no-container",
    ),
    pytest.param(
        {f"{CONTAINER}.env": [{"name": "A", "value": "1"}, {"name": "A", "value": "2"}]},
        'env[1].name: found "A" a second time; use each name once',
        id="env-twice",
    ),
    pytest.param({f"{CONTAINER}.env": [{"name": "A=B"}]}, 'found "A=B"; use a name without =', id="env-name"),
    pytest.param(
        {"spec.networkPolicy.mode": "Deny"}, 'found "Deny"; use Ingress or Strict or None', id="policy-mode"
    ),
    pytest.param(
        {"spec.networkPolicy": "Strict"}, 'found "Strict"; use a mapping with the fields mode', id="bare-mode"
    ),
    pytest.param(
        {"spec.trainers.job.template.spec.hostNetwork": "yes"},
        'found "yes"; use true or false',
        id="host-network",
    ),
    pytest.param({"spec.managedBy": "me"}, 'found "me"; use a controller\'s name such as', id="managed-by"),
    pytest.param(
        {f"{CONTAINER}.resources": {"requests": {"nvidia.com/gpu": 2}, "limits": {"nvidia.com/gpu": 1}}},
        "use at most the limit, or a higher limit",
        id="request-over-limit-in-template",
    ),
    pytest.param(
        {TASKS: {"objectStore": "1Gi"}},
        "spec.ray.managed.tasks.cpus: found nothing",
        id="store-without-tasks",
    ),
    pytest.param(
        {"spec.ray.external": {"address": "auto"}},
        'spec.ray.external.address: found "auto"; use host:port of the head\'s GCS',
        id="no-address-of-ray",
    ),
    pytest.param(
        {"spec.ray.external": {"rayCluster": "Shared"}},
        'spec.ray.external.rayCluster: found "Shared"; use the name of a RayCluster in the job\'s namespace',
        id="no-name-of-a-ray-cluster",
    ),
    pytest.param(
        {"spec.ray.external": {"rayCluster": "shared", "tokenSecretRef": {"name": "shared", "key": "a/b"}}},
        'spec.ray.external.tokenSecretRef.key: found "a/b"; use a key of that Secret',
        id="no-key-of-a-secret",
    ),
    pytest.param(
        {"spec.feeders.autoscaling.mode": False},
        'spec.feeders.autoscaling.mode: found false; use "Off" in quotes or Recommend or Auto',
        id="unquoted-off",
    ),
    pytest.param(
        {"spec.feeders.autoscaling.mode": "auto"},
        'spec.feeders.autoscaling.mode: found "auto"; use "Off" in quotes or Recommend or Auto',
        id="lower-case-mode",
    ),
    pytest.param({TASKS: {"cpus": 0}}, "spec.ray.managed.tasks.cpus: found 0", id="no-cpus-for-tasks"),
]

OWN: list[tuple[str, Any, str]] = [
    ("command", ["a"], "leave this unset, because the operator starts"),
    ("args", ["a"], "leave this unset, because the operator starts"),
    ("image", "a", "use spec.feeders.image"),
    ("resources", {}, "use spec."),
]
"""Fields of a container that the operator itself writes: name, some value, and the remedy in the message."""
REFUSED_BY_RULES = [
    pytest.param(
        {"spec.trainers.job": ABSENT},
        "spec.trainers.job: found neither job nor attach; use either job (the operator creates the pods) or attach",
        id="no-trainer",
    ),
    pytest.param(
        {"spec.trainers.attach": {}, "spec.feeders.image": "a:1"},
        "spec.trainers.job: found job and attach; use either job (the operator creates the pods)",
        id="job-and-attach",
    ),
    pytest.param(
        {"spec.trainers": {"attach": {}}},
        "spec.feeders.image: found no image; use an image with your Dataset's code",
        id="attach-without-image",
    ),
    pytest.param(
        {
            **ATTACHED,
            "spec.trainers.attach.processesPerPod": 8,
            "spec.sidecar.resources.limits": {"memory": "8Gi"},
        },
        "8Gi, below the 8368Mi that memoryPerProcess 1Gi and the sidecar itself need; use at least loader.",
        id="attach-memory",
    ),
    pytest.param(
        {"spec.feeders.autoscaling": {"minReplicas": 5, "maxReplicas": 4}},
        "5, above maxReplicas 4; use at most maxReplicas",
        id="autoscaling-bounds",
    ),
    pytest.param(
        {
            "spec.feeders": {
                "minAvailable": 3,
                "replicas": 3,
                "autoscaling": {"mode": "Auto", "maxReplicas": 2},
            }
        },
        "2; use at least minAvailable, and at most 4096 / processesPerPod",
        id="autoscaling-most",
    ),
    pytest.param(
        {
            "spec.feeders": {
                "replicas": 1,
                "processesPerPod": 64,
                "autoscaling": {"mode": "Auto", "maxReplicas": 1024},
            }
        },
        "1024; use at least minAvailable, and at most 4096 / processesPerPod",
        id="autoscaling-processes",
    ),
    pytest.param({"metadata.name": "a" * 45}, "(45 characters); use at most 44 characters", id="long-name"),
    pytest.param(
        {"metadata.name": "Mnist_1"}, '"Mnist_1"; use lower-case letters, digits and', id="bad-name"
    ),
    pytest.param({"spec.ray.managed.version": "2.55.1"}, '"2.55.1"; use Ray 2.56 or newer', id="old-ray"),
    pytest.param(
        {"spec.ray.external": {"tokenSecretRef": {"name": "ray"}}},
        "spec.ray.external.address: found neither address nor rayCluster; use either address (the host:port of",
        id="nameless-ray",
    ),
    pytest.param(
        {"spec.ray.external": {"address": "ray:6379", "rayCluster": "shared"}},
        "spec.ray.external.address: found address and rayCluster; use either address (the host:port of",
        id="twice-named-ray",
    ),
    pytest.param(
        {"spec.ray": {"external": {"address": "ray:6379"}, "managed": {"version": "2.60.0"}}},
        "spec.ray.external: found both managed and external; use either managed or external",
        id="two-rays",
    ),
    pytest.param(
        {"spec.loader.tls": True, "spec.ray.external": {"address": "ray:6379"}},
        "spec.loader.tls: found true; use false with spec.ray.external, because feeders on its nodes have no",
        id="tls-on-an-existing-ray",
    ),
    pytest.param({"spec.ray.managed.version": "1.13"}, '"1.13"; use Ray 2.56 or newer', id="very-old-ray"),
    pytest.param(
        {f"{CHECK}.periodMs": 100, f"{CHECK}.failureThreshold": 9},
        "failureThreshold * periodMs = 900 ms; use values whose product is at least 1000 ms",
        id="hasty-health-check",
    ),
    pytest.param(
        {f"{CHECK}.failureThreshold": 1000},
        "failureThreshold * (periodMs + timeoutMs) = 25000000 ms; use values that detect a dead node",
        id="patient-health-check",
    ),
    pytest.param(
        {REGISTER: 1000},
        "1000, above startupDeadlineSeconds 900; use at most spec.startupDeadlineSeconds",
        id="register-over-startup",
    ),
    pytest.param(
        {"spec.feeders.replicas": 0}, "0, below minAvailable 1; use at least minAvailable", id="no-feeders"
    ),
    pytest.param(
        {"spec.feeders.replicas": 1000, "spec.feeders.processesPerPod": 5},
        "replicas * processesPerPod = 5000; use values of replicas and processesPerPod whose product is at most 4096",
        id="more-feeders-than-a-supervisor-keeps",
    ),
    *(
        pytest.param(
            {FEEDER: [{"name": "feeder", field: value}]},
            f"{field} of the container feeder; {remedy}",
            id=f"own-{field}",
        )
        for field, value, remedy in OWN
    ),
    pytest.param(
        {FEEDER: [{"name": "feeder", "command": []}]},
        "command of the container feeder; leave this unset, because the operator starts the feeders",
        id="own-command-that-is-empty",
    ),
    *(
        pytest.param(
            {HEAD: [{"name": "head", field: value}]},
            f"{field} of the container head; {remedy}",
            id=f"head-{field}",
        )
        for field, value, remedy in OWN
    ),
    pytest.param(
        {"spec.ray.managed.head.template.spec.hostNetwork": True},
        "hostNetwork: found true; use false, because sidecars, feeders and the operator find the head through",
        id="head-on-the-host",
    ),
    pytest.param(
        {FEEDER: [{"name": "feeder", "env": [{"name": "POD_IP", "value": "::1"}]}]},
        "use another name, because dataloaderjob sets this one itself",
        id="feeder-ip",
    ),
    pytest.param(
        {FEEDER: [{"name": "feeder", "env": [{"name": "RAY_ADDRESS", "value": "x"}]}]},
        "use another name, because dataloaderjob sets this one itself",
        id="feeder-env",
    ),
    pytest.param(
        {FEEDER: [{"name": "feeder", "env": [{"name": "RAY_health_check_period_ms", "value": "1"}]}]},
        "use spec.ray.managed.tuning, which sets it",
        id="tuning-by-env",
    ),
    *(
        pytest.param(
            {f"{CONTAINER}.env": [{"name": name, "value": "1"}]},
            "use another name, because this one is derived from spec.trainers.job.replicas",
            id=name,
        )
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "PET_NNODES", "DATALOADERJOB_X")
    ),
    pytest.param(
        {"spec.loader.memoryPerProcess": "1Ki"}, "1Ki; use at least 1Mi, such as 1Gi", id="tiny-memory"
    ),
    pytest.param({"spec.loader.memoryPerProcess": "17Ti"}, "17Ti; use at most 16Ti", id="huge-memory"),
    pytest.param({"spec.loader.poolSize": 512}, "512; use at least 1Mi, or omit it", id="tiny-pool"),
    pytest.param(
        {"spec.loader.poolSize": "3Gi"},
        "3Gi, above memoryPerProcess 1Gi; use at most memoryPerProcess",
        id="pool-over-limit",
    ),
    pytest.param(
        {"spec.sidecar.resources": {"limits": {"memory": "2Gi"}}, "spec.trainers.job.processesPerPod": 2},
        "2Gi, below the 2128Mi that memoryPerProcess 1Gi and the sidecar itself need;"
        " use at least loader.memoryPerProcess for each process of a pod, plus 64Mi",
        id="sidecar-limit",
    ),
    pytest.param(
        {"spec.feeders.resources": {"requests": {"cpu": 2}, "limits": {"cpu": "1500m"}}},
        "requests.cpu: found 2, above the limit 1500m; use at most the limit, or a higher limit",
        id="request-over-limit",
    ),
    pytest.param(
        {"spec.feeders.resources": {"requests": {"memory": "512m"}}},
        '512m, less than 1Mi; use bytes with a unit, such as "512Mi"',
        id="milli-bytes",
    ),
    pytest.param(
        {"spec.ray.managed.head.resources": {"limits": {"memory": 4096}}},
        "4096, less than 1Mi; use bytes",
        id="no-unit",
    ),
    pytest.param(
        {"spec.data.volumes": [{"name": "a"}], "spec.data.volumeMounts": [{"name": "b", "mountPath": "/b"}]},
        "use the name of a volume in spec.data.volumes",
        id="mount-of-no-volume",
    ),
    pytest.param(
        {"spec.data.volumes": [{"name": "dataloaderjob-run", "emptyDir": {}}]},
        "use a name that does not begin with",
        id="reserved-volume-of-data",
    ),
    *(
        pytest.param(
            {f"spec.{part}.env": [{"name": name, "value": "1"}]},
            "use another name, because the job sets this one itself",
            id=f"{part}-{name}",
        )
        for part, name in (
            ("data", "RANK"),
            ("data", "RAY_ADDRESS"),
            ("data", "DATALOADERJOB_X"),
            ("sidecar", "DATALOADERJOB_X"),
        )
    ),
    pytest.param({f"{CONTAINER}.command": [""]}, "use the training command, such as", id="empty-program"),
    pytest.param(
        {f"{CONTAINER}.image": ABSENT}, "no image; use the image with your training code", id="no-image"
    ),
    pytest.param(
        {f"{CONTAINER}.name": "dataloaderjob-sidecar"},
        "use a name that does not begin with",
        id="reserved-container",
    ),
    pytest.param(
        {"spec.trainers.job.template.spec.volumes": [{"name": "dataloaderjob-pool", "emptyDir": {}}]},
        "use a name that does not begin with",
        id="reserved-volume",
    ),
    pytest.param(
        {"spec.trainers.job.template.spec.restartPolicy": "OnFailure"},
        '"OnFailure"; use Never, or omit it',
        id="restart-policy",
    ),
    *(
        pytest.param(
            {f"spec.{where}.labels": {"dataloading.dev/job": "other"}},
            '"dataloading.dev/job"; use names that do not begin with dataloading.dev/',
            id=f"our-label-{where}",
        )
        for where in ("trainers.job.metadata", "feeders.template.metadata")
    ),
    pytest.param(
        {"spec.feeders.scratch": {"size": "1Gi", "volume": {"emptyDir": {}}}},
        "both size and volume; use either size or volume, because a volume has its own size",
        id="scratch-of-both",
    ),
    pytest.param(
        {TASKS: {"cpus": 2, "objectStore": "64Mi"}},
        "found 64Mi; use at least 80Mi, such as 1Gi",
        id="tiny-store",
    ),
    pytest.param(
        {"spec.sidecar.scratch.size": "1Mi"}, "found 1Mi; use at least 64Mi, such as 100Gi", id="tiny-scratch"
    ),
    pytest.param(
        {"spec.feeders.template.spec.restartPolicy": "Never"},
        '"Never"; use Always, or omit it, because head and feeders are Deployments',
        id="restart-policy-of-feeders",
    ),
    pytest.param(
        {"spec.trainers.job.template.spec.hostNetwork": True},
        "Ingress with hostNetwork in trainers.job.template; use None if pods use their node's network",
        id="policy-of-pods-on-the-host",
    ),
    pytest.param(
        {"spec.feeders.template.spec.hostNetwork": True, "spec.networkPolicy.mode": "Strict"},
        "Strict with hostNetwork in feeders.template; use None if pods use their node's network",
        id="policy-of-feeders-on-the-host",
    ),
    pytest.param(
        {f"{CONTAINER}.env": [{"name": "A", "value": "1", "valueFrom": {"secretKeyRef": {}}}]},
        "both value and valueFrom; use either value or valueFrom",
        id="two-sources",
    ),
]

ACCEPTED = [
    pytest.param({}, id="minimal"),
    pytest.param(ATTACHED, id="attach"),
    pytest.param({**ATTACHED, "spec.trainers.job": None}, id="attach-null-job"),
    pytest.param({**ATTACHED, "spec.trainers.attach.idleSeconds": 0}, id="attach-idle-at-once"),
    pytest.param(
        {
            **ATTACHED,
            "spec.trainers.attach": {"container": "node", "processesPerPod": 8, "follow": FOLLOW},
            "spec.loader.poolSize": "1Gi",
        },
        id="attach-in-full",
    ),
    pytest.param(
        {**ATTACHED, "spec.trainers.attach.follow": {**FOLLOW, "apiVersion": "v1"}}, id="follow-core-group"
    ),
    pytest.param({"spec.ray.external": {"address": "10.0.0.5:6379"}}, id="ray-at-an-address"),
    pytest.param(
        {
            "spec.ray.external": {
                "rayCluster": "shared",
                "tokenSecretRef": {"name": "shared"},
                "resources": {"requests": {"cpu": "50m"}, "limits": {}},
            }
        },
        id="ray-cluster-in-full",
    ),
    pytest.param({f"{CONTAINER}.command": ABSENT, f"{CONTAINER}.args": ["--lr", "1"]}, id="entrypoint"),
    pytest.param({f"{CONTAINER}.command": []}, id="empty-command"),
    pytest.param({f"{CONTAINER}.env": [{"name": "PET_MAX_RESTARTS", "value": "3"}]}, id="torchruns-own"),
    pytest.param({"spec.feeders.replicas": 0, "spec.feeders.minAvailable": 0}, id="no-feeders-on-purpose"),
    pytest.param({"spec.feeders": None, "spec.loader.poolSize": None}, id="null-is-left-out"),
    pytest.param(
        {"spec.feeders.autoscaling": {"minReplicas": 4, "maxReplicas": 4}}, id="autoscaling-bounds-that-meet"
    ),
    pytest.param({"spec.trainers.job.replicas": 4, "spec.trainers.job.processesPerPod": 8}, id="torchrun"),
    pytest.param({f"{CONTAINER}.command": ["sh"], "spec.trainers.job.processesPerPod": 2}, id="any-launcher"),
    pytest.param(
        {"spec.loader.poolSize": "1Gi", "spec.trainers.job.processesPerPod": 2}, id="pools-fit-exactly"
    ),
    pytest.param(
        {"spec.sidecar.resources": {"limits": {"memory": "1088Mi"}}}, id="sidecar-limit-fits-exactly"
    ),
    pytest.param({"spec.loader.memoryPerProcess": 1073741824}, id="bytes-as-a-number"),
    pytest.param({"spec.ray.managed.version": "2.60.0", REGISTER: 10}, id="short-register-timeout"),
    pytest.param({"spec.ray.managed.version": "3.0"}, id="next-ray"),
    pytest.param({f"{CHECK}.periodMs": 500, f"{CHECK}.failureThreshold": 2}, id="quick-health-check"),
    pytest.param(
        {
            FEEDER: [
                {"name": "feeder", "env": [{"name": "OMP_NUM_THREADS", "value": "1"}], "volumeMounts": []}
            ]
        },
        id="feeder-additions",
    ),
    pytest.param(
        {"spec.trainers.job.template.spec.tolerations": [{"operator": "Exists"}], f"{CONTAINER}.envFrom": []},
        id="free-parts",
    ),
    pytest.param({f"{CONTAINER}.resources": {"claims": [{"name": "gpu"}]}}, id="claims"),
    pytest.param(
        {"status": {"phase": "Running"}, "metadata.uid": "u", "metadata.generation": 3}, id="live-object"
    ),
    pytest.param({"spec.managedBy": "kueue.x-k8s.io/multikueue"}, id="managed-by"),
    pytest.param({"spec.networkPolicy.mode": "Strict"}, id="strict-policy"),
    pytest.param({"spec.networkPolicy.mode": None}, id="policy-left-out"),
    pytest.param(
        {"spec.networkPolicy.mode": "None", "spec.trainers.job.template.spec.hostNetwork": True},
        id="host-network",
    ),
    pytest.param({"spec.feeders.template.spec.hostNetwork": False}, id="own-network"),
    pytest.param(
        {
            f"spec.{part}.metadata.labels": {"a/b": "c"}
            for part in ("trainers.job", "feeders", "ray.managed.head")
        },
        id="labels-of-workloads",
    ),
    pytest.param(
        {
            "spec.feeders.scratch": {"volume": {"ephemeral": {"volumeClaimTemplate": {"spec": {}}}}},
            "spec.sidecar.scratch": {"size": "40Gi"},
        },
        id="scratches",
    ),
    pytest.param({TASKS: {"cpus": 2}}, id="tasks"),
    pytest.param({TASKS: {"cpus": 2, "objectStore": "80Mi"}}, id="tasks-with-a-store"),
    pytest.param({"spec.feeders.template.spec.restartPolicy": "Always"}, id="restarts-of-feeders"),
    pytest.param(
        {
            "spec.data.volumes": [{"name": "images", "nfs": {"server": "s", "path": "/p"}}],
            "spec.data.volumeMounts": [{"name": "images", "mountPath": "/data", "readOnly": True}],
            "spec.data.env": [{"name": "ROOT", "value": "/data"}],
            "spec.data.envFrom": [{"secretRef": {"name": "bucket"}}],
        },
        id="data",
    ),
    pytest.param(
        {"spec.sidecar.env": [{"name": "A", "value": "1"}], "spec.sidecar.securityContext": {"runAsUser": 7}},
        id="sidecar-additions",
    ),
    pytest.param(
        {HEAD: [{"name": "head", "env": [{"name": "A", "value": "1"}]}, {"name": "other", "image": "o:1"}]},
        id="head-additions",
    ),
]
