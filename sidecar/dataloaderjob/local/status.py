"""The status of the runs on this machine. A file in a run's folder identifies the run. The sidecar and the supervisor
are asked for their status, once or repeatedly in a thread. Sums and rates are computed from their answers."""

from __future__ import annotations

import json
import math
import os
import socket
import tempfile
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dataloaderjob.core import folders, handshake, ipc, keys, sockets, supervision
from dataloaderjob.core.errors import DataLoaderJobError, InputError, ProtocolError
from dataloaderjob.core.keys import Part
from dataloaderjob.core.settings import read_credentials, read_key
from dataloaderjob.core.supervision import COUNTERS, Rates
from dataloaderjob.local.certificates import tls_folder

RUN_FILE = "run.json"
HOME_PREFIX = "dlj-run-"
TIMEOUT_S = 3.0
QUICK_S = 0.2
"""Seconds between two polls while the run waits for feeders."""
SLOW_S = 1.0
RATES_S = 1.0
"""Interval in seconds over which `dataloaderjob status` measures rates."""
WINDOW_S = 5.0
"""Interval in seconds over which rates are computed. Over one second, the rate of a few large batches would
fluctuate."""
Trainer = tuple[str, int]
"""Rank and pid of a trainer. The pid is included because the counters of a restarted trainer start at zero."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """The last statuses of the sidecar and the supervisor. A status is empty if its source does not answer."""

    at: float = 0.0
    """Time of the poll, by time.monotonic()."""
    sidecar: dict[str, Any] = field(default_factory=dict)
    supervisor: dict[str, Any] = field(default_factory=dict)

    @property
    def ready(self) -> int:
        """Number of feeders that serve."""
        return int(self.supervisor.get("ready", 0))

    @property
    def desired(self) -> int | None:
        desired = self.supervisor.get("desired")
        return None if desired is None else int(desired)

    @property
    def notes(self) -> list[str]:
        return [str(note) for note in self.supervisor.get("notes", ())]

    @property
    def receivers(self) -> list[dict[str, Any]]:
        """The entries of the sidecar's status, one for each trainer process and its pool."""
        return list(self.sidecar.get("receivers", ()))


class History:
    """Totals of one run, and its rates over the last seconds, computed from a series of snapshots.

    A restarted sidecar counts from zero, while the counters of its trainers continue. Totals are therefore added up for
    each trainer.
    """

    def __init__(self, window_s: float = WINDOW_S) -> None:
        self.last = Snapshot(at=-math.inf)
        self._window_s = window_s
        self._counted: dict[Trainer | None, Counter[str]] = {None: Counter()}
        """Counters of each trainer and, under None, of the whole run."""
        self._kept: deque[tuple[float, dict[Trainer | None, Counter[str]]]] = deque()
        """A copy of `_counted` for each time in the window."""
        self._read: dict[Trainer, Counter[str]] = {}
        """The counters of each trainer in the last snapshot that contained the trainer."""
        self._sidecar: int | None = None
        self._live: dict[Trainer, int] = {}
        """The pid of the sidecar's receiver for each trainer."""
        self._ended: Counter[str] = Counter()
        """Counters of the sidecar's receivers that have ended."""

    @property
    def total(self) -> Counter[str]:
        """Counters of the whole run."""
        return self._counted[None]

    def of_ranks(self) -> dict[str, Counter[str]]:
        """Returns the counters of each rank, summed over all processes that have had the rank."""
        found: dict[str, Counter[str]] = {}
        for trainer, counted in self._counted.items():
            if trainer is not None:
                found.setdefault(trainer[0], Counter()).update(counted)
        return found

    def add(self, snapshot: Snapshot) -> None:
        """Adds a snapshot. A snapshot that was added already is ignored."""
        if snapshot.at <= self.last.at:
            return
        self.last = snapshot
        if "totals" not in snapshot.sidecar:
            return
        self._count(snapshot)
        self._kept.append((snapshot.at, self._counted.copy()))
        while len(self._kept) > 2 and self._kept[1][0] <= snapshot.at - self._window_s:
            self._kept.popleft()

    def rates(self, receiver: Mapping[str, Any] | None = None) -> Rates | None:
        """Returns the rates of the run, or of `receiver` in the last snapshot; None if there are fewer than two
        readings."""
        key = None if receiver is None else _trainer(receiver)
        readings = [(at, counted[key]) for at, counted in self._kept if key in counted]
        if len(readings) < 2:
            return None
        (began, before), (ended, after) = readings[0], readings[-1]
        return supervision.between({"": before}, {"": after}, ended - began)

    def _count(self, snapshot: Snapshot) -> None:
        status = snapshot.sidecar
        if status.get("pid") != self._sidecar:
            self._sidecar, self._live, self._ended = status.get("pid"), {}, Counter()
        live = {_trainer(receiver): int(receiver["receiver"]) for receiver in snapshot.receivers}
        total, ended = self.total.copy(), _counters(status["totals"])
        for trainer, pid in self._live.items():
            # Added while the receiver was live. The totals of ended receivers now include these counters.
            if live.get(trainer) != pid:
                total.subtract(self._read[trainer])
        for receiver in snapshot.receivers:
            trainer, now = _trainer(receiver), _counters(receiver)
            before = self._read.get(trainer, Counter())
            rise = Counter({name: n - before[name] if n >= before[name] else n for name, n in now.items()})
            self._counted[trainer] = self._counted.get(trainer, Counter()) + rise
            self._read[trainer] = now
            total.update(rise)
            ended.subtract(now)
        total.subtract(self._ended)
        total.update(ended)
        self._counted[None], self._live, self._ended = total, live, ended


