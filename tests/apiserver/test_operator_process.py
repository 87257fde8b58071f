"""The operator's process with its watches, on a real API server."""

from __future__ import annotations

import itertools
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from forwarder import Forwarder
from manifests import manifest
from odd_values import deep
from operated import Operated
from ports import reserve_port
from processes_of_operator import ALL, ROOT, TRAINING, Operator, until
from supervisor_alone import SupervisorAlone, says

from apiserver import ApiServer, Refused
from dataloaderjob.api import KIND
from dataloaderjob_operator import names
from dataloaderjob_operator.__main__ import MAX_CALLS
from dataloaderjob_operator.kinds import WATCHED
from dataloaderjob_operator.objects.settings import SUPERVISOR_PORT


@pytest.fixture
def way(server: ApiServer) -> Iterator[Forwarder]:
    """To the API server, for an operator that shall lose it."""
    made = Forwarder(int(server.url.rpartition(":")[2]))
    yield made
    made.cut()


@pytest.fixture
def distant(server: ApiServer, way: Forwarder, tmp_path: Path) -> Iterator[Operator]:
    """An operator that reaches its API server by this way only."""
    made = Operator(replace(server, url=f"https://127.0.0.1:{way.port}"), tmp_path)
    made.start()
    yield made
    made.end(kill=True)


@pytest.fixture
def deep_copies() -> Iterator[None]:
    """Lets this process handle as many levels as the API server."""
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(MAX_CALLS)
    yield
    sys.setrecursionlimit(before)


def phase(job: Operated) -> str | None:
    return job.get(KIND, job.name).get("status", {}).get("phase")


def is_anew(job: Operated, kind: str, name: str, uid: str) -> bool:
    """Whether an object of that name is there, and not the one of this uid."""
    try:
        return bool(job.get(kind, name)["metadata"]["uid"] != uid)
    except Refused:
        return False


def watches(operator: Operator) -> float | None:
    """The number of open watches in its metrics; None while nothing answers."""
    found = re.search(r"^dataloaderjob_operator_watches (\S+)$", operator.ask("/metrics")[1], re.MULTILINE)
    return float(found[1]) if found else None


def test_job_gets_children_and_a_phase_and_deleted_children_return(
    server: ApiServer, operator: Operator
) -> None:
    first = Operated(server, manifest())
    until(lambda: phase(first) == "Starting", 30, f"a phase; its log: {operator.log}")
    until(lambda: len(first.children()) == ALL, 10, "children")
    second = Operated(server, manifest())
    until(lambda: phase(second), 5, "a phase of a second job, while it runs")
    uid = first.get("Service", "mnist-head")["metadata"]["uid"]
    first.delete("Service", "mnist-head")
    until(lambda: is_anew(first, "Service", "mnist-head", uid), 10, "the Service again")
    first.edit(feeders={"replicas": 5})
    until(lambda: first.get("Deployment", "mnist-feeders")["spec"]["replicas"] == 5, 10, "five feeders")
    assert first.get(KIND, "mnist")["status"]["feeders"]["summary"] == "0/5"
    assert operator.end() == 0
    assert "Traceback" not in operator.log


def test_every_child_except_the_secret_returns_within_10_seconds(
    server: ApiServer, operator: Operator
) -> None:
    """No operator reads a Secret: it comes back with a pod that waits for it (test_keys)."""
    job = Operated(server, manifest())
    until(lambda: len(job.children()) == ALL, 30, f"children; its log: {operator.log}")
    uids = {key: child["metadata"]["uid"] for key, child in job.children().items() if key[0] != "Secret"}
    for (kind, name), uid in sorted(uids.items()):
        job.delete(kind, name)
        until(lambda: is_anew(job, kind, name, uid), 10, f"{kind} {name} again")
    assert operator.end() == 0
    assert "Traceback" not in operator.log


