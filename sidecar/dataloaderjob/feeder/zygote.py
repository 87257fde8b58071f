"""The zygote: the process with torch imported, from which the templates of bundles are forked.

A child of the host, which starts it first of all, since importing torch takes longer than all else. It runs no user
code and has no thread. Feeders ask it over a socket each, which the host brings; when it is ready it tells them the
versions of this machine, which they tell receivers.

feeder -> zygote   {"code", "manifest", "blobs"} with the channel to the template, and where the feeder's output goes,
                   if that is relayed;  {"code"}: no more use for that template
zygote -> feeder   {"facts"} once, when it is ready
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import signal
import socket
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from dataloaderjob.core.blobs import Bundle
from dataloaderjob.core.imported import record
from dataloaderjob.core.processes import (
    ReapingLoop,
    call_itself,
    close_all_but,
    default_signals,
    die_with_parent,
    end_group,
    lead_group,
)

_REQUEST_NBYTES = 160 * 1024
EXIT_TOLD = 3
"""Why is on standard error."""


@dataclass(slots=True, eq=False)
class _Feeder:
    """A feeder that may ask for templates."""

    name: str
    requests: socket.socket
    templates: set[bytes] = field(default_factory=set)
    """Bundles that it wants templates of."""


@dataclass(slots=True, eq=False)
class _Template:
    """A template that runs."""

    pid: int
    requests: socket.socket
    """Channels of further feeders go there."""


class Zygote(ReapingLoop):
    """`run` until the host is gone."""

    def __init__(self, host: socket.socket, facts: dict[str, Any]) -> None:
        """`host`: over which feeders' sockets come."""
        super().__init__()
        self._facts = json.dumps({"facts": facts}).encode()
        self._host = host
        self._feeders: set[_Feeder] = set()
        self._templates: dict[bytes, _Template] = {}
        self.watch(host, self._another)

    def _another(self) -> None:
        """A feeder was started."""
        data, fds, _, _ = socket.recv_fds(self._host, 256, 1)
        if not data or not fds:
            self.over = True
            return
        feeder = _Feeder(data.decode(), socket.socket(fileno=fds[0]))
        self._feeders.add(feeder)
        self.watch(feeder.requests, lambda: self._request(feeder))
        with contextlib.suppress(OSError):
            feeder.requests.send(self._facts)

    def _request(self, feeder: _Feeder) -> None:
        try:
            data, fds, _, _ = socket.recv_fds(feeder.requests, _REQUEST_NBYTES, 2)
        except OSError:
            data, fds = b"", []
        if not data:
            self._gone(feeder)
            return
        message = json.loads(data)
        code = bytes.fromhex(message["code"])
        if not fds:
            self._dismiss(feeder, code)
            return
        feeder.templates.add(code)
        try:
            self._provide(feeder, code, message, fds)
        except OSError as exc:  # the feeder sees that its channel ends
            sys.stderr.write(f"no process for {feeder.name}'s dataset can be forked: {exc}\n")
        finally:
            for fd in fds:
                os.close(fd)

    def _provide(self, feeder: _Feeder, code: bytes, message: dict[str, Any], fds: list[int]) -> None:
        """`fds`: the channel to the template, and where the feeder's output goes, if it is relayed."""
        template = self._templates.get(code)
        if template is not None:
            try:
                socket.send_fds(template.requests, [b"+"], fds[:1])
                return
            except OSError:  # it has just ended
                template.requests.close()
                del self._templates[code]
        self._templates[code] = self._fork(feeder.name, message, fds)

    def _fork(self, feeder: str, message: dict[str, Any], fds: list[int]) -> _Template:
        here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
        parent = os.getpid()
        try:
            pid = os.fork()
        except OSError:
            here.close()
            there.close()
            raise
        if pid == 0:
            die_with_parent(parent)
            lead_group(0)
            _become_template(feeder, message, there, fds)
        lead_group(pid)
        there.close()
        return _Template(pid, here)

    def _gone(self, feeder: _Feeder) -> None:
        self._feeders.discard(feeder)
        self.unwatch(feeder.requests)
        feeder.requests.close()
        for code in list(feeder.templates):
            self._dismiss(feeder, code)

    def _dismiss(self, feeder: _Feeder, code: bytes) -> None:
        """Ends a template that no feeder wants; it may hang in what user code does while it is loaded."""
        feeder.templates.discard(code)
        template = self._templates.get(code)
        if template is None or any(code in other.templates for other in self._feeders):
            return
        del self._templates[code]
        template.requests.close()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(template.pid, signal.SIGKILL)

    def reap(self) -> None:
        while (ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) is not None:
            end_group(ended.si_pid)
            for code, template in list(self._templates.items()):
                if template.pid == ended.si_pid:
                    template.requests.close()
                    del self._templates[code]


def _become_template(
    feeder: str, message: dict[str, Any], requests: socket.socket, fds: list[int]
) -> NoReturn:
    from dataloaderjob.feeder import template

    default_signals()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C is for the trainer
    call_itself("dlj-template")
    channel, *output = fds
    for fd in output:
        os.dup2(fd, 1)
        os.dup2(fd, 2)
    close_all_but({requests.fileno(), channel})
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    bundle = Bundle.parse(message["manifest"].encode())
    template.main(bundle, Path(message["blobs"]), feeder, requests, socket.socket(fileno=channel))


def main(host: socket.socket, parent: int, imported: str | None = None) -> NoReturn:
    """The whole life of the zygote's process, which the host, `parent`, forked.

    `imported`: a file for what it has imported, which its templates do not import anew.
    """
    die_with_parent(parent)
    call_itself("dlj-zygote")
    gc.disable()  # collections while modules are made take a tenth of the time, and find nothing
    try:
        import torch

        from dataloaderjob.shipping.facts import facts
    except Exception:
        sys.excepthook(*sys.exc_info())
        sys.stderr.flush()
        os._exit(EXIT_TOLD)
    torch.set_num_threads(1)
    zygote = Zygote(host, facts())
    zygote.turn(0)  # feeders that wait go on while templates' modules are imported
    from dataloaderjob.feeder import template  # noqa: F401  templates have it then

    if imported is not None:
        with contextlib.suppress(OSError):  # nobody takes this service over then
            record(Path(imported))
    gc.freeze()  # collections in children leave the pages that they share alone
    gc.enable()
    zygote.run()
    os._exit(0)
