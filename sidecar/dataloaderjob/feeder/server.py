"""A feeder's server: receivers connect, tickets come in, batches go out. The shell of `core.feeding`.

Two threads matter. The I/O thread reads frames and finishes what a socket did not take at once; the
build thread (the caller of `run_forever`, or one of its own after `start`) makes batches and tries to
send them itself. One lock guards the machine and the links' queues; no system call on a link and no user
code runs under it.

By itself, without Ray or supervisor:  python -m dataloaderjob.feeder.server --settings FILE.json
prints one JSON line {"host", "port", "instance", "pid"} when it is ready.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import select
import socket
import sys
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dataloaderjob.core.blobs import BlobStore
from dataloaderjob.core.errors import ProtocolError, ServiceError, first_line
from dataloaderjob.core.feeding import Feeding
from dataloaderjob.core.feeding_states import Instruction, Job
from dataloaderjob.core.frames import Header, Kind
from dataloaderjob.core.settings import IN_FEEDER_VARIABLE, FeederSettings, load, read_key
from dataloaderjob.core.tickets import base_seed
from dataloaderjob.feeder.bundles import BundleStore
from dataloaderjob.feeder.door import Door
from dataloaderjob.feeder.link import Link, checksum
from dataloaderjob.feeder.outbox import CHECKSUM, PROBE, Body, Outbox
from dataloaderjob.feeder.workshop import Failed, Workshop
from dataloaderjob.fetch.facts import facts

log = logging.getLogger(__name__)

SWITCH_INTERVAL_S = 0.0005
"""User code in pure Python yields to the I/O thread so often; Python's 5 ms would delay every frame."""
TICK_S = 1.0
PROBE_WAIT_S = 0.5
"""A PROGRESS frame gets so long to leave before its sample, which may end the process, is made."""
_IN = select.EPOLLIN | select.EPOLLOUT | select.EPOLLRDHUP | select.EPOLLET
_ENDED = select.EPOLLRDHUP | select.EPOLLHUP | select.EPOLLERR

_servers: weakref.WeakSet[FeederServer] = weakref.WeakSet()


