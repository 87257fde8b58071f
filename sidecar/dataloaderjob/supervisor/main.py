"""The supervisor: the process that keeps a job's wanted number of feeders running.

    python -m dataloaderjob.supervisor.main --settings FILE.json

`feeder_set` makes the decisions, and a provider (`providers.provider`) carries them out. `server` handles the
connections, and `reports` keeps the reports of sidecars and feeders. Only the main thread calls the provider. A
restarted supervisor adopts the feeders that it finds. The supervisor exits with EXIT_RAY_LATE if Ray does not come up,
and with EXIT_RAY_LOST if Ray is lost. Its parent then restarts it, and the feeders keep running.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import threading
import time
from pathlib import Path
from typing import Any

from dataloaderjob.core import folders, keys, supervision
from dataloaderjob.core.errors import DataLoaderJobError, InputError, ProtocolError, ServiceError
from dataloaderjob.core.logs import log_lines
from dataloaderjob.core.processes import allow_all_files, exit_now, leave_on_signals
from dataloaderjob.core.settings import RayTuning, SupervisorSettings, load, read_credentials, read_key
from dataloaderjob.core.sockets import address_text
from dataloaderjob.core.supervision import Cause, name_of
from dataloaderjob.providers.provider import LOCAL, NAMES, RAY, REMOTE, Provider, ProviderLost
from dataloaderjob.supervisor.ending import end_feeders
from dataloaderjob.supervisor.feeder_set import (
    Endpoint,
    FeederPlace,
    FeederSet,
    FeederState,
    Instruction,
    Kill,
    Member,
)
from dataloaderjob.supervisor.reports import Reports
from dataloaderjob.supervisor.server import Process, SupervisorServer, Witness

log = logging.getLogger(__name__)

TICK_S = 1.0
WITNESS_S = 60.0
"""Seconds for which a receiver's report of an unreachable feeder counts. The receiver repeats the report every 20 s."""
ASK_AGAIN_S = 2.5
LEFT_S = 10.0
"""Seconds after a feeder's end during which the supervisor still asks whether memory ran out. Ray reports this a few
seconds late."""
EXIT_FAILED = 1


