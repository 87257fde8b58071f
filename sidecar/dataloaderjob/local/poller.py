"""Asks sidecar and supervisor how they are, in a thread: neither may hold up signals and deadlines."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from dataloaderjob.core import ipc, sockets
from dataloaderjob.core.errors import ProtocolError

TIMEOUT_S = 3.0
QUICK_S = 0.2
"""Pause between two questions while feeders are awaited."""
SLOW_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """What both said last. Empty where one does not answer."""

    at: float = 0.0
    """time.monotonic()."""
    sidecar: dict[str, Any] = field(default_factory=dict)
    supervisor: dict[str, Any] = field(default_factory=dict)

    @property
    def ready(self) -> int:
        """Feeders that serve."""
        return int(self.supervisor.get("ready", 0))

    @property
    def desired(self) -> int | None:
        desired = self.supervisor.get("desired")
        return None if desired is None else int(desired)

    @property
    def notes(self) -> list[str]:
        return [str(note) for note in self.supervisor.get("notes", ())]


class Poller:
    """`snapshot` is replaced whole; `changed` is called in the thread."""

    def __init__(self, path: str, *, port: int, key: bytes, job: str, changed: Callable[[], None]) -> None:
        self.snapshot = Snapshot()
        self._path, self._port, self._key, self._job = path, port, key, job
        self._changed = changed
        self._control: socket.socket | None = None
        self._stop = threading.Event()
        self._pause = threading.Event()
        """Set to ask at once."""
        self._wanted = self._asked = 0
        self._thread = threading.Thread(target=self._run, name="dlj-poll", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """The thread ends within TIMEOUT_S; nobody waits for it."""
        self._stop.set()
        self._pause.set()

    def raise_to(self, feeders: int) -> None:
        """Has the supervisor keep at least so many feeders, as soon as it answers."""
        self._wanted = max(self._wanted, feeders)
        self._pause.set()

    def _run(self) -> None:
        while not self._stop.is_set():
            self.snapshot = Snapshot(
                at=time.monotonic(),
                sidecar=sidecar_status(self._path) or {},
                supervisor=self._ask_supervisor(),
            )
            self._changed()
            settled = self.snapshot.desired is not None and self.snapshot.ready == self.snapshot.desired
            self._pause.wait(SLOW_S if settled else QUICK_S)
            self._pause.clear()

    def _ask_supervisor(self) -> dict[str, Any]:
        try:
            if self._control is None:
                self._control = self._connect()
            status = self._ask(self._control, {"type": "status"})
            wanted = self._wanted
            if wanted > self._asked:  # once: a later `scale` of the user's is the newer word
                if wanted > int(status.get("desired", 0)):
                    self._ask(self._control, {"type": "scale", "feeders": wanted})
                self._asked = wanted
            return status
        except (OSError, ProtocolError):
            if self._control is not None:
                self._control.close()
                self._control = None
            return {}

    def _ask(self, sock: socket.socket, message: dict[str, Any]) -> dict[str, Any]:
        sockets.send_message(sock, message)
        return sockets.recv_message(sock)

    def _connect(self) -> socket.socket:
        sock = socket.create_connection(("127.0.0.1", self._port), timeout=TIMEOUT_S)
        try:
            sockets.greet(sock, self._key, role="control", name="local", job=self._job)
        except BaseException:
            sock.close()
            raise
        sock.settimeout(TIMEOUT_S)
        return sock


def sidecar_status(path: str) -> dict[str, Any] | None:
    """What the sidecar at this socket says of itself; None if none answers."""
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC) as sock:
            sock.settimeout(TIMEOUT_S)
            sock.connect(path)
            for packet in ipc.pack_json(ipc.Type.STATUS, {}):
                sock.send(packet)
            assembler = ipc.Assembler()
            while True:
                data, _ = ipc.recv_with_fds(sock)
                if not data:
                    return None
                if (packet_ := assembler.feed(data)) is not None:
                    return ipc.parse_json(packet_.payload)
    except (OSError, ProtocolError):
        return None
