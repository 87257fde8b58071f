"""A pod of feeders: one raylet that joins the job's Ray cluster, with room for `processes` feeders.

    python -m dataloaderjob.pod.feeder --settings FILE.json

The supervisor, in the head's pod, places the feeders. If the raylet ends, this process ends too, and the kubelet starts
a fresh container. A file reports whether the pod is ready (`pod.readiness`).

This process shows feeders' output as lines `[feeder-3] ...`. Each feeder hands over the read ends of three pipes
(`providers.ray.actor`). Two carry its output. The third gets a byte once the feeder serves, and closes when the feeder
ends. One thread always reads the pipes, and another writes the lines. If no one reads this process's output, the
process drops and counts the newest lines, so user code does not wait.
"""

from __future__ import annotations

import logging
import os
import selectors
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from pathlib import Path

from dataloaderjob.core import sockets
from dataloaderjob.core.errors import ServiceError
from dataloaderjob.core.places import NODE_FOLDER_VARIABLE
from dataloaderjob.core.processes import Lines
from dataloaderjob.core.settings import NODE_OUTPUT, NODE_READY
from dataloaderjob.core.supervision import index_of
from dataloaderjob.core.timings import TIMES
from dataloaderjob.pod import entry
from dataloaderjob.pod.entry import (
    ANY_PORTS,
    PLAIN,
    FeederPodSettings,
    Watch,
    await_started,
    fresh_folder,
    node_environment,
    ray_node,
    split_address,
)
from dataloaderjob.pod.readiness import Feeders, Readiness

log = logging.getLogger(__name__)

VITAL = ("raylet",)
CONNECT_TIMEOUT_S = 2.0
RETRY_S = 0.5
LOOK_S = 2.0
READY_EVERY_S = 0.5
GONE_AFTER = 3
"""Number of consecutive refusals after which a GCS counts as gone. A busy GCS may miss one connection."""
MAX_NBYTES = 8 * 1024 * 1024
READ_NBYTES = 1 << 16
MAX_NAME_NBYTES = 64
PIPES = 3
"""Number of pipes that a feeder hands over: for its standard output, its standard error, and its lifetime."""
CLOSE_TIMEOUT_S = 1.0
EXIT_BROKEN = 71
_RAYS = (":actor_name:", ":job_id:", ":task_name:")
"""Prefixes of lines that Ray adds to workers' output for its own log reader."""


class FeederPod:
    """The `PodPart` of a pod of feeders."""

    def __init__(self, settings: FeederPodSettings, watch: Watch) -> None:
        """Empties this package's folder in the volume. Raises InputError for settings that cannot work."""
        self._settings, self._watch = settings, watch
        self._node = ray_node(settings, VITAL, {"feeder": float(settings.processes)}, settings.tasks)
        self._head = split_address(settings.head)
        self._folder = fresh_folder(self._node.folder)
        # Builders record the times of their batches there, for `dataloaderjob report`.
        (self._folder / TIMES).mkdir(mode=0o700)
        feeders = Feeders()
        self._output = Output(self._folder / NODE_OUTPUT, feeders)
        self._readiness = Readiness(
            self._folder / NODE_READY, feeders,
            patience_s=settings.patience_s, trial_timeout_s=settings.trial_timeout_s,
        )  # fmt: skip

    def run(self) -> None:
        address = self._await_head()
        env = {**node_environment(os.environ), NODE_FOLDER_VARIABLE: str(self._folder)}
        self._node.launch([f"--address={address}", *ANY_PORTS, PLAIN], env=env, cwd=Path.cwd())
        what = f"this node of the Ray cluster at {self._settings.head}, with the token of {self._settings.token_path},"
        there = StillThere(split_address(address))
        vital = await_started(self._node, self._watch, self._settings.join_timeout_s, what, check=there)
        log.info("joined the Ray cluster at %s with room for %d feeders", address, self._settings.processes)
        self._readiness.joined()
        while not self._watch.wait(READY_EVERY_S, vital.values()):
            self._readiness.look()
        raise entry.ended(self._node, VITAL)

    def _await_head(self) -> str:
        """Waits until the head's GCS accepts connections. Returns the GCS's address, with a numeric host.

        The host is numeric because a new head's pod is a different cluster under the same name. A raylet that followed
        the name would connect to a cluster that does not know it. With a numeric host, the raylet loses its GCS and
        exits.
        """
        settings, (host, port) = self._settings, self._head
        began = time.monotonic()
        logged_s = 0.0
        while True:
            try:
                with socket.create_connection((host, port), timeout=CONNECT_TIMEOUT_S) as sock:
                    return sockets.address_text(str(sock.getpeername()[0]), port)
            except OSError as exc:
                waited_s = time.monotonic() - began
                if waited_s > settings.head_timeout_s:
                    raise ServiceError(
                        f"the head's GCS at {settings.head} did not accept a connection within "
                        f"{settings.head_timeout_s:.0f} s ({exc}): see the head's pod"
                    ) from exc
                if waited_s >= logged_s:
                    log.info("waiting for the head's GCS at %s: %s", settings.head, exc)
                    logged_s += settings.progress_every_s
            self._watch.wait(RETRY_S)

    def close(self) -> None:
        """Ends everything that this pod started, and shows the last lines."""
        self._readiness.close()
        self._node.stop(self._settings.grace_s)
        self._output.close()


