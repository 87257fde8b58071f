"""DATALOADERJOB_KEEP: feeders that stay after their script serve the next one of the same environment, and it alone."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from rig import until
from warm import run

from dataloaderjob.local.service import LINGER_S
from dataloaderjob.local.status import LiveRun, live_runs
from processes import alive

SCRIPT = """
    import os, sys, time
    import torch
    from dataloaderjob import DataLoader
    from steps import scaled

    class Numbers(torch.utils.data.Dataset):
        def __len__(self):
            return 12
        def __getitem__(self, i):
            return torch.tensor([scaled(i), len(os.environ.get("EXTRA", "")), "gone" in os.environ.get("PATH", "")])

    def main():
        torch.manual_seed(3)
        global made
        made = loader = DataLoader(Numbers(), batch_size=4, shuffle=True, num_workers=int(sys.argv[1]))
        if len(sys.argv) > 2:
            exec(sys.argv[2])
        print([batch.tolist() for batch in loader], flush=True)
        if len(sys.argv) > 3:
            exec(sys.argv[3])

    if __name__ == "__main__":
        main()
"""
KEEP_S = 60


@dataclass
class Environment:
    folder: Path
    """Has the script, its module and the folder of its services."""

    def command(self, feeders: int, *actions: str) -> list[str]:
        """`actions`: code for between the loader's making and its loop, and for after its loop."""
        return [sys.executable, str(self.folder / "train.py"), str(feeders), *actions]

    def variables(self, keep: str = str(KEEP_S), **more: str) -> dict[str, str]:
        own = {"DATALOADERJOB_DIR": str(self.folder / "d"), "DATALOADERJOB_KEEP": keep}
        return {**os.environ, **own, **more}

    def script(self, feeders: int = 1, *actions: str, keep: str = str(KEEP_S), **more: str) -> str:
        """Runs it; returns its output, and checks that nothing of ours holds its standard error after it."""
        command, variables = self.command(feeders, *actions), self.variables(keep, **more)
        if more.keys() & {"PYTHONPATH", "PYTHONHASHSEED"}:  # which an interpreter reads as it starts
            done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=120)
        else:
            done = run(command[1:], env=variables, timeout_s=120)
        done.check_returncode()
        return done.stdout

    def services(self) -> list[LiveRun]:
        return [found for found in live_runs() if found.about.get("folder", "").startswith(str(self.folder))]

    def pids(self) -> list[int]:
        return sorted(found.about["pid"] for found in self.services())


@pytest.fixture
def environment(tmp_path: Path) -> Iterator[Environment]:
    yield from environments(tmp_path)


@pytest.fixture(scope="module")
def warm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Environment]:
    """One for all tests that leave one service in it."""
    yield from environments(tmp_path_factory.mktemp("warm"))


def environments(tmp_path: Path) -> Iterator[Environment]:
    (tmp_path / "train.py").write_text(textwrap.dedent(SCRIPT))
    (tmp_path / "steps.py").write_text("def scaled(i):\n    return i * 10\n")
    made = Environment(tmp_path)
    yield made
    for pid in made.pids():
        os.kill(pid, signal.SIGTERM)
    until(lambda: not made.services(), 30, "the end of what was kept")
    assert {path.name for path in (tmp_path / "d").iterdir()} <= {".keep"}


def test_next_script_reuses_the_previous_scripts_feeders(warm):
    first = warm.script()
    (service,) = warm.services()
    until(lambda: warm.services()[0].kept_until, 10, "free")
    assert warm.services()[0].kept_until == pytest.approx(time.time() + KEEP_S, abs=10)
    assert warm.script() == first, "the same data"
    assert warm.pids() == [service.about["pid"]]


def test_code_edited_between_two_scripts_takes_effect(warm):
    before = warm.script()
    (warm.folder / "steps.py").write_text("def scaled(i):\n    return i * 1000\n")
    after = warm.script()
    assert "1000" in after
    assert "1000" not in before
    assert len(warm.pids()) == 1


LAUNCH = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29653"}
"""A launch that has the same name each time."""


@pytest.mark.thorough
def test_launches_share_feeders_only_if_their_environments_match(warm):
    warm.script(**LAUNCH)
    (first,) = warm.pids()
    warm.script(**LAUNCH)
    assert warm.pids() == [first]
    warm.script(**LAUNCH, PYTHONHASHSEED="7")
    assert len(warm.pids()) == 2
    warm.script(**LAUNCH)
    assert len(warm.pids()) == 2
    (other,) = set(warm.pids()) - {first}
    os.kill(other, signal.SIGTERM)
    until(lambda: warm.pids() == [first], 30, "the end of the other one")


def test_feeders_that_imported_edited_modules_are_not_reused(environment):
    site = environment.folder / "site"
    site.mkdir()
    found = {"PYTHONPATH": str(site)}
    for factor in (1, 10):
        (site / "sitecustomize.py").write_text(f"import builtins\nbuiltins.factor = {factor}\n")
        (environment.folder / "steps.py").write_text("def scaled(i):\n    return i * factor\n")
        assert f"[{11 * factor}, 0, 0]" in environment.script(**found)
    until(lambda: len(environment.pids()) == 1, 30, "the end of the first one")


