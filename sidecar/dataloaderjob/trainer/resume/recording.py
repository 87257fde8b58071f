"""The record of the batches that next() returned, if DATALOADERJOB_RECORD is set. `core.records` defines the format.

Rows are written once FLUSH_ROWS of them wait, or with the next row after FLUSH_S seconds. They are also written at the
end of an epoch, at exit, and when a loader's state is taken. The record of a killed process therefore lacks at most
FLUSH_ROWS batches, and none that a checkpoint counts. If the machine crashes, more may be lost. Tickets are written
before their rows, so each row has its ticket. If the folder cannot be written to, the record ends and the training
continues.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import shutil
import threading
import time
import weakref
from dataclasses import replace
from pathlib import Path

from dataloaderjob.core import folders, ticket_codec
from dataloaderjob.core.blobs import BlobStore, Bundle
from dataloaderjob.core.consumption import Consumption
from dataloaderjob.core.errors import InputError, say
from dataloaderjob.core.places import IN_FEEDER_VARIABLE, RANK_VARIABLES, RECORD_VARIABLE
from dataloaderjob.core.records import BLOBS, HEAD, MAGIC, NO_BUNDLE, RANK, ROW, RowKind
from dataloaderjob.making.fetcher import pickle_keys
from dataloaderjob.making.held import states_of_classes
from dataloaderjob.shipping.bundles import make_bundle
from dataloaderjob.trainer.session.spec import EpochSpec

Asked = ticket_codec.TicketOfInts | bytes
"""A ticket as a stream keeps it: packed, or as the arguments of `ticket_codec.pack_ticket_of_ints`."""
FLUSH_ROWS = 64
FLUSH_S = 1.0
_lock = threading.RLock()
_recorder: Recorder | None = None
_failed = False


class Recorder:
    """This process's part of the record."""

    def __init__(self, folder: Path, rank: str) -> None:
        """Raises OSError, or InputError if another user could redirect the folder through a link."""
        folders.make_for_owner(folder)
        self._folder = folder
        top = folders.enter(folder, InputError)
        try:
            self.store = BlobStore(self._made(BLOBS, top))
            own = self._made(f"{RANK}{rank}", top)
        finally:
            os.close(top)
        self._path = own / f"{time.time_ns()}-{os.getpid()}.rows"
        self._files: dict[Path, int] = {}
        self._bundles: dict[bytes, int] = {}
        self._rows: list[bytes] = []
        self._tickets: list[bytes] = []
        self._at = 0
        self._flushed_at = time.monotonic()
        self._append(self._path, HEAD.pack(MAGIC))
        self.ended = False

    def _made(self, name: str, top: int) -> Path:
        """Creates a folder of the record. Returns a path through a file descriptor, so that no link can take the
        folder's place."""
        fd = folders.make_within(name, top, InputError)
        weakref.finalize(self, os.close, fd).atexit = False
        return Path(f"/proc/self/fd/{fd}")

    def keep(self, bundle: Bundle, store: BlobStore, *, in_process: bool = False) -> int:
        """Stores a bundle once, and returns its number."""
        line = json.dumps(
            {**json.loads(bundle.manifest()), "in_process": in_process}, sort_keys=True
        ).encode()
        with _lock:
            if line in self._bundles or self.ended:
                return self._bundles.get(line, NO_BUNDLE)
            try:
                for digest, nbytes in bundle.blobs:
                    if not self.store.has(digest, nbytes):
                        _link(store.path(digest), self.store.path(digest))
                self._append(self._path.with_suffix(".bundles"), line + b"\n")
            except OSError as exc:
                self._give_up(exc)
                return NO_BUNDLE
            self._bundles[line] = len(self._bundles)
            return self._bundles[line]

    def add(self, fields: tuple[int, ...], bundle: int, kind: int, ticket: bytes) -> None:
        """Adds a row whose first five fields are `fields`."""
        self._rows.append(ROW.pack(*fields, self._at, len(ticket), bundle, kind))
        self._tickets.append(ticket)
        self._at += len(ticket)
        now = time.monotonic()
        if len(self._rows) >= FLUSH_ROWS or now - self._flushed_at > FLUSH_S:
            self._flushed_at = now
            self.flush()

    def flush(self) -> None:
        """Writes the waiting rows to the file, so that they outlive the process."""
        with _lock:
            tickets, rows = b"".join(self._tickets), b"".join(self._rows)
            self._tickets.clear()
            self._rows.clear()
            if self.ended or not rows:
                return
            try:
                self._append(self._path.with_suffix(".tickets"), tickets)
                self._append(self._path, rows)
            except OSError as exc:
                self._give_up(exc)

    def _append(self, path: Path, data: bytes) -> None:
        """Appends to a file that stays open. Some frameworks take a state for each batch, which costs 3 µs this way and
        50 µs otherwise."""
        file = self._files.get(path)
        if file is None:
            file = self._files[path] = os.open(
                path,
                os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC,
                folders.OWNER_WRITES,
            )
            weakref.finalize(self, os.close, file).atexit = False  # the last flush happens at exit, too
        left = memoryview(data)
        while left:
            left = left[os.write(file, left) :]

    def _give_up(self, exc: OSError) -> None:
        self.ended = True
        say(f"the record in {self._folder} ends here: {exc}")


