"""The trainer's connection to its sidecar. It attaches, sends tickets, receives batches, and reattaches after a crash.

A client has no thread: everything happens inside `iter()` and `next()`.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import struct
import threading
import time
import weakref
from typing import Any

import torch

from dataloaderjob.core import control as ctl
from dataloaderjob.core import ipc
from dataloaderjob.core.control import Control
from dataloaderjob.core.errors import DeadlineExceeded, ProtocolError, ServiceError, ServiceUnavailable, say
from dataloaderjob.core.sockets import DO_NOT_WAIT
from dataloaderjob.core.texts import clean
from dataloaderjob.trainer.session.attach import Absence, Opened, SidecarEnds, attach
from dataloaderjob.trainer.session.pool import LeaseTail, Pool, Region, map_region
from dataloaderjob.trainer.session.stream import Stream, StreamLeftError

_FOR_STREAM = (ipc.Type.FAILED, ipc.Type.GIVEN_UP, ipc.Type.ENDED, ipc.Type.SNAPSHOT)
POLL_MS = 100
ANSWER_S = 1.0
SEND_TIMEOUT_S = 60.0
GRACE_S = 60.0
"""Seconds, in addition to the job's deadline for a batch, after which the sidecar itself counts as unresponsive."""

_thread = threading.get_ident


