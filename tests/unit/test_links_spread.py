"""Links that broke at once come back spread."""

from __future__ import annotations

from dataloaderjob.core.processes import Backoff
from dataloaderjob.sidecar.dispatch.streams import Endpoint
from dataloaderjob.sidecar.feeder_connection import BACKOFF, FeederConnection


def test_receivers_that_lost_a_feeder_together_retry_at_different_times():
    times = []
    for _ in range(64):
        connection = FeederConnection(Endpoint("feeder-0", "i0", "h", 1), None, key=b"", job="job", name="r")  # type: ignore[arg-type]
        for _ in range(4):
            connection.give_up(now=100.0)
        times.append(connection.retry_at - 100.0)
    longest = BACKOFF.wait_s(4)
    assert all(longest / 2 <= pause <= longest for pause in times)
    assert max(times) - min(times) > longest / 4


def test_pauses_grow_up_to_a_bound():
    backoff = Backoff(0.1, 1.0)
    assert [backoff.wait_s(failures) for failures in (1, 2, 3, 9)] == [0.1, 0.2, 0.4, 1.0]