class Recording:
    """The record of one epoch of one loader."""

    __slots__ = ("_asked", "_bundle", "_epoch", "_loader", "_recorder")

    def __init__(self, recorder: Recorder, consumption: Consumption, bundle: int) -> None:
        """`bundle` is the number that `Recorder.keep` returned."""
        self._recorder, self._bundle = recorder, bundle
        self._loader, self._epoch = consumption.loader, consumption.epoch
        self._asked: dict[int, Asked] = {}

    def ask(self, number: int, ticket: Asked) -> None:
        self._asked[number] = ticket

    def ask_here(self, number: int, ticket: ticket_codec.Ticket) -> None:
        """Records a ticket that is not sent anywhere. Its keys need not be picklable."""
        try:
            packed = ticket_codec.pack_ticket(
                *ticket[:2], ticket.keys, bare=ticket.bare, pickle_keys=pickle_keys
            )
            packed = ticket_codec.with_draws(packed, ticket.draws)
        except Exception:  # user code
            packed = b""
        self.ask(number, packed)

    def give(self, number: int, digest: int, rolling: int, kind: RowKind = RowKind.BATCH) -> None:
        """Records that batch `number`, or its error, is about to be returned."""
        asked = self._asked.pop(number, None)
        if asked is None or self._recorder.ended:
            return
        ticket = asked if isinstance(asked, bytes) else ticket_codec.pack_ticket_of_ints(*asked)
        fields = self._loader, self._epoch, number, digest, rolling
        with _lock:
            self._recorder.add(fields, self._bundle, kind, ticket)

    def end(self) -> None:
        """Writes the waiting rows, because the epoch is over."""
        self._recorder.flush()


def recorder(consumption: Consumption) -> Recorder | None:
    """Returns this process's recorder, if the environment asks for one and the loader belongs to the script."""
    global _recorder, _failed
    folder = os.environ.get(RECORD_VARIABLE)
    if not folder or _failed or not consumption.counts or os.environ.get(IN_FEEDER_VARIABLE):
        return None
    with _lock:
        if _recorder is None:
            try:
                _recorder = Recorder(Path(folder).absolute(), _rank())
            except (OSError, InputError) as exc:
                _failed = True
                say(f"cannot record to {folder}: {exc}")
        return _recorder


def record_here(spec: EpochSpec) -> Recording | None:
    """Returns the record of an epoch whose batches this process makes, or None if nothing is recorded. The record
    includes the code and data, if they can be stored."""
    consumption = spec.consumption
    own = recorder(consumption)
    if own is None:
        return None
    try:
        bundle = make_bundle(
            spec.dataset, spec.collate_fn, None, store=own.store, allow_pickle=spec.pickle_allowed
        )
    except (InputError, OSError):
        return Recording(own, consumption, NO_BUNDLE)
    bundle = replace(bundle, held=states_of_classes(spec.dataset, spec.collate_fn))
    return Recording(own, consumption, own.keep(bundle, own.store, in_process=True))


def flush() -> None:
    """Writes the waiting rows, so that the record contains every batch that a checkpoint counts."""
    if _recorder is not None:
        _recorder.flush()


def _rank() -> str:
    """Returns this process's rank. A process without a rank counts as rank 0."""
    found = next((os.environ[name] for name in RANK_VARIABLES if os.environ.get(name)), "0")
    return "".join(c if c.isalnum() else "_" for c in found)


def _link(source: Path, target: Path) -> None:
    """Hard-links the blob, so that it outlives the store. Copies the blob if a link is impossible."""
    with contextlib.suppress(FileExistsError):
        try:
            os.link(source, target)
        except FileExistsError:
            raise
        except OSError:
            part = target.with_name(f".{target.name}-{os.getpid()}")
            with (
                source.open("rb") as whole,
                os.fdopen(folders.open_new(part, os.O_WRONLY, mode=folders.OWNER_WRITES), "wb") as copy,
            ):
                shutil.copyfileobj(whole, copy)
            os.replace(part, target)


def _forget() -> None:
    """Drops the parent's part of the record. A forked child gets its own part if it takes batches."""
    global _recorder, _lock
    _recorder, _lock = None, threading.RLock()


atexit.register(flush)
os.register_at_fork(after_in_child=_forget)
