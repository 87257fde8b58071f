"""The advice, derived from the ranks' results, as text, JSON and a manifest. This module is pure."""

from __future__ import annotations

import dataclasses
import json
import math
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dataloaderjob.core.sizing import WORTH, Advice, Limit, Pipeline, advise

LIMITS = {
    Limit.CPU: "the CPU of the processes that make batches",
    Limit.STORAGE: "storage: making a batch mostly waits for data",
    Limit.SLOTS: "the number of sources of this iterable dataset (num_workers)",
    Limit.NETWORK: "the link into the trainer's node",
    Limit.RECEIVER: "the process that receives batches on the trainer's node",
    Limit.TRAINER: "training itself",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The advice for one script, with the results on which it is based."""

    script: str
    world: int
    local_ranks: int
    steps: int
    replayed: int
    dataset: str
    batch_size: int | None
    workers: int
    has_feeders: bool
    """True if the script already uses this package's loader."""
    pipeline: Pipeline
    advice: Advice
    fetch_cpu_s: float
    collate_cpu_s: float
    encode_cpu_s: float
    free_cpus: float | None
    """Number of this machine's CPUs that training leaves free; None if unknown."""
    cpus: int
    cannot_ship: str
    refused: str
    shipped_nbytes: int
    others_cpus: float = 0.0
    """Number of CPUs that other programs used, if that makes the measurement doubtful; otherwise 0."""


def verdict(
    command: Sequence[str], results: Sequence[dict[str, Any]], *, cpus: int, link: float | None = None
) -> Verdict:
    """Returns the advice. `results` are the results of all ranks on this node; one of them includes the cost of a
    batch. Ranks on other nodes are assumed to have the same results."""
    (costs,) = [one for one in results if "made" in one][:1]
    made, ranks = costs["made"], max(one["world"] for one in results)
    slowest = max(results, key=lambda one: one["period_s"])
    cpu_s = made["fetch_cpu_s"] + made["collate_cpu_s"] + made["encode_cpu_s"]
    pipeline = Pipeline(
        period_s=slowest["period_s"],
        step_s=min(slowest["period_s"], max(one["step_s"] for one in results)),
        cpu_s=cpu_s,
        wall_s=cpu_s + made["idle_s"],
        nbytes=made["nbytes"],
        spread=made["spread"],
        ranks=ranks,
        slots=costs["slots"],
        link=link,
    )
    busy = [one["busy_cpus"] for one in results if one["busy_cpus"] is not None]
    return Verdict(
        script=_script(command), world=ranks, local_ranks=len(results), steps=min(one["steps"] for one in results),
        replayed=min(one["replayed"] for one in results), dataset=costs["dataset"], batch_size=costs["batch_size"],
        workers=costs["workers"], has_feeders=costs["has_feeders"],
        pipeline=pipeline, advice=advise(pipeline), fetch_cpu_s=made["fetch_cpu_s"],
        collate_cpu_s=made["collate_cpu_s"], encode_cpu_s=made["encode_cpu_s"],
        free_cpus=max(0.0, cpus - sum(busy)) if len(busy) == len(results) else None, cpus=cpus,
        cannot_ship=costs.get("cannot_ship", ""), refused=made["refused"],
        shipped_nbytes=costs.get("shipped_nbytes", 0),
    )  # fmt: skip


def _script(command: Sequence[str]) -> str:
    scripts = [word for word in command if word.endswith(".py")]
    return scripts[0] if scripts else shlex.join(command)


def as_json(found: Verdict) -> dict[str, Any]:
    advice = found.advice
    return {
        "input_bound": round(advice.waiting, 4),
        "gain": round(advice.gain, 3),
        "feeders": advice.feeders,
        "limit": str(advice.limit),
        "next_limit": str(advice.next_limit),
        "cpus": round(advice.cpus, 2),
        "link_bytes_per_s": round(advice.link),
        "one_more": round(advice.one_more, 3),
        "workers_suffice": workers_that_suffice(found),
        "script": found.script,
        "ranks": found.world,
        "steps": found.steps,
        "steps_without_input": found.replayed,
        "pipeline": dataclasses.asdict(found.pipeline),
        "free_cpus": found.free_cpus,
        "others_cpus": round(found.others_cpus, 2) or None,
        "cannot_ship": found.cannot_ship or None,
        "cannot_travel": found.refused or None,
    }


def workers_that_suffice(found: Verdict) -> int | None:
    """Returns the number of torch workers per rank that would make feeders unnecessary on this machine. Returns None if
    no number would suffice."""
    advice = found.advice
    if not advice.feeders or found.free_cpus is None or found.local_ranks != found.world:
        return None
    return math.ceil(advice.feeders / found.world) if advice.cpus <= 0.9 * found.free_cpus else None


def lines(found: Verdict) -> list[str]:
    """Returns about twenty lines of text, starting with the verdict."""
    return [*_head(found), "", *_measured(found), *(_remedy(found) if found.advice.feeders else [])]


def _head(found: Verdict) -> list[str]:
    advice, pipeline = found.advice, found.pipeline
    waits = f"{found.script} waits for input for {advice.waiting:.0%} of each step"
    if advice.feeders:
        times = f"{_time(pipeline.period_s)}, and {_time(pipeline.step_s)} without waiting"
        return [f"{waits}.", f"At most a {advice.gain:.2g}-fold speedup is possible: a step takes {times}."]
    if advice.waiting < WORTH:
        return [f"Nothing to gain: {waits}."]
    return [f"Feeders cannot help: {waits}, and the limit is {LIMITS[advice.limit]}."]


def _row(name: str, text: str) -> str:
    return f"  {name:<12}{text}"


def _measured(found: Verdict) -> list[str]:
    pipeline = found.pipeline
    ranks = f"{found.world} rank{'s' if found.world > 1 else ''}"
    without = (
        f"{found.replayed} without input"
        if found.replayed
        else ("none without input, because the script ended first")
    )
    parts = (
        f"{found.fetch_cpu_s:.2g} for samples, {found.collate_cpu_s:.2g} in collate_fn, "
        f"{found.encode_cpu_s:.2g} for encoding"
    )
    return [
        _row(
            "loader", f"{found.dataset}, batch_size={found.batch_size}, num_workers={found.workers}, {ranks}"
        ),
        _row("observed", f"{found.steps} steps, {without}"),
        *_doubt(found),
        _row("a batch", f"{_bytes(pipeline.nbytes)}, {pipeline.cpu_s:.2g} CPU-s: {parts}"),
        _row("", f"{_time(pipeline.wall_s)} in one process (±{pipeline.spread:.0%})"),
        _row("limit", LIMITS[found.advice.limit]),
    ]


def _doubt(found: Verdict) -> list[str]:
    if not found.others_cpus:
        return []
    busy = f"other programs kept {found.others_cpus:.1f} of this machine's CPUs busy, and none was free"
    return [_row("doubtful", f"{busy}: the waiting may be theirs. Repeat this on an idle machine.")]


def _remedy(found: Verdict) -> list[str]:
    advice = found.advice
    number = (
        f"{advice.feeders} feeder{'s' if advice.feeders > 1 else ''} with one CPU each, {advice.cpus:.2g} "
        "CPUs busy"
    )
    link = f"{_bytes(advice.link)}/s to the trainers ({advice.link * 8 / 1e9:.2g} Gbit/s)"
    more = "nothing" if advice.one_more < 1.005 else f"{advice.one_more - 1:.0%}"
    rows = [
        _row("suffices", f"{number}; {link}"),
        _row("then", f"the limit is {LIMITS[advice.next_limit]}; one more feeder gains {more}"),
        *_here(found),
    ]
    if found.cannot_ship:
        rows.append(_row("to change", " ".join(found.cannot_ship.split())))
    elif found.shipped_nbytes:
        rows.append(_row("to send", f"everything can be sent to feeders: {_bytes(found.shipped_nbytes)}"))
    if found.refused:
        rows.append(_row("batches", " ".join(found.refused.split())))
    return [*rows, "", _next(found), ""]


def _next(found: Verdict) -> str:
    """Returns the sentence that introduces the manifest."""
    if found.has_feeders:
        return "The script already uses dataloaderjob.DataLoader. For more feeders, start from this manifest:"
    change = (
        "replace torch.utils.data.DataLoader with dataloaderjob.DataLoader, and start from this manifest:"
    )
    workers = workers_that_suffice(found)
    if workers is not None and workers > found.workers:
        return f"Try num_workers={workers} first. To use other CPUs, {change}"
    return f"To use other CPUs, {change}"


def _here(found: Verdict) -> list[str]:
    """Returns a line about the free CPUs, which also states whether torch workers may suffice without feeders. Returns
    no line if the number of free CPUs is unknown."""
    if found.free_cpus is None:
        return []
    workers = workers_that_suffice(found)
    free = f"training leaves {found.free_cpus:.2g} of {found.cpus} CPUs free"
    if workers is None:
        return [_row("here", f"{free}, which is too few: feeders must run elsewhere")]
    if workers <= found.workers:
        return [_row("here", f"{free}: the {found.workers} workers should suffice, if they get them")]
    return [_row("here", f"{free}: num_workers={workers} may suffice without feeders")]


def manifest(found: Verdict, command: Sequence[str]) -> str:
    """Returns a manifest as a starting point, both for a cluster and for `dataloaderjob run`."""
    replicas = max(1, found.world // max(1, found.local_ranks))
    processes = max(1, found.local_ranks)
    return (
        "apiVersion: dataloading.dev/v1alpha1\n"
        "kind: DataLoaderJob\n"
        "metadata:\n"
        "  name: train\n"
        "spec:\n"
        "  feeders:\n"
        f"    replicas: {max(1, found.advice.feeders)}\n"
        "  trainers:\n"
        "    job:\n"
        f"      replicas: {replicas}\n"
        f"      processesPerPod: {processes}\n"
        "      template:\n"
        "        spec:\n"
        "          containers:\n"
        "          - name: trainer\n"
        "            image: YOUR-IMAGE  # your script, with dataloaderjob[feeder]\n"
        f"            command: {json.dumps(list(command))}\n"
    )


def _time(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"


def _bytes(number: float) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if number >= size:
            return f"{number / size:.3g} {unit}"
    return f"{number:.0f} bytes"
