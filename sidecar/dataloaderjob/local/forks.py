"""The forking of the private service's processes, which then share the modules that the service has imported.

A new interpreter for each process would compete with the import of torch for CPU time. The first batch waits for that
import. The feeder host is forked before anything else, so this module imports only what it needs.
"""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from dataloaderjob.core.keep import keep_seconds
from dataloaderjob.core.places import (
    HOST_NAME,
    IMPORTED_NAME,
    IMPORTED_VARIABLE,
    PATH_VARIABLE,
    RUN_VARIABLE,
)

HOST_MODULE = "dataloaderjob.feeder.host"
PYTHON = (sys.executable, "-P", "-m")
"""The beginning of each of this package's commands. The module's name and its arguments follow."""
RANK_VARIABLES = ("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK")
"""Variables of the rank that started the service; they are removed, because feeders serve all ranks."""
Forked = tuple[int, int, int]
"""Pid of a child, and the read ends of the pipes from its stdout and stderr."""


def environments(env: Mapping[str, str]) -> tuple[dict[str, str], dict[str, str]]:
    """Returns two environments: one for the sidecar and the supervisor, and one for feeders, which can import the
    trainer's modules."""
    own = {
        k: v
        for k, v in env.items()
        if k not in RANK_VARIABLES and not k.startswith(("DATALOADERJOB_", "RAY_"))
    }
    feeders = {**own, "PYTHONHASHSEED": own.get("PYTHONHASHSEED") or "0"}  # all feeders order sets alike
    if path := env.get(PATH_VARIABLE):
        feeders["PYTHONPATH"] = path
    return own, feeders


def host_command(path: str) -> list[str]:
    return [*PYTHON, HOST_MODULE, "--listen", path, "--parent", str(os.getpid())]


def fork_host(folder: str) -> Forked:
    """Starts the feeder host of the private service in this folder."""
    env = {**environments(os.environ)[1], RUN_VARIABLE: os.environ[RUN_VARIABLE]}
    if keep_seconds():
        env[IMPORTED_VARIABLE] = f"{folder}/{IMPORTED_NAME}"
    return fork("host", host_command(f"{folder}/{HOST_NAME}"), env, _folder())


def _folder() -> str:
    """Returns the working folder, or the root folder if the working folder has been deleted."""
    try:
        return os.getcwd()
    except FileNotFoundError:
        return "/"


def fork(name: str, command: Sequence[str], env: Mapping[str, str], cwd: str | Path) -> Forked:
    """Runs one of this package's commands in a forked process with its own session, as in a new interpreter. `command`
    begins with PYTHON.

    The calling process must have no other thread, and must have been started with the PYTHONHASHSEED that its children
    need.
    """
    (out, out_writer), (err, err_writer) = os.pipe2(os.O_CLOEXEC), os.pipe2(os.O_CLOEXEC)
    sys.stdout.flush()
    try:
        pid = os.fork()
        if pid == 0:
            _become(name, command[len(PYTHON) :], env, cwd, (out_writer, err_writer))
    finally:
        os.close(out_writer)
        os.close(err_writer)
    return pid, out, err


def _become(
    name: str, words: Sequence[str], env: Mapping[str, str], cwd: str | Path, output: tuple[int, int]
) -> NoReturn:
    from dataloaderjob.core.processes import call_itself, close_all_but, default_signals, end_as

    def run() -> None:
        os.setsid()
        default_signals()
        call_itself(f"dlj-{name}")
        os.dup2(output[0], 1)
        os.dup2(output[1], 2)
        close_all_but(set())
        os.chdir(cwd)
        os.environ.clear()
        os.environ.update(env)
        path = [folder for folder in env.get("PYTHONPATH", "").split(os.pathsep) if folder]
        sys.path[:] = dict.fromkeys([*path, *sys.path])
        sys.argv[:] = words
        runpy.run_module(words[0], run_name="__main__", alter_sys=True)

    end_as(run)
