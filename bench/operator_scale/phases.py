"""The measurements in order: all jobs start, a cold start, nothing happens, changes, resyncs."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

import psutil

from bench import machine
from bench.operator_scale import claims
from bench.operator_scale.api import Api
from bench.operator_scale.cluster import Cluster
from bench.operator_scale.figures import STATUS, Between, Reading, between, spread
from bench.operator_scale.jobs import Change, Shape, change_steadily, create
from bench.operator_scale.process import Process
from bench.operator_scale.supervisors import Mode
from bench.operator_scale.watching import Jobs, Name
from bench.run import say

FIGURES = "figures"
OBSERVED = "generation"
LOOK_S = 5.0


@dataclass(frozen=True, slots=True)
class Timing:
    """Durations of measurements, and time limits, in seconds."""

    quiet_s: float = 30.0
    changes_s: float = 30.0
    changes_per_s: float = 10.0
    """Rate of spec changes. Changes of feeders.replicas, which cause the most work, come at half the rate."""
    resync_s: float = 30.0
    settled_s: float = 12.0
    """Time without a write before the next phase. It is longer than the operator's interval of polling a supervisor."""
    limit_s: float = 900.0
    """Longest wait for anything."""


TRIES = 3
KWOKS_S = 8.0
"""Most CPU seconds that kwok takes for 300 changes, unless it goes through all of its pods meanwhile."""
SMOKE = Timing(quiet_s=3.0, changes_s=2.0, changes_per_s=5.0, resync_s=5.0, settled_s=4.0, limit_s=60.0)


