"""A template: the process that has loaded one bundle but makes none of its samples. Builders are forked from it.

It is forked from the zygote and has no threads of its own. It serves the feeders of this machine that requested the
bundle, each over its own channel. User code is loaded once, in this process. Everything that the code does later
happens in a builder.
"""

from __future__ import annotations

import contextlib
import gc
import mmap
import os
import selectors
import signal
import socket
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch

from dataloaderjob.core.blobs import BlobStore, Bundle
from dataloaderjob.core.memory import die_first
from dataloaderjob.core.processes import call_itself, die_with_parent, end_as, end_group, lead_group
from dataloaderjob.core.timings import TIMES
from dataloaderjob.feeder import builder
from dataloaderjob.feeder.channel import ENDED, NOWHERE, Channel, MessageKind
from dataloaderjob.making.failures import pack_failure
from dataloaderjob.shipping.bundles import UserCode, load_bundle


@dataclass(slots=True, eq=False)
class _Child:
    """A running builder."""

    number: int
    pid: int
    pidfd: int
    feeder: Channel
    place: mmap.mmap


class TemplateLoop:
    """The template's loop. `run` returns when no feeder is left."""

    def __init__(self, code: UserCode, loading_ns: int, requests: socket.socket, times: Path) -> None:
        """`requests`: the socket over which the channels of further feeders arrive. `times`: folder for the times of
        batches, if it exists."""
        # A SIGCHLD handler set by user code is for builders. This process must be notified of its own children.
        self._on_child = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        self._code, self._loading_ns, self._requests, self._times = code, loading_ns, requests, times
        self._select = selectors.DefaultSelector()
        self._feeders: set[Channel] = set()
        self._children: dict[tuple[Channel, int], _Child] = {}
        self._select.register(requests, selectors.EVENT_READ, None)

    def attach(self, sock: socket.socket) -> None:
        """Adds a feeder that wants builders of this bundle."""
        feeder = Channel(sock)
        self._feeders.add(feeder)
        self._select.register(feeder, selectors.EVENT_READ, feeder)
        feeder.post(MessageKind.LOADED, a=self._loading_ns)

    def run(self) -> None:
        while self._feeders:
            for key, _ in self._select.select():
                if key.data is None:
                    self._another()
                elif isinstance(key.data, _Child):
                    self._ended(key.data)
                elif key.data in self._feeders:
                    self._serve(key.data)
        for child in list(self._children.values()):
            _kill(child)

    def _another(self) -> None:
        data, fds, _, _ = socket.recv_fds(self._requests, 64, 1)
        if not data:
            self._select.unregister(self._requests)
        for fd in fds:
            self.attach(socket.socket(fileno=fd))

    def _serve(self, feeder: Channel) -> None:
        messages, alive = feeder.read()
        for message in messages:
            if message.kind == MessageKind.FORK and message.fd is not None:
                self._fork(feeder, message.a, message.fd, message.b)
            elif message.kind == MessageKind.KILL and (child := self._children.get((feeder, message.a))):
                _kill(child)
        if not alive:
            self._leave(feeder)

    def _fork(self, feeder: Channel, number: int, fd: int, nbytes: int) -> None:
        """Forks builder `number`, with `fd` as its channel. `nbytes`: size of a body, 0 if unknown."""
        place = mmap.mmap(-1, mmap.PAGESIZE)
        parent = os.getpid()
        try:
            pid = os.fork()
        except OSError as exc:
            sys.stderr.write(f"cannot fork a process for batches: {exc}\n")
            os.close(fd)
            feeder.post(MessageKind.ENDED, a=number, payload=ENDED.pack(1, 0, NOWHERE))
            return
        if pid == 0:
            die_with_parent(parent)
            lead_group(0)
            self._close_in_child()
            _become_builder(self._code, fd, place, nbytes, self._times, self._on_child)
        lead_group(pid)
        os.close(fd)
        child = _Child(number, pid, os.pidfd_open(pid), feeder, place)
        self._children[feeder, number] = child
        self._select.register(child.pidfd, selectors.EVENT_READ, child)

    def _close_in_child(self) -> None:
        """Closes file descriptors that only the template needs. Files that user code opened while loading stay open."""
        self._select.close()
        self._requests.close()
        for feeder in self._feeders:
            feeder.close()
        for child in self._children.values():
            os.close(child.pidfd)

    def _ended(self, child: _Child) -> None:
        self._select.unregister(child.pidfd)
        os.close(child.pidfd)
        code = end_group(child.pid)
        del self._children[child.feeder, child.number]
        if child.feeder in self._feeders:
            serial, position = builder.PLACE.unpack_from(child.place)
            child.feeder.post(MessageKind.ENDED, a=child.number, payload=ENDED.pack(code, serial, position))
        child.place.close()

    def _leave(self, feeder: Channel) -> None:
        """Drops a feeder that is gone, or no longer wants this bundle."""
        self._feeders.discard(feeder)
        self._select.unregister(feeder)
        feeder.close()
        for child in [c for c in self._children.values() if c.feeder is feeder]:
            _kill(child)


def _kill(child: _Child) -> None:
    with contextlib.suppress(ProcessLookupError):
        signal.pidfd_send_signal(child.pidfd, signal.SIGKILL)


def _become_builder(
    code: UserCode, fd: int, place: mmap.mmap, nbytes: int, times: Path, on_child: Any
) -> NoReturn:
    call_itself("dlj-builder")
    if on_child is not None:
        signal.signal(signal.SIGCHLD, on_child)
    die_first()
    builder.main(code, Channel(socket.socket(fileno=fd)), place, nbytes, times)


def main(bundle: Bundle, blobs: Path, feeder: str, requests: socket.socket, first: socket.socket) -> NoReturn:
    """Runs a template's process, which the zygote forked for `feeder`."""

    def run() -> None:
        torch.set_num_threads(1)
        began = time.perf_counter_ns()
        try:
            code = load_bundle(bundle, BlobStore(blobs))
        except BaseException as exc:  # user code may raise anything, even SystemExit
            _refuse(first, requests, pack_failure(exc, phase="loading", feeder=feeder))
            return
        gc.freeze()  # so that garbage collection in a builder does not touch shared pages
        times = blobs.absolute().with_name(TIMES)
        template = TemplateLoop(code, time.perf_counter_ns() - began, requests, times)
        template.attach(first)
        template.run()

    end_as(run)


def _refuse(first: socket.socket, requests: socket.socket, failure: bytes) -> None:
    """Reports a failed load to the feeder that requested the bundle first, and to those that have requested it
    since."""
    channels = [Channel(first)]
    requests.setblocking(False)
    with contextlib.suppress(BlockingIOError):
        while (got := socket.recv_fds(requests, 64, 1))[0]:
            channels += [Channel(socket.socket(fileno=fd)) for fd in got[1]]
    for channel in channels:
        with contextlib.suppress(OSError):
            channel.send(MessageKind.LOAD_FAILED, payload=failure)
