"""The memory that this process may use, and the number of processes that the kernel has killed for lack of memory. Both
come from the kernel (cgroup v1 and v2).
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

FEEDERS_FIELD = "spec.feeders.resources.limits.memory"
SCORE, MOST_SCORE = 500, 1000
"""Value that is added to a process's oom_score_adj (proc(5)), and the maximum of that file."""
LOOK_S = 5.0
"""Seconds between two readings of the kernel's count of processes killed for lack of memory."""
RECENT_S = 15.0
"""Seconds for which a kill counts as recent. The kernel counts a kill when it begins, but a process with gigabytes to
free exits seconds later."""


class _Version(NamedTuple):
    """Names of the files of one version of cgroups."""

    controller: str
    """The controller's name in /proc/self/cgroup."""
    root: str
    limit: str
    kills: str
    """File with a name and a number on each line. One of the names is `oom_kill`."""


_VERSIONS = (
    _Version("", "sys/fs/cgroup", "memory.max", "memory.events"),
    _Version("memory", "sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.oom_control"),
)
_ROOT = Path("/")


def size_text(nbytes: int) -> str:
    """Formats a number of bytes for people."""
    return f"{nbytes / (1 << 30):.3g} GiB" if nbytes >= 1 << 30 else f"{nbytes / (1 << 20):.3g} MiB"


def memory_limit(root: Path = _ROOT) -> int:
    """Returns the bytes that this process may use: the smallest of the machine's memory and the limits of its cgroups.

    A memfd that exceeds the cgroup's limit causes SIGKILL, not an error. So the limit is read before memory is touched.
    """
    limits = [limit for folder, version in _cgroups(root) if (limit := _limit(folder, version)) is not None]
    return min([machine_memory(root), *limits])


def machine_memory(root: Path = _ROOT) -> int:
    """Returns the memory of the whole machine in bytes."""
    return next(
        int(line.split()[1]) * 1024
        for line in (root / "proc/meminfo").read_text().splitlines()
        if line.startswith("MemTotal:")
    )


def kills(root: Path = _ROOT) -> int:
    """Returns the number of processes in this cgroup that the kernel has killed for lack of memory. If no cgroup counts
    them, returns the number for the whole machine, or 0 if that is unknown, too."""
    for folder, version in _cgroups(root):
        if (found := _counter(folder / version.kills)) is not None:
            return found
    return _counter(root / "proc/vmstat") or 0


def die_first(root: Path = _ROOT) -> None:
    """Makes the kernel kill this process before the processes that started it, if memory runs out."""
    path = root / "proc/self/oom_score_adj"
    with contextlib.suppress(OSError, ValueError):
        path.write_text(str(min(MOST_SCORE, int(path.read_text()) + SCORE)))


def die_as(pid: int, root: Path = _ROOT) -> None:
    """Sets this process's oom_score_adj, which its children inherit, to the value of process `pid`."""
    with contextlib.suppress(OSError):
        (root / "proc/self/oom_score_adj").write_text((root / f"proc/{pid}/oom_score_adj").read_text())


def describe_limit(field: str, root: Path = _ROOT) -> str:
    """Describes the available memory, and a remedy. `field` is the manifest field that sets a pod's limit. It is empty
    on one machine."""
    limit, machine = memory_limit(root), machine_memory(root)
    if field:
        return f"its pod may use {size_text(limit)}: {remedy(field)}"
    whose = "this machine has" if limit >= machine else "its control group may use"
    return f"{whose} {size_text(limit)}: {remedy(field)}"


def remedy(field: str) -> str:
    """Returns the advice for when memory has run out. `field` is the same as for `describe_limit`."""
    if field:
        return f"raise {field}, or make batches smaller"
    return "use fewer feeders or smaller batches, or free some memory"


class MemoryWatch:
    """A detector of processes that the kernel has recently killed for lack of memory. Call `look` every LOOK_S."""

    def __init__(self, count: Callable[[], int] = kills, clock: Callable[[], float] = time.monotonic) -> None:
        self._count, self._clock = count, clock
        self._seen = [(clock(), count())]
        """(time, count) of each recent change. The first entry is the count before these changes."""

    def look(self) -> None:
        now, found = self._clock(), self._count()
        if found != self._seen[-1][1]:
            self._seen.append((now, found))
        while len(self._seen) > 1 and self._seen[1][0] <= now - RECENT_S:
            del self._seen[0]

    @property
    def killed(self) -> bool:
        """True if a process was killed within the last RECENT_S."""
        self.look()
        return len(self._seen) > 1


def _cgroups(root: Path) -> Iterator[tuple[Path, _Version]]:
    """Yields the folders of this process's cgroups that are visible to this process: its own first, then their parents.

    In a container, the container's own folder is mounted as the root, whatever path the kernel reports.
    """
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        lines = []
    paths = {parts[1]: parts[2] for line in lines if len(parts := line.split(":", 2)) == 3}
    for version in _VERSIONS:
        top = root / version.root
        own = top / paths.get(version.controller, "/").lstrip("/")
        for folder in (own, *own.parents):
            if (folder / version.limit).exists() or (folder / version.kills).exists():
                yield folder, version
            if folder == top:
                break


def _limit(folder: Path, version: _Version) -> int | None:
    try:
        text = (folder / version.limit).read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def _counter(path: Path) -> int | None:
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), None)