@pytest.mark.slow
def test_hanging_service_does_not_hold_a_scripts_stderr_open(environment):
    environment.script()
    (pid,) = environment.pids()
    os.kill(pid, signal.SIGSTOP)
    try:
        environment.script()
    finally:
        os.kill(pid, signal.SIGCONT)
    assert len(environment.pids()) == 2


def test_script_gets_the_number_of_feeders_it_requests(warm):
    warm.script(2)
    until(lambda: warm.services()[0].snapshot().ready == 2, 30, "two feeders")
    warm.script(1)
    until(lambda: warm.services()[0].snapshot().desired == 1, 30, "one feeder")
    warm.script(2)
    until(lambda: warm.services()[0].snapshot().desired == 2, 30, "two again")
    assert len(warm.pids()) == 1


@pytest.mark.thorough
def test_different_environment_gets_its_own_feeders(environment):
    environment.script()
    assert ", 5, " in environment.script(EXTRA="12345")
    assert ", 5, " not in environment.script()
    assert len(environment.pids()) == 2


@pytest.mark.thorough
def test_feeders_still_usable_by_another_script_are_not_taken(environment):
    waits = "import time; time.sleep(60)"
    with subprocess.Popen(
        environment.command(1, "", waits), env=environment.variables(), stdout=subprocess.PIPE
    ) as other:
        assert other.stdout is not None
        other.stdout.readline()
        try:
            environment.script()
            assert len(environment.pids()) == 2
        finally:
            other.kill()


def test_feeders_of_a_killed_script_serve_the_next(warm):
    kills = "import signal; os.kill(os.getpid(), signal.SIGKILL)"
    with pytest.raises(subprocess.CalledProcessError):
        warm.script(1, "", kills)
    (pid,) = warm.pids()
    warm.script()
    assert warm.pids() == [pid]


@pytest.mark.slow
def test_killed_service_is_started_again(environment):
    environment.script()
    (pid,) = environment.pids()
    os.kill(pid, signal.SIGKILL)
    until(lambda: not alive(pid), 10, "its end")
    environment.script()
    assert len(environment.pids()) == 1


def test_a_script_that_changes_its_variables_keeps_its_service(environment):
    more = 'os.environ["EXTRA"] = "12"; print(len(list(DataLoader(Numbers(), num_workers=2))))'
    assert environment.script(1, 'os.environ["EXTRA"] = "1"', more).endswith("\n12\n")
    assert len(environment.pids()) == 1
    until(lambda: environment.services()[0].snapshot().desired == 2, 30, "two feeders")


@pytest.mark.slow
def test_consecutive_launches_of_one_name_get_their_numbers_of_feeders(environment):
    environment.script(2, MASTER_PORT="29500")
    (pid,) = environment.pids()
    environment.script(1, MASTER_PORT="29500")
    until(lambda: environment.services()[0].snapshot().desired == 1, 30, "one feeder")
    assert environment.pids() == [pid]


@pytest.mark.slow
def test_at_most_two_idle_services_for_other_environments_are_kept(environment):
    for number in range(4):
        environment.script(EXTRA=str(number))
    until(lambda: len(environment.pids()) == 3, 30, "the end of the oldest")


def test_feeders_have_the_variables_of_the_script_that_they_serve(warm):
    look = (
        'Numbers.__getitem__ = lambda self, i: os.environ.get("SSH_AUTH_SOCK", ""); print(next(iter(loader)))'
    )
    for sock in ("/tmp/a", "/tmp/b"):
        assert sock in warm.script(1, "", look, SSH_AUTH_SOCK=sock)
    assert len(warm.pids()) == 1


@pytest.mark.thorough
def test_process_that_dropped_its_loader_gives_its_place_to_its_child(environment):
    code = """
import gc, subprocess
del globals()["made"]
gc.collect()
time.sleep(2)
done = subprocess.run([sys.executable, __file__, "1"], check=True, capture_output=True, text=True)
print(done.stdout.strip())
print([batch.tolist() for batch in DataLoader(Numbers(), batch_size=4, num_workers=1)])
"""
    lines = environment.script(1, "", code, keep="", MASTER_PORT="29501", RANK="0").splitlines()
    assert len(lines) == 3
    assert lines[0] == lines[1]


@pytest.mark.slow
def test_two_scripts_at_once_share_no_service(environment):
    environment.script()
    waits = "import time; time.sleep(5)"
    running = [
        subprocess.Popen(environment.command(1, "", waits), env=environment.variables()) for _ in range(2)
    ]
    assert [process.wait(60) for process in running] == [0, 0]
    assert len(environment.pids()) == 2


@pytest.mark.slow
def test_ranks_of_one_launch_share_the_kept_service(environment):
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    for _ in range(2):
        subprocess.run(
            [*launch, *environment.command(1)[1:]], env=environment.variables(), timeout=120, check=True
        )
    assert len(environment.pids()) == 1


@pytest.mark.slow
def test_idle_feeders_end_after_the_configured_seconds(environment):
    environment.script(keep="8")
    (pid,) = environment.pids()
    time.sleep(LINGER_S + 1.5)
    assert alive(pid)
    until(lambda: not alive(pid), 20, "the end")


@pytest.mark.slow
def test_no_service_is_kept_without_the_variable(environment):
    environment.script()
    (pid,) = environment.pids()
    environment.script(keep="")
    until(lambda: environment.pids() == [pid], 20, "the end of the second service")
