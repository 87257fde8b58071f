"""The plan of the result files, and the list of those that are still missing. Pure: `folder` accesses the file system.

A file contains the consecutive rows of whole batches. Its content therefore depends only on the work, not on the number
of runs that the work takes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """The work whose results are in a folder."""

    script: str
    """Name of the script, without folders."""
    dataset: str
    function: str
    collate_fn: str | None
    rows: int
    """Number of rows: the length of the dataset."""
    batch_size: int
    rows_per_file: int
    """Number of rows in each file; a multiple of `batch_size`."""

    @property
    def num_parts(self) -> int:
        return -(-self.rows // self.rows_per_file)

    def part(self, number: int) -> OutputPart:
        start = number * self.rows_per_file
        return OutputPart(
            number=number, of=self.num_parts, start=start, stop=min(start + self.rows_per_file, self.rows)
        )

    def left(self, names: Collection[str]) -> list[OutputPart]:
        """Returns the parts whose files are not among `names`."""
        return [part for part in map(self.part, range(self.num_parts)) if part.name not in names]

    def as_record(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputPart:
    """One file: rows from `start` up to `stop`."""

    number: int
    of: int
    start: int
    stop: int

    @property
    def name(self) -> str:
        digits = max(5, len(str(self.of)))
        return f"part-{self.number:0{digits}}-of-{self.of:0{digits}}.parquet"

    def batches(self, batch_size: int) -> Iterator[range]:
        """Yields the rows of each batch."""
        for start in range(self.start, self.stop, batch_size):
            yield range(start, min(start + batch_size, self.stop))


def whole_batches(rows: int, batch_size: int) -> int:
    """Returns `rows`, rounded up to whole batches."""
    return -(-rows // batch_size) * batch_size


_WORDS = {
    "rows": "the dataset's length",
    "collate_fn": "--collate-fn",
    "batch_size": "--batch-size",
    "rows_per_file": "--rows-per-file",
}
"""Names of fields in messages. Other fields appear under their own names."""


def differences(needed: Work, found: Mapping[str, Any]) -> list[str]:
    """Describes the fields that differ between a folder's record and the requested work."""
    return [
        f"{_WORDS.get(field.name, field.name)} is {found.get(field.name)} there and {getattr(needed, field.name)} here"
        for field in fields(needed)
        if found.get(field.name) != getattr(needed, field.name)
    ]


def shown(rows: range) -> str:
    """Formats rows: `row 5`, `rows 0 to 31`."""
    return f"row {rows[0]}" if len(rows) == 1 else f"rows {rows[0]} to {rows[-1]}"
