"""The process of a feeder: it creates the server, registers it with the supervisor, and runs it."""

from __future__ import annotations

import json
import logging
import os
import socket
from typing import Any, NoReturn

from dataloaderjob.core.errors import DataLoaderJobError, ServiceError
from dataloaderjob.core.logs import log_lines
from dataloaderjob.core.processes import SEE_OUTPUT, allow_all_files, end_as
from dataloaderjob.core.settings import FeederSettings
from dataloaderjob.feeder.connections import Registration
from dataloaderjob.feeder.server import FeederServer

log = logging.getLogger(__name__)

EXIT_FAILED = 1


def _facts(requests: socket.socket) -> dict[str, Any]:
    """Waits until the zygote is ready, and returns its facts. Raises ServiceError if it is gone."""
    data = requests.recv(4096)
    if not data:
        raise ServiceError(f"the process that imports torch ended: {SEE_OUTPUT}")
    return dict(json.loads(data)["facts"])


def main(
    settings: FeederSettings, requests: socket.socket, ready_fd: int | None, *, relayed: bool
) -> NoReturn:
    """Runs a feeder's process, which the host forked. `ready_fd`: the file descriptor on which to report that the
    feeder serves."""
    log_lines("%(levelname)s %(message)s")
    end_as(lambda: _serve(settings, requests, ready_fd, relayed=relayed))


def _serve(settings: FeederSettings, requests: socket.socket, ready_fd: int | None, *, relayed: bool) -> int:
    allow_all_files()  # each of a builder's buffers needs a file descriptor
    try:
        server = FeederServer(settings, requests, _facts(requests), relayed=relayed)
        host, port = server.address
        if settings.supervisor_host is not None:
            server.registration = Registration(
                settings, host=host, port=port, instance=server.instance, link_key=server.link_key,
                idle=lambda: server.idle, tls=server.tls,
            )  # fmt: skip
            server.registration.start()
        if ready_fd is not None:
            ready = {"host": host, "port": port, "instance": server.instance, "pid": os.getpid()}
            os.write(ready_fd, json.dumps(ready).encode() + b"\n")
            os.close(ready_fd)
        server.run_forever()
    except (DataLoaderJobError, OSError) as exc:
        log.error("%s: %s", settings.name, exc)
        return EXIT_FAILED
    return 0
