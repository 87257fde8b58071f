"""The supervisor's agent in Ray's container of the head's pod. The supervisor's own container has neither Ray nor its
token.

    python -m dataloaderjob.providers.ray.agent --settings FILE.json

This process is the job's Ray driver. It has Ray's token and, on an existing Ray cluster, the feeders' key. It does not
have the job's key, because anyone who holds the token can take over this process: Ray's client loads pickles from
others. It answers the messages of `providers.link`, for one supervisor at a time. If Ray does not come up or ends, this
process exits with EXIT_RAY_LATE or EXIT_RAY_LOST, and its parent restarts it.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import socket
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from dataloaderjob.core.errors import (
    DataLoaderJobError,
    InputError,
    ProtocolError,
    RemoteProtocolError,
    ServiceError,
)
from dataloaderjob.core.logs import log_lines
from dataloaderjob.core.processes import exit_now, leave_on_signals
from dataloaderjob.core.settings import SupervisorSettings, load
from dataloaderjob.core.sockets import recv_exactly
from dataloaderjob.core.supervision import EXIT_RAY_LOST
from dataloaderjob.providers import link
from dataloaderjob.providers.provider import Provider

log = logging.getLogger(__name__)

EXIT_FAILED = 1
REST_S = 10.0
"""Maximum wait in seconds for the rest of a request, and for a supervisor to read an answer."""


def listen(path: Path) -> socket.socket:
    """Listens at a path, after removing an earlier process's socket. Processes of the folder's group may connect.
    Raises OSError."""
    with contextlib.suppress(FileNotFoundError):
        path.unlink()
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    listener.bind(str(path))
    path.chmod(0o660)
    listener.listen(1)
    return listener


def serve(provider: Provider, listener: socket.socket) -> None:
    """Serves one supervisor after another, forever."""
    while True:
        sock, _ = listener.accept()
        with sock:
            log.info("a supervisor has connected")
            try:
                serve_one(provider, sock)
            except (OSError, ProtocolError) as exc:
                log.info("the supervisor's connection has ended: %s", exc)


def serve_one(provider: Provider, sock: socket.socket) -> None:
    """Answers requests until the connection ends. Raises OSError, ProtocolError."""
    while True:
        sock.settimeout(None)
        head = sock.recv(1)
        if not head:
            raise ConnectionError("it was closed")
        sock.settimeout(REST_S)
        head += recv_exactly(sock, link.LENGTH.size - len(head))
        request = link.parse(recv_exactly(sock, link.length(head)))
        for answer in answers(provider, request):
            sock.settimeout(REST_S)
            sock.sendall(link.pack(answer))


def answers(provider: Provider, request: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yields the parts of the answer to a request. Raises RemoteProtocolError if the request is invalid."""
    try:
        yield from _answers(provider, request)
    except ServiceError as exc:
        yield link.error(str(exc))


def _answers(provider: Provider, request: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    match request.get("ask"):
        case "hello":
            yield link.hello(provider.session, provider.in_force)
        case "found":
            yield {"found": provider.found()}
        case "place":
            index = link.requested_index(request)
            provider.place(index, link.requested_feeders(request, "feeders"), link.requested_key(request))
            yield {"done": True}
        case "kill":
            provider.kill(link.requested_index(request))
            yield {"done": True}
        case "late":
            indices, taken = link.requested_indices(request), link.requested_feeders(request, "taken")
            yield from link.late_parts(provider.late(indices, taken=taken, now=time.monotonic()))
        case "memory":
            yield from link.memory_parts(provider.out_of_memory())
        case other:
            raise RemoteProtocolError(f"expected a request of `providers.link`, got {other!r}")


def main() -> int:
    from dataloaderjob.providers.ray.placement import RayProvider

    parser = argparse.ArgumentParser(description="serves Ray to a supervisor in another container")
    parser.add_argument("--settings", type=Path, required=True, help="JSON file of SupervisorSettings")
    log_lines("ray: %(levelname)s %(message)s")
    try:
        settings = load(SupervisorSettings, parser.parse_args().settings)
        if settings.provider_socket is None:
            raise InputError("the settings must contain provider_socket, the path to listen on, but do not")
        provider = RayProvider(settings)
        provider.connect()
        leave_on_signals()  # again, because ray.init sets its own handlers
        serve(provider, listen(Path(settings.provider_socket)))
    except ServiceError as exc:
        log.error("%s", exc)
        return EXIT_RAY_LOST
    except (DataLoaderJobError, OSError) as exc:
        log.error("%s", exc)
    return EXIT_FAILED


if __name__ == "__main__":
    leave_on_signals()
    exit_now(main())
