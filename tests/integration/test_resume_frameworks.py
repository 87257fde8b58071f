"""Six training loops, killed in the middle of their second epoch and gone on with by another number of feeders."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import fashion_files
import pytest
from warm import FRAMEWORKS, WarmProcess

LOOPS = Path(__file__).parents[2] / "examples" / "frameworks"
NAMES = ["plain", "lightning_trainer", "fabric", "accelerated", "hugging_face", "torchdatas"]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fashion_files.write(tmp_path_factory.mktemp("fashion"), train=12 * 64)


def start(name: str, folder: Path, data: Path, **variables: str) -> subprocess.Popen[str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith("DATALOADERJOB_")}
    own = {
        "FASHION_MNIST": str(data),
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(p for p in sys.path if p),
    }
    return WarmProcess(
        [f"{name}.py", folder], modules=FRAMEWORKS, cwd=LOOPS, env={**kept, **own, **variables},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def told(process: subprocess.Popen[str]) -> str:
    """The last line of a run, which has the digests."""
    out, err = process.communicate(timeout=150)
    assert process.returncode == 0, err[-3000:]
    return out.splitlines()[-1]


def test_every_loop_of_the_examples_is_here() -> None:
    assert {p.stem for p in LOOPS.glob("*.py")} == {*NAMES, "task"}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name == "lightning_trainer" else [pytest.mark.thorough])
        for name in NAMES
    ],
)
@pytest.mark.quick("plain", "hugging_face", "lightning_trainer")
def test_loop_killed_in_mid_epoch_resumes_to_the_same_result(name: str, tmp_path: Path, data: Path) -> None:
    whole = start(name, tmp_path / "whole", data)
    stopped = start(name, tmp_path / "stopped", data, STOP_AFTER="19")
    assert stopped.wait(150) == -signal.SIGKILL
    stopped.communicate()
    expected = told(whole)
    assert expected.startswith("batches ")
    assert told(start(name, tmp_path / "stopped", data, WORKERS="1")) == expected
