"""The private service of a launch: started by the first rank, shared, ended after the last one."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from local_runs import Project, broken_ray, digest
from rig import until

from dataloaderjob.local import tags


@pytest.fixture
def base() -> Iterator[Path]:
    """A short folder for services."""
    with tempfile.TemporaryDirectory(prefix="dlj", ignore_cleanup_errors=True) as folder:
        yield Path(folder)


class Rank:
    """A trainer process without an announced sidecar."""

    def __init__(self, project: Project, base: Path, **env: str) -> None:
        kept = {k: v for k, v in os.environ.items() if not k.startswith("DATALOADERJOB_")}
        self._out = tempfile.TemporaryFile("w+")  # noqa: SIM115  read after the end
        self.process = subprocess.Popen(
            [sys.executable, "train.py", *project.args],
            cwd=project.folder,
            env={
                **kept,
                "DATALOADERJOB_DIR": str(base),
                "DATALOADERJOB_FEEDERS": "1",
                "PYTHONUNBUFFERED": "1",
                **env,
            },
            stdout=self._out,
            stderr=subprocess.STDOUT,
        )

    @property
    def text(self) -> str:
        return os.pread(self._out.fileno(), 1 << 20, 0).decode()

    def end(self) -> int:
        try:
            return self.process.wait(120)
        finally:
            self.process.kill()
            self._out.flush()


def services(base: Path) -> dict[int, str]:
    """Pid to run id of the services in this folder."""
    found = {}
    for path in Path(tempfile.gettempdir()).glob("dlj-run-*/run.json"):
        with contextlib.suppress(OSError, ValueError):
            about = json.loads(path.read_text())
            if str(about.get("folder", "")).startswith(str(base)):
                found[about["pid"]] = about["run"]
    return found


def test_a_script_alone_gets_a_service_of_its_own_which_ends_after_it(tmp_path: Path, base: Path):
    project = Project(tmp_path, 300, 0.0)
    rank = Rank(project, base)
    until(lambda: services(base), 30, "a service starts")
    (run_id,) = services(base).values()
    assert rank.end() == 0, rank.text
    ended = time.monotonic()
    assert digest(rank.text.splitlines()) == project.reference(), rank.text
    until(lambda: not tags.tagged(run_id) and not os.listdir(base), 15, "the service ends")
    assert time.monotonic() - ended > 1, "another loader or rank could have come"
    assert services(base) == {}


def test_user_code_in_feeders_is_heard_and_nobody_waits_for_the_service_to_hang_up(
    tmp_path: Path, base: Path
):
    project = Project(tmp_path, 2_000, 0.001)
    env = {k: v for k, v in os.environ.items() if not k.startswith("DATALOADERJOB_")}
    done = subprocess.run(
        [sys.executable, "train.py", *project.args], cwd=project.folder, capture_output=True, text=True,
        timeout=120, check=True, env={**env, "DATALOADERJOB_DIR": str(base), "DATALOADERJOB_FEEDERS": "1"},
    )  # fmt: skip
    assert services(base), "it waits for another loader, and has let go of the pipe"
    assert re.search(r"^\[feeder-0\] making \d+00$", done.stderr, re.MULTILINE), done.stderr
    assert digest(done.stdout.splitlines()) == project.reference()
    until(lambda: not services(base) and not os.listdir(base), 15, "the service ends")


def test_ranks_of_one_launch_share_a_service_that_outlives_any_of_them(tmp_path: Path, base: Path):
    project = Project(tmp_path, 2_000, 0.001)
    launch = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    ranks = [Rank(project, base, RANK=str(rank), **launch) for rank in range(2)]
    until(lambda: all("batch 20" in rank.text for rank in ranks), 60, "both iterate")
    (run_id,) = services(base).values()
    ranks[0].process.send_signal(signal.SIGKILL)
    assert ranks[1].end() == 0, ranks[1].text
    assert digest(ranks[1].text.splitlines()) == project.reference(1, 2)
    until(lambda: not tags.tagged(run_id) and not os.listdir(base), 15, "the service ends")


def test_a_service_that_cannot_start_says_why(tmp_path: Path, base: Path):
    deep = base / ("x" * 90)
    rank = Rank(Project(tmp_path, 10, 0.0), deep)
    assert rank.end() == 1
    assert "the private service could not start: a Unix socket's path may have 107 bytes" in rank.text
    assert "choose a shorter folder (TMPDIR, or DATALOADERJOB_DIR)" in rank.text


def test_a_service_whose_ray_cannot_start_says_why_to_those_who_wait_for_a_batch(tmp_path: Path, base: Path):
    project = Project(tmp_path, 10, 0.0)
    rank = Rank(project, base, PYTHONPATH=str(broken_ray(tmp_path)))
    assert rank.end() == 1
    assert "RuntimeError: this Ray is broken" in rank.text
    assert "ServiceUnavailable: the " in rank.text


def test_a_service_that_is_killed_is_replaced_for_the_next_loader_and_leaves_nothing(
    tmp_path: Path, base: Path
):
    project = Project(tmp_path, 300, 0.0)
    launch = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    rank = Rank(project, base, **launch)
    until(lambda: services(base), 30, "a service starts")
    ((pid, run_id),) = services(base).items()
    os.kill(pid, signal.SIGKILL)
    rank.process.kill()
    rank.end()
    until(lambda: not tags.tagged(run_id), 15, "the guard ends what it started")
    again = Rank(project, base, **launch)
    assert again.end() == 0, again.text
    assert digest(again.text.splitlines()) == project.reference()
    until(lambda: not services(base) and not os.listdir(base), 15, "the service ends")
