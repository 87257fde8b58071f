"""`dataloaderjob replay`: rebuilds one batch of a record in this process, under a debugger if requested."""

from __future__ import annotations

import os
import pdb
import traceback
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

import torch

from dataloaderjob.batches.differences import describe
from dataloaderjob.core import folders, ticket_codec
from dataloaderjob.core.errors import DataLoaderJobError, InputError
from dataloaderjob.core.records import Record, Recorded, RowKind
from dataloaderjob.local import trust
from dataloaderjob.making.remaking import Remade, Remaker


class Replay:
    """One recorded batch. Call `make` once; after that, `lines` describes the result."""

    def __init__(self, folder: Path, *, rank: str, loader: int, epoch: int, batch: int) -> None:
        """Raises InputError if the record has no such batch."""
        self.record = Record.open(folder.absolute())
        self.found = _find(self.record, rank, loader, epoch, batch)
        self.remade: Remade | None = None
        self._body: bytes | None = None

    @property
    def equal(self) -> bool:
        """True if the batch equals the one that was consumed."""
        return self.remade is not None and self.remade.digest == self.found.row.digest

    def make(self, *, debug: bool, trusted: Collection[str] = ()) -> None:
        """Loads the recorded code and data, and rebuilds the batch.

        Raises InputError if the code or data cannot be loaded. Also raises it if their owner is not this user, root or
        a user in `trusted`.
        """
        piece, row = self.found
        bundle = piece.bundle(row)
        if bundle is None or not row.nbytes:
            raise InputError(
                "the record has neither code nor data for this batch, because the trainer could not pickle "
                "them"
            )
        trust.check(self.record.folder, trusted)
        payload = piece.ticket(row)
        remaker = Remaker(bundle[0], self.record.store, in_process=bundle[1])
        stepped = stepping(remaker.code.dataset, Debugger()) if debug else None
        self.remade = remaker.make(row.ticket, payload, stepped)
        error = self.remade.error
        if isinstance(error, DebuggerQuit):
            raise InputError(
                "the debugger ended before the batch was complete, so it was not compared: continue with c for a result"
            )
        if error is not None:
            if debug:
                pdb.post_mortem(error.__traceback__)
            return
        try:
            self._body = remaker.body(self.remade)
        except DataLoaderJobError:
            self._body = None

    def save(self, path: Path) -> None:
        """Writes the batch with torch.save. Raises InputError if no batch was rebuilt, or if `path` is a link."""
        if self.remade is None or self.remade.error is not None:
            raise InputError(f"{path} was not written, because making the batch raised an error")
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
        with os.fdopen(folders.open_file(path, flags, InputError, mode=folders.OWNER_WRITES), "wb") as out:
            torch.save(self.remade.batch, out)

    def lines(self) -> Iterator[str]:
        """Yields lines that describe the batch and compare it with the one that was consumed."""
        assert self.remade is not None  # noqa: S101  made before
        row, ticket = self.found.row, self.remade.ticket
        payload = self.found.piece.ticket(row)
        yield (
            f"loader {row.loader}, epoch {row.epoch}, batch {row.ticket}: {ticket_codec.describe_keys(payload)}, "
            f"seed {ticket.base_seed}"
        )
        if self.remade.error is not None:
            yield from "".join(traceback.format_exception(self.remade.error)).splitlines()
        elif self._body is not None:
            yield from describe(self._body)
        else:
            yield f"batch: {type(self.remade.batch).__name__}, which feeders cannot send"
        recorded = (
            "an error of the type that next() raised" if row.kind == RowKind.FAILED else "what was consumed"
        )
        if self.equal:
            yield f"digest {self.remade.digest:016x}: it is {recorded}"
        else:
            yield f"digest {self.remade.digest:016x}: it is not {recorded}, which has {row.digest:016x}"


class Debugger(pdb.Pdb):
    """A debugger that knows whether the user has ended it."""

    is_quit = False

    def set_quit(self) -> None:
        self.is_quit = True
        super().set_quit()


def stepping(dataset: Any, debugger: Debugger) -> Any:
    """Returns a dataset that loads the samples of `dataset` under the debugger. The debugger stops at the first line of
    the dataset's code."""

    class Stepping:
        def __getitem__(self, key: Any) -> Any:
            return _stepped(debugger, dataset.__getitem__, key)

    class SteppingThroughBatches(Stepping):
        def __getitems__(self, keys: Any) -> Any:
            return _stepped(debugger, dataset.__getitems__, keys)

    return SteppingThroughBatches() if getattr(dataset, "__getitems__", None) else Stepping()


class DebuggerQuit(BaseException):
    """The user ended the debugger before the batch was complete. It is no error of the dataset."""


def _stepped(debugger: Debugger, function: Callable[..., Any], argument: Any) -> Any:
    """Calls a function under the debugger. Raises DebuggerQuit, because `runcall` returns None in that case."""
    found = debugger.runcall(function, argument)
    if debugger.is_quit:
        raise DebuggerQuit
    return found


def _find(record: Record, rank: str, loader: int, epoch: int, batch: int) -> Recorded:
    if rank not in record.ranks:
        raise InputError(f"{record.folder} has no rank {rank}, only {', '.join(sorted(record.ranks))}")
    loaders = record.batches(rank)
    if loader not in loaders:
        raise InputError(f"rank {rank} has no loader {loader}, only {', '.join(map(str, sorted(loaders)))}")
    found = [one for one in loaders[loader] if one.row.place == (epoch, batch)]
    if not found:
        last = loaders[loader][-1].row
        raise InputError(
            f"loader {loader} of rank {rank} has no epoch {epoch}, batch {batch}: its last is epoch {last.epoch}, "
            f"batch {last.ticket}"
        )
    return found[-1]
