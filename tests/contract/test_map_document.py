"""The page on batch inference runs as printed, and its results are what it shows."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pandas as pd
from documents import ROOT

PAGE = (ROOT / "docs/guide/map.md").read_text()


def test_example_of_the_page_prints_the_documented_output(tmp_path: Path) -> None:
    name, script = re.findall(r"```python\n# (\S+)\n(.*?)```", PAGE, re.DOTALL)[0]
    (words,) = re.findall(r"^dataloaderjob (map .*)$", PAGE, re.MULTILINE)
    (tmp_path / name).write_text(script)
    done = subprocess.run(
        [sys.executable, "-m", "dataloaderjob.local.cli", *words.split()], cwd=tmp_path, capture_output=True,
        text=True, timeout=120,
    )  # fmt: skip
    assert f"It prints `{done.stdout.strip()}`" in PAGE, done.stderr
    with pd.option_context("display.max_rows", 6):
        shown = str(pd.read_parquet(tmp_path / "scores")).partition("\n\n")[0]
    assert re.findall(r"```text\n(.*?)\n```", PAGE, re.DOTALL) == [shown]
