"""The private service of a launch: started by the first rank, shared, ended after the last one."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from local_runs import Project, broken_host, called, digest, path_first, sidecars
from rig import until
from warm import WarmProcess

from dataloaderjob.core.processes import MAX_CRASHES
from dataloaderjob.local import reaper
from dataloaderjob.local.service import LINGER_S, LOOK_S
from dataloaderjob.local.status import sidecar_status


@pytest.fixture
def base() -> Iterator[Path]:
    """A short folder for services."""
    with tempfile.TemporaryDirectory(prefix="dlj", ignore_cleanup_errors=True) as folder:
        yield Path(folder)


class Rank:
    """A trainer process without an announced sidecar."""

    def __init__(self, project: Project, base: Path, *, cold: bool = False, **env: str) -> None:
        """`cold`: it imports torch itself, and runs what sitecustomize has."""
        kept = {k: v for k, v in os.environ.items() if not k.startswith("DATALOADERJOB_")}
        self._out = tempfile.TemporaryFile("w+")  # noqa: SIM115  read after the end
        arguments = ["train.py", *project.args]
        start = subprocess.Popen if cold else WarmProcess
        self.process = start(
            [sys.executable, *arguments] if cold else arguments,
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


def sleeps(pid: int) -> bool:
    """Whether the process is in time.sleep: the system call that it is in."""
    number = Path(f"/proc/{pid}/syscall").read_text().split()[0]
    return number in ("35", "230")  # nanosleep, clock_nanosleep of x86-64


def depends_on_its_service(rank: Rank, base: Path) -> bool:
    """Whether the rank waits for its service, or is attached to it: from then on it starts no other."""
    folders = list(base.iterdir())
    return sleeps(rank.process.pid) or any(
        sidecar_status(str(folder / "s")).get("receivers") for folder in folders
    )


def services(base: Path) -> dict[int, str]:
    """Pid to run id of the services in this folder."""
    found = {}
    for path in Path(tempfile.gettempdir()).glob("dlj-run-*/run.json"):
        with contextlib.suppress(OSError, ValueError):
            about = json.loads(path.read_text())
            if str(about.get("folder", "")).startswith(str(base)):
                found[about["pid"]] = about["run"]
    return found


def test_script_without_a_job_gets_a_private_service_that_ends_after_it(tmp_path: Path, base: Path):
    project = Project(tmp_path, 300, 0.0)
    rank = Rank(project, base)
    until(lambda: services(base), 30, "a service starts")
    (run_id,) = services(base).values()
    assert rank.end() == 0, rank.text
    ended = time.monotonic()
    assert digest(rank.text.splitlines()) == project.reference(), rank.text
    until(lambda: not reaper.tagged(run_id) and not os.listdir(base), 15, "the service ends")
    assert time.monotonic() - ended > 1, "another loader or rank could have come"
    assert services(base) == {}


PAUSES = """
import sys, time, torch
from dataloaderjob import DataLoader
def epoch(): return [batch.tolist() for batch in DataLoader(list(range(8)), 4, num_workers=1)]
if __name__ == "__main__":
    dropped = [DataLoader([1], num_workers=16) for _ in range(3)]
    del dropped
    first = epoch()
    time.sleep(float(sys.argv[1]))
    began = time.monotonic()
    assert epoch() == first
    print(time.monotonic() - began < 2)
