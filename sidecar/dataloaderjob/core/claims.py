"""What a script sends to a private service that may be free: a datagram with this text and a descriptor.

That is the writing end of a pipe, into which the service writes GRANTED, BUSY or FREE; one that ends without any of
them refuses, too. Whom the service was granted to sends `echo_text` with a descriptor where user code in feeders is
heard: not earlier, since a service that hangs would keep it. It imports nothing of ours.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

GRANTED = b"y"
BUSY = b"b"
"""Refused: another launch uses it."""
FREE = b"f"
"""Refused: nobody uses it, and the claim is for one that is in use."""
MAX_NBYTES = 8192


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """A launch that wants a service for its own."""

    run: str
    """The launch: `trainer.session.private.run_key`."""
    pid: int
    """A process of the launch: the service is not free while it lives."""
    keep_s: float
    """How long the service is to stay after it."""
    script: str
    """What its user calls it."""
    ends: bool = False
    """It wants the service to end, if that is free: too many wait."""
    joins: bool = False
    """It wants the service only if its launch uses it already."""

    def pack(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def parse(cls, data: bytes) -> Claim | None:
        """None if it is not one."""
        try:
            found = json.loads(data)
            return cls(
                run=str(found["run"]), pid=int(found["pid"]), keep_s=float(found["keep_s"]),
                script=str(found["script"]), ends=bool(found["ends"]), joins=bool(found["joins"]),
            )  # fmt: skip
        except (ValueError, TypeError, KeyError, RecursionError, OverflowError):
            return None


def echo_text(run: str) -> bytes:
    """What goes with the descriptor of the launch to which the service was granted."""
    return f"echo {run}".encode()
