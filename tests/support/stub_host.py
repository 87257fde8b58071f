"""A feeder host reduced to its interface: each feeder is one forked process, as `feeder.server` is by itself."""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import os
import select
import signal
import socket
import sys
import threading
from pathlib import Path


def serve(settings, ready_fd: int | None) -> None:
    """One feeder, here. Returns never."""
    from dataloaderjob.feeder.registration import Registration
    from dataloaderjob.feeder.server import FeederServer

    server = FeederServer(settings)
    host = settings.advertise_host or settings.bind_host
    about = {"host": host, "port": server.port, "instance": server.instance, "pid": os.getpid()}
    if ready_fd is not None:
        os.write(ready_fd, json.dumps(about).encode() + b"\n")
        if ready_fd > 2:
            os.close(ready_fd)
    if settings.supervisor_host is not None:
        Registration(settings, server, host=host, node=settings.node).start()
    server.run_forever()


def ends_with_parent(parent: int) -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


class Host:
    def __init__(self, path: str) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        os.umask(0o177)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
        self.sock.bind(path)
        self.sock.listen()
        print(json.dumps({"pid": os.getpid()}), flush=True)
        import torch  # noqa: F401

        import dataloaderjob.feeder.server  # noqa: F401

        self.feeders: dict[str, dict] = {}
        self.pipes: dict[int, tuple[str, bytes]] = {}
        self.links: list[socket.socket] = []

    def run(self) -> None:
        from dataloaderjob.core import sockets

        while True:
            ready = select.select([self.sock, *self.links, *self.pipes], [], [], 0.05)[0]
            for one in ready:
                if one is self.sock:
                    self.links.append(self.sock.accept()[0])
                elif isinstance(one, int):
                    self.show(one)
                else:
                    try:
                        sockets.send_message(one, self.answer(sockets.recv_message(one)))
                    except OSError:
                        self.links.remove(one)
                        one.close()
            self.reap()

    def answer(self, message: dict) -> dict:
        self.reap()
        if message["type"] == "start":
            return {"type": "ok", "pid": self.start(message["settings"])}
        if message["type"] == "kill":
            found = self.feeders.pop(message["name"], None)
            if found and found["code"] is None:
                os.kill(found["pid"], signal.SIGKILL)
                os.waitpid(found["pid"], 0)
            return {"type": "ok"}
        return {"type": "feeders", "feeders": list(self.feeders.values())}

    def start(self, settings: dict) -> int:
        from dataloaderjob.core.settings import FeederSettings

        reader, writer = os.pipe2(os.O_CLOEXEC)
        parent, pid = os.getpid(), os.fork()
        if pid == 0:
            ends_with_parent(parent)
            for fd in (1, 2):
                os.dup2(writer, fd)
            try:
                serve(FeederSettings(**settings), None)
            except BaseException as exc:
                os.write(2, f"{exc}\n".encode())
            os._exit(3)
        os.close(writer)
        name = settings["name"]
        self.pipes[reader] = (name, b"")
        self.feeders[name] = {"name": name, "pid": pid, "code": None, "words": ""}
        return pid

    def show(self, fd: int) -> None:
        name, rest = self.pipes[fd]
        data = os.read(fd, 1 << 16)
        if not data:
            os.close(fd)
            del self.pipes[fd]
            return
        *lines, rest = (rest + data).split(b"\n")
        self.pipes[fd] = (name, rest)
        for line in lines:
            if name in self.feeders:
                self.feeders[name]["words"] = line.decode(errors="replace")
            print(f"[{name}] {line.decode(errors='replace')}", flush=True)

    def reap(self) -> None:
        for feeder in self.feeders.values():
            if feeder["code"] is None and os.waitpid(feeder["pid"], os.WNOHANG)[0]:
                for fd, (name, _) in list(self.pipes.items()):
                    if name == feeder["name"]:
                        self.show(fd)
                feeder["code"] = -9


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--settings", type=Path)
    parser.add_argument("--listen")
    parser.add_argument("--ready-fd", type=int, default=1)
    parser.add_argument("--no-stdin", action="store_true")
    args = parser.parse_args()
    os.environ["DATALOADERJOB_IN_FEEDER"] = "1"
    if args.listen:
        ends_with_parent(os.getppid())
        Host(args.listen).run()
    from dataloaderjob.core.settings import FeederSettings, load

    def until_end() -> None:
        sys.stdin.read()
        os._exit(0)

    if not args.no_stdin:
        threading.Thread(target=until_end, daemon=True).start()
    serve(load(FeederSettings, args.settings), args.ready_fd)


if __name__ == "__main__":
    main()
