"""Slots whose batches are dealt to several ranks. The ranks share one session at the feeder that makes the slot. Pure.

Each rank requests its own share of a slot and asks whether the other batches exist. Ranks advance at different speeds,
so a batch that one rank no longer needs may still be requested by another.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from dataloaderjob.core import ticket_codec
from dataloaderjob.core.blobs import Bundle
from dataloaderjob.core.snapshots import BATCHES_AHEAD, STEPS_AHEAD, STEPS_APART
from dataloaderjob.core.ticket_codec import SlotTicket

SEEDS = (
    "all ranks that share dealt batches must draw the same base seed, but this rank drew a different one: "
    "call torch.manual_seed with the same number in all ranks before iter(loader), or give the loader a "
    "generator= with the same seed in all ranks"
)
LOADERS = (
    "all ranks that share dealt batches must have the same dataset and loader, but this rank's differ from "
    "another's. With tail=, the dataset must be identical in all ranks (does it contain the rank, or a set "
    "with an order of its own?), and so must num_workers, batch_size, drop_last, tail and the loaded state"
)
EPOCHS = (
    "all ranks that share dealt batches must begin epochs together, but this rank is in epoch {own} of its "
    "loader while another is in epoch {other}: call iter(loader) equally often in all ranks"
)


class Needs:
    """The batches that the ranks of each session may still request from the session's slot."""

    def __init__(self) -> None:
        self._of: dict[bytes, dict[int, float]] = {}

    def hear(self, bundle: Bundle, receiver: int, needed: int) -> None:
        """Records that a rank needs no batch before `needed`, according to its ticket."""
        known = self._of.setdefault(bundle.id, {})
        before = known.get(receiver, 0)
        known[receiver] = needed if before == _NOTHING else max(before, needed)

    def may_make(self, bundle: Bundle, number: int) -> bool:
        """Returns True if batch `number` may be made, because it is close enough to the batch that the slowest rank
        needs. The builder must keep all batches in between."""
        slowest = min(self._of.get(bundle.id, {}).values(), default=_NOTHING)
        return number < slowest + STEPS_AHEAD * bundle.ranks + BATCHES_AHEAD

    def of_all(self, bundle: Bundle, ticket: SlotTicket, packed: bytes) -> bytes:
        """Returns a rank's packed ticket, with `needed` lowered to the first batch that any rank needs."""
        known = [needed for needed in self._of.get(bundle.id, {}).values() if needed != _NOTHING]
        least = min(known, default=float(ticket.needed))
        if (
            len(self._of.get(bundle.id, {})) < bundle.ranks
        ):  # assumes that ranks without a report are about as far
            least = min(least, max(bundle.first, max(known, default=least) - STEPS_APART * bundle.ranks))
        if ticket.snapshot is not None and ticket.snapshot[0] > least:
            packed = ticket_codec.pack_slot_ticket(ticket._replace(snapshot=None))
        return ticket_codec.with_needed(packed, int(least))

    def released(self, bundle: bytes, receiver: int) -> None:
        """Records that the rank requests nothing more from the session."""
        if bundle in self._of:
            self._of[bundle][receiver] = _NOTHING

    def closed(self, receiver: int) -> None:
        """Records that the rank's connection ended. The rank may reconnect."""
        for known in self._of.values():
            if known.get(receiver) != _NOTHING:
                known.pop(receiver, None)

    def forget(self, bundle: bytes) -> None:
        """Forgets a session that has ended."""
        self._of.pop(bundle, None)


_NOTHING = float("inf")


def refusal(
    bundle: Bundle, receiver: int, needed: int, others: Iterable[Bundle], users: Callable[[bytes], set[int]]
) -> str:
    """Returns the reason to refuse a rank's ticket, because the rank disagrees with other ranks; empty if there is
    none. `others`: the bundles of all sessions. `users`: returns the receivers that use a bundle."""
    if bundle.ranks < 2:
        return ""
    here = users(bundle.id)
    for other in others:
        if (
            (other.loader, other.slot) != (bundle.loader, bundle.slot)
            or other.id == bundle.id
            or not other.ranks
        ):
            continue
        if not users(other.id) - here - {receiver}:
            continue
        if other.epoch == bundle.epoch:
            return LOADERS
        if other.epoch < bundle.epoch and needed > bundle.first + STEPS_APART * bundle.ranks:
            return EPOCHS.format(own=bundle.epoch, other=other.epoch)
    return ""
