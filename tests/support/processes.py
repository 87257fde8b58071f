"""What the kernel says about processes, and scripts run as trainers of their own."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from warm import WarmProcess


class Usage(NamedTuple):
    """Of one process."""

    private_kb: int
    """Memory of its own: neither shared memory nor files that others map."""
    fds: int
    threads: int


def rollup(pid: int) -> dict[str, int]:
    """/proc/PID/smaps_rollup, in KiB."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
    return {line.split(":")[0]: int(line.split()[1]) for line in lines}


def usage(pid: int) -> Usage:
    return Usage(
        rollup(pid)["Pss_Anon"], len(os.listdir(f"/proc/{pid}/fd")), len(os.listdir(f"/proc/{pid}/task"))
    )


def beside_shared_memory_kb(pid: int) -> int:
    """Proportional share of all that a process has in memory but shared memory, such as pools."""
    found = rollup(pid)
    return found["Pss"] - found["Pss_Shmem"]


def shared_memory_kb(*pids: int) -> int:
    """Shared memory that these processes have between them."""
    return sum(rollup(pid)["Pss_Shmem"] for pid in pids)


def children(pid: int) -> list[int]:
    return [
        int(p)
        for task in Path(f"/proc/{pid}/task").iterdir()
        for p in (task / "children").read_text().split()
    ]


def open_files() -> list[str]:
    """What this process's descriptors refer to."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # that of the listing itself
            found.append(os.readlink(f"/proc/self/fd/{name}"))
    return sorted(found)


def alive(pid: int) -> bool:
    """Whether the process runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@contextmanager
def script(
    text: str, *arguments: object, env: dict[str, str] | None = None, cold: bool = False
) -> Iterator[subprocess.Popen[str]]:
    """A Python process that runs `text`, with pipes for stdin, stdout and stderr; killed at the end.

    `cold`: else it has torch, and shares memory with other such processes.
    """
    path = os.pathsep.join(p for p in sys.path if p)
    command = ["-c", textwrap.dedent(text), *map(str, arguments)]
    start = subprocess.Popen if cold else WarmProcess
    process = start(
        [sys.executable, *command] if cold else command,
        env={**os.environ, "PYTHONPATH": path, **(env or {})},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def line(process: subprocess.Popen[str]) -> str:
    """The next line that a script prints; fails with its errors if it ended."""
    text = process.stdout.readline()
    assert text, f"the script ended with {process.wait()}: {process.stderr.read()[-4000:]}"
    return text.rstrip("\n")


def go_on(process: subprocess.Popen[str]) -> None:
    """Answers an `input()` of the script."""
    process.stdin.write("\n")
    process.stdin.flush()


def in_child(what: Callable[[], str]) -> str:
    """Runs `what` in a forked child; returns what it returned, or the error it raised."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.close(reader)
            try:
                text = what()
            except BaseException as exc:
                text = f"{type(exc).__name__}: {exc}"
            with os.fdopen(writer, "w") as out:
                out.write(text)
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as told:
        text = told.read()
    os.waitpid(pid, 0)
    return text
