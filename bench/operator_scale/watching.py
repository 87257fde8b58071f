"""A watch of all jobs. It records when a status first observed a change, and why statuses were written."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from bench.operator_scale.api import Api
from bench.operator_scale.figures import what_changed
from dataloaderjob.api import GROUP, PLURAL, VERSION

PATH = f"/apis/{GROUP}/{VERSION}/{PLURAL}"
Name = tuple[str, str]
"""(namespace, name) of a job."""


@dataclass(slots=True)
class Jobs:
    """The jobs as last reported by the watch."""

    statuses: dict[Name, dict[str, Any]] = field(default_factory=dict)
    written: Counter[str] = field(default_factory=Counter)
    """Number of reported statuses, by the part that was new."""
    observed_at: dict[tuple[Name, int], float] = field(default_factory=dict)
    """Time of the first report of a status about this generation, in seconds of the monotonic clock."""

    async def follow(self, api: Api) -> None:
        """Follows the watch until cancelled."""
        async for event in api.watch(PATH):
            if event["type"] in {"ADDED", "MODIFIED"}:
                self.told(event["object"], time.monotonic())
            elif event["type"] == "DELETED":
                self.statuses.pop(_name(event["object"]), None)

    def told(self, job: dict[str, Any], now: float) -> None:
        name, status = _name(job), job.get("status") or {}
        old = self.statuses.get(name, {})
        self.statuses[name] = status
        if (why := what_changed(old, status)) == "":
            return
        self.written[why] += 1
        if why == "generation":
            for generation in range(
                old.get("observedGeneration", 0) + 1, status.get("observedGeneration", 0) + 1
            ):
                self.observed_at.setdefault((name, generation), now)

    def phases(self) -> Counter[str]:
        return Counter(str(status.get("phase", "none")) for status in self.statuses.values())

    async def until_phase(self, phase: str, count: int, seconds: float) -> None:
        """Waits until `count` jobs have this phase. Raises TimeoutError with the current phases."""
        deadline = time.monotonic() + seconds
        while (found := self.phases())[phase] < count:
            if time.monotonic() > deadline:
                raise TimeoutError(f"{count} jobs are not {phase} within {seconds:.0f} s: {dict(found)}")
            await asyncio.sleep(0.25)


def _name(job: dict[str, Any]) -> Name:
    return job["metadata"]["namespace"], job["metadata"]["name"]
