"""The page on samplers runs as printed, from its first block to its last."""

from __future__ import annotations

import re
import subprocess
import sys

from documents import ROOT

import dataloaderjob

PAGE = (ROOT / "docs/guide/samplers.md").read_text()


def test_code_of_the_page_runs():
    script = "\n".join(re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL))
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr


def test_the_page_names_every_sampler():
    samplers = {name for name in dataloaderjob.__all__ if name.endswith("Sampler")}
    assert len(samplers) == 5
    assert {name for name in samplers if f"| `{name}` |" in PAGE} == samplers
