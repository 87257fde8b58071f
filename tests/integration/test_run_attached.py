"""`dataloaderjob run` of a manifest with spec.trainers.attach, and trainers started by hand in other shells."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from local_runs import LocalRun, Project, digest, sidecars
from rig import until

from dataloaderjob.core.processes import MAX_CRASHES
from dataloaderjob.local.attaching import VARIABLES
from dataloaderjob.local.cli import EXIT_INPUT
from dataloaderjob.local.status import LiveRun

COMMAND = f"{sys.executable} -m dataloaderjob.local.cli"
CLEAN = {name: value for name, value in os.environ.items() if not name.startswith("DATALOADERJOB_")}


class Attached(Project):
    """A project whose trainers are started by hand."""

    def __init__(self, folder: Path, name: str, *args: Any, **attach: Any) -> None:
        super().__init__(folder, *args, feeders=2)
        self.manifest["metadata"]["name"] = self.name = name
        self.write(trainers={"attach": attach})

    def shell(self, words: str, env: dict[str, str] | None = None) -> subprocess.Popen[str]:
        """A shell that attaches itself, and then runs this."""
        line = f'cd {self.folder} && eval "$({COMMAND} env {self.name})" && exec {words}'
        return subprocess.Popen(
            ["/bin/sh", "-c", line], env={**CLEAN, **(env or {})}, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip

    def train(self, *mode: str, env: dict[str, str] | None = None) -> subprocess.Popen[str]:
        return self.shell(" ".join([sys.executable, "train.py", *self.args[:2], *mode]), env)


@pytest.fixture(params=["local", pytest.param("ray", marks=pytest.mark.slow)])
def provider(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@contextmanager
def run_of(project: Attached, provider: str = "local", *options: str) -> Iterator[LocalRun]:
    """The run, once trainers can attach; nothing is left of it afterwards."""
    with LocalRun(project.path, "--provider", provider, *options) as run:
        run.until("waiting for trainers")
        run.find()
        yield run
        run.process.send_signal(signal.SIGINT)
        assert run.end() == 128 + signal.SIGINT, run.text
    assert "received SIGINT: ending the service" in run.text
    assert run.left() == []


def output(process: subprocess.Popen[str]) -> list[str]:
    text, _ = process.communicate(timeout=120)
    assert process.returncode == 0, text
    return text.splitlines()


def command(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND.split(), *words], env=CLEAN, capture_output=True, text=True, timeout=60, check=False
    )


def ranks(run: LocalRun) -> list[str]:
    return [receiver["rank"] for receiver in LiveRun(run.home, run.about).snapshot().receivers]


@pytest.mark.thorough
def test_notebook_and_torchrun_share_the_feeders_of_one_job(tmp_path: Path, provider: str):
    project = Attached(tmp_path, "shared", 400, 0.001, processesPerPod=3)
    torchrun = (
        f"{sys.executable} -m torch.distributed.run --standalone --nproc-per-node 2 train.py 400 0.001 ddp"
    )
    with run_of(project, provider) as run:
        alone, several = project.train(), project.shell(torchrun)
        run.until("is attached")
        ours, theirs = output(alone), output(several)
        run.until("has left")
    assert digest(ours) == project.reference()
    found = {line.split()[1] for line in theirs if line.startswith("digest")}
    assert found == {project.reference(rank, 2) for rank in range(2)}
    assert any(line.startswith("dataloaderjob: rank pid-") for line in run.lines), run.text


def test_digest_of_an_attached_script_is_that_of_the_jobs_own(tmp_path: Path):
    own = Project(tmp_path, 300, 0.0)
    with LocalRun(own.path, "--provider", "local") as run:
        assert run.end() == 0, run.text
    project = Attached(tmp_path, "same", 300, 0.0)
    with run_of(project):
        assert digest(output(project.train())) == digest(run.lines) == own.reference()


@pytest.mark.thorough
def test_launches_with_equal_ranks_are_served_side_by_side(tmp_path: Path):
    project = Attached(tmp_path, "twice", 600, 0.002, processesPerPod=2)
    with run_of(project) as run:
        trainers = [project.train(env={"RANK": "0", "WORLD_SIZE": "1"}) for _ in range(2)]
        names = until(lambda: (found := sorted(ranks(run)))[1:] and found)
        assert names[0] == "0"
        assert names[1].startswith("0-")
        assert {digest(output(trainer)) for trainer in trainers} == {project.reference()}


@pytest.mark.thorough
def test_one_process_too_many_is_refused_until_another_ends(tmp_path: Path):
    project = Attached(tmp_path, "full", 100_000, 0.001)
    with run_of(project) as run:
        first = project.train()
        run.until("is attached")
        refused, _ = project.train().communicate(timeout=60)
        assert (
            "this job serves one trainer process at a time, and one is already attached: rank pid-" in refused
        )
        assert "end one of them, or raise spec.trainers.attach.processesPerPod" in refused
        first.kill()
        run.until("has left")
        first.communicate()
        project.args[0] = "100"
        assert digest(output(project.train())) == project.reference()


@pytest.mark.slow
@pytest.mark.parametrize("attached", [True, False], ids=["attached-before", "attaching"])
def test_trainer_of_a_service_that_gives_up_is_told_the_cause(tmp_path: Path, attached: bool):
    project, trainer = Attached(tmp_path, "broken", 100_000, 0.001), None
    with LocalRun(project.path, "--provider", "local") as run:
        run.until("waiting for trainers")
        run.find()
        if attached:
            trainer = project.train()
            run.until("is attached")
        known: set[int] = set()
        for crash in range(MAX_CRASHES + 1):
            if crash == MAX_CRASHES - 1 and trainer is None:
                trainer = project.train()  # while the sidecar is away for seconds
            (pid,) = until(lambda: sidecars(run.process.pid) - known, 30, "a sidecar")
            known.add(pid)
            os.kill(pid, signal.SIGKILL)
        assert trainer is not None
        text, _ = trainer.communicate(timeout=60)
        assert run.end() == 1, run.text
    assert f"failed: the service cannot continue: the sidecar ended {MAX_CRASHES + 1} times" in text
    assert run.left() == []


@pytest.mark.thorough
def test_feeders_stop_without_trainers_and_return_for_the_next(tmp_path: Path, provider: str):
    project = Attached(tmp_path, "idle", 200, 0.0, idleSeconds=2)
    with run_of(project, provider) as run:
        run.until("no trainer is attached: stopping all feeders")
        live = LiveRun(run.home, run.about)
        until(lambda: live.snapshot().desired == 0 and not live.snapshot().supervisor["feeders"])
        started = time.monotonic()
        trainer = project.train()
        run.until("a trainer is attached: starting 2 feeders")
        assert digest(output(trainer)) == project.reference()
        assert time.monotonic() - started < 60
        assert run.text.count("has left") <= 1
        run.until("no trainer is attached: stopping all feeders")


@pytest.mark.thorough
def test_status_shows_attached_ranks_and_how_to_attach(tmp_path: Path):
    project = Attached(tmp_path, "seen", 100_000, 0.001, processesPerPod=4)
    with run_of(project) as run:
        assert '0 of 4 trainer processes attached; to attach a shell: eval "$(dataloaderjob env seen)"' in (
            command("status", "--dir", str(run.home)).stdout
        )
        trainer = project.train(env={"RANK": "5", "WORLD_SIZE": "8"})
        run.until("rank 5 (process")
        shown = command("status", "--dir", str(run.home)).stdout
        assert "1 of 4 trainer processes attached" in shown
        assert f"rank 5 (pid {trainer.pid})" in shown
        trainer.kill()
        trainer.communicate()


@pytest.mark.thorough
def test_trainer_whose_service_ends_reports_the_cause_at_once(tmp_path: Path):
    project = Attached(tmp_path, "gone", 100_000, 0.001)
    with run_of(project) as run:
        trainer = project.train()
        run.until("is attached")
    ended = time.monotonic()
    text, _ = trainer.communicate(timeout=60)
    assert trainer.returncode == 1
    assert "ServiceUnavailable" in text
    assert "failed: received SIGINT: ending the service" in text
    assert time.monotonic() - ended < 20


@pytest.mark.thorough
def test_recorded_run_records_attached_trainers(tmp_path: Path):
    project = Attached(tmp_path, "kept", 100, 0.0)
    with run_of(project, "local", "--record", str(tmp_path / "record")):
        output(project.train())
    checked = command("verify", str(tmp_path / "record"))
    assert checked.returncode == 0, checked.stderr


def test_variables_are_printed_for_sh_and_notebooks_and_unset(tmp_path: Path):
    project = Attached(tmp_path, "vars", 100, 0.0)
    project.write(loader={"memoryPerProcess": "64Mi", "prefetch": 7})
    with run_of(project) as run:
        found = json.loads(command("env", "vars", "--json").stdout)
        assert found == {
            "DATALOADERJOB_SOCKET": run.about["socket"], "DATALOADERJOB_FEEDERS": "2", "DATALOADERJOB_PREFETCH": "7",
        }  # fmt: skip
        assert command("env", "vars").stdout == command("env", "--dir", str(run.home)).stdout
        attach, detach = (f'eval "$({COMMAND} env {word})"; env;' for word in ("vars", "--unset"))
        line = f"export DATALOADERJOB_RECORD=old; {attach} {detach}"
        shown = subprocess.run(["/bin/sh", "-c", line], env=CLEAN, capture_output=True, text=True, check=True)
        kept = [line for line in shown.stdout.splitlines() if line.partition("=")[0] in VARIABLES]
        assert sorted(kept) == sorted(f"{name}={value}" for name, value in found.items())


@pytest.mark.parametrize("words", [["none"], ["--dir", "/none"], ["$(touch x)"]])
def test_env_of_no_run_fails_and_changes_nothing(words: list[str]):
    done = command("env", *words)
    assert (done.returncode, done.stdout) == (EXIT_INPUT, "")
    assert "running on this machine" in done.stderr


def test_run_with_trainers_of_its_own_cannot_be_attached_to(tmp_path: Path):
    project = Project(tmp_path, 100_000, 0.001)
    with LocalRun(project.path, "--provider", "local") as run:
        run.until("ready after")
        done = command("env", "small")
        assert (done.returncode, done.stdout) == (EXIT_INPUT, "")
        assert (
            "small starts its own trainers, so others cannot attach: set spec.trainers.attach" in done.stderr
        )


def test_fields_for_clusters_are_reported_as_ignored(tmp_path: Path):
    follow = {"apiVersion": "batch/v1", "kind": "Job", "name": "bert"}
    project = Attached(tmp_path, "fields", 100, 0.0, follow=follow, container="main")
    with run_of(project) as run:
        pass
    assert (
        "ignored on one machine: spec.trainers.attach.container, spec.trainers.attach.follow" in run.lines[0]
    )
