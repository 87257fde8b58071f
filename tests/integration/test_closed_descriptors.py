"""Scripts without standard input, output or error, as daemons have them, train as others do."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from pathlib import Path

import pytest

SETS = [set(c) for n in range(1, 4) for c in itertools.combinations(range(3), n)]
QUICK = ({2}, {0, 1, 2})
SCRIPT = """
import os, sys, torch
from dataloaderjob import DataLoader
CLOSED, WHEN, OUT = {closed}, {when!r}, {out!r}
class Loud(torch.utils.data.Dataset):
    def __len__(self): return 40
    def __getitem__(self, i):
        if i == 3: print("sample", i)
        if i == 4 and sys.stderr: sys.stderr.write("sample 4")
        return torch.tensor([i])
def close():
    for fd in CLOSED: os.close(fd)
if __name__ == "__main__":
    if WHEN == "first": close()
    found = []
    for epoch in range(2):
        for batch in DataLoader(Loud(), 4, num_workers=2):
            found += batch[:, 0].tolist()
            if WHEN == "between" and epoch == 0 and len(found) == 40: close()
            if sys.stderr:
                try: sys.stderr.write("a line of the script"); sys.stderr.flush()
                except OSError: pass
    with open(OUT, "w") as file: print(found == [*range(40)] * 2, file=file)
"""


@pytest.mark.thorough
@pytest.mark.parametrize("when", ["by the shell", "first", "between"])
@pytest.mark.parametrize(
    "closed",
    [
        pytest.param(s, marks=[] if s in QUICK else pytest.mark.nightly, id="".join(map(str, sorted(s))))
        for s in SETS
    ],
)
def test_a_script_without_standard_descriptors_gets_all_batches(closed: set[int], when: str, tmp_path: Path):
    script, out = tmp_path / "train.py", tmp_path / "out"
    script.write_text(SCRIPT.format(closed=sorted(closed), when=when, out=str(out)))
    redirects = (
        " ".join({0: "<&-", 1: ">&-", 2: "2>&-"}[fd] for fd in closed) if when == "by the shell" else ""
    )
    env = {name: value for name, value in os.environ.items() if name != "DATALOADERJOB_SOCKET"}
    done = subprocess.run(
        ["bash", "-c", f"exec {sys.executable} {script} {redirects}"],
        env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert out.read_text() == "True\n"
