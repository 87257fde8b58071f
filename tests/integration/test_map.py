"""`dataloaderjob map` with real feeders: what it writes, and that no kill changes a byte of it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import psutil
import pyarrow.parquet as pq
import pytest
import torch
from rig import until
from warm import WarmProcess

ROWS = 240
SCRIPT = """
import os, random, sys, threading, time
import torch

PAUSE_S = float(os.environ.get("PAUSE_S", "0"))
MENDED = False


class Points(torch.utils.data.Dataset):
    def __len__(self):
        return 240

    def __getitem__(self, i):
        time.sleep(PAUSE_S)
        return torch.tensor([float(i), 1.0]), random.random()


class Frail(Points):
    def __getitem__(self, i):
        if i == 70 and not MENDED:
            raise FileNotFoundError(2, "No such file or directory", "70.jpg")
        return super().__getitem__(i)


def points():
    return Points()


def columns(batch):
    x, drawn = batch
    return {"twice": 2 * x, "drawn": drawn, "also": torch.rand(len(x)), "text": [f"{v:.0f}" for v in x[:, 0]]}


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Dropout())

    def forward(self, batch):
        return self.layers(batch[0])


class Counting:
    made = 0

    def __init__(self):
        Counting.made += 1
        self.calls = 0

    def __call__(self, batch):
        self.calls += 1
        return {"made": [Counting.made] * len(batch[1]), "calls": [self.calls] * len(batch[1])}


model = Model()


def of_rows(samples):
    return [x for x, _ in samples]


def first(batch):
    assert isinstance(batch, list)
    return [x[0] for x in batch]


class Locked:
    def __init__(self):
        self.lock = threading.Lock()

    def __call__(self, batch):
        return batch[1]


locked = Locked()


def stops(batch):
    raise StopIteration


if __name__ == "__main__":
    sys.exit("this shall not run")
"""


class Place:
    """A folder with the script, in which the command is run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "work.py").write_text(SCRIPT)

    def start(self, *words: object, feeders: int = 2, pause_s: float = 0) -> subprocess.Popen[str]:
        command = ["-m", "dataloaderjob.local.cli", "map", "work.py", *words]
        sizes = ["--batch-size", "8", "--rows-per-file", "48", "--feeders", str(feeders)]
        env = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(p for p in sys.path if p),
            "DATALOADERJOB_DIR": str(self.folder),
        }
        return WarmProcess(
            [*command, *sizes], cwd=self.folder, env={**env, "PAUSE_S": str(pause_s)},
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip

    def run(self, *words: object, feeders: int = 2) -> tuple[int, str, str]:
        """Exit code, output and errors."""
        process = self.start(*words, feeders=feeders)
        out, err = process.communicate(timeout=240)
        return process.returncode, out, err

    def parts(self, name: str) -> list[str]:
        return sorted(path.name for path in (self.folder / name).glob("part-*"))

    def contents(self, name: str) -> dict[str, bytes]:
        return {path.name: path.read_bytes() for path in (self.folder / name).iterdir()}

    def feeder_pids(self) -> list[int]:
        found = []
        for process in psutil.process_iter(["pid", "name", "environ"]):
            own = (process.info["environ"] or {}).get("DATALOADERJOB_DIR") == str(self.folder)
            if own and re.fullmatch(r"dlj-feeder-\d+", process.info["name"]):
                found.append(process.info["pid"])
        return found

    def wait_for_parts(self, name: str, number: int) -> None:
        until(lambda: len(self.parts(name)) >= number, 120, f"{number} files")


@pytest.fixture
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    return Place(tmp_path_factory.mktemp("m"))


@pytest.fixture
def expected(place: Place) -> dict[str, bytes]:
    """What a run without a break, and without feeders, writes."""
    code, out, err = place.run("points", "columns", "--output", "expected", feeders=0)
    assert (code, out) == (0, f"expected: {ROWS} rows in 5 files\n"), err
    return place.contents("expected")


def test_results_equal_those_of_a_plain_loop(place: Place, expected: dict[str, bytes]) -> None:
    code, out, err = place.run("points", "columns", "--output", "a/b")
    assert (code, out) == (0, f"a/b: {ROWS} rows in 5 files\n"), err
    assert place.contents("a/b") == expected
    found = pq.read_table(place.folder / "a/b").to_pydict()
    assert found["index"] == list(range(ROWS))
    assert found["twice"] == [[2.0 * i, 2.0] for i in range(ROWS)]
    assert found["text"] == [str(i) for i in range(ROWS)]
    assert len(set(found["drawn"])) == len(set(found["also"])) == ROWS, "each sample and batch draws anew"


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["Model", "model"])
def test_torch_module_runs_in_inference_mode(place: Place, name: str) -> None:
    code, _, err = place.run("points", name, "--output", "out")
    assert code == 0, err
    found = torch.tensor(pq.read_table(place.folder / "out")["result"].to_pylist())
    inputs = torch.stack([torch.arange(float(ROWS)), torch.ones(ROWS)], dim=1)
    torch.manual_seed(0)
    with torch.no_grad():
        torch.testing.assert_close(found, torch.nn.Linear(2, 3)(inputs))