class Supervisor:
    """The state of one job's feeders, and the loop that acts on it."""

    def __init__(self, settings: SupervisorSettings) -> None:
        """Binds the job's port. Raises InputError, OSError."""
        self.settings = settings
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._state_path = Path(settings.state_path)
        self._feeders = FeederSet(
            _read_desired(self._state_path, settings.num_feeders),
            ready_timeout_s=settings.ready_timeout_s,
            drain_timeout_s=settings.drain_timeout_s,
        )
        self._urgent: list[Instruction] = []
        self._drained: list[Process] = []
        """Feeders to notify that they are no longer listed."""
        self._reports = Reports()
        self._witnesses: dict[str, dict[Witness, float]] = {}
        """instance of a feeder -> receivers that could not connect to the feeder, each with the time of its last
        report."""
        self._left: dict[int, float] = {}
        """feeder -> time at which its connection last ended."""
        self._asked_for_memory_at = self._measured_at = 0.0
        self._stopping = False
        self._ending: set[int] | None = None
        """Feeders that must still be ended at the end of the job; otherwise None."""
        self._ended = False
        self._started = time.monotonic()
        self._provider = provider_of(settings)
        self._job_key = read_key(settings.key_path)
        self._server = SupervisorServer(
            settings.bind_host,
            settings.port,
            job_key=self._job_key,
            job=settings.job,
            blob_folder=Path(settings.blob_folder),
            state=self,
            tls=read_credentials(settings.tls_folder),
        )

    # The loop, in the main thread

    def run(self) -> int:
        """Runs the loop. Returns the exit code, which is 0 after a stop request."""
        threading.Thread(target=self._publisher, name="dlj-publish", daemon=True).start()
        self._provider.connect()
        leave_on_signals()  # again, because ray.init sets its own handlers
        found = self._provider.found()
        with self._lock:
            self._feeders.opened(self._provider.session, time.monotonic())
            for index in found:
                self._feeders.adopt(index, time.monotonic())
        while True:
            with self._changed:
                instructions = self._urgent + self._feeders.step(time.monotonic())
                self._changed.notify_all()
                self._urgent = []
                desired = self._feeders.desired
                if not instructions and not self._stopping and self._ending is None:
                    self._changed.wait(self._pause_s(time.monotonic()))
                stopping, ending = self._stopping, self._ending
            if stopping:
                self._end(set())
                return 0
            if ending is not None:
                self._end(ending)
                with self._lock:
                    self._ending, self._ended = None, True
            for instruction in instructions:
                self._act(instruction, desired)
            self._explain()
            self._ask_for_memory()
            self._measure()

    def _publisher(self) -> None:
        try:
            self._publish_forever()
        except Exception:  # sidecars would get no more updates
            log.exception("the list of feeders cannot be published")
            exit_now(EXIT_FAILED)

    def _publish_forever(self) -> None:
        """Publishes changes to sidecars. Changes in quick succession are published together, because a list of 256
        feeders takes 50 KB. Draining feeders are notified after the sidecars."""
        published = -1
        while True:
            with self._changed:
                while self._feeders.version == published and not self._drained:
                    self._changed.wait()
                published, drained, self._drained = self._feeders.version, self._drained, []
            self._server.publish()
            for process in drained:
                self._server.drain(process)

    def _pause_s(self, now: float) -> float:
        """Returns the seconds until the next scheduled action, at most TICK_S."""
        due = [member.since + self._provider.explain_after_s for member in self._awaited()]
        soon = min([d for d in due if d > now] + [self._feeders.next_deadline])
        return min(TICK_S, max(0.01, soon - now))

    def _awaited(self) -> list[Member]:
        return [
            s for s in self._feeders.members.values() if s.state in (FeederState.PLACING, FeederState.LOST)
        ]

    def _act(self, instruction: Instruction, desired: int) -> None:
        if isinstance(instruction, FeederPlace):
            try:
                own_key = keys.of_feeder(self._job_key, name_of(instruction.index))
                self._provider.place(instruction.index, desired, own_key.hex())
            except ServiceError as exc:
                with self._changed:
                    self._feeders.failed(instruction.index, str(exc), time.monotonic())
        elif isinstance(instruction, Kill):
            self._provider.kill(instruction.index)
        else:
            with self._changed:
                self._drained.append((instruction.endpoint.name, instruction.endpoint.instance))

    def _explain(self) -> None:
        """Asks the provider why feeders are late, and records the reasons. Feeders that ended permanently are placed
        again later."""
        now = time.monotonic()
        with self._lock:
            explain_after_s = self._provider.explain_after_s
            late = [member.index for member in self._awaited() if now - member.since > explain_after_s]
            taken = sum(
                s.state in (FeederState.READY, FeederState.DRAINING) for s in self._feeders.members.values()
            )
        if not late:
            return
        try:
            found = self._provider.late(late, taken=taken, now=now)
        except ServiceError as exc:
            log.warning("%s", exc)
            return
        with self._lock:
            for why in found:
                if (member := self._feeders.members.get(why.feeder)) is not None:
                    member.host = why.host or member.host
                if why.cause is Cause.OUT_OF_MEMORY:
                    self._feeders.trouble(why.feeder, why.cause, why.text, time.monotonic())
                if why.dead:
                    self._feeders.failed(why.feeder, why.text, time.monotonic(), why.cause)
                else:
                    self._feeders.explain(why.feeder, why.text, why.cause)

    def _ask_for_memory(self) -> None:
        """Asks the provider whether memory ran out for feeders that ended recently or fail to start."""
        now = time.monotonic()
        with self._lock:
            gone = {index for index, at in self._left.items() if now - at < LEFT_S}
            gone |= {m.index for m in self._awaited() if m.cause is Cause.FAILS}
        if not gone or now - self._asked_for_memory_at < ASK_AGAIN_S:
            return
        self._asked_for_memory_at = now
        try:
            killed = self._provider.out_of_memory()
        except ServiceError as exc:
            log.warning("%s", exc)
            return
        with self._lock:
            for member in (m for index, m in self._feeders.members.items() if index in gone):
                host = member.host if member.endpoint is None else member.endpoint.host
                if host in killed:
                    self._feeders.trouble(member.index, Cause.OUT_OF_MEMORY, killed[host], now)

    def _measure(self) -> None:
        """Takes a reading of the sums that sidecars and feeders have reported, about once a second."""
        now = time.monotonic()
        if now - self._measured_at < TICK_S:
            return
        self._measured_at = now
        with self._lock:
            ready = sum(m.state is FeederState.READY for m in self._feeders.members.values())
            self._reports.measure(now, ready)

    def _end(self, left: set[int]) -> None:
        """Ends all members and the feeders in `left`."""
        with self._lock:
            left = left | set(self._feeders.members)
        end_feeders(self._provider, left)

    # Events of the server's threads

    def feeder_ready(self, endpoint: Endpoint) -> bool:
        with self._changed:
            placed = self._feeders.report(endpoint, time.monotonic())
            self._changed.notify_all()
        log.info(
            "%s (%s) has reported from %s",
            endpoint.name,
            endpoint.instance,
            address_text(endpoint.host, endpoint.port),
        )
        return placed

    def feeder_left(self, name: str, instance: str) -> None:
        with self._changed:
            before = self._feeders.version
            self._feeders.leave(name, instance, time.monotonic())
            if (index := supervision.index_of(name)) is not None:
                self._left[index] = time.monotonic()
            changed = self._feeders.version != before
            self._changed.notify_all()
        if changed:
            log.warning("%s (%s) is gone", name, instance)

    def feeder_trouble(self, name: str, cause: Cause, why: str) -> None:
        with self._changed:
            if (index := supervision.index_of(name)) is not None:
                self._feeders.trouble(index, cause, why, time.monotonic())
            self._changed.notify_all()
        log.warning("%s: %s", name, why)

    def feeder_drained(self, name: str, instance: str) -> None:
        with self._changed:
            self._feeders.drained(name, instance, time.monotonic())
            self._changed.notify_all()

    def replace(self, name: str, instance: str, reason: str, witness: Witness | None = None) -> bool:
        """Handles a receiver's report that a feeder hangs or, if `witness` is set, that the receiver cannot connect to
        the feeder. A feeder that cannot be reached is replaced only if most receivers report it, because one receiver
        alone may be cut off. Returns True if the feeder is replaced."""
        with self._changed:
            if witness is not None and not self._most_agree(instance, witness):
                log.info("%s (%s) is %s, according to %s", name, instance, reason, "/".join(witness))
                return False
            instructions = self._feeders.replace(name, instance, reason, time.monotonic())
            self._urgent += instructions
            self._changed.notify_all()
        if instructions:
            log.warning("%s (%s) is replaced: %s", name, instance, reason)
        return bool(instructions)

    def _most_agree(self, instance: str, witness: Witness) -> bool:
        now = time.monotonic()
        for gone in set(self._witnesses) - {e.instance for e in self._feeders.listed()}:
            del self._witnesses[gone]
        found = self._witnesses.setdefault(instance, {})
        found[witness] = now
        recent = sum(now - at < WITNESS_S for at in found.values())
        counts = [report.get("receivers") for report in self._reports.sidecars.values()]
        return 2 * recent > sum(n for n in counts if type(n) is int)

    def costs(self, instance: str, costs: dict[str, int] | None) -> None:
        with self._lock:
            self._reports.cost(instance, costs)

    def metrics(self, sidecar: str, metrics: dict[str, Any] | None) -> None:
        with self._lock:
            if metrics is None:
                self._reports.gone(sidecar)
            else:
                self._reports.add(sidecar, metrics)

    def listing(self) -> dict[str, Any]:
        with self._lock:
            return {
                "type": "feeders",
                "feeders": [
                    {"name": e.name, "instance": e.instance, "host": e.host, "port": e.port, "link": e.link}
                    for e in self._feeders.listed()
                ],
                "desired": self._feeders.desired,
                "notes": self._feeders.notes(),
                "out_of_memory": self._feeders.out_of_memory(),
            }

    def control(self, message: dict[str, Any]) -> dict[str, Any]:
        kind = message.get("type")
        if kind == "status":
            return supervision.brief(self._status()) if message.get("brief") else self._status()
        try:
            with self._changed:
                if kind == "scale":
                    desired = supervision.number(message, "feeders", supervision.MAX_FEEDERS)
                    _write_desired(self._state_path, desired)
                    self._feeders.scale(desired)
                    self._ended = False
                elif kind == "stop":
                    self._stopping = True
                elif kind == "end":
                    _write_desired(self._state_path, 0)
                    self._ending, self._ended = set(self._feeders.members), False
                    self._feeders.scale(0)
                else:
                    return {"type": "error", "message": f"expected scale, status, stop or end, got {kind!r}"}
                self._changed.notify_all()
        except (ProtocolError, OSError) as exc:
            return {"type": "error", "message": str(exc)}
        return {"type": "ok"}

    def _status(self) -> dict[str, Any]:
        now, in_force = time.monotonic(), self._provider.in_force
        with self._lock:
            feeders = [
                {
                    "name": member.name,
                    "state": member.state.name.lower(),
                    "seconds": round(now - member.since, 1),
                    "why": member.told[1],
                    "cause": member.told[0],
                    "host": member.host,
                    **_shown(member.endpoint),
                    "costs": {} if member.endpoint is None else self._reports.costs(member.endpoint.instance),
                }
                for _, member in sorted(self._feeders.members.items())
            ]
            return {
                "type": "status",
                "pid": os.getpid(),
                "up_seconds": round(now - self._started, 1),
                "desired": self._feeders.desired,
                "ready": sum(f["state"] == "ready" for f in feeders),
                "ended": self._ended,
                "feeders": feeders,
                "notes": self._feeders.notes(),
                "sidecars": dict(self._reports.sidecars),
                "failures": self._reports.failures(),
                "measures": self._reports.measures(),
                "ray": {
                    name: in_force[name] for name in ("version", *RayTuning().config()) if name in in_force
                },
            }


