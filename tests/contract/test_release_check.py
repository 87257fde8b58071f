"""The checks of `make release-check` that need no build."""

from __future__ import annotations

import pytest
import release_check
from release_check import VERSION, Fault


def test_a_dated_section_of_the_version_is_accepted() -> None:
    release_check.changelog(f"# Changelog\n\n## {VERSION} (2027-01-31)\n\n- x\n\n## 0.0.1 (2026-01-01)\n")


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (f"## {VERSION} (not released yet)\n", "the day of the release"),
        (f"## 9.9.9 (2027-01-31)\n\n## {VERSION} (2027-01-30)\n", "found 9.9.9"),
        ("# Changelog\n", "found none"),
    ],
)
def test_wrong_first_section_refuses_the_release(text: str, why: str) -> None:
    with pytest.raises(Fault, match=why):
        release_check.changelog(text)


def test_this_version_has_settings_for_later_releases_to_read() -> None:
    release_check.settings()


def test_a_command_that_fails_is_quoted() -> None:
    with pytest.raises(Fault, match="git no-such-command failed"):
        release_check.run("git", "no-such-command")


@pytest.mark.parametrize(
    "section",
    [
        "- Audit of 2027-01-31 by pip-audit: 0 findings\n",
        "- Audit of 2027-01-31 by pip-audit: 2 findings:\n  - x\n",
    ],
)
def test_a_section_with_the_audits_result_is_accepted(section: str) -> None:
    release_check.audited(f"# Changelog\n\n## {VERSION} (2027-01-31)\n\n- x\n{section}")


EARLIER = "## 0.0.1 (2026-01-01)\n\n- Audit of 2026-01-01 by pip-audit: 0 findings\n"


@pytest.mark.parametrize("text", ["# Changelog\n", f"## {VERSION} (2027-01-31)\n\n- x\n\n{EARLIER}"])
def test_a_section_without_the_audits_result_refuses_the_release(text: str) -> None:
    with pytest.raises(Fault, match="make audit"):
        release_check.audited(text)


def test_a_base_image_needs_its_digest() -> None:
    release_check.base_image("python:3.11-slim-bookworm@sha256:" + "a" * 64)
    for name in ("", "python:3.11-slim-bookworm", "python@sha256:abc"):
        with pytest.raises(Fault, match="by its digest"):
            release_check.base_image(name)
