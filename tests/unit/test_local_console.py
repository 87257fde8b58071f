"""What is shown of a run, from readings of the sidecar's counters."""

from __future__ import annotations

import io
import os

import pytest

from dataloaderjob.core.supervision import COUNTERS
from dataloaderjob.local import console
from dataloaderjob.local.console import HELD_CHARS, Console, Table
from dataloaderjob.local.service import LINGER_S, UNUSED_S, IdleShutdown
from dataloaderjob.local.status import History, Snapshot


def test_progress_line_shows_rates_stall_pools_and_feeders():
    history = History()
    assert console.progress_line(history, 1) == "0.0 batches/s, 0.000 GB/s, stall -, pools -, feeders 0/1"
    receiver = {"rank": "0", "trainer": 1, "receiver": 2, "used_nbytes": 45, "pool_nbytes": 100}
    for at, counted in (
        (0.0, {}),
        (10.0, {"next_calls": 123, "nbytes": 47 * 10**8, "wait_ns": 31, "step_ns": 969}),
    ):
        sidecar = {"totals": counted, "receivers": [receiver | counted]}
        history.add(Snapshot(at=at, sidecar=sidecar, supervisor={"ready": 2}))
    shown = console.progress_line(history, 3)
    assert shown == "12.3 batches/s, 0.470 GB/s, stall 3.1%, pools 45% full, feeders 2/3"


def test_summary_lists_only_events_that_happened():
    total = dict.fromkeys(COUNTERS, 0) | {"next_calls": 7, "nbytes": 2 * 10**9, "wait_ns": 1, "step_ns": 1}
    assert console.summary(total, 3.0, 0) == "7 batches, 2.000 GB, 3.0 s, stall 50.0%"
    assert console.summary(total | {"hedges": 2}, 3.0, 1).endswith(
        "2 hedged, 1 restarts of parts of the service"
    )
    with_a_stage = total | {"stage_ns": 7 * 3_140_000}
    assert console.summary(with_a_stage, 3.0, 0).endswith("stall 50.0%, device stage 3.1 ms")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def on_terminal() -> tuple[Terminal, Console, Clock]:
    out, clock = Terminal(), Clock()
    return out, Console(out, Terminal(), env={"TERM": "xterm"}, clock=clock), clock


def taken(out: io.StringIO) -> str:
    """What was written since."""
    text = out.getvalue()
    out.seek(0)
    out.truncate()
    return text


TABLE = Table(title="small")


def test_lines_on_a_terminal_are_printed_above_the_table():
    out, console, clock = on_terminal()
    console.show(TABLE)
    drawn = taken(out)
    assert "small" in drawn
    clock.now = 1.0
    console.line("trainer-0", "hello", False)
    assert taken(out) == f"\r\x1b[1A\x1b[J[trainer-0] hello\n{drawn}"
    console.clear()
    assert taken(out) == "\r\x1b[1A\x1b[J"
    console.line("trainer-0", "bye", True)
    assert taken(out) == "[trainer-0] bye\n"


def test_flood_of_lines_is_written_in_one_go():
    out, console, clock = on_terminal()
    console.show(TABLE)
    drawn = taken(out)
    for number in range(3):
        console.line("", str(number), False)
    assert taken(out) == ""
    console.flush()
    assert taken(out) == f"\r\x1b[1A\x1b[J0\n1\n2\n{drawn}"
    console.flush()
    assert taken(out) == "", "there is nothing to write"
    console.line("", "x" * HELD_CHARS, False)
    assert len(taken(out)) > HELD_CHARS, "no more than so much is held back"
    console.line("", "last", False)
    console.leave()
    assert taken(out).endswith(f"last\n{drawn}")
    clock.now = 1.0
    console.line("", "below", False)
    assert taken(out) == "below\n", "the table stands where it is"


