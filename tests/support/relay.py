"""A relay of TCP links that cuts them within bodies, or damages a body, between feeders and the sidecar of a `Rig`."""

from __future__ import annotations

import contextlib
import random
import socket
import threading
import time
from typing import Any

from rig import Rig

from dataloaderjob.core import frames, sockets
from dataloaderjob.core.frames import FROM_FEEDER, HEADER_NBYTES, FrameKind
from dataloaderjob.core.seals import MAC_NBYTES, SEAL_NBYTES

PIECE_NBYTES = 1 << 16


class Relay:
    """Hands links on to one feeder; ends each within a body while cuts are left, and flips a bit of some bodies."""

    def __init__(
        self, host: str, port: int, *, cuts: int = 0, flips: int = 0, seed: int = 0, nbytes_per_s: float = 0.0
    ) -> None:
        """`nbytes_per_s`: what comes through at most, in 20 pieces a second; 0: all."""
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = self.listener.getsockname()[1]
        self.cuts = 0
        """So far."""
        self.flips = 0
        """So far."""
        self.links = 0
        """So far."""
        self._most_flips = flips
        self._pause_s = 1 / 20 if nbytes_per_s else 0.0
        self._piece_nbytes = int(nbytes_per_s / 20) or PIECE_NBYTES
        self._feeder, self._most, self._chance = (host, port), cuts, random.Random(seed)
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self.listener.shutdown(socket.SHUT_RDWR)
        self.listener.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                receiver, _ = self.listener.accept()
                self.links += 1
                threading.Thread(target=self._link, args=(receiver,), daemon=True).start()

    def _link(self, receiver: socket.socket) -> None:
        with (
            receiver,
            contextlib.suppress(OSError, EOFError),
            socket.create_connection(self._feeder) as feeder,
        ):
            threading.Thread(target=_copy, args=(receiver, feeder), daemon=True).start()
            for _ in ("challenge", "confirmation"):
                length = sockets.recv_exactly(feeder, sockets.LENGTH.size)
                receiver.sendall(length + sockets.recv_exactly(feeder, *sockets.LENGTH.unpack(length)))
            while self._frame(feeder, receiver):
                pass
            for sock in (feeder, receiver):
                sock.shutdown(socket.SHUT_RDWR)

    def _frame(self, feeder: socket.socket, receiver: socket.socket) -> bool:
        """Whether the link goes on after the next frame: one body in two comes in part."""
        raw = sockets.recv_exactly(feeder, HEADER_NBYTES + SEAL_NBYTES)
        header = frames.unpack_header(raw, FROM_FEEDER)
        receiver.sendall(raw)
        left = header.nbytes
        if left and header.kind != FrameKind.BODY:
            left += MAC_NBYTES
        cut = header.kind == FrameKind.BODY and self.cuts < self._most and self._chance.random() < 0.5
        if cut:
            self.cuts += 1
            left = self._chance.randrange(1, left)
        flip = header.kind == FrameKind.BODY and self.flips < self._most_flips and self._chance.random() < 0.5
        self.flips += flip
        while left:
            piece = sockets.recv_exactly(feeder, min(left, self._piece_nbytes))
            time.sleep(self._pause_s)
            if flip:
                bit = self._chance.randrange(8 * len(piece))
                piece = bytes([*piece[: bit // 8], piece[bit // 8] ^ 1 << bit % 8, *piece[bit // 8 + 1 :]])
                flip = False
            receiver.sendall(piece)
            left -= len(piece)
        return not cut


def _copy(source: socket.socket, target: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(PIECE_NBYTES):
            target.sendall(data)


class CutRig(Rig):
    """Its sidecar reaches the feeders by relays, which cut `cuts` bodies of each, and flip a bit in `flips`."""

    def __init__(
        self, feeders: int, *, cuts: int = 0, flips: int = 0, nbytes_per_s: float = 0.0, **sidecar: Any
    ) -> None:
        super().__init__(feeders, shares_memory=False, **sidecar)
        self.relays: dict[str, Relay] = {}
        self._troubles: dict[str, Any] = {"cuts": cuts, "flips": flips, "nbytes_per_s": nbytes_per_s}

    def __exit__(self, *exc: object) -> None:
        super().__exit__(*exc)
        for relay in self.relays.values():
            relay.close()

    def endpoints(self) -> list[tuple[Any, ...]]:
        return [
            (name, instance, "127.0.0.1", self._relay(instance, host, port).port)
            for name, instance, host, port in super().endpoints()
        ]

    def _relay(self, instance: str, host: str, port: int) -> Relay:
        if instance not in self.relays:
            self.relays[instance] = Relay(host, port, **self._troubles, seed=len(self.relays))
        return self.relays[instance]
