"""Other projects' controllers on the same cluster: JobSet and Kubeflow Trainer, with their webhooks."""

from __future__ import annotations

import os

import pytest
from cluster import FEEDER, Cluster, Manifest, run, until
from jobs import RESTRICTED, RESTRICTED_POD, Job
from streams import stream, stream_here

pytestmark = [pytest.mark.slow, pytest.mark.alone, pytest.mark.timeout(900)]
INSTALL = os.environ.get("E2E_ADDONS") or "e2e/support/addons.sh"
"""Called as `--name CLUSTER jobset trainer`, it puts them on a kind cluster."""
POD: Manifest = {
    "restartPolicy": "Never", "securityContext": RESTRICTED_POD,
    "containers": [
        {"name": "node", "image": FEEDER, "command": ["python", "-c", "print(1)"], "securityContext": RESTRICTED}
    ],
}  # fmt: skip
SET: Manifest = {
    "apiVersion": "jobset.x-k8s.io/v1alpha2", "kind": "JobSet", "metadata": {"name": "theirs"},
    "spec": {"replicatedJobs": [
        {"name": "one", "replicas": 1, "template": {"spec": {"backoffLimit": 0, "template": {"spec": POD}}}}
    ]},
}  # fmt: skip
STEP = {"labels": {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}}
RUNTIME: Manifest = {
    "apiVersion": "trainer.kubeflow.org/v1alpha1", "kind": "TrainingRuntime", "metadata": {"name": "plain"},
    "spec": {"mlPolicy": {"numNodes": 1}, "template": {"spec": {"replicatedJobs": [
        {"name": "node", "template": {"metadata": STEP, "spec": {"template": {"spec": POD}}}}
    ]}}},
}  # fmt: skip
TRAIN: Manifest = {
    "apiVersion": "trainer.kubeflow.org/v1alpha1", "kind": "TrainJob", "metadata": {"name": "theirs-too"},
    "spec": {"runtimeRef": {"kind": "TrainingRuntime", "name": "plain"}},
}  # fmt: skip


def test_job_completes_next_to_jobset_and_kubeflow_trainer(operator: Cluster, namespace: str, start):
    env = {"KUBECONFIG": str(operator.kubeconfig)}
    run([INSTALL, "--name", operator.name, "jobset", "trainer"], timeout_s=600, env=env)
    ours: Job = start(stream("ours", samples=80))
    operator.apply(namespace, SET, RUNTIME)
    operator.apply(namespace, TRAIN)
    ours.await_phase("Complete", timeout_s=240)
    assert ours.digest() == stream_here(80)
    assert ours.status()["trainers"]["restarts"] == 0
    for kind, name, condition in (("jobset", "theirs", "Completed"), ("trainjob", "theirs-too", "Complete")):

        def ended(kind=kind, name=name, condition=condition) -> bool:
            status = (operator.get(kind, name, namespace) or {}).get("status", {})
            return any(c["type"] == condition and c["status"] == "True" for c in status.get("conditions", ()))

        until(ended, timeout_s=90, what=f"their {kind}")
