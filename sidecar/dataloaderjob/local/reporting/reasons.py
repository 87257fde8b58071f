"""The verdict of a report, and the reasons for it. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from dataloaderjob.core.sizing import WORTH, Limit
from dataloaderjob.local.reporting.analysis import TAIL, Analysis
from dataloaderjob.local.reporting.series import FAILED
from dataloaderjob.local.reporting.texts import count

OVERLOADED = 0.3
"""If batches wait for a CPU for more than this share of their build time, the machine counts as too small."""
MOSTLY_OURS = 0.7
"""If a run kept less than this share of an overloaded machine's CPUs busy, something else overloaded it."""
LIMITS = {
    Limit.CPU: "the CPU of the processes that make batches",
    Limit.STORAGE: "storage, or anything else that samples wait for: making a batch takes little CPU",
    Limit.SLOTS: "the number of slots of this iterable dataset (num_workers)",
    Limit.NETWORK: "the link into the trainer's node",
    Limit.RECEIVER: "the process that receives batches",
    Limit.TRAINER: "training itself",
}


def verdict(found: Analysis) -> tuple[str, bool, list[str]]:
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
        yield _overload(found)
    if found.is_heavy_tailed and found.tail is not None:
        yield (
            f"A few slow batches hold up the rest: {found.tail.count:,} of {found.times.sums.count:,} took "
            f"at least {TAIL:g} times as long as the median, and together {found.tail.share:.0%} of all "
            "build time. Make the samples listed below cheaper, or give the loader a larger prefetch_factor= or parts=."
        )
    if advice.feeders > found.feeders:
        more = f"{advice.gain:.2g} times faster"
        average = "With those included, the limit" if found.is_heavy_tailed else "The limit"
        yield (
            f"{average} is {LIMITS[advice.limit]}. {count(advice.feeders, 'feeder')} with one CPU each "
            f"would suffice (this run had {found.feeders}), and would make training up to {more}. The next limit is "
            f"{LIMITS[advice.next_limit]}."
        )
    elif advice.feeders and advice.limit in (Limit.CPU, Limit.STORAGE):
        yield _enough(found, advice.feeders)
    else:
        yield f"More feeders would not help: the limit is {LIMITS[advice.limit]}."


def _enough(found: Analysis, feeders: int) -> str:
    """Returns the sentence about a run with enough feeders for the mean cost of its batches."""
    each = " each" if feeders > 1 else ""
    text = (
        f"Judging by the mean cost of a batch, {count(feeders, 'feeder')} with a free CPU{each} would suffice. "
        f"This run had {found.feeders}."
    )
    if found.queued > OVERLOADED or found.is_heavy_tailed:
        return text
    return (
        f"{text} So something else kept training waiting: look for lost feeders below, and for waits at the start of "
        "an epoch."
    )


def _overload(found: Analysis) -> str:
    """Returns the sentence about feeders that had to wait for a CPU."""
    waited = f"feeders were ready to work, but waited for a CPU during {found.queued:.0%} of the time that batches took"
    if found.own_cpus < MOSTLY_OURS * found.data.cpus:
        return (
            f"This run kept only {found.own_cpus:.1f} of {found.data.cpus} CPUs busy, and still {waited}. Other "
            "programs may use this machine, or the run's CPU limit may be lower. Stop those programs, raise the limit, "
            "or move the feeders to other machines."
        )
    return (
        f"The machine has too few CPUs ({found.data.cpus}): {waited}. More feeders on this machine would not help; "
        "feeders on other machines, or cheaper samples, would."
    )


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
