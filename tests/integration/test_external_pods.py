"""The supervisor's pod on a Ray cluster that the job did not start, as a process of this machine."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from fault_data import Slow, digest_of
from feeder_client import wait_until
from foreign_ray import ForeignHead, described_as, feeders_of, foreign_head
from pods import Pod, Pods
from ports import reserve_port
from torch import Generator

from dataloaderjob import DataLoader
from dataloaderjob.core.supervision import EXIT_RAY_REFUSED
from dataloaderjob.providers.provider import LEASE_S

GONE_S = 30.0
"""Time within which the lease ends all actors of a job whose supervisor is gone."""


@pytest.fixture(scope="module")
def ray() -> Iterator[ForeignHead]:
    with foreign_head() as made:
        yield made


def kill(*containers: Pod) -> None:
    """Ends a pod as a node's failure does: all processes of its containers at once. The main processes stop first,
    because they start an ended process again."""
    found = set()
    for container in containers:
        container.process.send_signal(signal.SIGSTOP)
    for container in containers:
        main = psutil.Process(container.process.pid)
        found |= {main, *main.children(recursive=True)}
        volume = str(container.volume)
        found |= {p for p in psutil.process_iter(["cmdline"]) if volume in " ".join(p.info["cmdline"] or [])}
    for process in found:
        process.kill()
    for container in containers:
        container.process.wait()


def loader(**options: int) -> DataLoader:
    return DataLoader(Slow(400, 0.0), batch_size=16, generator=Generator().manual_seed(7), **options)


@pytest.mark.thorough
def test_epoch_has_the_digest_and_the_lease_ends_the_actors(
    ray: ForeignHead, monkeypatch: pytest.MonkeyPatch
):
    with Pods(feeders=2) as pods:
        monkeypatch.setenv("DATALOADERJOB_SOCKET", pods.socket)
        pod = pods.driver(ray.address, str(ray.token_path))
        pods.sidecar()
        pods.ready(2)
        assert digest_of(loader()) == digest_of(loader(num_workers=0))
        assert feeders_of(ray)
        assert "joined the Ray cluster at" in pod.err
        killed = time.monotonic()
        kill(pod, pods.running["s"])
        wait_until(lambda: not feeders_of(ray), GONE_S - (time.monotonic() - killed))
        assert time.monotonic() - killed > LEASE_S / 2, "they had served"
        wait_until(lambda: not ray.sessions(), 10)


def test_end_of_the_job_ends_the_actors_at_once_and_keeps_the_supervisor(ray: ForeignHead):
    with Pods(feeders=2) as pods:
        pod = pods.driver(ray.address, str(ray.token_path))
        pods.ready(2)
        assert_has_no_key_of_the_job(pod, pods)
        began = time.monotonic()
        assert pods.ask("end") == {"type": "ok"}
        wait_until(lambda: pods.status()["ended"], 10)
        wait_until(lambda: not feeders_of(ray), 5)  # Ray ends the processes of actors that it no longer lists
        assert time.monotonic() - began < LEASE_S / 2, "before the lease is over"
        assert (pods.status()["desired"], pods.running["s"].process.poll()) == (0, None)


def assert_has_no_key_of_the_job(pod: Pod, pods: Pods) -> None:
    """Checks the container that joins the cluster, where the cluster's users can run code."""
    files = [path.read_bytes() for path in pod.volume.rglob("*") if path.is_file()]
    assert any(b"feeder_key_path" in content for content in files), "the agent's settings"
    job_key = str(pods.home / "links").encode()
    assert not any(pods.key in content or job_key in content for content in files)


def message(pods: Pods, *words: str | None, **more: float) -> tuple[int, str]:
    """The exit code and the last line of a pod that cannot work."""
    pod = pods.driver(*[word for word in words if word is not None], **more)
    return pod.process.wait(60), pod.err.strip().splitlines()[-1]


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("versions", "text"),
    [
        pytest.param({"ray_version": "2.44.1"}, "runs Ray 2.44.1 on Python 3", id="ray"),
        pytest.param({"python_version": "3.99.1"}, "on Python 3.99.1, but this job has Ray", id="python"),
    ],
)
def test_cluster_of_other_versions_is_refused_with_its_own_code(
    ray: ForeignHead, versions: dict[str, str], text: str
):
    with Pods() as pods, described_as(ray, **versions):
        code, said = message(pods, ray.address, str(ray.token_path))
    assert code == EXIT_RAY_REFUSED
    assert text in said
    assert "in the feeders' image" in said


def test_missing_or_wrong_token_names_the_field(ray: ForeignHead, tmp_path: Path):
    (tmp_path / "wrong").write_text("0" * 64)
    with Pods() as pods:
        for token in (None, str(tmp_path / "wrong")):
            code, said = message(pods, ray.address, token)
            assert code == 1
            assert "name the Secret with the cluster's token in spec.ray.external.tokenSecretRef" in said


def test_address_without_a_cluster_is_named():
    with Pods() as pods:
        address = f"127.0.0.1:{reserve_port()}"
        code, said = message(pods, address, wait_timeout_s=1.0)
    assert code == 1
    assert f"must be at {address}, but nothing accepted a connection there within 1 s" in said
