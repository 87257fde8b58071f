"""Slots whose batches are dealt to several ranks: one session of all of them, at the feeder that makes the slot. Pure.

Each rank asks for its own share of a slot, and whether the rest is there. What one rank has had another may still want.
"""

from __future__ import annotations

from collections.abc import Iterable

from dataloaderjob.core import frames
from dataloaderjob.core.blobs import Bundle
from dataloaderjob.core.frames import SlotTicket
from dataloaderjob.core.snapshots import STEPS_APART

SEEDS = (
    "ranks to which batches are dealt have to draw one base seed, and this one drew another: call torch.manual_seed "
    "with one number in all ranks before iter(loader), or give the loader a generator= that is seeded so"
)
DATASETS = (
    "ranks to which batches are dealt have to have one dataset, and this one's is not that of another rank: with tail= "
    "a dataset gives all of its data, whatever the rank (is the rank kept in it, or a set whose order differs?)"
)


class Needs:
    """Which batches of its slot the ranks of each session may still ask for."""

    def __init__(self) -> None:
        self._of: dict[bytes, dict[int, float]] = {}

    def of_all(self, bundle: Bundle, receiver: int, ticket: SlotTicket, packed: bytes) -> bytes:
        """A rank's ticket, changed to need what all ranks do."""
        known = self._of.setdefault(bundle.id, {})
        known[receiver] = max(known.get(receiver, 0), ticket.needed)
        least = min(known.values())
        if least == float("inf"):
            least = ticket.needed
        if len(known) < bundle.ranks:  # the others are about where these are
            return frames.with_needed(packed, max(0, int(least) - STEPS_APART * bundle.ranks))
        if ticket.snapshot is not None and ticket.snapshot[0] > least:
            packed = frames.pack_slot_ticket(ticket._replace(snapshot=None))
        return frames.with_needed(packed, int(least))

    def released(self, bundle: bytes, receiver: int) -> None:
        """The rank asks for nothing more of the session."""
        if bundle in self._of:
            self._of[bundle][receiver] = float("inf")

    def closed(self, receiver: int) -> None:
        """The rank's connection ended; it may come back by another."""
        for known in self._of.values():
            if known.get(receiver) != float("inf"):
                known.pop(receiver, None)

    def forget(self, bundle: bytes) -> None:
        """The session is over."""
        self._of.pop(bundle, None)


def is_rival(bundle: Bundle, others: Iterable[Bundle]) -> bool:
    """Whether another rank's session makes the same slot of another dataset."""
    same = (bundle.ranks, bundle.loader, bundle.epoch, bundle.slot)
    return bundle.ranks > 1 and any(
        same == (other.ranks, other.loader, other.epoch, other.slot) and other.code != bundle.code
        for other in others
    )
