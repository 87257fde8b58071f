"""The text of a report: sentences about the events, and the tables beside the charts. Pure."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from dataloaderjob.core.sizing import WORTH, Limit
from dataloaderjob.core.timings import Entry
from dataloaderjob.local.reporting.analysis import TAIL, Analysis, Incident
from dataloaderjob.local.reporting.series import ENDED, FAILED, MEMORY, SERVICE, TROUBLE, Event

OVERLOADED = 0.3
"""If batches wait for a CPU for more than this share of their build time, the machine counts as too small."""
MOST_ROWS, MOST_STORY = 60, 12
LIMITS = {
    Limit.CPU: "the CPU of the processes that make batches",
    Limit.STORAGE: "storage: making a batch mostly waits for data",
    Limit.SLOTS: "the number of slots of this iterable dataset (num_workers)",
    Limit.NETWORK: "the link into the trainer's node",
    Limit.RECEIVER: "the process that receives batches",
    Limit.TRAINER: "training itself",
}


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
    verdict, is_bad, because = _verdict(found)
    return Story(
        verdict=verdict,
        is_bad=is_bad,
        because=because,
        figures=list(_figures(found)),
        lines=list(_lines(found)),
    )


def _verdict(found: Analysis) -> tuple[str, bool, list[str]]:
    failed = [e for e in found.data.series.events if e.kind == FAILED and not e.who.startswith("rank ")]
    if failed:
        return f"The run failed: {failed[0].who}: {failed[0].what}", True, list(_reasons(found))
    if found.waiting is None:
        few = "Too few batches were taken" if found.batches else "No batch was taken yet"
        return f"{few}, so there is nothing to judge.", True, []
    waits = f"training waited for input for {found.waiting:.0%} of its time"
    if found.waiting < WORTH:
        return f"Not limited by input: {waits}.", False, list(_reasons(found))
    return f"Limited by input: {waits}.", True, list(_reasons(found))


def _reasons(found: Analysis) -> Iterator[str]:
    """Yields the reasons why training waited, and the remedies."""
    advice, pipeline, waiting = found.advice, found.pipeline, found.waiting
    if advice is None or pipeline is None or waiting is None:
        return
    if waiting < WORTH:
        yield (
            "The feeders keep up. Watch the ready batches below: while they stay near their maximum, fewer "
            "feeders may suffice."
        )
        return
    if found.data.is_watched:
        yield from _reasons_on_cluster(found)
        return
    if found.queued > OVERLOADED:
        yield (
            f"The machine has too few CPUs ({found.data.cpus}): feeders were ready to work, but had to "
            f"wait for a CPU during {found.queued:.0%} of the time that batches took. More feeders on this "
            "machine would not help; feeders on other machines, or cheaper samples, would."
        )
    if found.is_heavy_tailed and found.tail is not None:
        yield (
            f"A few slow batches hold up the rest: {found.tail.count:,} of {found.times.sums.count:,} took "
            f"at least {TAIL:g} times as long as the median, and together {found.tail.share:.0%} of all "
            "build time. Make the samples listed below cheaper, or use a larger window or parts=."
        )
    if advice.feeders > found.feeders:
        more = f"{advice.gain:.2g} times faster"
        yield (
            f"The limit is {LIMITS[advice.limit]}. {_count(advice.feeders, 'feeder')} with one CPU each "
            f"would suffice (this run had {found.feeders}), and would make training up to {more}. The next limit is "
            f"{LIMITS[advice.next_limit]}."
        )
    elif advice.feeders:
        yield (
            f"Judging by the cost of a batch, {_count(advice.feeders, 'feeder')} with one CPU each would "
            f"suffice, and this run had {found.feeders}. The cause is something else: too few CPUs, slow "
            "batches, a lost feeder or the startup."
        )
    else:
        yield f"More feeders would not help: the limit is {LIMITS[advice.limit]}."


def _reasons_on_cluster(found: Analysis) -> Iterator[str]:
    """Yields the job's own verdict, which is based on more data than the watch. Also yields the lack of CPUs, if
    any."""
    if verdict := found.data.about.get("verdict"):
        yield f"The job's verdict on its last minute: {verdict}."
    if found.queued > OVERLOADED:
        yield (
            f"Feeders have too few CPUs: they were ready to work, but had to wait for a CPU during {found.queued:.0%} "
            "of the time that batches took. Raise spec.feeders.resources, or add nodes."
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
    yield f"{found.batches:,}", f"batches to {_count(len(found.ranks), 'rank')}"
    if found.last_batch_at > began:
        yield f"{found.batches / (found.last_batch_at - began):.3g}/s", "batches, while there were any"
    yield size(found.nbytes), "received"
    lost = f", {_count(len(found.incidents), 'loss')}" if found.incidents else ", none lost"
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
    served = next((r.at for r in found.readings if r.feeders), None)
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
        lost = "" if counts.get("failures") else " No batch was lost."
        yield (
            f"Because feeders were lost or late, {_count(again, 'batch')} had to be requested from other "
            f"feeders.{lost}"
        )
    if counts.get("hedges"):
        yield (
            f"A second feeder was also asked for {_count(counts['hedges'], 'late batch')}; the first copy "
            "counted."
        )
    if counts.get("failures"):
        yield f"{_count(counts['failures'], 'batch')} failed for good: user code raised an error or killed its process."


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
    names = Counter(entry.text for entry in times.samples)
    again = [f"{text} ({n} times)" for text, n in names.most_common(3) if n > 1]
    if again and found.is_heavy_tailed:
        yield f"The same samples are slow every time: {', '.join(again)}."


def _end(found: Analysis) -> Iterator[str]:
    ended = [e for e in found.data.series.events if e.kind == ENDED]
    if ended:
        yield f"At {clock(ended[-1].at)}, the last of {_count(len(ended), 'trainer')} ended without an error."
    elif found.data.is_watched:
        yield "The job was still running when the watch ended."
    elif found.data.is_live:
        yield "The run is still in progress; this page shows it so far."


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
    count = max(1, sums.count)
    rows = [
        (name, duration(ns / 1e9 / count), f"{ns / max(1, sums.wall_ns):.0%}")
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
    count = max(1, sums.count)
    rows = [
        ("time of a batch in one feeder", duration(sums.wall_ns / 1e9 / count)),
        ("variation of that time", f"{sums.spread:.0%}"),
        ("time on a CPU", duration(sums.cpu_ns / 1e9 / count)),
        ("time ready, but without a CPU", duration(sums.queued_ns / 1e9 / count)),
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
        ("time of a batch in one process", duration(pipeline.wall_s)),
        ("variation of that time", f"{pipeline.spread:.0%}"),
        ("size of a batch", size(pipeline.nbytes)),
        ("limit", str(advice.limit)),
        ("feeders that would suffice", str(advice.feeders) if advice.feeders else "those of this run"),
        ("possible speed", f"{advice.gain:.2g} times"),
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


# Numbers as text


def duration(seconds: float) -> str:
    for unit, factor in (("s", 1.0), ("ms", 1e3), ("µs", 1e6)):
        if seconds * factor >= 1:
            value = seconds * factor
            return f"{value:.3g} {unit}" if value < 1000 else f"{value:,.0f} {unit}"
    return f"{seconds * 1e6:.2g} µs" if seconds else "0"


def span(seconds: float) -> str:
    """Formats a duration: `1.4 s`, `85 s`, `12 min`, `3 h 05`."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    if seconds < 120:
        return f"{seconds:.0f} s"
    minutes = int(seconds // 60)
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60:02}"


def clock(seconds: float) -> str:
    """Formats the time since the start of the run: `42.5 s`, `12:05`, `3:12:05`."""
    if seconds < 120:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02} min"


def size(nbytes: float) -> str:
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if nbytes >= factor:
            return f"{nbytes / factor:.3g} {unit}"
    return f"{nbytes:.0f} bytes"


def when(unix: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(unix))


def _count(number: int, what: str) -> str:
    plural = f"{what}es" if what.endswith(("ch", "ss")) else f"{what}s"
    return f"{number:,} {what if number == 1 else plural}"
