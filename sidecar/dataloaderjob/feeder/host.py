"""The host: the process that starts a machine's feeders, and the zygote from which templates are forked.

    python -m dataloaderjob.feeder.host --settings FILE     one feeder, watched by Ray's actor or a test
    python -m dataloaderjob.feeder.host --listen SOCKET     any number, for the local provider

It runs no user code, has no threads, and exits when the zygote exits. With --settings, it prints {"host", "port",
"instance", "pid"} once its feeder serves, to standard output or to the file descriptor given by --ready-fd. It then
exits with the feeder, or when its standard input closes, if that is a pipe. With --listen, it answers these requests,
sent as messages of `core.sockets`:

    {"type": "start", "settings": {FeederSettings}}   {"type": "ok", "pid"}
    {"type": "kill", "name"}                          {"type": "ok"}, even if no such feeder exists
    {"type": "list"}                                  {"type": "feeders", "feeders": [FEEDER, ...]}

FEEDER is {"name", "pid", "code", "words", "memory"}. `code` is null while the feeder runs. `words` is its last line of
output. `memory` is the available memory and a remedy, or empty unless memory ran out. The host shows feeders' output as
lines "[feeder-0] ...".
"""

from __future__ import annotations

import os
import signal
import socket
import sys

from dataloaderjob.core.places import IMPORTED_VARIABLE, IN_FEEDER_VARIABLE


def start_zygote(imported: str | None = None) -> tuple[socket.socket, int]:
    """Starts the zygote. Returns the socket over which the zygote receives feeders' sockets, and the zygote's pid.
    `imported`: the file for the list of the zygote's imports."""
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
    parent = os.getpid()
    pid = os.fork()
    if pid == 0:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C is for the trainer
        here.close()
        from dataloaderjob.feeder import zygote

        zygote.main(there, parent, imported)
    there.close()
    return here, pid


def main() -> int:
    os.environ[IN_FEEDER_VARIABLE] = "1"
    # Before this process's own imports, because importing torch takes longest.
    made = start_zygote(os.environ.pop(IMPORTED_VARIABLE, None))
    from dataloaderjob.feeder import hosting

    return hosting.main(made)


if __name__ == "__main__":
    sys.exit(main())
