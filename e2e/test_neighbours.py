"""Other projects' controllers on the same cluster: JobSet and Kubeflow Trainer, with their webhooks."""

from __future__ import annotations

import os

import pytest
from cluster import FEEDER, Cluster, Manifest, run, until
from jobs import RESTRICTED, RESTRICTED_POD, Job
from streams import stream, stream_here

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
INSTALL = os.environ.get("E2E_ADDONS") or "e2e/support/addons.sh"
"""Called as `--name CLUSTER jobset trainer`, it puts them on a kind cluster."""
GROUP: Manifest = {
    "apiVersion": "jobset.x-k8s.io/v1alpha2", "kind": "JobSet", "metadata": {"name": "theirs"},
    "spec": {"replicatedJobs": [{
        "name": "one", "replicas": 1,
        "template": {"spec": {"backoffLimit": 0, "template": {"spec": {
            "restartPolicy": "Never", "securityContext": RESTRICTED_POD,
            "containers": [{"name": "one", "image": FEEDER, "command": ["python", "-c", "print(1)"],
                            "securityContext": RESTRICTED}],
        }}}},
    }]},
}  # fmt: skip


def test_a_job_runs_to_complete_beside_jobset_and_kubeflow_trainer(operator: Cluster, namespace: str, start):
    env = {"KUBECONFIG": str(operator.kubeconfig)}
    run([INSTALL, "--name", operator.name, "jobset", "trainer"], timeout_s=600, env=env)
    for group in ("jobsets.jobset.x-k8s.io", "trainjobs.trainer.kubeflow.org"):
        operator.kubectl("wait", "--for=condition=Established", f"crd/{group}", "--timeout=30s")
    ours: Job = start(stream("ours", samples=80))
    operator.apply(namespace, GROUP)
    ours.await_phase("Complete", timeout_s=240)
    assert ours.digest() == stream_here(80)
    assert ours.status()["trainers"]["restarts"] == 0

    def ended() -> bool:
        theirs = operator.get("jobset", "theirs", namespace) or {}
        return bool(theirs.get("status", {}).get("terminalState") == "Completed")

    until(ended, timeout_s=60, what="their JobSet")
