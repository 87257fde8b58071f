"""The text of a report: sentences about the events, and the tables beside the charts. Pure."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from dataloaderjob.core.timings import Entry
from dataloaderjob.local.reporting import reasons
from dataloaderjob.local.reporting.analysis import Analysis, Incident
from dataloaderjob.local.reporting.series import ENDED, FAILED, MEMORY, SERVICE, STARTED, TROUBLE, Event
from dataloaderjob.local.reporting.texts import clock, count, duration, size, span

MOST_ROWS, MOST_STORY, MOST_SAMPLES = 60, 12, 6
SAME_S = 10.0
"""If a batch was made again within this time, its samples were not slow again: a second feeder made the same batch."""


@dataclass(frozen=True, slots=True)
class Table:
    """A table of a report."""

    heads: Sequence[str]
    rows: Sequence[Sequence[str]]
    numbers: Sequence[int] = ()
    """Indices of columns that are aligned to the right."""
    title: str = ""
    texts: Sequence[int] = ()
    """Indices of columns in which a line may break within a word."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Story:
    """The top part of a report."""

    verdict: str
    is_bad: bool
    because: Sequence[str] = ()
    figures: Sequence[tuple[str, str]] = ()
    lines: Sequence[str] = field(default=())


def story(found: Analysis) -> Story:
    verdict, is_bad, because = reasons.verdict(found)
    return Story(
        verdict=verdict,
        is_bad=is_bad,
        because=because,
        figures=list(_figures(found)),
        lines=list(_lines(found)),
    )


def _figures(found: Analysis) -> Iterator[tuple[str, str]]:
    yield (
        "-" if found.waiting is None else f"{found.waiting:.0%}",
        "of training's time spent waiting, after the first batches",
    )
    began = found.first_batch_at or 0.0
    if found.data.is_watched:
        yield span(found.last.at), "watched"
    else:
        yield span(found.last.at), f"long, the first batch after {span(began)}"
    yield f"{found.batches:,}", f"batches to {count(len(found.ranks), 'rank')}"
    if found.last_batch_at > began:
        yield f"{found.batches / (found.last_batch_at - began):.3g}/s", "batches, while there were any"
    yield size(found.nbytes), "received"
    lost = f", {count(len(found.incidents), 'loss')}" if found.incidents else ", none lost"
    yield str(found.feeders), f"feeders most of the time{lost}"


def _lines(found: Analysis) -> Iterator[str]:
    """Yields sentences about the course of a run, from its start to its end."""
    if not found.data.is_watched:
        yield from _start(found)
    for number, incident in enumerate(found.incidents[:MOST_STORY], 1):
        yield _incident(number, incident)
    if len(found.incidents) > MOST_STORY:
        yield f"Feeders were lost {len(found.incidents) - MOST_STORY} more times: see the events below."
    yield from _asked_again(found)
    for event in found.data.series.events:
        if event.kind in (SERVICE, FAILED) or (event.kind == TROUBLE and not event.who.startswith("feeder-")):
            yield f"{clock(event.at)}: {event.who}: {event.what}"
    yield from _slow(found)
    yield from _end(found)


def _start(found: Analysis) -> Iterator[str]:
    started = [e.at for e in found.data.series.events if e.kind == STARTED and e.who.startswith("feeder-")]
    served = min([*started, *(r.at for r in found.readings if r.feeders)], default=None)
    if served is not None:
        yield (
            f"The first feeder was serving after {span(served)}, and training got its first batch after "
            + (
                f"{span(found.first_batch_at)}."
                if found.first_batch_at is not None
                else ("... (it has none yet).")
            )
        )
    elif found.readings:
        yield f"No feeder has served within {span(found.last.at)}."


def _incident(number: int, incident: Incident) -> str:
    event = incident.event
    how = "ran out of memory" if event.kind == MEMORY else "was lost"
    text = f"[{number}] At {clock(event.at)} {event.who} {how}: {event.what}."
    if incident.back_s is None:
        text += " It did not serve again."
    elif incident.back_s < 0.05:
        text += " Another process replaced it at once."
    else:
        text += f" Another process replaced it {span(incident.back_s)} later."
    if incident.before is not None and incident.after is not None:
        text += (
            f" Training waited for {incident.before:.0%} of its time before, and for {incident.after:.0%} "
            "just after."
        )
    return text