def test_class_is_instantiated_once_per_process(place: Place) -> None:
    code, _, err = place.run("Points", "Counting", "--output", "out", feeders=1)
    assert code == 0, err
    found = pq.read_table(place.folder / "out").to_pydict()
    assert set(found["made"]) == {1}
    assert max(found["calls"]) == ROWS // 8


@pytest.mark.thorough
def test_batches_can_be_built_by_a_function_of_the_script(place: Place) -> None:
    code, _, err = place.run("points", "first", "--collate-fn", "of_rows", "--output", "out")
    assert code == 0, err
    assert pq.read_table(place.folder / "out")["result"].to_pylist() == [float(i) for i in range(ROWS)]


@pytest.mark.thorough
@pytest.mark.timeout(900)
def test_killed_feeders_change_no_result(place: Place, expected: dict[str, bytes]) -> None:
    process = place.start("points", "columns", "--output", "out", pause_s=0.05)
    for number in (1, 3):
        place.wait_for_parts("out", number)
        until(place.feeder_pids, 30, "a feeder")
        killed = place.feeder_pids()
        for pid in killed:
            os.kill(pid, signal.SIGKILL)
    _, err = process.communicate(timeout=240)
    assert process.returncode == 0, err
    assert place.contents("out") == expected


@pytest.mark.timeout(900)
@pytest.mark.slow
def test_run_killed_and_resumed_writes_each_input_once(place: Place, expected: dict[str, bytes]) -> None:
    for number in (0, 1, 2):
        process = place.start("points", "columns", "--output", "out", pause_s=0.05)
        until(place.feeder_pids, 120, "feeders at work")
        place.wait_for_parts("out", number)
        process.kill()
        process.communicate()
        there = place.parts("out")
        assert number <= len(there) < 5
        assert {name: place.contents("out")[name] for name in there} == {
            name: expected[name] for name in there
        }
    code, out, err = place.run("points", "columns", "--output", "out")
    assert (code, out) == (0, f"out: {ROWS} rows in 5 files\n"), err
    assert f"{len(there)} of 5 files exist already" in err
    assert place.contents("out") == expected
    assert pq.read_table(place.folder / "out")["index"].to_pylist() == list(range(ROWS))


@pytest.mark.thorough
@pytest.mark.timeout(900)
def test_ctrl_c_keeps_whole_files_and_explains_how_to_resume(
    place: Place, expected: dict[str, bytes]
) -> None:
    process = place.start("points", "columns", "--output", "out", pause_s=0.05)
    place.wait_for_parts("out", 1)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=240)
    assert process.returncode == 130
    assert f"{len(place.parts('out'))} of 5 files are complete; repeat the command to resume" in err
    assert "Traceback" not in err
    assert place.run("points", "columns", "--output", "out")[0] == 0
    assert place.contents("out") == expected


@pytest.mark.thorough
@pytest.mark.timeout(900)
def test_error_names_the_index_and_a_fixed_script_resumes(place: Place, expected: dict[str, bytes]) -> None:
    code, _, err = place.run("Frail", "columns", "--output", "out")
    assert code == 1
    assert "FileNotFoundError: [Errno 2] No such file or directory: '70.jpg'\nraised for index 70 in" in err
    assert "1 of 5 files are complete" in err
    (place.folder / "work.py").write_text(SCRIPT.replace("MENDED = False", "MENDED = True"))
    code, _, err = place.run("Frail", "columns", "--output", "out")
    assert code == 0
    assert "work.py has changed since the first run; existing files are kept unchanged" in err
    files = {name: data for name, data in expected.items() if name.startswith("part-")}
    assert {name: place.contents("out")[name] for name in files} == files


def test_stop_iteration_of_user_code_is_reported_as_an_error(place: Place) -> None:
    code, _, err = place.run("points", "stops", "--output", "out", feeders=1)
    assert code == 1
    assert "no result for rows 0 to 7: RuntimeError: the function raised StopIteration" in err
    assert place.parts("out") == []


@pytest.mark.thorough
def test_an_instance_that_cannot_be_copied_is_refused_and_its_class_is_not(place: Place) -> None:
    code, _, err = place.run("points", "locked", "--output", "out", feeders=1)
    assert code == 2
    assert "collate_fn._function.lock: _thread.lock" in err
    assert "collate_fn._function is your function: specify a class instead" in err
    assert place.run("points", "Locked", "--output", "out", feeders=1)[0] == 0


def test_a_script_may_change_the_working_directory_and_its_globals(place: Place) -> None:
    text = """
    import os
    STATE = None
    os.chdir("/")
    def data():
        global STATE
        STATE = {"add": 1}
        return range(5)
    def f(batch):
        return [int(b) + STATE["add"] for b in batch]
    """
    (place.folder / "work.py").write_text(textwrap.dedent(text))
    code, _, err = place.run("data", "f", "--output", "out", feeders=1)
    assert code == 0, err
    assert pq.read_table(place.folder / "out")["result"].to_pylist() == [1, 2, 3, 4, 5]
