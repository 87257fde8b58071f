"""The same ordinary script under torch's DataLoader and ours: equal output, equal exit, equal type of exception.

PARITY_OF=torch runs torch's loader in the place of ours: whatever differs then is a script that is not deterministic.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from difflib import unified_diff

import pytest
from parity_record import RECORD, Torchs, digest, recorded, versions
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
    """A difference that docs/guide/limits.md states."""

    why: str
    prints: str
    """In what ours prints."""
    warns: str = ""
    """In what ours says on standard error."""


LIBRARY = "what the script put into the standard library does not travel; worker_init_fn puts it there"
BETTER = "torch makes another error of it; ours keeps the user's own"

DEVIATIONS: dict[str, Refused | Differs] = {
    # What cannot be copied to another process, and exists once.
    "config/context_variable_set_at_the_top": Refused("InputError", "ContextVar"),
    "config/module_made_at_run_time": Refused("ModuleNotFoundError", "run_settings"),
    "files/file_opened_in_init": Refused("InputError", "BufferedReader"),
    "files/generator_in_the_dataset": Refused("InputError", "generator"),
    "files/h5py_opened_in_init": Refused("InputError", "h5py"),
    "files/lock_in_the_dataset": Refused("InputError", "lock"),
    "files/sqlite_opened_in_init": Refused("InputError", "sqlite3.Connection"),
    "files/text_file_opened_in_init": Refused("InputError", "TextIOWrapper"),
    "python/graph_of_hashed_nodes": Refused("InputError", "__hash__"),
    "python/linked_list": Refused("InputError", "linked too deeply"),
    "python/weak_references": Refused("InputError", "weakref"),
    "shared/dictionary_of_a_manager": Refused("InputError", "dataset.cache"),
    "shared/queue_in_the_dataset": Refused("InputError", "SimpleQueue"),
    "shared/semaphore_in_the_dataset": Refused("InputError", "Semaphore"),
    "shared/value_of_multiprocessing": Refused("InputError", "dataset.calls"),
    "shared/tensor_as_cache": Differs("a feeder has a copy", "bool (6,) [False", "shared memory"),
    "shared/tensor_as_epoch": Differs(
        "a feeder has a copy", "[int64 (2,) [0, 1]] [int64 (2,) [2, 3]]\n" * 3, "shared memory"
    ),
    "shared/array_as_cache": Differs("a feeder has a copy", "[0.0, 0.0", "an array in shared memory"),
    # Left out, num_workers means the service, so that the dataset of the script is not the one that is asked.
    "epochs/dataset_counts_with_workers_left_out": Differs("num_workers left out is the service", "0\n"),
    # Settings of libraries.
    "patches/function_of_a_library": Differs(LIBRARY, "dict{'label'"),
    "python/hashes_of_strings": Differs("a process hashes strings in its own way", "False"),
    "python/logger_in_the_dataset": Differs("handlers of the script's loggers do not travel", "[0, 0]"),
    "python/logging_to_a_file": Differs("handlers of the script's loggers do not travel", "list[]"),
    "python/order_of_a_set": Differs("a process hashes strings in its own way", "False"),
    # What arrives is torch's by value, not in its place in memory.
    "batches/views_and_strides": Differs("views arrive compact", "[float32 (2, 4) [[4.0"),
    "errors/group": Differs(BETTER, "UserCodeError"),
    "errors/own_exception_with_attributes": Differs(BETTER, "BadRow 2"),
    "errors/unicode_error": Differs(BETTER, "UnicodeDecodeError"),
    "errors/stop_iteration_in_a_sample": Refused("RuntimeError", "raised StopIteration"),
    "errors/stop_iteration_without_workers": Refused("RuntimeError", "raised StopIteration"),
    "python/processes_in_a_sample": Differs("a sample may start processes here", "tensor([1])"),
}

NEEDS_PICKLE = {"batches/uuids_and_other_values"}
"""Refused by name, with a word on allow_pickle; equal with allow_pickle=True."""

SCRIPTS = scripts()


@pytest.fixture(scope="module")
def wanted(request: pytest.FixtureRequest) -> list[Script]:
    """What this session's tests need, so that `-k` starts nothing else."""
    parameters = [item.callspec.params for item in request.session.items if hasattr(item, "callspec")]
    chosen = [p["script"] for p in parameters if isinstance(p.get("script"), Script)]
    return [s for s in SCRIPTS if s in chosen and _can_run(s)]


