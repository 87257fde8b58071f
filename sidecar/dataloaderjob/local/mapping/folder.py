"""The folder of results. A file is written under a temporary name and renamed, so a `part-*` file is always complete.

_map.json describes the work whose results these are; _SUCCESS marks that all files exist. Readers of Parquet ignore
both.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from dataloaderjob.core.errors import InputError
from dataloaderjob.local.mapping.plan import OutputPart, Work, differences, shown
from dataloaderjob.local.mapping.rows import REMEDY

RECORD = "_map.json"
DONE = "_SUCCESS"
_UNFINISHED = ".unfinished-"


class Folder:
    """A folder of results to which only this process writes."""

    def __init__(self, path: Path, work: Work) -> None:
        self._path = path
        self.work = work
        self.left = tuple(work.left(set(os.listdir(path))))
        """Files that did not exist yet."""
        self.begun_with = ""
        """Digest of the script that wrote the first results; empty if this process starts the work."""
        self._there: tuple[str, pa.Schema] | None = None
        """Name and schema of a file that existed already."""
        self._first: tuple[str, pa.Schema] | None = None
        """Rows and schema of the first batch that was checked."""

    @classmethod
    @contextmanager
    def open(cls, path: Path, work: Work, script_digest: str) -> Iterator[Folder]:
        """Creates the folder if needed. Raises InputError if it contains anything except results of this work."""
        path.mkdir(parents=True, exist_ok=True)
        _check_not_anothers_link(path)
        _check_is_ours(path)
        with open(path / RECORD, "a+", opener=_not_a_link) as record:
            try:
                fcntl.flock(record, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise InputError(
                    f"another process writes to {path}: wait for it, or name another folder"
                ) from None
            folder = cls(path, work)
            if any(name.startswith("part-") for name in os.listdir(path)):
                folder._compare(record)
            else:
                record.truncate(0)
                json.dump({**work.as_record(), "script_sha256": script_digest}, record, indent=1)
                record.write("\n")
                record.flush()
                os.fsync(record.fileno())
            for rest in path.glob(f"{_UNFINISHED}*"):
                rest.unlink()
            if folder.left:
                (path / DONE).unlink(missing_ok=True)
            yield folder

    def _compare(self, record: Any) -> None:
        record.seek(0)
        try:
            found = dict(json.load(record))
        except (ValueError, TypeError):
            raise InputError(f"{record.name} cannot be read: name another folder") from None
        if different := differences(self.work, found):
            raise InputError(
                f"{self._path} has results of other work: {'; '.join(different)}. Use the arguments and the dataset of "
                "the first run, or name another folder"
            )
        self.begun_with = str(found.get("script_sha256", ""))
        name = min(name for name in os.listdir(self._path) if name.startswith("part-"))
        self._there = name, pq.read_schema(self._path / name)

    def check(self, batch: pa.RecordBatch, rows: range) -> None:
        """Raises InputError if the columns differ from those of earlier batches, or of files that existed already."""
        where, found, first = shown(rows), batch.schema, self._first
        if first is None:
            self._first, first = (where, found), self._there
            found = _as_read(found)
        if first is not None and not found.equals(first[1]):
            raise InputError(
                f"{_difference(found, first[1], where, first[0])}; the files of a folder have the same columns: "
                f"{REMEDY}"
            )

    def write(self, part: OutputPart, batches: Sequence[pa.RecordBatch]) -> None:
        """Writes the file atomically, so that it survives a crash of the machine."""
        unfinished = self._path / f"{_UNFINISHED}{part.name}"
        with open(unfinished, "wb", opener=_new) as file:
            pq.write_table(pa.Table.from_batches(batches), file)
            file.flush()
            os.fsync(file.fileno())
        unfinished.rename(self._path / part.name)
        self._sync()

    def num_there(self) -> int:
        """Number of complete files, counted in the folder, because an interrupt may arrive right after a rename."""
        return self.work.num_parts - len(self.work.left(set(os.listdir(self._path))))

    def finish(self) -> None:
        """Marks the folder as complete."""
        with open(self._path / DONE, "a", opener=_not_a_link):
            self._sync()

    def _sync(self) -> None:
        """Makes the names in the folder survive a crash of the machine."""
        fd = os.open(self._path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def _not_a_link(path: str, flags: int) -> int:
    """Opens a regular file. Raises InputError for anything else, because another user may have planted it."""
    try:
        fd = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
    except OSError as exc:
        if exc.errno not in (errno.ELOOP, errno.ENXIO, errno.EISDIR):
            raise
        found = "a link" if exc.errno == errno.ELOOP else "something else"
    else:
        if stat.S_ISREG(os.fstat(fd).st_mode):
            return fd
        os.close(fd)
        found = "something else"
    raise InputError(f"{path} must be a regular file, found {found}: name a folder that only you write to")


def _new(path: str, flags: int) -> int:
    """Opens a new file, and removes whatever had its name."""
    with suppress(FileNotFoundError):
        os.unlink(path)
    return os.open(path, flags | os.O_EXCL | os.O_NOFOLLOW, 0o666)


def _check_not_anothers_link(path: Path) -> None:
    found = os.lstat(path)
    if stat.S_ISLNK(found.st_mode) and found.st_uid not in (0, os.getuid()):
        raise InputError(
            f"{path} is a link of user {found.st_uid}, who could redirect the results: name a folder of your own"
        )


def _check_is_ours(path: Path) -> None:
    strange = sorted(name for name in os.listdir(path) if not name.startswith((".", "_")))
    if strange and not (path / RECORD).exists():
        raise InputError(
            f"results need a folder of their own, but {path} contains {strange[0]!r} and no {RECORD}: name a folder "
            "that is empty or does not exist yet"
        )


def _as_read(schema: pa.Schema) -> pa.Schema:
    """Returns the schema as read back from Parquet, which does not keep all types, such as timestamps in seconds."""
    sink = pa.BufferOutputStream()
    pq.write_table(schema.empty_table(), sink)
    return pq.read_schema(pa.BufferReader(sink.getvalue()))


def _difference(found: pa.Schema, first: pa.Schema, where: str, where_first: str) -> str:
    """`column 'a' is int64 in row 5 and string in row 0`"""
    for name in [*first.names, *found.names]:
        types = [str(s.field(name).type) if name in s.names else "missing" for s in (found, first)]
        if types[0] != types[1]:
            return f"column {name!r} is {types[0]} in {where} and {types[1]} in {where_first}"
    return (
        f"the columns are {', '.join(found.names)} in {where} and {', '.join(first.names)} in {where_first}"
    )
