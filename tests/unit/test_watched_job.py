"""The data of a report about a job on a cluster: the rise of its counts while it is watched."""

from __future__ import annotations

import html
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataloaderjob.core import costs
from dataloaderjob.core.timings import BUCKETS, Entry, Times, bucket_of
from dataloaderjob.local.reporting.page import render
from dataloaderjob.local.reporting.rundata import RunData
from dataloaderjob.local.reporting.series import LOST, REPLACED
from dataloaderjob.local.reporting.watching import MOST_RANKS, Watched


def sidecar(batches: int, *, ranks: int = 1, ready: int = 3, wait_s: float = 0.3) -> dict[str, Any]:
    """A sidecar whose ranks have taken so many batches each, with steps of 0.1 s."""
    row = [batches, int(batches * wait_s * 1e9), int(batches * 0.1e9), 1000 * batches, ready]
    return {
        "receivers": ranks,
        "metrics": {"retries": 2, "receiver_cpu_ns": batches * 10**6},
        "ranks": {str(rank): row for rank in range(ranks)},
    }


def feeder(number: int = 0, *, built: int = 0, instance: str = "a", state: str = "ready") -> dict[str, Any]:
    sums = {
        "built": built, "samples_ns": built * 10**8, "wall_ns": built * 4 * 10**8, "queued_ns": 0,
        "wall_us2": built * 400_000**2, "slots": 0,
    }  # fmt: skip
    return {
        "name": f"feeder-{number}", "state": state, "instance": instance, "pid": 5, "why": "", "cause": None,
        "costs": sums,
    }  # fmt: skip


def status(*feeders: dict[str, Any], **sidecars: dict[str, Any]) -> dict[str, Any]:
    named = {name.replace("_", "-"): report for name, report in sidecars.items()}
    return {"desired": len(feeders), "ready": len(feeders), "feeders": list(feeders), "sidecars": named}


def watched(*statuses: dict[str, Any]) -> Watched:
    found = Watched()
    for at, one in enumerate(statuses):
        found.see(float(at), one)
    return found


def data(found: Watched, single: Times | None = None) -> RunData:
    about = {"name": "team/mnist", "started": 1e9, "watched": True, "verdict": "training waits for input"}
    return RunData(about, found.series, found.times(single), is_live=True)


def text_of(page: str) -> str:
    """Returns what a reader sees outside of charts."""
    page = re.sub(r"<style.*?</style>|<svg.*?</svg>", "", page, flags=re.S)
    return html.unescape(" ".join(re.sub(r"<[^>]+>", " ", page).split()))


def test_counts_begin_with_the_watch():
    found = watched(*(status(feeder(built=n), t_0=sidecar(n)) for n in range(1000, 1060)))
    last, times = found.series.readings[-1], found.times()
    assert (last.ranks["0"].next_calls, last.ranks["0"].ready) == (59, 3)
    assert last.counts["next_calls"] == 59
    assert last.counts["retries"] == 0
    assert (times.sums.count, times.sums.nbytes) == (59, 59_000)
    assert times.sums.wall_ns == 59 * 4 * 10**8
    assert last.cpu["receiver of t-0"] == pytest.approx(0.059)
    assert last.cpu["feeder-0, batches"] == pytest.approx(5.9)


def test_a_process_that_starts_during_the_watch_counts_from_its_start():
    found = watched(
        status(feeder(built=90), t_0=sidecar(90)),
        status(feeder(built=5, instance="b"), t_0=sidecar(91), t_1=sidecar(4)),
    )
    last = found.series.readings[-1]
    assert last.counts["next_calls"] == 1 + 4
    assert found.times().sums.count == 5
    assert [event.kind for event in found.series.events] == [REPLACED]


def test_ranks_of_the_same_name_keep_their_pods():
    found = watched(*(status(t_0=sidecar(n), t_1=sidecar(2 * n)) for n in (10, 20)))
    calls = {rank: reading.next_calls for rank, reading in found.series.readings[-1].ranks.items()}
    assert calls == {"0": 10, "0 of t-1": 20}


def test_a_sidecar_of_an_earlier_release_counts_as_one_rank():
    def old(batches: int) -> dict[str, Any]:
        return {"metrics": {"next_calls": batches, "wait_ns": 7, "step_ns": batches, "nbytes": 9, "ready": 2}}

    found = watched(status(t_0=old(10)), status(t_0=old(14)))
    assert found.series.readings[-1].ranks["t-0"].next_calls == 4


def test_a_supervisor_that_does_not_answer_leaves_a_gap():
    found = watched(status(t_0=sidecar(1)), {}, status(t_0=sidecar(9)))
    assert [reading.at for reading in found.series.readings] == [0.0, 2.0]


def test_many_ranks_are_bounded():
    found = watched(*(status(t_0=sidecar(n, ranks=2 * MOST_RANKS)) for n in (1, 2)))
    assert len(found.series.readings[-1].ranks) == MOST_RANKS


@given(
    st.dictionaries(
        st.sampled_from(["sidecars", "desired", "ready", "measures", "failures"]),
        st.none() | st.integers() | st.text() | st.dictionaries(st.text(), st.none() | st.integers()),
    )
)
def test_anything_but_counts_in_a_status_is_ignored(hostile: dict[str, Any]):
    hostile = {**hostile, "failures": []}
    found = watched(status(t_0=sidecar(1)), {"feeders": [], **hostile}, status(t_0=sidecar(4)))
    assert found.series.readings[-1].ranks["0"].next_calls == 3
    assert costs.SLOTS not in found.series.readings[-1].counts


def test_the_page_tells_what_the_watch_saw():
    feeders = (feeder(built=n) for n in range(60))
    statuses = [status(one, feeder(1, built=9), t_0=sidecar(n)) for n, one in enumerate(feeders)]
    statuses[30]["feeders"][1] |= {"state": "lost", "why": "its process was killed by SIGKILL"}
    words = text_of(render(data(watched(*statuses))))
    for said in (
        "A job on a cluster, watched for 59 s from",
        "Limited by input: training waited for input for 75% of its time.",
        "The job's verdict on its last minute: training waits for input.",
        "[1] At 30.0 s feeder-1 was lost: its process was killed by SIGKILL. Another process replaced it 1.0 s later.",
        "Feeders made 59 batches during the watch. No feeder pod reported the times of individual batches.",
        "receiver of t-0",
        "feeder-0, making batches",
        "The CPU time of training is not measured on a cluster.",
        "The job was still running when the watch ended.",
    ):
        assert said in words, words
    assert "first feeder was serving" not in words
    assert LOST in words


def test_the_page_has_the_slowest_samples_if_feeders_tell_them():
    single = Times(buckets=[0] * BUCKETS)
    single.buckets[bucket_of(2 * 10**8)], single.buckets[bucket_of(4 * 10**9)] = 99, 1
    single.samples = [Entry(4 * 10**9, 10**18, 3, 0, -1, "index 5")]
    statuses = [status(feeder(built=n), t_0=sidecar(n)) for n in range(20)]
    words = text_of(render(data(watched(*statuses), single)))
    assert "The slowest samples took sample batch at 4 s index 5 3 " in words
    assert "cover the time since the feeder pods started" in words
    assert "time of a batch in one feeder 400 ms" in words


def test_the_page_of_a_job_without_batches_says_so():
    words = text_of(render(data(watched(status(t_0=sidecar(0)), status(t_0=sidecar(0))))))
    assert "No batch was taken yet" in words
    assert "No feeder of this run measured any batches" in words