def _asked_again(found: Analysis) -> Iterator[str]:
    counts = found.last.counts
    if not found.incidents and counts.get("feeders_lost"):
        yield f"Connections to feeders broke {counts['feeders_lost']} times."
    if again := counts.get("retries", 0):
        why = "was lost or did not respond" if found.incidents else "did not respond in time"
        yield f"{count(again, 'batch')} had to be requested from another feeder, because the usual one {why}."
    if hedges := counts.get("hedges"):
        yield (
            f"{count(hedges, 'batch')} took unusually long and so a second feeder was asked, too; the first copy "
            "counted."
        )
    if (again or hedges) and not counts.get("failures"):
        yield "No batch was lost: training got each batch once, in the usual order and with the same contents."
    if counts.get("failures"):
        yield f"{count(counts['failures'], 'batch')} failed for good: user code raised an error or killed its process."


def _slow(found: Analysis) -> Iterator[str]:
    times = found.times
    median = times.quantile(0.5)
    if median is None or not times.batches:
        return
    worst = times.batches[0]
    yield (
        f"Half of the batches took less than {duration(median)} to make; the slowest took "
        f"{duration(worst.took_ns / 1e9)} (batch {worst.ticket}, {of_which(worst)})."
    )
    names = Counter(entry.text for entry in _distinct(times.samples))
    again = [f"{text} ({n} times)" for text, n in names.most_common() if n > 1]
    if again and found.is_heavy_tailed:
        more = f" and {len(again) - MOST_SAMPLES} more" if len(again) > MOST_SAMPLES else ""
        yield f"These samples were slow more than once: {', '.join(again[:MOST_SAMPLES])}{more}."


def _distinct(entries: Sequence[Entry]) -> list[Entry]:
    """Omits entries of a batch that several feeders made at about the same time."""
    found: list[Entry] = []
    for entry in sorted(entries, key=lambda one: one.at_ns):
        if not any(
            (one.text, one.ticket, one.slot) == (entry.text, entry.ticket, entry.slot)
            and entry.at_ns - one.at_ns < SAME_S * 1e9
            for one in found
        ):
            found.append(entry)
    return found


def _end(found: Analysis) -> Iterator[str]:
    ended = [e for e in found.data.series.events if e.kind == ENDED]
    if ended:
        yield f"At {clock(ended[-1].at)}, the last of {count(len(ended), 'trainer')} ended without an error."
    elif found.data.is_watched:
        yield "The job was still running when the watch ended."
    elif found.data.is_live:
        yield "The run is still in progress; this page shows it so far."
    elif found.batches:
        yield f"Training took its last batch by {clock(found.last_batch_at)}. The run ended by {clock(found.last.at)}."


# Tables


def ranks(found: Analysis) -> Table:
    rows = []
    for rank in found.ranks[:MOST_ROWS]:
        reading, waited = found.last.ranks[rank], found.waiting_of(rank)
        calls = max(1, reading.next_calls)
        rows.append((
            rank, f"{reading.next_calls:,}", "-" if waited is None else f"{waited:.0%}",
            duration(reading.wait_ns / 1e9 / calls), duration(reading.step_ns / 1e9 / calls),
        ))  # fmt: skip
    return Table(("rank", "batches", "waited", "wait per batch", "step without waiting"), rows, (1, 2, 3, 4))


