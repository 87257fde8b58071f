"""docs/guide/real-dataset.md shows the files of examples/photos, and its commands print what it shows."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from documents import ROOT

EXAMPLE = ROOT / "examples/photos"
GUIDE = (ROOT / "docs/guide/real-dataset.md").read_text()
COMMANDS = re.findall(r"^(python examples/photos/.*|dataloaderjob run .*)$", GUIDE, re.MULTILINE)
OUTPUT = "".join(re.findall(r"^```text\n(.*?)^```", GUIDE, re.MULTILINE | re.DOTALL))
NUMBER, STEPS = "130", "1"
"""Two batches, in place of 41."""


def shape(text: str) -> list[str]:
    """The lines of an output without numbers."""
    return re.sub(r"\d[\d.]*", "#", text).splitlines()


def test_page_shows_the_current_dataset_and_manifest() -> None:
    (dataset,) = re.findall(r"^```python\n(.*?)^```", GUIDE, re.MULTILINE | re.DOTALL)
    assert dataset in (EXAMPLE / "train.py").read_text()
    manifest = re.findall(r"^```yaml\n(.*?)^```", GUIDE, re.MULTILINE | re.DOTALL)[0]
    assert (EXAMPLE / "dataloaderjob.yaml").read_text().endswith(manifest)


@pytest.mark.thorough
def test_commands_print_the_documented_output(tmp_path: Path) -> None:
    shutil.copytree(EXAMPLE, tmp_path / "examples/photos", ignore=shutil.ignore_patterns("data"))
    env = {name: value for name, value in os.environ.items() if not name.startswith("DATALOADERJOB_")}
    env |= {"PHOTOS_NUMBER": NUMBER, "PHOTOS_STEPS": STEPS, "OMP_NUM_THREADS": "1"}
    printed = ""
    assert len(COMMANDS) == 4
    for command in COMMANDS:
        program, *words = command.split()
        start = [sys.executable] if program == "python" else [sys.executable, "-m", "dataloaderjob.local.cli"]
        done = subprocess.run(
            [*start, *words], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120
        )
        assert done.returncode == 0, done.stderr
        printed += done.stdout
    assert shape(printed) == shape(OUTPUT)
    assert printed.startswith(f"{NUMBER} photographs in examples/photos/data, ")


def test_a_script_without_photographs_names_the_script_that_makes_them(tmp_path: Path) -> None:
    shutil.copy(EXAMPLE / "train.py", tmp_path)
    done = subprocess.run(
        [sys.executable, "train.py"], cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 2
    assert "run make_photos.py first" in done.stderr
