"""A control group with a memory limit, in which the kernel ends processes for want of memory. Root's (v1 and v2)."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

V1, V2 = Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")


@contextlib.contextmanager
def limited(nbytes: int) -> Iterator[Path]:
    """The folder of a new group: who writes its pid into `cgroup.procs` there is limited with all its children. What
    is left in it at the end is killed."""
    top, limit = _top()
    folder = top / f"dataloaderjob-{os.getpid()}-{time.monotonic_ns()}"
    folder.mkdir()
    try:
        (folder / limit).write_text(str(nbytes))
        yield folder
    finally:
        for _ in range(500):
            for pid in map(int, (folder / "cgroup.procs").read_text().split()):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            with contextlib.suppress(OSError):
                folder.rmdir()
                break
            time.sleep(0.02)


def _top() -> tuple[Path, str]:
    """Where a group can be made, and the file of its limit. Raises OSError where this process may not."""
    paths = dict(line.split(":", 2)[1:] for line in Path("/proc/self/cgroup").read_text().splitlines())
    if "memory" in paths:
        own = V1 / paths["memory"].lstrip("/")
        return (own if own.exists() else V1), "memory.limit_in_bytes"
    own = V2 / paths[""].lstrip("/")
    # A group of version 2 that has processes has no groups within it with controllers.
    return (own if own.exists() and own != V2 else V2).parent if own != V2 else V2, "memory.max"
