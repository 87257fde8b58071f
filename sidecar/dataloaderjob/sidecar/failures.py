"""Failures of this sidecar's trainers, until a batch has been taken after them. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dataloaderjob.core.failing import FIELDS


class Failures:
    """The last of each rank, also of one whose trainer it has ended."""

    def __init__(self) -> None:
        self._by_rank: dict[str, tuple[int, dict[str, str]]] = {}

    def current(self) -> list[dict[str, str]]:
        """Those that stand."""
        return [failure for _, failure in self._by_rank.values()]

    def told(self, rank: str, pid: int, message: Mapping[str, Any]) -> None:
        """A message of the receiver `pid`: of a failure, or, without a text, that it has passed."""
        self._by_rank.pop(rank, None)
        if "text" in message:
            self._by_rank[rank] = pid, {"rank": rank, **{name: str(message[name]) for name in FIELDS}}

    def seen(self, rank: str, pid: int, taken: int) -> None:
        """The trainer of the receiver `pid` has taken so many batches: one ends the failure of an earlier trainer."""
        if taken and rank in self._by_rank and self._by_rank[rank][0] != pid:
            del self._by_rank[rank]
