"""The report as one HTML file, which opens without a network. Jinja escapes all text; only charts are markup."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from dataloaderjob import __version__
from dataloaderjob.local.reporting import charts, story
from dataloaderjob.local.reporting.analysis import Analysis
from dataloaderjob.local.reporting.charts import Chart
from dataloaderjob.local.reporting.rundata import RunData
from dataloaderjob.local.reporting.story import Table

TEMPLATE = "page.html"
FOOTER = (
    "Made by dataloaderjob {} of {} readings. Shares of waiting are those that the training loop saw in next(). On a "
    "GPU, kernels are queued, and the share then looks larger than it is."
)
WAITING = (
    "The share of its time that each rank spent waiting in next(). Near 0 is good: training never waits. Near 100 % "
    "means that training stands still for want of batches. The numbers of ranks include the wait for the first batch."
)
READY = (
    "Batches that are in a rank's pool and not yet taken. A line that stays high means that feeders are ahead of "
    "training. A line at 0 means that each batch is awaited. A high line while training waits means that one late "
    "batch holds up the others, because their order is fixed."
)
BYTES = (
    "All ranks together received {}. A rate that is flat at the speed of a link or a disk, while training waits, "
    "points to that link or disk."
)
MADE = (
    "Feeders made {:,} batches: {}. One narrow hill means that all batches cost the same. A second hill far to the "
    "right are slow batches, and the tables name them."
)
QUEUED = (
    "During {:.0%} of this time a feeder was ready to work, but other processes had the CPUs. Times of single samples "
    "are then longer than their work."
)
CPU = (
    "CPUs that this run kept busy, at most {:.1f} of the machine's {}. If the stack reaches the dashed line, feeders "
    "and training compete for the machine, and more feeders need more CPUs. If it stays far below it while training "
    "waits, feeders wait for storage, or for CPUs that other programs have."
)


@dataclass(frozen=True, slots=True)
class Section:
    """A chart with what to see in it, and tables."""

    title: str
    text: Sequence[str]
    chart: Chart | None = None
    tables: Sequence[Table] = field(default=())


def render(data: RunData) -> str:
    found = Analysis(data)
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=StrictUndefined
    )
    return environment.get_template(TEMPLATE).render(
        title=f"{data.name}: report",
        name=data.name,
        subtitle=_subtitle(found),
        story=story.story(found),
        sections=[_as_markup(section) for section in _sections(found)],
        footer=FOOTER.format(__version__, len(found.readings)),
    )


def _as_markup(section: Section) -> dict[str, object]:
    chart = section.chart
    return {
        "title": section.title, "text": section.text, "tables": section.tables,
        "chart": None if chart is None else {"wide": Markup(chart.wide), "narrow": Markup(chart.narrow)},  # noqa: S704
    }  # fmt: skip


def _subtitle(found: Analysis) -> str:
    data = found.data
    began = f"Started {story.when(data.started)}, feeders by the provider {data.about.get('provider')}"
    live = " The run is live." if data.is_live else ""
    earlier = f" The record has {data.earlier} earlier runs, which are not shown." if data.earlier else ""
    return f"{began}.{live}{earlier}"


def _sections(found: Analysis) -> Iterator[Section]:
    if found.spans and found.ranks:
        yield Section(
            "Waiting",
            [WAITING],
            charts.waiting(found),
            [story.ranks(found)],
        )
        yield Section(
            "Ready batches",
            [READY],
            charts.ready(found),
        )
    yield from _feeders(found)
    yield from _times(found)
    if found.spans:
        yield Section(
            "Bytes",
            [BYTES.format(story.size(found.nbytes))],
            charts.throughput(found),
        )
        yield Section("CPU", [_cpu(found)], charts.cpus(found), [story.processes(found)])
    if (table := story.model(found)) is not None:
        yield Section(
            "Basis of the verdict",
            ["Means over the whole run. Each resource bounds the rate, and the lowest bound is the limit."],
            None,
            [table],
        )


def _feeders(found: Analysis) -> Iterator[Section]:
    if not found.spans:
        return
    marks = (
        "Red lines with numbers, here and above, are the numbered losses under What happened."
        if found.incidents
        else "No feeder was lost."
    )
    dropped = found.data.series.dropped_events
    text = [f"Feeders that served, and the number that was wanted. {marks}"]
    if dropped:
        text.append(f"{dropped} further events were not kept.")
    yield Section("Feeders and events", text, charts.feeders(found), [story.events(found)])


def _times(found: Analysis) -> Iterator[Section]:
    sums = found.times.sums
    if not sums.count:
        yield Section(
            "Times of batches",
            ["No feeder of this run measured any: batches were made elsewhere, or in the trainer."],
        )
        return
    quantiles = [(q, found.times.quantile(q)) for q in (0.5, 0.9, 0.99)]
    said = ", ".join(f"{q:.0%} within {story.duration(t)}" for q, t in quantiles if t is not None)
    text = [MADE.format(sums.count, said)]
    if found.queued > story.OVERLOADED:
        text.append(QUEUED.format(found.queued))
    yield Section("Times of batches", text, charts.build_times(found), [story.parts(found)])
    yield Section(
        "Slowest batches and samples",
        ["Times since the start of the run. A sample that is slow each time it is made is worth a look."],
        None,
        [story.slow_batches(found), story.slow_samples(found)],
    )


def _cpu(found: Analysis) -> str:
    busy = [sum(span.cpus.values()) for span in found.spans]
    return CPU.format(max(busy, default=0.0), found.data.cpus)
