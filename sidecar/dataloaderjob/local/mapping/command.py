"""`dataloaderjob map`: lets feeders apply a function to a dataset, and writes the results.

This process only writes. Batches arrive in order even after failures, so files are completed one after the other.
"""

from __future__ import annotations

import hashlib
import os
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from dataloaderjob.core.errors import DataLoaderJobError, InputError, ServiceError, UserCodeError, say
from dataloaderjob.local.console import percent, span
from dataloaderjob.local.mapping.folder import Folder
from dataloaderjob.local.mapping.messages import from_message
from dataloaderjob.local.mapping.plan import OutputPart, Work, shown, whole_batches
from dataloaderjob.local.mapping.rows import Apply, Inputs, inputs
from dataloaderjob.local.mapping.script import Script
from dataloaderjob.trainer.loader import DataLoader
from dataloaderjob.trainer.session.service import default_feeders

PROGRESS_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Arguments:
    """Arguments of the command."""

    script: Path
    dataset: str
    function: str
    output: Path
    collate_fn: str | None
    batch_size: int
    rows_per_file: int
    feeders: int | None
    """Number of feeders; None for a loader's default number, and 0 if this process does the work."""


def run(arguments: Arguments) -> str:
    """Runs the command. Returns a line that summarizes the results.

    Raises InputError if the arguments are invalid. Raises UserCodeError for exceptions in the user's code. Raises
    KeyboardInterrupt.
    """
    output = arguments.output.absolute()  # before the script, which may change the working directory
    _check_numbers(arguments)
    script = Script(arguments.script)
    dataset = script.dataset(arguments.dataset)
    collate_fn = script.collate_fn(arguments.collate_fn) if arguments.collate_fn else None
    apply = Apply(script.function(arguments.function), collate_fn)
    work = Work(
        script=script.name, dataset=arguments.dataset, function=arguments.function, collate_fn=arguments.collate_fn,
        rows=len(dataset), batch_size=arguments.batch_size,
        rows_per_file=whole_batches(arguments.rows_per_file, arguments.batch_size),
    )  # fmt: skip
    digest = hashlib.sha256(script.text).hexdigest()
    with Folder.open(output, work, digest) as folder:
        if folder.begun_with and len(folder.left) < work.num_parts:
            say(f"{work.num_parts - len(folder.left)} of {work.num_parts} files exist already")
            if folder.begun_with != digest and folder.left:
                say(f"{script.name} has changed since the first run; existing files are kept unchanged")
        try:
            _fill(folder, inputs(dataset), apply, arguments.feeders)
        except BaseException:
            say(f"{folder.num_there()} of {work.num_parts} files are complete; repeat the command to resume")
            raise
        folder.finish()
    return f"{arguments.output}: {work.rows} rows in {work.num_parts} files"


def _check_numbers(arguments: Arguments) -> None:
    for name, value, least in (
        ("--batch-size", arguments.batch_size, 1),
        ("--rows-per-file", arguments.rows_per_file, 1),
        ("--feeders", arguments.feeders, 0),
    ):
        if value is not None and value < least:
            raise InputError(f"{name} must be at least {least}, but is {value}")
    if int(os.environ.get("WORLD_SIZE") or 1) > 1:
        raise InputError(
            f"map runs in one process, but WORLD_SIZE is {os.environ['WORLD_SIZE']}: start it without "
            "torchrun; to make it faster, use more feeders"
        )


class _Batches:
    """The loader's batch_sampler, which yields the rows of the missing files."""

    def __init__(self, parts: Sequence[OutputPart], batch_size: int) -> None:
        self._parts, self._batch_size = parts, batch_size

    def __iter__(self) -> Iterator[list[int]]:
        for part in self._parts:
            for rows in part.batches(self._batch_size):
                yield list(rows)

    def __len__(self) -> int:
        return sum(-(-(part.stop - part.start) // self._batch_size) for part in self._parts)


def _fill(folder: Folder, dataset: Inputs, apply: Apply, feeders: int | None) -> None:
    """Writes the missing files."""
    if not folder.left:
        return
    work = folder.work
    loader: DataLoader[Any] = DataLoader(
        dataset,
        batch_sampler=_Batches(folder.left, work.batch_size),
        collate_fn=apply,
        num_workers=default_feeders() if feeders is None else feeders,
    )
    left = sum(part.stop - part.start for part in folder.left)
    progress = Progress(total=work.rows, before=work.rows - left)
    messages = _begin(loader)
    for part in folder.left:
        batches: list[pa.RecordBatch] = []
        for rows in part.batches(work.batch_size):
            batch = _next(messages, rows)
            folder.check(batch, rows)
            batches.append(batch)
            progress.add(len(rows))
        folder.write(part, batches)


def _begin(loader: DataLoader[Any]) -> Iterator[Any]:
    try:
        return iter(loader)
    except InputError as exc:
        if "collate_fn._function" not in str(exc):
            raise
        raise InputError(
            f"{exc}. collate_fn._function is your function: specify a class instead, because instances are "
            "created in the feeders' processes and need not be copied"
        ) from exc


def _next(messages: Iterator[Any], rows: range) -> pa.RecordBatch:
    """Returns the results for these rows. Raises UserCodeError for an exception of the user's code in a feeder."""
    try:
        message = next(messages)
    except StopIteration:
        raise ServiceError(
            f"the loader ended before {shown(rows)}, which should not happen: please report it"
        ) from None
    except DataLoaderJobError as exc:
        exc.args = (_without_our_words("\n".join([str(exc), *getattr(exc, "__notes__", ())])),)
        raise
    except Exception as exc:
        text = "".join(traceback.format_exception_only(exc)).rstrip()
        raise UserCodeError(f"no result for {shown(rows)}: {_without_our_words(text)}") from exc
    batch = from_message(message)
    is_whole = batch.num_rows == len(rows) and batch.num_columns > 0
    if not is_whole or batch.column(0)[0].as_py() != rows.start:
        raise ServiceError(
            f"the loader returned rows other than {shown(rows)}, which should not happen: please report it"
        )
    return batch


def _without_our_words(text: str) -> str:
    """Removes the mention of collate_fn from an error, because collate_fn is only this package's wrapper around the
    user's function."""
    return text.replace("\nraised by collate_fn in ", "\nraised in ")


class Progress:
    """The progress of the command, printed as a line on standard error every few seconds."""

    def __init__(self, *, total: int, before: int) -> None:
        """`total`: the number of rows of the dataset. `before`: the number of rows in files that already existed."""
        self._total, self._done = total, before
        self._first: tuple[int, float] | None = None
        """The number of rows done and the time when the first batch arrived. The rate thus excludes the startup."""
        self._said_at = 0.0

    def add(self, rows: int) -> None:
        now = time.monotonic()
        self._done += rows
        if self._first is None:
            self._first, self._said_at = (self._done, now), now
        elif now - self._said_at >= PROGRESS_S:
            self._said_at = now
            say(progress_line(self._total, self._done, self._done - self._first[0], now - self._first[1]))


def progress_line(total: int, done: int, made: int, elapsed_s: float) -> str:
    """Formats `640 of 1000 rows (64%), 210.0 rows/s, 2 s left`. `made`: number of rows processed within `elapsed_s`
    seconds."""
    rate = made / elapsed_s
    return f"{done} of {total} rows ({percent(done / total)}), {rate:.1f} rows/s, {span((total - done) / rate)} left"
