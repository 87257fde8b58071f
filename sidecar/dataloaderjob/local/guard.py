"""Ends a run whose own process was killed: `python -m dataloaderjob.local.guard PID RUN_ID HOME`.

It waits for that process alone, in a session of its own, then ends everything that carries the run's tag
and removes the run's folder. A run that ends by itself ends its guard, too.
"""

from __future__ import annotations

import os
import select
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from dataloaderjob.local import tags

GRACE_S = 1.0


def start(run_id: str, home: Path, env: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """The guard of this process."""
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "dataloaderjob.local.guard", str(os.getpid()), run_id, str(home)],
        env=dict(env), cwd="/", start_new_session=True,
        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip


def main() -> None:
    pid, run_id, home = int(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
    if os.getppid() == pid:
        fd = os.pidfd_open(pid)
        if os.getppid() == pid:
            select.select([fd], [], [])
    tags.sweep(run_id, grace_s=GRACE_S)
    shutil.rmtree(home, ignore_errors=True)


if __name__ == "__main__":
    main()
