"""Hostile text on each of its ways: whatever others wrote is one clean line, or clean lines, where people read it."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hostile_texts import HOSTILE, unfit
from hypothesis import given
from hypothesis import strategies as st
from observed_jobs import FEEDERS, HEAD, T0, decided, failed_trainers, live, pod, serving

from dataloaderjob.core import supervision
from dataloaderjob.core.errors import first_line
from dataloaderjob.core.logs import LineFormatter
from dataloaderjob.core.texts import clean, clean_lines
from dataloaderjob.local import console
from dataloaderjob.local.status import History, Snapshot
from dataloaderjob.making import failures
from dataloaderjob.sidecar import metrics
from dataloaderjob.supervisor.feeder_set import FeederSet
from dataloaderjob.supervisor.main import Reports
from dataloaderjob_operator import monitoring
from dataloaderjob_operator.decide import events, supervisor_status

ANY = st.text(st.characters() | st.sampled_from("\x1b\x9b\x9d[]m;\x07\r\n\u2028\u202e "))


@given(ANY, st.integers(1, 60))
def test_clean_text_is_one_short_line_and_stays_as_it_is(text: str, most: int) -> None:
    found = clean(text, most)
    assert unfit(found, most) == []
    assert clean(found, most) == found
    assert found.encode().decode() == found


@given(ANY, st.integers(1, 60))
def test_clean_lines_keep_only_newlines_and_tabs(text: str, most: int) -> None:
    found = clean_lines(text, most)
    assert unfit(found, most, lines=True) == []
    assert clean_lines(found, most) == found
    assert found.encode().decode() == found


@given(st.text(st.characters(categories=["L", "N", "P", "S"], exclude_characters="\x1b")))
def test_text_without_such_characters_is_left_as_it_is(text: str) -> None:
    assert clean(text) == text or len(text) > 4000


def of_status(text: str) -> list[str]:
    """An operator's: what a head reports ends in conditions and events."""
    feeder = {"name": text, "state": "lost", "why": text, "cause": text, "host": text}
    failure = {"sidecar": text, "rank": text, "feeder": text, "reason": text, "text": text}
    message: dict[str, Any] = {
        "type": "status",
        "desired": 4,
        "ready": 1,
        "feeders": [feeder],
        "failures": [failure],
    }
    message["ray"] = {"version": text}
    found = supervisor_status.parse(message)
    assert found.cause is not None
    assert found.failure is not None
    made = decided(replace(serving(), supervisor=found)).status
    texts = [condition.message for condition in made.conditions]
    sent = [event.message for event in events.events_of(serving().status, made)]
    return [found.cause.host, found.cause.text, found.failure.text, found.ray.version, *texts, *sent]


def of_containers(text: str) -> list[str]:
    """An operator's: the last words of a trainer, and a pod's reason."""
    ended = [{"name": "trainer", "state": {"terminated": {"exitCode": 7, "message": text, "reason": text}}}]
    trainers = replace(failed_trainers(serving()), pods=(pod("trainer", containerStatuses=ended),))
    evicted = pod("feeder", started=False) | {"status": {"phase": "Failed", "reason": text, "message": text}}
    feeders = replace(serving(), pods=(evicted,), children=live(HEAD, FEEDERS), refused=text, supervisor=None)
    found = []
    for observed in (trainers, feeders):
        made = decided(observed).status
        found += [condition.message for condition in made.conditions]
        for event in events.events_of(observed.status, made):
            found.append(str(events.manifest(event, observed.job.metadata, T0, "h")["message"]))
    return found


def of_feeders(text: str) -> list[str]:
    """A supervisor's: how a feeder's process ended, and why it is missing."""
    found = FeederSet(2, ready_timeout_s=60.0, drain_timeout_s=10.0)
    found.opened("s", 0.0)
    found.step(0.0)
    found.failed(0, text, 1.0, supervision.Cause.FAILS)
    found.explain(1, text)
    found.trouble(1, supervision.Cause.OUT_OF_MEMORY, text, 1.0)
    return [*found.notes(), *(m.told[1] for m in found.members.values()), supervision.ended_text(1, text)]


def of_sidecars(text: str) -> list[str]:
    """A supervisor's: a failure that a sidecar reports."""
    reports = Reports()
    failure = dict.fromkeys(("rank", "feeder", "reason", "text"), text)
    reports.add("s", {"type": "metrics", "metrics": {}, "receivers": 1, "failures": [failure]})
    return [value for failure in reports.failures() for value in failure.values()]


def of_failures(text: str) -> list[str]:
    """A sidecar's: the line about a batch that failed."""
    payload = {"type": ["m", text], "text": text, "feeder": text, "key": text, "phase": ""}
    return [
        *supervision.describe_failure(json.dumps(payload).encode()).values(),
        first_line(ValueError(text)),
    ]


def of_labels(text: str) -> list[str]:
    """Prometheus' text of a sidecar: each line is a metric, or about one."""
    lines = metrics.prometheus([(text, dict.fromkeys(metrics.KEYS, 0))], text).split("\n")[:-1]
    assert not [line for line in lines if not line.startswith(("#", metrics.PREFIX))]
    return lines


def of_tables(text: str) -> list[str]:
    """What `dataloaderjob status` prints."""
    feeder = {"name": text, "state": text, "seconds": 1, "why": text}
    failure = {"rank": text, "feeder": text, "reason": text, "text": text}
    history = History()
    history.add(Snapshot(at=1.0, supervisor={"feeders": [feeder], "failures": [failure], "notes": [text]}))
    table = console.table_of("job", history)
    return [table.title, table.note, *(cell for row in table.feeders for cell in row)]


def of_logs(text: str) -> list[str]:
    """A process's log, and the operator's in both forms."""
    record = logging.LogRecord("n", logging.INFO, "f", 1, "it said %s", (text,), None)
    forms = [LineFormatter("%(message)s"), *map(monitoring.log_formatter, monitoring.LogFormat)]
    return [form.format(record) for form in forms]


WAYS: list[Callable[[str], list[str]]] = [
    of_status, of_containers, of_feeders, of_sidecars, of_failures, of_labels, of_tables, of_logs,
]  # fmt: skip
MOST = 4200


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE)
def test_hostile_text_is_a_clean_line_on_each_way(way: Callable[[str], list[str]], text: str) -> None:
    made = way(text)
    assert made
    limit = 12 * MOST if way is of_logs else MOST  # JSON escapes characters
    assert {line[:80]: unfit(line, limit) for line in made if unfit(line, limit)} == {}


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE)
def test_feeders_traceback_is_shown_as_clean_lines(text: str) -> None:
    body: dict[str, Any] = {
        "type": ["no_such_module", "Broken"], "text": text, "args": None, "attributes": None, "complete": False,
        "traceback": f"Traceback:\n  {text}", "position": None, "key": text, "phase": "sample", "feeder": text,
    }  # fmt: skip
    made = failures.unpack_failure(json.dumps(body).encode())
    assert unfit(str(made), 200_000, lines=True) == []


def test_traceback_in_a_log_is_indented_below_its_record() -> None:
    try:
        raise ValueError("first\nERROR supervisor: forged\x1b[2J")
    except ValueError as exc:
        record = logging.LogRecord(
            "n", logging.ERROR, "f", 1, "failed", (), (type(exc), exc, exc.__traceback__)
        )
    first, *rest = LineFormatter("%(levelname)s %(message)s").format(record).split("\n")
    assert first == "ERROR failed"
    assert all(line.startswith("  ") for line in rest)
    assert "\x1b" not in "".join(rest)
