"""A test that ran out of time shows where the processes forked from it are.

Workers of torch are such processes. Without their stacks, a test that waits for them shows only that it waits.
"""

from __future__ import annotations

import faulthandler
import signal
import tempfile
import time
from collections.abc import Iterator
from typing import IO

import psutil
import pytest

DUMPS = signal.SIGRTMAX
"""The signal on which a process writes its stacks. Forked processes inherit the handler. Processes of other programs
would be ended by the signal, so `forked` leaves them out."""
WRITTEN_S = 1.0
_stacks: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115  open as long as the process
faulthandler.register(DUMPS, file=_stacks)


def forked() -> list[psutil.Process]:
    """Returns the children that run this process's program, without a program of their own."""
    mine = psutil.Process()
    found = []
    for child in mine.children(recursive=True):
        try:
            if child.exe() == mine.exe() and child.cmdline() == mine.cmdline():
                found.append(child)
        except psutil.Error:
            continue
    return found


def stacks_of_forked() -> str:
    """Returns the Python stacks of all threads of the forked processes."""
    told = []
    for child in forked():
        begin = _stacks.seek(0, 2)
        child.send_signal(DUMPS)
        time.sleep(WRITTEN_S)
        _stacks.seek(begin)
        told.append(f"process {child.pid} ({child.status()}):\n{_stacks.read().decode(errors='replace')}")
    return "\n".join(told)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    report = yield
    if call.excinfo is not None and "from pytest-timeout" in str(call.excinfo.value):
        report.sections.append(("stacks of forked processes", stacks_of_forked()))
    return report
