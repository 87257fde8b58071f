"""The receiver: one process for each pool, forked by the parent when a trainer process attaches.

One loop serves the trainer's socket, the connections to feeders, the parent's channel and the trainer's pidfd. It
passes events to the dispatcher and carries out the dispatcher's instructions. Bytes of batches never become Python
objects.
"""

from __future__ import annotations

import json
import os
import select
import socket
import time
from collections import deque
from typing import TYPE_CHECKING, Any

from dataloaderjob.core import frames, ipc, supervision, ticket_codec
from dataloaderjob.core.blobs import Bundle
from dataloaderjob.core.control import FAILED, THERE, W_IDLE, W_REGISTERED, Control
from dataloaderjob.core.errors import ProtocolError
from dataloaderjob.core.frames import Header
from dataloaderjob.core.settings import LoaderSettings
from dataloaderjob.sidecar import metrics, regions
from dataloaderjob.sidecar.dispatch import instructions, overseer, streams
from dataloaderjob.sidecar.dispatch.dispatcher import Dispatcher
from dataloaderjob.sidecar.feeder_connection import TELL_EVERY_S, FeederConnection, LinkError
from dataloaderjob.sidecar.output import log
from dataloaderjob.sidecar.regions import Region
from dataloaderjob.sidecar.trainer_queue import TrainerQueue

if TYPE_CHECKING:
    from dataloaderjob.core.credentials import Credentials

PACKETS_AT_ONCE = 64
GIVES_WAY_S = 1.0
"""Seconds without an iterator after which a trainer may lose its place to another trainer (`W_IDLE`)."""
IDLE_S = 30.0
"""Time after which the memory of an unused pool is freed."""


class TrainerGone(Exception):
    """The trainer process exited or closed its socket."""


