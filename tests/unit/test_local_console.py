"""What is shown of a run, from readings of the sidecar's counters."""

from __future__ import annotations

import io

from dataloaderjob.core.supervision import COUNTERS
from dataloaderjob.local import console
from dataloaderjob.local.console import Console, Meter, Metrics
from dataloaderjob.local.service import LINGER_S, UNUSED_S, IdleShutdown


def status(**totals: int) -> dict:
    return {"totals": totals}


def test_a_meter_adds_up_over_sidecars_that_start_again():
    meter = Meter()
    for reading in (
        status(next_calls=3),
        status(next_calls=10),
        {},
        status(next_calls=2),
        status(next_calls=5),
    ):
        meter.read(reading)
    assert meter.total["next_calls"] == 15


def test_the_line_of_progress():
    shown = Metrics(batches_per_s=12.34, nbytes_per_s=4.7e8, stall=0.031, occupancy=0.45, ready=2, desired=3)
    assert console.line(shown) == "12.3 batches/s, 0.470 GB/s, stall 3.1 %, pools 45 % full, feeders 2/3"
    idle = Metrics(batches_per_s=0, nbytes_per_s=0, stall=None, occupancy=None, ready=0, desired=1)
    assert console.line(idle) == "0.0 batches/s, 0.000 GB/s, stall -, pools -, feeders 0/1"


def test_the_summary_names_only_what_happened():
    total = dict.fromkeys(COUNTERS, 0) | {"next_calls": 7, "nbytes": 2 * 10**9, "wait_ns": 1, "step_ns": 1}
    assert console.summary(total, 3.0, 0) == "7 batches, 2.000 GB, 3.0 s, stall 50.0 %"
    assert console.summary(total | {"hedges": 2}, 3.0, 1).endswith(
        "2 hedged, 1 restarts of parts of the service"
    )


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_on_a_terminal_lines_come_above_the_line_of_progress():
    out = Terminal()
    console = Console(out, out)
    console.progress("1 batch/s")
    console.line("trainer-0", "hello", False)
    console.clear()
    assert out.getvalue() == (
        "\r\x1b[Kdataloaderjob: 1 batch/s\r\x1b[K[trainer-0] hello\ndataloaderjob: 1 batch/s\r\x1b[K"
    )


def test_elsewhere_progress_is_a_line_like_others():
    out, err = io.StringIO(), io.StringIO()
    console = Console(out, err)
    console.progress("1 batch/s")
    console.line("feeder-0", "hello", False)
    console.line("trainer-1", "oh", True)
    assert out.getvalue() == "[feeder-0] hello\n"
    assert err.getvalue() == "dataloaderjob: 1 batch/s\n[trainer-1] oh\n"


def see(shutdown: IdleShutdown, now: float, receivers: int | None, starter: bool = True) -> bool:
    return shutdown.see(receivers=receivers, starter_alive=starter, now=now)


def test_a_service_ends_a_while_after_its_last_client():
    shutdown = IdleShutdown(0.0)
    assert not see(shutdown, 10.0, 2)
    assert not see(shutdown, 11.0, 0)
    assert not see(shutdown, 12.0, 1), "another came"
    assert not see(shutdown, 12.0 + LINGER_S - 0.1, 0)
    assert not see(shutdown, 12.0 + LINGER_S + 0.1, None), (
        "a sidecar that is being started again says nothing"
    )
    assert see(shutdown, 12.0 + LINGER_S + 0.2, 0)


def test_a_service_that_nobody_uses_ends():
    shutdown = IdleShutdown(0.0)
    assert not see(shutdown, UNUSED_S - 1, 0)
    assert see(shutdown, UNUSED_S, 0)


def test_a_service_whose_starter_died_first_waits_for_the_other_ranks_only_a_while():
    shutdown = IdleShutdown(0.0)
    assert not see(shutdown, 5.0, 0, starter=False)
    assert see(shutdown, 5.0 + LINGER_S, 0, starter=False)
    used = IdleShutdown(0.0)
    assert not see(used, 5.0, 1, starter=False)
    assert not see(used, 50.0, 1, starter=False), "its clients count, not its starter"