def provider_of(settings: SupervisorSettings) -> Provider:
    """Returns this job's provider. Imports ray only if the provider is Ray. Raises InputError."""
    if settings.provider == RAY:
        from dataloaderjob.providers.ray.placement import RayProvider

        return RayProvider(settings)
    if settings.provider == LOCAL:
        from dataloaderjob.providers.local import LocalProvider

        return LocalProvider(settings)
    if settings.provider == REMOTE:
        from dataloaderjob.providers.remote import RemoteProvider

        return RemoteProvider(settings)
    raise InputError(
        f"the provider of feeders must be one of {', '.join(NAMES)}, but is {settings.provider!r}"
    )


def _read_desired(path: Path, default: int) -> int:
    """Returns the number of feeders last requested from this supervisor or an earlier one; `default` if none is
    known."""
    try:
        return int(json.loads(path.read_text())["feeders"])
    except FileNotFoundError:
        return default
    except (OSError, ValueError, KeyError, TypeError) as exc:
        log.warning("cannot read the number of feeders from %s, using %d: %s", path, default, exc)
        return default


def _shown(endpoint: Endpoint | None) -> dict[str, Any]:
    """Returns an endpoint's fields for a status, without the key; empty without an endpoint."""
    found = {} if endpoint is None else endpoint._asdict()
    found.pop("link", None)
    return found


def _write_desired(path: Path, desired: int) -> None:
    folders.write(path, json.dumps({"feeders": desired}).encode())


def main() -> int:
    parser = argparse.ArgumentParser(description="starts, replaces and scales the feeders of one job")
    parser.add_argument("--settings", type=Path, required=True, help="JSON file of SupervisorSettings")
    log_lines("supervisor: %(levelname)s %(message)s")
    allow_all_files()  # each sidecar, feeder and unknown peer has a connection
    try:
        supervisor = Supervisor(load(SupervisorSettings, parser.parse_args().settings))
    except (DataLoaderJobError, OSError) as exc:
        log.error("%s", exc)
        return EXIT_FAILED
    try:
        return supervisor.run()
    except (ServiceError, ProviderLost) as exc:
        log.error("%s", exc)
        return supervision.EXIT_RAY_LOST


if __name__ == "__main__":
    leave_on_signals()
    exit_now(main())
