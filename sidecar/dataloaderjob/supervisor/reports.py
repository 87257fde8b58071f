"""Reports of a job's sidecars and feeders: metrics, failures that no batch has followed yet, and measures. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dataloaderjob.core import supervision
from dataloaderjob.core.measures import MeasuresWindow
from dataloaderjob.core.texts import clean

MAX_FAILURES = 16
MAX_FAILURE_TEXT = 600


class Reports:
    """The last reports of a job's sidecars and feeders.

    When a trainer fails, its sidecar ends too, and the next attempt knows nothing about the failure. This object
    therefore keeps the failure until a trainer takes a batch.
    """

    def __init__(self) -> None:
        self.sidecars: dict[str, dict[str, Any]] = {}
        """Sidecars by name: the last message of each, without its failures."""
        self._failing: dict[str, list[dict[str, str]]] = {}
        self._taken: dict[str, int] = {}
        """sidecar -> number of batches that its trainers had taken at its last report without failures."""
        self._left: list[dict[str, str]] = []
        """Failures of sidecars that are gone."""
        self._costs: dict[str, dict[str, int]] = {}
        """Sums of feeders' costs, by instance."""
        self._window = MeasuresWindow()
        self._measures: dict[str, Any] | None = None

    def failures(self) -> list[dict[str, str]]:
        """Returns the failures, the newest last."""
        live = [failure for name in sorted(self._failing) for failure in self._failing[name]]
        return [*self._left, *live][-MAX_FAILURES:]

    def add(self, sidecar: str, message: Mapping[str, Any]) -> None:
        """Processes a sidecar's metrics message."""
        # The sidecar is back.
        self._left = [failure for failure in self._left if failure["sidecar"] != sidecar]
        self.sidecars[sidecar] = {k: v for k, v in message.items() if k not in ("type", "failures")}
        found = message.get("failures")
        listed = [_failure_of(sidecar, item) for item in found] if isinstance(found, list) else []
        if listed:
            self._failing[sidecar] = listed[-MAX_FAILURES:]
            return
        self._failing.pop(sidecar, None)
        taken = _batches_taken(message)
        before = self._taken.setdefault(sidecar, taken)  # a sidecar's first report is not an increase
        self._taken[sidecar] = taken
        if taken > before:
            self._left.clear()

    def cost(self, instance: str, costs: dict[str, int] | None) -> None:
        """Records the costs that a feeder reported. `costs`: None if the feeder is gone."""
        if costs is None:
            self._costs.pop(instance, None)
        else:
            self._costs[instance] = costs

    def costs(self, instance: str) -> dict[str, int]:
        """Returns the sums of a feeder's costs; empty if the feeder has reported none."""
        return self._costs.get(instance, {})

    def measure(self, now: float, ready: int) -> None:
        """Adds a reading of the sums of all sidecars and feeders. `ready`: number of feeders that serve."""
        self._window.add(now, self.sidecars, self._costs, ready)
        found = self._window.measures()
        self._measures = None if found is None else found.as_dict()

    def measures(self) -> dict[str, Any] | None:
        """Returns the recent measures (`core.measures`); None while there are too few batches."""
        return self._measures

    def gone(self, sidecar: str) -> None:
        """Records that the sidecar's last connection ended."""
        self.sidecars.pop(sidecar, None)
        self._taken.pop(sidecar, None)
        self._left = [*self._left, *self._failing.pop(sidecar, [])][-MAX_FAILURES:]


def _failure_of(sidecar: str, found: Any) -> dict[str, str]:
    listed = found if isinstance(found, Mapping) else {}
    names = ("rank", *supervision.FIELDS)
    return {"sidecar": sidecar, **{name: clean(listed.get(name) or "", MAX_FAILURE_TEXT) for name in names}}


def _batches_taken(message: Mapping[str, Any]) -> int:
    """Returns the number of batches that the trainers of this sidecar have taken."""
    metrics = message.get("metrics")
    taken = metrics.get("next_calls") if isinstance(metrics, Mapping) else 0
    return taken if type(taken) is int else 0
