"""A node holds a dataset once, however many feeders it has, and each may write to its own view of it."""

from __future__ import annotations

import psutil
import pytest
from big_data import Big
from rig import Rig

from dataloaderjob import DataLoader
from processes import rollup

NBYTES = 1_000_000_000
FEEDERS = 4


def pss(pid: int) -> int:
    """Bytes of this process, with its share of what others map too; 0 if it has ended meanwhile."""
    try:
        return rollup(pid)["Pss"] * 1024
    except (FileNotFoundError, ProcessLookupError):
        return 0


def descendants(pids: list[int]) -> list[int]:
    """These processes and all that come from them."""
    found = [psutil.Process(pid) for pid in pids]
    return [process.pid for one in found for process in (one, *one.children(recursive=True))]


@pytest.mark.slow
def test_four_feeders_hold_a_one_gigabyte_dataset_only_once():
    with Rig(feeders=FEEDERS) as rig:
        hosts = [process.pid for process, _ in rig.feeders]
        before = sum(map(pss, descendants(hosts)))
        loader = DataLoader(Big(NBYTES), batch_size=1, prefetch_factor=16)
        seen = set()
        for _ in range(3):
            for total, summed, pid in loader:
                assert int(total) == NBYTES // 2 // 8
                assert float(summed) > 0
                seen |= {host for host in hosts if int(pid) in descendants([host])}
        assert seen == set(hosts), "every feeder has loaded and read all of it"
        grown = sum(map(pss, descendants(hosts))) - before
        assert NBYTES < grown < 1.3 * NBYTES
