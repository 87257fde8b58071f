"""What another user of this machine does: a function in a child process with the uid of `nobody`."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable

import pytest

OTHER_UID = 65534

needs_root = pytest.mark.skipif(
    os.getuid() != 0, reason="only root can act as another user of this machine: run these tests as root"
)


def as_other(act: Callable[[], object]) -> None:
    """Runs `act` as another user, to its end."""
    assert os.waitpid(start_as_other(act), 0)[1] == 0


def start_as_other(act: Callable[[], object]) -> int:
    """Pid of a child that runs `act` as another user."""
    pid = os.fork()
    if pid:
        return pid
    try:
        os.setgroups([])
        os.setresgid(OTHER_UID, OTHER_UID, OTHER_UID)
        os.setresuid(OTHER_UID, OTHER_UID, OTHER_UID)
        act()
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)