class Receiver:
    """The process that serves one pool. It performs the dispatcher's I/O."""

    def __init__(
        self,
        trainer: socket.socket,
        parent: socket.socket,
        pidfd: int,
        control_fd: int,
        wake_trainer: int,
        wake_receiver: int,
        *,
        settings: LoaderSettings,
        key: bytes,
        job: str,
        name: str,
        process: str = "",
        rank: int = 0,
        gives_back: bool = False,
        tls: Credentials | None = None,
    ) -> None:
        """`process`: the trainer process's name. `rank`: the trainer's rank; each rank begins with different feeders.
        `gives_back`: free the memory of an idle pool."""
        self._gives_back = gives_back
        self.control = Control(control_fd)
        self.machine = Dispatcher(settings, rank=rank)
        self.regions: dict[int, Region] = {}
        self._trainer, self._parent, self._pidfd = trainer, parent, pidfd
        self._wake_trainer, self._wake_receiver = wake_trainer, wake_receiver
        self._key, self._job, self._name, self._process = key, job, name, process
        self._tls = tls
        self._connections: dict[str, FeederConnection] = {}
        self._by_fd: dict[int, FeederConnection] = {}
        self._masks: dict[int, int] = {}
        self._outgoing = TrainerQueue(trainer, self.control.told)
        self._to_parent: deque[bytes] = deque()
        self._incoming = ipc.Assembler()
        self._used_at = time.monotonic()
        """The last time at which an iterator existed or part of the pool was in use."""
        self._is_given_back = False
        self._failure: tuple[int, int] | None = None
        """(stream, ticket) of the failure reported to the parent, until a later batch is taken."""
        self._dirty: set[FeederConnection] = set()
        self._poll = select.epoll()
        trainer.setblocking(False)
        parent.setblocking(False)
        for fd in (trainer.fileno(), parent.fileno(), pidfd, wake_receiver):
            self._poll.register(fd, select.EPOLLIN)

    def adopt(self, adoption: dict[str, Any], fds: list[int]) -> None:
        """Takes over the regions and leases that outlived an earlier sidecar. Checks all of the trainer's claims about
        them."""
        placer = self.machine.placer
        for adopted, fd in zip(adoption["regions"], fds, strict=True):
            number, nbytes, single = int(adopted["region"]), int(adopted["nbytes"]), bool(adopted["single"])
            self.regions[number] = regions.adopt(number, nbytes, single=single, fd=fd)
            placer.space.adopt(number, nbytes, single=single)
        leases = [tuple(map(int, entry)) for entry in adoption["leases"]]
        self.control.reset({entry[0] for entry in leases})
        for lease, region, offset, nbytes in leases:
            if not placer.adopt(lease, streams.Extent(region, offset, nbytes)):
                raise ProtocolError(f"lease {lease}, which the trainer claims, does not fit into its region")
        placer.adopted()
        held = {region for _, region, _, _ in leases}
        for number in [n for n in placer.space.singles if n not in held]:
            del placer.space.arenas[number]
            placer.space.singles.discard(number)
            self.regions.pop(number).close()

    # The loop

    def run(self) -> None:
        """Runs until the trainer is gone."""
        next_tick = time.monotonic()
        try:
            while True:
                self._before_sleep()
                cold = (
                    next((r for r in self.regions.values() if r.cold), None) if self.machine.streams else None
                )
                timeout = 0.0 if cold else max(0.0, next_tick - time.monotonic())
                events = self._poll.poll(timeout)
                now = time.monotonic()
                if not events and cold is not None:
                    cold.populate_some()
                for fd, mask in events:
                    self._event(now, fd, mask)
                self.machine.leases_ended(now, self.control.ended_leases(self.machine.placer.highest_lease))
                if now >= next_tick:
                    next_tick = now + overseer.TICK_S
                    self._tick(now)
                self._settle(now)
        except TrainerGone:
            return

    def _before_sleep(self) -> None:
        starved = self.machine.starved
        self.control.want(starved)
        if starved:
            now = time.monotonic()
            self.machine.leases_ended(now, self.control.ended_leases(self.machine.placer.highest_lease))
            self._settle(now)

    def _event(self, now: float, fd: int, mask: int) -> None:
        connection = self._by_fd.get(fd)
        if connection is not None:
            self._connection_event(now, connection, mask)
        elif fd == self._trainer.fileno():
            if mask & select.EPOLLOUT:
                self._send_to_trainer()
            if mask & ~select.EPOLLOUT:
                self._trainer_packets(now)
        elif fd == self._wake_receiver:
            os.eventfd_read(fd)
        elif fd == self._pidfd:
            raise TrainerGone
        elif fd == self._parent.fileno():
            self._parent_messages(now)

    def _tick(self, now: float) -> None:
        for connection in self._connections.values():
            if connection.handshake_late(now):
                self._end_connection(
                    now, connection, f"{connection.endpoint.name} did not answer the handshake"
                )
            elif connection.sock is None and now >= connection.retry_at:
                self._open(connection, now)
            elif connection.partial:  # its sender may be too slow for epoll's low-water mark
                self._connection_event(now, connection, select.EPOLLIN)
        self._send_to_parent()
        overseer.tick(self.machine, now)
        metrics.store(self.control, self.machine)
        self._give_back(now)

    def _give_back(self, now: float) -> None:
        """Frees the pool's memory once it has been unused for IDLE_S. Sets W_IDLE.

        Keeps pages that a device has registered, because the device would continue to read the old ones.
        """
        words = self.control.words
        if self.machine.streams or self.machine.placer.space.used_nbytes:
            self._used_at, self._is_given_back = now, False
        idle_s = now - self._used_at
        words[W_IDLE] = idle_s > GIVES_WAY_S
        if self._gives_back and idle_s > IDLE_S and not self._is_given_back and not words[W_REGISTERED]:
            self._is_given_back = True
            for region in self.regions.values():
                region.give_back()

    # The trainer's socket

    def _trainer_packets(self, now: float) -> None:
        for _ in range(PACKETS_AT_ONCE):
            try:
                data = self._trainer.recv(ipc.HEAD_NBYTES + ipc.CHUNK_NBYTES)
            except BlockingIOError:
                return
            except ConnectionError as exc:
                raise TrainerGone from exc
            if not data:
                raise TrainerGone
            if (packet := self._incoming.feed(data)) is None:
                continue
            if packet.type in (ipc.Type.TICKETS, ipc.Type.CLOSE):
                self._maybe_passed(packet)
            if packet.type == ipc.Type.TICKETS:
                entries, waiting = ticket_codec.split_tickets(packet.payload), bool(packet.ticket)
                self.machine.tickets(now, packet.stream, entries, packet.awaiting, waiting=waiting)
            elif packet.type == ipc.Type.OPEN:
                self._open_stream(packet)
            elif packet.type == ipc.Type.STATUS:
                late = {"late": overseer.who_is_late(self.machine, packet.stream, packet.ticket)}
                self._send_trainer(ipc.pack_json(ipc.Type.STATUS, late, stream=packet.stream))
            elif packet.type == ipc.Type.CLOSE:
                self.machine.close_stream(now, packet.stream, packet.awaiting)

    def _maybe_passed(self, packet: ipc.Packet) -> None:
        failure = self._failure
        if failure is not None and supervision.failure_passed(failure, packet.stream, packet.awaiting):
            self._failure = None
            self._send_parent({"type": "failure"})

    def _open_stream(self, packet: ipc.Packet) -> None:
        message = ipc.parse_json(packet.payload)
        manifest = str(message["bundle"]).encode()
        bundle = Bundle.parse(manifest)
        self.machine.open_stream(
            packet.stream, manifest=manifest, bundle=bundle.id, facts=bundle.facts,
            window=int(message["window"]), awaited=packet.awaiting,
        )  # fmt: skip
        self._send_parent({"type": "bundle", "bundle": message["bundle"]})

    def _send_to_trainer(self) -> None:
        try:
            is_all_sent = self._outgoing.send()
        except OSError as exc:
            raise TrainerGone from exc
        self._watch(self._trainer.fileno(), select.EPOLLIN | (0 if is_all_sent else select.EPOLLOUT))

    def _send_trainer(self, packets: list[bytes], fd: int | None = None) -> None:
        self._outgoing.add(packets, fd)
        self._send_to_trainer()

    # The parent's channel

    def _parent_messages(self, now: float) -> None:
        while True:
            try:
                data = self._parent.recv(1 << 20)
            except BlockingIOError:
                return
            if not data:
                raise TrainerGone  # the parent is gone, and with it the sidecar
            message = json.loads(data)
            self.machine.desired_feeders = message.get("desired")
            self.machine.ended = str(message.get("ended") or "")
            self.machine.supervisor_notes = [str(n) for n in message.get("notes", [])]
            self.machine.out_of_memory = frozenset(map(str, message.get("out_of_memory", ())))
            self.machine.set_feeders(now, [streams.Endpoint(*e) for e in message["feeders"]])

    def _send_parent(self, message: dict[str, Any]) -> None:
        self._to_parent.append(json.dumps(message).encode())
        self._send_to_parent()

    def _send_to_parent(self) -> None:
        """Sends queued messages. Those that the channel does not accept now are sent on a later tick."""
        try:
            while self._to_parent:
                self._parent.send(self._to_parent[0])
                self._to_parent.popleft()
        except BlockingIOError:
            return
        except OSError as exc:
            raise TrainerGone from exc

    # Connections to feeders: the sink of `feeder_connection`

    def _connection_event(self, now: float, connection: FeederConnection, mask: int) -> None:
        try:
            connection.on_ready(mask)
        except LinkError as exc:
            reason = f"{connection.endpoint.name}: {exc}"
            if isinstance(exc, ProtocolError) and (reason != connection.told or now >= connection.tell_at):
                connection.told, connection.tell_at = reason, now + TELL_EVERY_S
                log(f"closed a connection: {reason}")
            self._end_connection(now, connection, reason)
            return
        self._dirty.add(connection)

    def connection_up(self, connection: FeederConnection, facts: dict[str, Any]) -> None:
        self.machine.feeder_up(time.monotonic(), connection.endpoint.instance, facts)

    def connection_frame(self, connection: FeederConnection, header: Header, payload: bytes) -> None:
        self.machine.frame(time.monotonic(), connection.endpoint.instance, header, payload)

    def connection_body(self, connection: FeederConnection, header: Header) -> memoryview | None:
        extent = self.machine.begin_body(time.monotonic(), connection.endpoint.instance, header)
        if extent is None:
            return None
        return self.regions[extent.region].view[extent.offset : extent.offset + header.nbytes]

    def connection_moved(self, connection: FeederConnection) -> None:
        self.machine.moved(time.monotonic(), connection.endpoint.instance)

    def connection_body_done(self, connection: FeederConnection, header: Header, digest: int) -> None:
        self.machine.end_body(time.monotonic(), connection.endpoint.instance, header, digest)

    def _open(self, connection: FeederConnection, now: float) -> None:
        try:
            connection.connect(now)
        except (OSError, TypeError, ValueError) as exc:  # the host that a feeder names may be invalid
            connection.give_up(now)
            self.machine.feeder_down(now, connection.endpoint.instance, f"{connection.endpoint.name}: {exc}")
            return
        assert connection.sock is not None  # noqa: S101
        fd = connection.sock.fileno()
        self._by_fd[fd] = connection
        self._masks[fd] = connection.interest
        self._poll.register(fd, connection.interest)

    def _end_connection(self, now: float, connection: FeederConnection, reason: str) -> None:
        self._forget_fd(connection)
        was_over_tcp = connection.over_tcp
        connection.give_up(now)
        self.machine.feeder_down(now, connection.endpoint.instance, reason)
        if connection.over_tcp and not was_over_tcp:
            self.machine.report(
                instructions.Note(
                    f"{reason}. Its memory cannot be shared; batches will come over TCP from now on"
                )
            )

    def _forget_fd(self, connection: FeederConnection) -> None:
        self._dirty.discard(connection)
        if connection.sock is not None:
            fd = connection.sock.fileno()
            self._poll.unregister(fd)
            del self._by_fd[fd], self._masks[fd]

    def _watch(self, fd: int, mask: int) -> None:
        if self._masks.get(fd) != mask:
            self._masks[fd] = mask
            self._poll.modify(fd, mask)

    # Instructions

    def _settle(self, now: float) -> None:
        """Carries out all instructions and sends all frames. Repeats this if a broken connection causes further
        instructions."""
        while True:
            for item in self.machine.take():
                self._do(now, item)
            self._flush()
            if not self.machine.busy:
                return

    def _do(self, now: float, item: object) -> None:
        match item:
            case instructions.Send(instance, header, payload):
                connection = self._connections[instance]
                connection.send(header, payload)
                self._dirty.add(connection)
            case instructions.Publish(lease, stream, ticket, extent, nbytes):
                if self.control.publish(lease, stream, ticket, extent.region, extent.offset, nbytes):
                    os.eventfd_write(self._wake_trainer, 1)
            case instructions.Unpublish(stream, ticket):
                self.control.unpublish(stream, ticket)
            case instructions.Fail(stream, ticket, payload, is_own):
                kind = ipc.Type.GIVEN_UP if is_own else ipc.Type.FAILED
                self._answer(kind, stream, ticket, payload)
                if self._failure is None:  # the trainer, too, raises only the first failure
                    self._failure = stream, ticket
                    self._send_parent({"type": "failure", **supervision.describe_failure(payload)})
            case instructions.End(stream, ticket, batches):
                self._answer(ipc.Type.ENDED, stream, ticket, frames.pack_end(batches))
            case instructions.SayThere(stream, ticket):
                if self.control.publish_word(THERE, stream, ticket):
                    os.eventfd_write(self._wake_trainer, 1)
            case instructions.CreateRegion(number, nbytes, single, lease_limit):
                region = regions.create(number, nbytes, single=single)
                self.regions[number] = region
                about = {"region": number, "nbytes": nbytes, "single": single, "lease_limit": lease_limit}
                self._send_trainer(ipc.pack_json(ipc.Type.REGION, about), region.fd)
            case instructions.DropRegion(number):
                self._send_trainer(ipc.pack_json(ipc.Type.DROP, {"region": number}))
                self.regions.pop(number).close()
            case instructions.Connect(endpoint):
                connection = FeederConnection(
                    endpoint,
                    self,
                    key=self._key,
                    job=self._job,
                    name=self._name,
                    trainer=self._process,
                    tls=self._tls,
                )
                self._connections[endpoint.instance] = connection
                self._open(connection, now)
            case instructions.Close(instance, _, again):
                self._close_connection(now, instance, again)
            case instructions.Discard(instance):
                self._connections[instance].discard()
            case instructions.Released(bundle):
                self._send_parent({"type": "released", "bundle": bundle.hex()})
            case instructions.Snapshot(stream, slot, payload):
                self._outgoing.add_snapshot(stream, slot, payload)
                self._send_to_trainer()
            case instructions.Note(text):
                self._outgoing.add_note(text)
                self._send_to_trainer()
            case instructions.Replace(endpoint, reason, connected):
                feeder = {"name": endpoint.name, "instance": endpoint.instance}
                self._send_parent({"type": "replace", **feeder, "reason": reason, "connected": connected})

    def _answer(self, kind: ipc.Type, stream: int, ticket: int, payload: bytes) -> None:
        """Tells the trainer that a ticket yields no batch, and why."""
        self._send_trainer(ipc.pack(kind, payload, stream=stream, ticket=ticket))
        self.control.publish_word(FAILED, stream, ticket)
        os.eventfd_write(self._wake_trainer, 1)

    def _close_connection(self, now: float, instance: str, again: bool) -> None:
        connection = self._connections[instance]
        self._forget_fd(connection)
        if again:
            connection.give_up(now)
        else:
            connection.close()
            del self._connections[instance]

    def _flush(self) -> None:
        """Sends all queued frames, with one call per connection."""
        for connection in list(self._dirty):
            if connection.sock is None:
                continue
            try:
                connection.flush()
            except OSError as exc:
                self._end_connection(time.monotonic(), connection, f"{connection.endpoint.name}: {exc}")
                continue
            self._watch(connection.sock.fileno(), connection.interest)
        self._dirty.clear()
