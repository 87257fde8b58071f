"""The reference of the manifest, of which docs/reference/manifest.md is made."""

from __future__ import annotations

from manifest_reference import EXAMPLE, reference

from dataloaderjob.api import load_manifest
from dataloaderjob.api.status import ConditionType, Phase


def test_example_of_the_reference_is_a_valid_manifest() -> None:
    assert load_manifest(EXAMPLE).spec.feeders.replicas == 2


def test_every_field_has_a_meaning() -> None:
    assert not [line for line in reference().splitlines() if line.endswith("|  |")]


def test_every_phase_and_condition_of_the_status_is_explained() -> None:
    rows = reference().partition("\n## status\n")[2]
    assert [value for value in (*Phase, *ConditionType) if f"\n| `{value}` | " not in rows] == []
