"""What a feeder does for the pod that it is in: it hands its output to the pod's main process.

People read `kubectl logs` of the pod, while Ray keeps what workers print in files that only grow. The
reading ends of two pipes go to a datagram socket of the pod's (`pod.output`), the writing ends become file
descriptors 1 and 2, so that output of native code and of child processes goes there, too. Pipes and not
sockets, because user code may open /dev/stdout. The pod's process always reads on, whether or not anybody
reads what it prints, so user code does not wait.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import socket
import sys
from pathlib import Path

from dataloaderjob.core.settings import NODE_BLOBS, NODE_OUTPUT, FeederSettings

log = logging.getLogger(__name__)

TIMEOUT_S = 5.0


def at_home(settings: FeederSettings, folder: Path) -> FeederSettings:
    """The settings with the blobs in this node's folder: the supervisor does not know it."""
    return dataclasses.replace(settings, blob_folder=str(folder / NODE_BLOBS), sweeps_blobs=True)


def hand_over(name: str, folder: Path) -> None:
    """From now on what this process prints is the pod's to show. Where nobody takes it, all stays as it was."""
    ends = [os.pipe() for _ in range(2)]
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
            sock.settimeout(TIMEOUT_S)
            sock.connect(str(folder / NODE_OUTPUT))
            socket.send_fds(sock, [name.encode()], [reader for reader, _ in ends])
        sys.stdout.flush()
        sys.stderr.flush()
        for fd, (_, writer) in zip((1, 2), ends, strict=True):
            os.dup2(writer, fd)
    except OSError as exc:
        log.warning(
            "%s: its output stays in Ray's files, for the pod's process does not take it: %s", name, exc
        )
    finally:
        for fd in (fd for pair in ends for fd in pair):
            os.close(fd)
