"""What sidecars said last: their metrics, and failures that no batch has followed yet. Pure.

A trainer that fails takes its sidecar along, and the next attempt knows nothing of it: so a failure stays here
when its sidecar goes, until some trainer takes a batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

MAX_FAILURES = 16
MAX_TEXT = 600
_FIELDS = ("rank", "feeder", "reason", "text")


class Reports:
    """One job's."""

    def __init__(self) -> None:
        self.sidecars: dict[str, dict[str, Any]] = {}
        """Sidecars by name: the last message of each, without its failures."""
        self._failing: dict[str, list[dict[str, str]]] = {}
        self._taken: dict[str, int] = {}
        """Batches that a sidecar's trainers had taken when it last had no failure."""
        self._left: list[dict[str, str]] = []
        """Failures of sidecars that are gone."""

    def failures(self) -> list[dict[str, str]]:
        """The newest last."""
        live = [failure for name in sorted(self._failing) for failure in self._failing[name]]
        return [*self._left, *live][-MAX_FAILURES:]

    def add(self, sidecar: str, message: Mapping[str, Any]) -> None:
        """A message of metrics. What is in it that is no metric and no failure is kept as it is."""
        self._left = [failure for failure in self._left if failure["sidecar"] != sidecar]  # it is back
        self.sidecars[sidecar] = {k: v for k, v in message.items() if k not in ("type", "failures")}
        found = message.get("failures")
        listed = [_failure(sidecar, item) for item in found] if isinstance(found, list) else []
        if listed:
            self._failing[sidecar] = listed[-MAX_FAILURES:]
            return
        self._failing.pop(sidecar, None)
        taken = _taken(message)
        before = self._taken.setdefault(sidecar, taken)  # one that is new here has taken nothing since
        self._taken[sidecar] = taken
        if taken > before:
            self._left.clear()

    def gone(self, sidecar: str) -> None:
        """Its last connection ended."""
        self.sidecars.pop(sidecar, None)
        self._taken.pop(sidecar, None)
        self._left = [*self._left, *self._failing.pop(sidecar, [])][-MAX_FAILURES:]


def _failure(sidecar: str, found: Any) -> dict[str, str]:
    listed = found if isinstance(found, Mapping) else {}
    return {"sidecar": sidecar, **{name: str(listed.get(name) or "")[:MAX_TEXT] for name in _FIELDS}}


def _taken(message: Mapping[str, Any]) -> int:
    """Batches that the trainers of this sidecar have taken."""
    metrics = message.get("metrics")
    taken = metrics.get("next_calls") if isinstance(metrics, Mapping) else 0
    return taken if type(taken) is int else 0
