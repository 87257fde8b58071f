"""The sidecar's parent process. It attaches trainers, forks a receiver for each, follows the supervisor, and serves
metrics and health checks. It is outside the data path, and has no threads, because it forks.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import re
import selectors
import signal
import socket
import time
from pathlib import Path
from typing import Any, NoReturn

from dataloaderjob.core import ipc
from dataloaderjob.core.blobs import SLOTS, BlobStore, Bundle
from dataloaderjob.core.control import W_NEXT_CALLS, Control, sealed
from dataloaderjob.core.errors import RemoteProtocolError, first_line
from dataloaderjob.core.frames import PROTOCOL
from dataloaderjob.core.processes import (
    allow_all_files,
    default_signals,
    die_with_parent,
    end_as,
    signal_name,
)
from dataloaderjob.core.settings import LoaderSettings, SidecarSettings, read_credentials, read_key
from dataloaderjob.sidecar import metrics
from dataloaderjob.sidecar.admission import Admission, ReceiverProcess
from dataloaderjob.sidecar.attachment import Attachment
from dataloaderjob.sidecar.listeners import Guest, HttpServer, TrainerListener
from dataloaderjob.sidecar.output import log
from dataloaderjob.sidecar.receiver import Receiver
from dataloaderjob.sidecar.supervisor_client import BundleGc, Failures, SupervisorClient

TICK_S = 0.5
METRICS_EVERY_S = 1.0
SWEEP_EVERY_S = 30.0
"""Interval at which an idle private service removes the blobs of earlier scripts."""
_RANK = re.compile(r"[A-Za-z0-9._-]{1,64}\Z")


class Sidecar:
    """The parent's loop. `run` returns after SIGTERM or SIGINT, or once the sidecar's files are outdated."""

    def __init__(self, settings: SidecarSettings, source: Path | None = None) -> None:
        """`source`: the file from which the settings were read, if they may change."""
        settings.check()
        self.settings = settings
        self.key = read_key(settings.key_path)
        self._tls = read_credentials(settings.tls_folder)
        self.store = BlobStore(Path(settings.blobs), anyone=settings.anyone)
        self._bundle_gc = BundleGc(self.store)
        self.receivers: dict[int, ReceiverProcess] = {}
        """Receivers by pid."""
        self._admission = Admission(settings, self.receivers, self._end)
        self._totals = metrics.Totals()
        self._failures = Failures()
        self._stop = False
        self._select = selectors.DefaultSelector()
        self._supervisor: SupervisorClient | None = None
        self._supervisor_fd: int | None = None
        if settings.supervisor_host is not None:
            address = settings.supervisor_host, settings.supervisor_port
            self._supervisor = SupervisorClient(
                address, key=self.key, job=settings.job, name=self.name, store=self.store, tls=self._tls
            )
        awaits = settings.awaits_feeders and source is not None
        self._attachment = Attachment(source, settings, self.key) if awaits and source else None
        self._why = ""
        self.http: HttpServer | None = None
        if settings.metrics_port is not None:
            self.http = HttpServer(settings.metrics_host, settings.metrics_port, self._http, self._select)
        self._wake_r, self._wake_w = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._select.register(self._wake_r, selectors.EVENT_READ, self._on_signal)
        self._metrics_at = 0.0
        self._sweep_at = 0.0
        # This comes last, because a visible socket must have a sidecar behind it.
        self._listener = TrainerListener(
            settings.socket,
            self._select,
            self._on_guest,
            private=settings.private,
            anyone=settings.anyone,
        )

    @property
    def name(self) -> str:
        return f"sidecar-{socket.gethostname()}-{os.getpid()}"

    # The loop

    def run(self) -> None:
        signal.set_wakeup_fd(self._wake_w, warn_on_full_buffer=False)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD):
            signal.signal(number, lambda *_: None)
        while not self._stop:
            for key, _ in self._select.select(self._pause_s(time.monotonic())):
                key.data()
            self._reap()
            self._tick(time.monotonic())
        self.close()

    def _pause_s(self, now: float) -> float:
        """Returns the time until the next tick, or until the next attempt to reach the supervisor if that is sooner."""
        if self._supervisor is None or self._supervisor.fileno is not None:
            return TICK_S
        return min(TICK_S, max(0.0, self._supervisor.retry_at - now))

    def _on_signal(self) -> None:
        with contextlib.suppress(BlockingIOError):
            if set(os.read(self._wake_r, 512)) & {signal.SIGTERM, signal.SIGINT}:
                self._stop = True

    def close(self) -> None:
        """Ends the receivers and removes the socket."""
        self._listener.close()
        for receiver in self.receivers.values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(receiver.pid, signal.SIGKILL)
        for receiver in list(self.receivers.values()):
            with contextlib.suppress(ChildProcessError):
                os.waitpid(receiver.pid, 0)

    def _tick(self, now: float) -> None:
        self._listener.expire(now)
        if self.http is not None:
            self.http.expire(now)
        for receiver in self.receivers.values():
            if receiver.untold:
                receiver.untold = not self._send_feeders(receiver.channel)
        if self._supervisor is not None:
            connected = self._supervisor.try_connect(now)
            self._watch_upstream()
            if connected:
                self._on_upstream()  # the first message may have come with the end of the handshake
            if self._attachment is not None and self._supervisor.fileno is None:
                self._await_supervisor(self._attachment, self._supervisor.why, now)
        if now >= self._metrics_at:
            self._metrics_at = now + METRICS_EVERY_S
            self._send_metrics()
        if self.settings.private and not self.receivers and now >= self._sweep_at:
            self._sweep_at = now + SWEEP_EVERY_S
            self._bundle_gc.sweep()

    def _await_supervisor(self, attachment: Attachment, why: str, now: float) -> None:
        """Reports the reason why an attached pod is waiting, to trainers and in the log. Stops this sidecar if its
        files are outdated, so that the kubelet restarts it."""
        if not attachment.look(now) and why == self._why:
            return
        self._why = why
        log(attachment.outdated or attachment.ended or why)
        self._stop = bool(attachment.outdated)
        for receiver in self.receivers.values():
            receiver.untold = True

    def _send_metrics(self) -> None:
        if self._supervisor is not None:
            for receiver in self.receivers.values():
                self._failures.update(receiver.rank, receiver.pid, receiver.control.words[W_NEXT_CALLS])
            report: dict[str, Any] = {"receivers": len(self.receivers), "failures": self._failures.current()}
            report["ranks"] = metrics.by_rank((r.rank, r.control) for r in self.receivers.values())
            self._supervisor.send({"type": "metrics", "metrics": self._sums(), **report})

    def _watch_upstream(self) -> None:
        assert self._supervisor is not None  # noqa: S101
        fd = self._supervisor.fileno
        if fd != self._supervisor_fd:
            if self._supervisor_fd is not None:
                with contextlib.suppress(KeyError, ValueError):
                    self._select.unregister(self._supervisor_fd)
            if fd is not None:
                self._select.register(fd, selectors.EVENT_READ, self._on_upstream)
            self._supervisor_fd = fd

    def _on_upstream(self) -> None:
        if self._supervisor is None or self._supervisor.fileno is None:
            return
        if self._supervisor.on_readable(time.monotonic()):
            for receiver in self.receivers.values():
                receiver.untold = not self._send_feeders(receiver.channel)
        self._supervisor.flush()
        self._watch_upstream()

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            receiver = self.receivers.pop(pid, None)
            if receiver is None:
                continue  # an upload
            if code := os.waitstatus_to_exitcode(status):
                how = f"ended with status {code}" if code > 0 else f"was killed by {signal_name(-code)}"
                log(f"the receiver of rank {receiver.rank} {how}")
            while self._on_receiver(receiver):
                pass  # its last messages
            self._bundle_gc.gone(receiver.pid)
            self._failures.update(receiver.rank, receiver.pid, receiver.control.words[W_NEXT_CALLS])
            self._totals.ended(receiver.process, metrics.read(receiver.control))
            with contextlib.suppress(KeyError):
                self._select.unregister(receiver.channel)
            receiver.channel.close()
            receiver.control.close()
            os.close(receiver.pidfd)

    # Attaching

    def _on_guest(self, guest: Guest, packet: ipc.Packet) -> None:
        if packet.type == ipc.Type.HELLO:
            self._attach(guest, packet)
            return
        if packet.type == ipc.Type.STATUS:
            guest.answer(ipc.pack_json(ipc.Type.STATUS, self.status()))
        guest.close()

    def _attach(self, guest: Guest, packet: ipc.Packet) -> None:
        """Attaches a trainer. Raises RemoteProtocolError if the hello is malformed or the trainer cannot be
        admitted."""
        if packet.protocol != PROTOCOL:
            raise RemoteProtocolError(
                f"this sidecar speaks protocol version {PROTOCOL}, but the trainer speaks {packet.protocol}: install "
                "the same dataloaderjob version in both images"
            )
        hello = ipc.parse_json(packet.payload)
        adoption, fds = hello.get("adopt"), guest.fds
        if len(fds) != (4 + len(adoption["regions"]) if adoption else 1):
            raise RemoteProtocolError(
                "expected the trainer's pidfd and the file descriptors of the pools that it gives back, got "
                f"{len(fds)} file descriptors"
            )
        rank, pid, process = str(hello["rank"]), int(hello["pid"]), str(hello["process"])
        if not _RANK.match(rank):
            raise RemoteProtocolError(
                f"a rank must be a short word of letters, digits and -._, but is {rank[:80]!r}"
            )
        if adoption and not sealed(fds[1]):
            raise RemoteProtocolError("the control memory that the trainer gave back is not sealed")
        self._reap()
        claimed = hello["shown"] = self._admission.claim(rank, pid, process)
        settings = self._admission.share()
        if not adoption:
            guest.fds += [Control.create(), _eventfd(), _eventfd()]
        control = Control(fds[1])
        if not control.valid:
            raise RemoteProtocolError("the control memory that the trainer gave back is from another version")
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        for end in (ours, theirs):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
        self._send_feeders(ours)
        parent, child = os.getpid(), os.fork()
        if child == 0:
            ours.close()
            self._child(guest, theirs, hello, parent, settings)
        theirs.close()
        ours.setblocking(False)
        receiver = ReceiverProcess(claimed, pid, process, fds.pop(0), child, ours, control)
        self.receivers[child] = receiver
        if adoption:
            self._totals.adopted(process, metrics.read(control))
        self._select.register(ours, selectors.EVENT_READ, lambda: self._on_receiver(receiver))
        guest.answer(ipc.pack_json(ipc.Type.WELCOME, self._welcome(settings)), None if adoption else fds)
        guest.close()

    def _end(self, receiver: ReceiverProcess) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(receiver.pid, signal.SIGKILL)
        while receiver.pid in self.receivers:
            time.sleep(0.001)
            self._reap()

    def _child(
        self,
        guest: Guest,
        channel: socket.socket,
        hello: dict[str, Any],
        parent: int,
        settings: LoaderSettings,
    ) -> NoReturn:
        """Runs the forked receiver."""
        rank = str(hello["rank"])

        def run() -> None:
            die_with_parent(parent)
            default_signals()
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, signal.SIG_IGN)  # the parent ends it: its trainer may still read
            self._close_in_child()
            allow_all_files()
            gc.freeze()
            receiver = Receiver(
                guest.sock, channel, *guest.fds[:4], settings=settings, key=self.key, job=self.settings.job,
                tls=self._tls,
                name=f"{self.name}/rank-{hello['shown']}", process=str(hello["process"]),
                rank=int(rank) if rank.isdecimal() else 0, gives_back=self.settings.private,
            )  # fmt: skip
            if adoption := hello.get("adopt"):
                receiver.adopt(adoption, guest.fds[4:])
            receiver.run()

        end_as(run)

    def _close_in_child(self) -> None:
        """Closes the parent's file descriptors. Otherwise, ports would stay taken, and peers would not notice a
        disconnect."""
        self._select.close()
        self._listener.close_in_child()
        if self.http is not None:
            self.http.close_in_child()
        if self._supervisor is not None:
            self._supervisor.close(0.0)
        os.close(self._wake_r)
        os.close(self._wake_w)
        for receiver in self.receivers.values():
            receiver.channel.close()
            receiver.control.close()
            os.close(receiver.pidfd)
        self.receivers.clear()

    def _welcome(self, settings: LoaderSettings) -> dict[str, Any]:
        return {
            "protocol": PROTOCOL, "job": self.settings.job, "blobs": self.settings.blobs,
            "batch_deadline_s": self.settings.batch_deadline_s, "limit_nbytes": settings.limit_nbytes,
            "feeders": self._desired(), "scratch": dict(self.settings.scratch),
            SLOTS: True, "awaits_feeders": self.settings.awaits_feeders,
        }  # fmt: skip

    # Receivers

    def _desired(self) -> int:
        if self._supervisor is not None and self._supervisor.desired is not None:
            return self._supervisor.desired
        return len(self.settings.feeders)

    def _send_feeders(self, channel: socket.socket) -> bool:
        """Sends the list of feeders to a receiver. Returns False if the channel is full, so that a list must be sent
        later."""
        client = self._supervisor
        if client is None:
            listed: dict[str, Any] = {"feeders": self.settings.feeders, "desired": self._desired()}
        elif client.known or self._attachment is not None:
            listed = {
                "feeders": client.feeders, "desired": client.desired, "out_of_memory": client.out_of_memory,
                "notes": [*client.notes, *([client.why] if client.why and not client.known else [])],
                "ended": "" if self._attachment is None else self._attachment.ended,
            }  # fmt: skip
        else:
            return True
        try:
            channel.send(json.dumps(listed).encode())
        except BlockingIOError:
            return False
        except OSError:  # the receiver has ended
            pass
        return True

    def _on_receiver(self, receiver: ReceiverProcess) -> bool:
        """Handles one message from a receiver. Returns False if there was none."""
        try:
            data = receiver.channel.recv(1 << 20)
        except OSError:
            return False
        if not data:
            with contextlib.suppress(KeyError):
                self._select.unregister(receiver.channel)
            return False
        try:
            self._receive(receiver, json.loads(data))
        except Exception as exc:  # the message may contain untrusted input from its trainer
            log(f"terminating the receiver of rank {receiver.rank}: {first_line(exc)}")
            if receiver.pid in self.receivers:
                os.kill(receiver.pid, signal.SIGKILL)
        return True

    def _receive(self, receiver: ReceiverProcess, message: dict[str, Any]) -> None:
        if message["type"] == "bundle":
            bundle = Bundle.parse(message["bundle"].encode())
            self._bundle_gc.use(receiver.pid, bundle)
            if self._supervisor is not None:
                for digest, nbytes in bundle.blobs:
                    self._supervisor.have(digest, nbytes)
        elif message["type"] == "released":
            self._bundle_gc.released(receiver.pid, bytes.fromhex(message["bundle"]))
        elif message["type"] == "failure":
            self._failures.add(receiver.rank, receiver.pid, message)
            self._send_metrics()  # at once: its trainer may exit, and this sidecar with it
        elif self._supervisor is None:
            return
        elif message["type"] == "replace":
            self._supervisor.send({**message, "receiver": receiver.rank})

    # Metrics

    def _sums(self) -> dict[str, int]:
        return self._totals.of(metrics.read(receiver.control) for receiver in self.receivers.values())

    def status(self) -> dict[str, Any]:
        """Returns the status that `dataloaderjob run` shows and /status serves."""
        return {
            "job": self.settings.job, "pid": os.getpid(), "protocol": PROTOCOL, "desired": self._desired(),
            "supervisor": self._supervisor is not None and self._supervisor.fileno is not None,
            "notes": [] if self._supervisor is None else self._supervisor.notes,
            "receivers": [
                {"rank": r.rank, "trainer": r.trainer_pid, "receiver": r.pid, **metrics.read(r.control)}
                for r in self.receivers.values()
            ],
            "totals": self._sums(),
            "metrics_port": None if self.http is None else self.http.port,
        }  # fmt: skip

    def _http(self, path: str) -> tuple[int, str, str]:
        if path == "/metrics":
            receivers = [(r.rank, metrics.read(r.control)) for r in self.receivers.values()]
            return 200, "text/plain; version=0.0.4", metrics.prometheus(receivers, self.settings.job)
        if path == "/healthz":
            return 200, "text/plain", "ok\n"
        if path == "/status":
            return 200, "application/json", json.dumps(self.status()) + "\n"
        return 404, "text/plain", "only /metrics, /healthz and /status are served here\n"


def _eventfd() -> int:
    return os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
