"""Python processes forked from one that has imported torch, in place of those that import it themselves.

`WarmProcess` takes what subprocess.Popen takes, `run` what subprocess.run does. The server is started at the first
call, one for each process of tests and each set of modules; it and all its children end with this process.
"""

from __future__ import annotations

import array
import atexit
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import durations

TORCH = ("torch", "numpy")
FRAMEWORKS = (*TORCH, "lightning", "accelerate", "transformers.trainer", "torchdata.stateful_dataloader")


class _Server:
    def __init__(self, modules: Sequence[str]) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="dlj-warm-"))
        self.socket = str(self._folder / "s")
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("warm_server.py")), self.socket, *modules],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
        )
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == b"ready\n", f"no process that has imported {modules}"
        atexit.register(self._close)

    def _close(self) -> None:
        self._process.kill()
        self._process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)


@cache
def _server(modules: tuple[str, ...], process: int) -> _Server:
    """`process`: a forked child has a server of its own."""
    del process
    return _Server(modules)


class WarmProcess(subprocess.Popen):
    """A Python process that has `modules` imported. `arguments`: python's, a list of strings and paths."""

    def __init__(self, arguments: Sequence[Any], *, modules: tuple[str, ...] = TORCH, **options: Any) -> None:
        self._modules = modules
        super().__init__([sys.executable, *map(str, arguments)], **options)

    def _execute_child(
        self, args, executable, preexec_fn, close_fds, pass_fds, cwd, env, startupinfo, creationflags, shell,
        p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite, *rest,
    ) -> None:  # fmt: skip
        environment = dict(os.environ if env is None else env)
        request = {
            "arguments": args[1:],
            "environment": environment,
            "folder": str(cwd or Path.cwd()),
        }
        descriptors = [own if fd == -1 else fd for own, fd in enumerate((p2cread, c2pwrite, errwrite))]
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 19)
        try:
            self._socket.connect(_server(self._modules, os.getpid()).socket)
            rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))
            self._socket.sendmsg([json.dumps(request).encode()], [rights])
            self.pid = json.loads(self._socket.recv(1 << 12))["pid"]
            self._child_created = True
        finally:
            self._close_pipe_fds(p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite)

    def _try_wait(self, wait_flags: int) -> tuple[int, int]:
        if self._socket.fileno() == -1:
            return self.pid, self._status
        try:
            told = self._socket.recv(1 << 12, socket.MSG_DONTWAIT if wait_flags & os.WNOHANG else 0)
        except BlockingIOError:
            return 0, 0
        self._socket.close()
        assert told, "the server of warm processes has ended"
        found = json.loads(told)
        self._status = found["status"]
        durations.count_cpu(found["cpu_s"])
        return self.pid, self._status

    def _internal_poll(self, _deadstate: int | None = None, *_: Any, **__: Any) -> int | None:
        if self.returncode is None:
            pid, status = self._try_wait(os.WNOHANG)
            if pid:
                self._handle_exitstatus(status)
        return self.returncode


def run(
    arguments: Sequence[Any],
    *,
    modules: tuple[str, ...] = TORCH,
    stdin: str = "",
    timeout_s: float = 150,
    **options: Any,
) -> subprocess.CompletedProcess[str]:
    """Runs a program to its end, its output captured as text; kills it after that long. `stdin`: its input."""
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    process = WarmProcess(arguments, modules=modules, text=True, **pipes, **options)
    try:
        out, err = process.communicate(stdin, timeout=timeout_s)
    finally:
        process.kill()
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)
