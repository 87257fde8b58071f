"""The provider that forwards requests to a provider in another process, over a Unix socket (`providers.link`).

In the head's pod, the supervisor and Ray run in separate containers. Anyone who holds Ray's token can run code in Ray's
container, so the job's key must not be in that container. This module needs neither Ray nor its token. Only the
supervisor's main thread calls this module.
"""

from __future__ import annotations

import logging
import select
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from dataloaderjob.core.errors import InputError, ProtocolError, ServiceError, first_line
from dataloaderjob.core.processes import exit_now
from dataloaderjob.core.settings import SupervisorSettings
from dataloaderjob.core.supervision import EXIT_RAY_LOST
from dataloaderjob.providers import link
from dataloaderjob.providers.provider import ProviderLost, Why

log = logging.getLogger(__name__)
T = TypeVar("T")

LOOK_S = 0.2
PROGRESS_S = 30.0
ANSWER_S = 60.0
"""Maximum wait in seconds for an answer. The wait is shorter if Ray's GCS disappears, because the other process then
ends after 5 s."""
POLLRDHUP = 0x2000
"""Linux's poll event for a peer that has closed its end. `select` has no name for it in Python 3.11."""


class RemoteProvider:
    """The provider that starts feeders through another process. If that process ends or breaks the protocol, this
    process also ends. The next supervisor adopts the remaining feeders."""

    explain_after_s = 5.0

    def __init__(
        self,
        settings: SupervisorSettings,
        *,
        answer_s: float = ANSWER_S,
        gone: Callable[[int], object] = exit_now,
    ) -> None:
        """`gone`: called by another thread, with an exit code, if the other process has ended. Raises InputError if the
        socket's path is not set."""
        if settings.provider_socket is None:
            raise InputError(
                "the settings must contain provider_socket, the path of the provider's socket, but do not"
            )
        self._path, self._wait_s = settings.provider_socket, settings.init_timeout_s
        self._answer_s, self._gone = answer_s, gone
        self._sock: socket.socket | None = None
        self.session = ""
        self.in_force: dict[str, Any] = {}

    def connect(self) -> None:
        """Waits for the other process, which connects to Ray first. Raises ProviderLost. Raises ServiceError if that
        process does not come up."""
        self._sock = self._dial()
        self.session, self.in_force = self._checked(lambda: link.read_hello(self._ask({"ask": "hello"})))
        threading.Thread(target=self._end_when_gone, args=(self._sock,), name="dlj-link", daemon=True).start()

    def found(self) -> list[int]:
        return self._checked(lambda: link.read_found(self._ask({"ask": "found"})))

    def place(self, index: int, num_feeders: int, own_key: str) -> None:
        request = {"ask": "place", "index": index, "feeders": num_feeders, "key": own_key}
        self._checked(lambda: link.read_done(self._ask(request)))

    def kill(self, index: int) -> None:
        try:
            self._checked(lambda: link.read_done(self._ask({"ask": "kill", "index": index})))
        except ServiceError as exc:
            log.warning("feeder-%d could not be killed: %s", index, exc)

    def late(self, indices: Sequence[int], *, taken: int, now: float) -> list[Why]:  # noqa: ARG002  its own clock counts
        reader = link.LateReader(indices)
        request = {"ask": "late", "indices": list(indices), "taken": taken}
        self._checked(lambda: self._parts(request, reader.add))
        return reader.found

    def out_of_memory(self) -> Mapping[str, str]:
        reader = link.MemoryReader()
        self._checked(lambda: self._parts({"ask": "memory"}, reader.add))
        return reader.found

    def _dial(self) -> socket.socket:
        began = time.monotonic()
        logged_s = PROGRESS_S
        while True:
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
            try:
                sock.settimeout(self._answer_s)
                sock.connect(self._path)
            except OSError as exc:
                sock.close()
                waited_s = time.monotonic() - began
                if waited_s > self._wait_s:
                    raise ServiceError(
                        f"Ray did not come up behind the socket {self._path} within "
                        f"{self._wait_s:.0f} s ({first_line(exc)}): see the log of Ray's container"
                    ) from exc
                if waited_s > logged_s:
                    log.info("waiting for Ray at the socket %s: %s", self._path, first_line(exc))
                    logged_s += PROGRESS_S
            else:
                return sock
            time.sleep(LOOK_S)

    def _checked(self, call: Callable[[], T]) -> T:
        """Returns the result of an exchange. Raises ProviderLost if the exchange fails halfway, because the next
        answers would belong to other requests."""
        try:
            return call()
        except (OSError, ProtocolError) as exc:
            raise ProviderLost(f"Ray's side of the socket {self._path} is lost: {first_line(exc)}") from exc

    def _ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        return self._exchange(request, time.monotonic() + self._answer_s)

    def _parts(self, request: Mapping[str, Any], add: Callable[[Mapping[str, Any]], bool]) -> None:
        deadline = time.monotonic() + self._answer_s
        more = add(self._exchange(request, deadline))
        while more:
            more = add(self._exchange(None, deadline))

    def _exchange(self, request: Mapping[str, Any] | None, deadline: float) -> dict[str, Any]:
        """Sends a request, if there is one, and returns the next answer. Raises OSError and ProtocolError. Raises
        ServiceError if the answer is an error."""
        if self._sock is None:
            raise ProviderLost("connect() must be called before any request")
        if request is not None:
            self._sock.settimeout(max(0.01, deadline - time.monotonic()))
            self._sock.sendall(link.pack(request))
        nbytes = link.length(_receive(self._sock, link.LENGTH.size, deadline))
        answer = link.parse(_receive(self._sock, nbytes, deadline))
        if (why := link.failure(answer)) is not None:
            raise ServiceError(why)
        return answer

    def _end_when_gone(self, sock: socket.socket) -> None:
        """Ends this process as soon as the other process closes the connection, even if no request is pending."""
        poll = select.poll()
        poll.register(sock, POLLRDHUP)
        poll.poll()
        log.error("Ray's side of the socket %s is gone", self._path)
        self._gone(EXIT_RAY_LOST)


def _receive(sock: socket.socket, nbytes: int, deadline: float) -> bytes:
    """Receives `nbytes` bytes. The deadline also applies to bytes that arrive slowly. Raises OSError."""
    data = bytearray()
    while len(data) < nbytes:
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            raise TimeoutError("it did not answer in time")
        sock.settimeout(left_s)
        got = sock.recv(min(nbytes - len(data), 1 << 16))
        if not got:
            raise ConnectionError("it closed the connection")
        data += got
    return bytes(data)
