"""The operator's process with its watches, on a real API server."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from manifests import manifest
from operated import Operated
from processes_of_operator import ALL, Operator, until

from apiserver import ApiServer, Refused
from dataloaderjob.api import KIND


@pytest.fixture
def operator(server: ApiServer, tmp_path: Path) -> Iterator[Operator]:
    made = Operator(server, tmp_path)
    made.start()
    yield made
    if made.process is not None and made.process.poll() is None:
        made.end(kill=True)


def phase(job: Operated) -> str | None:
    return job.get(KIND, job.name).get("status", {}).get("phase")


def test_a_job_gets_its_children_a_phase_and_back_what_is_deleted(
    server: ApiServer, operator: Operator
) -> None:
    first = Operated(server, manifest())
    until(lambda: phase(first) == "Starting", 30, f"a phase; it said {operator.log}")
    until(lambda: len(first.children()) == ALL, 10, "children")
    second = Operated(server, manifest())
    until(lambda: phase(second), 5, "a phase of a second job, while it runs")
    uid = first.get("Service", "mnist-head")["metadata"]["uid"]
    first.delete("Service", "mnist-head")

    def back() -> bool:
        try:
            return bool(first.get("Service", "mnist-head")["metadata"]["uid"] != uid)
        except Refused:
            return False

    until(back, 10, "the Service again")
    first.edit(feeders={"replicas": 5})
    until(lambda: first.get("Deployment", "mnist-feeders")["spec"]["replicas"] == 5, 10, "five feeders")
    assert first.get(KIND, "mnist")["status"]["feeders"]["summary"] == "0/5"
    assert operator.end() == 0
    assert "Traceback" not in operator.log


def test_what_happened_while_it_was_away_is_caught_up(server: ApiServer, operator: Operator) -> None:
    job = Operated(server, manifest())
    until(lambda: len(job.children()) == ALL, 30, f"children; it said {operator.log}")
    operator.end(kill=True)
    job.edit(feeders={"replicas": 2})
    job.delete("ConfigMap", "mnist-settings")
    job.delete("Secret", "mnist-key")
    operator.start()
    until(lambda: len(job.children()) == ALL, 30, f"children again; it said {operator.log}")
    until(lambda: job.get("Deployment", "mnist-feeders")["spec"]["replicas"] == 2, 10, "two feeders")


def test_a_deleted_job_is_left_to_the_garbage_collector_with_nothing_in_its_way(
    server: ApiServer, operator: Operator
) -> None:
    job = Operated(server, manifest())
    until(lambda: len(job.children()) == ALL, 30, f"children; it said {operator.log}")
    assert not job.get(KIND, "mnist")["metadata"].get("finalizers")
    assert "annotations" not in job.get(KIND, "mnist")["metadata"], "nothing is kept in the user's object"
    operator.end(kill=True)
    job.delete(KIND, "mnist")
    with pytest.raises(Refused):
        job.get(KIND, "mnist")


def test_without_a_root_key_it_says_so_and_ends(tmp_path: Path) -> None:
    for content, why in ((None, "No such file"), (b"short", "32 bytes at least, found 5")):
        if content is not None:
            (tmp_path / "root").write_bytes(content)
        command = [
            sys.executable,
            "-m",
            "dataloaderjob_operator",
            "--root-key",
            str(tmp_path / "root"),
            "--sidecar-image",
            "i",
        ]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert done.returncode == 2
        assert why in done.stderr
