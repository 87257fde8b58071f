"""A script's claim to a private service that may be free: a datagram with a text and a file descriptor.

The file descriptor is the write end of a pipe. The service answers through this pipe with GRANTED, BUSY or FREE. If the
pipe closes without an answer, the claim is refused.

After a grant, the script sends `echo_text` with a file descriptor for the output of user code in feeders. It does not
send this file descriptor earlier, because a service that hangs would keep it open. This module imports no other module
of this package.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

GRANTED = b"y"
BUSY = b"b"
"""Refused: another launch uses the service."""
FREE = b"f"
"""Refused: nobody uses the service, but the claim is only for a service in use (`joins`)."""
MAX_NBYTES = 8192


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """A launch's request for a private service."""

    run: str
    """Key of the launch: `trainer.session.private.run_key`."""
    pid: int
    """Pid of a process of the launch. The service is not free while this process is alive."""
    keep_s: float
    """Time in seconds for which the service should keep running after the launch ends."""
    script: str
    """The script's name, for display."""
    ends: bool = False
    """True to make the service exit if it is free, because too many services are waiting."""
    joins: bool = False
    """True to claim the service only if the launch already uses it."""

    def pack(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def parse(cls, data: bytes) -> Claim | None:
        """Parses `data`. Returns None if it is not a claim."""
        try:
            found = json.loads(data)
            return cls(
                run=str(found["run"]), pid=int(found["pid"]), keep_s=float(found["keep_s"]),
                script=str(found["script"]), ends=bool(found["ends"]), joins=bool(found["joins"]),
            )  # fmt: skip
        except (ValueError, TypeError, KeyError, RecursionError, OverflowError):
            return None


def echo_text(run: str) -> bytes:
    """Returns the text that a launch sends with the file descriptor for output, after it was granted the service."""
    return f"echo {run}".encode()
