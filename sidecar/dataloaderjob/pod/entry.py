"""What both main processes do around their work: settings, signals, exit code, and the end of all they started.

PID 1 of the container hands signals on and reaps what is left to it; the real main process is its child. Ray's
processes lose their parents all the time, and reaping them in the process that has children of its own would take
the exit codes of those away.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Protocol, TypeVar

from dataloaderjob.core.errors import DataLoaderJobError
from dataloaderjob.core.settings import load
from dataloaderjob.pod.watch import Stopped, Watch

_HANDED_ON = (signal.SIGTERM, signal.SIGINT)
EXIT_BROKEN = 70


def run(main: Callable[[], int]) -> int:
    """The exit code of `main`, which runs in this process unless this is PID 1. Call it before any thread."""
    return reap(main) if os.getpid() == 1 else main()


def reap(main: Callable[[], int]) -> int:
    """Runs `main` in a child and reaps everything that ends meanwhile; returns as that child ends."""
    awaited = {*_HANDED_ON, signal.SIGCHLD}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, awaited)
    pid = os.fork()
    if pid == 0:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        _end_as(main)
    while True:
        number = signal.sigwait(awaited)
        if number == signal.SIGCHLD:
            code = _reap_all(pid)
            if code is not None:
                return code
        else:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)


def _reap_all(main: int) -> int | None:
    """Takes every zombie; the exit code of `main` if that is one of them."""
    found = None
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            if ended[0] == main:
                code = os.waitstatus_to_exitcode(ended[1])
                found = code if code >= 0 else 128 - code
    return found


def _end_as(main: Callable[[], int]) -> None:
    """Never returns: what the parent was about to do is not for the child."""
    code = EXIT_BROKEN
    try:
        code = main()
    except SystemExit as exc:
        code = exc.code if isinstance(exc.code, int) else EXIT_BROKEN
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


log = logging.getLogger(__name__)

EXIT_FAILED = 1
S = TypeVar("S")


class Part(Protocol):
    """A pod's work, in the main thread."""

    def run(self) -> None:
        """Serves for as long as it can. Raises ServiceError when it cannot go on, OSError, Stopped."""

    def close(self) -> None:
        """Ends everything that was started here."""


def serve(kind: type[S], make: Callable[[S, Watch], Part], *, name: str) -> int:
    """The exit code: 0 after SIGTERM, else EXIT_FAILED, which has the kubelet start the container anew."""
    parser = argparse.ArgumentParser(description=f"the main process of a pod: {name}")
    parser.add_argument("--settings", type=Path, required=True, help=f"JSON file of {kind.__name__}")
    path = parser.parse_args().settings
    logging.basicConfig(format=f"{name}: %(levelname)s %(message)s", level=logging.INFO)
    return run(lambda: _serve(kind, make, path))


def _serve(kind: type[S], make: Callable[[S, Watch], Part], path: Path) -> int:
    watch = Watch()
    try:
        part = make(load(kind, path), watch)
        try:
            part.run()
        finally:
            part.close()
    except Stopped:
        log.info("ended as asked")
        return 0
    except (DataLoaderJobError, OSError) as exc:
        log.error("%s", exc)
    return EXIT_FAILED
