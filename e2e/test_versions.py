"""Two releases on one cluster: this one and the one after it, with jobs of either under the operator of the other."""

from __future__ import annotations

import json
from datetime import UTC, datetime

import pytest
from cluster import RELEASE, SYSTEM, Cluster, Manifest, until
from jobs import FEEDERS, HEAD, TRAINER, Job
from next_release import Release, build
from streams import longest_gap_s, stream, stream_here, takes_batches

pytestmark = [pytest.mark.slow, pytest.mark.alone, pytest.mark.timeout(1500)]
ALL = (HEAD, FEEDERS, TRAINER)
NEW = "of_the_next_release"
MAX_GAP_S = 5.0
"""Between two batches, of which a feeder makes one a second."""
SAMPLES = {"older": 1600, "newer": 1200, "ahead": 160}


@pytest.fixture(scope="module")
def later(operator: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Release:
    return build(operator, tmp_path_factory.mktemp("later"))


def of(name: str, release: Release | None = None, **paths: object) -> Manifest:
    """A job that streams, with the images of a release; None: of this one."""
    made = stream(name, samples=SAMPLES[name], **paths)
    if release is not None:
        made["spec"]["trainers"]["job"]["template"]["spec"]["containers"][0]["image"] = release.feeder
    return made


def streams(job: Job) -> None:
    """Until it takes batches."""
    job.await_phase("Running", timeout_s=180)
    until(lambda: takes_batches(job), timeout_s=60, what=f"batches of {job.name}", also=job.why)


def scale_to_two(job: Job) -> None:
    """By way of the operator and the job's supervisor, until both feeders serve."""
    job.cluster.kubectl("scale", "dlj", job.name, "-n", job.namespace, "--replicas=2")
    until(lambda: job.status()["feeders"]["summary"] == "2/2", timeout_s=90, what="2/2", also=job.why)
    assert job.condition("HeadReady")["status"] == "True", job.why()


def settings(job: Job) -> list[Manifest]:
    """What the files that the pods of a job read have in them."""
    maps = job.cluster.list("configmaps", job.namespace, f"dataloading.dev/job={job.name}")
    found = [json.loads(text) for m in maps for name, text in m["data"].items() if name.endswith(".json")]
    assert len(found) == 3
    return found


@pytest.mark.nightly
def test_jobs_of_either_release_stream_through_an_upgrade_and_a_rollback(
    operator: Cluster, later: Release, start
):
    older: Job = start(of("older"))
    streams(older)
    before, began = older.uids(*ALL), datetime.now(UTC)

    place = ["--namespace", SYSTEM, "--wait"]
    operator.helm("upgrade", RELEASE, str(later.chart), *place, *later.values())
    newer: Job = start(of("newer", later))
    streams(newer)
    assert older.uids(*ALL) == before, "the upgrade replaced pods"
    assert newer.live()["spec"]["ofTheNextRelease"] is True, "the definition is that of the next release"
    assert all(NEW in file for file in settings(newer))
    assert not any(NEW in file for file in settings(older)), "they stay what its pods were started with"
    scale_to_two(older)
    assert longest_gap_s(older, began, datetime.now(UTC)) < MAX_GAP_S
    (head,) = older.pods(HEAD)
    operator.kubectl("delete", "pod", head["metadata"]["name"], "-n", older.namespace)
    until(
        lambda: head["metadata"]["uid"] not in older.uids(HEAD) and older.phase() == "Running", timeout_s=180,
        what="another head, made by the operator of the next release", also=older.why,
    )  # fmt: skip
    assert older.condition("HeadReady")["status"] == "True", older.why()

    mine, theirs, began = older.uids(*ALL), newer.uids(*ALL), datetime.now(UTC)
    operator.helm("rollback", RELEASE, *place)
    scale_to_two(newer)
    assert set(theirs) <= set(newer.uids(*ALL)), "the rollback replaced pods"
    assert older.uids(*ALL) == mine, "the rollback replaced pods"
    assert "ofTheNextRelease" not in newer.live()["spec"]
    assert all(longest_gap_s(job, began, datetime.now(UTC)) < MAX_GAP_S for job in (older, newer))
    ahead: Job = start(of("ahead", later, spec__sidecar__image=later.sidecar))
    streams(ahead)
    assert not any(NEW in file for file in settings(ahead)), "this release's operator wrote them"

    for job in (older, newer, ahead):
        job.await_phase("Complete", timeout_s=400)
        assert job.digest() == stream_here(SAMPLES[job.name]), job.name
        assert job.status()["trainers"]["restarts"] == 0
