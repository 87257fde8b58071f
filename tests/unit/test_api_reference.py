"""docs/manifest.md is what the models say."""

from __future__ import annotations

from pathlib import Path

from dataloaderjob.api import load_manifest
from dataloaderjob.api.reference import EXAMPLE, reference

DOCS = Path(__file__).parents[2] / "docs" / "manifest.md"


def test_the_reference_in_docs_is_current() -> None:
    assert DOCS.read_text(encoding="utf-8") == reference(), (
        "docs/manifest.md differs from the models: run "
        "`python -m dataloaderjob.api.reference > docs/manifest.md`"
    )


def test_the_example_of_the_reference_is_a_good_manifest() -> None:
    assert load_manifest(EXAMPLE).spec.feeders.replicas == 2


def test_every_field_of_the_spec_has_a_meaning() -> None:
    assert not [line for line in reference().splitlines() if line.endswith("|  |")]
