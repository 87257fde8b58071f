"""A service of real processes on this machine, without Ray: feeders by themselves and one sidecar."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Self

from generations import Generations
from patience import PATIENCE_S
from warm import TORCH, WarmProcess

from dataloaderjob.core import ipc
from dataloaderjob.core.handshake import new_key
from dataloaderjob.core.keys import Part
from dataloaderjob.core.settings import FeederSettings, SidecarSettings, dump
from dataloaderjob.local.certificates import tls_folder

JOB = "test-job"
HOST = "dataloaderjob.feeder.host"
PROCESSES = 12
"""Trainer processes at a time, with 1 GiB each."""


class Rig:
    """`with Rig(feeders=2) as rig:` sets DATALOADERJOB_SOCKET; everything ends with the block."""

    def __init__(
        self, feeders: int = 1, *, env: dict[str, str] | None = None, shares_memory: bool = True, cold: bool = False,
        modules: tuple[str, ...] = (), tls: bool = False, **sidecar,
    ) -> None:  # fmt: skip
        """`shares_memory`: else batches come over TCP, as from another machine. `cold`: hosts import torch themselves,
        and what else runs there has not got it. `modules`: libraries that hosts have imported, besides torch. `tls`:
        TCP connections are under TLS."""
        self.home = Path(tempfile.mkdtemp(prefix="dlj-"))
        self.socket = str(self.home / "s")
        self.certificates = Generations(self.home) if tls else None
        (self.home / "key").write_bytes(new_key())
        self.env = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p), **(env or {})}
        self.feeders: list[tuple[subprocess.Popen, dict]] = []
        self.sidecar_options = sidecar
        self.sidecar: subprocess.Popen | None = None
        self.others: list[subprocess.Popen] = []
        self.count = feeders
        self.cold, self.modules = cold, (*TORCH, *modules)
        self.shares_memory = shares_memory
        self._socket_before: str | None = None

    def __enter__(self) -> Self:
        try:
            self.add_feeders(self.count)
            self.start_sidecar()
        except BaseException:
            self.__exit__()
            raise
        self._socket_before = os.environ.get("DATALOADERJOB_SOCKET")
        os.environ["DATALOADERJOB_SOCKET"] = self.socket
        return self

    def __exit__(self, *_: object) -> None:
        os.environ.pop("DATALOADERJOB_SOCKET", None)
        if self._socket_before:
            os.environ["DATALOADERJOB_SOCKET"] = self._socket_before
        processes = [p for p, _ in self.feeders] + ([self.sidecar] if self.sidecar else []) + self.others
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGCONT)
            process.kill()
        for process in processes:
            process.wait()
            if process.stdout:
                process.stdout.close()
        shutil.rmtree(self.home, ignore_errors=True)

    def _start(self, module: str, settings: object, name: str) -> tuple[subprocess.Popen, dict]:
        path = self.home / f"{name}.json"
        dump(settings, path)
        arguments = ["-m", module, "--settings", str(path)]
        with open(self.home / f"{name}.log", "ab") as log:
            options = {"stdout": subprocess.PIPE, "stderr": log, "env": self.env}
            if module == HOST and not self.cold:
                return WarmProcess(arguments, modules=self.modules, **options), {}
            return subprocess.Popen([sys.executable, *arguments], **options), {}

    def add_feeders(self, n: int, *, name: str | None = None) -> list[subprocess.Popen]:
        new = []
        for i in range(len(self.feeders), len(self.feeders) + n):
            settings = FeederSettings(
                job=JOB,
                name=name or f"feeder-{i}",
                index=i,
                key_path=str(self.home / "key"),
                blob_folder=str(self.home / "blobs"),
                shares_memory=self.shares_memory,
                tls_folder=self._tls_folder(Part.FEEDER),
            )
            new.append(self._start(HOST, settings, f"feeder-{i}"))
        for process, about in new:
            line = process.stdout.readline()
            assert line, self.logs()
            about.update(json.loads(line), name=name or f"feeder-{len(self.feeders)}")
            self.feeders.append((process, about))
        return [p for p, _ in new]

    def start_sidecar(self, **more) -> subprocess.Popen:
        shared = {"processes", "shared_memory_nbytes"} & {*self.sidecar_options, *more}
        options = {
            **({} if shared else {"processes": PROCESSES, "shared_memory_nbytes": PROCESSES << 30}),
            "socket": self.socket,
            "feeders": self.endpoints(),
            "metrics_port": 0,
            **self.sidecar_options,
            **more,
        }
        options = {
            "key_path": str(self.home / "key"), "tls_folder": self._tls_folder(Part.SIDECAR), **options,
        }  # fmt: skip
        settings = SidecarSettings(job=JOB, blobs=str(self.home / "blobs"), **options)
        self.sidecar, about = self._start("dataloaderjob.sidecar", settings, "sidecar")
        line = self.sidecar.stdout.readline()
        assert line, self.logs()
        about.update(json.loads(line))
        self.metrics_port = about["metrics_port"]
        return self.sidecar

    def _tls_folder(self, part: Part) -> str:
        return "" if self.certificates is None else str(tls_folder(self.home, part))

    def another_sidecar(self, name: str, *, feeders: int | None = None, **more) -> str:
        """A second sidecar, for the first `feeders` of the feeders; returns its socket."""
        path = str(self.home / name)
        first, about = self.sidecar, self.metrics_port
        listed = self.endpoints()[:feeders]
        self.others.append(self.start_sidecar(socket=path, feeders=listed, **more))
        self.sidecar, self.metrics_port = first, about
        return path

    def endpoints(self) -> list[tuple]:
        """Of the feeders that have not ended."""
        return [
            (about["name"], about["instance"], about["host"], about["port"])
            for process, about in self.feeders
            if process.poll() is None
        ]

    def kill_sidecar(self) -> None:
        self.sidecar.kill()
        self.sidecar.wait()
        self.sidecar.stdout.close()

    def status(self) -> dict:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
            sock.settimeout(5)
            sock.connect(self.socket)
            (packet,) = ipc.pack_json(ipc.Type.STATUS, {})
            sock.send(packet)
            return ipc.parse_json(ipc.unpack(sock.recv(1 << 20)).payload)

    def logs(self) -> str:
        return "\n".join(f"== {p.name}\n{p.read_text()[-4000:]}" for p in sorted(self.home.glob("*.log")))


def until(condition, timeout_s: float = 10.0, what: str = "the condition"):
    """Waits for a real process's doing, PATIENCE_S at least; the only sleep that tests need."""
    timeout_s = max(timeout_s, PATIENCE_S)
    deadline = time.monotonic() + timeout_s
    while not (value := condition()):
        assert time.monotonic() < deadline, f"{what} did not come true within {timeout_s} s"
        time.sleep(0.01)
    return value


__all__ = ["Rig", "dataclasses", "until"]