"""


@pytest.mark.thorough
def test_later_loader_of_a_script_finds_the_feeders_still_running(tmp_path: Path, base: Path):
    script = tmp_path / "train.py"
    script.write_text(PAUSES)
    env = {k: v for k, v in os.environ.items() if not k.startswith("DATALOADERJOB_")}
    done = subprocess.run(
        [sys.executable, str(script), str(LINGER_S + 3)], capture_output=True, text=True, timeout=120, check=True,
        env={**env, "DATALOADERJOB_DIR": str(base)},
    )  # fmt: skip
    assert done.stdout == "True\n", done.stderr
    assert done.stderr.count("starting feeders (1)") == 1, "a loader that is not iterated counts for nothing"
    until(lambda: not os.listdir(base), 20, "the service ends with the script")


@pytest.mark.thorough
def test_feeder_output_is_shown_and_the_service_outlives_the_pipe(tmp_path: Path, base: Path):
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


@pytest.mark.slow
def test_ranks_of_one_launch_share_a_service_that_outlives_each_of_them(tmp_path: Path, base: Path):
    project = Project(tmp_path, 2_000, 0.001)
    launch = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    ranks = [Rank(project, base, RANK=str(rank), **launch) for rank in range(2)]
    until(lambda: all("batch 20" in rank.text for rank in ranks), 60, "both iterate")
    (run_id,) = services(base).values()
    ranks[0].process.send_signal(signal.SIGKILL)
    assert ranks[1].end() == 0, ranks[1].text
    assert digest(ranks[1].text.splitlines()) == project.reference(1, 2)
    until(lambda: not reaper.tagged(run_id) and not os.listdir(base), 15, "the service ends")


def test_service_that_cannot_start_reports_why(tmp_path: Path, base: Path):
    deep = base / ("x" * 90)
    rank = Rank(Project(tmp_path, 10, 0.0), deep)
    assert rank.end() == 1
    assert "the private service could not start: a Unix socket's path may have at most 107 bytes" in rank.text
    assert "choose a folder with a shorter path (TMPDIR, or DATALOADERJOB_DIR)" in rank.text


def test_service_with_a_broken_host_reports_why_to_the_waiting_loader(tmp_path: Path, base: Path):
    project = Project(tmp_path, 10, 0.0)
    rank = Rank(project, base, cold=True, PYTHONPATH=broken_host(tmp_path))
    assert rank.end() == 1
    assert "the feeder host ended 3 times within 120 s: this machine is broken" in rank.text
    assert "ServiceUnavailable: the " in rank.text
    until(lambda: not os.listdir(base), 15, "the reason is there for as long as the rank that asked")


REFUSING = """
import sys

class Refused:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("ray", "pydantic", "yaml", "psutil"):
            sys.stderr.write(f"somebody imports {name}\\n")
            raise ImportError(f"{name} is not installed")

sys.meta_path.insert(0, Refused())
"""


@pytest.mark.thorough
def test_a_trainer_s_installation_is_enough_for_a_script(tmp_path: Path, base: Path):
    (tmp_path / "refusing").mkdir()
    (tmp_path / "refusing" / "sitecustomize.py").write_text(REFUSING)
    project = Project(tmp_path, 300, 0.0)
    rank = Rank(project, base, cold=True, PYTHONPATH=path_first(tmp_path / "refusing"))
    assert rank.end() == 0, rank.text
    assert digest(rank.text.splitlines()) == project.reference()
    assert "somebody imports" not in rank.text
    assert "starting feeders (1) on this machine" in rank.text
    until(lambda: not os.listdir(base), 15, "the service ends")


MORE = """
import os, signal, time
from dataloaderjob.local.status import sidecar_status
from dataloaderjob.trainer.session import private

def feeders(wanted):
    deadline = time.monotonic() + 30
    while (told := sidecar_status(path)["desired"]) != wanted and time.monotonic() < deadline:
        time.sleep(0.02)
    print(told, flush=True)

private.start(1)
path = private.wait()
feeders(1)
private.ensure(3)
feeders(3)
private.ensure(2)
private.start(1)
time.sleep(1.5)
feeders(3)
os.kill(int((private.folder() / "pid").read_text().split()[0]), signal.SIGTERM)
while os.path.exists(path):
    time.sleep(0.01)
