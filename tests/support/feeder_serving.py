"""Feeders as processes of this machine, forked from one host for all tests of a run."""

from __future__ import annotations

import atexit
import dataclasses
import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from feeder_client import Receiver, wait_until
from ports import reserve_port
from warm import WarmProcess

from dataloaderjob.core import keys, sockets
from dataloaderjob.core.settings import FeederSettings, dump

JOB_KEY = bytes(range(32))
KEY = keys.derive(JOB_KEY, keys.Holder.FEEDER)
Connect = Callable[[], Receiver]


def blobs(folder: Path) -> Path:
    return folder / "blobs"


def settings_in(folder: Path, **fields: Any) -> FeederSettings:
    (folder / "key").write_bytes(KEY)
    if "supervisor_host" in fields:
        fields["own_key"] = keys.of_feeder(JOB_KEY, fields["name"]).hex()
    return FeederSettings(job="job", key_path=str(folder / "key"), blob_folder=str(blobs(folder)), **fields)


class Served(NamedTuple):
    """A feeder that runs."""

    port: int
    pid: int

    @property
    def instance(self) -> str:
        with Receiver(self.port, KEY) as receiver:
            return str(receiver.facts["instance"])


class Host:
    """A host of feeders, as the local provider has it."""

    def __init__(self) -> None:
        self.path = Path(tempfile.mkdtemp(prefix="dlj-host-")) / "s"
        self.process = subprocess.Popen(
            [sys.executable, "-m", "dataloaderjob.feeder.host", "--listen", str(self.path)],
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])},
        )  # fmt: skip
        assert self.process.stdout is not None
        self.pid = json.loads(self.process.stdout.readline())["pid"]
        self._sock = socket.socket(socket.AF_UNIX)
        self._sock.connect(str(self.path))

    def ask(self, **message: Any) -> dict[str, Any]:
        sockets.send_message(self._sock, message)
        return sockets.recv_message(self._sock)

    def close(self) -> None:
        self._sock.close()
        self.process.terminate()
        self.process.wait(10)
        if self.process.stdout is not None:
            self.process.stdout.close()
        self.path.unlink()
        self.path.parent.rmdir()


@cache
def host() -> Host:
    """One for all tests of this process; what feeders print is read by nobody."""
    made = Host()
    os.set_blocking(made.process.stdout.fileno(), False)  # type: ignore[union-attr]
    atexit.register(made.close)
    return made


@contextmanager
def serving(folder: Path, name: str = "feeder-0", **fields: Any) -> Iterator[Served]:
    """A feeder of the shared host. `fields`: of its settings."""
    port = reserve_port()
    settings = settings_in(folder, port=port, name=name, **fields)
    pid = host().ask(type="start", settings=dataclasses.asdict(settings))["pid"]
    wait_until(lambda: _listens(port), 10, "the feeder listens")
    yield Served(port, pid)
    host().ask(type="kill", name=name)


def _listens(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port)).close()
    except OSError:
        return False
    return True


@contextmanager
def connecting(server: Served) -> Iterator[Connect]:
    """A function that opens links; all are closed at the end."""
    made: list[Receiver] = []

    def connect() -> Receiver:
        made.append(Receiver(server.port, KEY))
        return made[-1]

    yield connect
    for receiver in made:
        receiver.sock.close()


@contextmanager
def feeder_process(
    folder: Path, *, max_files: int | None = None
) -> Iterator[tuple[subprocess.Popen[str], dict[str, Any]]]:
    """A feeder with a host of its own, and what it said when it was ready. `max_files`: its limit of open files."""
    limited = [] if max_files is None else ["sh", "-c", f'ulimit -n {max_files}; exec "$@"', "-"]
    dump(settings_in(folder), folder / "feeder.json")
    arguments = ["-m", "dataloaderjob.feeder.host", "--settings", str(folder / "feeder.json")]
    options: dict[str, Any] = {
        "stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "text": True,
        "env": {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])},
    }  # fmt: skip
    process: subprocess.Popen[str]
    if limited:
        process = subprocess.Popen([*limited, sys.executable, *arguments], **options)
    else:
        process = WarmProcess(arguments, **options)
    try:
        assert process.stdout is not None
        yield process, json.loads(process.stdout.readline())
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
