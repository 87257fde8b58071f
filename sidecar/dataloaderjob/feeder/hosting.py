"""The host's work: it forks feeders, relays their output, and answers the local provider's requests."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import socket
import stat
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from dataloaderjob.core import sockets
from dataloaderjob.core.errors import DataLoaderJobError, ProtocolError
from dataloaderjob.core.memory import LOOK_S, MemoryWatch, describe_limit
from dataloaderjob.core.processes import (
    Lines,
    ReapingLoop,
    call_itself,
    close_all_but,
    default_signals,
    die_with_parent,
    last_word,
)
from dataloaderjob.core.settings import FeederSettings, load
from dataloaderjob.feeder import serving
from dataloaderjob.feeder.serving import EXIT_FAILED
from dataloaderjob.feeder.zygote import EXIT_TOLD

_READ_NBYTES = 64 * 1024
Zygote = tuple[socket.socket, int]
"""The socket over which the zygote receives feeders' sockets, and the zygote's pid."""


@dataclass(slots=True, eq=False)
class _Feeder:
    """A forked feeder."""

    name: str
    pid: int
    code: int | None = None
    words: str = ""
    memory: str = ""
    """The available memory and a remedy, if memory ran out; else empty."""


class Host(ReapingLoop):
    """The host's loop. `run` returns once `over` is set."""

    def __init__(self, zygote: Zygote, listener: socket.socket | None) -> None:
        super().__init__()
        self.feeders: dict[str, _Feeder] = {}
        self._zygote, self._zygote_pid = zygote
        self._memory = MemoryWatch()
        signal.signal(signal.SIGTERM, lambda *_: self.end())
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C is for the trainer
        if listener is not None:
            self.watch(listener, lambda: self._accept(listener))
        self.woken()  # the zygote may have exited before its signal was caught

    def end(self) -> None:
        self.over = True

    # Feeders

    def start(self, settings: FeederSettings, *, relayed: bool, ready_fd: int | None = None) -> _Feeder:
        """Forks a feeder. `relayed`: show its output as lines of this process's output."""
        asking, asked = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
        pipe = os.pipe2(os.O_CLOEXEC) if relayed else None
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            die_with_parent(parent)
            _become_feeder(settings, asking, None if pipe is None else pipe[1], ready_fd)
        asking.close()
        with asked, contextlib.suppress(OSError):  # if the zygote is gone, this process is about to exit
            socket.send_fds(self._zygote, [settings.name.encode()], [asked.fileno()])
        made = self.feeders[settings.name] = _Feeder(settings.name, pid)
        if pipe is not None:
            os.close(pipe[1])
            self._relay(made, pipe[0])
        return made

    def kill(self, name: str) -> None:
        feeder = self.feeders.get(name)
        if feeder is not None and feeder.code is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(feeder.pid, signal.SIGKILL)
            os.waitpid(feeder.pid, 0)
            feeder.code = -signal.SIGKILL
        self.feeders.pop(name, None)

    def _relay(self, feeder: _Feeder, fd: int) -> None:
        def show(line: str) -> None:
            feeder.words = last_word(feeder.words, line)
            sys.stdout.write(f"[{feeder.name}] {line}\n")
            sys.stdout.flush()

        lines = Lines(show)

        def read() -> None:
            data = os.read(fd, _READ_NBYTES)
            lines.feed(data, final=not data)
            if not data:
                self.unwatch(fd)
                os.close(fd)

        self.watch(fd, read)

    def reap(self) -> None:
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            self._ended(ended[0], os.waitstatus_to_exitcode(ended[1]))

    def _ended(self, pid: int, code: int) -> None:
        if pid == self._zygote_pid:
            if code != EXIT_TOLD:
                killed = code == -signal.SIGKILL and self._memory.killed
                how = f"ran out of memory; {describe_limit('')}" if killed else f"ended with code {code}"
                sys.stderr.write(f"feeder's host: the process that imports torch {how}\n")
            self.end()
        for feeder in self.feeders.values():
            if feeder.pid == pid and feeder.code is None:
                feeder.code = code
                if code == -signal.SIGKILL and self._memory.killed:
                    feeder.memory = describe_limit("")

    def turn(self, timeout_s: float | None = None) -> None:
        self._memory.look()
        super().turn(LOOK_S if timeout_s is None else timeout_s)

    # Requests of the local provider

    def _accept(self, listener: socket.socket) -> None:
        with contextlib.suppress(OSError):
            sock, _ = listener.accept()
            self.watch(sock, lambda: self._serve(sock))

    def _serve(self, sock: socket.socket) -> None:
        try:
            sock.settimeout(5.0)
            sockets.send_message(sock, self._answer(sockets.recv_message(sock)))
        except (OSError, ProtocolError):
            self.unwatch(sock)
            sock.close()

    def _answer(self, message: dict[str, Any]) -> dict[str, Any]:
        match message.get("type"):
            case "start":
                settings = FeederSettings(**message["settings"])
                self.kill(settings.name)
                return {"type": "ok", "pid": self.start(settings, relayed=True).pid}
            case "kill":
                self.kill(str(message.get("name")))
                return {"type": "ok"}
            case "list":
                listed = [
                    {"name": f.name, "pid": f.pid, "code": f.code, "words": f.words, "memory": f.memory}
                    for f in self.feeders.values()
                ]
                return {"type": "feeders", "feeders": listed}
        return {"type": "error", "message": f"expected start, kill or list, got {message.get('type')!r}"}