class Poller:
    """A poller of the sidecar and the supervisor, which runs in its own thread. After each poll, it replaces `snapshot`
    as a whole and calls `changed`."""

    def __init__(self, path: str, *, port: int, key: bytes, job: str, changed: Callable[[], None],
        tls_folder: str = "",
    ) -> None:  # fmt: skip
        """`tls_folder`: the folder with the supervisor's certificates, if the run uses TLS."""
        self.snapshot = Snapshot()
        self._tls_folder = tls_folder
        self._path, self._port, self._key, self._job = path, port, key, job
        self._changed = changed
        self._control: socket.socket | None = None
        self._stop = threading.Event()
        self._pause = threading.Event()
        """Set to end the pause before the next poll."""
        self._wanted = self._asked = 0
        self._exactly = False
        self._scale_to: int | None = None
        """Number of feeders to request as soon as the supervisor answers; None for no request."""
        self._thread = threading.Thread(target=self._run, name="dlj-poll", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Makes the thread end within TIMEOUT_S. Does not wait for its end."""
        self._stop.set()
        self._pause.set()

    def raise_to(self, feeders: int) -> None:
        """Makes the supervisor keep at least `feeders` feeders, as soon as it answers."""
        self._wanted = max(self._wanted, feeders)
        self._pause.set()

    def scale_to(self, feeders: int) -> None:
        """Makes the supervisor keep this number of feeders, as soon as it answers."""
        self._scale_to = feeders
        self._pause.set()

    def forget_feeders(self) -> None:
        """Makes the next call of `raise_to` apply even if an earlier request was higher."""
        self._wanted = self._asked = 0
        self._exactly = True

    def _run(self) -> None:
        while not self._stop.is_set():
            self.snapshot = Snapshot(
                at=time.monotonic(),
                sidecar=sidecar_status(self._path),
                supervisor=self._ask_supervisor(),
            )
            self._changed()
            settled = self.snapshot.desired is not None and self.snapshot.ready == self.snapshot.desired
            self._pause.wait(SLOW_S if settled else QUICK_S)
            self._pause.clear()

    def _ask_supervisor(self) -> dict[str, Any]:
        try:
            if self._control is None:
                self._control = self._connect()
            status = self._ask(self._control, {"type": "status"})
            if (number := self._scale_to) is not None:
                self._ask(self._control, {"type": "scale", "feeders": number})
                if self._scale_to == number:
                    self._scale_to = None
                status["desired"] = number
            wanted = self._wanted
            if wanted > self._asked:  # once: a later `scale` by the user takes precedence
                exactly, desired = self._exactly, int(status.get("desired", 0))
                if wanted > desired or (exactly and wanted != desired):
                    self._ask(self._control, {"type": "scale", "feeders": wanted})
                self._asked, self._exactly = wanted, False
            return status
        except (OSError, ProtocolError, InputError):
            if self._control is not None:
                self._control.close()
                self._control = None
            return {}

    def _ask(self, sock: socket.socket, message: dict[str, Any]) -> dict[str, Any]:
        sockets.send_message(sock, message)
        return sockets.recv_message(sock)

    def _connect(self) -> socket.socket:
        tls = read_credentials(self._tls_folder)
        sock = handshake.connect(
            ("127.0.0.1", self._port), keys.of_job(self._key), role="control", name="local", job=self._job,
            tls=tls,
        )  # fmt: skip
        sock.settimeout(TIMEOUT_S)
        return sock


@dataclass(frozen=True, slots=True)
class LiveRun:
    """A live run or private service."""

    home: Path
    about: dict[str, Any]

    @property
    def job(self) -> str:
        return str(self.about["job"])

    @property
    def name(self) -> str:
        """The name shown to the user: the manifest's name, or the script that a private service serves."""
        return str(self.about.get("script") or self.job)

    @property
    def is_private(self) -> bool:
        """True for the service of a script without a manifest."""
        return "manifest" not in self.about

    @property
    def kept_until(self) -> float | None:
        """Unix time at which the service ends unless another script claims it; None while it serves a script."""
        return self.about.get("kept_until")

    def ask(self, message: dict[str, Any]) -> dict[str, Any]:
        """Returns the supervisor's answer. Raises OSError, ProtocolError, ServiceError."""
        key = read_key(self.home / "key")
        tls = read_credentials(
            str(folder) if (folder := tls_folder(self.home, Part.SUPERVISOR)).exists() else ""
        )
        address = "127.0.0.1", int(self.about["port"])
        return supervision.ask(*address, key, job=self.job, message=message, tls=tls)

    def snapshot(self) -> Snapshot:
        """Asks the sidecar and the supervisor for their status. If the supervisor does not answer, the snapshot
        contains a note with the reason."""
        sidecar = sidecar_status(str(self.about["socket"]))
        try:
            supervisor = self.ask({"type": "status"})
        except (OSError, DataLoaderJobError) as exc:
            supervisor = {"notes": [f"the supervisor does not respond: {exc}"]}
        return Snapshot(at=time.monotonic(), sidecar=sidecar, supervisor=supervisor)


def live_runs(folder: str | None = None) -> list[LiveRun]:
    """Returns this user's live runs on this machine. `folder`: look only in this folder."""
    homes = [] if folder is None else [Path(folder)]
    if folder is None:
        for base in dict.fromkeys((tempfile.gettempdir(), "/tmp")):  # noqa: S108  runs have their folders here
            homes += sorted(path.parent for path in Path(base).glob(f"{HOME_PREFIX}*/{RUN_FILE}"))
    return [run for home in homes if (run := _live_run(home)) is not None]


def histories(runs: Sequence[LiveRun]) -> list[History]:
    """Returns the status of these runs, with rates over RATES_S if any of them has trainers."""
    found = [History() for _ in runs]
    for pause_s in (0.0, RATES_S):
        if pause_s and not any(history.last.receivers for history in found):
            break
        time.sleep(pause_s)
        for run, history in zip(runs, found, strict=True):
            history.add(run.snapshot())
    return found


def find_run(folder: str | None) -> LiveRun:
    """Returns the run in this folder; if `folder` is None, the only run. If exactly one run has a manifest, that run
    takes precedence over scripts without a manifest. Raises InputError, which names the candidates."""
    live = [run for run in live_runs(folder) if folder is not None or run.kept_until is None]
    if len(of_manifests := [run for run in live if not run.is_private]) == 1:
        return of_manifests[0]
    if len(live) == 1:
        return live[0]
    if folder is not None:
        raise InputError(f"found no live run in {folder}: see `dataloaderjob status`")
    if not live:
        raise InputError("you have no live run on this machine: start one with `dataloaderjob run job.yaml`")
    which = ", ".join(f"{run.home} ({run.name})" for run in live)
    raise InputError(f"found {len(live)} runs; choose one of them with --dir: {which}")


def sidecar_status(path: str) -> dict[str, Any]:
    """Returns the status of the sidecar at this socket; empty if no sidecar answers."""
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC) as sock:
            sock.settimeout(TIMEOUT_S)
            sock.connect(path)
            for packet in ipc.pack_json(ipc.Type.STATUS, {}):
                sock.send(packet)
            assembler = ipc.Assembler()
            while data := ipc.recv_with_fds(sock)[0]:
                if (answer := assembler.feed(data)) is not None:
                    return ipc.parse_json(answer.payload)
    except (OSError, ProtocolError):
        pass
    return {}


def _live_run(home: Path) -> LiveRun | None:
    try:
        if not folders.is_own(home):
            return None
        about = json.loads((home / RUN_FILE).read_text())
        os.kill(int(about["pid"]), 0)
    except (OSError, ValueError, KeyError):
        return None
    return LiveRun(home, about)


def _trainer(receiver: Mapping[str, Any]) -> Trainer:
    return str(receiver["rank"]), int(receiver["trainer"])


def _counters(reading: Mapping[str, Any]) -> Counter[str]:
    return Counter({name: int(reading.get(name, 0)) for name in COUNTERS})
