"""The benchmark of admissions runs against a real API server, with the webhook and with the policy."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.nightly
def test_benchmark_of_admissions_measures_each_row() -> None:
    """In a process of its own, because it ends all children of its process."""
    subprocess.run([sys.executable, "-m", "bench.admission", "--smoke"], cwd=ROOT, check=True, timeout=120)
    found = json.loads((ROOT / "build/bench-smoke/b21-admission.json").read_text())
    assert all(row["ours"] > 0 for row in found["rows"])
