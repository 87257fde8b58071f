"""Rules for all tests.

Ctrl-C interrupts, as in a terminal: a shell's background job ignores it, and Python then leaves it so. An example of
hypothesis may take as long as the machine wants: speed is what benchmarks measure. Its examples are the same in each
run, so that a run's result follows from the code; `make test-all` draws new ones (`--hypothesis-profile new`), and
`make test-nightly` draws three times as many (`full`).
"""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import covering
import pytest
from hypothesis import settings

from dataloaderjob.core.places import SOCKET_VARIABLE

pytest_plugins = ["durations", "stuck"]
signal.signal(signal.SIGINT, signal.default_int_handler)
settings.register_profile("ci", deadline=None, derandomize=True)
settings.register_profile("new", deadline=None)
settings.register_profile("full", deadline=None, max_examples=300)
settings.load_profile("ci")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """All tests of the operator's API server and of the chart need programs: etcd, kube-apiserver, helm."""
    for item in items:
        if item.path.parent.name in ("apiserver", "chart"):
            item.add_marker(pytest.mark.system)
    covering.mark_the_others(items)
    for item in items:
        if item.get_closest_marker("nightly"):
            item.add_marker(pytest.mark.slow)


MODULES = pytest.StashKey[dict[Path, dict[str, ModuleType]]]()
"""Modules of files of tests, in sys.modules only while that file's tests run. A global would travel to feeders."""


def pytest_collection_finish(session: pytest.Session) -> None:
    """A file's tests find in sys.modules what they find where they run alone.

    A loader ships all modules of the user: with those of 220 other files, each iter() takes 0.3 CPU seconds in place of
    0.04. What was collected is no garbage: collections pass it by, and forks share it.
    """
    modules = session.stash[MODULES] = {item.path: {} for item in session.items}
    for name, module in list(sys.modules.items()):
        path = Path(getattr(module, "__file__", None) or "")
        if path in modules:
            modules[path][name] = sys.modules.pop(name)
    gc.collect()
    gc.freeze()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    own = item.session.stash[MODULES][item.path]
    sys.modules.update(own)
    try:
        return (yield)
    finally:
        for name in own:
            sys.modules.pop(name, None)


@pytest.fixture(autouse=True)
def nothing_said_yet() -> None:
    """A test hears what a process says once, though another test of its process has had it said."""
    if (service := sys.modules.get("dataloaderjob.trainer.session.service")) is not None:
        service._logged.clear()
    if (taking := sys.modules.get("dataloaderjob.trainer.session.taking")) is not None:
        taking._warned = False


@pytest.fixture(scope="module", autouse=True)
def no_other_files_service() -> None:
    """A file's loaders use the service that the file starts, or private ones."""
    found = os.environ.get(SOCKET_VARIABLE)
    assert not found, (
        f"{SOCKET_VARIABLE} should not be set when a file of tests begins, found {found}: unset it, or have the file "
        "before this one end its service"
    )
