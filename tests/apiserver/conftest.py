"""One API server for all of these tests: it is up in two seconds, and each test has its own names."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml
from processes_of_operator import Operator

from apiserver import ApiServer, api_server
from dataloaderjob.api import API_VERSION, PLURAL

CRD = Path(__file__).resolve().parents[2] / "crds" / "dataloaderjobs.yaml"


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    with api_server(tmp_path_factory.mktemp("apiserver")) as running:
        running.define(yaml.safe_load(CRD.read_text()))
        yield running


@contextmanager
def jobs_removed(server: ApiServer) -> Iterator[None]:
    """Deletes the jobs that were made meanwhile. Later operators would look after them, too, and refused jobs are tried
    again and again: a file's tests took 400 s in place of 40 after those of others."""
    known = {job["metadata"]["uid"] for job in jobs(server)}
    yield
    for job in jobs(server):
        if (about := job["metadata"])["uid"] not in known:
            path = f"/apis/{API_VERSION}/namespaces/{about['namespace']}/{PLURAL}/{about['name']}"
            server.request("DELETE", path)


def jobs(server: ApiServer) -> list[dict[str, Any]]:
    return list(server.request("GET", f"/apis/{API_VERSION}/{PLURAL}")["items"])


@pytest.fixture(scope="module", autouse=True)
def no_jobs_of_another_file(server: ApiServer) -> Iterator[None]:
    with jobs_removed(server):
        yield


@pytest.fixture
def operator(server: ApiServer, tmp_path: Path) -> Iterator[Operator]:
    """A process of the operator."""
    made = Operator(server, tmp_path)
    made.start()
    with jobs_removed(server):
        yield made
        if made.process is not None and made.process.poll() is None:
            made.end(kill=True)
