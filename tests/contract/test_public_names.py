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
def test_a_public_name_is_there(name):
    assert getattr(dataloaderjob, name)


def test_a_name_that_is_not_there_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'DataLoaderr'"):
        dataloaderjob.DataLoaderr


def test_an_error_is_had_without_torch():
    """The sidecar and an operator's scripts have none."""
    script = "import sys; sys.modules['torch'] = None; import dataloaderjob; dataloaderjob.FeederLost"
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)


def test_the_page_of_exceptions_has_all_classes():
    assert set(generate.errors()) == set(CLASSES)
