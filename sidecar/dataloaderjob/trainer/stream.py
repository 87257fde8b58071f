"""One live iterator as the trainer's client sees it, and its tickets as messages. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

from dataloaderjob.core import link, tickets

MESSAGE_NBYTES = 4 << 20


@dataclass(slots=True, eq=False)
class Stream:
    """What was asked for and not taken."""

    id: int
    manifest: str
    window: int
    awaited: int = 0
    pending: dict[int, bytes] = field(default_factory=dict)
    """Tickets sent and not taken: what is sent again when a sidecar dies."""
    failures: dict[int, bytes] = field(default_factory=dict)
    unsent: list[tuple[int, bytes]] = field(default_factory=list)
    told_waiting: int | None = None
    """The ticket that the receiver knows us to sleep for."""

    @property
    def together(self) -> int:
        """Tickets in one message: so few that feeders never run out of work for it."""
        return max(1, min(8, self.window // 4))

    def messages(self, entries: list[tuple[int, bytes]], *, waiting: bool = False) -> list[bytes]:
        """Packets with (number, payload) of tickets, in messages of a few MB, each with one ticket at least."""
        packets: list[bytes] = []
        group: list[tuple[int, bytes]] = []
        nbytes = 0
        for entry in entries:
            if group and nbytes + len(entry[1]) > MESSAGE_NBYTES:
                packets += self._message(group, waiting=waiting)
                group, nbytes = [], 0
            group.append(entry)
            nbytes += len(entry[1])
        return packets + self._message(group, waiting=waiting)

    def _message(self, group: list[tuple[int, bytes]], *, waiting: bool) -> list[bytes]:
        return link.pack(
            link.Type.TICKETS, tickets.join(group), stream=self.id, ticket=waiting, awaiting=self.awaited
        )
