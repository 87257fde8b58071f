"""A builder: the process that makes batches for one session of a bundle, one at a time, in its main thread.

It is forked from the bundle's template (`template`), so it has the dataset as the trainer shipped it. It lives for one
epoch of a loader or, with persistent_workers, as long as the loader. It has no threads, so user code may fork, set
signal handlers and run an event loop. Each batch is copied into shared memory, from which the feeder sends it.
Therefore, user code may modify the objects that it returned.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import struct
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import torch

from dataloaderjob.batches.digest import batch_digest
from dataloaderjob.batches.encoding import EncodedBatch, encode
from dataloaderjob.core import digests, frames, ticket_codec
from dataloaderjob.core.costs import CostClock, QueuedTime
from dataloaderjob.core.errors import InputError
from dataloaderjob.core.frames import Flag
from dataloaderjob.core.processes import end_as
from dataloaderjob.feeder.answers import Answer, Answers, SnapshotClock
from dataloaderjob.feeder.body_buffers import Buffers, copy
from dataloaderjob.feeder.channel import BUILT, NOWHERE, Channel, Introduction, Message, MessageKind
from dataloaderjob.feeder.timing import NoClock, open_clock
from dataloaderjob.making.failures import pack_failure
from dataloaderjob.making.fetcher import Fetcher, identity_in_slot, identity_of, seed_batch, seed_worker
from dataloaderjob.making.held import NOTHING_HELD, HeldGenerators
from dataloaderjob.making.sessions import begin_session, held_by, introduce
from dataloaderjob.making.slot_source import SlotEnded, SlotSource, be_of_rank
from dataloaderjob.making.staged import Staged, unchanged
from dataloaderjob.making.staging import StageFetcher
from dataloaderjob.shipping.bundles import UserCode

REPLAY_S = 1.0
"""Interval between progress reports while a slot is being rebuilt."""
DIFFERS = (
    "a rebuilt batch differs from the one sent before, so the following batches do not continue "
    "the same sequence: the dataset is not deterministic given its seeds (does it use a clock, os.urandom, "
    "or the order in which processes run?)"
)
PROBE_WAIT_S = 0.5
"""Maximum time for which a builder waits until the feeder has forwarded PROGRESS. The builder then makes the sample,
which may kill it."""
PLACE = struct.Struct("<Qq")
"""Layout of the page that a builder shares with its template: the task's serial number, the sample's position."""


class Builder:
    """A builder of the batches of one session. `run` returns when the feeder ends the session."""

    def __init__(self, code: UserCode, channel: Channel, place: mmap.mmap, times: Path | None = None) -> None:
        """`times`: folder for the times of batches, if it exists."""
        self._code, self._channel, self._place = code, channel, place
        self._times, self._clock = times, NoClock()
        self._buffers = Buffers(channel)
        staged = code.collate_fn if isinstance(code.collate_fn, Staged) else None
        self._fetcher = StageFetcher(staged) if staged else Fetcher(code.dataset, code.collate_fn)
        self._source = SlotSource(code.dataset, unchanged if staged else code.collate_fn)
        self._is_staged = staged is not None
        self._queued_time = QueuedTime()
        self._costs = CostClock(self._queued_time)
        self._fetcher.on_collate = self._source.on_collate = self._fetched
        self._answers = Answers(self._buffers.free)
        self._snapshots = SnapshotClock()
        self._waiting: deque[Message] = deque()
        self._session: Introduction | None = None

    def warm_up(self, nbytes: int) -> None:
        """Performs the steps for a batch once, without user code. This copies memory that the builder shares with the
        template. Otherwise, copying it would delay the first batch by 5 to 10 ms. `nbytes`: the size of a body, if
        known."""
        try:
            seed_worker(0, 0)
            seed_batch(0, 0)
            encode(torch.stack([torch.zeros(1), torch.zeros(1)]), allow_pickle=False)
            number, view = self._buffers.take(max(nbytes, 1))
        except ConnectionError:
            raise
        except Exception:  # the user's modules may have patched torch; if that matters, the first batch fails
            return
        view.release()
        self._buffers.free(number)

    def run(self) -> None:
        """Handles the feeder's messages. Raises OSError if the feeder disappears in the middle of a message."""
        while (message := self._receive()) is not None:
            if message.kind == MessageKind.BUILD:
                if ticket_codec.slot_of(message.payload) is None:
                    self._build(message)
                elif not self._build_of_slot(message):
                    return
            elif message.kind == MessageKind.NO_STATE:
                self._snapshots.stop()
            elif message.kind == MessageKind.FREE:
                if self._here.is_slot:
                    self._answers.returned(message.a)
                else:
                    self._buffers.free(message.a)
            elif message.kind == MessageKind.INIT:
                if message.fd is not None:  # the destination of output from now on
                    os.dup2(message.fd, 1)
                    os.dup2(message.fd, 2)
                    os.close(message.fd)
                if not self._init(Introduction.parse(message.payload)):
                    return

    def _receive(self) -> Message | None:
        return self._waiting.popleft() if self._waiting else self._channel.receive()

    # worker_init_fn

    def _init(self, session: Introduction) -> bool:
        """Begins a session. Returns False if this fails."""
        self._session = session
        self._clock = open_clock(
            self._times, session.feeder, self._queued_time, by_sample=self._fetcher.is_by_sample
        )
        self._source.allow_pickle = session.allow_pickle
        try:
            if session.is_slot or self._is_staged:
                be_of_rank(session.env)
            begin_session(
                self._code, index=session.index, num_workers=session.num_workers, base_seed=session.base_seed,
                held=self._held(session),
            )  # fmt: skip
        except BaseException as exc:  # user code may raise anything, even SystemExit
            self._channel.send(MessageKind.INIT_FAILED, payload=self._failure(exc, "worker_init_fn"))
            return False
        self._channel.send(MessageKind.UP)
        return True

    def _held(self, session: Introduction) -> HeldGenerators:
        """Returns the RNGs that the dataset and collate_fn hold (`making.held`). Returns none for a slot, because its
        RNGs draw as in one of torch's workers."""
        if not session.is_slot and self._fetcher.held is NOTHING_HELD:
            self._fetcher.held = held_by(self._code, session.held)
        return self._fetcher.held

    @property
    def _here(self) -> Introduction:
        if self._session is None:
            raise RuntimeError("a builder must receive its introduction before any other message")
        return self._session

    @property
    def _allow_pickle(self) -> bool:
        """True if a slot's batches may contain pickles. Batches that are passed on to another feeder's stage may always
        contain them."""
        return self._is_staged or self._here.allow_pickle

    # Batches

    def _begin_clocks(self) -> None:
        self._clock.begin()
        self._costs.begin()

    def _fetched(self) -> None:
        """Marks the end of a batch's samples and the start of collate_fn."""
        self._clock.fetched()
        self._costs.collate()

    def _build(self, message: Message) -> None:
        serial = message.a
        PLACE.pack_into(self._place, 0, serial, NOWHERE)
        self._begin_clocks()
        made = self._make(message)
        kind, payload = (MessageKind.FAILED, made) if isinstance(made, bytes) else self._place_body(*made)
        self._clock.end(message.b, message.payload, _nbytes_of(kind, payload))
        if kind is MessageKind.BUILT:
            payload += self._costs.end().pack()
        self._channel.send(kind, a=serial, payload=payload)
        PLACE.pack_into(self._place, 0, 0, NOWHERE)

    def _build_of_slot(self, message: Message) -> bool:
        """Makes a slot's batch, or sends it again. Returns False if another builder must rebuild the slot, because this
        one no longer has the batch, or did not get an existing snapshot or digest."""
        ticket = ticket_codec.unpack_slot_ticket(message.payload)
        assert ticket is not None  # noqa: S101  checked before
        PLACE.pack_into(self._place, 0, message.a, NOWHERE)
        self._answers.forget(ticket.needed)
        answer, cost = self._answers.get(ticket.number), b""
        if answer is None:
            is_fresh = not self._source.made and ticket.number and not (ticket.snapshot or ticket.known)
            if ticket.number < self._source.made or (is_fresh and message.flags & Flag.RESTORABLE):
                return False
            if self._here.ranks:
                self._make_for_others(ticket, message)
            # If earlier batches are rebuilt first, the cost would include these batches.
            is_next = self._source.made == ticket.number
            self._begin_clocks()
            answer = self._answer(ticket, message)
            if not answer.flags & Flag.ENDED:
                self._clock.end(ticket.number, message.payload, _nbytes_of(answer.kind, answer.payload))
            if is_next and answer.kind is MessageKind.BUILT:
                cost = self._costs.end().pack()
            self._answers.keep(ticket.number, answer)
            if (
                answer.kind is MessageKind.BUILT
                and (snapshot := self._snapshots.take(self._source)) is not None
            ):
                kind = MessageKind.NO_STATE if self._snapshots.stopped else MessageKind.SNAPSHOT
                self._channel.send(kind, a=self._source.made, payload=snapshot)
        if self._here.ranks and ticket.known is not None:
            self._compare(*ticket.known)
        if ticket.asks and self._source.made > ticket.number:
            answer = Answer(
                kind=MessageKind.FAILED, payload=frames.pack_there(ticket.number), flags=Flag.ENDED
            )
            cost = b""
        self._answers.lend(answer)
        self._channel.send(answer.kind, a=message.a, flags=answer.flags, payload=answer.payload + cost)
        PLACE.pack_into(self._place, 0, 0, NOWHERE)
        return True

    def _make_for_others(self, ticket: ticket_codec.SlotTicket, message: Message) -> None:
        """Makes and keeps the batches before this one that other ranks may request."""
        made, told_at = self._source.made or (ticket.snapshot[0] if ticket.snapshot else 0), time.monotonic()
        for number in range(max(made, ticket.needed), ticket.number):
            answer = self._answer(ticket._replace(number=number), message)
            self._answers.keep(number, answer)
            if answer.flags & Flag.ENDED:
                return
            if (now := time.monotonic()) - told_at > REPLAY_S:
                told_at = now
                self._channel.send(MessageKind.REPLAYED, a=message.a, b=number + 1)

    def _compare(self, number: int, digest: int) -> None:
        """Warns if a rebuilt batch differs from the one that a rank received before."""
        answer = self._answers.get(number)
        if answer is None or answer.buffer is None:
            return
        if digests.of_body(self._buffers.view(answer.buffer)) != digest:
            self._channel.send(MessageKind.NO_STATE, payload=f"{DIFFERS} (batch {number})".encode())

    def _answer(self, ticket: ticket_codec.SlotTicket, message: Message) -> Answer:
        """Makes the next batch of the slot."""
        phase, source = "", self._source
        write, probe = self._write_place(message.a), self._on_sample(message)

        def on_sample(position: int) -> None:  # samples of rebuilt batches are not announced
            (probe if source.made == ticket.number else write)(position)

        try:
            batch = source.make(ticket, self._clock.watching(on_sample), self._on_replay(ticket, message.a))
            self._clock.made()
            phase = "encoding the batch"
            self._costs.encode()
            made = encode(batch, allow_pickle=self._allow_pickle)
        except SlotEnded:
            if ticket.known is not None and source.made <= ticket.known[0]:
                return Answer(kind=MessageKind.FAILED, payload=self._shorter(source, ticket))
            return Answer(
                kind=MessageKind.FAILED, payload=frames.pack_end(self._source.made), flags=Flag.ENDED
            )
        except BaseException as exc:
            return Answer(kind=MessageKind.FAILED, payload=self._failure(exc, phase))
        kind, payload = self._place_body(made, identity_in_slot(ticket))
        if kind is not MessageKind.BUILT:
            return Answer(kind=kind, payload=payload)
        return Answer(kind=kind, payload=payload, buffer=BUILT.unpack(payload)[0])

    def _shorter(self, source: SlotSource, ticket: ticket_codec.SlotTicket) -> bytes:
        """Returns the failure of a rebuilt slot that ended before a batch that it had yielded earlier."""
        assert ticket.known is not None  # noqa: S101  checked before
        if source.swallowed is not None:
            return self._failure(source.swallowed, "rebuilding the slot")
        return self._failure(
            InputError(
                f"slot {ticket.slot} ended after {source.made} batches when it was rebuilt, but yielded "
                f"{ticket.known[0] + 1} before: the dataset is not deterministic given its seeds"
            ),
            "",
        )

    def _on_replay(self, ticket: ticket_codec.SlotTicket, serial: int) -> Callable[[int, Any], None]:
        """Returns a callback that reports rebuilt batches. It also compares one of them with its earlier digest, if
        that is known."""
        told_at = time.monotonic()

        def replayed(number: int, batch: Any) -> None:
            nonlocal told_at
            if ticket.known is not None and number == ticket.known[0]:
                again = ticket._replace(number=number)
                found = batch_digest(batch, identity_in_slot(again), allow_pickle=self._allow_pickle)
                if found != ticket.known[1]:
                    self._channel.send(MessageKind.NO_STATE, payload=f"{DIFFERS} (batch {number})".encode())
            if (now := time.monotonic()) - told_at > REPLAY_S:
                told_at = now
                self._channel.send(MessageKind.REPLAYED, a=serial, b=number + 1)

        return replayed

    def _place_body(self, made: EncodedBatch, identity: int) -> tuple[MessageKind, bytes]:
        """Copies a batch into a buffer and seals it. Returns the kind and the payload of the answer."""
        try:
            number, view = self._buffers.take(made.nbytes)
        except ConnectionError:
            raise
        except OSError as exc:  # user code has used up the file descriptors or the memory
            return MessageKind.FAILED, self._failure(exc, "placing the batch")
        at = 0
        for part in made.buffers:
            copy(view[at : at + len(part)], part)
            at += len(part)
        with view[:at] as body:
            digests.seal(body, identity)
        view.release()
        return MessageKind.BUILT, BUILT.pack(number, at)

    def _make(self, message: Message) -> tuple[EncodedBatch, int] | bytes:
        """Returns a batch with its identity, or the packed failure if user code raises."""
        phase = "loading the sampler's keys"
        try:
            ticket = _unpack(message.payload)
            self._clock.keys = ticket.keys
            introduce(
                self._code.dataset, index=self._here.index, num_workers=self._here.num_workers,
                base_seed=ticket.base_seed,
            )  # fmt: skip
            phase = ""  # in user code: the fetcher names the phase
            batch = self._fetcher.fetch(message.b, ticket, self._clock.watching(self._on_sample(message)))
            self._clock.made()
            phase = "encoding the batch"
            self._costs.encode()
            made = encode(batch, allow_pickle=self._here.allow_pickle)
            return made, identity_of(message.b, ticket)
        except BaseException as exc:
            return self._failure(exc, phase)

    def _write_place(self, serial: int) -> Callable[[int], None]:
        place, write = self._place, PLACE.pack_into
        return lambda position: write(place, 0, serial, position)

    def _on_sample(self, message: Message) -> Callable[[int], None]:
        serial, write = message.a, self._write_place(message.a)
        if not message.flags & Flag.PROBE:
            return write

        def probed(position: int) -> None:
            write(position)
            self._progress(serial, position)

        return probed

    def _progress(self, serial: int, position: int) -> None:
        """Reports the next sample, and waits until the feeder has forwarded the report. The sample may kill all
        processes on the machine."""
        self._channel.send(MessageKind.PROGRESS, a=serial, b=position)
        deadline = time.monotonic() + PROBE_WAIT_S
        try:
            while (left := deadline - time.monotonic()) > 0:
                self._channel.sock.settimeout(left)
                message = self._channel.receive()
                if message is None or message.kind == MessageKind.ACK:
                    return
                self._waiting.append(message)
        except TimeoutError:
            return
        finally:
            self._channel.sock.settimeout(None)

    def _failure(self, exc: BaseException, phase: str) -> bytes:
        return pack_failure(exc, phase=phase, feeder=self._here.feeder)


def _nbytes_of(kind: int, payload: bytes) -> int | None:
    """Returns the size of the batch in an answer; None if user code failed."""
    return int(BUILT.unpack(payload)[1]) if kind == MessageKind.BUILT else None


def _unpack(payload: bytes) -> ticket_codec.Ticket:
    """Unpacks a ticket. Raises InputError if a key's type cannot be imported in this feeder."""
    try:
        return ticket_codec.unpack_ticket(payload)
    except (ImportError, AttributeError) as exc:
        raise InputError(
            f"the sampler's keys cannot be loaded in a feeder: {exc}. Use ints, strings or tuples as keys, "
            "or types from a module that is installed in the feeders' image"
        ) from exc


def main(code: UserCode, channel: Channel, place: mmap.mmap, nbytes: int, times: Path) -> NoReturn:
    """Runs a builder's process. `nbytes`: the size of a body of this bundle, or 0 if unknown. `times`: folder for the
    times of batches, if it exists."""

    def run() -> None:
        with contextlib.suppress(ConnectionError):  # the feeder is gone: nobody waits for batches
            builder = Builder(code, channel, place, times)
            if nbytes:
                builder.warm_up(nbytes)
            builder.run()

    end_as(run)
