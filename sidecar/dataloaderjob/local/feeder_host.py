"""How the feeder host of one machine is started, and with which environment.

The private service starts it before anything else, so nothing is imported here that this can do without.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping

from dataloaderjob.core.places import HOST_NAME, PATH_VARIABLE, RUN_VARIABLE

HOST_MODULE = "dataloaderjob.feeder.host"
RANK_VARIABLES = ("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK")
"""Variables of the rank that started the service: feeders serve all ranks."""


def environments(env: Mapping[str, str]) -> tuple[dict[str, str], dict[str, str]]:
    """Environments for sidecar and supervisor, and for feeders, which import what the trainer can import."""
    own = {
        k: v
        for k, v in env.items()
        if k not in RANK_VARIABLES and not k.startswith(("DATALOADERJOB_", "RAY_"))
    }
    feeders = {**own, "PYTHONHASHSEED": own.get("PYTHONHASHSEED") or "0"}  # sets iterate alike in all of them
    if path := env.get(PATH_VARIABLE):
        feeders["PYTHONPATH"] = path
    return own, feeders


def host_command(path: str) -> list[str]:
    return [sys.executable, "-P", "-m", HOST_MODULE, "--listen", path, "--parent", str(os.getpid())]


def start_host(folder: str) -> tuple[int, int, int]:
    """Its pid, and the reading ends of its output and errors. It leads a process group of its own."""
    env = {**environments(os.environ)[1], RUN_VARIABLE: os.environ[RUN_VARIABLE]}
    (out, out_writer), (err, err_writer) = os.pipe2(os.O_CLOEXEC), os.pipe2(os.O_CLOEXEC)
    actions = [
        (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
        (os.POSIX_SPAWN_DUP2, out_writer, 1),
        (os.POSIX_SPAWN_DUP2, err_writer, 2),
    ]
    try:
        pid = os.posix_spawn(
            sys.executable, host_command(f"{folder}/{HOST_NAME}"), env, file_actions=actions, setpgroup=0
        )
    finally:
        os.close(out_writer)
        os.close(err_writer)
    return pid, out, err
