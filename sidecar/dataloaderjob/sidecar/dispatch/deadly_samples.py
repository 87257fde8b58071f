"""The error for a ticket whose samples kill the processes that make them. Pure."""

from __future__ import annotations

from collections.abc import Container, Sequence

from dataloaderjob.core import ticket_codec
from dataloaderjob.sidecar.dispatch.streams import Ticket


def deadly_error(ticket: Ticket, out_of_memory: Container[str], notes: Sequence[str]) -> tuple[str, str]:
    """Returns the name and the text of the error. `out_of_memory`: names of the feeders that ran out of memory,
    according to the supervisor. `notes`: the supervisor's notes."""
    sample = f"{ticket_codec.describe_keys(ticket.payload, ticket.position)} of batch {ticket.number}"
    if memory := _want_of_memory(ticket, out_of_memory, notes):
        return "OutOfMemory", f"{ticket.strikes} feeder processes ended while making {sample} ({memory})"
    name, how, of_memory = ticket.ends[-1]
    reason = how if of_memory is None else f"{name}: it {how}"
    text = (
        f"{ticket.strikes} feeder processes died, each while making {sample} (the last one: {reason}): "
        "look for os._exit, a crash in native code or a lack of memory there; see the last lines that the "
        "feeders printed"
    )
    return "FeederLost", text


def _want_of_memory(ticket: Ticket, out_of_memory: Container[str], notes: Sequence[str]) -> str:
    """Describes how memory ran out while this ticket was being made. Returns an empty string unless this is known to be
    the reason why the ticket's processes died."""
    found = ""
    for name, how, of_memory in ticket.ends:
        if of_memory is False:
            return ""
        if of_memory:
            found = f"{name}: it {how}"
        elif name in out_of_memory:
            found = next((note for note in notes if note.startswith(f"{name}: ")), name)
    return found
