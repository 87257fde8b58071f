"""The Ray actor of a feeder, run by a Ray worker. It starts the feeder's host as a child, and ends with the host.

This process contains neither user code nor torch, so Ray's threads and connections stay out of processes that fork. The
child ends when its standard input closes, so it never outlives this process. A feeder that Ray restarts serves again
without any call.

In a pod, the feeder hands its output to the pod's main process, so that `kubectl logs` shows it. Ray would keep the
output in files that only grow. This process sends the read ends of three pipes to a datagram socket of the pod
(`pod.feeder`). Two of the pipes replace stdout and stderr, also for native code and for child processes. They are pipes
rather than sockets because user code may open /dev/stdout. The third pipe reports that the feeder serves and, by
closing, that the feeder has ended.

On an existing Ray cluster, the feeder receives the feeders' key and variables as arguments. It keeps blobs in a folder
of the node's Ray session, which must be removed after the job's last feeder on that node. A separate shell process
removes it, because Ray may kill the actor at any time. If the feeder's lease has expired, this process asks Ray not to
restart it.

On one machine, Ray forwards workers' output to the driver that started them, which shows them as lines `[feeder-0]
...`. A supervisor that adopted its feeders is a different driver. Therefore, `show` removes Ray's filter by driver, as
Ray Serve does, and selects lines by the actor's name.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import secrets
import select
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

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
from dataloaderjob.core.settings import (
    NODE_BLOBS,
    NODE_OUTPUT,
    FeederSettings,
    ForeignNode,
    read_credentials,
)
from dataloaderjob.core.supervision import EXIT_LEASE_OVER, Cause, connect_as_feeder, ended_text, index_of
from dataloaderjob.providers.ray.node import ray_of_tasks, start_host

log = logging.getLogger(__name__)

TIMEOUT_S = 5.0
LAST_WORDS_S = 2.0
"""Maximum wait in seconds for the host's last output. A process of user code may hold the pipe open after the host has
ended."""
EXIT_BROKEN = 70
LAST_KILL_S = 10.0
"""Seconds to wait for Ray to kill an actor that has requested its own end."""
FOREIGN_FOLDER = "dataloaderjob"
"""Subfolder of the Ray session's folder, for the blobs of jobs on an existing Ray cluster."""
_JANITOR = (
    'exec 3<&0; (trap "" HUP INT TERM; read -r _ <&3; sleep 1; rm -f "$1/users/$2"; '
    'rmdir "$1/users" 2>/dev/null && rm -rf "$1") </dev/null &'
)
"""A shell script that waits until the process at the other end of its input has ended. Then it removes that process's
mark from the folder `$1`. If no mark is left, it also removes the folder. The script runs as a grandchild, because Ray
kills an actor together with its children."""
_ANY = ("0.0.0.0", "::", "")  # noqa: S104  compared with, not bound
_HANDLER = "dataloaderjob"


def at_home(settings: FeederSettings, folder: Path) -> FeederSettings:
    """Returns the settings with this node's blob folder, which the supervisor does not know."""
    return dataclasses.replace(settings, blob_folder=str(folder / NODE_BLOBS), sweeps_blobs=True)


def abroad(settings: FeederSettings, foreign: ForeignNode, address: str, session: Path) -> FeederSettings:
    """Returns the settings for a node of an existing Ray cluster. The blob folder is removed after the job's last
    feeder on that node has ended. `address`: the node's address, which other nodes can reach. `session`: folder of the
    node's Ray session."""
    jobs = session / FOREIGN_FOLDER
    jobs.mkdir(mode=0o700, exist_ok=True)
    folder = jobs / foreign.tag
    mark = secrets.token_hex(8)
    while True:
        (folder / "users").mkdir(mode=0o700, parents=True, exist_ok=True)
        with contextlib.suppress(FileNotFoundError):  # the last feeder before this one has just ended
            (folder / "users" / mark).touch()
            break
    _start_janitor(folder, mark)
    return dataclasses.replace(
        settings,
        bind_host=address,
        advertise_host=address,
        blob_folder=str(folder / NODE_BLOBS),
        sweeps_blobs=True,
    )


def _start_janitor(folder: Path, mark: str) -> None:
    reader, _ = os.pipe2(os.O_CLOEXEC)  # the other end closes with this process
    try:
        subprocess.run(
            ["/bin/sh", "-c", _JANITOR, "janitor", folder, mark],
            stdin=reader, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=True, start_new_session=True,
        )  # fmt: skip
    finally:
        os.close(reader)


def end_for_good(name: str, tag: str) -> NoReturn:
    """Ends this actor's process, and prevents Ray from restarting it. Ray restarts a process that merely exits."""
    try:
        ray.kill(ray.get_actor(name, namespace=tag), no_restart=True)
        time.sleep(LAST_KILL_S)
    finally:
        os._exit(EXIT_LEASE_OVER)


def tell_ended(settings: FeederSettings, why: str) -> None:
    """Reports to the supervisor that a feeder's process was killed for lack of memory.

    Raises InputError if the key cannot be read. Raises OSError and ProtocolError if the report fails.
    """
    if settings.supervisor_host is None:
        return
    with connect_as_feeder(settings, read_credentials(settings.tls_folder)) as sock:
        sockets.send_message(sock, {"type": "ended", "cause": Cause.OUT_OF_MEMORY.value, "why": why})


