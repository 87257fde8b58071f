"""A builder: the process that makes batches for one session of a bundle, in its main thread, one after another.

Forked from the bundle's template (`template`), so that it has the dataset as the trainer shipped it, for as long as
one loader's epoch lasts, or with persistent_workers its loader. It has no thread: user code may fork, set signals
and run an event loop. A batch goes into shared memory, from which the feeder sends it; so user code may change what
it returned.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import struct
import time
from collections import deque
from collections.abc import Callable
from typing import Any, NoReturn

import numpy as np
import torch

from dataloaderjob.batches.digest import batch_digest
from dataloaderjob.batches.encoding import EncodedBatch, encode
from dataloaderjob.core import digests, frames
from dataloaderjob.core.control import seal
from dataloaderjob.core.errors import InputError
from dataloaderjob.core.frames import Flag
from dataloaderjob.core.processes import end_as
from dataloaderjob.feeder.answers import Answer, Answers, Snapshots
from dataloaderjob.feeder.channel import BUILT, NOWHERE, Channel, Introduction, Kind, Message
from dataloaderjob.making.failures import pack_failure
from dataloaderjob.making.fetcher import Fetcher, identity_in_slot, identity_of, seed_batch, seed_worker
from dataloaderjob.making.held import NOTHING_HELD, HeldGenerators
from dataloaderjob.making.sessions import begin_session, held_by, introduce
from dataloaderjob.making.slot_source import SlotEnded, SlotSource, be_of_rank
from dataloaderjob.making.staged import Staged, unchanged
from dataloaderjob.making.staging import StageFetcher
from dataloaderjob.shipping.bundles import UserCode

REPLAY_S = 1.0
"""How often it is told how far a slot that is made again has come."""
DIFFERS = (
    "what was made again is not what was sent before: the dataset is not deterministic given its seeds (a clock, "
    "os.urandom, whoever is first?), so what follows does not continue it"
)
PROBE_WAIT_S = 0.5
"""A PROGRESS message gets so long to leave the feeder before its sample, which may end the process, is made."""
SPARE_BUFFERS = 3
"""Free buffers kept: what a feeder may hold of one session, and one to build into."""
_ROUND_NBYTES = 64 * 1024
_LARGE_NBYTES = 64 * 1024
PLACE = struct.Struct("<Qq")
"""Words of the page that a builder shares with its template: serial of the task, position of the sample."""


class Buffers:
    """Shared memory for bodies. The feeder says which ones are free again."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._maps: dict[int, mmap.mmap] = {}
        self._free: deque[int] = deque()
        self._last = 0

    def take(self, nbytes: int) -> tuple[int, memoryview]:
        """A free buffer of `nbytes` or more: (number, its memory)."""
        for number in self._free:
            if nbytes <= len(self._maps[number]) <= 4 * nbytes + _ROUND_NBYTES:
                self._free.remove(number)
                return number, memoryview(self._maps[number])
        while len(self._free) >= SPARE_BUFFERS:
            self._drop(self._free.popleft())
        return self._create(nbytes)

    def view(self, number: int) -> memoryview:
        """What lies in a buffer that was taken."""
        return memoryview(self._maps[number])

    def free(self, number: int) -> None:
        self._free.append(number)
        while len(self._free) > SPARE_BUFFERS:
            self._drop(self._free.popleft())

    def _create(self, nbytes: int) -> tuple[int, memoryview]:
        # An eighth more, for batches whose sizes differ a little.
        size = -(-(nbytes + nbytes // 8) // _ROUND_NBYTES) * _ROUND_NBYTES
        self._last += 1
        fd = os.memfd_create("dlj-body", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, size)
            made = mmap.mmap(fd, size, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
            seal(fd, is_written_here=True)
            self._channel.send(Kind.BUFFER, a=self._last, b=size, fd=fd)
        finally:
            os.close(fd)
        self._maps[self._last] = made
        return self._last, memoryview(made)

    def _drop(self, number: int) -> None:
        self._maps.pop(number).close()
        self._channel.send(Kind.DROP, a=number)


class Builder:
    """`run` until the feeder ends the session."""

    def __init__(self, code: UserCode, channel: Channel, place: mmap.mmap) -> None:
        self._code, self._channel, self._place = code, channel, place
        self._buffers = Buffers(channel)
        staged = code.collate_fn if isinstance(code.collate_fn, Staged) else None
        self._fetcher = StageFetcher(staged) if staged else Fetcher(code.dataset, code.collate_fn)
        self._source = SlotSource(code.dataset, unchanged if staged else code.collate_fn)
        self._is_staged = staged is not None
        self._answers = Answers(self._buffers.free)
        self._snapshots = Snapshots()
        self._waiting: deque[Message] = deque()
        self._session: Introduction | None = None

    def warm_up(self, nbytes: int) -> None:
        """Does once, on nothing of the user's, what each batch needs: memory shared with the template is copied at
        its first use, which takes 5 to 10 ms. `nbytes`: of a body, as far as one is known."""
        try:
            seed_worker(0, 0)
            seed_batch(0, 0)
            encode(torch.stack([torch.zeros(1), torch.zeros(1)]), allow_pickle=False)
            number, view = self._buffers.take(max(nbytes, 1))
        except ConnectionError:
            raise
        except Exception:  # torch as the user's modules left it; the first batch meets it, if any does
            return
        view.release()
        self._buffers.free(number)

    def run(self) -> None:
        """Raises OSError when the feeder is gone in mid-message."""
        while (message := self._receive()) is not None:
            if message.kind == Kind.BUILD:
                if frames.slot_of(message.payload) is None:
                    self._build(message)
                elif not self._build_of_slot(message):
                    return
            elif message.kind == Kind.NO_STATE:
                self._snapshots.stop()
            elif message.kind == Kind.FREE:
                if self._here.is_slot:
                    self._answers.returned(message.a)
                else:
                    self._buffers.free(message.a)
            elif message.kind == Kind.INIT:
                if message.fd is not None:  # where to print from now on
                    os.dup2(message.fd, 1)
                    os.dup2(message.fd, 2)
                    os.close(message.fd)
                if not self._init(Introduction.parse(message.payload)):
                    return

    def _receive(self) -> Message | None:
        return self._waiting.popleft() if self._waiting else self._channel.receive()

    # worker_init_fn

    def _init(self, session: Introduction) -> bool:
        """Begins a session. Returns False when that failed."""
        self._session = session
        self._source.allow_pickle = session.allow_pickle
        try:
            if session.is_slot or self._is_staged:
                be_of_rank(session.env)
            begin_session(
                self._code, index=session.index, num_workers=session.num_workers, base_seed=session.base_seed,
                held=self._held(session),
            )  # fmt: skip
        except BaseException as exc:  # user code may raise anything, SystemExit too
            self._channel.send(Kind.INIT_FAILED, payload=self._failure(exc, "worker_init_fn"))
            return False
        self._channel.send(Kind.UP)
        return True

    def _held(self, session: Introduction) -> HeldGenerators:
        """The generators of a loader whose samples any feeder makes: a slot's draw as torch's worker's do."""
        if not session.is_slot and self._fetcher.held is NOTHING_HELD:
            self._fetcher.held = held_by(self._code, session.held)
        return self._fetcher.held

    @property
    def _here(self) -> Introduction:
        if self._session is None:
            raise RuntimeError("a builder is told whom it works for before anything else")
        return self._session

    @property
    def _allow_pickle(self) -> bool:
        """Whether a slot's batches may bring pickles: what another feeder opens may."""
        return self._is_staged or self._here.allow_pickle

    # Batches

    def _build(self, message: Message) -> None:
        serial = message.a
        PLACE.pack_into(self._place, 0, serial, NOWHERE)
        made = self._make(message)
        kind, payload = (Kind.FAILED, made) if isinstance(made, bytes) else self._place_body(*made)
        self._channel.send(kind, a=serial, payload=payload)
        PLACE.pack_into(self._place, 0, 0, NOWHERE)

    def _build_of_slot(self, message: Message) -> bool:
        """Returns False where the slot is beyond that batch, and has it no more, or could begin at a snapshot: another
        builder begins anew."""
        ticket = frames.unpack_slot_ticket(message.payload)
        assert ticket is not None  # noqa: S101  it was looked at before
        PLACE.pack_into(self._place, 0, message.a, NOWHERE)
        self._answers.forget(ticket.needed)
        answer = self._answers.get(ticket.number)
        if answer is None:
            is_fresh = not self._source.made and ticket.number and not (ticket.snapshot or ticket.known)
            if ticket.number < self._source.made or (is_fresh and message.flags & Flag.RESTORABLE):
                return False
            if self._here.ranks:
                self._make_for_others(ticket, message)
            answer = self._answer(ticket, message)
            self._answers.keep(ticket.number, answer)
            if answer.kind is Kind.BUILT and (snapshot := self._snapshots.take(self._source)) is not None:
                kind = Kind.NO_STATE if self._snapshots.stopped else Kind.SNAPSHOT
                self._channel.send(kind, a=self._source.made, payload=snapshot)
        if self._here.ranks and ticket.known is not None:
            self._compare(*ticket.known)
        if ticket.asks and self._source.made > ticket.number:
            answer = Answer(kind=Kind.FAILED, payload=frames.pack_there(ticket.number), flags=Flag.ENDED)
        self._answers.lend(answer)
        self._channel.send(answer.kind, a=message.a, flags=answer.flags, payload=answer.payload)
        PLACE.pack_into(self._place, 0, 0, NOWHERE)
        return True

    def _make_for_others(self, ticket: frames.SlotTicket, message: Message) -> None:
        """Makes the batches before this one that other ranks may ask for, and keeps them."""
        made, told_at = self._source.made or (ticket.snapshot[0] if ticket.snapshot else 0), time.monotonic()
        for number in range(max(made, ticket.needed), ticket.number):
            answer = self._answer(ticket._replace(number=number), message)
            self._answers.keep(number, answer)
            if answer.flags & Flag.ENDED:
                return
            if (now := time.monotonic()) - told_at > REPLAY_S:
                told_at = now
                self._channel.send(Kind.REPLAYED, a=message.a, b=number + 1)

    def _compare(self, number: int, digest: int) -> None:
        """Says it where a batch that a rank had before came out differently when it was made again."""
        answer = self._answers.get(number)
        if answer is None or answer.buffer is None:
            return
        if digests.of_body(self._buffers.view(answer.buffer)) != digest:
            self._channel.send(Kind.NO_STATE, payload=f"{DIFFERS} (batch {number})".encode())

    def _answer(self, ticket: frames.SlotTicket, message: Message) -> Answer:
        """Makes the next batch of the slot."""
        phase, source = "", self._source
        write, probe = self._write_place(message.a), self._on_sample(message)

        def on_sample(position: int) -> None:  # what is made again is not reported before it is made
            (probe if source.made == ticket.number else write)(position)

        try:
            batch = source.make(ticket, on_sample, self._on_replay(ticket, message.a))
            phase = "encoding the batch"
            made = encode(batch, allow_pickle=self._allow_pickle)
        except SlotEnded:
            if ticket.known is not None and source.made <= ticket.known[0]:
                return Answer(kind=Kind.FAILED, payload=self._shorter(source, ticket))
            return Answer(kind=Kind.FAILED, payload=frames.pack_end(self._source.made), flags=Flag.ENDED)
        except BaseException as exc:
            return Answer(kind=Kind.FAILED, payload=self._failure(exc, phase))
        kind, payload = self._place_body(made, identity_in_slot(ticket))
        if kind is not Kind.BUILT:
            return Answer(kind=kind, payload=payload)
        return Answer(kind=kind, payload=payload, buffer=BUILT.unpack(payload)[0])

    def _shorter(self, source: SlotSource, ticket: frames.SlotTicket) -> bytes:
        """The failure of a slot that ended, when it was made again, before what was had of it."""
        assert ticket.known is not None  # noqa: S101  it was looked at before
        if source.swallowed is not None:
            return self._failure(source.swallowed, "making the slot again")
        return self._failure(
            InputError(
                f"slot {ticket.slot} ended after {source.made} batches when it was made again, of which "
                f"{ticket.known[0] + 1} were had before: the dataset is not deterministic given its seeds"
            ),
            "",
        )

    def _on_replay(self, ticket: frames.SlotTicket, serial: int) -> Callable[[int, Any], None]:
        """Tells of batches that are made again, and compares the one of which it is known what came before."""
        told_at = time.monotonic()

        def replayed(number: int, batch: Any) -> None:
            nonlocal told_at
            if ticket.known is not None and number == ticket.known[0]:
                again = ticket._replace(number=number)
                found = batch_digest(batch, identity_in_slot(again), allow_pickle=self._allow_pickle)
                if found != ticket.known[1]:
                    self._channel.send(Kind.NO_STATE, payload=f"{DIFFERS} (batch {number})".encode())
            if (now := time.monotonic()) - told_at > REPLAY_S:
                told_at = now
                self._channel.send(Kind.REPLAYED, a=serial, b=number + 1)

        return replayed

    def _place_body(self, made: EncodedBatch, identity: int) -> tuple[Kind, bytes]:
        """Copies a batch and seals it. Returns what to answer, and its payload."""
        try:
            number, view = self._buffers.take(made.nbytes)
        except ConnectionError:
            raise
        except OSError as exc:  # user code has used up the descriptors, or the memory
            return Kind.FAILED, self._failure(exc, "placing the batch")
        at = 0
        for part in made.buffers:
            copy(view[at : at + len(part)], part)
            at += len(part)
        with view[:at] as body:
            digests.seal(body, identity)
        view.release()
        return Kind.BUILT, BUILT.pack(number, at)

    def _make(self, message: Message) -> tuple[EncodedBatch, int] | bytes:
        """Returns a batch with its identity, or the packed failure of whatever user code raises."""
        phase = "loading the sampler's keys"
        try:
            ticket = _unpack(message.payload)
            introduce(
                self._code.dataset, index=self._here.index, num_workers=self._here.num_workers,
                base_seed=ticket.base_seed,
            )  # fmt: skip
            phase = ""  # of the user's code: the fetcher says which
            batch = self._fetcher.fetch(message.b, ticket, self._on_sample(message))
            phase = "encoding the batch"
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
        """Has the feeder tell which sample comes next, before that sample can end all processes of the machine."""
        self._channel.send(Kind.PROGRESS, a=serial, b=position)
        deadline = time.monotonic() + PROBE_WAIT_S
        try:
            while (left := deadline - time.monotonic()) > 0:
                self._channel.sock.settimeout(left)
                message = self._channel.receive()
                if message is None or message.kind == Kind.ACK:
                    return
                self._waiting.append(message)
        except TimeoutError:
            return
        finally:
            self._channel.sock.settimeout(None)

    def _failure(self, exc: BaseException, phase: str) -> bytes:
        return pack_failure(exc, phase=phase, feeder=self._here.feeder)


def copy(to: memoryview, part: bytes | memoryview) -> None:
    """Copies a part of a body: a large one without the interpreter's lock, for which threads of user code, such as
    those of Ray Data, would wait."""
    if len(part) < _LARGE_NBYTES:
        to[:] = part
    else:
        np.copyto(np.frombuffer(to, np.uint8), np.frombuffer(part, np.uint8))


def _unpack(payload: bytes) -> frames.Ticket:
    """Raises InputError for keys whose types this feeder does not have."""
    try:
        return frames.unpack_ticket(payload)
    except (ImportError, AttributeError) as exc:
        raise InputError(
            f"the sampler's keys cannot be loaded in a feeder: {exc}. Use ints, strings or tuples for keys, or types "
            "of a module that is installed in the feeders' image"
        ) from exc


def main(code: UserCode, channel: Channel, place: mmap.mmap, nbytes: int) -> NoReturn:
    """The whole life of a builder's process. `nbytes`: of a body of this bundle, 0 if none is known."""

    def run() -> None:
        with contextlib.suppress(ConnectionError):  # the feeder is gone: nobody waits for anything
            builder = Builder(code, channel, place)
            if nbytes:
                builder.warm_up(nbytes)
            builder.run()

    end_as(run)
