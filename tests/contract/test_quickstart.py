"""The quickstart runs as printed, in README and in the documents, and prints what they say."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
from documents import ROOT

README = (ROOT / "README.md").read_text()
QUICKSTART = (ROOT / "docs/quickstart.md").read_text()


@pytest.mark.parametrize("text", [README, QUICKSTART], ids=["README", "docs"])
def test_quickstart_prints_the_documented_output(text):
    pattern = r"```python\n# (examples/quickstart.py)\n(.*?)```.*?```text\n(.*?)```"
    name, script, printed = re.findall(pattern, text, re.DOTALL)[0]
    assert (ROOT / name).read_text() == script
    done = subprocess.run([sys.executable, ROOT / name], capture_output=True, text=True, timeout=120)
    assert done.stdout == printed, done.stderr


def test_first_screen_shows_the_installation_and_the_one_line_change():
    first = README.splitlines()[:16]
    assert any("pip install" in line for line in first)
    assert "+from dataloaderjob import DataLoader" in first


def test_the_readmes_attached_job_is_the_one_that_a_cluster_test_runs():
    page = (ROOT / "docs/kubernetes/bring-your-own-controller.md").read_text()
    lines = [re.search(r"```bash\n(kubectl apply.*?)```", text, re.DOTALL) for text in (README, page)]
    assert lines[0] is not None
    assert lines[1] is not None
    assert lines[0][1] == lines[1][1]