def hand_over(name: str, folder: Path) -> int | None:
    """Redirects this process's output to the pod. Returns the descriptor to write to once the feeder serves. If the pod
    does not accept the output, leaves the output unchanged and returns None."""
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
    """The actor that runs one feeder of a job."""

    def __init__(self, settings: FeederSettings, foreign: ForeignNode | None = None) -> None:
        """`foreign`: set on an existing Ray cluster.

        Raises ServiceError with the host's last line if the host does not serve. Ray's record of the actor keeps that
        text.
        """
        # This comes first, because Ray asks for the name even if the rest of the constructor fails.
        self._name = settings.name if foreign is None else shown_name(settings.name, foreign.tag)
        life, self._foreign = None, foreign
        if folder := os.environ.get(NODE_FOLDER_VARIABLE):
            settings = at_home(settings, Path(folder))
            life = hand_over(settings.name, Path(folder))
        # Ray makes the kernel kill its workers first if memory runs out. A feeder's host would then die before the
        # process that grows.
        die_as(os.getppid())
        self._settings = settings
        log_lines("%(levelname)s %(message)s")
        address = settings.advertise_host or settings.bind_host
        if address in _ANY:
            address = str(ray_services.get_node_ip_address())  # type: ignore[no-untyped-call]
        context = ray.get_runtime_context()
        env, key = ray_of_tasks(os.environ, context.gcs_address), None
        if foreign is not None:
            node: Any = ray_worker._global_node  # noqa: SLF001  no public way to the session's folder
            address = str(node.node_ip_address)
            settings = abroad(settings, foreign, address, Path(node.get_session_dir_path()))
            env, key = dict(foreign.env), foreign.key
        settings = dataclasses.replace(settings, advertise_host=address, node=context.get_node_id())
        self._settings, self._host = settings, Host(settings, env, key)
        if life is not None:
            with contextlib.suppress(OSError):  # a pod that does not listen is about to end
                os.write(life, b"\1")
        threading.Thread(target=self._end_with_host, name="dlj-watch", daemon=True).start()

    def __repr__(self) -> str:
        return self._name

    def _end_with_host(self) -> None:
        """Ends this process once its host has ended. Ray then restarts the actor, unless the lease has expired."""
        try:
            code = self._host.wait()
            if code == EXIT_LEASE_OVER and self._foreign is not None:
                end_for_good(self._settings.name, self._foreign.tag)
            if self._host.memory:
                with contextlib.suppress(OSError, DataLoaderJobError):  # the supervisor may be gone
                    tell_ended(self._settings, ended_text(code, "", self._host.memory))
        finally:
            os._exit(EXIT_BROKEN)


class Host:
    """A host that serves one feeder, as a child of this process."""

    def __init__(self, settings: FeederSettings, env: Mapping[str, str], key: bytes | None = None) -> None:
        """Returns once the feeder serves. `key`: the feeders' key, if no file on this node contains it.

        Raises OSError. Raises ServiceError with the host's last line if the host ends first. There is no deadline,
        because the supervisor kills an actor that is late.
        """
        self._words = ""
        """The last line on the host's standard error."""
        self.memory = ""
        """The memory limit and a remedy, if the host was killed for lack of memory; empty otherwise."""
        self._field, self._watch = settings.memory_field, MemoryWatch()
        with tempfile.TemporaryDirectory(prefix="dlj-feeder-") as folder:
            if key is not None:
                settings = dataclasses.replace(settings, key_path=str(Path(folder) / "key"))
                # The folder is private, and is removed once the host has read the key.
                Path(settings.key_path).write_bytes(key)
            self._process, reader = start_host(settings, Path(folder), stderr=subprocess.PIPE, env=env)
            self._copier = threading.Thread(target=self._copy_errors, name="dlj-stderr", daemon=True)
            self._copier.start()
            with open(reader, "rb") as ready:
                line = ready.readline()  # empty if the child ends, because nobody else holds the pipe
        self._watch.look()
        try:
            self.about: dict[str, Any] = json.loads(line)
        except ValueError as exc:
            code = self.wait()
            raise ServiceError(f"{settings.name}: {ended_text(code, self._words, self.memory)}") from exc

    def wait(self) -> int:
        """Waits until the host has ended and its last output is shown. Returns the exit code."""
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
                except OSError:  # nobody reads it anymore; the child must not wait
                    shown = False
        lines.feed(b"", final=True)

    def _remember(self, line: str) -> None:
        self._words = last_word(self._words, line)


def shown_name(name: str, tag: str) -> str:
    """Returns the name under which Ray shows a feeder on a cluster with several jobs."""
    return f"{tag}/{name}"


def show(tag: str = "") -> None:
    """Shows the output of feeders from now on. `tag`: the tag of the job whose feeders are shown; empty for all jobs.
    Call this function once, after ray.init with log_to_driver."""
    ray_worker.global_worker._filter_logs_by_job = False  # noqa: SLF001
    dispatcher = ray_logging.global_worker_stdstream_dispatcher
    for name in [key for key, _ in list(dispatcher.handlers)]:
        dispatcher.remove_handler(name)
    driver = ray.get_runtime_context().get_job_id()
    dispatcher.add_handler(_HANDLER, lambda data: _print(data, tag, driver))


def _print(data: dict[str, Any], tag: str, driver: str) -> None:
    """Prints lines that Ray forwards from feeders. `driver`: Ray's ID of this driver. Ray labels the lines with the
    name Feeder until the feeder's constructor has run."""
    name = str(data.get("actor_name") or "")
    if tag and name != "Feeder":
        of, _, name = name.rpartition("/")
        if of != tag:
            return
    if name == "Feeder":
        if tag and data.get("job") != driver:
            return
    elif index_of(name) is None:
        return
    out = sys.stderr if data.get("is_err") else sys.stdout
    for line in data.get("lines", ()):
        print(f"[{name}] {line}", file=out)
    out.flush()
