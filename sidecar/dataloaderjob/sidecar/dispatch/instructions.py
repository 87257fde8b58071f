"""The dispatcher's counters, and what it tells its shell to do. Values only; the shell in
`sidecar.receiver` carries instructions out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True, slots=True)
class Extent:
    """`nbytes` usable bytes (whole pages) at `offset` of a region."""

    region: int
    offset: int
    nbytes: int


class Endpoint(NamedTuple):
    """One running feeder process. `instance` is new at each start, so a port used again is not mistaken."""

    name: str
    instance: str
    host: str
    port: int


class Connect(NamedTuple):
    """Open a connection to this feeder, and again with back-off when that fails, until Close."""

    endpoint: Endpoint


class Close(NamedTuple):
    """Shut the connection to this instance. The shell answers with `feeder_down` only for those that were up."""

    instance: str
    reason: str
    again: bool
    """Connect anew afterwards: the feeder is still listed."""


class Send(NamedTuple):
    """Queue a frame on a connection."""

    instance: str
    header: bytes
    payload: bytes


class Discard(NamedTuple):
    """The body being received on this connection has lost its place: read the rest and throw it away."""

    instance: str


class Publish(NamedTuple):
    """Make a batch visible to the trainer."""

    lease: int
    stream: int
    ticket: int
    extent: Extent
    nbytes: int


class Unpublish(NamedTuple):
    """Hide a batch again; its extent is free."""

    stream: int
    ticket: int


class Released(NamedTuple):
    """The last stream that used this bundle was closed."""

    bundle: bytes


class Fail(NamedTuple):
    """Tell the trainer that a ticket failed, then publish its word as FAILED."""

    stream: int
    ticket: int
    payload: bytes


class CreateRegion(NamedTuple):
    """Create a memfd, keep it mapped, hand it to the trainer. Earlier in the list than its first use."""

    region: int
    nbytes: int
    single: bool
    lease_limit: int
    """Bytes that the trainer may hold under lease before it must copy."""


class DropRegion(NamedTuple):
    """A single region's batch is gone: unmap it here and at the trainer."""

    region: int


class Note(NamedTuple):
    """A line for the user, shown by the trainer and in the log."""

    text: str


class Replace(NamedTuple):
    """Ask the supervisor to kill and replace a feeder process that hangs."""

    endpoint: Endpoint
    reason: str


Instruction = (
    Connect
    | Close
    | Send
    | Discard
    | Publish
    | Unpublish
    | Fail
    | CreateRegion
    | DropRegion
    | Note
    | Replace
    | Released
)


@dataclass(slots=True)
class Counters:
    """Counts since the receiver started."""

    batches: int = 0
    nbytes: int = 0
    attempts: int = 0
    retries: int = 0
    hedges: int = 0
    late_copies: int = 0
    failures: int = 0
    feeders_lost: int = 0
