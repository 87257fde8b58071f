"""A job whose feeders are actors of a Ray cluster that exists without it."""

from __future__ import annotations

import time
from pathlib import Path

import main_job
import pytest
import ray_cluster
import yaml
from cluster import EXAMPLE, Cluster, Manifest, until
from jobs import FEEDERS, HEAD, TRAINER, Job, changed

from dataloaderjob.api.sidecar import KEY_FOLDER
from dataloaderjob.providers.provider import LEASE_S

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]
GONE_S = 30.0
"""Time within which the lease ends all actors of a job whose supervisor is gone."""
ENDED_S = LEASE_S - 5.0
"""Time within which the supervisor ends all actors of a job that has ended: their lease takes longer."""
NO_PODS = {
    "apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "no-more"}, "spec": {"hard": {"pods": "0"}},
}  # fmt: skip
"""Keeps the Deployment from replacing a pod."""
SHORT = {"epochs": "4", "limit": "12000"}
"""Options of the main job that shorten it."""
CONTAINER = "spec__trainers__job__template__spec__containers__0"
SMALL = {"requests": {"cpu": "50m", "memory": "512Mi"}, "limits": {"memory": "2Gi"}}


def keys(cluster: Cluster, namespace: str, pod: Manifest) -> dict[str, list[str]]:
    """The files with parts of the job's Secret, by container."""
    words = ["-n", namespace, "--", "ls", KEY_FOLDER]
    return {
        container["name"]: cluster.kubectl(
            "exec", pod["metadata"]["name"], "-c", container["name"], *words
        ).split()
        for container in pod["spec"]["containers"]
    }


@pytest.mark.nightly
@pytest.mark.alone  # the lease is measured in seconds
def test_main_job_on_an_existing_ray_outlives_its_supervisor(
    operator: Cluster, namespace: str, start, tmp_path: Path, record_testsuite_property
):
    made = yaml.safe_load((EXAMPLE / "existing-ray.yaml").read_text())
    env = f"{CONTAINER}__env"
    made = changed(made, spec__ray__external__resources=SMALL, **{f"{CONTAINER}__resources": SMALL})
    made = changed(made, **{env: [{"name": f"FASHION_{n.upper()}", "value": v} for n, v in SHORT.items()]})
    job: Job = start(made)
    waiting = job.await_condition("Ready", lambda found: found["reason"] == "WaitsForRayCluster")
    assert f"neither RayCluster {ray_cluster.NAME} nor its head's Service" in waiting["message"]
    job.await_phase("Queued")
    assert not job.pods(HEAD)
    ray_cluster.start(operator, namespace)
    job.await_phase("Running", timeout_s=240)
    assert job.status()["ray"]["address"].startswith(f"{ray_cluster.NAME}-head-svc.{namespace}.svc")
    assert not job.pods(FEEDERS), "feeders are actors"
    assert ray_cluster.feeder_processes(operator, namespace) > 0
    (supervisor,) = job.pods(HEAD)
    assert keys(operator, namespace, supervisor) == {"head": ["feeder"], "supervisor": ["links"]}
    until(lambda: "epoch 1" in job.logs(TRAINER, "trainer"), timeout_s=240, what="an epoch", also=job.why)
    operator.apply(namespace, NO_PODS)
    killed = time.monotonic()
    operator.kubectl(
        "delete", "pod", supervisor["metadata"]["name"], "-n", namespace, "--grace-period=0", "--force"
    )
    ray_cluster.await_no_feeder(operator, namespace, GONE_S - (time.monotonic() - killed))
    gone_s = time.monotonic() - killed
    record_testsuite_property(
        "seconds until the feeders were gone", f"{gone_s:.1f}, with a lease of {LEASE_S:.0f}"
    )
    assert ray_cluster.named_actors(operator, namespace) == 0
    operator.kubectl("delete", "resourcequota", "no-more", "-n", namespace)
    job.await_phase("Complete", timeout_s=600)
    ended = time.monotonic()
    ray_cluster.await_no_feeder(operator, namespace, ENDED_S)
    seconds = f"{time.monotonic() - ended:.1f}"
    record_testsuite_property("seconds from the job's end until the feeders were gone", seconds)
    until(lambda: not job.pods(HEAD), timeout_s=60, what="no supervisor", also=job.why)
    assert job.digest() == main_job.run_here(tmp_path, **SHORT), "as with a Ray of its own"
    assert job.status()["trainers"]["restarts"] == 0, "trainers waited for the next feeders"
