"""The scripts below tests/parity/scripts, and their runs under torch's DataLoader and ours.

A script is `TOPIC/NAME.py`, or a folder `TOPIC/NAME` with `main.py`, `tools/train.py` or a package `app` that is run by
`python -m app`. A folder `src` of it lies on sys.path as an editable install would. Lines `# parity: WORD` say how it
runs:

    raises=TYPE  it ends with that error (under torch; ours has to be equal)
    needs=MODULE  it is skipped where that cannot be imported
    stdin        it is read from standard input
    alone        no service is there before it: ours starts its own, as in a bare script
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

HOME = Path(__file__).parents[1] / "parity"
SCRIPTS = HOME / "scripts"
TIMEOUT_S = 30.0
WIDTH = 2
_ENTRIES = ("main.py", "tools/train.py", "app/__main__.py")
_ERROR = re.compile(r"^([A-Za-z_][\w.]*)(?::|$)")


@dataclass(frozen=True)
class Script:
    name: str
    """TOPIC/NAME."""
    entry: Path

    @property
    def folder(self) -> Path | None:
        """What is copied with the entry; None for a single file."""
        folder = SCRIPTS / self.name
        return folder if folder.is_dir() else None

    @cached_property
    def words(self) -> dict[str, str]:
        found = re.findall(r"^# parity: (\w+)=?(\w*)$", self.entry.read_text(), re.MULTILINE)
        return dict(found)


class Outcome(NamedTuple):
    """What a run shows to its user."""

    stdout: str
    status: int
    error: str
    """Type of the exception that ended it, else empty."""
    stderr: str
    timed_out: bool


def scripts() -> list[Script]:
    found = [Script(f"{p.parent.name}/{p.stem}", p) for p in SCRIPTS.glob("*/*.py")]
    for folder in SCRIPTS.glob("*/*/"):
        entry = next((folder / e for e in _ENTRIES if (folder / e).exists()), None)
        if entry is not None:
            found.append(Script(f"{folder.parent.name}/{folder.name}", entry))
    return sorted(found, key=lambda script: script.name)


class Runs:
    """One server's runs of many scripts; results can be asked for while it works."""

    def __init__(
        self, mode: str, work: Path, wanted: Iterable[tuple[Script, bool]], socket: str | None
    ) -> None:
        self.work = work
        self._services = tempfile.mkdtemp(prefix="dlj-")  # a Unix socket's path has to be short
        self._results: dict[str, dict[str, Any]] = {}
        self._changed = threading.Condition()
        self._over = False
        jobs = [self._job(script, pickled, socket) for script, pickled in wanted]
        lib = str(HOME / "lib")
        inherited = [p for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p]
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("parity_server.py")), mode],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": os.pathsep.join([lib, *inherited])},
            text=True,
        )
        self._process.stdin.write(json.dumps({"jobs": jobs, "width": WIDTH}))
        self._process.stdin.close()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        self._reader.join()
        self._process.stdout.close()
        shutil.rmtree(self._services, ignore_errors=True)

    def outcome(self, name: str, *, pickled: bool = False) -> Outcome:
        """Waits until that script has ended."""
        key = _key(name, pickled)
        with self._changed:
            self._changed.wait_for(lambda: key in self._results or self._over, timeout=280)
            assert key in self._results, f"the server of the scripts ended or hangs, {key} has no result"
            result = self._results[key]
        out, err = ((self.work / key / name).read_text(errors="replace") for name in ("stdout", "stderr"))
        error = _error(err) if result["status"] else ""
        return Outcome(out, result["status"], error, err, result["timed_out"])

    def _job(self, script: Script, pickled: bool, socket: str | None) -> dict[str, Any]:
        key = _key(script.name, pickled)
        base = self.work / key
        folder = base / "there"
        base.mkdir(parents=True)
        if script.folder:
            shutil.copytree(script.folder, folder, ignore=shutil.ignore_patterns("__pycache__"))
            entry = folder / script.entry.relative_to(script.folder)
        else:
            folder.mkdir()
            entry = Path(shutil.copy(script.entry, folder))
        as_module = entry.name == "__main__.py"
        from_stdin = "stdin" in script.words
        path = [str(folder if as_module or from_stdin else entry.parent)]
        if (folder / "src").exists():
            path.append(str(folder / "src"))
        alone = socket is None or "alone" in script.words
        return {
            "name": key,
            "argv": ["-" if from_stdin else str(entry), "--lr", "0.5"],
            "module": entry.parent.name if as_module else "",
            "folder": str(folder),
            "path": path,
            "stdin": str(entry) if from_stdin else os.devnull,
            "stdout": str(base / "stdout"),
            "stderr": str(base / "stderr"),
            "env": {"DATALOADERJOB_DIR": self._services} if alone else {"DATALOADERJOB_SOCKET": str(socket)},
            "unset": ["DATALOADERJOB_SOCKET"] if alone else [],
            "allow_pickle": pickled,
            "timeout_s": TIMEOUT_S,
        }

    def _read(self) -> None:
        for line in self._process.stdout:
            result = json.loads(line)
            with self._changed:
                self._results[result["name"]] = result
                self._changed.notify_all()
        with self._changed:
            self._over = True
            self._changed.notify_all()


def _key(name: str, pickled: bool) -> str:
    return f"{name}+pickle" if pickled else name


def _error(stderr: str) -> str:
    """Type named by the last line of the last traceback that is not indented."""
    _, _, traceback = stderr.rpartition("Traceback (most recent call last):\n")
    for line in traceback.splitlines():
        if line and not line[0].isspace() and (found := _ERROR.match(line)):
            return found[1].rpartition(".")[2]
    return ""