class StillThere:
    """A check that the GCS still accepts connections while a raylet joins. Without it, Ray would retry with a dead GCS
    for minutes, although another head may already run under the same name."""

    def __init__(self, address: tuple[str, int]) -> None:
        self._address, self._due, self._misses = address, 0.0, 0

    def __call__(self) -> None:
        """Checks the GCS every LOOK_S. Raises ServiceError after GONE_AFTER consecutive refusals."""
        if time.monotonic() < self._due:
            return
        try:
            socket.create_connection(self._address, timeout=CONNECT_TIMEOUT_S).close()
            self._misses = 0
        except OSError as exc:
            self._misses += 1
            if self._misses == GONE_AFTER:
                address = sockets.address_text(*self._address)
                raise ServiceError(
                    f"the head's GCS at {address} disappeared while this node was joining it: {exc}; a "
                    "fresh container will find the current one"
                ) from exc
        self._due = time.monotonic() + LOOK_S


class Output:
    """The output of the pod's feeders. It is shown from the time each feeder hands over its pipes until `close`."""

    def __init__(self, path: Path, feeders: Feeders) -> None:
        """Binds the socket `path`. Reports each feeder to `feeders`. Raises OSError."""
        self._feeders = feeders
        self._backlog = Backlog()
        self._poll = selectors.DefaultSelector()
        self._door = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._door.bind(str(path))
        self._door.setblocking(False)
        self._poll.register(self._door, selectors.EVENT_READ, self._welcome)
        self._wake_r, self._wake_w = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._poll.register(self._wake_r, selectors.EVENT_READ, lambda: None)
        self._closing = False
        self._threads = [
            threading.Thread(target=_guarded, args=(body,), name=name, daemon=True)
            for body, name in ((self._read_forever, "dlj-read"), (self._write_forever, "dlj-write"))
        ]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """Shows the remaining output, once the feeders have ended. Waits at most CLOSE_TIMEOUT_S for each thread."""
        self._closing = True
        os.write(self._wake_w, b"\0")
        for thread in self._threads:
            thread.join(CLOSE_TIMEOUT_S)

    # The reading thread

    def _read_forever(self) -> None:
        while not self._closing:
            for key, _ in self._poll.select():
                key.data()
        more = True
        while more:  # the last output of feeders that have ended
            ready = [key for key, _ in self._poll.select(0) if key.fd != self._wake_r]
            more = sum(bool(key.data()) for key in ready) > 0
        for key in list(self._poll.get_map().values()):
            if isinstance(key.data, _Pipe):
                key.data.end()
        self._backlog.end()

    def _welcome(self) -> bool:
        """Accepts one feeder's name and pipes. Returns False if no feeder waits."""
        try:
            name, fds, _, _ = socket.recv_fds(self._door, MAX_NAME_NBYTES, PIPES)
        except BlockingIOError:
            return False
        text = name.decode(errors="replace")
        if len(fds) != PIPES or index_of(text) is None:
            log.warning(
                "refused output of %r with %d pipes: expected a feeder's name and %d pipes",
                text,
                len(fds),
                PIPES,
            )
            for fd in fds:
                os.close(fd)
            return True
        for fd, to in zip(fds[:2], (1, 2), strict=True):
            lines = Lines(partial(self._show, to, text))
            _Pipe(fd, self._poll, lines.feed, partial(lines.feed, b"", final=True))
        number = self._feeders.begins()
        _Pipe(fds[2], self._poll, lambda _: self._feeders.serves(number), lambda: self._feeders.ends(number))
        return True

    def _show(self, to: int, feeder: str, line: str) -> None:
        if not line.startswith(_RAYS):
            self._backlog.put(to, f"[{feeder}] {line}\n".encode())

    # The writing thread

    def _write_forever(self) -> None:
        while (lines := self._backlog.take()) is not None:
            for fd, line in lines:
                _write(fd, line)


