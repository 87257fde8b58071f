"""Our service for one cell: feeders and a sidecar as processes of this machine, without Ray.

The component that places feeders is not in the data path, so B1 to B3 leave it out. B7 measures the start of the
private service of a script by itself.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import psutil

from bench.raybox import SCRATCH

_END_TIMEOUT_S = 5.0
_START_TIMEOUT_S = 60.0


def need(*modules: str) -> None:
    """Raises NotImplementedError with the name of the first missing module."""
    for name in modules:
        try:
            found = importlib.util.find_spec(name)
        except ModuleNotFoundError:
            found = None
        if found is None:
            raise NotImplementedError(f"{name} does not exist yet")


class Service:
    """The processes of a running service."""

    def __init__(self, sidecar: subprocess.Popen[str]) -> None:
        self._sidecar = sidecar

    @property
    def sidecar(self) -> int:
        """The sidecar's pid."""
        return self._sidecar.pid

    def receiver(self) -> dict[str, Any]:
        """Returns the figures of the only receiver, as reported by the sidecar."""
        from dataloaderjob.core import ipc

        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
            sock.connect(os.environ["DATALOADERJOB_SOCKET"])
            sock.send(ipc.pack_json(ipc.Type.STATUS, {})[0])
            (found,) = ipc.parse_json(ipc.unpack(sock.recv(1 << 20)).payload)["receivers"]
        return dict(found)

    def receivers(self) -> list[int]:
        """Returns the pids of the receivers, one for each attached trainer process."""
        return _children(self._sidecar.pid)

    def on_trainer_node(self) -> list[int]:
        """Returns the pids that must be on the trainer's node: this process, the sidecar and its receivers."""
        return on_trainer_node(self._sidecar.pid)


def on_trainer_node(sidecar: int) -> list[int]:
    """Returns the pids that must be on the trainer's node: this process, the given sidecar and its receivers."""
    return [os.getpid(), sidecar, *_children(sidecar)]


def _children(pid: int) -> list[int]:
    return [p.pid for p in psutil.Process(pid).children()]


def directly(host: str, port: int) -> tuple[str, int]:
    """Returns a feeder's own address."""
    return host, port


@contextlib.contextmanager
def service(
    *,
    feeders: int,
    shared_memory_nbytes: int,
    prefetch: int,
    host: str = "127.0.0.1",
    feeder_command: Sequence[str] = (sys.executable, "-m", "dataloaderjob.feeder.host"),
    processes: int = 1,
    feeder_env: Mapping[str, str] = MappingProxyType({}),
    same_machine: bool = False,
    tls: bool = False,
    relay: Callable[[str, int], tuple[str, int]] = directly,
) -> Iterator[Service]:
    """Starts feeders and a sidecar, points `dataloaderjob.DataLoader` in this process at it, and ends them by pid.

    `host` is the feeders' address, and `processes` the number of trainers that the sidecar serves. `feeder_env` is
    added to the environment of user code. With `same_machine`, batches arrive by shared memory, not over TCP as from
    another machine. With `tls`, TCP connections are under TLS. `relay` maps a feeder's address to that at which the
    sidecar connects.
    """
    need("dataloaderjob.trainer.loader", "dataloaderjob.sidecar.__main__", "dataloaderjob.feeder.host")
    from dataloaderjob.core import handshake
    from dataloaderjob.core.keys import Part
    from dataloaderjob.core.settings import FeederSettings, SidecarSettings, dump
    from dataloaderjob.local.certificates import RunCertificates, tls_folder

    home = Path(tempfile.mkdtemp(prefix="s", dir=os.environ.get(SCRATCH, "/tmp")))
    key = home / "key"
    key.write_bytes(handshake.new_key())
    if tls:
        RunCertificates(home).write()

    def folder(part: Part) -> str:
        return str(tls_folder(home, part)) if tls else ""

    started: list[subprocess.Popen[str]] = []
    try:
        endpoints = []
        for i in range(feeders):
            settings = FeederSettings(
                job="bench", name=f"feeder-{i}", index=i, num_feeders=feeders, key_path=str(key),
                blob_folder=str(home / "blobs"), bind_host=host,
                shares_memory=same_machine, tls_folder=folder(Part.FEEDER),
            )  # fmt: skip
            path = home / f"feeder-{i}.json"
            dump(settings, path)
            started.append(_start(feeder_command, path, feeder_env))
        for i, process in enumerate(started):
            ready = _first_line(process)
            endpoints.append((f"feeder-{i}", ready["instance"], *relay(ready["host"], ready["port"])))
        sidecar_settings = SidecarSettings(
            job="bench", socket=str(home / "s"), key_path=str(key), blobs=str(home / "blobs"),
            feeders=tuple(endpoints), shared_memory_nbytes=shared_memory_nbytes, processes=processes,
            tls_folder=folder(Part.SIDECAR),
        )  # fmt: skip
        path = home / "sidecar.json"
        dump(sidecar_settings, path)
        sidecar = _start((sys.executable, "-m", "dataloaderjob.sidecar"), path)
        started.append(sidecar)
        os.environ["DATALOADERJOB_SOCKET"] = _first_line(sidecar)["socket"]
        os.environ["DATALOADERJOB_PREFETCH"] = str(prefetch)
        yield Service(sidecar)
    finally:
        _end(started)
        shutil.rmtree(home, ignore_errors=True)


def _start(
    command: Sequence[str], settings: Path, env: Mapping[str, str] = MappingProxyType({})
) -> subprocess.Popen[str]:
    command = [*command, "--settings", str(settings)]
    return subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True, env={**os.environ, **env}
    )


def _first_line(process: subprocess.Popen[str]) -> dict[str, Any]:
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        code = process.wait(_START_TIMEOUT_S)
        raise RuntimeError(f"{process.args!r} ended with {code} before it was ready")
    return dict(json.loads(line))


def _end(processes: list[subprocess.Popen[str]]) -> None:
    for process in reversed(processes):
        process.terminate()
    deadline = time.monotonic() + _END_TIMEOUT_S
    for process in processes:
        try:
            process.wait(max(deadline - time.monotonic(), 0.0))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
