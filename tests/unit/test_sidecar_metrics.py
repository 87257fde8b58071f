"""What a scrape of the sidecar shows of the words that trainer and receiver share."""

from __future__ import annotations

import pytest
from prometheus_client.parser import text_string_to_metric_families

from dataloaderjob.core import control
from dataloaderjob.core.control import Control
from dataloaderjob.core.frames import FrameKind, Header
from dataloaderjob.core.settings import LoaderSettings
from dataloaderjob.core.texts import clean
from dataloaderjob.sidecar import metrics
from dataloaderjob.sidecar.dispatch.dispatcher import Dispatcher
from dataloaderjob.sidecar.dispatch.streams import Endpoint


def test_prometheus_digest_is_cut_to_the_precision_of_a_float() -> None:
    words = Control(Control.create())
    words.words[control.W_DIGEST] = 0xFEDC_BA98_7654_3210
    found = metrics.read(words)
    assert found["digest"] == 0xFEDC_BA98_7654_3210
    text = metrics.prometheus([("3", found)], "a/b/c")
    (line,) = [
        line for line in text.splitlines() if line.startswith("dataloaderjob_sidecar_consumed_digest{")
    ]
    labels = 'dataloaderjob_namespace="a",dataloaderjob_name="b",rank="3"'
    assert line == f"dataloaderjob_sidecar_consumed_digest{{{labels}}} {0xBA98_7654_3210}"
    assert int(float(line.rpartition(" ")[2])) == 0xBA98_7654_3210


def test_count_of_bundle_loads_arrives_with_batches() -> None:
    machine, words = Dispatcher(LoaderSettings()), Control(Control.create())
    machine.set_feeders(0.0, [Endpoint("feeder-0", "i0", "h", 1)])
    machine.feeder_up(0.0, "i0", {})
    machine.open_stream(1, manifest=b"{}", bundle=bytes(16), facts={}, window=4)
    machine.tickets(0.0, 1, [(0, b"")], 0)
    announce = Header(FrameKind.ANNOUNCE, 0, 0, 1, 0, bytes(16), 0, room=4096)
    machine.frame(0.1, "i0", announce, b"")
    body = announce._replace(kind=FrameKind.BODY, nbytes=4096, room=3)
    machine.begin_body(0.1, "i0", body)
    machine.end_body(0.1, "i0", body)
    metrics.store(words, machine)
    assert metrics.read(words)["bundle_loads"] == 3


def scraped(job: str, rank: str) -> dict[str, str]:
    """The labels of each sample, which are the same for all."""
    text = metrics.prometheus([(rank, dict.fromkeys(metrics.KEYS, 0))], job)
    found = [sample.labels for family in text_string_to_metric_families(text) for sample in family.samples]
    assert len(found) == len(metrics.METRICS)
    assert all(labels == found[0] for labels in found)
    return dict(found[0])


def test_job_has_two_labels_and_no_namespace_without_a_cluster() -> None:
    whose = {"dataloaderjob_namespace": "team", "dataloaderjob_name": "mnist", "rank": "0"}
    assert scraped("team/mnist/uid", "0") == whose
    assert scraped("mnist", "0") == {**whose, "dataloaderjob_namespace": ""}


@pytest.mark.parametrize("rank", ['0"} 1\ndataloaderjob_sidecar_feeders{rank="1', "a\\", 'a"b', "\n"])
def test_trainers_rank_cannot_inject_metrics(rank: str) -> None:
    assert scraped("team/mnist/uid", rank)["rank"] == clean(rank)


def test_batches_taken_between_two_receivers_are_counted_once():
    totals, none = metrics.Totals(), dict.fromkeys(metrics.KEYS, 0)
    totals.ended("trainer", {**none, "next_calls": 10})
    assert totals.of([])["next_calls"] == 10
    totals.adopted("trainer", {**none, "next_calls": 12})
    assert totals.of([])["next_calls"] == 0, "its memory has all 12"
    totals.adopted("of a sidecar before", {**none, "next_calls": 7})
    assert totals.of([])["next_calls"] == -7, "these are not of this one"
