"""`dataloaderjob run` stopped at any moment, with few descriptors and on a full disk: it leaves nothing behind."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from local_runs import LocalRun, Project, digest
from rig import until
from strangers import call, visit

from dataloaderjob.local.status import LiveRun

RUN = [sys.executable, "-m", "dataloaderjob.local.cli", "run"]


@pytest.fixture
def folder() -> Iterator[Path]:
    """The run's folder for temporary files, short enough for sockets."""
    with tempfile.TemporaryDirectory(prefix="dlj") as made:
        yield Path(made)


def processes(folder: Path) -> list[int]:
    """Those that were started with this folder for temporary files."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if f"TMPDIR={folder}".encode() in path.read_bytes().split(b"\0"):
                found.append(int(path.parent.name))
        except OSError:
            continue
    return found


def there(name: str) -> Callable[[Path, str], bool]:
    return lambda folder, _: any(folder.glob(f"dlj-run-*{name}"))


def said(text: str) -> Callable[[Path, str], bool]:
    return lambda _, output: text in output


MOMENTS = {
    "its-folder-is-made": there(""),
    "its-key-is-written": there("/key"),
    "it-tells-of-itself": there("/run.json"),
    "the-host-listens": there("/f"),
    "the-sidecar-listens": there("/s"),
    "all-is-ready": said("ready after"),
}
SIGNALS = [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGHUP, 129)]


@pytest.mark.thorough
@pytest.mark.parametrize("at", range(len(MOMENTS)), ids=list(MOMENTS))
def test_signal_at_any_moment_ends_a_run_and_everything_it_made(
    tmp_path: Path, folder: Path, at: int
) -> None:
    reached = list(MOMENTS.values())[at]
    number, code = SIGNALS[at % len(SIGNALS)]
    project, log = Project(tmp_path, 100_000, 0.001), tmp_path / "log"
    with log.open("wb") as out:
        run = subprocess.Popen(
            [*RUN, str(project.path), "--provider", "local"], stdout=out, stderr=out,
            env={**os.environ, "TMPDIR": str(folder), "PYTHONUNBUFFERED": "1"},
        )  # fmt: skip
    try:
        deadline = time.monotonic() + 60
        while not reached(folder, log.read_text()):  # some moments are of a millisecond
            assert time.monotonic() < deadline
            time.sleep(0.0005)
        run.send_signal(number)
        assert run.wait(20) == code, log.read_text()
    finally:
        run.kill()
        run.wait()
    assert os.listdir(folder) == []
    assert processes(folder) == []


def test_signal_before_anything_is_made_ends_a_run_like_any_program(tmp_path: Path, folder: Path) -> None:
    project = Project(tmp_path, 100, 0.0)
    run = subprocess.Popen([*RUN, str(project.path)], env={**os.environ, "TMPDIR": str(folder)})
    run.terminate()
    assert run.wait(20) == -signal.SIGTERM
    assert os.listdir(folder) == []


@pytest.mark.slow
def test_run_short_of_descriptors_survives_a_flood_of_connections(tmp_path: Path) -> None:
    project = Project(tmp_path, 6000, 0.001, feeders=2)  # it lasts for longer than 600 connections take
    with LocalRun(project.path, "--provider", "local", max_files=64) as run, contextlib.ExitStack() as stack:
        run.until("ready after")
        run.find()
        live = LiveRun(run.home, run.about)
        until(lambda: live.ask({"type": "status"})["ready"] == 2, 30, "the second feeder")
        feeders = live.ask({"type": "status"})["feeders"]
        for port in (run.about["port"], *(feeder["port"] for feeder in feeders)):
            for _ in range(200):
                stack.enter_context(call(port))
        for _ in range(200):
            stack.enter_context(visit(run.about["socket"]))
        assert run.end() == 0, run.text
    assert digest(run.lines) == project.reference()
    assert "restart" not in run.lines[-1]
    assert run.left() == []


@pytest.fixture
def small_disk(folder: Path) -> Iterator[Path]:
    mount = ["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", str(folder)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("only root can mount a disk of its own: run these tests as root")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.thorough
def test_run_on_a_full_disk_survives_the_death_of_its_sidecar(
    tmp_path: Path, small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(small_disk))
    project = Project(tmp_path, 1500, 0.001)
    with LocalRun(project.path, "--provider", "local", env={"TMPDIR": str(small_disk)}) as run:
        run.until("batch 20")
        run.find()
        with pytest.raises(OSError, match="No space left"), (small_disk / "filler").open("wb", 0) as out:
            while True:
                out.write(bytes(1 << 12))
        os.kill(run.pid_of("-m dataloaderjob.sidecar"), signal.SIGKILL)
        run.until("the sidecar ended with code -9: restarting it")
        assert run.end() == 0, run.text
    assert digest(run.lines) == project.reference()
    assert run.left() == []
    assert os.listdir(small_disk) == ["filler"]
