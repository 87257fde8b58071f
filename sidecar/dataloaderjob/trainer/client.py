"""The trainer's connection to its sidecar: attach, tickets out, batches in, and back again after a crash.

One client for each trainer process and socket. No thread: everything happens inside `iter()` and `next()`.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import sys
import threading
import time
import weakref
from dataclasses import dataclass, field
from typing import Any

from dataloaderjob.core import control as ctl
from dataloaderjob.core import link, tickets
from dataloaderjob.core.control import Control
from dataloaderjob.core.errors import DeadlineExceeded, ServiceError, ServiceUnavailable
from dataloaderjob.trainer.ring import Ring, map_region

POLL_MS = 100
REATTACH_DEADLINE_S = 120.0
GRACE_S = 60.0
"""Beyond the job's deadline for a batch: then the sidecar itself is silent."""

_clients: weakref.WeakValueDictionary[str, Client] = weakref.WeakValueDictionary()
_clients_lock = threading.Lock()


@dataclass(slots=True, eq=False)
class Stream:
    """One live iterator as the client sees it."""

    id: int
    manifest: str
    window: int
    awaited: int = 0
    pending: dict[int, bytes] = field(default_factory=dict)
    """Tickets sent and not taken: what is sent again when a sidecar dies."""
    failures: dict[int, bytes] = field(default_factory=dict)
    unsent: list[tuple[int, bytes]] = field(default_factory=list)

    @property
    def together(self) -> int:
        """Tickets in one message: so few that feeders never run out of work for it."""
        return max(1, min(8, self.window // 4))


def connect(path: str, rank: str) -> Client:
    """This process's client of the sidecar at `path`; one for all loaders."""
    with _clients_lock:
        client = _clients.get(path)
        if client is None:
            client = Client(path, rank)
            _clients[path] = client
        return client


class Client:
    """A ring and its socket."""

    def __init__(self, path: str, rank: str) -> None:
        self.path, self.rank = path, rank
        self.settings: dict[str, Any] = {}
        self.streams: dict[int, Stream] = {}
        self.closed_streams: list[tuple[int, int]] = []
        """(stream, awaited) of iterators that were collected; finalizers append here."""
        self.dead: str | None = None
        self._last_stream = 0
        self._lock = threading.RLock()
        self._incoming = link.Assembler()
        self._sock, fds = self._attach(None, [])
        self._control_fd, self.wake_trainer, self.wake_receiver = fds
        self.control = Control(self._control_fd)
        if not self.control.valid:
            raise ServiceUnavailable(f"the sidecar at {path} sent control memory of another version")
        self.ring = Ring(self.control, self.wake_receiver)
        self._poll = select.poll()
        self._poll.register(self.wake_trainer, select.POLLIN)
        self._poll.register(self._sock, select.POLLIN)

    # Attaching

    def _attach(self, adopt: dict[str, Any] | None, fds: list[int]) -> tuple[socket.socket, list[int]]:
        """Raises ServiceUnavailable with the reason; OSError while nobody answers."""
        hello = {"pid": os.getpid(), "rank": self.rank, "adopt": adopt}
        sock = dial(self.path)
        pidfd = os.pidfd_open(os.getpid())
        try:
            (packet,) = link.pack_json(link.Type.HELLO, hello)
            socket.send_fds(sock, [packet], [pidfd, *fds])
            data, received = link.recv_with_fds(sock)
            if not data:
                raise ConnectionError("the sidecar closed the connection")
            answer = link.unpack(data)
            message = link.parse_json(answer.payload)
            if answer.type != link.Type.WELCOME:
                raise ServiceUnavailable(f"the sidecar at {self.path} refused this process: {message.get('error')}")
        except BaseException:
            sock.close()
            raise
        finally:
            os.close(pidfd)
        self.settings = message
        sock.settimeout(None)
        return sock, received

    def _reattach(self) -> None:
        """After the sidecar died: gives the rings to the new one and asks again for what was not taken."""
        self._poll.unregister(self._sock)
        self._sock.close()
        self._incoming = link.Assembler()
        started = time.monotonic()
        while True:
            self.ring.settle()
            regions = list(self.ring.regions.values())
            adopt = {
                "regions": [{"region": r.number, "nbytes": r.nbytes, "single": r.single} for r in regions],
                "leases": [[n, *entry] for n, entry in self.ring.leases.items()],
            }
            fds = [self._control_fd, self.wake_trainer, self.wake_receiver, *(r.fd for r in regions)]
            try:
                self._sock, _ = self._attach(adopt, fds)
                break
            except (OSError, ServiceUnavailable) as exc:
                if time.monotonic() - started > REATTACH_DEADLINE_S:
                    self.dead = f"the sidecar at {self.path} went away and none came back in {REATTACH_DEADLINE_S:.0f} s: {exc}"
                    raise ServiceUnavailable(self.dead) from exc
                time.sleep(0.05)
        self._poll.register(self._sock, select.POLLIN)
        self.closed_streams.clear()
        for stream in self.streams.values():
            self._send_open(stream)
            stream.unsent.clear()
            self._send_tickets(stream, sorted(stream.pending.items()))

    def _check(self) -> None:
        if self.dead is not None:
            raise ServiceUnavailable(self.dead)

    # Streams

    def open(self, manifest: str, window: int) -> Stream:
        """Raises ServiceError when too many iterators live at once."""
        with self._lock:
            self._check()
            self._close_collected()
            rows = {s % ctl.ROWS for s in self.streams}
            number = self._last_stream + 1
            while number % ctl.ROWS in rows:
                number += 1
                if number > self._last_stream + 2 * ctl.ROWS:
                    raise ServiceError(f"at most {ctl.ROWS} iterators can live at once: let go of some")
            self._last_stream = number
            stream = Stream(number, manifest, window)
            self.streams[number] = stream
            self._guarded(self._send_open, stream)
            self.control.words[ctl.W_STREAMS] = len(self.streams)
            return stream

    def _send_open(self, stream: Stream) -> None:
        message = {"spec": stream.manifest, "window": stream.window}
        self._send(link.pack_json(link.Type.OPEN, message, stream=stream.id, awaiting=stream.awaited))

    def ticket(self, stream: Stream, number: int, payload: bytes) -> None:
        """Asks for batch `number`, at the latest when its stream waits.

        Up to a quarter of the window is sent in one message: the system call, which wakes the receiver,
        costs more than everything else in a `next()` whose batch is ready. What was asked is asked again
        if the sidecar dies.
        """
        stream.pending[number] = payload
        stream.unsent.append((number, payload))
        if len(stream.unsent) >= stream.together:
            self.flush(stream)

    def flush(self, stream: Stream) -> None:
        """Sends the tickets that are held back."""
        with self._lock:
            self._check()
            if not stream.unsent:
                return
            try:
                self._send_tickets(stream, stream.unsent)
                stream.unsent.clear()
            except ConnectionError:
                self._reattach()

    def _send_tickets(self, stream: Stream, entries: list[tuple[int, bytes]]) -> None:
        payload = tickets.join(entries)
        self._send(link.pack(link.Type.TICKETS, payload, stream=stream.id, awaiting=stream.awaited))

    def close(self, stream: Stream) -> None:
        with self._lock:
            self.closed_streams.append((stream.id, stream.awaited))
            if self.dead is None:
                self._close_collected()

    def _close_collected(self) -> None:
        while self.closed_streams:
            number, awaited = self.closed_streams.pop()
            if self.streams.pop(number, None) is not None:
                self._guarded(self._send, link.pack(link.Type.CLOSE, stream=number, awaiting=awaited))
        self.control.words[ctl.W_STREAMS] = len(self.streams)

    def _guarded(self, send: Any, what: Any) -> None:
        try:
            send(what)
        except ConnectionError:
            self._reattach()

    def _send(self, packets: list[bytes]) -> None:
        for packet in packets:
            self._sock.send(packet)

    # Batches

    def wait(self, stream: Stream, number: int, timeout_s: float) -> int:
        """Sleeps until a ticket is ready; returns its lease. Raises DeadlineExceeded, ServiceUnavailable."""
        self._close_collected()
        self.flush(stream)
        control = self.control
        started = time.monotonic()
        limit = timeout_s or float(self.settings["batch_deadline_s"]) + GRACE_S
        while True:
            control.sleep()
            try:
                if (lease := control.ready(stream.id, number)) is not None:
                    return lease
                for fd, _ in self._poll.poll(POLL_MS):
                    if fd == self.wake_trainer:
                        with contextlib.suppress(BlockingIOError):
                            os.eventfd_read(fd)
                    else:
                        self.drain()
            finally:
                control.awake()
            if (lease := control.ready(stream.id, number)) is not None:
                return lease
            if time.monotonic() - started > limit:
                raise DeadlineExceeded(
                    f"DataLoader timed out after {limit:.0f} seconds: batch {number} is not ready "
                    + ("(the loader's timeout)" if timeout_s else "and the sidecar says nothing about it")
                )

    def drain(self) -> None:
        """Reads what the sidecar sent; reattaches if it is gone."""
        with self._lock:
            while True:
                try:
                    data, fds = link.recv_with_fds(self._sock, socket.MSG_DONTWAIT)
                except BlockingIOError:
                    return
                except ConnectionError:
                    data, fds = b"", []
                if not data:
                    self._reattach()
                    return
                packet = self._incoming.feed(data)
                if packet is not None:
                    self._packet(packet, fds)

    def _packet(self, packet: link.Packet, fds: list[int]) -> None:
        if packet.type == link.Type.FAILED:
            if (stream := self.streams.get(packet.stream)) is not None:
                stream.failures[packet.ticket] = packet.payload
            return
        message = link.parse_json(packet.payload)
        if packet.type == link.Type.REGION:
            number = int(message["region"])
            self.ring.regions[number] = map_region(number, int(message["nbytes"]), bool(message["single"]), fds[0])
            self.ring.lease_limit = int(message["lease_limit"])
        elif packet.type == link.Type.DROP:
            region = self.ring.regions.pop(int(message["region"]), None)
            if region is not None:
                region.close()
        elif packet.type == link.Type.NOTE:
            sys.stderr.write(f"[dataloaderjob] {message['text']}\n")
            sys.stderr.flush()

    def until(self, present: Any) -> None:
        """Drains the socket until `present()` is true: what a ready word promised is on its way."""
        started = time.monotonic()
        while not present():
            self.drain()
            if present():
                return
            select.select([self._sock], [], [], POLL_MS / 1000)
            if time.monotonic() - started > GRACE_S:
                raise ServiceError(f"the sidecar at {self.path} announced something and did not send it in {GRACE_S:.0f} s")

    # The end

    def cut_off(self) -> None:
        """In a forked child: this client belongs to the parent. Its descriptors are closed here."""
        self.dead = "this iterator belongs to the parent process: call iter(loader) again in the forked child"
        self.ring.tail.cut()
        self._release()

    def _release(self) -> None:
        with contextlib.suppress(OSError):
            self._sock.close()
        for fd in (self._control_fd, self.wake_trainer, self.wake_receiver):
            with contextlib.suppress(OSError):
                os.close(fd)
        for region in self.ring.regions.values():
            with contextlib.suppress(OSError):
                region.close()

    def __del__(self) -> None:
        if getattr(self, "ring", None) is not None and self.dead is None:
            self.ring.tail.cut()
            self._release()


def dial(path: str) -> socket.socket:
    """Connects to a sidecar's socket. OSErrors get a message that says what to do."""
    if len(path.encode()) > link.MAX_PATH_NBYTES:
        raise ServiceUnavailable(
            f"a Unix socket's path may have {link.MAX_PATH_NBYTES} bytes, {path!r} has {len(path.encode())}: "
            "choose a shorter folder (TMPDIR, or DATALOADERJOB_DIR)"
        )
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
    sock.settimeout(10.0)
    try:
        sock.connect(path)
    except PermissionError as exc:
        sock.close()
        raise ServiceUnavailable(
            f"user {os.getuid()} may not connect to the sidecar's socket {path}: run the trainer as the sidecar's "
            "user or in its group (on a cluster: the same securityContext.fsGroup)"
        ) from exc
    except BaseException:
        sock.close()
        raise
    return sock


def _after_fork_in_child() -> None:
    global _clients_lock
    _clients_lock = threading.Lock()
    for client in list(_clients.values()):
        client.cut_off()
    _clients.clear()


os.register_at_fork(after_in_child=_after_fork_in_child)
