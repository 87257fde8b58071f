"""The Ray actor of a feeder: it starts the feeder's host as a child, and ends with it. Run by Ray's workers.

This process has neither user code nor torch, so Ray's threads and connections stay out of processes that fork. The
child ends when its standard input closes, and thus with this process, however that ends. A feeder that Ray restarts by
itself serves again without anybody calling it.

In a pod, the feeder hands its output to the pod's main process. People read `kubectl logs` of the pod, while Ray
keeps workers' output in files that only grow. The read ends of three pipes are sent to a datagram socket of the pod
(`pod.feeder`). The write ends of two become file descriptors 1 and 2, so output of native code and of child processes
arrives there, too. The write end of the third belongs to this process alone. It reports to the pod that the feeder
serves and, by closing, that the feeder is gone. They are pipes, not sockets, because user code may open /dev/stdout.
The pod's process always keeps reading, even if nobody reads what it prints, so user code does not wait.

On one machine, Ray brings workers' output to the driver that started them, which shows it as lines `[feeder-0] ...`.
A supervisor that adopted its feeders is another driver. The filter by driver is therefore removed (Ray Serve does the
same) and lines are selected by name.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import select
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ray
from ray._private import ray_logging
from ray._private import services as ray_services
from ray._private import worker as ray_worker

from dataloaderjob.core import sockets
from dataloaderjob.core.errors import DataLoaderJobError, ServiceError
from dataloaderjob.core.logs import log_lines
from dataloaderjob.core.memory import LOOK_S, MemoryWatch, describe_limit, die_as
from dataloaderjob.core.places import NODE_FOLDER_VARIABLE
from dataloaderjob.core.processes import Lines, last_word
from dataloaderjob.core.settings import NODE_BLOBS, NODE_OUTPUT, FeederSettings, read_key
from dataloaderjob.core.supervision import Cause, ended_text, index_of
from dataloaderjob.providers.ray.node import ray_of_tasks, start_host

log = logging.getLogger(__name__)

TIMEOUT_S = 5.0
LAST_WORDS_S = 2.0
"""Wait for the host's last output: a process of user code may hold the pipe open after the host's end."""
EXIT_BROKEN = 70
_ANY = ("0.0.0.0", "::", "")  # noqa: S104  compared with, not bound
_HANDLER = "dataloaderjob"


def at_home(settings: FeederSettings, folder: Path) -> FeederSettings:
    """Returns the settings with this node's blob folder, which the supervisor does not know."""
    return dataclasses.replace(settings, blob_folder=str(folder / NODE_BLOBS), sweeps_blobs=True)


def tell_ended(settings: FeederSettings, why: str) -> None:
    """Reports to the supervisor that a feeder's process was killed for lack of memory.

    Raises InputError if the key cannot be read, OSError and ProtocolError if the report fails.
    """
    if settings.supervisor_host is None:
        return
    address, key = (settings.supervisor_host, settings.supervisor_port), read_key(settings.key_path)
    with sockets.connect(
        address, key, role="feeder", name=settings.name, job=settings.job, versions=sockets.BY_ROLE
    ) as sock:
        sockets.send_message(sock, {"type": "ended", "cause": Cause.OUT_OF_MEMORY.value, "why": why})


def hand_over(name: str, folder: Path) -> int | None:
    """Lets the pod show what this process prints from now on. Returns the descriptor to write to once the feeder
    serves; None if nobody takes the output, which then stays as it was."""
    ends = [os.pipe() for _ in range(3)]
    life = None
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
            sock.settimeout(TIMEOUT_S)
            sock.connect(str(folder / NODE_OUTPUT))
            socket.send_fds(sock, [name.encode()], [reader for reader, _ in ends])
        sys.stdout.flush()
        sys.stderr.flush()
        for fd, (_, writer) in zip((1, 2), ends[:2], strict=True):
            os.dup2(writer, fd)
        life = os.dup(ends[2][1])
    except OSError as exc:
        log.warning(
            "%s: its output stays in Ray's files because the pod's process does not take it: %s", name, exc
        )
    finally:
        for fd in (fd for pair in ends for fd in pair):
            os.close(fd)
    return life


