"""The answers of a builder that makes a slot: kept for as long as they may be asked for again.

A slot cannot go back. What was made and did not arrive, since a place in the pool was needed or a connection broke, is
sent again from the buffer that it lies in.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from dataloaderjob.feeder.channel import Kind


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What a builder says of one batch."""

    kind: Kind
    payload: bytes
    flags: int = 0
    buffer: int | None = None
    """Where the body lies."""


class Answers:
    """Those of one slot, by the batch's number in it."""

    def __init__(self, free: Callable[[int], None]) -> None:
        """`free(buffer)`: it is of no further use."""
        self._free = free
        self._of: dict[int, Answer] = {}
        self._lent: Counter[int] = Counter()
        """How often the feeder has each buffer."""

    def get(self, number: int) -> Answer | None:
        return self._of.get(number)

    def keep(self, number: int, answer: Answer) -> None:
        self._of[number] = answer

    def lend(self, answer: Answer) -> None:
        """The answer goes to the feeder."""
        if answer.buffer is not None:
            self._lent[answer.buffer] += 1

    def returned(self, buffer: int) -> None:
        """The feeder has sent a body, or given it up."""
        self._lent[buffer] -= 1
        self._free_unless_used(buffer)

    def forget(self, needed: int) -> None:
        """Batches before `needed` are not asked for again."""
        for number in [number for number in self._of if number < needed]:
            buffer = self._of.pop(number).buffer
            if buffer is not None:
                self._free_unless_used(buffer)

    def _free_unless_used(self, buffer: int) -> None:
        if self._lent[buffer] <= 0 and all(kept.buffer != buffer for kept in self._of.values()):
            del self._lent[buffer]
            self._free(buffer)
