"""The verdict on a run on this machine, as text for `dataloaderjob status`, and for the last line of a run or script.

A private service writes its verdict into its folder. The script's process reads the verdict there as it exits.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dataloaderjob.core import measures, places
from dataloaderjob.core.input_bound import InputVerdict, LiveLimit, judge
from dataloaderjob.core.sizing import WORTH

TOO_FEW = "too few batches so far to tell whether training waits for input"


def verdict_of(supervisor: Mapping[str, Any]) -> InputVerdict | None:
    """Returns the verdict that follows from a supervisor's status; None while it is unknown."""
    return judge(measures.parse(supervisor.get("measures")))


def closing_words(
    verdict: InputVerdict | None, counters: Mapping[str, int], *, per_pod: int, cpus: int
) -> str:
    """Returns the words about waiting for input that end a run's last line; empty if training did not wait. `counters`:
    the counters of the whole run. `per_pod`: the number of feeders in each replica."""
    waited, worked = counters.get("wait_ns", 0), counters.get("step_ns", 0)
    if verdict is None or not verdict.is_bound or not waited or waited < WORTH * (waited + worked):
        return ""
    replicas, present = -(-verdict.feeders // per_pod), -(-verdict.now // per_pod)
    text = f"; finally, {verdict.sentence(replicas, present, 'replicas')}"
    if replicas <= present:
        return text
    if verdict.limit is LiveLimit.FEEDERS and verdict.feeders > cpus:
        return f"{text}, but on more CPUs than this machine's {cpus}"
    return f"{text}: set spec.feeders.replicas"


class VerdictFile:
    """The file with the verdict, which a script's process reads as it exits."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / places.VERDICT_NAME
        self._written = ""

    def write(self, verdict: InputVerdict | None) -> None:
        """Replaces the file if the verdict has changed. Without a verdict, the file keeps the last one."""
        if verdict is None:
            return
        cpus = verdict.feeders if verdict.limit is LiveLimit.FEEDERS else 0
        text = json.dumps(
            {"sentence": verdict.sentence(), "feeders": verdict.feeders, "now": verdict.now, "cpus": cpus}
        )
        if text == self._written:
            return
        with contextlib.suppress(OSError):  # a full disk must not end the service
            part = self._path.with_name(places.VERDICT_PART)
            part.write_text(text)
            part.rename(self._path)
            self._written = text

    def forget(self) -> None:
        """Removes the file, because the service now serves another script."""
        self._written = ""
        with contextlib.suppress(OSError):
            self._path.unlink(missing_ok=True)
