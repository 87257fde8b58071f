"""The queue of packets to a trainer: answers, regions, notes and snapshots."""

from __future__ import annotations

import os
import socket
from collections import deque
from collections.abc import Callable

from dataloaderjob.core import ipc

MAX_NOTES = 64
"""Maximum number of notes that wait for the trainer; later ones are dropped."""


class TrainerQueue:
    """Packets that the trainer's socket has not accepted yet.

    A trainer may not read for a while. Meanwhile, the queue keeps at most MAX_NOTES notes, and the newest snapshot of
    each slot. They are packed only when everything before them has been sent.
    """

    def __init__(self, trainer: socket.socket, on_sent: Callable[[], None]) -> None:
        """`on_sent` is called after each packet that the socket accepts."""
        self._trainer, self._on_sent = trainer, on_sent
        self._packets: deque[tuple[bytes, int | None]] = deque()
        self._notes: deque[str] = deque()
        self._snapshots: dict[tuple[int, int], bytes] = {}
        """(stream, slot) -> the slot's newest snapshot."""

    @property
    def notes(self) -> int:
        """Number of notes that have not been packed."""
        return len(self._notes)

    def add(self, packets: list[bytes], fd: int | None = None) -> None:
        """Queues packets, each with a duplicate of `fd`: the caller may close its own before the trainer reads."""
        self._packets += [(p, None if fd is None else os.dup(fd)) for p in packets]

    def add_note(self, text: str) -> None:
        if len(self._notes) < MAX_NOTES:
            self._notes.append(text)

    def add_snapshot(self, stream: int, slot: int, payload: bytes) -> None:
        self._snapshots[stream, slot] = payload

    def send(self) -> bool:
        """Sends queued packets until the socket accepts no more. Returns True if nothing is left. Raises OSError if
        the trainer is gone."""
        while self._packets or self._pack_next():
            data, fd = self._packets[0]
            try:
                if fd is None:
                    self._trainer.send(data)
                else:
                    socket.send_fds(self._trainer, [data], [fd])
                    os.close(fd)
            except BlockingIOError:
                return False
            self._packets.popleft()
            self._on_sent()
        return True

    def _pack_next(self) -> bool:
        if self._notes:
            packed = ipc.pack_json(ipc.Type.NOTE, {"text": self._notes.popleft()})
        elif self._snapshots:
            (stream, slot), payload = next(iter(self._snapshots.items()))
            del self._snapshots[stream, slot]
            packed = ipc.pack(ipc.Type.SNAPSHOT, payload, stream=stream)
        else:
            return False
        self._packets += ((p, None) for p in packed)
        return True
