"""Jobs with spec.loader.tls on a cluster: every connection is under TLS, and certificates are renewed meanwhile."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from cluster import RELEASE, SYSTEM, Cluster, Manifest, until
from jobs import FEEDERS, HEAD, TRAINER, Job, changed, example
from jobs import job as small
from main_job import run_here
from torch.utils.data import TensorDataset

from dataloaderjob import DataLoader
from dataloaderjob.core.generations import PERIOD

pytestmark = pytest.mark.timeout(1500)
Start = Callable[[Manifest], Job]
SHORT = {"epochs": "1", "limit": "6000"}
PERIOD_S, SYNC_S = 130.0, 25.0
"""Seconds after which certificates are replaced, and that a kubelet needs at most to bring them to its pods."""
BATCHES, STEP_S = 450, 0.8
STRAIGHT = """
import socket, sys
sock = socket.create_connection((sys.argv[1], 6400), 10)
sock.settimeout(10)
print(sock.recv(1000))
"""
SLOW = f"""
import time, torch
from torch.utils.data import TensorDataset
from dataloaderjob import DataLoader
loader = DataLoader(TensorDataset(torch.arange({4 * BATCHES})), batch_size=4)
for number, _ in enumerate(loader):
    if number % 20 == 0:
        print("batch", number, flush=True)
    time.sleep({STEP_S})
print("digest", loader.digest, flush=True)
"""


def certificates(job: Job) -> list[str]:
    found = job.cluster.list("secrets", job.namespace, f"dataloading.dev/job={job.name}")
    return sorted(secret["metadata"]["name"] for secret in found if "-tls-" in secret["metadata"]["name"])


@pytest.mark.slow
def test_job_under_tls_has_the_digest_of_a_run_without(operator: Cluster, start: Start, tmp_path: Path):
    made = changed(example(), spec__loader__tls=True)
    container = made["spec"]["trainers"]["job"]["template"]["spec"]["containers"][0]
    container["env"] += [{"name": f"FASHION_{name.upper()}", "value": value} for name, value in SHORT.items()]
    job = start(made)
    job.await_phase("Running", timeout_s=240)
    pod = str(job.pods(TRAINER)[0]["metadata"]["name"])
    told = operator.kubectl(
        "exec",
        pod,
        "-n",
        job.namespace,
        "-c",
        "trainer",
        "--",
        "python",
        "-c",
        STRAIGHT,
        "fashion-mnist-head",
    )
    assert "the connection does not use TLS" in told
    job.await_phase("Complete", timeout_s=600)
    assert job.digest() == run_here(tmp_path, **SHORT)
    assert len(certificates(job)) == 1


@pytest.fixture
def hasty(operator: Cluster) -> Iterator[Cluster]:
    """The operator replaces certificates every two minutes."""
    chart = ("upgrade", RELEASE, "charts/dataloaderjob", "-n", SYSTEM, "--reuse-values", "--wait")
    operator.helm(*chart, "--set", f"extraArgs={{--tls-days={PERIOD_S / 86_400}}}")
    yield operator
    operator.helm(*chart, "--set", "extraArgs=null")


def replaced(job: Job) -> None:
    """A feeder's pod is killed, and its successor serves: its connections are new."""
    before = {pod["metadata"]["uid"] for pod in job.pods(FEEDERS)}
    name = str(job.pods(FEEDERS)[-1]["metadata"]["name"])
    job.cluster.kubectl("delete", "pod", name, "-n", job.namespace, "--grace-period=0", "--force")

    def serves() -> bool:
        after = {pod["metadata"]["uid"] for pod in job.pods(FEEDERS)}
        return after != before and job.status()["feeders"]["ready"] == 2

    until(serves, timeout_s=120, what="another feeder", also=job.why)


@pytest.mark.nightly
@pytest.mark.alone
def test_certificates_are_renewed_under_a_running_job(hasty: Cluster, start: Start):
    assert PERIOD.total_seconds() > PERIOD_S
    job = start(changed(small("renewed", program=SLOW, feeders=2), spec__loader__tls=True))
    job.await_phase("Running", timeout_s=240)
    began = time.monotonic()
    heads = job.uids(HEAD, TRAINER)
    until(
        lambda: len(certificates(job)) > 1, timeout_s=2 * PERIOD_S, what="the next certificates", also=job.why
    )
    time.sleep(SYNC_S)  # the kubelets bring them to the pods
    replaced(job)
    time.sleep(max(0.0, 2 * PERIOD_S + 20 - (time.monotonic() - began)))  # the first ones have expired
    assert job.phase() == "Running"
    replaced(job)
    assert job.uids(HEAD, TRAINER) == heads, "nothing restarted"
    job.await_phase("Complete", timeout_s=600)
    loader = DataLoader(TensorDataset(torch.arange(4 * BATCHES)), batch_size=4, num_workers=0)
    for _ in loader:
        pass
    assert f"digest {loader.digest}" in job.logs(TRAINER, "trainer")