def _become_feeder(
    settings: FeederSettings, requests: socket.socket, output: int | None, ready_fd: int | None
) -> NoReturn:
    default_signals()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    call_itself(f"dlj-{settings.name}")
    if output is not None:
        os.dup2(output, 1)
        os.dup2(output, 2)
    keep = {requests.fileno(), *(() if ready_fd is None else (ready_fd,))}
    close_all_but(keep)
    serving.main(settings, requests, ready_fd, relayed=output is not None)


def _listener(path: str) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    before = os.umask(0o177)
    try:
        sock.bind(path)
    finally:
        os.umask(before)
    sock.listen(8)
    return sock


def _host_one(zygote: Zygote, path: Path, ready_fd: int | None) -> int:
    settings = load(FeederSettings, path)
    host = Host(zygote, None)
    if stat.S_ISFIFO(os.fstat(0).st_mode):  # the starter holds the other end, and writes nothing
        host.watch(0, host.end)
    ready = os.dup(1) if ready_fd is None else ready_fd
    feeder = host.start(settings, relayed=False, ready_fd=ready)
    os.close(ready)
    while not host.over and feeder.code is None:
        host.turn()
    host.kill(settings.name)
    return feeder.code if feeder.code is not None and feeder.code > 0 else EXIT_FAILED if feeder.code else 0


def _host_many(zygote: Zygote, path: str) -> int:
    listener = _listener(path)
    print(json.dumps({"pid": os.getpid()}), flush=True)  # noqa: T201  read by the starter
    Host(zygote, listener).run()
    return 0


def main(zygote: Zygote) -> int:
    parser = argparse.ArgumentParser(description="forks feeders")
    parser.add_argument("--settings", type=Path, help="JSON file of FeederSettings, to start one feeder")
    parser.add_argument("--listen", help="Unix socket for requests, to start any number of feeders")
    parser.add_argument("--parent", type=int, help="pid of the parent process, with which this process exits")
    parser.add_argument(
        "--ready-fd", type=int, help="file descriptor for the ready message, instead of stdout"
    )
    args = parser.parse_args()
    if args.parent is not None:
        die_with_parent(args.parent)
    try:
        if args.listen is not None:
            return _host_many(zygote, args.listen)
        return _host_one(zygote, args.settings, args.ready_fd)
    except (DataLoaderJobError, OSError) as exc:
        sys.stderr.write(f"feeder's host: {exc}\n")
        return EXIT_FAILED
