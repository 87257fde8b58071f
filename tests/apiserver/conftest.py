"""One API server for all of these tests: it is up in two seconds, and each test has its own names."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from processes_of_operator import Operator

from apiserver import ApiServer, api_server

CRD = Path(__file__).resolve().parents[2] / "crds" / "dataloaderjobs.yaml"


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    with api_server(tmp_path_factory.mktemp("apiserver")) as running:
        running.define(yaml.safe_load(CRD.read_text()))
        yield running


@pytest.fixture
def operator(server: ApiServer, tmp_path: Path) -> Iterator[Operator]:
    """A process of the operator."""
    made = Operator(server, tmp_path)
    made.start()
    yield made
    if made.process is not None and made.process.poll() is None:
        made.end(kill=True)
