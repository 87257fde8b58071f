"""Fashion-MNIST on two pods of other controllers, each object as a user has it, with one label for the feeders."""

from __future__ import annotations

from typing import Any

from cluster import TRAINER, Manifest
from jobs import RESTRICTED, RESTRICTED_POD, SMALL, changed, example

LABEL = "dataloading.dev/inject"
STEP = {"labels": {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}}
OPTIONS = {"epochs": "2", "limit": "12000"}
"""Of train.py: one epoch with augmented images, and one with plain ones."""
CHART_RUNTIME = "torch-distributed-dataloader"
PODS = 2
_TRAIN = ["train.py", "--augment", "--record", "out"]
_ENV = [
    {"name": "OMP_NUM_THREADS", "value": "1"},
    *({"name": f"FASHION_{name.upper()}", "value": value} for name, value in OPTIONS.items()),
]


def attached(name: str) -> Manifest:
    """The job that serves the pods: the main job's feeders and loader."""
    spec = example()["spec"]
    kept = {**spec["feeders"], "image": TRAINER, "resources": SMALL}
    return {
        "apiVersion": "dataloading.dev/v1alpha1", "kind": "DataLoaderJob", "metadata": {"name": name},
        "spec": {
            "feeders": kept, "loader": spec["loader"], "ray": {"managed": {"head": {"resources": SMALL}}},
            "sidecar": {"resources": {"requests": {"cpu": "50m"}}}, "trainers": {"attach": {}},
        },
    }  # fmt: skip


def own_trainers() -> Manifest:
    """The main job itself, with these options."""
    made = changed(
        example(),
        spec__feeders__resources=SMALL,
        spec__ray={"managed": {"head": {"resources": SMALL}}},
        spec__trainers__job__template__spec__containers__0__resources=SMALL,
    )
    made["spec"]["trainers"]["job"]["template"]["spec"]["containers"][0]["env"] = _ENV
    return made


def job_set(name: str) -> list[Manifest]:
    """One replicated Job of two pods, which find each other by the JobSet's names."""
    env: list[Manifest] = [
        {"name": "WORLD_SIZE", "value": str(PODS)},
        {"name": "MASTER_ADDR", "value": f"{name}-node-0-0.{name}"},
        {"name": "MASTER_PORT", "value": "29500"},
        {"name": "RANK", "valueFrom": {
            "fieldRef": {"fieldPath": "metadata.annotations['batch.kubernetes.io/job-completion-index']"}
        }},
    ]  # fmt: skip
    spec = {
        "parallelism": PODS, "completions": PODS, "completionMode": "Indexed", "backoffLimit": 0,
        "template": _template(name, command=["python", *_TRAIN], env=[*_ENV, *env]),
    }  # fmt: skip
    found = {"replicatedJobs": [{"name": "node", "replicas": 1, "template": {"spec": spec}}]}
    return [
        {
            "apiVersion": "jobset.x-k8s.io/v1alpha2",
            "kind": "JobSet",
            "metadata": {"name": name},
            "spec": found,
        }
    ]


def train_job_by_label(name: str) -> list[Manifest]:
    """A runtime whose pod template has the label, and a TrainJob of it."""
    pod = _template(name, command=["torchrun", *_TRAIN], env=_ENV)
    node = {"name": "node", "template": {"metadata": STEP, "spec": {"backoffLimit": 0, "template": pod}}}
    policy = {"numNodes": PODS, "torch": {"numProcPerNode": 1}}
    runtime = {
        "apiVersion": "trainer.kubeflow.org/v1alpha1", "kind": "TrainingRuntime", "metadata": {"name": name},
        "spec": {"mlPolicy": policy, "template": {"spec": {"replicatedJobs": [node]}}},
    }  # fmt: skip
    # Without a trainer, Kubeflow Trainer 2.0.0 leaves out torchrun's variables.
    job = _train_job(name, runtimeRef={"kind": "TrainingRuntime", "name": name}, trainer={"numNodes": PODS})
    return [runtime, job]


def train_job_by_runtime(name: str) -> list[Manifest]:
    """A TrainJob of the chart's runtime. Neither has anything of ours but the runtime's name."""
    trainer = {
        "image": TRAINER, "command": ["torchrun"], "args": _TRAIN, "env": _ENV, "numNodes": PODS,
        "numProcPerNode": 1, "resourcesPerNode": SMALL,
    }  # fmt: skip
    return [_train_job(name, runtimeRef={"name": CHART_RUNTIME}, trainer=trainer)]


def _train_job(name: str, **spec: Any) -> Manifest:
    return {
        "apiVersion": "trainer.kubeflow.org/v1alpha1", "kind": "TrainJob", "metadata": {"name": name},
        "spec": spec,
    }  # fmt: skip


def _template(name: str, **container: Any) -> Manifest:
    node = {"name": "node", "image": TRAINER, "securityContext": RESTRICTED, "resources": SMALL, **container}
    pod = {"restartPolicy": "Never", "securityContext": RESTRICTED_POD, "containers": [node]}
    return {"metadata": {"labels": {LABEL: name}}, "spec": pod}
