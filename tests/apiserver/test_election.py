"""Several operators, of which one works: real processes on a real API server."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from manifests import manifest
from operated import MERGE, Operated
from processes_of_operator import ALL, Operator, until

from apiserver import ApiServer
from dataloaderjob.api import KIND
from dataloaderjob_operator.election import LOST

TAKEOVER_S = 15.0
LEASES = "/apis/coordination.k8s.io/v1/namespaces/{}/leases"
Make = Callable[[str], Operator]


@pytest.fixture
def job(server: ApiServer) -> Operated:
    return Operated(server, manifest())


@pytest.fixture
def make(server: ApiServer, job: Operated, tmp_path: Path) -> Iterator[Make]:
    """Starts an operator of that name in the job's namespace."""
    made: list[Operator] = []

    def start(name: str) -> Operator:
        (tmp_path / name).mkdir(exist_ok=True)
        operator = Operator(server, tmp_path / name)
        made.append(operator)
        operator.start(
            "--namespace", job.namespace, "--own-namespace", job.namespace, "--own-label", "a=b", "--lease", "lock",
            "--identity", name,
        )  # fmt: skip
        return operator

    yield start
    for operator in made:
        if operator.process is not None and operator.process.poll() is None:
            operator.process.send_signal(signal.SIGCONT)
            operator.end(kill=True)


def holder(job: Operated) -> str | None:
    found = job.server.request("GET", f"{LEASES.format(job.namespace)}/lock")
    return found["spec"].get("holderIdentity")


def first(job: Operated, make: Make) -> Operator:
    operator = make("first")
    until(lambda: len(job.children()) == ALL, 30, "children")
    assert holder(job) == "first"
    return operator


def standing_by(make: Make) -> Operator:
    operator = make("second")
    until(lambda: operator.ask("/readyz")[0] == 200, 30, "the second, ready to work")
    return operator


def seconds_until_it_works(job: Operated) -> float:
    """From now until somebody reconciles a change."""
    began = time.monotonic()
    job.edit(feeders={"replicas": 2})
    until(lambda: job.get("Deployment", "mnist-feeders")["spec"]["replicas"] == 2, 60, "two feeders")
    return time.monotonic() - began


def test_one_works_and_the_other_stands_by_and_writes_nothing(job: Operated, make: Make) -> None:
    leader = first(job, make)
    other = standing_by(make)
    seconds_until_it_works(job)
    for operator, works in ((leader, "1.0"), (other, "0.0")):
        text = operator.ask("/metrics")[1]
        assert f"dataloaderjob_operator_leader {works}" in text
        assert ("dataloaderjob_operator_api_writes_total{" in text) == (works == "1.0")
    assert other.ask("/healthz")[0] == 200
    assert "Traceback" not in leader.log + other.log


def test_after_the_working_one_was_killed_the_other_works_within_15_seconds(
    job: Operated, make: Make
) -> None:
    leader = first(job, make)
    standing_by(make)
    leader.end(kill=True)
    took = seconds_until_it_works(job)
    assert holder(job) == "second"
    assert took < TAKEOVER_S, took


def test_one_that_ends_by_a_signal_hands_over_at_once(job: Operated, make: Make) -> None:
    leader = first(job, make)
    standing_by(make)
    assert leader.end() == 0
    took = seconds_until_it_works(job)
    assert holder(job) == "second"
    assert took < 6, "without waiting for the Lease to run out"
    assert "Traceback" not in leader.log


def test_a_container_that_is_started_anew_goes_on_with_its_lease(job: Operated, make: Make) -> None:
    first(job, make).end(kill=True)
    make("first")
    assert seconds_until_it_works(job) < 8


def test_one_that_was_stopped_for_a_while_ends_when_it_finds_another_at_work(
    job: Operated, make: Make
) -> None:
    leader = first(job, make)
    standing_by(make)
    assert leader.process is not None
    os.kill(leader.process.pid, signal.SIGSTOP)
    until(lambda: holder(job) == "second", TAKEOVER_S, "the second to take the Lease")
    os.kill(leader.process.pid, signal.SIGCONT)
    assert leader.process.wait(15) == LOST
    assert "this operator ends" in leader.log
    assert job.get(KIND, job.name), "and nothing was lost"


def test_one_whose_lease_is_anothers_ends(job: Operated, make: Make) -> None:
    leader = first(job, make)
    path = f"{LEASES.format(job.namespace)}/lock"
    deadline = time.monotonic() + 30
    while leader.process is not None and leader.process.poll() is None:
        spec = {"holderIdentity": "somebody", "leaseDurationSeconds": 9}
        job.server.request("PATCH", path, {"spec": spec}, content_type=MERGE)
        assert time.monotonic() < deadline, "it goes on without its Lease"
        time.sleep(0.2)
    assert leader.process is not None
    assert leader.process.returncode == LOST
