"""The benchmarks' own parts run: a change of settings or of the wire shall not be found by `make bench` alone."""

from __future__ import annotations

import subprocess
import sys

import pytest
from documents import ROOT


@pytest.mark.nightly
def test_short_round_of_our_benchmarks_measures_each_cell():
    done = subprocess.run(
        [sys.executable, "-m", "bench.run", "--smoke", "--only", "B1,B2,B3,B10,B14,B16,B17,B19", "--parties", "ours"],
        cwd=ROOT, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    shown = done.stdout + done.stderr
    assert "B1 ours" in shown
    assert "FAILED" not in shown, shown


@pytest.mark.nightly
def test_short_soak_of_an_endless_stream_records_its_measures():
    done = subprocess.run(
        [sys.executable, "-m", "bench.soak", "--minutes", "0.1"],
        cwd=ROOT, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert "batches: feeders" in done.stdout, done.stdout + done.stderr
