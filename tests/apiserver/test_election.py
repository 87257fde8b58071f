"""Several operators, of which one works: real processes on a real API server."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from forwarder import Forwarder
from manifests import manifest
from operated import MERGE, Operated
from processes_of_operator import ALL, Operator, until

from apiserver import ApiServer
from dataloaderjob.api import KIND
from dataloaderjob_operator.election import LOST

TAKEOVER_S = 21.0
QUICK = ("--lease-seconds=5", "--lease-renew-seconds=3.5", "--lease-retry-seconds=1")
LEASES = "/apis/coordination.k8s.io/v1/namespaces/{}/leases"
Make = Callable[..., Operator]


@pytest.fixture
def job(server: ApiServer) -> Operated:
    return Operated(server, manifest())


@pytest.fixture
def make(server: ApiServer, job: Operated, tmp_path: Path) -> Iterator[Make]:
    """Starts an operator of that name in the job's namespace."""
    made: list[Operator] = []

    def start(name: str, *options: str, way: Forwarder | None = None) -> Operator:
        (tmp_path / name).mkdir(exist_ok=True)
        operator = Operator(server, tmp_path / name, way and f"https://127.0.0.1:{way.port}")
        made.append(operator)
        operator.start(
            "--namespace", job.namespace, "--own-namespace", job.namespace, "--own-label", "a=b", "--lease", "lock",
            "--identity", name, *options,
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


def first(job: Operated, make: Make, *options: str, way: Forwarder | None = None) -> Operator:
    operator = make("first", *options, way=way)
    until(lambda: len(job.children()) == ALL, 30, "children")
    assert holder(job) == "first"
    return operator


def standing_by(make: Make, *options: str) -> Operator:
    operator = make("second", *options)
    until(lambda: operator.ask("/readyz")[0] == 200, 30, "the second, ready to work")
    return operator


def seconds_until_it_works(job: Operated) -> float:
    """From now until somebody reconciles a change."""
    began = time.monotonic()
    job.edit(feeders={"replicas": 2})
    until(lambda: job.get("Deployment", "mnist-feeders")["spec"]["replicas"] == 2, 60, "two feeders")
    return time.monotonic() - began


def test_standby_writes_nothing_while_the_leader_works(job: Operated, make: Make) -> None:
    leader = first(job, make)
    other = standing_by(make)
    seconds_until_it_works(job)
    for operator, works in ((leader, "1.0"), (other, "0.0")):
        text = operator.ask("/metrics")[1]
        assert f"dataloaderjob_operator_leader {works}" in text
        assert ("dataloaderjob_operator_api_writes_total{" in text) == (works == "1.0")
    assert other.ask("/healthz")[0] == 200
    assert "Traceback" not in leader.log + other.log


def test_standby_takes_over_when_a_killed_leaders_lease_expires(job: Operated, make: Make) -> None:
    leader = first(job, make)
    standing_by(make)
    leader.end(kill=True)
    took = seconds_until_it_works(job)
    assert holder(job) == "second"
    assert took < TAKEOVER_S, took


def test_leader_stopped_by_a_signal_hands_over_at_once(job: Operated, make: Make) -> None:
    leader = first(job, make)
    standing_by(make)
    assert leader.end() == 0
    took = seconds_until_it_works(job)
    assert holder(job) == "second"
    assert took < 6, "without waiting for the Lease to run out"
    assert "Traceback" not in leader.log


def test_restarted_container_resumes_its_lease(job: Operated, make: Make) -> None:
    first(job, make).end(kill=True)
    make("first")
    assert seconds_until_it_works(job) < 8


def test_paused_leader_exits_when_it_finds_another_leader(job: Operated, make: Make) -> None:
    leader = first(job, make)
    standing_by(make)
    assert leader.process is not None
    os.kill(leader.process.pid, signal.SIGSTOP)
    until(lambda: holder(job) == "second", TAKEOVER_S, "the second to take the Lease")
    os.kill(leader.process.pid, signal.SIGCONT)
    assert leader.process.wait(15) == LOST
    assert "this operator exits" in leader.log
    assert job.get(KIND, job.name), "and nothing was lost"


def test_leader_exits_when_another_holds_its_lease(job: Operated, make: Make) -> None:
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


@pytest.fixture
def way(server: ApiServer) -> Iterator[Forwarder]:
    """A way to the API server that can be cut."""
    made = Forwarder(int(server.url.rpartition(":")[2]))
    yield made
    made.cut()


def leads(operator: Operator) -> str:
    return next(
        (
            line.rpartition(" ")[2]
            for line in operator.ask("/metrics")[1].splitlines()
            if line.startswith("dataloaderjob_operator_leader ")
        ),
        "",
    )


def test_lone_operator_writes_nothing_while_cut_off_and_then_resumes(
    job: Operated, make: Make, way: Forwarder
) -> None:
    alone = first(job, make, *QUICK, way=way)
    way.cut()
    until(lambda: leads(alone) == "0.0", 20, "it knows that it may lead no more")
    job.edit(feeders={"replicas": 2})
    time.sleep(3)  # as long as the Lease has run out for others
    assert job.get("Deployment", "mnist-feeders")["spec"]["replicas"] == 1
    way.mend()
    until(lambda: job.get("Deployment", "mnist-feeders")["spec"]["replicas"] == 2, 30, "it works on")
    assert alone.process is not None
    assert alone.process.poll() is None, "the same process, without a CrashLoopBackOff"
    assert leads(alone) == "1.0"
    assert "writes nothing until it is renewed" in alone.log
    assert "Traceback" not in alone.log


def test_leader_cut_off_exits_if_another_has_led_meanwhile(job: Operated, make: Make, way: Forwarder) -> None:
    leader = first(job, make, *QUICK, way=way)
    other = standing_by(make, *QUICK)
    way.cut()
    until(lambda: holder(job) == "second", 20, "the second to take the Lease")
    assert other.end() == 0, "it gives the Lease back: nobody has it"
    way.mend()
    assert leader.process is not None
    assert leader.process.wait(30) == LOST, "what it knows may be of before the other's work"