@pytest.mark.parametrize("last", [False, True])
def test_repeated_suspend_and_resume_settles_at_the_last_state(
    server: ApiServer, operator: Operator, last: bool
) -> None:
    job = Operated(server, manifest())
    until(lambda: len(job.children()) == ALL, 30, f"children; its log: {operator.log}")
    for pause_s in (0.0, 0.01, 0.05, 0.2, 0.6, 1.2):
        for suspended in (not last, last):
            job.edit(suspend=suspended)
            time.sleep(pause_s)

    def settled() -> bool:
        job.collect_garbage()
        found = job.get(KIND, "mnist")
        status = found["status"]
        seen = status["observedGeneration"] == found["metadata"]["generation"]
        trainers = [kind for kind, _ in job.children() if kind == "Job"]
        return seen and (status["phase"] == "Suspended", trainers) == (last, [] if last else ["Job"])

    until(settled, 15, f"the end; its log: {operator.log}")
    workloads = {name for kind, name in job.children() if kind == "Deployment"}
    assert workloads == (set() if last else {"mnist-head", "mnist-feeders"})
    assert job.get(KIND, "mnist")["status"]["trainers"].get("restarts", 0) == 0
    assert operator.end() == 0
    assert "Traceback" not in operator.log


def test_job_runs_once_its_supervisor_reports_and_status_has_metrics(
    server: ApiServer, operator: Operator, tmp_path: Path
) -> None:
    job = Operated(server, manifest({"spec.feeders.minAvailable": 1}))
    until(
        lambda: len(job.children()) == ALL - TRAINING,
        30,
        f"all children but trainers; its log: {operator.log}",
    )
    uid = job.get(KIND, "mnist")["metadata"]["uid"]
    key = names.job_key(ROOT, uid)
    name, address = names.unique(*job.key, uid), "127.0.0.41"
    supervisor = SupervisorAlone(
        tmp_path / "s", job=name, key=key, host=address, port=SUPERVISOR_PORT, feeders=1
    )
    supervisor.has_ray()
    job.serves()
    job.ready_head(address)
    until(lambda: job.conditions()["HeadReady"]["status"] == "True", 30, f"a head; its log: {operator.log}")
    assert job.conditions()["FeedersReady"]["status"] == "False", "its pods alone are no feeders"
    assert phase(job) == "Starting"
    supervisor.ready(0)
    until(lambda: job.conditions()["FeedersReady"]["status"] == "True", 30, "feeders")
    until(lambda: len(job.children()) == ALL, 30, "trainers")
    status = job.get(KIND, "mnist")["status"]
    assert (status["feeders"]["ready"], status["ray"]["version"]) == (1, "2.60.0")
    job.edit(feeders={"replicas": 3})
    until(lambda: supervisor.desired == 3, 30, "three feeders are asked for")
    with supervisor.sidecar() as sidecar:
        counted = itertools.count(1)

        def metrics() -> bool:
            says(sidecar, next_calls=10 * next(counted), nbytes=1, used_nbytes=1, pool_nbytes=2)
            return job.get(KIND, "mnist")["status"]["loader"]["batchesPerSecond"] not in ("", "0")

        # The first figures that follow others are written METRICS_EVERY_S and a poll later.
        until(metrics, 120, f"metrics; its log: {operator.log}")
        failure = {"rank": "0", "feeder": "feeder-0", "reason": "ModuleMissing", "text": "no module x"}
        says(sidecar, failure, next_calls=10 * next(counted))
        until(lambda: job.conditions()["FeedersReady"]["reason"] == "ModuleMissing", 30, "the cause")
    assert "received from feeder-0: no module x" in job.conditions()["Ready"]["message"]
    assert operator.end() == 0
    assert "Traceback" not in operator.log


def test_changes_made_while_the_operator_was_down_are_applied(server: ApiServer, operator: Operator) -> None:
    job = Operated(server, manifest())
    until(lambda: len(job.children()) == ALL, 30, f"children; its log: {operator.log}")
    operator.end(kill=True)
    job.edit(feeders={"replicas": 2})
    job.delete(*job.real(("ConfigMap", "mnist-settings-feeder")))
    job.delete("Secret", job.key_secret)
    operator.start()
    until(lambda: len(job.children()) == ALL, 30, f"children again; its log: {operator.log}")
    until(lambda: job.get("Deployment", "mnist-feeders")["spec"]["replicas"] == 2, 10, "two feeders")


