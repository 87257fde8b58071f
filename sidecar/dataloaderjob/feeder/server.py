"""The server of a feeder, which receives tickets and sends batches. It is the shell of `feeder.feeding`.

One loop, in the main thread, owns the state machine, the connections and the channels to builders. Handshakes, blob
transfers and the connection to the supervisor have their own threads, which hand their results to the loop. User code
runs in other processes (`builders`), so it cannot delay a frame.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import select
import socket
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from dataloaderjob.core import frames, keys
from dataloaderjob.core.acceptor import Acceptor
from dataloaderjob.core.blobs import SLOTS, Bundle
from dataloaderjob.core.errors import ProtocolError
from dataloaderjob.core.frames import Flag, FrameKind, Header
from dataloaderjob.core.handshake import DATA, new_key
from dataloaderjob.core.settings import FeederSettings, read_credentials, read_key
from dataloaderjob.core.sockets import Connection, on_machine
from dataloaderjob.core.supervision import Cause
from dataloaderjob.core.ticket_codec import base_seed_of
from dataloaderjob.feeder.builders import Builders
from dataloaderjob.feeder.bundles import BundleStore
from dataloaderjob.feeder.channel import Body, Channel
from dataloaderjob.feeder.connections import ReceiverConnection, Registration, Sender
from dataloaderjob.feeder.ends import End
from dataloaderjob.feeder.feeding import Feeding
from dataloaderjob.feeder.feeding_states import Instruction, Task

log = logging.getLogger(__name__)

TICK_S = 0.5
ALIVE_S = 5.0
"""Seconds between reports that a busy feeder is alive, well below the time after which a silent feeder is replaced
(`sidecar.dispatch.overseer`)."""
COSTS_EVERY_S = 2.0
"""Interval between reports of the costs of batches."""


class FeederServer:
    """The server of one feeder process. Raises InputError or OSError if it cannot start."""

    def __init__(
        self, settings: FeederSettings, requests: socket.socket, facts: dict[str, Any], *, relayed: bool
    ) -> None:
        """`requests`: the socket to the zygote, for templates. `facts`: the zygote's facts about this machine.
        `relayed`: the host shows this process's output under the feeder's name."""
        self.settings = settings
        self.instance = os.urandom(8).hex()
        self.registration: Registration | None = None
        """The connection to the supervisor; None if there is no supervisor."""
        key = read_key(settings.key_path)
        self.link_key = key if settings.supervisor_host is None else new_key()
        """The key for connections from receivers. It is a new key that the supervisor passes on. If there is no
        supervisor, it is the key of all feeders."""
        self.tls = read_credentials(settings.tls_folder)
        self._machine = Feeding(settings.max_ungranted)
        self._bundles = BundleStore(
            settings, key, self._machine, address=lambda: self.address, soon=self.soon, here=self._bundle_here,
            lost=self._bundle_lost, tls=self.tls,
        )  # fmt: skip
        self._builders = Builders(settings, requests, self, relayed=relayed)
        self._sender = Sender(self._machine, lambda: self._builders.templates.loads)
        self._calls: deque[Callable[[], None]] = deque()
        self._owed: dict[bytes, list[tuple[int, Header]]] = {}
        """bundle -> CANCEL frames (connection, header), to be confirmed once the bundle's builder has finished its
        task."""
        self._numbers = 0
        self._trainers: set[str] = set()
        """Trainer processes whose receivers have connected."""
        self._alive_at = self._costs_at = 0.0
        self._stopping = False
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poll = select.epoll()
        self._callbacks: dict[int, Callable[[int], None]] = {}
        stated = {
            **facts,
            "feeder": settings.name,
            "instance": self.instance,
            "pid": os.getpid(),
            SLOTS: True,
        }
        acceptor = functools.partial(
            Acceptor,
            job=settings.job,
            facts=stated,
            welcomed=self._welcomed,
            versions=DATA,
        )
        of_receivers = {"receiver": self.link_key}
        self._acceptor = acceptor(
            settings.bind_host, settings.port, key=keys.of_roles({**of_receivers, "blob": key}), tls=self.tls
        )
        self._acceptors = [self._acceptor]
        if settings.shares_memory:
            try:
                self._acceptors.append(
                    acceptor(on_machine(self.instance), 0, key=keys.of_roles(of_receivers))
                )
            except OSError as exc:
                log.info(
                    "%s: cannot share memory with receivers on this machine, so they get batches over TCP: %s",
                    settings.name,
                    exc,
                )

    @property
    def address(self) -> tuple[str, int]:
        """The host and port at which other processes reach this feeder."""
        return self.settings.advertise_host or self.settings.bind_host, self._acceptor.port

    @property
    def idle(self) -> bool:
        """True if no receiver is waiting for anything."""
        return self._machine.idle

    # The loop

    def run_forever(self) -> None:
        """Serves until `stop` is called. Raises the error that broke the server."""
        self._register(self._wake, select.EPOLLIN, lambda _: self._woken())
        for acceptor in self._acceptors:
            self._register(acceptor.fileno(), select.EPOLLIN, functools.partial(_accept, acceptor))
        next_tick = 0.0
        while not self._stopping:
            for fd, events in self._poll.poll(TICK_S):
                callback = self._callbacks.get(fd)
                if callback is not None:  # else an earlier event has closed it
                    callback(events)
            if (now := time.monotonic()) >= next_tick:
                next_tick = now + TICK_S
                self._tick(now)
        self._bundles.stopping = True

    def stop(self) -> None:
        """Ends `run_forever`. May be called from any thread or signal handler."""
        self._stopping = True
        with contextlib.suppress(OSError):
            os.eventfd_write(self._wake, 1)

    def soon(self, call: Callable[[], None]) -> None:
        """Makes the loop call a function. Safe to call from any thread."""
        self._calls.append(call)
        os.eventfd_write(self._wake, 1)

    def watch(self, end: Channel, callback: Callable[[], None]) -> None:
        self._register(end.fileno(), select.EPOLLIN | select.EPOLLOUT | select.EPOLLET, lambda _: callback())

    def unwatch(self, end: Channel) -> None:
        self._unregister(end.fileno())

    def _register(self, fd: int, events: int, callback: Callable[[int], None]) -> None:
        self._poll.register(fd, events)
        self._callbacks[fd] = callback

    def _unregister(self, fd: int) -> None:
        self._callbacks.pop(fd, None)
        with contextlib.suppress(OSError):
            self._poll.unregister(fd)

    def _woken(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wake)
        while self._calls:
            self._calls.popleft()()

    def _tick(self, now: float) -> None:
        for acceptor in self._acceptors:
            acceptor.expire()
        self._builders.tick(now, self._machine.used, self._machine.waiting)
        self._bundles.keep(now)
        touched = self._sender.unmap()
        for bundle, text in (*self._bundles.notes(now), *self._builders.notes(now)):
            for task in self._machine.waiting(bundle):
                touched |= self._sender.control(
                    FrameKind.NOTE, task, payload=text.encode()[: frames.MAX_TEXT_NBYTES]
                )
        if now - self._alive_at >= ALIVE_S:
            self._alive_at = now
            for task, replayed in self._builders.busy():
                touched |= self._sender.control(FrameKind.ALIVE, task, room=replayed)
        self._flush(touched)
        self._builders.costs.look(sending=self._machine.sending)
        if self.registration is not None and now - self._costs_at >= COSTS_EVERY_S:
            self._costs_at = now
            self.registration.tell_costs(self._builders.costs.report())

    # Connections

    def _welcomed(self, sock: Connection, answer: dict[str, Any]) -> None:
        if answer.get("role") == "blob":
            self._bundles.blobs.serve(sock)  # in the connection's own thread
            return
        if answer.get("role") != "receiver":
            sock.close()
            return
        trainer = str((answer.get("facts") or {}).get("trainer", ""))
        self.soon(lambda: self._adopt(sock, trainer))

    def _adopt(self, sock: socket.socket, trainer: str) -> None:
        if trainer not in self._trainers:
            # A restarted trainer runs the same script, so its sessions have the same ids as those of the dead trainer.
            self._trainers.add(trainer)
            self._builders.end_unused(self._machine.used)
        self._numbers += 1
        connection = ReceiverConnection(
            self._numbers, sock, on_start=self._machine.started, on_sent=self._machine.sent
        )
        self._sender.connections[connection.number] = connection
        self._machine.opened(connection.number)
        connection.armed = connection.events
        self._register(sock.fileno(), connection.armed, lambda events: self._serve(connection, events))

    def _serve(self, connection: ReceiverConnection, events: int) -> None:
        alive = True
        if events & ~select.EPOLLOUT:
            alive = connection.read()
            try:
                self._take(connection)
            except ProtocolError as exc:
                log.warning("%s: closed a receiver's connection: %s", self.settings.name, exc)
                alive = False
            except Exception:
                log.exception("%s: closed a receiver's connection", self.settings.name)
                alive = False
        if alive:
            self._flush({connection})
        else:
            self._drop(connection)

    def _drop(self, connection: ReceiverConnection) -> None:
        if self._sender.connections.pop(connection.number, None) is None:
            return
        self._unregister(connection.sock.fileno())
        connection.close()  # before any buffer is freed, because a receiver checks after each copy that it is connected
        self._machine.closed(connection.number)
        self._builders.templates.closed(connection.number)
        self._builders.needs.closed(connection.number)
        self._settle()

    def _flush(self, connections: set[ReceiverConnection]) -> None:
        """Sends as much as the sockets accept now, and the rest later."""
        for connection in connections:
            if connection.closed:
                continue
            if not connection.flush():
                self._drop(connection)
                continue
            events = connection.events
            if connection.armed != events:
                connection.armed = events
                self._poll.modify(connection.sock.fileno(), events)
        self._settle()

    def _settle(self) -> None:
        """Takes back buffers that are free again, and gives work to idle builders."""
        freed, self._machine.freed = self._machine.freed, []
        for body in freed:
            self._builders.release(body)
        while (task := self._machine.next_build(self._builders.free)) is not None:
            self._builders.build(task)

    def _take(self, connection: ReceiverConnection) -> None:
        touched: set[ReceiverConnection] = {connection}
        for header, payload in connection.frames():
            touched |= self._sender.perform(self._frame(connection, header, payload))
        self._flush(touched)

    def _frame(self, connection: ReceiverConnection, header: Header, payload: bytes) -> list[Instruction]:
        """Handles one frame of a receiver."""
        which = {"stream": header.stream, "ticket": header.ticket}
        bundle = header.bundle
        if header.kind == FrameKind.TICKET:
            base_seed_of(payload)  # rejects a malformed ticket while its own connection is served
            made = self._machine.ticket(
                connection.number,
                **which,
                bundle=bundle,
                flags=header.flags,
                room=header.room,
                payload=payload,
            )
            self._builders.hear(bundle, connection.number, payload)
            if self._machine.known(bundle):
                self._builders.templates.use(connection.number, self._bundles[bundle])
                self._begin(bundle)
            return made
        if header.kind == FrameKind.GRANT:
            return self._machine.grant(connection.number, **which, room=header.room)
        if header.kind == FrameKind.TAKEN:
            connection.taken()
            return []
        if header.kind == FrameKind.CANCEL:
            return self._cancel(connection, header, which)
        if header.kind == FrameKind.RELEASE:
            self._machine.release(connection.number, bundle)
            self._builders.needs.released(bundle, connection.number)
            if not self._machine.used(bundle):
                self._builders.end(bundle)
                self._bundles.forget(bundle)
            return []
        self._bundles.learn(bundle, payload)
        return []

    def _cancel(
        self, connection: ReceiverConnection, header: Header, which: dict[str, int]
    ) -> list[Instruction]:
        """Confirms a cancellation at once, unless a builder is making the batch. In that case, confirms it only once
        the builder, which may hang, has finished."""
        task = self._machine.find(connection.number, **which)
        made = self._machine.cancel(connection.number, **which)
        if task is not None and self._builders.discards(task.bundle):
            self._owed.setdefault(task.bundle, []).append((connection.number, header))
        else:
            self._sender.confirm_cancelled(connection, header)
        return made

    # Bundles

    def _bundle_here(self, bundle: bytes) -> None:
        for task in self._machine.waiting(bundle):
            self._builders.templates.use(task.receiver, self._bundles[bundle])
        self._machine.bundle_ready(bundle)
        self._begin(bundle)

    def _begin(self, bundle: bytes) -> None:
        """Opens a session if tickets wait for one."""
        if self._builders.has(bundle):
            self._builders.end_lingering(bundle)
        elif self._machine.known(bundle):
            waiting = self._machine.waiting(bundle)
            if waiting:
                self._builders.open(self._bundles[bundle], base_seed_of(waiting[0].payload))

    def _bundle_lost(self, instructions: list[Instruction], failure: bytes) -> None:
        self._flush(self._sender.perform(instructions, failure))

    # Events of builders

    def session_free(self) -> None:
        self._settle()

    def receivers_of(self, bundle: bytes) -> set[int]:
        return {receiver for receiver, _ in self._machine.users(bundle)}

    def session_gone(self, bundle: bytes) -> None:
        self._begin(bundle)

    def bundle_failed(self, bundle: bytes, payload: bytes) -> None:
        made = self._machine.bundle_failed(bundle)
        self._flush(self._sender.perform(made, payload, flags=Flag.ELSEWHERE))

    def built(self, task: Task, body: Body) -> None:
        task.body = body
        self._through(task, self._machine.built(task, len(body.view)))

    def failed(self, task: Task, payload: bytes, flags: int) -> None:
        self._through(task, self._machine.failed(task), payload, flags=flags)

    def lost(self, task: Task, position: int, end: End) -> None:
        flags = Flag.MEMORY if end.of_memory else 0
        self._through(task, self._machine.lost(task), end.text.encode(), position, flags)

    def out_of_memory(self, text: str) -> None:
        log.warning("%s: %s", self.settings.name, text)
        if self.registration is not None:
            self.registration.tell(Cause.OUT_OF_MEMORY, text)

    def progress(self, task: Task, position: int) -> None:
        connection = self._sender.connections.get(task.receiver)
        if connection is None:
            self._builders.acknowledge(task)
            return
        self._sender.control(FrameKind.PROGRESS, task, room=position)
        connection.when_sent(lambda: self._builders.acknowledge(task))
        self._flush({connection})

    def snapshot(self, bundle: Bundle, made: int, data: bytes) -> None:
        assert bundle.slot is not None  # noqa: S101  of a slot's session
        payload = frames.pack_snapshot(bundle.slot, made, data)
        self._tell(bundle, FrameKind.SNAPSHOT, payload)

    def say(self, bundle: Bundle, text: str) -> None:
        self._tell(bundle, FrameKind.NOTE, text.encode()[: frames.MAX_TEXT_NBYTES])

    def _tell(self, bundle: Bundle, kind: FrameKind, payload: bytes) -> None:
        """Sends a frame to all receivers that use a session, even to those that have no ticket in it now."""
        for number, stream in self._machine.users(bundle.id):
            if (connection := self._sender.connections.get(number)) is not None:
                header = frames.pack_header(kind, stream=stream, bundle=bundle.id, nbytes=len(payload))
                connection.queue_control(header, payload)
                self._flush({connection})

    def _through(
        self, task: Task, made: list[Instruction], payload: bytes = b"", position: int = -1, flags: int = 0
    ) -> None:
        """Handles a task that a builder has finished."""
        touched = self._sender.perform(made, payload, position=position, flags=flags)
        self._settle()  # the builder works while this loop sends, which yields a third more small batches
        for number, header in self._owed.pop(task.bundle, ()):
            if (connection := self._sender.connections.get(number)) is not None:
                self._sender.confirm_cancelled(connection, header)
                touched.add(connection)
        self._flush(touched)


def _accept(acceptor: Acceptor, _: int) -> None:
    acceptor.serve()
