"""The main job on this machine: what the one on the cluster is compared with."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from cluster import EXAMPLE
from jobs import DIGEST


def run_here(folder: Path, **options: str) -> str:
    """The digest that `dataloaderjob run dataloaderjob.yaml` prints; a minute or two. `options`: of train.py."""
    env = {**os.environ, **{f"FASHION_{name.upper()}": value for name, value in options.items()}}
    for name in ("dataloaderjob.yaml", "train.py", "fashion.py", "proof.py"):
        shutil.copy(EXAMPLE / name, folder)
    program = Path(sys.executable).with_name("dataloaderjob")
    done = subprocess.run(
        [program, "run", folder / "dataloaderjob.yaml"], capture_output=True, text=True, timeout=600, cwd=folder,
        env=env,
    )  # fmt: skip
    found = DIGEST.findall(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
    assert found, f"rank 0 printed no digest:\n{done.stdout}"
    return str(found[-1])