class Client:
    """A trainer process's connection to its sidecar, with the pool that it maps."""

    __slots__ = (
        "__weakref__", "_asleep", "_ends", "_heard", "_incoming", "_last_stream", "_opened", "_polls", "_receives",
        "_sleepers", "attachment", "closed_streams", "control", "dead", "lock", "path", "pool",
        "rank", "settings", "streams", "wake_receiver", "wake_trainer",
    )  # fmt: skip

    def __init__(self, path: str, rank: str) -> None:
        self.path, self.rank = path, rank
        self.streams: dict[int, Stream] = {}
        self.closed_streams: list[tuple[int, int]] = []
        """(stream, awaited) for each iterator that was garbage-collected. The iterators' finalizers append here."""
        self.dead: str | None = None
        self.attachment = 0
        """Number of earlier sidecars or receivers to which this client was attached."""
        self.lock = threading.RLock()
        """Guards the socket, the streams and the pool's bookkeeping. It is never held while waiting for a batch."""
        self._ends = SidecarEnds(path)
        self._last_stream = self._sleepers = 0
        self._receives = False
        """True while a packet is being received. A signal handler must then not receive another one."""
        self._heard = 0
        """The receiver's count of sent packets (`W_TOLD`) when this client last read all of them."""
        self._asleep = threading.RLock()
        self._polls: dict[int, tuple[socket.socket | None, select.epoll]] = {}
        self._incoming = ipc.Assembler()
        self._opened = Opened()
        # When the process exits, the kernel closes everything.
        weakref.finalize(self, self._opened.close).atexit = False
        sock, self.settings, fds = attach(path, rank, None, [])
        self._opened.fds = fds
        self._connected(sock)
        if len(fds) != 3:
            raise ServiceUnavailable(f"the sidecar at {path} sent {len(fds)} file descriptors instead of 3")
        control_fd, self.wake_trainer, self.wake_receiver = fds
        self.control = Control(control_fd)
        if not self.control.valid:
            raise ServiceUnavailable(f"the sidecar at {path} sent control memory from another version")
        self.pool = self._opened.pool = Pool(self.control, self.wake_receiver)

    def _connected(self, sock: socket.socket) -> None:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", int(SEND_TIMEOUT_S), 0))
        self._incoming = ipc.Assembler()
        self._opened.sock = sock

    def _reattach(self) -> None:
        """Reattaches after the sidecar died. Hands the pools over to the new sidecar, and requests again all batches
        that were not taken.

        Can be called again if an exception, such as KeyboardInterrupt, has interrupted it.
        """
        with self.lock:
            self._opened.disconnect()
            absence = Absence(self.path)
            while True:
                try:
                    self._give_back()
                    return
                except (OSError, ServiceUnavailable, ProtocolError) as exc:
                    self.check()
                    try:
                        absence.wait(exc)
                    except ServiceUnavailable as gone:
                        self.dead = str(gone)
                        raise

    def _check_progress(self) -> None:
        """Raises ServiceUnavailable if the receiver exits repeatedly, as when this client's own messages crash it."""
        try:
            self._ends.add(self.control.words[ctl.W_NEXT_CALLS])
        except ServiceUnavailable as exc:
            self.dead = str(exc)
            raise

    def _give_back(self) -> None:
        try:
            self._send_all()
        except BaseException:
            self._opened.disconnect()  # this client counts as connected only once everything was sent
            raise

    def _send_all(self) -> None:
        # First, because publications of the dead receiver must not count for the new one.
        self.control.forget()
        self.attachment += 1
        adopt, regions = self.pool.adoption()
        sock, self.settings, _ = attach(self.path, self.rank, adopt, [*self._opened.fds, *regions])
        self._connected(sock)
        self._check_progress()
        self._forget_collected()
        for stream in self.streams.values():
            stream.failures.clear()
            self._send_open(stream)
            asked = stream.asked  # read once, because another thread may be drawing
            stream.sent = asked
            stream.sent_waiting = None
            stream.begin_anew()
            self._send(stream.messages(range(stream.awaited, asked)))

    @property
    def is_connected(self) -> bool:
        """True if the sidecar keeps the connection open, as far as the kernel knows."""
        sock = self._opened.sock
        if sock is None or self.dead is not None:
            return False
        poll = select.poll()
        poll.register(sock, select.POLLRDHUP)
        return not poll.poll(0)

    def check(self) -> None:
        """Raises ServiceUnavailable if this client can no longer be used."""
        if self.dead is not None:
            raise ServiceUnavailable(self.dead)

    # Streams

    def open(self, manifest: str, window: int, first: int = 0) -> Stream:
        """Opens a stream. `first` is the number of its first ticket. Raises ServiceError if there are too many live
        iterators."""
        self.check()
        with self.lock:
            self._close_collected()
            rows = {s % ctl.ROWS for s in self.streams}
            number = self._last_stream + 1
            while number % ctl.ROWS in rows:
                number += 1
                if number > self._last_stream + 2 * ctl.ROWS:
                    raise ServiceError(f"at most {ctl.ROWS} iterators can exist at once: release some")
            self._last_stream = number
            self.control.clear_row(number)
            stream = Stream(number, manifest, window, first, asked=first, sent=first)
            self.streams[number] = stream
            self._guarded(self._send_open, stream)
            self.control.words[ctl.W_STREAMS] = len(self.streams)
            self.control.words[ctl.W_CUDA] = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
            return stream

    def _send_open(self, stream: Stream) -> None:
        message = {"bundle": stream.manifest, "window": stream.window}
        self._send(ipc.pack_json(ipc.Type.OPEN, message, stream=stream.id, awaiting=stream.awaited))

    def flush(self, stream: Stream, *, waiting: bool = False) -> None:
        """Sends the held-back tickets. With `waiting`, also reports that the trainer sleeps until the next batch."""
        with self.lock:
            self.check()
            sent, asked, words = stream.sent, stream.asked, self.control.words
            if sent == asked and not (waiting and stream.sent_waiting != stream.awaited):
                return
            attachment = self.attachment
            try:
                self._guarded(self._send, stream.messages(range(sent, asked), waiting=waiting))
                stream.sent = asked
            except BaseException:
                self._opened.disconnect()  # even after an interrupt, it must be clear what was sent
                raise
            if stream.feeders != words[ctl.W_FEEDERS]:
                stream.regroup(words[ctl.W_FEEDERS])
            # A new receiver knows everything except which ticket the trainer waits for.
            stream.sent_waiting = stream.awaited if waiting and attachment == self.attachment else None

    def close_collected(self) -> None:
        """Reports the streams in `closed_streams` to the receiver."""
        if self.dead is None:
            with self.lock:
                self._close_collected()

    def _close_collected(self) -> None:
        for number, awaited in self._forget_collected():
            self._guarded(self._send, ipc.pack(ipc.Type.CLOSE, stream=number, awaiting=awaited))

    def _forget_collected(self) -> list[tuple[int, int]]:
        forgotten = []
        while self.closed_streams:
            number, awaited = self.closed_streams.pop()
            if self.streams.pop(number, None) is not None:
                forgotten.append((number, awaited))
        self.control.words[ctl.W_STREAMS] = len(self.streams)
        self.control.words[ctl.W_LEASED_NBYTES] = self.pool.leased_nbytes
        return forgotten

    def _guarded(self, send: Any, what: Any) -> None:
        """Sends `what`. If the sidecar is gone, attaches to its replacement and sends everything again, including
        `what`."""
        try:
            send(what)
        except ConnectionError:
            self._reattach()
        except BaseException:
            self._opened.disconnect()  # it may be half sent; the next call sends everything again
            raise

    def _send(self, packets: list[bytes]) -> None:
        if self._opened.sock is None:
            raise ConnectionError("not connected")
        for packet in packets:
            try:
                self._opened.sock.send(packet)
            except BlockingIOError as exc:
                raise DeadlineExceeded(
                    f"the sidecar at {self.path} has not read a message for {SEND_TIMEOUT_S:.0f} s: its "
                    "receiver for this process is stopped or hung; see the sidecar's log"
                ) from exc

    # Batches

    def wait(self, stream: Stream, number: int, control: Control, timeout_s: float) -> None:
        """Sleeps until a ticket's batch is ready or has failed, and until its region or its error has arrived.

        Raises DeadlineExceeded or ServiceUnavailable. Raises StreamLeftError if another thread left the stream.
        """
        started = time.monotonic()
        limit = timeout_s or float(self.settings["batch_deadline_s"]) + GRACE_S
        while True:
            self.check()
            if stream.left:
                raise StreamLeftError
            if self.closed_streams:
                with self.lock:
                    self._close_collected()
            if self._opened.sock is None:
                with self.lock:  # another thread may have attached in between
                    if self._opened.sock is None:
                        self._reattach()
            self.flush(stream, waiting=True)
            self.sleep(stream, number, control, POLL_MS)
            if self.ready(stream, number, control) is not None:
                return
            if time.monotonic() - started > limit:
                who = self._who_is_late(stream, number)
                lasts = stream.places is not None or bool(self.settings.get("awaits_feeders"))
                if who and not timeout_s and lasts:
                    # Rebuilding a slot may take this long, and feeders may be absent. The receiver has a deadline, too.
                    started = time.monotonic()
                    continue
                raise DeadlineExceeded(
                    f"DataLoader timed out after {limit:g} seconds: batch {number} is not ready"
                    + (
                        " (the loader's timeout)"
                        if timeout_s
                        else ", and the sidecar has not reported an error"
                    )
                    + f": {who or 'the sidecar does not report who is late'}"
                )

    def _who_is_late(self, stream: Stream, number: int) -> str:
        """Asks the receiver which feeder works on the ticket, and at which index."""
        stream.late, until = "", time.monotonic() + ANSWER_S
        with contextlib.suppress(ConnectionError, DeadlineExceeded):
            with self.lock:
                self._send(ipc.pack(ipc.Type.STATUS, stream=stream.id, ticket=number))
            while not stream.late and time.monotonic() < until:
                time.sleep(0.005)
                self._drain()
        return stream.late

    def ready(self, stream: Stream, number: int, control: Control) -> int | None:
        """Returns the ticket's lease, FAILED or THERE. Returns None while the batch, its region or its error is
        missing."""
        lease = control.ready(stream.id, number)
        if lease is None or lease == ctl.THERE:
            return lease
        if lease == ctl.FAILED:
            return lease if number in stream.failures else None
        return lease if control.entry(lease)[2] in self.pool.regions else None

    def sleep(self, stream: Stream, number: int, control: Control, wait_ms: int, after: int = 1) -> bool:
        """Sleeps until something happens, but for at most `wait_ms`. Returns True if anything did.

        `control` belongs to the calling thread. `after` is the number of batches that must arrive before the thread
        wakes.
        """
        if self._opened.sock is None or self.closed_streams:
            return False  # `wait` handles it
        with self._asleep:
            self._sleepers += 1
        try:
            with self._asleep:
                awake = not control.sleep(stream.id, number, 0 if self._sleepers > 1 else after)
            if awake and self.ready(stream, number, control) is not None:
                return True
            kept = self._polls.get(_thread())
            poll = kept[1] if kept is not None and kept[0] is self._opened.sock else self._new_poll()
            events = poll.poll(wait_ms / 1000, 2)
            for fd, _ in events:
                if fd != self.wake_trainer:
                    self._drain()
            return bool(events)
        finally:
            with self._asleep:  # else another thread's wake-up may be cancelled
                self._sleepers -= 1
                if not self._sleepers:
                    control.awake()

    def _new_poll(self) -> select.epoll:
        """Returns this thread's epoll object for the eventfd and the socket. The eventfd is edge-triggered: no thread
        has to read it, and a wake-up wakes every sleeping thread."""
        thread, sock = _thread(), self._opened.sock
        poll = select.epoll()
        poll.register(self.wake_trainer, select.EPOLLIN | select.EPOLLET)
        if sock is not None:
            try:
                poll.register(sock, select.EPOLLIN)
            except (OSError, ValueError):
                return poll  # another thread has closed it in the meantime
        for gone in set(self._polls).difference(t.ident for t in threading.enumerate()):
            self._polls.pop(gone, None)
        self._polls[thread] = sock, poll
        return poll

    def _drain(self) -> None:
        """Reads what the sidecar sent, and reattaches if the sidecar is gone."""
        with self.lock:
            try:
                while self._opened.sock is not None and self._receive(self._opened.sock):
                    pass
            except ConnectionError:
                self._reattach()
            except BaseException:
                self._opened.disconnect()  # a message may be lost; reattaching recovers it
                raise
            if self._sleepers > 1:  # another thread may be waiting for it
                os.eventfd_write(self.wake_trainer, 1)

    def claim(self) -> list[Region]:
        """Returns the regions that devices may read directly from now on, except those returned by earlier calls."""
        with self.lock:  # no view is handed out at the same time
            self.control.words[ctl.W_REGISTERED] = 1  # the pool's pages stay where they are from now on
            return self.pool.claim()

    def count_stage(self, ns: int) -> None:
        """Adds `ns` to the time spent in the user's device_stage."""
        with self.lock:  # threads of several loaders update it
            self.control.words[ctl.W_STAGE_NS] += ns

    def hear(self) -> None:
        """Reads the messages that have arrived, without waiting, so that a state includes the newest snapshots."""
        told = self.control.words[ctl.W_TOLD]
        if told == self._heard or self._receives or not self.lock.acquire(blocking=False):
            return  # nothing has arrived, this is a signal handler, or another thread reads
        try:
            while self._opened.sock is not None and self._receive(self._opened.sock):
                if self._sleepers:  # another thread may be waiting for it
                    os.eventfd_write(self.wake_trainer, 1)
            self._heard = told
        except ConnectionError:
            pass  # the next call raises it again
        except BaseException as exc:
            self._opened.disconnect()  # a message may be lost; reattaching recovers it
            if not isinstance(exc, Exception):
                raise
        finally:
            self.lock.release()

    def _receive(self, sock: socket.socket) -> bool:
        """Receives one packet. Returns False if none has arrived. Raises ConnectionError if the sidecar closed the
        connection."""
        self._receives = True
        try:
            data, fds = ipc.recv_with_fds(sock, DO_NOT_WAIT)
            if not data:
                raise ConnectionError("the sidecar closed the connection")
            packet = self._incoming.feed(data)
            if packet is not None:
                self._packet(packet, fds)
        except BlockingIOError:
            return False
        finally:
            self._receives = False
        return True

    def _packet(self, packet: ipc.Packet, fds: list[int]) -> None:
        stream = self.streams.get(packet.stream)
        if packet.type in _FOR_STREAM:
            if stream is not None:
                stream.hear(packet)
            return
        message = ipc.parse_json(packet.payload)
        if packet.type == ipc.Type.STATUS and stream is not None:
            stream.late = clean(message["late"])
        elif packet.type == ipc.Type.REGION:
            region = map_region(
                int(message["region"]), int(message["nbytes"]), bool(message["single"]), fds[0]
            )
            self.pool.add(region, int(message["lease_limit"]))
        elif packet.type == ipc.Type.DROP:
            self.pool.drop(int(message["region"]))
        elif packet.type == ipc.Type.NOTE:
            say(clean(message["text"]))

    def wake(self) -> None:
        """Wakes all threads that sleep for a batch."""
        if self.dead is None:
            os.eventfd_write(self.wake_trainer, 1)

    @property
    def tail(self) -> LeaseTail | None:
        """The leases of the pool; None before there is a pool."""
        return None if self._opened.pool is None else self._opened.pool.tail

    def cut_off(self) -> None:
        """Disables this client in a forked child, because it belongs to the parent. Closes the child's copies of its
        file descriptors."""
        self.lock, self._asleep = threading.RLock(), threading.RLock()  # another thread may have held them
        self.dead = "this iterator belongs to the parent process: call iter(loader) again in the forked child"
        self._opened.close()
        self._polls = {}
        if self.tail is not None:
            self.tail.close()  # no other thread is in this process
