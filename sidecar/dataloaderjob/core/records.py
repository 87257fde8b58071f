"""The record of the batches that a run consumed: the format of its folder, and the reader. `trainer.resume.recording`
is the writer.

    blobs/                      bundles' blobs, by their SHA-256
    rank-R/START-PID.rows       a head, then 48 bytes for each batch that next() returned
    rank-R/START-PID.tickets    the payloads of the batches' tickets, one after the other
    rank-R/START-PID.bundles    a line of JSON for each bundle: the manifest, and `in_process` if no feeder used it

Each process writes one piece, whose name begins with the process's start time. A run that is resumed from a checkpoint
may begin before the end of an earlier piece. The resumed run's piece then replaces the earlier piece's rows from its
first batch on. A process that is killed in the middle of a row leaves an incomplete row, which does not count.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path
from typing import NamedTuple

from dataloaderjob.core.blobs import BlobStore, Bundle
from dataloaderjob.core.consumption import fold
from dataloaderjob.core.errors import InputError, RemoteProtocolError

HEAD = struct.Struct("<8s40x")
ROW = struct.Struct("<IIQQQQIHBx")
MAGIC = b"DLJREC03"
BLOBS = "blobs"
RANK = "rank-"
NO_BUNDLE = 0xFFFF
"""Value of a row's `bundle` if the code that made the batch could not be stored."""


class RowKind(IntEnum):
    BATCH = 0
    FAILED = 1
    """next() raised an error. `digest` is the error's mark."""


class Row(NamedTuple):
    """The row of one batch: 48 bytes, with the fields in this order."""

    loader: int
    """Number of the loader among those that its process created."""
    epoch: int
    ticket: int
    """Number of the batch in its epoch."""
    digest: int
    rolling: int
    """The epoch's digest including this batch (`core.consumption`)."""
    offset: int
    """Start of the ticket's payload."""
    nbytes: int
    bundle: int
    kind: int

    @property
    def place(self) -> tuple[int, int]:
        return self.epoch, self.ticket


class Recorded(NamedTuple):
    """The row of one batch, and the piece that holds its ticket."""

    piece: Piece
    row: Row


@dataclass(slots=True)
class Piece:
    """The part of a record that one process wrote."""

    path: Path
    """The file of the rows."""
    _bundles: list[bytes] | None = None

    def rows(self) -> Iterator[Row]:
        """Reads the rows. Raises InputError unless the file is a record of this version."""
        data = self.path.read_bytes()
        if len(data) < HEAD.size or HEAD.unpack_from(data)[0] != MAGIC:
            raise InputError(f"{self.path} is not a record of this version of dataloaderjob")
        whole = len(data) - (len(data) - HEAD.size) % ROW.size
        return (Row(*fields) for fields in ROW.iter_unpack(data[HEAD.size : whole]))

    def ticket(self, row: Row) -> bytes:
        """Returns the payload of the row's ticket. Raises InputError if it is missing."""
        path = self.path.with_suffix(".tickets")
        try:
            with path.open("rb") as file:
                file.seek(row.offset)
                data = file.read(row.nbytes)
        except (OSError, ValueError) as exc:  # ValueError: an offset beyond any file's size
            raise InputError(f"{path} cannot be read at byte {row.offset}: {exc}") from exc
        if len(data) != row.nbytes or not data:
            raise InputError(f"{path} has no ticket for epoch {row.epoch}, batch {row.ticket}")
        return data

    def bundle(self, row: Row) -> tuple[Bundle, bool] | None:
        """Returns (bundle, in_process) for the code that made the batch. `in_process` is True if it ran in the
        trainer's process. Returns None if the bundle was not stored."""
        if row.bundle == NO_BUNDLE:
            return None
        path = self.path.with_suffix(".bundles")
        try:
            if self._bundles is None:
                self._bundles = path.read_bytes().splitlines()
            line = self._bundles[row.bundle]
            return Bundle.parse(line), bool(json.loads(line)["in_process"])
        except (OSError, IndexError, KeyError, RemoteProtocolError) as exc:
            raise InputError(f"{path} has no bundle number {row.bundle}: {exc}") from exc


@dataclass(slots=True)
class Record:
    """The contents of one record folder."""

    folder: Path
    ranks: dict[str, list[Piece]] = field(default_factory=dict)

    @staticmethod
    def open(folder: Path) -> Record:
        """Finds the pieces in `folder`. Raises InputError if it holds no record."""
        found = Record(folder)
        for rows in sorted(folder.glob(f"{RANK}*/*.rows"), key=_started):
            found.ranks.setdefault(rows.parent.name.removeprefix(RANK), []).append(Piece(rows))
        if not found.ranks:
            raise InputError(
                f"{folder} contains no record: give the folder passed to `dataloaderjob run --record "
                "FOLDER` or set in DATALOADERJOB_RECORD"
            )
        return found

    @property
    def store(self) -> BlobStore:
        return BlobStore(self.folder / BLOBS)

    def batches(self, rank: str) -> dict[int, list[Recorded]]:
        """Returns the batches that each loader of a rank returned, in order, as if the run had never been resumed.

        Raises InputError if a row is missing.
        """
        loaders: dict[int, list[Recorded]] = {}
        for piece in self.ranks.get(rank, ()):
            before = {loader: len(found) for loader, found in loaders.items()}
            for row in piece.rows():
                found = loaders.setdefault(row.loader, [])
                if before.get(row.loader) == len(found):  # the loader's first row in this piece
                    while found and found[-1].row.place >= row.place:
                        found.pop()
                before[row.loader] = -1
                _check(piece, found[-1].row if found else None, row)
                found.append(Recorded(piece, row))
        return loaders


def _started(path: Path) -> tuple[int, str]:
    start = path.name.partition("-")[0]
    return (int(start) if start.isdigit() else 0), path.name


def _check(piece: Piece, before: Row | None, row: Row) -> None:
    """Raises InputError unless `row` follows `before` in the chain of digests."""
    rolling = before.rolling if before is not None and before.epoch == row.epoch else row.epoch + 1
    if fold(rolling, row.digest) != row.rolling:
        what = f"loader {row.loader}, epoch {row.epoch}, batch {row.ticket}"
        raise InputError(
            f"{piece.path} is incomplete: the rows before {what} are missing. Keep all files of a resumed run in "
            "one folder, and use separate folders for separate runs"
        )
