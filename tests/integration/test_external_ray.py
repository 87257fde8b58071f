"""`dataloaderjob run` with feeders on a Ray cluster that the run did not start."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from feeder_client import wait_until
from foreign_ray import CPUS, ForeignHead, described_as, feeders_of, foreign_head, on
from local_runs import LocalRun, Project, digest
from ports import reserve_port

from dataloaderjob.local.cli import EXIT_INPUT
from dataloaderjob.local.plan import EXIT_LATE
from dataloaderjob.local.status import LiveRun
from dataloaderjob.providers.provider import LEASE_S


@pytest.fixture(scope="module")
def ray() -> Iterator[ForeignHead]:
    with foreign_head() as made:
        yield made


def test_external_feeders_give_the_digest_and_leave_nothing(ray: ForeignHead, tmp_path: Path):
    project = on(ray, tmp_path, 400, 0.0, feeders=2)
    with LocalRun(project.path, env=ray.auth()) as run:
        run.until("starting the sidecar")
        run.find()
        run.until("batch 20")
        assert len(ray.sessions()) == 1, "blobs are in the session's folder"
        assert feeders_of(ray)
        assert run.end() == 0, run.text
    assert digest(run.lines) == project.reference(), run.text
    assert "[feeder-" in run.text, "output of user code in feeders"
    assert "spec.feeders.resources" not in run.lines[0]
    assert run.left() == []
    wait_until(lambda: not feeders_of(ray), 10, "the run has ended its feeders")
    wait_until(lambda: not ray.sessions(), 10, "and its blobs")


@pytest.mark.thorough
def test_feeders_end_when_supervisor_and_run_are_killed(ray: ForeignHead, tmp_path: Path):
    project = on(ray, tmp_path, 100_000, 0.001, feeders=2)
    with LocalRun(project.path, env=ray.auth()) as run:
        run.until("batch 20")
        run.find()
        assert feeders_of(ray)
        killed = time.monotonic()
        run.process.kill()
        wait_until(lambda: run.left() == [], 15, "the reaper has ended the supervisor")
        wait_until(lambda: not feeders_of(ray), 30 - (time.monotonic() - killed), "the lease is over")
        wait_until(lambda: not ray.sessions(), 10)


def status_of(run: LocalRun) -> dict[str, Any]:
    return LiveRun(run.home, run.about).ask({"type": "status"})


@pytest.mark.slow
def test_restarted_supervisor_adopts_external_feeders_in_time(ray: ForeignHead, tmp_path: Path):
    project = on(ray, tmp_path, 100_000, 0.001, feeders=2)
    with LocalRun(project.path, env=ray.auth()) as run:
        run.until("ready after")
        run.find()
        wait_until(lambda: status_of(run)["ready"] == 2, 60)
        before = {feeder["instance"] for feeder in status_of(run)["feeders"]}
        os.kill(run.pid_of("supervisor.main"), signal.SIGKILL)
        run.until("the supervisor ended with code -9: restarting it")
        time.sleep(LEASE_S + 5)  # none of them ends later
        status = status_of(run)
        assert status["ready"] == 2
        assert {feeder["instance"] for feeder in status["feeders"]} == before


@pytest.mark.slow
def test_two_runs_of_one_name_share_a_cluster_without_mixing(ray: ForeignHead, tmp_path: Path):
    projects = [on(ray, tmp_path / name, length, 0.0) for name, length in (("a", 300), ("b", 500))]
    runs = [LocalRun(project.path, env=ray.auth()) for project in projects]
    for run, project in zip(runs, projects, strict=True):
        with run:
            assert run.end() == 0, run.text
            assert digest(run.lines) == project.reference(), run.text
    assert "making 400" not in runs[0].text, "the other run's output"


@pytest.mark.slow
def test_killed_actor_is_replaced_by_ray_itself(ray: ForeignHead, tmp_path: Path):
    project = on(ray, tmp_path, 4000, 0.001)
    with LocalRun(project.path, env=ray.auth()) as run:
        run.until("batch 20")
        psutil.Process(feeders_of(ray)[0]).kill()
        assert run.end() == 0, run.text
    assert digest(run.lines) == project.reference(), run.text


def refused(project: Project, env: dict[str, str]) -> str:
    """What a run says that starts nothing."""
    with LocalRun(project.path, env=env) as run:
        assert run.end() == EXIT_INPUT, run.text
    assert "starting" not in run.text
    return run.lines[-1]


@pytest.mark.parametrize(
    ("versions", "text"),
    [
        pytest.param({"ray_version": "2.44.1"}, "runs Ray 2.44.1 on Python 3", id="ray"),
        pytest.param({"python_version": "3.99.1"}, "on Python 3.99.1, but this job has Ray", id="python"),
    ],
)
def test_cluster_of_other_versions_is_refused_by_name(
    ray: ForeignHead, tmp_path: Path, versions: dict[str, str], text: str
):
    with described_as(ray, **versions):
        said = refused(on(ray, tmp_path, 100, 0.0), ray.auth())
    assert text in said
    assert "both need the same Ray version and the same minor version of Python" in said


@pytest.mark.thorough
def test_other_patch_version_of_python_is_accepted(ray: ForeignHead, tmp_path: Path):
    project = on(ray, tmp_path, 100, 0.0)
    python = f"{sys.version_info.major}.{sys.version_info.minor}.99"
    with described_as(ray, python_version=python), LocalRun(project.path, env=ray.auth()) as run:
        assert run.end() == 0, run.text


def test_wrong_token_or_address_is_refused_before_anything_starts(ray: ForeignHead, tmp_path: Path):
    project = on(ray, tmp_path, 100, 0.0)
    wrong = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "0" * 64, "RAY_AUTH_TOKEN_PATH": "/none"}
    assert "refused this process's token" in refused(project, wrong)
    nobody = f"127.0.0.1:{reserve_port()}"
    project.write(ray={"external": {"address": nobody}})
    assert f"cannot reach the Ray cluster of spec.ray.external.address at {nobody}" in refused(
        project, ray.auth()
    )


@pytest.mark.thorough
def test_workers_without_dataloaderjob_are_reported_as_such(tmp_path: Path):
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\n"
        "class Without:\n"
        "    def find_spec(name, path=None, target=None):\n"
        "        if name == 'dataloaderjob':\n"
        "            raise ModuleNotFoundError(\"No module named 'dataloaderjob'\", name=name)\n"
        "sys.meta_path.insert(0, Without)\n"
    )
    with foreign_head({"PYTHONPATH": str(tmp_path)}) as ray:
        project = on(ray, tmp_path / "project", 100, 0.0, startupDeadlineSeconds=12)
        with LocalRun(project.path, env=ray.auth()) as run:
            assert run.end() == EXIT_LATE, run.text
    assert "Ray's workers cannot import dataloaderjob" in run.text
    assert "install dataloaderjob[feeder]" in run.text


@pytest.mark.slow
def test_feeder_that_fits_on_no_node_is_reported(ray: ForeignHead, tmp_path: Path):
    resources = {"requests": {"cpu": CPUS + 1, "memory": "1Gi"}, "limits": {}}
    feeders = {"replicas": 1, "resources": resources}
    project = on(ray, tmp_path, 100, 0.0, startupDeadlineSeconds=25)
    project.write(feeders=feeders)
    with LocalRun(project.path, env=ray.auth()) as run:
        assert run.end() == EXIT_LATE, run.text
    assert f"no node has room (CPU: {CPUS + 1} needed, {CPUS} of {CPUS} free)" in run.text
