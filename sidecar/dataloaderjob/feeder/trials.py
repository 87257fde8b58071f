"""Trials of snapshots. A separate builder makes a slot's batch again, from a snapshot, to compare it with the batch
that was sent.

A slot resumes exactly from its snapshot only if the dataset's state is complete. A state may, for example, omit the
contents of a shuffle buffer. Therefore, the first snapshot of a slot is tried before any is handed out.
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from dataloaderjob.core import digests
from dataloaderjob.feeder import channel as ch
from dataloaderjob.feeder.bundles import Templates
from dataloaderjob.feeder.channel import Channel, MessageKind, Session, SharedBuffer, Template, Watching

LIMIT_S = 120.0
"""Seconds after which a trial is aborted, and counts as having made no batch."""
Verdict = Callable[[int | None], None]
"""Receives the digest of the rebuilt batch; None if no batch was made."""


@dataclass(slots=True, eq=False)
class _Trial:
    template: Template
    number: int
    channel: Channel
    verdict: Verdict
    session: Session
    deadline: float
    buffers: dict[int, SharedBuffer] = field(default_factory=dict)


class Trials:
    """The trials running at one feeder."""

    def __init__(self, watching: Watching, templates: Templates) -> None:
        self._watching, self._templates = watching, templates
        self._live: list[_Trial] = []

    def begin(self, session: Session, introduction: bytes, ticket: bytes, verdict: Verdict) -> None:
        """Starts a trial, in which a new builder makes the batch of a packed ticket. The builder's output is discarded,
        because the slot's own builder has already printed it."""
        number, channel = self._templates.builder(session.template)
        trial = _Trial(
            session.template, number, channel, verdict, session, time.monotonic() + LIMIT_S
        )  # fmt: skip
        self._live.append(trial)
        self._watching.watch(channel, functools.partial(self._listen, trial))
        channel.post(
            MessageKind.INIT, payload=introduction, fd=os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
        )
        channel.post(MessageKind.BUILD, a=1, payload=ticket)

    def end(self, session: Session) -> None:
        """Ends the trials of a session that has ended."""
        for trial in [trial for trial in self._live if trial.session is session]:
            self._close(trial)

    def tick(self, now: float) -> None:
        for trial in [trial for trial in self._live if now > trial.deadline]:
            self._over(trial, None)

    def _listen(self, trial: _Trial) -> None:
        if trial not in self._live:
            return
        messages, alive = trial.channel.read()
        trial.channel.flush()
        for message in messages:
            if message.kind == MessageKind.BUFFER and message.fd is not None:
                trial.buffers[message.a] = SharedBuffer(message.fd, message.b)
            elif message.kind == MessageKind.BUILT:
                buffer = trial.buffers[ch.BUILT.unpack_from(message.payload)[0]]
                self._over(trial, digests.of_body(memoryview(buffer.map)))
                return
            elif message.kind in (MessageKind.FAILED, MessageKind.INIT_FAILED):
                self._over(trial, None)
                return
        if not alive:
            self._over(trial, None)

    def _over(self, trial: _Trial, digest: int | None) -> None:
        self._close(trial)
        trial.verdict(digest)

    def _close(self, trial: _Trial) -> None:
        self._live.remove(trial)
        self._watching.unwatch(trial.channel)
        trial.channel.close()
        if self._templates.has(trial.template):
            trial.template.channel.post(MessageKind.KILL, a=trial.number)
