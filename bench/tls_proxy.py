"""Senders behind stunnel, a TLS proxy: one proxy decrypts at the receiver, another encrypts beside the senders."""

from __future__ import annotations

import contextlib
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from bench.links import FAR

if TYPE_CHECKING:
    from dataloaderjob.core.keys import Part

PROGRAM = "stunnel"
LOOPBACK = "127.0.0.1"
_START_TIMEOUT_S = 10.0
_PIPES = "foreground = yes\npid =\nsyslog = no\ndebug = err\nsslVersion = TLSv1.3\nverifyChain = yes\n"


class TlsProxies:
    """Starts two proxies for each sender of a namespace."""

    def __init__(self, namespace: str, stack: contextlib.ExitStack) -> None:
        """`stack` ends the proxies. Raises NotImplementedError if stunnel is not installed."""
        if shutil.which(PROGRAM) is None:
            raise NotImplementedError(f"{PROGRAM} is not installed")
        from dataloaderjob.local.certificates import RunCertificates

        self._inside = ("ip", "netns", "exec", namespace)
        self._stack = stack
        self._home = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="dlj-tls-")))
        RunCertificates(self._home).write()
        self.near_pids: list[int] = []
        """Pids of the proxies on the receiver's side."""

    def relay(self, host: str, port: int) -> tuple[str, int]:
        """Returns the address at which a sender, which listens at `host` in the namespace, is reached through TLS."""
        from dataloaderjob.core.keys import Part

        near = _free_port()
        far = self._write(Part.FEEDER, f"accept = {FAR}:{port}\nconnect = {host}:{port}\n", port)
        here = self._write(
            Part.SIDECAR, f"client = yes\naccept = {LOOPBACK}:{near}\nconnect = {FAR}:{port}\n", port
        )
        self._stack.enter_context(_running(*self._inside, PROGRAM, str(far)))
        self.near_pids.append(self._stack.enter_context(_running(PROGRAM, str(here))))
        _wait_until_open(near)
        return LOOPBACK, near

    def _write(self, part: Part, route: str, number: int) -> Path:
        from dataloaderjob.core.generations import FILES
        from dataloaderjob.local.certificates import tls_folder

        (folder,) = tls_folder(self._home, part).iterdir()
        options = zip(("CAfile", "cert", "key"), FILES, strict=True)
        certificates = "".join(f"{option} = {folder / name}\n" for option, name in options)
        path = self._home / f"stunnel-{part}-{number}.conf"
        path.write_text(f"{_PIPES}[batches]\n{route}{certificates}")
        return path


@contextlib.contextmanager
def _running(*command: str) -> Iterator[int]:
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL)
    try:
        yield process.pid
    finally:
        process.terminate()
        process.wait()


def _free_port() -> int:
    with socket.create_server((LOOPBACK, 0)) as found:
        return int(found.getsockname()[1])


def _wait_until_open(port: int) -> None:
    """Raises RuntimeError if no proxy listens in time."""
    deadline = time.monotonic() + _START_TIMEOUT_S
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError), socket.create_connection((LOOPBACK, port), 1.0):
            return
        time.sleep(0.05)
    raise RuntimeError(f"{PROGRAM} does not listen on port {port} after {_START_TIMEOUT_S:g} s")
