"""The run of a script with the hook. Once the script's ranks have written their results, the script and all processes
that it started are killed."""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dataloaderjob.advise.hook import FINISH, STEPS
from dataloaderjob.core.errors import InputError
from dataloaderjob.core.processes import adopt_orphans

POLL_S = 0.1
GRACE_S, SHIPPING_S = 15.0, 30.0
"""Seconds that a step may take to end once the time is up, and seconds that one rank has to measure single batches."""
SITE = Path(__file__).with_name("site") / "sitecustomize.py"


@dataclass(frozen=True, slots=True)
class Watched:
    """The results of a script's ranks on one node."""

    results: tuple[dict[str, Any], ...]
    returncode: int | None
    """The script's exit code; None if this process killed the script."""
    trouble: str
    """The reason why some of the script's processes were not watched; empty if all were."""
    has_loader: bool
    """True if one of the script's processes imported torch's loader."""
    others_cpus: float = 0.0
    """Number of CPUs of the machine that other programs kept busy meanwhile."""
    idle_cpus: float = math.inf
    """Number of CPUs of the machine that were idle meanwhile."""


def watch(command: Sequence[str], *, steps: int, timeout_s: float, say: Callable[[str], None]) -> Watched:
    """Runs the command and returns its ranks' results. Raises InputError if the command cannot be started."""
    with tempfile.TemporaryDirectory(prefix="dataloaderjob-advise-") as name:
        folder = Path(name)
        scratch, site = folder / "tmp", folder / "site"
        scratch.mkdir()
        site.mkdir()
        shutil.copy(SITE, site)
        (folder / STEPS).write_text(str(steps))
        paths = [str(site), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "TMPDIR": str(scratch)}
        adopt_orphans()
        try:
            # The script's output goes to standard error, so that standard output contains only the advice.
            script = subprocess.Popen(
                list(command), env=environment, stdout=sys.stderr, start_new_session=True
            )
        except OSError as exc:
            raise InputError(f"{command[0]} cannot be started: {exc.strerror}") from exc
        meter = Meter()
        try:
            returncode = _until_found(script, folder, timeout_s, say)
        finally:
            _end_all(script)
        others, idle = meter.read()
        troubles = " ".join(_texts(folder, "trouble"))
        return Watched(
            tuple(_read(folder, "result")),
            returncode,
            troubles,
            bool(_read(folder, "installed")),
            others,
            idle,
        )


class Meter:
    """Measures the machine's CPUs from its creation on. The script's processes must be reaped before it is read."""

    def __init__(self) -> None:
        self._began, self._machine, self._own = time.monotonic(), _machine_s(), _own_s()

    def read(self) -> tuple[float, float]:
        """Returns the numbers of CPUs that other programs kept busy, and that were idle."""
        wall_s = time.monotonic() - self._began
        busy, idle = (now - before for now, before in zip(_machine_s(), self._machine, strict=True))
        return max(0.0, busy - (_own_s() - self._own)) / wall_s, idle / wall_s


def _machine_s() -> tuple[float, float]:
    """Returns the seconds for which the machine's CPUs were busy and idle since it started."""
    fields = [int(word) for word in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    idle = fields[3] + fields[4]  # idle, and waiting for storage
    tick = os.sysconf("SC_CLK_TCK")
    return (sum(fields) - idle) / tick, idle / tick


def _own_s() -> float:
    """Returns the CPU seconds of this process and of all descendants that it has reaped."""
    found = os.times()
    return found.user + found.system + found.children_user + found.children_system


def _until_found(
    script: subprocess.Popen[bytes], folder: Path, timeout_s: float, say: Callable[[str], None]
) -> int | None:
    began = told = time.monotonic()
    late: float | None = None
    while True:
        returncode = script.poll()
        if returncode is not None:
            return returncode
        now = time.monotonic()
        results = _read(folder, "result")
        is_whole = bool(results) and len(results) >= results[0]["local_world"]
        if is_whole and any(one.get("is_complete") for one in results):
            return None
        if results and late is None:
            late = now + SHIPPING_S
        if late is None and now - began > timeout_s:
            (folder / FINISH).touch()
            late = now + GRACE_S
        if late is not None and now > late:
            return None
        if now - told > 5:
            told = now
            say(_progress(folder, now - began))
        time.sleep(POLL_S)


def _progress(folder: Path, elapsed_s: float) -> str:
    if _read(folder, "result"):
        return f"{elapsed_s:.0f} s: measuring single batches"
    most = max(_read(folder, "progress"), key=lambda one: (one["replayed"], one["observed"]), default=None)
    if most is None:
        return f"{elapsed_s:.0f} s: no batch yet"
    if most["replayed"]:
        return f"{elapsed_s:.0f} s: {most['replayed']} steps without input"
    return f"{elapsed_s:.0f} s: {most['observed']} steps observed"


def _read(folder: Path, kind: str) -> list[dict[str, Any]]:
    return [json.loads(text) for text in _texts(folder, kind)]


def _texts(folder: Path, kind: str) -> Iterator[str]:
    for path in sorted(folder.glob(f"*.{kind}")):
        yield path.read_text()


def _end_all(script: subprocess.Popen[bytes]) -> None:
    """Kills all descendants of this process: the script and everything that it started."""
    for _ in range(20):
        found = _descendants(os.getpid())
        for pid in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        script.poll()
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        if not found:
            return
        time.sleep(0.05)


def _descendants(root: int) -> list[int]:
    children: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            fields = path.read_text().rpartition(")")[2].split()
            if fields[0] != "Z":
                children.setdefault(int(fields[1]), []).append(int(path.parent.name))
    found, queue = [], [root]
    while queue:
        below = children.get(queue.pop(), [])
        found += below
        queue += below
    return found
