"""A stranger in a process of its own, who opens connections at a steady rate and holds the newest of them.

python flood.py HOST PORT RATE HELD HEX     HOST: a number, or @NAME for a name of this machine's abstract sockets
                                            HEX: what each connection sends
"""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path

PAUSE_S = 0.0005
MOST_BEHIND_S = 0.5
"""On a busy machine, connections that are later than this are left out."""


def target(host: str, port: int) -> tuple[socket.AddressFamily, str | tuple[str, int]]:
    if host.startswith(("@", "\0")):
        return socket.AF_UNIX, "\0" + host[1:]
    return socket.AF_INET, (host, port)


@contextlib.contextmanager
def flooded(
    host: str, port: int, *, rate: int = 4000, held: int = 3000, says: bytes = b""
) -> Iterator[subprocess.Popen[bytes]]:
    """Floods a port until the end of the block; the block begins with the first thousand connections."""
    process = subprocess.Popen(
        [
            sys.executable,
            str(Path(__file__)),
            host.replace("\0", "@"),
            str(port),
            str(rate),
            str(held),
            says.hex(),
        ],
        stdout=subprocess.PIPE,
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline()
        yield process
        assert process.poll() is None, "it floods until here"
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def main(host: str, port: int, rate: int, most: int, says: bytes) -> None:
    family, address = target(host, port)
    held: deque[socket.socket] = deque()
    opened, began = 0, time.monotonic()
    while True:
        now = time.monotonic()
        due = int((now - began) * rate)
        if opened >= due:
            time.sleep(PAUSE_S)
            continue
        if due - opened > MOST_BEHIND_S * rate:
            began = now - opened / rate
        sock = socket.socket(family)
        sock.setblocking(False)
        with contextlib.suppress(OSError):
            sock.connect(address)
        if says:
            with contextlib.suppress(OSError):
                sock.send(says)
        held.append(sock)
        while len(held) > most:
            held.popleft().close()
        opened += 1
        if opened == 1000:
            sys.stdout.write("begun\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:5]), bytes.fromhex(sys.argv[5]))
