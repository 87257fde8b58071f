"""Descriptions of how processes with user code exited, including whether the kernel killed them for lack of memory."""

from __future__ import annotations

import signal
from typing import NamedTuple

from dataloaderjob.core import supervision
from dataloaderjob.core.memory import MemoryWatch, describe_limit
from dataloaderjob.core.processes import signal_name


class End(NamedTuple):
    """A description of how a process exited."""

    text: str
    """The predicate of a sentence, such as "was killed by SIGKILL"."""
    of_memory: bool = False

    def failure(self, who: str, more: str) -> bytes:
        """Returns the FAILED payload for work lost with the process. `more`: appended unless memory ran out."""
        error, tail = ("OutOfMemory", "") if self.of_memory else ("ServiceError", more)
        return supervision.pack_failure(error, f"{who} {self.text}{tail}")


class Ends:
    """Descriptions of how one feeder's processes exited. Call `look` about once a second."""

    def __init__(self, memory_field: str, watch: MemoryWatch | None = None) -> None:
        self._field = memory_field
        self._watch = watch or MemoryWatch()

    def look(self) -> None:
        self._watch.look()

    def of_code(self, code: int) -> End:
        """Describes an exit code in the form that `subprocess` uses."""
        if code == -signal.SIGKILL:
            return self.unknown(f"was killed by {signal_name(-code)}")
        if code < 0:
            return End(f"was killed by {signal_name(-code)}")
        return End(f"ended with exit code {code}")

    def unknown(self, text: str) -> End:
        """Describes the end of a process whose exit code is unknown: `text`, unless memory ran out."""
        if not self._watch.killed:
            return End(text)
        return End(
            f"ran out of memory, and the kernel killed it; {describe_limit(self._field)}", of_memory=True
        )
