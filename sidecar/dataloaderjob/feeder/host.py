"""The host: starts a machine's feeders, and the zygote from which their bundles' templates are forked.

    python -m dataloaderjob.feeder.host --settings FILE     one feeder, which Ray's actor or a test watches
    python -m dataloaderjob.feeder.host --listen SOCKET     any number, for the local provider

It runs no user code and has no thread, and ends when the zygote ends. With --settings it prints {"host", "port",
"instance", "pid"} once its feeder serves (to the descriptor of --ready-fd, if given), and ends with it, or when its
standard input, if that is a pipe, ends.
With --listen it answers requests in the messages of `core.sockets`, each with its answer:

    {"type": "start", "settings": {FeederSettings}}   {"type": "ok", "pid"}
    {"type": "kill", "name"}                          {"type": "ok"}, also where there is none
    {"type": "list"}                                  {"type": "feeders", "feeders": [{"name", "pid", "code", "words"}]}

`code` is null while a feeder runs, `words` its last line. What feeders print it prints as lines "[feeder-0] ...".
"""

from __future__ import annotations

import os
import signal
import socket
import sys

from dataloaderjob.core.places import IMPORTED_VARIABLE, IN_FEEDER_VARIABLE


def start_zygote(imported: str | None = None) -> tuple[socket.socket, int]:
    """Returns the socket over which it hears of feeders, and its pid. `imported`: where it says what it imported."""
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
    # Before all that this process needs for itself: importing torch takes longer than all else.
    made = start_zygote(os.environ.pop(IMPORTED_VARIABLE, None))
    from dataloaderjob.feeder import hosting

    return hosting.main(made)


if __name__ == "__main__":
    sys.exit(main())
