"""What a script sends to a private service that may be free: a datagram with this text and one or two descriptors.

The first is the writing end of a pipe, into which the service writes GRANTED or REFUSED; one that ends without either
refuses, too. The second is where user code in feeders is heard, if anywhere. It imports nothing of ours.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

GRANTED = b"y"
REFUSED = b"n"
MAX_NBYTES = 8192
MAX_FDS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """A launch that wants a service for its own."""

    run: str
    """The launch: `trainer.private.run_key`."""
    pid: int
    """A process of the launch: the service is not free while it lives."""
    keep_s: float
    """How long the service is to stay after it."""
    script: str
    """What its user calls it."""
    ends: bool = False
    """It wants the service to end, if that is free: too many wait."""

    def pack(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def parse(cls, data: bytes) -> Claim | None:
        """None if it is not one."""
        try:
            found = json.loads(data)
            return cls(
                run=str(found["run"]), pid=int(found["pid"]), keep_s=float(found["keep_s"]),
                script=str(found["script"]), ends=bool(found["ends"]),
            )  # fmt: skip
        except (ValueError, TypeError, KeyError):
            return None
