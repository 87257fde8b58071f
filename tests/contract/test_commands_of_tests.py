"""CONTRIBUTING's table of the commands that run tests, beside the Makefile and what those print first."""

from __future__ import annotations

import re

import pytest
from documents import ROOT

MAKEFILE = (ROOT / "Makefile").read_text()
ROW = re.compile(r"^\| `(?:make ([\w-]+)[^`]*|\.ci/run)` \|.*\| (\d+) \|$", re.MULTILINE)
MINUTES = {
    target: int(minutes) for target, minutes in ROW.findall((ROOT / "CONTRIBUTING.md").read_text()) if target
}


def recipe(target: str) -> str:
    found = re.search(rf"^{target}:[^\n]*\n((?:\t[^\n]*\n)+)", MAKEFILE, re.MULTILINE)
    assert found, f"make {target} is in CONTRIBUTING, and not in the Makefile"
    return found[1]


def test_the_table_has_the_commands_that_people_run():
    assert {"test", "test-ci", "test-all", "test-nightly", "e2e", "e2e-nightly", "test-gpu"} <= set(MINUTES)


@pytest.mark.parametrize("target", sorted(MINUTES))
def test_a_command_of_the_table_runs_pytest(target: str):
    assert re.search(r"\$\((?:CLUSTER_)?PYTEST\)|python -m pytest", recipe(target))


@pytest.mark.parametrize("target", ["test", "test-ci", "test-all", "test-nightly"])
def test_first_line_states_the_target_and_its_minutes(target: str):
    first = recipe(target).splitlines()[0]
    assert f"about {MINUTES[target]} minutes on two cores" in first
    assert f"make {target}: " in first


def test_tests_of_a_command_are_selected_by_four_marks_alone():
    assert '-m "not slow and not system and not thorough"' in recipe("test")
    assert '-m "not slow"' in recipe("test-ci")
    assert '-m "not nightly"' in recipe("test-all")
    assert '-m "nightly or hypothesis"' in recipe("test-nightly")


def test_each_test_on_a_cluster_is_run_by_one_of_two_commands():
    assert '-m "not nightly"' in recipe("e2e")
    assert "-m nightly" in recipe("e2e-nightly")
