"""One live iterator as the trainer's client sees it, and its tickets as messages. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from dataloaderjob.core import link, tickets

MESSAGE_NBYTES = 4 << 20


Ints = tuple[int, int, list[int], bool]
"""The arguments of `tickets.pack_ints`: not packed yet, for several are packed at a time, while that code is in
the caches."""


@dataclass(slots=True, eq=False)
class Stream:
    """What was asked for and not taken."""

    id: int
    manifest: str
    window: int
    awaited: int = 0
    pending: dict[int, Ints | bytes] = field(default_factory=dict)
    """Tickets not taken, sent or not: what is sent again when a sidecar dies."""
    failures: dict[int, bytes] = field(default_factory=dict)
    asked: int = 0
    told: int = 0
    """Tickets from `told` to below `asked` are held back."""
    told_waiting: int | None = None
    """The ticket that the receiver knows us to sleep for."""
    together: int = field(init=False)
    """Tickets in one message: so few that feeders never run out of work for it."""

    def __post_init__(self) -> None:
        self.together = max(1, min(8, self.window // 3))

    def messages(self, numbers: Iterable[int], *, waiting: bool = False) -> list[bytes]:
        """Packets with these pending tickets, in messages of a few MB, each with one ticket at least."""
        packets: list[bytes] = []
        group: list[tuple[int, bytes]] = []
        nbytes = 0
        for number in numbers:
            ticket = self.pending[number]
            payload = ticket if type(ticket) is bytes else tickets.pack_ints(*ticket)
            if group and nbytes + len(payload) > MESSAGE_NBYTES:
                packets += self._message(group, waiting=waiting)
                group, nbytes = [], 0
            group.append((number, payload))
            nbytes += len(payload)
        return packets + self._message(group, waiting=waiting)

    def _message(self, group: list[tuple[int, bytes]], *, waiting: bool) -> list[bytes]:
        return link.pack(
            link.Type.TICKETS, tickets.join(group), stream=self.id, ticket=waiting, awaiting=self.awaited
        )
