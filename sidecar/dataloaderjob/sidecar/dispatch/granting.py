"""Who gets a place in the pool: announced bodies in ticket order, and always what the trainer waits for. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dataloaderjob.core import frames
from dataloaderjob.core.frames import Kind
from dataloaderjob.sidecar.dispatch.instructions import Send
from dataloaderjob.sidecar.dispatch.placing import Extent
from dataloaderjob.sidecar.dispatch.streams import Attempt, AttemptState

if TYPE_CHECKING:
    from dataloaderjob.sidecar.dispatch.dispatcher import Dispatcher


def grant(machine: Dispatcher, now: float) -> bool:
    """Grants what has a place now. Returns whether a body is left without one."""
    waiting = [
        a for feeder in machine.feeders.values() if feeder.up
        for a in feeder.attempts.values() if a.state is AttemptState.ANNOUNCED
    ]  # fmt: skip
    waiting.sort(key=_turn)
    starved = False
    for attempt in waiting:
        extent = machine.placer.space.alloc(attempt.nbytes)
        if extent is None and attempt.ticket.number == attempt.ticket.stream.awaited:
            extent = _room_for_awaited(machine, attempt)
        if extent is None:
            starved = True
            continue
        attempt.extent, attempt.state, attempt.granted_at = extent, AttemptState.GRANTED, now
        header = frames.pack(
            Kind.GRANT, generation=machine.generation, stream=attempt.ticket.stream.id,
            ticket=attempt.ticket.number, room=extent.nbytes,
        )  # fmt: skip
        machine.report(Send(attempt.feeder.endpoint.instance, header, b""))
    return starved


def _turn(attempt: Attempt) -> int:
    """Batches before this one in its trainer's order."""
    return attempt.ticket.number - attempt.ticket.stream.awaited


def _room_for_awaited(machine: Dispatcher, attempt: Attempt) -> Extent:
    """The place of a ready batch that nobody can have reached, of one on its way, else a memfd of its own."""
    placer = machine.placer
    extent = placer.make_room(attempt.nbytes, machine.streams.values())
    while extent is None and not placer.single_fits(attempt.nbytes):
        placed = [
            a for feeder in machine.feeders.values() for a in feeder.attempts.values() if a.extent is not None
        ]
        if not placed:
            break
        machine.drop_attempt(max(placed, key=_turn), cancel=True)
        extent = placer.space.alloc(attempt.nbytes)
    return placer.single(attempt.nbytes) if extent is None else extent
