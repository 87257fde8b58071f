"""`dataloaderjob run`: real Ray or feeder host, sidecar, feeders, trainers, and nothing left of them afterwards."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from local_runs import LocalRun, Project, broken_host, broken_ray, digest, started_as
from ports import reserve_port
from rig import until

from dataloaderjob.local import cli, status
from dataloaderjob.local.status import LiveRun, live_runs

PROVIDERS = pytest.mark.parametrize("provider", ["ray", "local"])


@PROVIDERS
@pytest.mark.quick("ray")
def test_two_replicas_train_on_the_batches_of_in_process_loading(tmp_path: Path, provider: str):
    project = Project(tmp_path, 400, 0.0, "ddp", replicas=2, feeders=2)
    with LocalRun(project.path, "--provider", provider) as run:
        run.until("starting Ray, the sidecar" if provider == "ray" else "starting the sidecar")
        run.find()
        assert run.end() == 0, run.text
    for rank in range(2):
        own = [line for line in run.lines if line.startswith(f"[trainer-{rank}] ")]
        assert digest(own) == project.reference(rank, 2), run.text
    assert "ignored on one machine: spec.trainers.job.template.spec.containers[0].image" in run.lines[0]
    assert re.search(r"^\[feeder-\d\] making \d00$", run.text, re.MULTILINE), "output of user code in feeders"
    assert re.search(r"small: ended; 40 batches, 0.000 GB, .* s, stall", run.lines[-1])
    assert run.left() == []


@contextlib.contextmanager
def a_script_beside(folder: Path) -> Iterator[str]:
    """The folder of the service that a script without a manifest has, which runs meanwhile."""
    base = folder / "scripts"
    base.mkdir(mode=0o700)
    env = {k: v for k, v in os.environ.items() if not k.startswith("DATALOADERJOB_")}
    process = subprocess.Popen(
        [sys.executable, "train.py", "100000", "0.001"], cwd=folder,
        env={**env, "DATALOADERJOB_DIR": str(base), "DATALOADERJOB_FEEDERS": "1"},
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        yield until(
            lambda: next((str(r.home) for r in live_runs() if r.about.get("script") == "train.py"), None),
            60,
            "its service",
        )
    finally:
        process.kill()
        process.wait()


def test_status_and_scale_commands_control_a_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    project = Project(tmp_path, 100_000, 0.001)
    del project.manifest["spec"]["trainers"]["job"]["template"]["spec"]["containers"][0]["image"]
    project.write()
    port = reserve_port()
    with socket.create_server(("127.0.0.1", port)):
        assert cli.main(["run", str(project.path), "--metrics-port", str(port)]) == 2, "it is taken"
    assert f"cannot serve --metrics-port {port} on 127.0.0.1" in capsys.readouterr().err
    with LocalRun(project.path, "--provider", "local", "--metrics-port", str(port)) as run:
        run.until("ready after")
        run.until("batch 20")
        assert (
            b"dataloaderjob_sidecar_batches_total"
            in urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics").read()
        )
        run.find()
        home = str(run.home)
        assert cli.main(["status", "--dir", home]) == 0
        told = capsys.readouterr().out
        assert "feeder-0 ready" in told
        assert re.search(rf"^small: {home}, .* batches, .* GB, now [0-9.]+ batches/s, .* stall ", told)
        assert re.search(r"rank 0 .* ready, now [0-9.]+ batches/s, ", told)
        with a_script_beside(tmp_path) as script:
            assert cli.main(["status"]) == 0
            assert f"train.py: {script}" in capsys.readouterr().out
            mine = [found for found in live_runs() if str(found.home) in (home, script)]
            monkeypatch.setattr(status, "live_runs", lambda _: mine)  # other tests have runs meanwhile
            assert cli.main(["scale", "2"]) == 0, "of the run with a manifest"
            monkeypatch.undo()
            assert "small: 2 feeders from now on" in capsys.readouterr().out
        run.until("feeders 2/2")
        for wrong, found in (
            ("-1", "small requires at least 1 replicas of feeders, got -1"),
            ("100000", "small may have at most 4096 replicas, got 100000"),
        ):
            assert cli.main(["scale", wrong, "--dir", home]) == 2
            assert found in capsys.readouterr().err
        assert cli.main(["status", "--dir", str(tmp_path)]) == 2
        run.process.send_signal(signal.SIGTERM)
        assert run.end() == 143, run.text
    assert run.left() == []


@pytest.mark.thorough
def test_failing_trainer_ends_the_others_and_sets_the_exit_code(tmp_path: Path):
    project = Project(tmp_path, 100_000, 0.001, "crash", replicas=2)
    with LocalRun(project.path, "--provider", "local") as run:
        run.until("starting the sidecar")
        run.find()
        run.until("trainer-1 ended with exit code 3")
        started = time.monotonic()
        assert run.end() == 3, run.text
        assert time.monotonic() - started < 5 + 10 + 5
    assert "trainer-0 ended with exit code 143" in run.text
    assert "small: trainer-1 failed with exit code 3" in run.lines[-1]
    assert run.left() == []


@pytest.mark.parametrize(
    ("provider", "number", "code"), [("ray", signal.SIGINT, 130), ("local", signal.SIGTERM, 143)]
)
def test_ctrl_c_and_sigterm_end_everything_in_order(tmp_path: Path, provider: str, number: int, code: int):
    project = Project(tmp_path, 100_000, 0.001)
    with LocalRun(project.path, "--provider", provider) as run:
        run.until("starting")
        run.find()
        run.until("batch 20")
        run.process.send_signal(number)
        assert run.end(20) == code, run.text
    assert ("KeyboardInterrupt" in run.text) == (number == signal.SIGINT)
    assert "small: was stopped; " in run.lines[-1]
    assert run.left() == []


def test_run_stopped_while_it_starts_leaves_nothing_behind(tmp_path: Path):
    with LocalRun(Project(tmp_path, 100, 0.0).path) as run:
        run.until("starting Ray")
        run.find()
        until(lambda: list(run.home.glob("r1/session_*/logs/raylet.out")), 30, "the raylet starts")
        run.process.send_signal(signal.SIGTERM)
        assert run.end(20) == 143, run.text
    assert run.left() == []


@PROVIDERS
@pytest.mark.quick("local")
def test_killed_run_leaves_nothing_behind(tmp_path: Path, provider: str):
    with LocalRun(Project(tmp_path, 100_000, 0.001).path, "--provider", provider) as run:
        run.until("starting")
        run.find()
        run.until("batch 0")
        run.process.kill()
        until(lambda: not run.left(), 20, "its guard ends everything")


@pytest.mark.slow
def test_killed_sidecar_supervisor_and_gcs_change_no_batch_in_a_run(tmp_path: Path):
    project = Project(tmp_path, 16_000, 0.002, feeders=2)
    with LocalRun(project.path) as run:
        run.until("ready after")
        run.find()
        run.until("batch 20")
        os.kill(run.pid_of("-m dataloaderjob.sidecar"), signal.SIGKILL)
        run.until("the sidecar ended with code -9")
        run.until("batch")
        os.kill(run.pid_of("dataloaderjob.supervisor.main"), signal.SIGKILL)
        run.until("the supervisor ended with code -9")
        run.until("batch")
        run.until("feeders 2/2")
        os.kill(run.pid_of(name="gcs_server"), signal.SIGKILL)
        run.until("Ray head 1 was lost (gcs_server ended): starting another")
        until(lambda: not (run.home / "r1").exists(), 60, "the new head's feeders take over")
        assert run.end() == 0, run.text
    assert digest(run.lines) == project.reference(), run.text
    (worst,) = re.findall(r"worst ([0-9.]+)", run.text)
    assert float(worst) < 3.0, run.text
    assert "3 restarts" in run.lines[-1]
    assert run.left() == []


def feeders(run: LocalRun) -> list[dict[str, Any]] | None:
    """Once both are ready."""
    try:
        status = LiveRun(run.home, run.about).ask({"type": "status"})
    except OSError:
        return None
    return status["feeders"] if status["ready"] == 2 else None


def others(run: LocalRun, *gone: dict[str, Any]) -> list[dict[str, Any]] | None:
    """Both feeders, once they are ready and none of those is among them."""
    found = feeders(run)
    return None if found is None or {f["instance"] for f in found} & {f["instance"] for f in gone} else found


@pytest.mark.slow
def test_killed_host_supervisor_and_feeder_change_no_batch_without_ray(tmp_path: Path):
    project = Project(tmp_path, 16_000, 0.002, feeders=2)
    with LocalRun(project.path, "--provider", "local") as run:
        run.until("ready after")
        run.find()
        run.until("batch 20")
        os.kill(run.pid_of("dataloaderjob.supervisor.main"), signal.SIGKILL)
        run.until("the supervisor ended with code -9")
        first, second = until(lambda: feeders(run), 20, "the next supervisor adopts both")
        os.kill(first["pid"], signal.SIGKILL)
        again, same = until(lambda: others(run, first), 20, "another feeder in its place")
        assert same["instance"] == second["instance"]
        os.kill(started_as(run.about["run"], "dataloaderjob.feeder.host"), signal.SIGKILL)
        run.until("the feeder host ended with code -9")
        until(lambda: others(run, again, second), 30, "both come back")
        assert run.end() == 0, run.text
    assert digest(run.lines) == project.reference(), run.text
    assert "2 restarts of parts of the service" in run.lines[-1]
    assert run.left() == []


def test_run_with_the_local_provider_works_without_ray(tmp_path: Path):
    env = {"PYTHONPATH": broken_ray(tmp_path)}
    project = Project(tmp_path, 100, 0.0)
    with LocalRun(project.path, "--provider", "local", env=env) as run:
        assert run.end(60) == 0, run.text
    assert digest(run.lines) == project.reference()
    with LocalRun(
        project.path, "--provider", "local", env={"PYTHONPATH": broken_host(tmp_path / "b")}
    ) as run:
        assert run.end(60) == 1
    assert (
        "the service cannot continue: the feeder host ended 3 times within 120 s: this machine is broken"
        in run.text
    )


@pytest.mark.slow
def test_killed_raylet_changes_no_batch_of_a_run(tmp_path: Path):
    project = Project(tmp_path, 2_000, 0.002)
    with LocalRun(project.path) as run:
        run.until("starting Ray")
        run.find()
        run.until("batch 20")
        os.kill(run.pid_of(name="raylet"), signal.SIGKILL)
        run.until("Ray head 1 was lost (raylet ended): starting another")
        assert run.end() == 0, run.text
    assert digest(run.lines) == project.reference(), run.text
    assert run.left() == []


def test_broken_ray_ends_the_run_with_its_error(tmp_path: Path):
    env = [{"name": "PYTHONPATH", "value": broken_ray(tmp_path)}]
    feeders = {"template": {"spec": {"containers": [{"name": "feeder", "env": env}]}}}
    project = Project(tmp_path, 100, 0.0)
    project.write(feeders=feeders)
    with LocalRun(project.path) as run:
        assert run.end(40) == 1
    assert "the service cannot continue: the Ray head ended 3 times" in run.text
    assert "RuntimeError: this Ray is broken" in run.text


def run_briefly(manifest: Path) -> subprocess.CompletedProcess[str]:
    """A run that is over before it starts anything: its folder for temporary files stays empty."""
    command = [sys.executable, "-m", "dataloaderjob.local.cli", "run", str(manifest)]
    with tempfile.TemporaryDirectory(prefix="dlj") as folder:
        env = {**os.environ, "TMPDIR": folder}
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=env)
        assert os.listdir(folder) == []
    return done


def test_invalid_manifest_is_refused_before_anything_starts(tmp_path: Path):
    wrong = Project(tmp_path, 1, 0.0, feeders=-1).path
    done = run_briefly(wrong)
    assert done.returncode == 2
    assert f"{wrong}:" in done.stderr
    assert "spec.feeders.replicas: found -1" in done.stderr
    too_large = run_briefly(Project(tmp_path, 1, 0.0, loader={"memoryPerProcess": "8Ti"}).path)
    assert too_large.returncode == 2
    assert "lower spec.loader.memoryPerProcess" in too_large.stderr
    missing = run_briefly(tmp_path / "none.yaml")
    assert missing.returncode == 2
    assert "no such file" in missing.stderr
    nul = run_briefly(Project(tmp_path, 1, 0.0, "a\0b").path)
    assert nul.returncode == 2
    assert (
        "argument 4 of trainer-0 contains the character NUL, which cannot be passed to a process"
        in nul.stderr
    )


def test_suspended_job_starts_no_process(tmp_path: Path):
    done = run_briefly(Project(tmp_path, 1, 0.0, suspend=True).path)
    assert done.returncode == 0
    assert "small is suspended (spec.suspend: true): nothing is started" in done.stderr


def test_deadlines_end_a_run_and_report_the_missing_part(tmp_path: Path):
    project = Project(
        tmp_path,
        100,
        0.0,
        ray={"managed": {"tuning": {"workerRegisterTimeoutSeconds": 1}}},
        startupDeadlineSeconds=1,
    )
    with LocalRun(project.path) as run:
        run.until("starting Ray")
        run.find()
        assert run.end(30) == 124, run.text
    assert "did not start within spec.startupDeadlineSeconds (1 s)" in run.text
    assert "Ray's head and the supervisor are not up" in run.text
    assert run.left() == []
    Project(tmp_path, 100_000, 0.01, activeDeadlineSeconds=3)
    with LocalRun(project.path) as run:
        run.until("starting Ray")
        run.find()
        assert run.end(40) == 124, run.text
    assert "ran longer than spec.activeDeadlineSeconds (3 s); still running: trainer-0" in run.text
    assert run.left() == []