def events(found: Analysis) -> Table:
    numbers = {id(incident.event): str(n) for n, incident in enumerate(found.incidents, 1)}
    rows = [_event_row(event, numbers) for event in found.data.series.events]
    shown = rows if len(rows) <= MOST_ROWS else [*rows[: MOST_ROWS // 2], *rows[-MOST_ROWS // 2 :]]
    return Table(("", "time", "who", "event", "details"), shown, (1,), texts=(4,))


def _event_row(event: Event, numbers: dict[int, str]) -> Sequence[str]:
    return numbers.get(id(event), ""), clock(event.at), event.who, event.kind, event.what


def slow_batches(found: Analysis) -> Table:
    rows = [(duration(e.took_ns / 1e9), _place(e), of_which(e), _when(e, found)) for e in found.times.batches]
    return Table(("took", "batch", "slowest sample", "at"), rows, (0,), "The slowest batches", (2,))


def slow_samples(found: Analysis) -> Table:
    rows = [
        (duration(e.took_ns / 1e9), e.text or "-", _place(e), _when(e, found)) for e in found.times.samples
    ]
    return Table(("took", "sample", "batch", "at"), rows, (0,), "The slowest samples", (1,))


def parts(found: Analysis) -> Table:
    """Returns a table of the mean cost of each part of a batch."""
    sums = found.times.sums
    made = max(1, sums.count)
    rows = [
        (name, duration(ns / 1e9 / made), f"{ns / max(1, sums.wall_ns):.0%}")
        for name, ns in (
            ("samples (__getitem__)", sums.fetch_ns), ("collate_fn", sums.collate_ns), ("encoding", sums.encode_ns),
            ("total", sums.wall_ns), ("time on a CPU", sums.cpu_ns),
            ("time ready, but without a CPU", sums.queued_ns),
        )
    ]  # fmt: skip
    return Table(("part of a batch", "mean time", "share"), rows, (1, 2))


def costs(found: Analysis) -> Table:
    """Returns a table of the mean cost of a batch, for a run with only sums of batch times."""
    sums = found.times.sums
    made = max(1, sums.count)
    rows = [
        ("time of a batch in one feeder", duration(sums.wall_ns / 1e9 / made)),
        ("variation of that time", f"{sums.spread:.0%}"),
        ("time on a CPU", duration(sums.cpu_ns / 1e9 / made)),
        ("time ready, but without a CPU", duration(sums.queued_ns / 1e9 / made)),
    ]
    return Table(("mean of a batch", ""), rows, (1,))


def processes(found: Analysis) -> Table:
    rows = sorted(found.last.cpu.items(), key=lambda item: -item[1])[:MOST_ROWS]
    total = max(1e-9, sum(found.last.cpu.values()))
    shown = [(_role(role), f"{seconds:.1f} s", f"{seconds / total:.0%}") for role, seconds in rows]
    return Table(("process", "CPU time", "share"), shown, (1, 2))


def model(found: Analysis) -> Table | None:
    """Returns the numbers on which the verdict is based; None if there is no verdict."""
    pipeline, advice = found.pipeline, found.advice
    if pipeline is None or advice is None:
        return None
    rows = [
        ("a step, with waiting", duration(pipeline.period_s)),
        ("a step without waiting", duration(pipeline.step_s)),
        ("CPU time of a batch", duration(pipeline.cpu_s)),
        ("time of a batch, without waiting for a CPU", duration(pipeline.wall_s)),
        ("variation of that time", f"{pipeline.spread:.0%}"),
        ("size of a batch", size(pipeline.nbytes)),
        ("limit", str(advice.limit)),
        ("feeders that would suffice", str(advice.feeders) if advice.feeders else "those of this run"),
        ("speed with enough feeders and CPUs", f"{advice.gain:.2g} times this run's"),
    ]
    if found.data.is_watched:  # the job has a verdict of its own
        rows = rows[:-3]
    return Table(("measured", ""), rows, (1,))


def _role(role: str) -> str:
    if role.startswith("rank "):
        return f"trainer of {role}"
    feeder, is_making, _ = role.partition(", batches")
    return f"{feeder}, making batches" if is_making else role


def _place(entry: Entry) -> str:
    return f"{entry.ticket}" if entry.slot < 0 else f"{entry.ticket} of slot {entry.slot}"


def of_which(entry: Entry) -> str:
    if not entry.sample_ns:
        return entry.text or "-"
    return f"{entry.text}: {duration(entry.sample_ns / 1e9)}"


def _when(entry: Entry, found: Analysis) -> str:
    if found.data.is_watched:  # the batch may be from before the watch
        return time.strftime("%H:%M:%S", time.localtime(entry.at_ns / 1e9))
    return clock(max(0.0, entry.at_ns / 1e9 - found.data.started))
