"""The machine's activity during a measurement (CPU of processes, load, steal), and the facts that a result needs."""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import signal
import subprocess
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("torch", "numpy", "ray", "spdl", "pyarrow", "grpcio", "pyzmq", "pandas")
_TICK_S = 1.0 / os.sysconf("SC_CLK_TCK")
_PR_SET_CHILD_SUBREAPER = 36
_KERNEL_PID = 2
_FOREIGN_LIMIT = 0.10


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Counters at one moment, in seconds since boot unless noted otherwise."""

    wall_s: float
    busy_s: float
    """User, nice and system time of all CPUs."""
    softirq_s: float
    steal_s: float
    others_s: float
    """CPU of all processes, ended children included, except this one, its descendants and the kernel's."""
    load1: float


@dataclass(frozen=True, slots=True)
class Load:
    """The load between two snapshots."""

    wall_s: float
    load1: float
    busy_share: float
    """Busy share of all CPUs, 0 to 1."""
    foreign_share: float
    """Share of all CPUs that foreign processes took."""
    steal_share: float

    @property
    def disturbed(self) -> bool:
        return max(self.foreign_share, self.steal_share) > _FOREIGN_LIMIT

    def as_json(self) -> dict[str, float]:
        return {k: round(v, 4) for k, v in asdict(self).items()}


def snapshot() -> Snapshot:
    fields = [int(x) * _TICK_S for x in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    user, nice, system, _, _, irq, softirq, steal = fields
    return Snapshot(
        time.monotonic(), user + nice + system, irq + softirq, steal, _others_s(), os.getloadavg()[0]
    )


def _others_s() -> float:
    # not the difference of all busy time and our children: raylets ignore SIGCHLD, and the kernel then forgets the
    # CPU of their workers
    parents: dict[int, int] = {}
    used: dict[int, float] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            fields = path.read_text().rsplit(")", 1)[1].split()
            pid = int(path.parent.name)
            parents[pid] = int(fields[1])
            used[pid] = sum(map(int, fields[11:15])) * _TICK_S
    roots = {os.getpid(), _KERNEL_PID}
    return sum(s for pid, s in used.items() if not _belongs(pid, parents, roots))


def _belongs(pid: int, parents: dict[int, int], roots: set[int]) -> bool:
    while pid in parents:
        if pid in roots:
            return True
        pid = parents[pid]
    return False


def between(before: Snapshot, after: Snapshot) -> Load:
    """Returns shares of all CPUs' time. A foreign process that started and ended meanwhile counts with its parent."""
    wall = max(after.wall_s - before.wall_s, 1e-9)
    total = wall * (os.cpu_count() or 1)
    busy = after.busy_s - before.busy_s
    foreign = max(after.others_s - before.others_s, 0.0)
    steal = after.steal_s - before.steal_s
    return Load(wall, after.load1, busy / total, foreign / total, steal / total)


def cpu_ns(pids: Iterable[int]) -> int:
    """Returns the CPU time of these processes, ended threads included, in nanoseconds.

    Raises:
        RuntimeError: One of them has ended, and its CPU time is gone with it.
    """
    return sum(map(_process_cpu_ns, pids))


def _process_cpu_ns(pid: int) -> int:
    try:
        # the clock of another process, as made by clock_getcpuclockid(3): all threads, by the scheduler's accounting
        return time.clock_gettime_ns(~pid << 3 | 2)
    except OSError as e:
        raise RuntimeError(f"process {pid} has ended, and its CPU time is unknown") from e


def adopt_orphans() -> None:
    """Makes this process the parent of its orphaned descendants, so that none can escape `end_children`."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "PR_SET_CHILD_SUBREAPER was refused; the benchmarks need Linux")


def unwind_on_signals() -> None:
    """Makes SIGINT and SIGTERM raise KeyboardInterrupt, also in a shell's background process, which ignores SIGINT."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))


def end_children(grace_s: float) -> list[str]:
    """Waits `grace_s` for descendants to end by themselves, then kills the rest by pid.

    Returns the names of the killed processes.
    """
    me = psutil.Process()
    deadline = time.monotonic() + grace_s
    while (left := _alive(me)) and time.monotonic() < deadline:
        time.sleep(0.02)
    killed = []
    for process in left:
        with contextlib.suppress(psutil.NoSuchProcess):
            killed.append(process.name())
            process.send_signal(signal.SIGKILL)
    deadline = time.monotonic() + 5.0
    while _alive(me) and time.monotonic() < deadline:
        time.sleep(0.01)
    return killed


def _alive(me: psutil.Process) -> list[psutil.Process]:
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    return me.children(recursive=True)


def facts() -> dict[str, object]:
    """Returns CPU, kernel, Python and package versions of this machine."""
    versions = {"python": platform.python_version(), "kernel": platform.release()}
    for name in ("dataloaderjob", *PACKAGES):
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    memory = psutil.virtual_memory().total / 1e9
    return {
        "versions": versions,
        "machine": {"cpus": os.cpu_count(), "cpu": _cpu_model(), "memory_gb": round(memory, 1)},
    }


def commit() -> str:
    """Returns the commit of the tree, with `-dirty` if tracked files differ, or `none` outside git."""
    out = subprocess.run(
        ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    return out.stdout.strip() or "none"


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.machine()
