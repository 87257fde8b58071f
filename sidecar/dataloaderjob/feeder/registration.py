"""A feeder's connection to its supervisor: reports the server, for ever, with back-off."""

from __future__ import annotations

import logging
import math
import os
import random
import socket
import threading
import time
from typing import TYPE_CHECKING

from dataloaderjob.core import sockets
from dataloaderjob.core.backoff import Backoff
from dataloaderjob.core.errors import ProtocolError
from dataloaderjob.core.settings import FeederSettings, read_key
from dataloaderjob.feeder import supervisor_client

if TYPE_CHECKING:
    from dataloaderjob.feeder.server import FeederServer

log = logging.getLogger(__name__)

BACKOFF = Backoff(0.1, 2.0)
TELL_AFTER_S = 3.0
DRAIN_POLL_S = 0.05

_jitter = random.Random()  # noqa: S311  jitter
"""Never the module's own generator: user code in the build thread is seeded through that one."""


class Registration:
    """Runs in a thread of its own until the process ends."""

    def __init__(self, settings: FeederSettings, server: FeederServer, *, host: str) -> None:
        self._settings, self._server = settings, server
        self._key = read_key(settings.key_path)
        self._ready = {
            "type": "ready",
            "host": host,
            "port": server.port,
            "instance": server.instance,
            "pid": os.getpid(),
            "node": settings.node,
            "session": settings.session,
        }

    def start(self) -> None:
        threading.Thread(target=self._forever, name="dlj-registration", daemon=True).start()

    def _forever(self) -> None:
        failures = 0
        told, lost = "", -math.inf
        while True:
            since = time.monotonic()
            try:
                with supervisor_client.connect(self._settings, self._key, "feeder") as sock:
                    sockets.send_message(sock, self._ready)
                    told, lost = "", math.inf
                    self._listen(sock)
            except (OSError, ProtocolError) as exc:
                lost = min(lost, time.monotonic())
                # At the end of a run the supervisor goes first.
                if str(exc) != told and time.monotonic() - lost >= TELL_AFTER_S:
                    told = str(exc)
                    log.warning("%s has no supervisor, trying again: %s", self._settings.name, exc)
            was_up = time.monotonic() - since > BACKOFF.last_s  # it was a connection for a while
            failures = 1 if was_up else failures + 1
            time.sleep(BACKOFF.wait_s(failures) * _jitter.uniform(0.5, 1.0))

    def _listen(self, sock: socket.socket) -> None:
        """Until the connection ends, which raises ConnectionError."""
        while True:
            if sockets.recv_message(sock).get("type") == "drain":
                while not self._server.idle:
                    time.sleep(DRAIN_POLL_S)
                sockets.send_message(sock, {"type": "drained"})
