"""The last line of a script. It states how long training waited for input, and if that was long, the cause and the
remedy. Each process writes it at most once, at exit."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import weakref
from pathlib import Path

from dataloaderjob.core.control import W_STEP_NS, W_WAIT_NS
from dataloaderjob.core.errors import say
from dataloaderjob.core.places import VERDICT_NAME
from dataloaderjob.trainer.session.client import Client

STATED_S = 10.0
"""Seconds of training below which a script that hardly waited gets no line."""
NOTICEABLE_S = 5.0
NOTICEABLE = 0.1
"""Seconds of waiting, and fraction of the run, below which the line has no cause and no remedy."""
UNEXPLAINED_S = 30.0
"""Seconds of waiting that are explained even without a verdict. Startup alone may take several seconds."""
_said_for: set[int] = set()
"""PIDs of the processes that are prepared to write the line. A forked child must prepare again."""


def prepare(client: Client, path: str) -> None:
    """Makes this process report at exit how long training waited. `path` is the private service's socket."""
    if os.getpid() in _said_for or os.environ.get("LOCAL_RANK", "0") != "0":
        return
    _said_for.add(os.getpid())
    atexit.register(_close, os.getpid(), weakref.ref(client), Path(path).parent / VERDICT_NAME)


def _close(pid: int, found: weakref.ref[Client], verdict: Path) -> None:
    client = found()
    if client is None or os.getpid() != pid:
        return
    with contextlib.suppress(Exception):  # the control memory may already be closed
        words = client.control.words
        line = last_line(
            words[W_WAIT_NS] / 1e9, words[W_STEP_NS] / 1e9, _read(verdict), len(os.sched_getaffinity(0))
        )
        if line:
            say(line)


def _read(path: Path) -> tuple[str, int, int, int]:
    """Returns the sentence, the recommended and the current number of feeders, and the number of CPUs needed. If they
    are unknown, the sentence is empty and the numbers are 0."""
    try:
        found = json.loads(path.read_text())
        return str(found["sentence"]), int(found["feeders"]), int(found["now"]), int(found["cpus"])
    except (OSError, ValueError, KeyError, TypeError):
        return "", 0, 0, 0


def last_line(waited_s: float, worked_s: float, verdict: tuple[str, int, int, int], cpus: int) -> str:
    """Returns the line, or an empty string if training was short and hardly waited."""
    spent_s = waited_s + worked_s
    sentence, feeders, now, needed = verdict
    text = f"training waited for input for {waited_s:.0f} of {spent_s:.0f} s"
    if waited_s < (NOTICEABLE_S if sentence else UNEXPLAINED_S) or waited_s < NOTICEABLE * spent_s:
        return f"{text} ({waited_s / spent_s:.0%})" if spent_s >= STATED_S else ""
    if not sentence:
        return f"{text}; `dataloaderjob advise -- COMMAND` finds the reason"
    text = f"{text}. Lately, {sentence}"
    if feeders <= now:
        return text
    if needed > cpus:
        return f"{text}, but this machine has {cpus} CPUs: a job on a cluster may have more"
    return f"{text} (num_workers={feeders})"
