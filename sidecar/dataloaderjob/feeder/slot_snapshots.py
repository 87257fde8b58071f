"""Snapshots of slots, from which another builder can resume a slot. They are handed out only after a trial has shown
that the first of them restores the dataset's iterator.
"""

from __future__ import annotations

import functools
from typing import Protocol

from dataloaderjob.core import ticket_codec
from dataloaderjob.core.blobs import Bundle
from dataloaderjob.feeder.channel import Message, MessageKind, Session, SlotSession
from dataloaderjob.feeder.feeding_states import Task
from dataloaderjob.feeder.trials import Trials

MAX_TRIALS = 3
"""Maximum number of trials of one slot's snapshots if the trials yield no batch."""
TRIED_AFTER = 1
"""Minimum number of batches between a snapshot and the batch that tests it. By that batch, anything that the snapshot
omits has had an effect."""


class SnapshotReceiver(Protocol):
    """The feeder's loop, as the receiver of snapshots and of warnings about them."""

    def snapshot(self, bundle: Bundle, made: int, data: bytes) -> None: ...
    def say(self, bundle: Bundle, text: str) -> None: ...


class SlotSnapshots:
    """The snapshots of all slots of one feeder."""

    def __init__(self, trials: Trials, receiver: SnapshotReceiver) -> None:
        self._trials, self._receiver = trials, receiver

    def try_first(self, session: Session, slot: SlotSession, task: Task, digest: int) -> None:
        """Starts a trial, which rebuilds a later batch from the slot's first snapshot."""
        ticket = ticket_codec.unpack_slot_ticket(task.payload)
        if ticket is None or slot.first is None or ticket.number < slot.first[0] + TRIED_AFTER:
            return
        slot.is_tried, slot.trials = True, slot.trials + 1
        payload = ticket_codec.with_beginning(task.payload, slot.first, None)
        verdict = functools.partial(self._restored, session, slot, digest)
        self._trials.begin(session, session.introduction, payload, verdict)

    def _restored(self, session: Session, slot: SlotSession, expected: int, found: int | None) -> None:
        slot.is_tried = False
        if found is None and slot.trials < MAX_TRIALS:
            slot.first = None  # so that the next snapshot is tried
            return
        slot.is_exact = found == expected
        if slot.is_exact and slot.last is not None:
            self._receiver.snapshot(session.bundle, *slot.last)
        if not slot.is_exact:
            if session.channel is not None:
                session.channel.post(MessageKind.NO_STATE)
            why = (
                "could not be tested, because it yielded no batch"
                if found is None
                else "does not restore its iterator's state completely (does it have a shuffle buffer?)"
            )
            self.say(session, f"its state_dict() {why}, so the slot is rebuilt from its beginning")

    def received(self, session: Session, message: Message) -> None:
        """Keeps a builder's snapshot, and hands it out if the first one was exact."""
        slot = session.slot
        if slot is None:
            return
        slot.last = message.a, message.payload
        slot.first = slot.first or slot.last
        if slot.is_exact:
            self._receiver.snapshot(session.bundle, *slot.last)

    def say(self, session: Session, text: str) -> None:
        self._receiver.say(session.bundle, f"slot {session.bundle.slot} of the dataset: {text}")
