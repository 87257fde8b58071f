"""What a scrape of the sidecar shows of the words that trainer and receiver share."""

from __future__ import annotations

import pytest
from prometheus_client.parser import text_string_to_metric_families

from dataloaderjob.core import control
from dataloaderjob.core.control import Control
from dataloaderjob.sidecar import metrics


def test_prometheus_gets_as_much_of_a_digest_as_a_float_holds() -> None:
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


def scraped(job: str, rank: str) -> dict[str, str]:
    """The labels of each sample, which are the same for all."""
    text = metrics.prometheus([(rank, dict.fromkeys(metrics.KEYS, 0))], job)
    found = [sample.labels for family in text_string_to_metric_families(text) for sample in family.samples]
    assert len(found) == len(metrics.METRICS)
    assert all(labels == found[0] for labels in found)
    return dict(found[0])


def test_a_job_is_two_labels_and_one_without_a_cluster_has_no_namespace() -> None:
    whose = {"dataloaderjob_namespace": "team", "dataloaderjob_name": "mnist", "rank": "0"}
    assert scraped("team/mnist/uid", "0") == whose
    assert scraped("mnist", "0") == {**whose, "dataloaderjob_namespace": ""}


@pytest.mark.parametrize("rank", ['0"} 1\ndataloaderjob_sidecar_feeders{rank="1', "a\\", 'a"b', "\n"])
def test_a_trainer_cannot_write_metrics_of_others_by_what_it_calls_itself(rank: str) -> None:
    assert scraped("team/mnist/uid", rank)["rank"] == rank
