"""Who gets a place in the pool: announced bodies in ticket order, and always what the trainer waits for. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dataloaderjob.core import frames
from dataloaderjob.core.frames import Kind
from dataloaderjob.sidecar.dispatch.instructions import Send
from dataloaderjob.sidecar.dispatch.space import Extent
from dataloaderjob.sidecar.dispatch.streams import Attempt, AttemptState

if TYPE_CHECKING:
    from dataloaderjob.sidecar.dispatch.dispatcher import Dispatcher


def grant(machine: Dispatcher, now: float) -> bool:
    """Grants what has a place now. Returns whether a body is left without one."""
    waiting = [
        a for link in machine.links.values() if link.up
        for a in link.asks.values() if a.state is AttemptState.ANNOUNCED
    ]  # fmt: skip
    waiting.sort(key=_turn)
    starved = False
    for ask in waiting:
        extent = machine.placer.space.alloc(ask.nbytes)
        if extent is None and ask.ticket.number == ask.ticket.stream.awaited:
            extent = _room_for_awaited(machine, ask)
        if extent is None:
            starved = True
            continue
        ask.extent, ask.state, ask.granted_at = extent, AttemptState.GRANTED, now
        header = frames.pack(
            Kind.GRANT, generation=machine.generation, stream=ask.ticket.stream.id,
            ticket=ask.ticket.number, room=extent.nbytes,
        )  # fmt: skip
        machine.report(Send(ask.link.endpoint.instance, header, b""))
    return starved


def _turn(ask: Attempt) -> int:
    """Batches before this one in its trainer's order."""
    return ask.ticket.number - ask.ticket.stream.awaited


def _room_for_awaited(machine: Dispatcher, ask: Attempt) -> Extent:
    """The place of a ready batch that nobody can have reached, of one on its way, else a memfd of its own."""
    placer = machine.placer
    extent = placer.make_room(ask.nbytes, machine.streams.values())
    while extent is None and not placer.single_fits(ask.nbytes):
        placed = [a for link in machine.links.values() for a in link.asks.values() if a.extent is not None]
        if not placed:
            break
        machine.drop_ask(max(placed, key=_turn), cancel=True)
        extent = placer.space.alloc(ask.nbytes)
    return placer.single(ask.nbytes) if extent is None else extent
