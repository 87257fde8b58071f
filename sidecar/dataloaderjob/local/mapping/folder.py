"""The folder of results. A file is written under a temporary name and renamed, so a `part-*` file is always complete.

_map.json describes the work that produced the results, and _SUCCESS shows that all files exist. Readers of Parquet
ignore both.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from dataloaderjob.core import folders
from dataloaderjob.core.errors import InputError
from dataloaderjob.local.mapping.plan import OutputPart, Work, differences, shown
from dataloaderjob.local.mapping.rows import REMEDY

RECORD = "_map.json"
DONE = "_SUCCESS"
_UNFINISHED = ".unfinished-"


class Folder:
    """A folder of results to which only this process writes."""

    def __init__(self, path: Path, fd: int, work: Work) -> None:
        """`fd`: descriptor of the folder at `path`."""
        self._path, self._fd = path, fd
        self.work = work
        self.left = tuple(work.left(set(os.listdir(fd))))
        """The parts whose files did not exist at the start."""
        self.begun_with = ""
        """Digest of the script that wrote the first results; empty if this process starts the work."""
        self._there: tuple[str, pa.Schema] | None = None
        """Name and schema of a file that already existed."""
        self._first: tuple[str, pa.Schema] | None = None
        """Rows and schema of the first batch that was checked."""

    @classmethod
    @contextmanager
    def open(cls, path: Path, work: Work, script_digest: str) -> Iterator[Folder]:
        """Creates the folder if needed. Raises InputError if it contains anything except results of this work."""
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as exc:
            raise InputError(
                f"--output must be a folder, but {path} cannot be created ({exc.strerror}): name another one"
            ) from exc
        fd = folders.enter(path, InputError)
        try:
            with cls._entered(path, fd, work, script_digest) as folder:
                yield folder
        finally:
            os.close(fd)

    @classmethod
    @contextmanager
    def _entered(cls, path: Path, fd: int, work: Work, script_digest: str) -> Iterator[Folder]:
        _check_is_ours(path, fd)
        with os.fdopen(_open(RECORD, fd), "r+") as record:
            try:
                fcntl.flock(record, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise InputError(
                    f"another process is writing to {path}: wait for it, or choose another folder"
                ) from None
            folder = cls(path, fd, work)
            if any(name.startswith("part-") for name in os.listdir(fd)):
                folder._compare(record)
            else:
                record.truncate(0)
                json.dump({**work.as_record(), "script_sha256": script_digest}, record, indent=1)
                record.write("\n")
                record.flush()
                os.fsync(record.fileno())
            removed = [name for name in os.listdir(fd) if name.startswith(_UNFINISHED)]
            for name in [*removed, *([DONE] if folder.left else [])]:
                with suppress(FileNotFoundError):
                    os.unlink(name, dir_fd=fd)
            yield folder

    def _compare(self, record: Any) -> None:
        record.seek(0)
        try:
            found = dict(json.load(record))
        except (ValueError, TypeError):
            raise InputError(f"{self._path / RECORD} cannot be read: choose another folder") from None
        if different := differences(self.work, found):
            raise InputError(
                f"{self._path} contains results of different work: {'; '.join(different)}. Use the arguments "
                "and the dataset of the first run, or choose another folder"
            )
        self.begun_with = str(found.get("script_sha256", ""))
        name = min(name for name in os.listdir(self._fd) if name.startswith("part-"))
        with os.fdopen(folders.open_file(name, os.O_RDONLY, InputError, within=self._fd), "rb") as file:
            self._there = name, pq.read_schema(file)

    def check(self, batch: pa.RecordBatch, rows: range) -> None:
        """Raises InputError if the columns differ from those of earlier batches, or of files that already existed."""
        where, found, first = shown(rows), batch.schema, self._first
        if first is None:
            self._first, first = (where, found), self._there
            found = _as_read(found)
        if first is not None and not found.equals(first[1]):
            raise InputError(
                f"{_difference(found, first[1], where, first[0])}; all files in a folder must have the "
                f"same columns: {REMEDY}"
            )

    def write(self, part: OutputPart, batches: Sequence[pa.RecordBatch]) -> None:
        """Writes a part's file atomically. Once written, the file survives a crash of the machine."""
        unfinished = f"{_UNFINISHED}{part.name}"
        with os.fdopen(folders.open_new(unfinished, os.O_WRONLY, within=self._fd), "wb") as file:
            pq.write_table(pa.Table.from_batches(batches), file)
            file.flush()
            os.fsync(file.fileno())
        os.rename(unfinished, part.name, src_dir_fd=self._fd, dst_dir_fd=self._fd)
        self._sync()

    def num_there(self) -> int:
        """Returns the number of complete files. They are counted in the folder itself, because an interrupt may arrive
        right after a rename."""
        return self.work.num_parts - len(self.work.left(set(os.listdir(self._fd))))

    def finish(self) -> None:
        """Marks the folder as complete."""
        os.close(_open(DONE, self._fd))
        self._sync()

    def _sync(self) -> None:
        """Syncs the folder, so that the names of its files survive a crash of the machine."""
        os.fsync(self._fd)


def _open(name: str, fd: int) -> int:
    return folders.open_file(name, os.O_RDWR | os.O_CREAT, InputError, within=fd)


def _check_is_ours(path: Path, fd: int) -> None:
    names = os.listdir(fd)
    strange = sorted(name for name in names if not name.startswith((".", "_")))
    if strange and RECORD not in names:
        raise InputError(
            f"results need a folder of their own, but {path} contains {strange[0]!r} and no {RECORD}: "
            "choose a folder that is empty or does not exist yet"
        )


def _as_read(schema: pa.Schema) -> pa.Schema:
    """Returns the schema as read back from Parquet, which does not keep all types, such as timestamps in seconds."""
    sink = pa.BufferOutputStream()
    pq.write_table(schema.empty_table(), sink)
    return pq.read_schema(pa.BufferReader(sink.getvalue()))


def _difference(found: pa.Schema, first: pa.Schema, where: str, where_first: str) -> str:
    """Describes a difference between two schemas, such as `column 'a' is int64 in row 5 and string in row 0`."""
    for name in [*first.names, *found.names]:
        types = [str(s.field(name).type) if name in s.names else "missing" for s in (found, first)]
        if types[0] != types[1]:
            return f"column {name!r} is {types[0]} in {where} and {types[1]} in {where_first}"
    return (
        f"the columns are {', '.join(found.names)} in {where} and {', '.join(first.names)} in {where_first}"
    )
