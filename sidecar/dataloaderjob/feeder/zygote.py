"""The zygote: a process that has imported torch, from which the templates of bundles are forked.

It is a child of the host, which starts it before anything else because importing torch takes longest. It runs no user
code and has no threads. Each feeder sends its requests over a socket that the host passes on. Once ready, the zygote
sends each feeder this machine's versions, which the feeder reports to receivers.

feeder -> zygote   {"code", "manifest", "blobs"} with the channel to the template and, if output is relayed, the
                   feeder's output;  {"code"}: that template is no longer needed
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
"""Exit code of a process that has written the reason to standard error."""


@dataclass(slots=True, eq=False)
class _Feeder:
    """A feeder that may request templates."""

    name: str
    requests: socket.socket
    templates: set[bytes] = field(default_factory=set)
    """`Bundle.code` of each template that the feeder wants."""


@dataclass(slots=True, eq=False)
class _Template:
    """A running template."""

    pid: int
    requests: socket.socket
    """The socket over which the template receives the channels of further feeders."""


class Zygote(ReapingLoop):
    """The zygote's loop. `run` returns when the host is gone."""

    def __init__(self, host: socket.socket, facts: dict[str, Any]) -> None:
        """`host`: the socket over which feeders' sockets arrive."""
        super().__init__()
        self._facts = json.dumps({"facts": facts}).encode()
        self._host = host
        self._feeders: set[_Feeder] = set()
        self._templates: dict[bytes, _Template] = {}
        self.watch(host, self._another)

    def _another(self) -> None:
        """Takes the socket of a newly started feeder."""
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
        except OSError as exc:  # the feeder notices that its channel has closed
            sys.stderr.write(f"cannot fork a process for {feeder.name}'s dataset: {exc}\n")
        finally:
            for fd in fds:
                os.close(fd)

    def _provide(self, feeder: _Feeder, code: bytes, message: dict[str, Any], fds: list[int]) -> None:
        """Provides a template. `fds`: the channel to the template and, if output is relayed, the feeder's output."""
        template = self._templates.get(code)
        if template is not None:
            try:
                socket.send_fds(template.requests, [b"+"], fds[:1])
                return
            except OSError:  # the template has just ended
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
        """Kills a template that no feeder wants any longer. Its user code may hang while loading, so it may not exit by
        itself."""
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
    """Runs the zygote's process, which the host forked. `parent`: the host's pid.

    `imported`: file in which to record the modules that the zygote has imported. Its templates inherit these modules.
    """
    die_with_parent(parent)
    call_itself("dlj-zygote")
    gc.disable()  # garbage collection would take a tenth of the import time and find nothing
    try:
        import torch

        from dataloaderjob.shipping.facts import facts
    except Exception:
        sys.excepthook(*sys.exc_info())
        sys.stderr.flush()
        os._exit(EXIT_TOLD)
    torch.set_num_threads(1)
    zygote = Zygote(host, facts())
    zygote.turn(0)  # waiting feeders proceed while templates' modules are imported
    from dataloaderjob.feeder import template  # noqa: F401  so that templates have it

    if imported is not None:
        with contextlib.suppress(OSError):  # without the file, no other launch can take over this service
            record(Path(imported))
    gc.freeze()  # so that garbage collection in children does not touch the shared pages
    gc.enable()
    zygote.run()
    os._exit(0)
