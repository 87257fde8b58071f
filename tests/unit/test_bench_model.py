"""The simulation behind the error of the model: known queues, and the bounds that the error must keep."""

from __future__ import annotations

import statistics
import sys
from dataclasses import replace

import pytest
from documents import ROOT

sys.path.insert(0, str(ROOT))
from bench.model import simulated
from bench.model.simulated import Simulated

PLAIN = Simulated(
    name="", seed=1, feeders=2, ranks=1, step_s=0.1, make_s=0.4, kind="even", cpu_share=1.0, nbytes=1000, link=1e12,
    window=16, slots=None, receive_s_per_gb=0.3,
)  # fmt: skip


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        pytest.param({}, 5.0, id="feeders"),
        pytest.param({"feeders": 9}, 10.0, id="trainer"),
        pytest.param({"feeders": 9, "ranks": 4}, 22.5, id="ranks-share-feeders"),
        pytest.param({"feeders": 9, "link": 7000.0}, 7.0, id="link"),
        pytest.param({"feeders": 9, "slots": 3}, 7.5, id="slots"),
        pytest.param({"feeders": 9, "nbytes": 10**9, "receive_s_per_gb": 0.5}, 2.0, id="receiver"),
        pytest.param({"feeders": 40, "window": 2}, 5.0, id="window"),
    ],
)
def test_simulated_rate_is_that_of_the_scarcest_resource(changed: dict[str, object], expected: float):
    found = simulated.measure(replace(PLAIN, **changed))  # type: ignore[arg-type]
    assert found.rate == pytest.approx(expected, rel=0.06)


def test_model_predicts_twice_the_feeders_within_its_bounds():
    errors = [float(str(simulated.row(one)["error"])) for one in simulated.pipelines()]
    assert len(errors) == 30
    assert statistics.median(errors) <= 0.10
    assert max(errors) <= 0.25
