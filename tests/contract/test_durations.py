"""tests/durations.json, by which files are run longest first, is in step with the tests that exist."""

from __future__ import annotations

import json
from pathlib import Path

from durations import Duration, files_of_tests, merged, recorded, table, write


def test_recorded_durations_cover_exactly_the_test_files():
    found, exist = set(recorded()), set(files_of_tests())
    assert not exist - found, (
        f"{sorted(exist - found)} have no recorded duration: python -m pytest FILE --record-durations adds it"
    )
    assert not found - exist, f"{sorted(found - exist)} are gone: take them out of tests/durations.json"


def test_duration_record_round_trips(tmp_path: Path):
    durations = {"tests/unit/test_b.py": Duration(1.5, 0.5), "tests/unit/test_a.py": Duration(20.0, 0.0)}
    write(durations, tmp_path / "d.json")
    assert recorded(tmp_path / "d.json") == durations
    assert list(json.loads((tmp_path / "d.json").read_text())) == sorted(durations)


def test_partial_run_updates_only_the_files_it_ran():
    before = {"a": Duration(1, 1), "b": Duration(2, 2), "gone": Duration(3, 3)}
    found = {"b": Duration(5, 5), "c": Duration(4, 4)}
    expected = {"a": Duration(1, 1), "b": Duration(5, 5), "c": Duration(4, 4)}
    assert merged(before, found, ["a", "b", "c"]) == expected


def test_table_lists_the_slowest_files_first():
    lines = table({"a": Duration(1, 9), "b": Duration(3, 1), "c": Duration(2, 2)}, 2)
    assert [line.split()[-1] for line in lines] == ["b", "c"]
