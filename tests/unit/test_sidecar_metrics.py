"""What a scrape of the sidecar shows of the words that trainer and receiver share."""

from __future__ import annotations

from dataloaderjob.core import control
from dataloaderjob.core.control import Control
from dataloaderjob.sidecar import metrics


def test_prometheus_gets_as_much_of_a_digest_as_a_float_holds() -> None:
    words = Control(Control.create())
    words.words[control.W_DIGEST] = 0xFEDC_BA98_7654_3210
    found = metrics.read(words, "3")
    assert found.values["digest"] == 0xFEDC_BA98_7654_3210
    text = metrics.prometheus([found], "a/b/c")
    (line,) = [
        line for line in text.splitlines() if line.startswith("dataloaderjob_sidecar_consumed_digest{")
    ]
    assert (
        line == f'dataloaderjob_sidecar_consumed_digest{{dataloaderjob="a/b/c",rank="3"}} {0xBA98_7654_3210}'
    )
    assert int(float(line.rpartition(" ")[2])) == 0xBA98_7654_3210
