"""The collection of a run's readings, events and batch times in a folder, during the run but outside the data path.

The thread that polls the sidecar and the supervisor calls `see` after each poll. Files stay below about 1 MB.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from dataloaderjob.core import timings
from dataloaderjob.core.timings import Times
from dataloaderjob.local.reporting import events
from dataloaderjob.local.reporting.series import (
    SERIES_FILE,
    TIMES_FILE,
    Event,
    RankReading,
    Reading,
    Series,
)
from dataloaderjob.local.status import History, Snapshot

TIMES_EVERY_S = 2.0
_TICK_S = 1 / os.sysconf("SC_CLK_TCK")


class Keeper:
    """The writer of one run's files."""

    def __init__(self, folder: Path, times: Path, about: Mapping[str, Any]) -> None:
        """Creates `folder`. `times`: the folder of the files in which builders record their times. Raises OSError."""
        self.folder, self._times_folder = folder, times
        folder.mkdir(parents=True, exist_ok=True)
        times.mkdir(mode=0o700, exist_ok=True)
        self._about = {**about, "started": time.time()}
        self._began = time.monotonic()
        self._lock = threading.Lock()
        self._series, self._history = Series(), History()
        self._supervisor: Mapping[str, Any] = {}
        self._ended = Times()
        """The batch times of builders that have ended."""
        self._ended_cpu: dict[str, int] = {}
        self._cpu: dict[str, dict[int, float]] = {}
        """CPU seconds of each process since it was first seen, by role and pid."""
        self._cpu_before: dict[int, float] = {}
        self._wrote_times_at = -TIMES_EVERY_S
        self._rewrite()

    def see(self, snapshot: Snapshot) -> None:
        """Processes the answers of the sidecar and the supervisor to a poll."""
        with self._lock:
            at = time.monotonic() - self._began
            self._history.add(snapshot)
            for event in events.found(at, self._supervisor, snapshot.supervisor):
                self._tell(event)
            if snapshot.supervisor:
                self._supervisor = snapshot.supervisor
            if self._series.is_due(at):
                self._read(at, snapshot)

    def tell(self, who: str, kind: str, what: str) -> None:
        """Adds an event of the run itself."""
        with self._lock:
            self._tell(Event(time.monotonic() - self._began, who, kind, what))

    def close(self, snapshot: Snapshot) -> None:
        """Takes the last reading."""
        with self._lock:
            self._history.add(snapshot)
            self._wrote_times_at = -TIMES_EVERY_S
            self._read(time.monotonic() - self._began, snapshot)

    def _tell(self, event: Event) -> None:
        if self._series.tell(event):
            self._append(event.pack())

    def _read(self, at: float, snapshot: Snapshot) -> None:
        made, cpu = self._add_times()
        self._read_cpu(snapshot)
        reading = Reading(
            at=at,
            ranks=self._ranks(snapshot),
            feeders=snapshot.ready,
            desired=snapshot.desired,
            counts=dict(self._history.total),
            cpu={role: sum(by_pid.values()) for role, by_pid in self._cpu.items()}
            | {f"{feeder}, batches": ns / 1e9 for feeder, ns in cpu.items()},
        )
        if self._series.add(reading):
            self._rewrite()
        else:
            self._append(reading.pack())
        if at - self._wrote_times_at >= TIMES_EVERY_S:
            self._wrote_times_at = at
            self._replace(TIMES_FILE, json.dumps(timings.packed(made)))

    def _ranks(self, snapshot: Snapshot) -> dict[str, RankReading]:
        ready = {str(r["rank"]): int(r["ready"]) for r in snapshot.receivers}
        found = self._history.of_ranks()
        return {
            rank: RankReading(n["next_calls"], n["wait_ns"], n["step_ns"], n["nbytes"], ready.get(rank, -1))
            for rank, n in found.items()
        }

    def _add_times(self) -> tuple[Times, dict[str, int]]:
        """Returns the batch times of all builders so far, and the builders' CPU time by feeder. Removes the files of
        builders that have ended."""
        total, cpu = Times(), dict(self._ended_cpu)
        for feeder, pid, path in timings.files(self._times_folder):
            # Checked before the file is read, so that a process that has ended adds nothing later.
            is_over = not Path(f"/proc/{pid}").exists()
            if (times := timings.read(path)) is None:
                continue
            cpu[feeder] = cpu.get(feeder, 0) + times.sums.cpu_ns
            if not is_over:
                total.add(times)
                continue
            self._ended.add(times)
            self._ended_cpu[feeder] = self._ended_cpu.get(feeder, 0) + times.sums.cpu_ns
            path.unlink(missing_ok=True)
        total.add(self._ended)
        return total, cpu

    def _read_cpu(self, snapshot: Snapshot) -> None:
        for role, pid in _processes(snapshot):
            if (seconds := cpu_of(pid)) is not None:
                before = self._cpu_before.setdefault(pid, seconds)
                self._cpu.setdefault(role, {})[pid] = max(0.0, seconds - before)

    # Files: a full disk does not end the run

    def _append(self, line: str) -> None:
        with contextlib.suppress(OSError), (self.folder / SERIES_FILE).open("a") as file:
            file.write(f"{line}\n")

    def _rewrite(self) -> None:
        lines = [json.dumps({"about": self._about})]
        rows: list[Reading | Event] = [*self._series.readings, *self._series.events]
        lines += [row.pack() for row in sorted(rows, key=lambda row: row.at)]
        self._replace(SERIES_FILE, "\n".join(lines) + "\n")

    def _replace(self, name: str, text: str) -> None:
        part = self.folder / f".{name}"
        with contextlib.suppress(OSError):
            part.write_text(text)
            part.rename(self.folder / name)


def _processes(snapshot: Snapshot) -> Iterator[tuple[str, int]]:
    """Yields the role and pid of each process of a run that its statuses name."""
    for receiver in snapshot.receivers:
        yield f"rank {receiver['rank']}", int(receiver["trainer"])
        yield f"receiver of rank {receiver['rank']}", int(receiver["receiver"])
    for role, status in (("sidecar", snapshot.sidecar), ("supervisor", snapshot.supervisor)):
        if status.get("pid"):
            yield role, int(status["pid"])
    for feeder in snapshot.supervisor.get("feeders", ()):
        if feeder.get("pid"):
            yield str(feeder["name"]), int(feeder["pid"])


def cpu_of(pid: int) -> float | None:
    """Returns the CPU seconds that a process has used so far; None if it has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) * _TICK_S
    except (OSError, IndexError, ValueError):
        return None
