"""Links to feeders that break within a body, again and again, or are very slow: no receiver is lost, and no batch."""

from __future__ import annotations

import pytest
from batches import Numbers
from relay import CutRig

from dataloaderjob import DataLoader
from processes import children

CUTS = 35
"""Of each feeder's links."""
WIDTH = 100_000
"""Floats of a sample: a body of four is 1.6 MB, a hundred times what a receiver takes with a header."""


@pytest.mark.thorough
def test_35_links_cut_within_a_body_lose_no_receiver_and_no_batch() -> None:
    with CutRig(2, cuts=CUTS) as rig:
        batches = iter(DataLoader(Numbers(4000, width=WIDTH), batch_size=4))
        first, _ = next(batches)
        assert first.tolist() == [0, 1, 2, 3]
        (receiver,) = children(rig.sidecar.pid)
        step = 0
        for step, (numbers, floats) in enumerate(batches, 1):
            assert numbers.tolist() == list(range(4 * step, 4 * step + 4))
            assert floats[:, 0].tolist() == numbers.tolist()
            assert (floats[:, -1] - floats[:, 0]).tolist() == [(WIDTH - 1) / 2] * 4
            if all(relay.cuts == CUTS for relay in rig.relays.values()):
                break
        assert [relay.cuts for relay in rig.relays.values()] == [CUTS, CUTS], step
        assert children(rig.sidecar.pid) == [receiver], rig.logs()


@pytest.mark.thorough
def test_a_link_of_100_kb_a_second_is_waited_for() -> None:
    with CutRig(1, nbytes_per_s=100_000) as rig:
        numbers, floats = next(iter(DataLoader(Numbers(4, width=WIDTH), batch_size=1)))  # takes 4 s
        assert numbers.tolist() == [0]
        assert floats[0, -1] == (WIDTH - 1) / 2
        assert [relay.links for relay in rig.relays.values()] == [1], rig.logs()
