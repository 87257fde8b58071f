"""The same ordinary script under torch's DataLoader and ours: equal output, equal exit, equal type of exception.

PARITY_OF=torch runs torch's loader in the place of ours: whatever differs then is a script that is not deterministic.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from dataclasses import dataclass
from difflib import unified_diff

import pytest
from parity_runs import Outcome, Runs, Script, scripts
from rig import Rig

OTHER = os.environ.get("PARITY_OF", "ours")


@dataclass(frozen=True, slots=True)
class Refused:
    """Torch's loader takes it; ours ends with an error whose text names the cause."""

    error: str
    words: str


@dataclass(frozen=True, slots=True)
class Differs:
    """A difference that README states under Limits."""

    why: str
    prints: str
    """In what ours prints."""
    warns: str = ""
    """In what ours says on standard error."""


DEVIATIONS: dict[str, Refused | Differs] = {}

NEEDS_PICKLE: set[str] = set()
"""Refused by name, with a word on allow_pickle; equal with allow_pickle=True."""

SCRIPTS = scripts()


@pytest.fixture(scope="session")
def wanted(request: pytest.FixtureRequest) -> list[Script]:
    """What this session's tests need, so that `-k` starts nothing else."""
    parameters = [getattr(item, "callspec", None) for item in request.session.items]
    chosen = {p.params["script"].name for p in parameters if p and "script" in p.params}
    return [s for s in SCRIPTS if s.name in chosen and _can_run(s)]


@pytest.fixture(scope="session")
def torchs(wanted: list[Script], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    runs = Runs("torch", tmp_path_factory.mktemp("torch"), [(s, False) for s in wanted], None)
    yield runs
    runs.close()


@pytest.fixture(scope="session")
def ours(wanted: list[Script], torchs: Runs, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    with Rig(feeders=2) as rig:
        pickled = [(s, True) for s in wanted if s.name in NEEDS_PICKLE and OTHER == "ours"]
        runs = Runs(OTHER, tmp_path_factory.mktemp(OTHER), [(s, False) for s in wanted] + pickled, rig.socket)
        yield runs
        runs.close()


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.name)
def test_a_script_gives_what_torchs_loader_gives(script: Script, torchs: Runs, ours: Runs) -> None:
    if not _can_run(script):
        pytest.skip(f"{script.words['needs']} is not installed here")
    expected, found = torchs.outcome(script.name), ours.outcome(script.name)
    assert not expected.timed_out, "under torch's loader the script takes too long"
    assert expected.error == script.words.get("raises", ""), f"torch: {expected.stderr[-2000:]}"
    assert expected.stdout, "a script that prints nothing proves nothing"
    deviation = DEVIATIONS.get(script.name) if OTHER == "ours" else None
    if script.name in NEEDS_PICKLE and OTHER == "ours":
        assert found.error == "UnsupportedBatch", difference(expected, found)
        assert "allow_pickle" in found.stderr
        found = ours.outcome(script.name, pickled=True)
    if deviation is None:
        assert same(expected, found), difference(expected, found)
        return
    assert not same(expected, found), "equal by now: take it out of the table"
    if isinstance(deviation, Refused):
        assert found.error == deviation.error, difference(expected, found)
        assert deviation.words in found.stderr
    else:
        assert deviation.prints in found.stdout, difference(expected, found)
        assert deviation.warns in found.stderr


def test_the_tables_name_scripts_that_exist() -> None:
    assert {*DEVIATIONS, *NEEDS_PICKLE} <= {s.name for s in SCRIPTS}


def test_there_are_at_least_150_scripts() -> None:
    assert len(SCRIPTS) >= 150


def same(expected: Outcome, found: Outcome) -> bool:
    return (expected.stdout, expected.status, expected.error) == (found.stdout, found.status, found.error)


def difference(expected: Outcome, found: Outcome) -> str:
    if found.timed_out:
        return f"it was not over in time\n{found.stderr[-2000:]}"
    lines = unified_diff(expected.stdout.splitlines(), found.stdout.splitlines(), "torch", "ours", lineterm="", n=1)
    ends = f"torch: exit {expected.status} {expected.error}; ours: exit {found.status} {found.error}"
    return "\n".join([ends, *lines, "standard error of ours:", found.stderr[-2000:]])


def _can_run(script: Script) -> bool:
    needs = script.words.get("needs")
    return needs is None or importlib.util.find_spec(needs) is not None