@pytest.fixture(scope="module")
def torchs(wanted: list[Script], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Torchs]:
    known = recorded(wanted)
    others = [(s, False) for s in wanted if s.name not in known]
    runs = Runs("torch", tmp_path_factory.mktemp("torch"), others, None)
    yield Torchs(known, runs)
    runs.close()


@pytest.fixture(scope="module")
def live(wanted: list[Script], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    """Torch's loader, whatever was recorded."""
    runs = Runs("torch", tmp_path_factory.mktemp("live"), [(s, False) for s in wanted], None)
    yield runs
    runs.close()


@pytest.fixture(scope="module")
def ours(wanted: list[Script], torchs: Torchs, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    with contextlib.chdir(tmp_path_factory.mktemp("feeders")), Rig(feeders=2) as rig:
        twice = NEEDS_PICKLE if OTHER == "ours" else set()
        jobs = [(s, pickled) for s in wanted for pickled in ((False, True) if s.name in twice else (False,))]
        runs = Runs(OTHER, tmp_path_factory.mktemp(OTHER), jobs, rig.socket)
        yield runs
        runs.close()


THIRDS = ([], [pytest.mark.slow], [pytest.mark.nightly])
"""CI runs a third of the scripts, `make test-all` two thirds, and `make test-nightly` the last third."""


@pytest.mark.parametrize(
    "script", [pytest.param(s, marks=THIRDS[n % 3], id=s.name) for n, s in enumerate(SCRIPTS)]
)
def test_script_gives_the_same_as_under_torchs_loader(script: Script, torchs: Torchs, ours: Runs) -> None:
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


def test_torchs_recorded_outcomes_cover_these_scripts() -> None:
    rows = json.loads(RECORD.read_text())["scripts"]
    assert {name: row["digest"] for name, row in rows.items()} == {s.name: digest(s) for s in SCRIPTS}, (
        "scripts were changed: make record-parity"
    )


@pytest.mark.nightly
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.name)
def test_script_under_torchs_loader_matches_its_recording(script: Script, live: Runs) -> None:
    if not _can_run(script):
        pytest.skip(f"{script.words['needs']} is not installed here")
    known = recorded([script])
    assert known, f"recorded with other versions than {versions()}: make record-parity"
    expected, found = known[script.name], live.outcome(script.name)
    assert same(expected, found), difference(expected, found)


def test_tables_name_existing_scripts() -> None:
    assert {*DEVIATIONS, *NEEDS_PICKLE} <= {s.name for s in SCRIPTS}


def test_at_least_150_scripts_exist() -> None:
    assert len(SCRIPTS) >= 150


def same(expected: Outcome, found: Outcome) -> bool:
    return (expected.stdout, expected.status, expected.error) == (found.stdout, found.status, found.error)


def difference(expected: Outcome, found: Outcome) -> str:
    if found.timed_out:
        return f"it was not over in time\n{found.stderr[-2000:]}"
    lines = unified_diff(
        expected.stdout.splitlines(), found.stdout.splitlines(), "torch", "ours", lineterm="", n=1
    )
    ends = f"torch: exit {expected.status} {expected.error}; ours: exit {found.status} {found.error}"
    return "\n".join([ends, *lines, "standard error of ours:", found.stderr[-2000:]])


def _can_run(script: Script) -> bool:
    needs = script.words.get("needs")
    return needs is None or importlib.util.find_spec(needs) is not None
