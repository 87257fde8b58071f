"""The dispatcher's instructions, which the shell (`sidecar.receiver`) carries out."""

from __future__ import annotations

from typing import NamedTuple

from dataloaderjob.sidecar.dispatch.streams import Endpoint, Extent


class Connect(NamedTuple):
    """Open a connection to this feeder, retrying with back-off, until Close."""

    endpoint: Endpoint


class Close(NamedTuple):
    """Close the connection to this instance. The shell does not report this with `feeder_down`."""

    instance: str
    reason: str
    again: bool
    """True to reconnect afterwards, because the feeder is still listed."""


class Send(NamedTuple):
    """Queue a frame on a connection."""

    instance: str
    header: bytes
    payload: bytes


class Discard(NamedTuple):
    """Read and discard the rest of the body that is being received on this connection, because it has lost its
    place."""

    instance: str


class Publish(NamedTuple):
    """Make a batch visible to the trainer."""

    lease: int
    stream: int
    ticket: int
    extent: Extent
    nbytes: int


class Unpublish(NamedTuple):
    """Hide a batch from the trainer again, because its extent is needed."""

    stream: int
    ticket: int


class Released(NamedTuple):
    """Report to the parent that the last stream with this bundle was closed."""

    bundle: bytes


class Fail(NamedTuple):
    """Report a ticket's failure to the trainer, then publish the ticket's word as FAILED."""

    stream: int
    ticket: int
    payload: bytes
    is_own: bool = False
    """True if this receiver gave the ticket up; False if the payload is a feeder's."""


class End(NamedTuple):
    """Report to the trainer that a ticket's slot has no such batch, then publish the ticket's word as FAILED."""

    stream: int
    ticket: int
    batches: int
    """Number of batches in the slot."""


class SayThere(NamedTuple):
    """Publish that the batch exists, for a ticket that only asks whether it does."""

    stream: int
    ticket: int


class CreateRegion(NamedTuple):
    """Create a memfd, map it, and send it to the trainer. This precedes the first instruction that uses the region."""

    region: int
    nbytes: int
    single: bool
    lease_limit: int
    """Bytes that the trainer may hold under lease before it must copy."""


class DropRegion(NamedTuple):
    """Unmap a single region, here and in the trainer, because its batch is gone."""

    region: int


class Snapshot(NamedTuple):
    """Hand a slot's snapshot to the trainer. Payload: `frames.pack_snapshot`."""

    stream: int
    slot: int
    payload: bytes


class Note(NamedTuple):
    """Show the user this line, in the trainer and in the log."""

    text: str


class Replace(NamedTuple):
    """Ask the supervisor to kill and replace a feeder process that hangs."""

    endpoint: Endpoint
    reason: str
    connected: bool
    """True if the feeder is connected, but silent although it has work to do. False if this receiver cannot reach
    it."""


Instruction = (
    Connect
    | Close
    | Send
    | Discard
    | Publish
    | Unpublish
    | Fail
    | End
    | SayThere
    | CreateRegion
    | DropRegion
    | Note
    | Replace
    | Released
    | Snapshot
)
