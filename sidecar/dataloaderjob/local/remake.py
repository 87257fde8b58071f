"""The rebuilding of a record's batches to obtain their digests. A child process rebuilds the batches of each bundle.

A child takes on the state of one bundle's trainer, so it can load only that bundle. Output of user code goes to
standard error.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from dataloaderjob.core.blobs import BlobStore, Bundle
from dataloaderjob.core.errors import InputError
from dataloaderjob.core.processes import die_with_parent
from dataloaderjob.core.records import Record, Recorded

if TYPE_CHECKING:
    from dataloaderjob.making.remaking import Remaker

_CANNOT = "recorded batches cannot be rebuilt here"
_loaded: list[Remaker] = []
"""The remaker of this child process; empty in the parent process."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RemadeResult:
    """The result of rebuilding a batch."""

    digest: int
    error: str = ""
    """The error raised while the batch was rebuilt or encoded; empty if there was none."""
    body: bytes | None = None
    """The batch's bytes, if they were requested and the batch can be encoded."""


def remake(record: Record, batches: Iterable[Recorded], *, bodies: bool = False) -> Iterator[RemadeResult]:
    """Rebuilds batches of one bundle, one after the other. `bodies`: include the batches' bytes.

    Raises InputError if the bundle cannot be loaded.
    """
    wanted = list(batches)
    found = wanted[0].piece.bundle(wanted[0].row)
    if found is None:
        raise InputError(
            "the record has neither code nor data for these batches, because the trainer could not pickle "
            "them"
        )
    bundle, in_process = found
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, context, _become_child, (os.getpid(),)) as child:
        try:
            child.submit(_load, bundle, record.store.folder.absolute(), in_process).result()
            for batch in wanted:
                yield child.submit(_make, batch.row.ticket, batch.piece.ticket(batch.row), bodies).result()
        except BrokenProcessPool:
            raise InputError(f"{_CANNOT}: the process that was building them ended") from None


# The child


def _become_child(parent: int) -> None:
    die_with_parent(parent)
    os.dup2(2, 1)


def _load(bundle: Bundle, blobs: Path, in_process: bool) -> None:
    from dataloaderjob.making.remaking import Remaker

    with _user_code():
        _loaded.append(Remaker(bundle, BlobStore(blobs), in_process=in_process))


def _make(number: int, payload: bytes, with_body: bool) -> RemadeResult:
    (remaker,) = _loaded
    with _user_code():
        remade = remaker.make(number, payload)
        if remade.error is not None:
            return RemadeResult(digest=remade.digest, error=f"{type(remade.error).__name__}: {remade.error}")
        try:
            return RemadeResult(digest=remade.digest, body=remaker.body(remade) if with_body else None)
        except InputError as exc:
            return RemadeResult(digest=remade.digest, error=str(exc))


@contextlib.contextmanager
def _user_code() -> Iterator[None]:
    """Converts exceptions of user code to InputError, because only the child may be able to import their classes."""
    try:
        yield
    except (Exception, SystemExit) as exc:
        raise InputError(f"{_CANNOT}: {type(exc).__name__}: {exc}") from None
