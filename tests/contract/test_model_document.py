"""The page on the model's error is made of the results, and says plainly which targets are missed."""

from __future__ import annotations

import json
import statistics
import sys

from documents import ROOT

sys.path.insert(0, str(ROOT))
from bench.model import known, page, real, running, simulated
from bench.model.__main__ import RESULTS

FOUND = json.loads(RESULTS.read_text())


def test_page_is_made_of_the_results():
    assert page.PAGE.read_text() == page.page(FOUND), "python -m bench.model page"


def test_results_have_each_pipeline_once():
    assert [row["name"] for row in FOUND["simulated"]] == [one.name for one in simulated.pipelines()]
    assert [row["name"] for row in FOUND["real"]] == [one.name for one in real.PIPELINES]
    assert [row["what"] for row in FOUND["known"]] == [one.what for one in known.KNOWN]
    assert [row["what"] for row in FOUND["running"]] == [one.what for one in running.RUNNING]


def test_verdicts_and_errors_keep_their_targets():
    assert all(row["is_right"] for part in ("known", "running") for row in FOUND[part])
    for part in ("simulated", "real", "running"):
        errors = [row["error"] for row in FOUND[part]]
        assert statistics.median(errors) <= page.MEDIAN, part
        assert max(errors) <= page.WORST, part


def test_missed_targets_are_stated():
    rows = [
        {
            "name": "x",
            "feeders": 1,
            "ranks": 1,
            "rate": 1.0,
            "rate_twice": 2.0,
            "predicted": 2.6,
            "error": 0.3,
        }
    ]
    assert "the target is missed" in page.page({"real": rows})
    assert "the target is met" in page.page({"real": [{**rows[0], "error": 0.02}]})