@pytest.mark.parametrize(
    ("printed", "shown"),
    [
        pytest.param("\x1b[31mred", "\x1b[31mred\x1b[0m", id="a-colour-ends-with-its-line"),
        pytest.param("a\x1b[2Ab\x1b[?25lc\x1b[2J", "abc", id="the-cursor-stays"),
        pytest.param("\x1b]0;title\x07a\x1b]8;;http://x\x1b\\b", "ab", id="titles-and-links"),
        pytest.param("a\x1bMb\x1bc\b\x0bd\te", "abd\te", id="single-characters"),
    ],
)
def test_printed_text_cannot_move_the_cursor(printed: str, shown: str):
    out, console, _ = on_terminal()
    console.line("", printed, False)
    assert taken(out) == f"{shown}\n"


def test_character_unknown_to_the_terminal_becomes_a_question_mark():
    raw = io.BytesIO()
    console = Console(io.TextIOWrapper(raw, "latin-1"), io.StringIO())
    console.line("trainer-0", "50 \u20ac", False)
    assert raw.getvalue() == b"[trainer-0] 50 ?\n"


@pytest.mark.parametrize(
    ("out", "err", "env"),
    [
        pytest.param(io.StringIO(), io.StringIO(), {"TERM": "xterm"}, id="files"),
        pytest.param(io.StringIO(), Terminal(), {"TERM": "xterm"}, id="a-file-and-a-terminal"),
        pytest.param(Terminal(), Terminal(), {"TERM": "dumb"}, id="a-terminal-that-cannot-be-drawn-on"),
    ],
)
def test_without_a_terminal_all_lines_are_plain(out: io.StringIO, err: io.StringIO, env: dict[str, str]):
    console = Console(out, err, env=env)
    assert not console.live
    console.say("1 batch/s")
    console.line("feeder-0", "hello", False)
    console.line("trainer-1", "oh", True)
    console.clear()
    assert out.getvalue() == "[feeder-0] hello\n"
    assert err.getvalue() == "dataloaderjob: 1 batch/s\n[trainer-1] oh\n"


def see(shutdown: IdleShutdown, now: float, receivers: int | None, starter: bool = True) -> bool:
    return shutdown.see(receivers=receivers, starter_alive=starter, now=now)


def test_a_service_ends_a_while_after_its_last_client():
    shutdown = IdleShutdown(0.0)
    assert not see(shutdown, 10.0, 2)
    assert not see(shutdown, 11.0, 0, starter=False)
    assert not see(shutdown, 12.0, 1, starter=False), "another came"
    assert not see(shutdown, 12.0 + LINGER_S - 0.1, 0, starter=False)
    assert not see(shutdown, 12.0 + LINGER_S + 0.1, None, starter=False), (
        "a sidecar that is being started again says nothing"
    )
    assert see(shutdown, 12.0 + LINGER_S + 0.2, 0, starter=False)


def test_a_service_lives_as_long_as_the_script_that_has_used_it():
    shutdown = IdleShutdown(0.0)
    assert not see(shutdown, 10.0, 1)
    assert not see(shutdown, 100_000.0, 0), "a notebook's next loader may come"
    assert not see(shutdown, 100_001.0, 0, starter=False)
    assert see(shutdown, 100_001.0 + LINGER_S, 0, starter=False)


def test_service_without_clients_ends():
    shutdown = IdleShutdown(0.0)
    assert not see(shutdown, UNUSED_S - 1, 0)
    assert see(shutdown, UNUSED_S, 0)


def test_service_with_a_dead_starter_waits_briefly_for_other_ranks():
    shutdown = IdleShutdown(0.0)
    assert not see(shutdown, 5.0, 0, starter=False)
    assert see(shutdown, 5.0 + LINGER_S, 0, starter=False)
    used = IdleShutdown(0.0)
    assert not see(used, 5.0, 1, starter=False)
    assert not see(used, 50.0, 1, starter=False), "its clients count, not its starter"


def test_text_for_a_closed_terminal_fails_neither_then_nor_at_the_end():
    ours, theirs = os.openpty()
    with open(theirs, "w") as stream:
        os.close(ours)
        shown = Console(stream, stream, env={"TERM": "dumb"})
        shown.say("the terminal is gone")
        shown.say("and nobody reads this either")
