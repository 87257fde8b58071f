"""What the scripts of tests/parity give under torch's DataLoader, as recorded: it takes a minute to find out.

A row holds for the versions of Python, torch and numpy that it was made with and for the files of its script. Another
script or version is run. `make record-parity` makes all rows anew.
"""

from __future__ import annotations

import hashlib
import json
import platform
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from parity_runs import HOME, Outcome, Runs, Script, scripts

RECORD = HOME / "torch.json"


def versions() -> dict[str, str]:
    """What the outcome of a script may depend on, beside its files."""
    python = ".".join(platform.python_version_tuple()[:2])
    return {"python": python, "torch": torch.__version__.partition("+")[0], "numpy": np.__version__}


def digest(script: Script) -> str:
    """Of all files of the script, and of those that all scripts import."""
    found = hashlib.sha256()
    own = [script.entry] if script.folder is None else sorted(script.folder.rglob("*.py"))
    for file in [*own, *sorted((HOME / "lib").rglob("*.py"))]:
        found.update(f"{file.relative_to(HOME)}\n".encode() + file.read_bytes())
    return found.hexdigest()[:16]


def recorded(wanted: Iterable[Script]) -> dict[str, Outcome]:
    """By the script's name, of those whose row holds here."""
    record = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    if record.get("versions") != versions():
        return {}
    rows: dict[str, dict[str, Any]] = record["scripts"]
    return {
        script.name: Outcome(row["stdout"], row["status"], row["error"], "", False)
        for script in wanted
        if (row := rows.get(script.name)) is not None and row["digest"] == digest(script)
    }


class Torchs:
    """Outcomes under torch's loader, recorded ones and those of `live`."""

    def __init__(self, known: dict[str, Outcome], live: Runs) -> None:
        self._known, self._live = known, live

    def outcome(self, name: str) -> Outcome:
        return self._known.get(name) or self._live.outcome(name)


def main() -> None:
    chosen = scripts()
    with tempfile.TemporaryDirectory() as folder:
        runs = Runs("torch", Path(folder), [(script, False) for script in chosen], None)
        rows = {}
        for script in chosen:
            found = runs.outcome(script.name)
            if found.timed_out:
                raise SystemExit(
                    f"{script.name} took too long: no record is written; try again on a quiet machine"
                )
            row = {
                "digest": digest(script),
                "status": found.status,
                "error": found.error,
                "stdout": found.stdout,
            }
            rows[script.name] = row
        runs.close()
    RECORD.write_text(json.dumps({"versions": versions(), "scripts": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
