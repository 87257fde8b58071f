"""Follows the machine's instructions: frames into the links' queues. Returns the links to flush then."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from dataloaderjob.core import frames
from dataloaderjob.core.frames import Flag, Header, Kind
from dataloaderjob.feeder.feeding import Feeding
from dataloaderjob.feeder.feeding_states import (
    Announce,
    Fail,
    Instruction,
    Job,
    Lost,
    NeedBundle,
    Send,
    Withdraw,
)
from dataloaderjob.feeder.receiver_connection import Buffer, Link
from dataloaderjob.feeder.sessions import Body

CHECKSUM = int(Flag.CHECKSUM)
"""A plain int: int & IntFlag costs 2 µs."""


class Outbox:
    """The links of a feeder, by number."""

    def __init__(self, machine: Feeding, loads: Callable[[], int]) -> None:
        """`loads`: how often this feeder has loaded a bundle."""
        self.links: dict[int, Link] = {}
        self._loads = loads
        self._machine = machine

    def perform(
        self, instructions: Iterable[Instruction], payload: bytes = b"", *, flags: int = 0, position: int = -1
    ) -> set[Link]:
        """`payload`: the packed failure of tickets that failed, or why they are lost, making sample `position`."""
        touched: set[Link] = set()
        for made in instructions:
            job = made.job
            link = self.links.get(job.link)
            if link is None:
                continue
            if isinstance(made, Send):
                link.queue_body(job, self._body_frame(job))
            elif isinstance(made, Withdraw):
                link.withdraw(job)
            elif isinstance(made, Announce):
                self.control(Kind.ANNOUNCE, job, room=job.nbytes)
            elif isinstance(made, Fail):
                self.control(Kind.FAILED, job, payload=payload, flags=flags)
            elif isinstance(made, Lost):
                self.control(Kind.LOST, job, payload=payload, room=position + 1)
            elif isinstance(made, NeedBundle):
                self.control(Kind.NEED_BUNDLE, job)
            touched.add(link)
        return touched

    def control(
        self, kind: Kind, job: Job, *, room: int = 0, payload: bytes = b"", flags: int = 0
    ) -> set[Link]:
        """Queues any frame but BODY about `job`."""
        link = self.links.get(job.link)
        if link is None:
            return set()
        header = frames.pack(
            kind, generation=job.generation, stream=job.stream, ticket=job.ticket, bundle=job.bundle,
            nbytes=len(payload), room=room, load=self._machine.load, flags=flags,
        )  # fmt: skip
        link.queue_control(header + payload)
        return {link}

    def confirm_cancelled(self, link: Link, cancel: Header) -> None:
        """Queues the answer to a CANCEL frame."""
        header = frames.pack(
            Kind.CANCELLED, generation=cancel.generation, stream=cancel.stream, ticket=cancel.ticket,
            load=self._machine.load,
        )  # fmt: skip
        link.queue_control(header)

    def _body_frame(self, job: Job) -> list[Buffer]:
        body: Body = job.body
        header = frames.pack(
            Kind.BODY, generation=job.generation, stream=job.stream, ticket=job.ticket, bundle=job.bundle,
            nbytes=job.nbytes, room=self._loads(), flags=job.flags & CHECKSUM, load=self._machine.load, crc=body.crc,
        )  # fmt: skip
        return [header, body.view]
