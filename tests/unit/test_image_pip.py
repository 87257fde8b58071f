"""What the pip of the feeder image takes for a change of its environment."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

PATH = Path(__file__).parents[2] / "sidecar" / "pip.py"
SPEC = importlib.util.spec_from_file_location("image_pip", PATH)
assert SPEC
assert SPEC.loader
image_pip = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(image_pip)


@pytest.mark.parametrize(
    ("words", "changes"),
    [
        ("install pillow", True),
        ("install --no-cache-dir -r requirements.txt", True),
        ("uninstall -y pillow", True),
        ("install --target /tmp/here pillow", False),
        ("install --target=/tmp/here pillow", False),
        ("install --help", False),
        ("list", False),
        ("download pillow", False),
        ("", False),
    ],
)
def test_only_commands_that_change_the_environment_need_root(words: str, changes: bool) -> None:
    assert image_pip.is_for_environment(words.split()) is changes


def test_other_commands_are_left_to_pip() -> None:
    done = subprocess.run([sys.executable, PATH, "--version"], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("pip ")


def test_pip_wrapper_is_executable() -> None:
    assert PATH.stat().st_mode & 0o111 == 0o111