def test_outage_closes_watches_and_lost_children_return_after_it(
    server: ApiServer, way: Forwarder, distant: Operator
) -> None:
    job = Operated(server, manifest())
    until(lambda: len(job.children()) == ALL, 30, f"children; its log: {distant.log}")
    until(lambda: watches(distant) == len(WATCHED), 10, "all watches open")
    uid = job.get("Service", "mnist-head")["metadata"]["uid"]
    way.cut()
    until(lambda: watches(distant) == 0, 10, f"no watch open; its log: {distant.log}")
    job.delete("Service", "mnist-head")
    assert distant.ask("/healthz")[0] == 200, "nothing that a new process would do better"
    with pytest.raises(Refused):
        job.get("Service", "mnist-head")
    way.mend()
    until(
        lambda: is_anew(job, "Service", "mnist-head", uid), 10, f"the Service again; its log: {distant.log}"
    )
    until(lambda: watches(distant) == len(WATCHED), 10, f"all watches open again; its log: {distant.log}")


@pytest.mark.usefixtures("deep_copies")
def test_manifest_near_the_nesting_limit_is_reported_and_blocks_no_job(
    server: ApiServer, operator: Operator
) -> None:
    template = "spec.trainers.job.template.spec"
    until(lambda: operator.ask("/readyz")[0] == 200, 30, f"readiness; its log: {operator.log}")
    odd = Operated(server, manifest({f"{template}.affinity": deep(9_900)}))
    try:
        until(lambda: phase(odd), 30, f"a phase; its log: {operator.log}")
        ready = odd.conditions()["Ready"]
        assert (ready["reason"], ready["message"]) == (
            "InvalidSpec", f"{template}.affinity.a: found more than 200 levels; use fewer",
        )  # fmt: skip
        watched = Operated(server, manifest())
        until(lambda: len(watched.children()) == ALL, 30, f"children; its log: {operator.log}")
        assert operator.end() == 0
        operator.start()
        listed = Operated(server, manifest())
        until(lambda: len(listed.children()) == ALL, 30, f"children again; its log: {operator.log}")
        assert "Traceback" not in operator.log
    finally:
        odd.delete(KIND, odd.name)


def test_deleted_job_is_left_to_the_garbage_collector(server: ApiServer, operator: Operator) -> None:
    job = Operated(server, manifest())
    until(lambda: len(job.children()) == ALL, 30, f"children; its log: {operator.log}")
    assert not job.get(KIND, "mnist")["metadata"].get("finalizers")
    assert "annotations" not in job.get(KIND, "mnist")["metadata"], "nothing is kept in the user's object"
    operator.end(kill=True)
    job.delete(KIND, "mnist")
    with pytest.raises(Refused):
        job.get(KIND, "mnist")


def test_operator_without_a_root_key_logs_an_error_and_exits(tmp_path: Path) -> None:
    for content, why in ((None, "No such file"), (b"short", "at least 32 bytes, but has 5")):
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


def test_operator_exits_with_an_error_if_its_port_is_in_use(
    server: ApiServer, operator: Operator, tmp_path: Path
) -> None:
    (tmp_path / "second").mkdir()
    second = Operator(server, tmp_path / "second")
    second.port = operator.port
    until(lambda: operator.ask("/healthz")[0], 30, f"probes; its log: {operator.log}")
    second.start()
    assert second.process is not None
    assert second.process.wait(30) == 2
    assert f"cannot serve metrics and probes on port {operator.port}" in second.log


def test_operator_waiting_for_the_api_server_serves_probes(server: ApiServer, tmp_path: Path) -> None:
    away = Operator(replace(server, url=f"https://127.0.0.1:{reserve_port()}"), tmp_path)
    away.start()
    until(lambda: "cannot list" in away.log, 30, "a line about what it waits for")
    assert away.ask("/healthz")[0] == 200
    assert away.ask("/readyz") == (503, "the initial list is not complete\n")
    assert away.end() == 0
    assert "Traceback" not in away.log
