"""The chart on a cluster: its own test, the job of its notes, its operator's metrics, and that all of it can go."""

from __future__ import annotations

import re

import pytest
from cluster import RELEASE, SYSTEM, Cluster, until
from jobs import Job, job

pytestmark = pytest.mark.timeout(600)
_JOB = re.compile(r"<<'JOB'\n(.*?)^JOB$", re.MULTILINE | re.DOTALL)
DEFINITION = "dataloaderjobs.dataloading.dev"


def test_helm_test_runs_a_tiny_job_to_complete(operator: Cluster):
    said = operator.helm("test", RELEASE, "-n", SYSTEM, "--logs", "--timeout", "5m", timeout_s=330)
    assert "Succeeded" in said, said
    assert "Complete" in said, said


@pytest.mark.alone  # beside the main job its trainer finds no room
def test_job_of_the_notes_runs_as_printed(operator: Cluster):
    notes = operator.helm("get", "notes", RELEASE, "-n", SYSTEM)
    found = _JOB.search(notes)
    assert found, notes
    operator.kubectl("apply", "-f", "-", stdin=found[1])
    first = Job(operator, SYSTEM, "first-job")
    first.await_phase("Complete", timeout_s=150)
    first.delete()
    first.await_nothing()


@pytest.mark.alone
def test_the_operator_serves_its_metrics_and_logs_json_about_each_job(operator: Cluster, start):
    made: Job = start(job("seen"))
    made.await_phase("Running", timeout_s=90)
    pod = operator.list("pods", SYSTEM, "app.kubernetes.io/name=dataloaderjob-operator")[0]["metadata"][
        "name"
    ]
    metrics = operator.kubectl("get", "--raw", f"/api/v1/namespaces/{SYSTEM}/pods/{pod}:9440/proxy/metrics")
    assert re.search(r'^dataloaderjob_operator_jobs\{phase="Running"\} 1\.0$', metrics, re.MULTILINE), metrics
    lines = operator.logs(pod, SYSTEM).splitlines()
    assert lines
    assert all(line.startswith("{") for line in lines), lines


@pytest.mark.slow
@pytest.mark.alone
def test_uninstalling_without_keeping_the_crd_removes_everything(operator: Cluster, start):
    made: Job = start(job("gone"))
    made.await_phase("Running", timeout_s=90)
    operator.helm("uninstall", RELEASE, "-n", SYSTEM, "--wait")
    operator.install("--take-ownership", "--set", "crds.keep=false")
    operator.helm("uninstall", RELEASE, "-n", SYSTEM, "--wait")
    try:
        until(
            lambda: not operator.kubectl("get", "crd", DEFINITION, "--ignore-not-found"),
            timeout_s=60,
            what="no CRD",
        )
        made.await_nothing(timeout_s=90)
    finally:
        operator.install()
