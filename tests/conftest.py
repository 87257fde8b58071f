"""What holds for all tests.

Ctrl-C interrupts, as in a terminal: a shell's background job ignores it, and Python then leaves it so. An example of
hypothesis may take as long as the machine wants: speed is what benchmarks measure.
"""

from __future__ import annotations

import os
import signal

import pytest
from hypothesis import settings

from dataloaderjob.core.places import SOCKET_VARIABLE

signal.signal(signal.SIGINT, signal.default_int_handler)
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")


@pytest.fixture(scope="module", autouse=True)
def no_other_files_service() -> None:
    """A file's loaders use the service that the file starts, or private ones."""
    found = os.environ.get(SOCKET_VARIABLE)
    assert not found, (
        f"{SOCKET_VARIABLE} should not be set when a file of tests begins, found {found}: unset it, or have the file "
        "before this one end its service"
    )