class FeederServer:
    """Serves one feeder process. Raises InputError, OSError when it cannot start."""

    def __init__(self, settings: FeederSettings) -> None:
        self.settings = settings
        self.instance = os.urandom(8).hex()
        key = read_key(settings.key_path)
        store = BlobStore(Path(settings.blob_folder))
        self._workshop = Workshop(settings, store)
        self._lock = threading.Lock()
        self._work = threading.Condition(self._lock)
        self._machine = Feeding(settings.max_ungranted)
        self._desk = BundleStore(
            settings, key, store, machine=self._machine, lock=self._lock, ended=self._bundle_ended
        )
        self._outbox = Outbox(self._machine)
        self._inbox: list[socket.socket] = []
        self._owed: list[tuple[Link, Header]] = []
        self._numbers = 0
        self._stopping = False
        self._error: BaseException | None = None
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poll = select.epoll()
        told = {**facts(), "feeder": settings.name, "instance": self.instance, "pid": os.getpid()}
        self._door = Door(
            settings.bind_host,
            settings.port,
            key=key,
            job=settings.job,
            facts=told,
            welcomed=self._welcomed,
        )
        self._threads = [self._thread(self._io, "dlj-io")]

    @property
    def port(self) -> int:
        return self._door.port

    @property
    def idle(self) -> bool:
        """Whether no receiver is owed anything."""
        with self._lock:
            return self._machine.idle

    def run_forever(self) -> None:
        """Serves with this thread as build thread until `stop`. Raises what broke the server."""
        self._begin()
        self._guarded(self._build_forever)
        self._end()
        if self._error is not None:
            raise ServiceError(f"{self.settings.name} broke: {first_line(self._error)}") from self._error

    def start(self) -> None:
        """Serves with a build thread of its own."""
        self._threads.append(self._thread(self._build_forever, "dlj-build"))
        self._begin()
        self._threads[-1].start()

    def stop(self) -> None:
        """From any thread or signal handler: ends `run_forever`."""
        self._stopping = True
        with contextlib.suppress(OSError):
            os.eventfd_write(self._wake, 1)

    def join(self, timeout_s: float | None = None) -> BaseException | None:
        """Waits for the end after `start`; returns what broke the server, if anything did."""
        for thread in self._threads:
            thread.join(timeout_s)
        return self._error

    # Life

    def _begin(self) -> None:
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        _servers.add(self)
        self._poll.register(self._wake, select.EPOLLIN)
        self._poll.register(self._door.sock.fileno(), select.EPOLLIN)
        self._threads[0].start()

    def _end(self) -> None:
        self.stop()
        self._threads[0].join()

    def _thread(self, body: Callable[[], None], name: str) -> threading.Thread:
        return threading.Thread(target=self._guarded, args=(body,), name=name, daemon=True)

    def _guarded(self, body: Callable[[], None]) -> None:
        """A thread that breaks ends the server instead of leaving half of it."""
        try:
            body()
        except BaseException as exc:
            log.exception("%s broke", self.settings.name)
            self._error = self._error or exc
            self.stop()

    def abandon_in_child(self) -> None:
        """After user code forked: the child must not keep receivers from seeing our end."""
        self._poll.close()
        for sock in (self._door.sock, *(link.sock for link in self._outbox.links.values()), *self._inbox):
            sock.close()

    # The I/O thread

    def _io(self) -> None:
        by_fd: dict[int, Link] = {}
        door = self._door.sock.fileno()
        next_tick = 0.0
        try:
            while not self._stopping:
                for fd, events in self._poll.poll(TICK_S):
                    if fd == self._wake:
                        with contextlib.suppress(BlockingIOError):
                            os.eventfd_read(self._wake)
                    elif fd == door:
                        self._door.accept_all()
                    elif fd in by_fd and not self._serve(by_fd[fd], events):
                        self._drop(by_fd.pop(fd), fd)
                if self._inbox:
                    self._adopt(by_fd)
                if time.monotonic() > next_tick:
                    next_tick = time.monotonic() + TICK_S
                    self._door.expire()
                    self._tell_waiting()
        finally:
            with self._work:
                self._stopping = self._desk.stopping = True
                self._work.notify_all()
            for fd, link in by_fd.items():
                self._drop(link, fd)
            self._door.close()
            self._poll.close()

    def _welcomed(self, sock: socket.socket, answer: dict[str, Any]) -> None:
        if answer.get("role") != "receiver" or self._stopping:
            sock.close()
            return
        with self._lock:
            self._inbox.append(sock)
        os.eventfd_write(self._wake, 1)

    def _adopt(self, by_fd: dict[int, Link]) -> None:
        with self._lock:
            fresh, self._inbox = self._inbox, []
            for sock in fresh:
                self._numbers += 1
                link = Link(
                    self._numbers, sock, lock=self._lock, on_start=self._machine.started, on_sent=self._sent
                )
                self._outbox.links[link.number] = by_fd[sock.fileno()] = link
                self._machine.opened(link.number)
        for sock in fresh:
            self._poll.register(sock.fileno(), _IN)

    def _drop(self, link: Link, fd: int) -> None:
        with contextlib.suppress(OSError):
            self._poll.unregister(fd)
        with self._lock:
            self._outbox.links.pop(link.number, None)
            self._machine.closed(link.number)
            self._work.notify()
        link.close()

    def _serve(self, link: Link, events: int) -> bool:
        """Returns False when the link has ended."""
        alive = True
        if events & ~select.EPOLLOUT:
            alive = link.read(to_end=bool(events & _ENDED))
            try:
                self._take(link)
            except ProtocolError as exc:
                log.warning("%s: a receiver's link is closed: %s", self.settings.name, exc)
                return False
        return alive and link.flush()

    def _take(self, link: Link) -> None:
        touched: set[Link] = set()
        with self._lock:
            for header, payload in link.frames():
                touched |= self._outbox.perform(self._frame(link, header, payload))
            self._work.notify()
        self._outbox.flush(touched - {link})

    def _frame(self, link: Link, header: Header, payload: bytes) -> list[Instruction]:
        """One frame of a receiver, under the lock."""
        which = {"generation": header.generation, "stream": header.stream, "ticket": header.ticket}
        if header.kind == Kind.TICKET:
            return self._machine.ticket(
                link.number,
                **which,
                bundle=header.bundle,
                flags=header.flags,
                room=header.room,
                payload=payload,
            )
        if header.kind == Kind.GRANT:
            return self._machine.grant(link.number, **which, room=header.room)
        if header.kind == Kind.CANCEL:
            self._owed.append((link, header))
            return self._machine.cancel(link.number, **which)
        self._desk.learn(header.bundle, payload)
        return []

    def _tell_waiting(self) -> None:
        touched: set[Link] = set()
        with self._lock:
            for job, text in self._desk.notes():
                touched |= self._outbox.control(Kind.NOTE, job, payload=text)
        self._outbox.flush(touched)

    def _bundle_ended(self, instructions: list[Instruction], failure: bytes) -> None:
        with self._lock:
            touched = self._outbox.perform(instructions, failure)
            self._work.notify()
        self._outbox.flush(touched)

    # The build thread

    def _build_forever(self) -> None:
        self._workshop.prepare_thread()
        while True:
            with self._work:
                job = None
                while not self._stopping and not self._owed and (job := self._machine.next_build()) is None:
                    self._work.wait()
                if self._stopping:
                    return
                cancelled = self._confirm_cancelled()
            self._outbox.flush(cancelled)
            if job is not None:
                self._build(job)

    def _confirm_cancelled(self) -> set[Link]:
        """Tells receivers that this thread has passed what they cancelled: that it does not hang."""
        owed, self._owed = self._owed, []
        for link, header in owed:
            self._outbox.confirm_cancelled(link, header)
        return {link for link, _ in owed}

    def _build(self, job: Job) -> None:
        if not self._workshop.has(job.bundle):
            self._load(job)
        on_sample = None
        if job.flags & PROBE:

            def on_sample(position: int) -> None:
                self._progress(job, position)

        made = self._workshop.make(job.bundle, job.ticket, job.payload, on_sample)
        if isinstance(made, Failed):
            with self._lock:
                touched = self._outbox.perform(self._machine.failed(job), made.payload)
        else:
            crc = checksum(made.buffers) if job.flags & CHECKSUM else 0
            body = Body(made, list(made.buffers), crc)
            with self._lock:
                job.body = body
                touched = self._outbox.perform(self._machine.built(job, made.nbytes))
        self._outbox.flush(touched)

    def _load(self, job: Job) -> None:
        with self._desk.loading(job.bundle) as bundle:
            self._workshop.load(job.bundle, bundle, base_seed(job.payload))

    def _progress(self, job: Job, position: int) -> None:
        """Tells the receiver which sample comes next, before that sample can end this process."""
        with self._lock:
            touched = self._outbox.control(Kind.PROGRESS, job, room=position)
        self._outbox.flush(touched)
        deadline = time.monotonic() + PROBE_WAIT_S
        while (
            touched and not all(link.told or link.closed for link in touched) and time.monotonic() < deadline
        ):
            time.sleep(0.001)

    def _sent(self, job: Job) -> None:
        self._machine.sent(job)
        self._work.notify()


def _abandon_all_in_child() -> None:
    for server in list(_servers):
        server.abandon_in_child()


os.register_at_fork(after_in_child=_abandon_all_in_child)


def main() -> None:
    parser = argparse.ArgumentParser(description="one feeder by itself")
    parser.add_argument("--settings", type=Path, required=True, help="JSON file of FeederSettings")
    os.environ[IN_FEEDER_VARIABLE] = "1"
    server = FeederServer(load(FeederSettings, parser.parse_args().settings))
    ready = {
        "host": server.settings.advertise_host or server.settings.bind_host,
        "port": server.port,
        "instance": server.instance,
        "pid": os.getpid(),
    }
    print(json.dumps(ready), flush=True)  # noqa: T201  what the starter reads
    server.run_forever()


if __name__ == "__main__":
    main()
