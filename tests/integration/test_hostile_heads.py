"""Heads that run tenants' images, as hostile as they can be: the operator of all stays small, prompt and right.

The poller runs in a process of its own against real sockets. A process that has imported it has 62 MB.
"""

from __future__ import annotations

import pytest
from hostile_heads import polled

MOST_MB = 300
MOST_LATE_S = 1.0
MOST_STATUS_CHARS = 6000
ROWS = [
    ("objects", 64), ("lists", 64), ("keys", 64), ("sidecars", 64), ("long-texts", 64), ("trickle", 64),
    ("eight-megabytes", 3), ("sidecars", 250), ("long-texts", 250), ("trickle", 250),
]  # fmt: skip


@pytest.mark.thorough
@pytest.mark.parametrize(("kind", "heads"), ROWS, ids=lambda value: str(value))
@pytest.mark.quick("sidecars-250", "eight-megabytes-3", "lists-64", others="nightly")
def test_operator_stays_small_and_prompt_despite_hostile_heads(kind: str, heads: int) -> None:
    found = polled(kind, heads, 8.0 if kind == "trickle" else 5.0)  # four seconds of it are one answer
    assert found["seen"], "the honest head has answered"
    assert found["wrong"] == 0, "and its status stayed right"
    assert found["peak_mb"] < MOST_MB
    assert found["late_s"] < MOST_LATE_S
    assert found["status_nbytes"] < MOST_STATUS_CHARS
    assert found["log_nbytes"] < 2000 * heads
