"""A provider in virtual time, whose kills take effect late or never."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dataloaderjob.providers.provider import Why


class FakeProvider:
    """Feeders are numbers. `lost`: number of kills that have no effect."""

    explain_after_s = 5.0
    session = "session"

    def __init__(
        self, *, effective_after_s: float = 0.0, lost: int = 0, fails: Exception | None = None
    ) -> None:
        self.now = 0.0
        self.running: set[int] = set()
        self.kills: list[int] = []
        self.own_keys: dict[int, str] = {}
        self._effective_after_s, self._lost, self._fails = effective_after_s, lost, fails
        self._ends: dict[int, float] = {}

    @property
    def in_force(self) -> dict[str, Any]:
        return {}

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def connect(self) -> None:
        pass

    def found(self) -> list[int]:
        if self._fails is not None:
            raise self._fails
        self.running -= {index for index, at in self._ends.items() if self.now >= at}
        return sorted(self.running)

    def place(self, index: int, num_feeders: int, own_key: str) -> None:
        self.running.add(index)
        self.own_keys[index] = own_key

    def kill(self, index: int) -> None:
        self.kills.append(index)
        if self._lost > 0:
            self._lost -= 1
            return
        self._ends.setdefault(index, self.now + self._effective_after_s)

    def late(self, indices: Sequence[int], *, taken: int, now: float) -> list[Why]:
        return []

    def out_of_memory(self) -> Mapping[str, str]:
        return {}
