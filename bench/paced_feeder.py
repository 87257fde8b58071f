"""A feeder host with RATE bytes a second per connection: `python -m bench.paced_feeder RATE --settings FILE`."""

from __future__ import annotations

import socket
import sys

SO_MAX_PACING_RATE = 47
"""Constant of asm-generic/socket.h that the module `socket` lacks. Accepted sockets inherit their listener's rate."""


def main() -> int:
    rate = int(sys.argv.pop(1))
    listen = socket.socket.listen

    def paced(self: socket.socket, *arguments: int) -> None:
        if self.family != socket.AF_UNIX:
            self.setsockopt(socket.SOL_SOCKET, SO_MAX_PACING_RATE, rate)
        listen(self, *arguments)

    socket.socket.listen = paced  # type: ignore[method-assign]
    from dataloaderjob.feeder import host

    return host.main()


if __name__ == "__main__":
    sys.exit(main())