@dataclass(slots=True)
class Bench:
    """One run of all phases."""

    cluster: Cluster
    api: Api
    shape: Shape
    timing: Timing
    jobs: Jobs = field(default_factory=Jobs)
    figures: claims.Figures = field(default_factory=dict)
    scaled: int = 0
    """Number of phases that changed feeders.replicas."""
    again: int = 0
    """Number of phases that were measured again."""
    records: list[dict[str, Any]] = field(default_factory=list)
    """Observations of each phase, which explain its figures."""

    async def all(self) -> None:
        following = asyncio.create_task(self.jobs.follow(self.api))
        operator = Process(self.cluster)
        try:
            await self._phases(operator)
        finally:
            operator.kill()
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)

    async def _phases(self, operator: Process) -> None:
        await self.from_nothing(operator)
        await self.cold_start(operator)
        await self.changes(operator)
        await self.resync(operator)

    async def from_nothing(self, operator: Process) -> None:
        async with self._phase(operator, claims.NOTHING) as found:
            operator.start()
            found.before = None
            start = time.monotonic()
            async with asyncio.TaskGroup() as group:
                group.create_task(create(self.api, self.shape))
                telling = group.create_task(self._tell_progress(operator))
                await self.jobs.until_phase("Running", self.shape.jobs, self.timing.limit_s)
                telling.cancel()
            found.figures["all_running_s"] = time.monotonic() - start
        found.figures["cpu_s"] = found.after.cpu_s
        self._figure(claims.MEMORY, nothing_mb=found.after.peak_nbytes / claims.MB)
        await self._settled()

    async def cold_start(self, operator: Process) -> None:
        operator.kill()
        async with self._phase(operator, claims.COLD) as found:
            operator.start()
            found.before = None
            done = await operator.worked_off(self.shape.jobs, self.timing.limit_s)
            found.figures |= {"looked_at_s": done.at - operator.started_at, "cpu_s": done.cpu_s}
            await asyncio.sleep(
                self.timing.settled_s
            )  # supervisors are polled, and the watches have reported all objects again
        figures = found.statuses[FIGURES]
        found.figures |= {"writes": sum(found.after.writes.values()) - figures, "figure_writes": figures}
        self._figure(claims.MEMORY, start_mb=found.after.peak_nbytes / claims.MB)

    async def nothing_happens(self, operator: Process, prefix: str = "") -> None:
        """Measures the idle operator. `prefix` begins the names of its figures."""
        async with self._phase(operator, claims.QUIET, f"figures {prefix.rstrip('_') or 'steady'}") as found:
            await asyncio.sleep(self.timing.quiet_s)
        found.figures |= {
            f"{prefix}cpu_share": found.between.cpu_s / found.between.wall_s,
            f"{prefix}figure_writes_per_s": found.statuses[FIGURES] / found.between.wall_s,
        }

    async def changes(self, operator: Process) -> None:
        count = min(
            int(self.timing.changes_s * self.timing.changes_per_s), self.shape.jobs // len(claims.CHANGES)
        )
        names = [self.shape.names[i * count : (i + 1) * count] for i in range(len(claims.CHANGES))]
        await self._settled()
        await self.nothing_happens(operator)
        per_s = self.timing.changes_per_s
        for case, kind, mine, rate in (
            (claims.SCALE, self._scaled, names[0], per_s / 2),
            (claims.CROWDED, self._scaled, names[0], per_s),
            (claims.SPEC, _deadlines, names[1], per_s),
        ):
            await self._change_all(operator, case, mine, kind, rate)
        self.cluster.figures(Mode.MOVING.value)
        await self.nothing_happens(operator, "moving_")
        both = [self._scaled(i // 2) if i % 2 else _deadlines(i) for i in range(count)]
        async with self._phase(operator, claims.BUSY) as found:
            found.figures |= await self._change(names[2], both, per_s)
        self._figure(claims.MEMORY, changes_mb=(await operator.read()).peak_nbytes / claims.MB)

    async def _change_all(
        self,
        operator: Process,
        case: str,
        names: list[Name],
        kind: Callable[[int], dict[str, Any]],
        per_s: float,
    ) -> None:
        """Measures changes, and repeats them if kwok took a core meanwhile. Every few minutes it goes through all its
        pods."""
        for left in reversed(range(TRIES)):
            async with self._phase(operator, case) as found:
                specs = [kind(i) for i in range(len(names))]
                found.figures |= await self._change(names, specs, per_s)
                await self._settled()
            found.figures |= self._costs(found, len(names))
            self.scaled += kind == self._scaled
            if found.record["others_cpu_s"].get("kwok", 0.0) < KWOKS_S or not left:
                return
            self.again += 1
            say(f"{claims.BENCHMARK} {case}: kwok went through all its pods meanwhile, so it is done again")

    async def _change(self, names: list[Name], specs: list[dict[str, Any]], per_s: float) -> dict[str, float]:
        made = await change_steadily(self.api, names, specs, per_s)
        return spread(await self._observed(made))

    def _costs(self, found: Phase, count: int) -> dict[str, float]:
        """Returns writes and CPU per change, without the writes of figures, which would have happened anyway."""
        done, statuses = found.between, found.statuses
        events = sum(n for kind, n in done.writes.items() if kind.startswith("Event"))
        children = done.written - done.writes.get(STATUS, 0.0) - events
        needed = children + statuses[OBSERVED]
        later = done.written - needed - statuses[FIGURES]
        cpu_s = done.cpu_s - self.figures[claims.QUIET]["cpu_share"] * done.wall_s
        return {
            "writes": needed / count,
            "later_writes": later / count,
            "cpu_ms": 1000 * cpu_s / count,
        }

    async def resync(self, operator: Process) -> None:
        operator.kill()
        self.cluster.figures(Mode.STEADY.value)
        operator.start("--resync-seconds", f"{self.timing.resync_s:g}")
        await operator.worked_off(self.shape.jobs, self.timing.limit_s)
        await asyncio.sleep(self.timing.resync_s)
        await self._settled()
        async with self._phase(operator, claims.RESYNC) as found:
            await asyncio.sleep(2 * self.timing.resync_s)
        done, figures = found.between, found.statuses[FIGURES]
        cpu_s = done.cpu_s - self.figures[claims.QUIET]["cpu_share"] * done.wall_s
        found.figures |= {
            "writes": done.written - figures,
            "figure_writes": figures,
            "cpu_s_per_1000": 1000 * cpu_s / max(1.0, done.reconciles),
        }

    def _scaled(self, number: int) -> dict[str, Any]:
        return {"feeders": {"replicas": self.shape.feeders + (-1) ** (number + self.scaled)}}

    async def _observed(self, made: list[Change]) -> list[float]:
        """Returns the seconds from each change's answer until a status observed it."""
        deadline = time.monotonic() + self.timing.limit_s
        while missing := [c for c in made if (c.name, c.generation) not in self.jobs.observed_at]:
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"{len(missing)} changes were not observed, such as the one of {missing[0].name}"
                )
            await asyncio.sleep(0.1)
        return [max(0.0, self.jobs.observed_at[c.name, c.generation] - c.at) for c in made]

    async def _settled(self) -> None:
        """Waits until no status except figures has been written for a while. Raises TimeoutError."""
        deadline = time.monotonic() + self.timing.limit_s
        last, since = self._told(), time.monotonic()
        while time.monotonic() - since < self.timing.settled_s:
            if time.monotonic() > deadline:
                raise TimeoutError(f"statuses are still written: {dict(self.jobs.written)}")
            await asyncio.sleep(0.5)
            if (found := self._told()) != last:
                last, since = found, time.monotonic()

    def _told(self) -> int:
        return self.jobs.written.total() - self.jobs.written[FIGURES]

    async def _tell_progress(self, operator: Process) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            operator.check()
            phases = ", ".join(f"{count} {phase}" for phase, count in sorted(self.jobs.phases().items()))
            say(f"{claims.BENCHMARK} {claims.NOTHING}: {phases or 'no job yet'}")

    @contextlib.asynccontextmanager
    async def _phase(self, operator: Process, case: str, detail: str = "") -> AsyncIterator[Phase]:
        """Yields the findings, which are complete at the end. Figures may be added later."""
        alive = operator.alive
        found = Phase(figures=self.figures.setdefault(case, {}))
        found.before = await operator.read() if alive else None
        load, told, used = machine.snapshot(), self.jobs.written.copy(), self._used()
        yield found
        found.after = await operator.read()
        found.statuses = self.jobs.written - told
        found.between = between(found.before or _nothing(operator.started_at), found.after)
        measured = machine.between(load, machine.snapshot())
        found.record |= {
            "phase": f"{case}, {detail}" if detail else case, "figures": found.figures,
            "wall_s": found.between.wall_s, "cpu_s": found.between.cpu_s, "reconciles": found.between.reconciles,
            "errors": found.between.errors,
            "mean_queued_s": found.between.queued_s, "mean_look_s": found.between.looking_s,
            "writes": found.between.writes, "statuses": dict(found.statuses),
            "peak_mb": found.after.peak_nbytes / claims.MB, "loop_lag_s": found.after.lag_s,
            "others_cpu_s": {name: round(s - used.get(name, 0.0), 1) for name, s in self._used().items()},
            "load": measured.as_json() | {"disturbed": measured.disturbed},
        }  # fmt: skip
        self.records.append(found.record)
        say(
            f"{claims.BENCHMARK} {found.record['phase']}: {_shown(found.between)}, statuses {dict(found.statuses)}"
        )

    def _used(self) -> dict[str, float]:
        """Returns the CPU seconds of all processes except the operator."""
        found: Counter[str] = Counter()
        for process in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                command = process.cmdline()
                if "dataloaderjob_operator" not in command:
                    used = process.cpu_times()
                    found[process.name() if "-m" not in command else "stand-ins"] += used.user + used.system
        return dict(found)

    def _figure(self, case: str, **values: float) -> None:
        self.figures.setdefault(case, {}).update(values)


@dataclass(slots=True)
class Phase:
    """The findings of a phase."""

    figures: dict[str, float]
    before: Reading | None = None
    """None if the operator started in this phase."""
    after: Reading = field(init=False)
    between: Between = field(init=False)
    statuses: Counter[str] = field(default_factory=Counter)
    record: dict[str, Any] = field(default_factory=dict)


def _nothing(at: float) -> Reading:
    return Reading(at=at, cpu_s=0.0, peak_nbytes=0, writes={})


def _deadlines(number: int) -> dict[str, Any]:
    return {"loader": {"batchTimeoutSeconds": 200 + number}}


def _shown(done: Between) -> str:
    writes = ", ".join(f"{kind} {count:.0f}" for kind, count in done.writes.items())
    return (
        f"{done.wall_s:.1f} s, {done.cpu_s:.1f} CPU-s, {done.reconciles:.0f} looks of {done.looking_s:.3f} s "
        f"after {done.queued_s:.3f} s, {done.errors:.0f} errors, "
        f"writes: {writes or 'none'}"
    )
