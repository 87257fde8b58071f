"""A receiver reduced to its frames, and the datasets that tests of feeders use."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from patience import PATIENCE_S
from sealing import read_frame, sealed

from dataloaderjob.batches.decoding import Decoder
from dataloaderjob.core import digests, frames, handshake, sockets, ticket_codec
from dataloaderjob.core.blobs import BlobStore, Bundle
from dataloaderjob.core.frames import FROM_FEEDER, Flag, FrameKind
from dataloaderjob.shipping.bundles import make_bundle

PLENTY = 1 << 30


class Frame(NamedTuple):
    kind: FrameKind
    header: frames.Header
    payload: bytes

    def batch(self) -> Any:
        base = np.frombuffer(bytearray(self.payload), np.uint8)
        return Decoder(allow_pickle=True).decode(base)


class Receiver:
    """A blocking client of one feeder. Answers NEED_BUNDLE from its own bundles."""

    def __init__(
        self,
        port: int,
        key: bytes,
        *,
        host: str = "127.0.0.1",
        job: str = "job",
        timeout_s: float = PATIENCE_S,
        trainer: str = "",
    ):
        """`host`: also what `sockets.on_machine` says."""
        if host.startswith("\0"):
            self.sock = sockets.Connection(socket.AF_UNIX)
            self.sock.connect(host)
        else:
            self.sock = sockets.dial((host, port), 5)
        self.facts = handshake.greet(
            self.sock,
            key,
            role="receiver",
            name="test",
            job=job,
            facts={"trainer": trainer},
            versions=handshake.DATA,
        )
        self.sock.settimeout(timeout_s)
        self.bundles: dict[bytes, Bundle] = {}
        self.notes: list[str] = []
        self.alive = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.sock.close()

    def know(self, bundle: Bundle) -> bytes:
        self.bundles[bundle.id] = bundle
        return bundle.id

    def ticket(
        self,
        number: int,
        keys: list[Any],
        bundle: bytes,
        *,
        room: int = PLENTY,
        flags: int = 0,
        stream: int = 1,
        base_seed: int = 7,
        bare: bool = False,
    ) -> None:
        payload = ticket_codec.pack_ticket(base_seed, 0, keys, bare=bare)
        self.send(
            FrameKind.TICKET,
            payload,
            stream=stream,
            ticket=number,
            bundle=bundle,
            room=room,
            flags=flags,
        )

    def grant(self, number: int, *, stream: int = 1, room: int = PLENTY) -> None:
        self.send(FrameKind.GRANT, stream=stream, ticket=number, room=room)

    def cancel(self, number: int, *, stream: int = 1) -> None:
        self.send(FrameKind.CANCEL, stream=stream, ticket=number)

    def send(self, kind: FrameKind, payload: bytes = b"", **fields: Any) -> None:
        self.say(frames.pack_header(kind, nbytes=len(payload), **fields), payload)

    def say(self, header: bytes, payload: bytes = b"") -> None:
        """A frame, whatever its header says."""
        self.sock.sendall(sealed(self.sock.seals, header, payload))

    def read(self) -> Frame:
        """The next frame, as it is."""
        header, payload = read_frame(self.sock, FROM_FEEDER)
        return Frame(FrameKind(header.kind), header, payload)

    def next(self) -> Frame:
        """The next frame but NEED_BUNDLE, which is answered, NOTE, which is kept, and ALIVE, which is counted."""
        while True:
            frame = self.read()
            if frame.kind is FrameKind.NOTE:
                self.notes.append(frame.payload.decode())
            elif frame.kind is FrameKind.NEED_BUNDLE:
                self.send_bundle(frame.header.bundle)
            elif frame.kind is FrameKind.ALIVE:
                self.alive += 1
            else:
                return frame

    def send_bundle(self, bundle: bytes) -> None:
        self.send(FrameKind.BUNDLE, self.bundles[bundle].manifest(), bundle=bundle)

    def quiet(self, seconds: float = 0.3) -> bool:
        """Whether nothing comes for so long."""
        before = self.sock.gettimeout()
        self.sock.settimeout(seconds)
        try:
            return not self.sock.recv(1, socket.MSG_PEEK)
        except TimeoutError:
            return True
        finally:
            self.sock.settimeout(before)


def bundle_of(
    dataset: Any, folder: Path, *, collate_fn: Callable[[Any], Any] | None = None, **options: Any
) -> Bundle:
    worker_init_fn = options.pop("worker_init_fn", None)
    return make_bundle(
        dataset, collate_fn, worker_init_fn, store=BlobStore(folder), allow_pickle=False, **options
    )


def checksum_holds(frame: Frame) -> bool:
    return bool(frame.header.flags & Flag.CHECKSUM) and digests.intact(memoryview(frame.payload))


def wait_until(condition: Callable[[], Any], timeout_s: float, what: str = "") -> Any:
    """Polls until `condition` gives something true; fails with `what` after the deadline, or PATIENCE_S if that is
    more."""
    timeout_s = max(timeout_s, PATIENCE_S)
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        found = condition()
        if found:
            return found
        time.sleep(0.02)
    raise AssertionError(f"not within {timeout_s} s: {what or condition}")


class Squares:
    """Sample i is (i * i, who made it)."""

    def __init__(self, n: int = 1000, seconds: float = 0.0) -> None:
        self.n, self.seconds = n, seconds

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, i: int) -> torch.Tensor:
        if not 0 <= i < self.n:
            raise IndexError(f"index {i} of {self.n}")
        time.sleep(self.seconds)
        return torch.tensor(i * i)


class Large(Squares):
    """Sample i is `nbytes` bytes of value i."""

    def __init__(self, nbytes: int, n: int = 1000) -> None:
        super().__init__(n)
        self.nbytes = nbytes

    def __getitem__(self, i: int) -> torch.Tensor:
        return torch.full((self.nbytes,), i % 251, dtype=torch.uint8)


class Deadly(Squares):
    """Ends the process at one index."""

    def __getitem__(self, i: int) -> torch.Tensor:
        if i == 13:
            os._exit(0)
        return super().__getitem__(i)


class Gated(Squares):
    """Waits at an index until a file is there: tests decide how long a batch takes."""

    def __init__(self, gate: Path, at: int = 0) -> None:
        super().__init__()
        self.gate, self.at = gate, at

    def __getitem__(self, i: int) -> torch.Tensor:
        if i == self.at:
            wait_until(self.gate.exists, 20, f"the gate {self.gate}")
        return super().__getitem__(i)