class Feeder:
    """One feeder of a job."""

    def __init__(self, settings: FeederSettings) -> None:
        """Raises ServiceError with the host's last line if it does not serve; Ray reports that to the supervisor."""
        self._name = settings.name  # first: Ray asks for the name even if the rest of this fails
        life = None
        if folder := os.environ.get(NODE_FOLDER_VARIABLE):
            settings = at_home(settings, Path(folder))
            life = hand_over(settings.name, Path(folder))
        # Ray has the kernel kill its workers first: a feeder's host would then die before the process that grows.
        die_as(os.getppid())
        self._settings = settings
        log_lines("%(levelname)s %(message)s")
        address = settings.advertise_host or settings.bind_host
        if address in _ANY:
            address = str(ray_services.get_node_ip_address())  # type: ignore[no-untyped-call]
        context = ray.get_runtime_context()
        self._host = Host(
            dataclasses.replace(settings, advertise_host=address, node=context.get_node_id()),
            ray_of_tasks(os.environ, context.gcs_address),
        )
        if life is not None:
            with contextlib.suppress(OSError):  # a pod that does not listen is about to end
                os.write(life, b"\1")
        threading.Thread(target=self._end_with_host, name="dlj-watch", daemon=True).start()

    def __repr__(self) -> str:
        return self._name

    def _end_with_host(self) -> None:
        """Ends this process with its host: without one it is useless, and Ray starts another."""
        try:
            code = self._host.wait()
            if self._host.memory:
                with contextlib.suppress(OSError, DataLoaderJobError):  # the supervisor may be gone
                    tell_ended(self._settings, ended_text(code, "", self._host.memory))
        finally:
            os._exit(EXIT_BROKEN)


class Host:
    """A host that serves one feeder, as a child of this process."""

    def __init__(self, settings: FeederSettings, env: Mapping[str, str]) -> None:
        """Returns once the feeder serves. Raises ServiceError with its last line if it ends first, OSError.

        There is no deadline here: the supervisor has one, and kills the actor.
        """
        self._words = ""
        """The last line on its standard error."""
        self.memory = ""
        """The amount of memory and a remedy, if the host was killed for lack of it; else empty."""
        self._field, self._watch = settings.memory_field, MemoryWatch()
        with tempfile.TemporaryDirectory(prefix="dlj-feeder-") as folder:
            self._process, reader = start_host(settings, Path(folder), stderr=subprocess.PIPE, env=env)
            self._copier = threading.Thread(target=self._copy_errors, name="dlj-stderr", daemon=True)
            self._copier.start()
            with open(reader, "rb") as ready:
                line = ready.readline()  # empty when the child ends: nobody else holds the pipe
        self._watch.look()
        try:
            self.about: dict[str, Any] = json.loads(line)
        except ValueError as exc:
            code = self.wait()
            raise ServiceError(f"{settings.name}: {ended_text(code, self._words, self.memory)}") from exc

    def wait(self) -> int:
        """Returns the exit code once the host has ended and its last output is shown."""
        while (code := self._process.poll()) is None:
            self._watch.look()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(LOOK_S)
        if code and self._watch.killed:  # the host also ends if a process that it needs was killed
            self.memory = describe_limit(self._field)
        self._copier.join(LAST_WORDS_S)
        return code

    def _copy_errors(self) -> None:
        """Copies the child's standard error to this process's, and remembers its last line."""
        assert self._process.stderr is not None  # noqa: S101  it is a pipe
        fd, lines, shown = self._process.stderr.fileno(), Lines(self._remember), True
        while data := os.read(fd, 1 << 16):
            lines.feed(data)
            view = memoryview(data)
            while shown and view:
                try:
                    view = view[os.write(2, view) :]
                except BlockingIOError:
                    select.select([], [2], [])
                except OSError:  # nobody reads it any more; the child must not wait
                    shown = False
        lines.feed(b"", final=True)

    def _remember(self, line: str) -> None:
        self._words = last_word(self._words, line)


def show() -> None:
    """Shows feeders' output from now on. Call once, after ray.init with log_to_driver."""
    ray_worker.global_worker._filter_logs_by_job = False  # noqa: SLF001
    dispatcher = ray_logging.global_worker_stdstream_dispatcher
    for name in [key for key, _ in list(dispatcher.handlers)]:
        dispatcher.remove_handler(name)
    dispatcher.add_handler(_HANDLER, _print)


def _print(data: dict[str, Any]) -> None:
    name = str(data.get("actor_name") or "")
    if index_of(name) is None and name != "Feeder":  # before it is constructed its name is that of its class
        return
    out = sys.stderr if data.get("is_err") else sys.stdout
    for line in data.get("lines", ()):
        print(f"[{name}] {line}", file=out)
    out.flush()
