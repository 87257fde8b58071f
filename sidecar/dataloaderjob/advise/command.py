"""The command `dataloaderjob advise -- python train.py`. It runs and watches the script, terminates it, and prints the
advice."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from dataloaderjob.advise import verdict
from dataloaderjob.advise.watched import Watched, watch
from dataloaderjob.core.errors import InputError, ServiceError

MAX_TIMEOUT_S = 86_400
FREE_CPUS, OTHERS_CPUS = 0.25, 0.3
"""If fewer CPUs were idle, and other programs kept more CPUs busy, the measurement is doubtful."""


def advise(
    command: Sequence[str], *, steps: int, timeout_s: float, link_gbit: float | None, as_json: bool
) -> str:
    """Returns the advice as text. Raises InputError, with a remedy, if too little could be observed. Raises
    ServiceError if the script fails."""
    if not command:
        raise InputError(
            "advise requires the command that starts your script: dataloaderjob advise -- python train.py"
        )
    if not 5 <= steps <= 10_000:
        raise InputError(f"--steps must be from 5 to 10000, but is {steps}")
    if not 1 <= timeout_s <= MAX_TIMEOUT_S:
        raise InputError(f"--timeout must be from 1 to {MAX_TIMEOUT_S} seconds, but is {timeout_s:g}")
    if link_gbit is not None and not 0 < link_gbit < math.inf:
        raise InputError(f"--link must be a bandwidth above 0 in Gbit/s, such as 10, but is {link_gbit:g}")
    found = watch(command, steps=steps, timeout_s=timeout_s, say=_say)
    _check(found, command, timeout_s)
    link = None if link_gbit is None else link_gbit * 1e9 / 8
    made = verdict.verdict(command, found.results, cpus=cpus_here(), link=link)
    if found.idle_cpus < FREE_CPUS and found.others_cpus > OTHERS_CPUS:
        made = dataclasses.replace(made, others_cpus=found.others_cpus)
    if as_json:
        return json.dumps(verdict.as_json(made), indent=2)
    lines = verdict.lines(made)
    return "\n".join([*lines, *([verdict.manifest(made, command)] if made.advice.feeders else [])])


def _check(found: Watched, command: Sequence[str], timeout_s: float) -> None:
    if found.trouble and not found.results:
        raise InputError(f"dataloaderjob must be installed where the script runs: {found.trouble}")
    if found.returncode:
        raise ServiceError(
            f"{' '.join(command)} ended with exit code {found.returncode} before it could be measured"
        )
    if not found.results and not found.has_loader:
        raise InputError(
            "the script did not import torch's DataLoader in any process that can be observed: Python's "
            "options -I, -E and -S prevent this, and so does starting a container"
        )
    if not found.results:
        what = "ended" if found.returncode == 0 else f"ran for {timeout_s:.0f} s"
        raise InputError(
            f"the script {what} without five steps over a torch DataLoader: give it more data or epochs, or raise "
            "--timeout"
        )
    troubles = [one["trouble"] for one in found.results if "trouble" in one]
    if not any("made" in one for one in found.results):
        raise InputError(f"could not make single batches: {troubles[0] if troubles else 'it took too long'}")


def cpus_here(root: Path = Path("/")) -> int:
    """Returns the number of CPUs that this process may use: its affinity, or its cgroup's quota if that is less."""
    count = len(os.sched_getaffinity(0))
    try:
        quota, period = (root / "sys/fs/cgroup/cpu.max").read_text().split()
        return min(count, max(1, round(int(quota) / int(period))))
    except (OSError, ValueError):  # no quota, or cgroup version 1
        return count


def _say(text: str) -> None:
    sys.stderr.write(f"dataloaderjob: {text}\n")