class Backlog:
    """A queue of lines. `put` never waits, and only one thread may call `take`."""

    def __init__(self, max_nbytes: int = MAX_NBYTES) -> None:
        self._max_nbytes = max_nbytes
        self._lines: deque[tuple[int, bytes]] = deque()
        self._nbytes = 0
        self._lost = 0
        self._ended = False
        self._changed = threading.Condition()

    def put(self, fd: int, line: bytes) -> None:
        """Queues a line to be written to `fd`. If the queue is full, drops and counts the line."""
        with self._changed:
            if self._nbytes + len(line) > self._max_nbytes:
                self._lost += 1
                return
            self._own_up()
            self._lines.append((fd, line))
            self._nbytes += len(line)
            self._changed.notify()

    def end(self) -> None:
        """Declares that no more lines will come."""
        with self._changed:
            self._own_up()
            self._ended = True
            self._changed.notify()

    def _own_up(self) -> None:
        if self._lost:
            note = f"[pod] omitted {self._lost} lines, which arrived faster than this output is read\n"
            self._lines.append((2, note.encode()))
            self._lost = 0

    def take(self) -> list[tuple[int, bytes]] | None:
        """Waits for lines and returns all of them; None at the end."""
        with self._changed:
            while not self._lines and not self._ended:
                self._changed.wait()
            if not self._lines:
                return None
            found = list(self._lines)
            self._lines.clear()
            self._nbytes = 0
            return found


class _Pipe:
    """One of a feeder's three pipes, read until its end. The poll loop calls this object when the pipe is readable. The
    call returns True if anything was read."""

    def __init__(
        self, fd: int, poll: selectors.BaseSelector, takes: Callable[[bytes], None], ends: Callable[[], None]
    ) -> None:
        os.set_blocking(fd, False)
        os.set_inheritable(fd, False)
        self._fd, self._poll, self._takes, self._ends = fd, poll, takes, ends
        poll.register(fd, selectors.EVENT_READ, self)

    def __call__(self) -> bool:
        try:
            data = os.read(self._fd, READ_NBYTES)
        except BlockingIOError:
            return False
        if data:
            self._takes(data)
        else:
            self.end()
        return bool(data)

    def end(self) -> None:
        self._ends()
        self._poll.unregister(self._fd)
        os.close(self._fd)


def _write(fd: int, line: bytes) -> None:
    """Writes a line, or drops it if its reader is gone."""
    view = memoryview(line)
    try:
        while view:
            view = view[os.write(fd, view) :]
    except OSError as exc:
        log.debug("a line could not be written: %s", exc)


def _guarded(body: Callable[[], None]) -> None:
    """Runs `body`, and ends the process if it fails, because pipes that nobody reads would block user code."""
    try:
        body()
    except BaseException:
        log.exception("the pod's process can no longer show the feeders' output")
        os._exit(EXIT_BROKEN)


if __name__ == "__main__":
    sys.exit(entry.serve(FeederPodSettings, FeederPod, name="pod"))
