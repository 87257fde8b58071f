"""Runs ordinary scripts under torch's DataLoader or under ours: `python parity_server.py torch|ours`.

One process imports torch and forks a child for each script, which spares each its import. In the child the script
finds what a fresh interpreter would give it: `__main__`, sys.argv, sys.path, the folder, the end by the interpreter.
Jobs come as one JSON document on stdin, results go out as lines of JSON on stdout, in the order in which scripts end.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib.machinery
import json
import os
import random
import runpy
import select
import signal
import sys
import time
import types
from typing import Any

import numpy as np
import torch
import torch.utils.data.dataloader

PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """No script outlives the tests, however they end."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def serve(jobs: list[dict[str, Any]], width: int) -> dict[str, Any] | None:
    """Forks a child for each job, `width` at a time; returns None in the parent at the end, the job in a child."""
    waiting = list(reversed(jobs))
    running: dict[int, tuple[int, float, dict[str, Any]]] = {}  # by pidfd
    while waiting or running:
        while waiting and len(running) < width:
            job = waiting.pop()
            pid = os.fork()
            if pid == 0:
                for pidfd in running:
                    os.close(pidfd)
                return job
            running[os.pidfd_open(pid)] = (pid, time.monotonic(), job)
        deadline = min(started + job["timeout_s"] for _, started, job in running.values())
        ended, _, _ = select.select(list(running), [], [], max(0.0, deadline - time.monotonic()))
        for pidfd, (pid, started, job) in list(running.items()):
            seconds = time.monotonic() - started
            late = seconds > job["timeout_s"]
            if pidfd in ended or late:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(pid, signal.SIGKILL)  # also what an ended script left behind
                status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                result = {"name": job["name"], "status": status, "timed_out": late, "seconds": seconds}
                sys.stdout.write(json.dumps(result) + "\n")
                sys.stdout.flush()
                os.close(pidfd)
                del running[pidfd]
    return None


def become(job: dict[str, Any]) -> types.ModuleType:
    """Makes this process the one that the shell would have started; returns its empty `__main__`."""
    die_with_parent()
    os.setsid()
    for descriptor, path in enumerate((job["stdin"], job["stdout"], job["stderr"])):
        opened = os.open(
            path, (os.O_RDONLY if descriptor == 0 else os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 0o600
        )
        os.dup2(opened, descriptor)
        os.close(opened)
    sys.stdin = os.fdopen(0, closefd=False)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    os.chdir(job["folder"])
    os.environ.update(job["env"])
    for name in job["unset"]:
        os.environ.pop(name, None)
    sys.argv[:] = job["argv"]
    sys.path[:0] = job["path"]
    random.seed()
    np.random.seed()
    module = types.ModuleType("__main__")
    sys.modules["__main__"] = module
    return module


def run(job: dict[str, Any], module: types.ModuleType) -> None:
    """The script itself; what it raises ends this process as it would end an interpreter."""
    if job["module"]:
        runpy._run_module_as_main(job["module"], alter_argv=True)  # type: ignore[attr-defined]
        return
    path = job["argv"][0]
    if path == "-":
        code = compile(sys.stdin.read(), "<stdin>", "exec")
    else:
        module.__file__ = path
        module.__loader__ = importlib.machinery.SourceFileLoader("__main__", path)
        with open(path, "rb") as file:
            code = compile(file.read(), path, "exec")
    exec(code, module.__dict__)


def put_ours_in_place() -> None:
    """As if the script's `from torch.utils.data import DataLoader` were `from dataloaderjob import DataLoader`."""
    from dataloaderjob import DataLoader

    torch.utils.data.DataLoader = DataLoader
    torch.utils.data.dataloader.DataLoader = DataLoader


if __name__ == "__main__":
    die_with_parent()
    _told = json.load(sys.stdin)
    del sys.path[0]  # that of this file
    if sys.argv[1] == "ours":
        put_ours_in_place()
    gc.freeze()
    _job = serve(_told["jobs"], _told["width"])
    if _job is not None:
        _server = sys.modules["__main__"]  # kept: it has this very code
        _module = become(_job)
        if _job["allow_pickle"]:
            torch.utils.data.DataLoader.__init__.__kwdefaults__["allow_pickle"] = True
        run(_job, _module)
