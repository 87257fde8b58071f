"""What each file of tests takes, in seconds of the clock and of the CPU; files run longest first.

A failed test is named at once, not at the end of the run alone.

Both are recorded in tests/durations.json by `make durations`. CPU is that of the test's process and of the children it
has waited for, so that what daemons of Ray use is missing.
"""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RECORD = ROOT / "tests" / "durations.json"
BEGAN = pytest.StashKey[float]()
CPU = "cpu_s"


@dataclass(frozen=True, slots=True)
class Duration:
    """Of one file."""

    wall_s: float
    cpu_s: float


def recorded(path: Path = RECORD) -> dict[str, Duration]:
    """By the file's path below the repository; nothing where nothing was recorded."""
    if not path.exists():
        return {}
    return {file: Duration(*both) for file, both in json.loads(path.read_text()).items()}


def merged(
    before: Mapping[str, Duration], found: Mapping[str, Duration], exists: Sequence[str]
) -> dict[str, Duration]:
    """`before` with what was `found`, without files that are gone."""
    return {file: d for file, d in {**before, **found}.items() if file in exists}


def write(durations: Mapping[str, Duration], path: Path = RECORD) -> None:
    rows = [f' "{file}": [{d.wall_s:.1f}, {d.cpu_s:.1f}]' for file, d in sorted(durations.items())]
    path.write_text("{\n" + ",\n".join(rows) + "\n}\n")


def files_of_tests() -> list[str]:
    """Those that several processes run, as paths below the repository."""
    return sorted(str(p.relative_to(ROOT)) for p in (ROOT / "tests").rglob("test_*.py"))


def table(durations: Mapping[str, Duration], most: int) -> list[str]:
    """The slowest files, a line each."""
    slowest = sorted(durations.items(), key=lambda item: -item[1].wall_s)[:most]
    return [f"{d.wall_s:7.1f} s {d.cpu_s:7.1f} CPU-s  {file}" for file, d in slowest]


class Recorder:
    """Sums up what the reports of tests say."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._wall: defaultdict[str, float] = defaultdict(float)
        self._cpu: defaultdict[str, float] = defaultdict(float)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        file = report.nodeid.partition("::")[0]
        self._wall[file] += report.duration
        if (
            report.failed
            and (terminal := self._config.pluginmanager.get_plugin("terminalreporter")) is not None
        ):
            terminal.ensure_newline()
            terminal.write_line(f"{report.outcome} in {report.when}: {report.nodeid}", red=True)
        if report.when == "teardown":
            self._cpu[file] += dict(report.user_properties).get(CPU, 0.0)  # type: ignore[call-overload]

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        found = {file: Duration(wall, self._cpu[file]) for file, wall in self._wall.items()}
        if most := self._config.getoption("slowest_files"):
            total = Duration(sum(self._wall.values()), sum(self._cpu.values()))
            terminalreporter.section(f"slowest {most} of {len(found)} files")
            for line in [*table(found, most), *table({f"all {len(found)} files": total}, 1)]:
                terminalreporter.write_line(line)
        if self._config.getoption("record_durations"):
            write(merged(recorded(), found, files_of_tests()))


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("durations")
    group.addoption("--slowest-files", type=int, default=0, help="print so many files with their durations")
    group.addoption("--record-durations", action="store_true", help=f"write {RECORD.relative_to(ROOT)}")


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Recorder(config), "durations-recorder")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Longest files first where several processes run them, so that none is left alone with a long one at the end."""
    if not hasattr(config, "workerinput"):
        return
    known = recorded()
    longest = max((d.wall_s for d in known.values()), default=0.0)
    new = Duration(longest, 0.0)
    items.sort(key=lambda item: -known.get(item.nodeid.partition("::")[0], new).wall_s)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item):
    item.stash[BEGAN] = _cpu_s()
    return (yield)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> None:
    if call.when == "teardown":
        item.user_properties.append((CPU, _cpu_s() - item.stash[BEGAN]))


def count_cpu(seconds: float) -> None:
    """Adds what a process used that is no child of this one, but ran for its tests."""
    global _of_others_s
    _of_others_s += seconds


_of_others_s = 0.0


def _cpu_s() -> float:
    return sum(os.times()[:4]) + _of_others_s
