"""The data of one run, as `keeper` wrote it, and the functions that find and read the data."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dataloaderjob.core.errors import InputError
from dataloaderjob.core.timings import Times, unpacked
from dataloaderjob.local.reporting.series import REPORT, SERIES_FILE, TIMES_FILE, Series, parse
from dataloaderjob.local.status import LiveRun, find_run, live_runs

ENDED = "A report on a run that has ended requires its --record FOLDER: pass that folder"


@dataclass(frozen=True, slots=True)
class RunData:
    """All data about a run."""

    about: Mapping[str, Any]
    series: Series
    times: Times
    is_live: bool = False
    earlier: int = 0
    """Number of earlier runs with the same record."""

    @property
    def name(self) -> str:
        return str(self.about.get("name", ""))

    @property
    def started(self) -> float:
        """Unix time at which the run started."""
        return float(self.about["started"])

    @property
    def cpus(self) -> int:
        """Number of CPUs of the machine; 0 if unknown, as on a cluster."""
        return int(self.about.get("cpus") or (0 if self.is_watched else 1))

    @property
    def is_watched(self) -> bool:
        """True for a job on a cluster. The data covers only the time for which a command watched the job."""
        return bool(self.about.get("watched"))


def find(which: str | None) -> RunData:
    """Reads the data of a run. `which`: a folder, or the name of a live run; None for the only live run. Raises
    InputError."""
    if which is not None and Path(which).is_dir():
        return _of_folder(Path(which))
    live = [run for run in live_runs() if which in (None, run.name, run.job)]
    if not live:
        what = (
            "you have no live run"
            if which is None
            else f"{which!r} is neither a folder nor the name of a live run"
        )
        raise InputError(f"{what}. {ENDED}")
    return _of_live(live[0] if len(live) == 1 else find_run(None))


def _of_folder(folder: Path) -> RunData:
    if (newest := _newest(folder)) is not None:
        return read(newest[0], earlier=newest[1])
    if live := live_runs(str(folder)):
        return _of_live(live[0])
    raise InputError(f"{folder} contains nothing to report. {ENDED}")


def _of_live(run: LiveRun) -> RunData:
    folder = run.about.get("report")
    if not folder:
        raise InputError(
            f"{run.name} keeps no data for a report: its folder is not writable, or the run is from an "
            "older version"
        )
    return read(Path(str(folder)), is_live=True)


def _newest(folder: Path) -> tuple[Path, int] | None:
    """Returns the folder of the newest run in `folder`, and the number of earlier runs."""
    if (folder / SERIES_FILE).is_file():
        return folder, 0
    if (folder / REPORT / SERIES_FILE).is_file():
        return folder / REPORT, 0
    found = [path.parent for path in (folder / REPORT).glob(f"*/{SERIES_FILE}")]
    found.sort(key=lambda path: int(path.name.partition("-")[0]) if path.name[:1].isdecimal() else 0)
    return (found[-1], len(found) - 1) if found else None


def read(folder: Path, *, is_live: bool = False, earlier: int = 0) -> RunData:
    """Reads the files of one run. Raises InputError for files that were not written by a keeper."""
    path = folder / SERIES_FILE
    try:
        about, series = parse(path.read_text(errors="replace").splitlines(), str(path))
    except OSError as exc:
        raise InputError(f"{path} cannot be read: {exc}") from exc
    return RunData(about, series, _times(folder / TIMES_FILE), is_live, earlier)


def _times(path: Path) -> Times:
    try:
        return unpacked(json.loads(path.read_text()))
    except FileNotFoundError:
        return Times()
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as exc:
        raise InputError(f"{path} contains no times of batches: {exc}") from exc
