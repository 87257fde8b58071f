"""The provider that starts feeders as plain processes on this machine, as a client of the feeder host (`feeder.host`).

The host may be restarted at any time, and its feeders end with it. A restart of the supervisor does not affect the
feeders. Only the supervisor's main thread calls this module.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import socket
import time
from collections.abc import Mapping, Sequence
from typing import Any

from dataloaderjob.core import sockets
from dataloaderjob.core.errors import InputError, ProtocolError, ServiceError, first_line
from dataloaderjob.core.settings import SupervisorSettings
from dataloaderjob.core.supervision import Cause, ended_text, index_of, name_of
from dataloaderjob.providers.provider import Why, feeder_settings

log = logging.getLogger(__name__)

FIRST_LOOK_S = 0.005
LAST_LOOK_S = 0.1
ANSWER_TIMEOUT_S = 30.0
GONE_TIMEOUT_S = 5.0
"""Maximum wait in seconds for the host's answer to a kill or a list. A long wait would be useless, because a host that
has ended took its feeders with it."""


class LocalProvider:
    """The client of the feeder host on this machine."""

    explain_after_s = 0.05

    def __init__(self, settings: SupervisorSettings) -> None:
        """Raises InputError if the settings lack the path of the host's socket."""
        if settings.host_socket is None:
            raise InputError("the local provider needs host_socket, the path of the feeder host's socket")
        self._settings, self._path = settings, settings.host_socket
        self._sock: socket.socket | None = None
        self.session = ""
        """Empty, because feeders of this machine are never guests."""
        self.in_force: dict[str, Any] = {}

    def connect(self) -> None:
        """Waits for the host, which imports torch first. Raises ServiceError if the host does not come up."""
        deadline = time.monotonic() + self._settings.init_timeout_s
        self._ask({"type": "list"}, deadline)

    def found(self) -> list[int]:
        return sorted(
            index for feeder in self._list() if feeder["code"] is None
            if (index := index_of(str(feeder["name"]))) is not None
        )  # fmt: skip

    def place(self, index: int, num_feeders: int, own_key: str) -> None:
        made = feeder_settings(self._settings, index, num_feeders, self.session, own_key)
        self._ask({"type": "start", "settings": dataclasses.asdict(made)})

    def kill(self, index: int) -> None:
        try:
            self._ask({"type": "kill", "name": name_of(index)}, time.monotonic() + GONE_TIMEOUT_S)
        except ServiceError as exc:
            log.warning("%s could not be killed: %s", name_of(index), exc)

    def late(self, indices: Sequence[int], *, taken: int, now: float) -> list[Why]:  # noqa: ARG002  room is no limit
        feeders = {str(feeder["name"]): feeder for feeder in self._list()}
        return [_why(index, feeders.get(name_of(index))) for index in indices]

    def out_of_memory(self) -> Mapping[str, str]:
        """Returns an empty mapping. `late` reports the feeders that the kernel killed for lack of memory."""
        return {}

    def _list(self) -> list[dict[str, Any]]:
        feeders = self._ask({"type": "list"}, time.monotonic() + GONE_TIMEOUT_S).get("feeders", [])
        return [feeder for feeder in feeders if isinstance(feeder, dict) and {"name", "code"} <= set(feeder)]

    def _ask(self, message: dict[str, Any], deadline: float | None = None) -> dict[str, Any]:
        """Sends one request and returns the answer. If the host has ended, retries until `deadline`, because the host
        may be restarted. Raises ServiceError."""
        if deadline is None:
            deadline = time.monotonic() + ANSWER_TIMEOUT_S
        look_s = FIRST_LOOK_S
        while True:
            try:
                answer = self._ask_once(message, deadline)
                break
            except (OSError, ProtocolError) as exc:
                self._hang_up()
                if time.monotonic() + look_s > deadline:
                    raise ServiceError(
                        f"the feeder host at {self._path} does not answer: {first_line(exc)}"
                    ) from exc
            time.sleep(look_s)
            look_s = min(2 * look_s, LAST_LOOK_S)
        if answer.get("type") == "error":
            raise ServiceError(f"the feeder host refused {message['type']!r}: {answer.get('message')}")
        return answer

    def _ask_once(self, message: dict[str, Any], deadline: float) -> dict[str, Any]:
        """Sends one request and returns the answer. Raises OSError, ProtocolError."""
        if self._sock is None:
            self._sock = _dial(self._path)
        self._sock.settimeout(max(0.01, deadline - time.monotonic()))
        sockets.send_message(self._sock, message)
        return sockets.recv_message(self._sock)

    def _hang_up(self) -> None:
        if self._sock is not None:
            self._sock.close()
            self._sock = None


def _dial(path: str) -> socket.socket:
    """Connects to the host. Raises OSError. Raises ProtocolError if another user runs the host, because that user would
    learn where the job's key is."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        sock.connect(path)
        if (uid := sockets.peer_uid(sock)) != os.getuid():
            raise ProtocolError(
                f"the host at {path} must belong to user {os.getuid()}, but belongs to user {uid}"
            )
    except BaseException:
        sock.close()
        raise
    return sock


def _why(index: int, feeder: dict[str, Any] | None) -> Why:
    if feeder is None:
        return Why(index, Cause.LOST, "the feeder host was restarted without this feeder", dead=True)
    code = feeder["code"]
    if code is None:
        return Why(index, Cause.STARTS, "its process is running, but has not reported yet")
    words, memory = str(feeder.get("words") or "").strip(), str(feeder.get("memory") or "")
    cause = Cause.OUT_OF_MEMORY if memory else Cause.FAILS
    return Why(index, cause, ended_text(int(code), words, memory), dead=True)