private.ensure(2)
assert private.wait() == path
feeders(3)
"""


@pytest.mark.thorough
def test_later_loader_raises_the_feeder_count_and_none_lowers_it(tmp_path: Path, base: Path):
    env = {k: v for k, v in os.environ.items() if not k.startswith("DATALOADERJOB_")}
    done = subprocess.run(
        [sys.executable, "-c", MORE], env={**env, "DATALOADERJOB_DIR": str(base)}, capture_output=True, text=True,
        timeout=100, check=False,
    )  # fmt: skip
    assert done.stdout.split() == ["1", "3", "3", "3"], done.stderr
    until(lambda: not os.listdir(base), 20, "the service ends")


@pytest.mark.thorough
@pytest.mark.parametrize("part", ["dlj-host", "dlj-supervisor", "dlj-sidecar"])
@pytest.mark.quick("dlj-sidecar")
def test_batches_are_the_same_whichever_process_is_killed(tmp_path: Path, base: Path, part: str):
    project = Project(tmp_path, 3_000, 0.001)
    rank = Rank(project, base)
    until(lambda: "batch 20" in rank.text, 60, "it iterates")
    (run_id,) = services(base).values()
    os.kill(called(run_id, part), signal.SIGKILL)
    assert rank.end() == 0, rank.text
    assert digest(rank.text.splitlines()) == project.reference()
    until(lambda: not reaper.tagged(run_id) and not os.listdir(base), 15, "the service ends")
    assert services(base) == {}


@pytest.mark.parametrize("started", [True, False], ids=["in mid-epoch", "while the host imports torch"])
@pytest.mark.parametrize("which", ["the script", "the service"])
def test_killing_the_script_or_the_service_leaves_nothing_behind(
    tmp_path: Path, base: Path, which: str, started: bool
):
    project = Project(tmp_path, 100_000, 0.001)
    rank = Rank(project, base)
    until(lambda: services(base), 30, "a service starts")
    if started:
        until(lambda: "batch 20" in rank.text, 60, "it iterates")
    ((pid, run_id),) = services(base).items()
    if not started:
        until(
            lambda: len(reaper.tagged(run_id)) >= 5,
            30,
            "the host, the reaper, the sidecar and the supervisor start",
        )
        # A service that ends before the rank waits for it is replaced.
        until(lambda: depends_on_its_service(rank, base), 30, "the rank waits for its service")
    os.kill(rank.process.pid if which == "the script" else pid, signal.SIGKILL)
    if which == "the service":
        assert rank.end() == 1
        why = ["its folder is gone"]
        if not started:
            why.append("the private service ended while it was starting, and printed nothing")
        assert any(words in rank.text for words in why), rank.text
    until(lambda: not reaper.tagged(run_id) and not os.listdir(base), 20, "all has ended")
    assert services(base) == {}
    rank.end()


@pytest.mark.slow
def test_failed_service_keeps_the_cause_for_all_its_ranks(tmp_path: Path, base: Path):
    """Also for one that is busy with a step while the rank that started the service has ended."""
    launch = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    first = Rank(Project(tmp_path, 100_000, 0.001), base, RANK="0", **launch)
    until(lambda: "batch 20" in first.text, 60, "it iterates")
    second = Rank(Project(tmp_path, 100_000, 0.001), base, RANK="1", **launch)
    until(lambda: "batch 20" in second.text, 60, "it is served, too")
    (service,) = services(base)
    time.sleep(2 * LOOK_S)  # the service sees both
    second.process.send_signal(signal.SIGSTOP)
    known: set[int] = set()
    for _ in range(MAX_CRASHES + 1):
        (pid,) = until(lambda: sidecars(service) - known, 30, "a sidecar")
        known.add(pid)
        os.kill(pid, signal.SIGKILL)
    assert first.end() == 1
    time.sleep(LINGER_S + 1)
    second.process.send_signal(signal.SIGCONT)
    assert second.end() == 1
    for rank in (first, second):
        assert f"failed: the sidecar ended {MAX_CRASHES + 1} times" in rank.text, rank.text
    until(lambda: not services(base) and not os.listdir(base), 15, "the service ends")


@pytest.mark.slow
def test_service_that_lost_its_folder_ends_after_its_script(tmp_path: Path, base: Path):
    project = Project(tmp_path, 100_000, 0.001)
    rank = Rank(project, base)
    until(lambda: "batch 20" in rank.text, 60, "it iterates")
    (run_id,) = services(base).values()
    (folder,) = base.iterdir()
    shutil.rmtree(folder)
    seen = len(rank.text.splitlines())
    until(lambda: len(rank.text.splitlines()) > seen + 100, 30, "it is served all the same")
    time.sleep(LINGER_S + 1)
    assert rank.process.poll() is None
    assert reaper.tagged(run_id)
    rank.process.kill()
    until(lambda: not reaper.tagged(run_id), 15, "the service ends")
    assert services(base) == {}
    rank.end()


@pytest.mark.slow
def test_service_leaves_its_folder_to_a_successor(tmp_path: Path, base: Path):
    launch = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    first = Rank(Project(tmp_path, 100_000, 0.001), base, RANK="0", **launch)
    until(lambda: "batch 20" in first.text, 60, "it iterates")
    (run_id,) = services(base).values()
    (folder,) = base.iterdir()
    shutil.rmtree(folder)
    second = Rank(Project(tmp_path, 100_000, 0.001), base, RANK="1", **launch)
    until(lambda: "batch 20" in second.text, 60, "it has a service of its own in the same folder")
    first.process.kill()
    until(lambda: not reaper.tagged(run_id), 15, "the first service ends")
    assert list(base.iterdir()) == [folder]
    assert (folder / "s").is_socket()
    assert (folder / "pid").is_file()
    seen = len(second.text.splitlines())
    until(lambda: len(second.text.splitlines()) > seen + 100, 30, "the second goes on")
    second.process.kill()
    until(lambda: not services(base) and not os.listdir(base), 15, "the second service ends, too")
    first.end()
    second.end()


@pytest.mark.thorough
def test_killed_service_is_replaced_for_the_next_loader(tmp_path: Path, base: Path):
    project = Project(tmp_path, 300, 0.0)
    launch = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    rank = Rank(project, base, **launch)
    until(lambda: services(base), 30, "a service starts")
    ((pid, run_id),) = services(base).items()
    os.kill(pid, signal.SIGKILL)
    rank.process.kill()
    rank.end()
    until(lambda: not reaper.tagged(run_id), 15, "the guard ends what it started")
    again = Rank(project, base, **launch)
    assert again.end() == 0, again.text
    assert digest(again.text.splitlines()) == project.reference()
    until(lambda: not services(base) and not os.listdir(base), 15, "the service ends")


QUIET = """
import sys, threading, traceback
import torch, dataloaderjob

class Locked(torch.utils.data.Dataset):
    def __init__(self):
        self.lock = threading.Lock()

    def __len__(self):
        return 8

    def __getitem__(self, i):
        return i

loader = dataloaderjob.DataLoader(range(64), batch_size=8, num_workers=1)
for batch in loader:
    pass
kept = iter(loader)
next(kept)
try:
    iter(dataloaderjob.DataLoader(Locked(), num_workers=1))
except dataloaderjob.InputError as error:
    print(len(traceback.extract_tb(error.__traceback__)))
"""


@pytest.mark.thorough
def test_script_runs_without_warnings_in_dev_mode(base: Path):
    env = {k: v for k, v in os.environ.items() if not k.startswith("DATALOADERJOB_")}
    done = subprocess.run(
        [sys.executable, "-X", "dev", "-W", "default", "-c", QUIET], env={**env, "DATALOADERJOB_DIR": str(base)},
        capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    assert done.stdout == "2\n", done.stderr
    assert "Warning" not in done.stderr
