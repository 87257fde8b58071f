"""The check of commit subjects that `make check` runs."""

from __future__ import annotations

import pytest
from commit_subjects import MOST, fault


@pytest.mark.parametrize(
    "subject",
    [
        "Add a page on sizing",
        "Fix `next()` after a fork",
        "Pass keys on",
        "Bring feeders back",
        "Seed slots",
        "Address a review",
    ],
)
def test_a_subject_in_the_imperative_is_accepted(subject: str) -> None:
    assert fault(subject) is None


@pytest.mark.parametrize(
    ("subject", "why"),
    [
        ("A page on sizing", "imperative"),
        ("The feeder resumes", "imperative"),
        ("Added a page", "imperative"),
        ("Adding a page", "imperative"),
        ("Adds a page", "imperative"),
        ("What a feeder needs", "imperative"),
        ("wip: slots", "capital"),
        ("WIP slots", "imperative"),
        ("Add a page.", "full stop"),
        ("Add " + "x" * MOST, "characters"),
    ],
)
def test_any_other_subject_is_rejected_with_the_rule(subject: str, why: str) -> None:
    assert why in str(fault(subject))
