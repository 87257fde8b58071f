"""What `import dataloaderjob` offers, and docs/reference/exceptions.md, which says what each error means."""

from __future__ import annotations

import subprocess
import sys

import generate
import pytest

import dataloaderjob
from dataloaderjob.core import errors

CLASSES = [
    value for value in vars(errors).values() if isinstance(value, type) and issubclass(value, Exception)
]


@pytest.mark.parametrize("error", CLASSES)
def test_an_error_can_be_caught_by_a_name_of_the_package(error):
    assert getattr(dataloaderjob, error.__name__) is error


@pytest.mark.parametrize("name", dataloaderjob.__all__)
def test_public_name_exists(name):
    assert getattr(dataloaderjob, name)


def test_unknown_name_raises_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'DataLoaderr'"):
        dataloaderjob.DataLoaderr


def test_errors_can_be_imported_without_torch():
    """The sidecar and an operator's scripts have none."""
    script = "import sys; sys.modules['torch'] = None; import dataloaderjob; dataloaderjob.FeederLost"
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)


def test_loader_without_torch_names_the_package_to_install():
    script = "import sys; sys.modules['torch'] = None; from dataloaderjob import DataLoader"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == (
        "ModuleNotFoundError: dataloaderjob.DataLoader requires torch>=2.6, which is not installed: pip install torch"
    )


def test_page_of_exceptions_lists_all_classes():
    assert set(generate.errors()) == set(CLASSES)
