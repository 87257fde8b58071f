"""Queues and processes of `dataloaderjob.context()`. torch's iterator puts index lists in, and gets batches from
feeders.

torch creates one queue for results and, for each worker, a queue for index lists and a process. In this module, all
workers of an iterator share one session, with one bundle and one stream of tickets. The batches arrive in order. A
sample's seed depends on its position in the epoch, as in our own iterator.

torchdata's iterator keeps each worker's state, and passes it to a new worker. A session reports the progress of the
epoch as this state.
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
import queue
import sys
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from torch._utils import ExceptionWrapper
from torch.utils.data import _DatasetKind
from torch.utils.data._utils import MP_STATUS_CHECK_INTERVAL
from torch.utils.data._utils.worker import _ResumeIteration

from dataloaderjob.batches.decoding import Decoder
from dataloaderjob.core import ticket_codec
from dataloaderjob.core.blobs import BlobStore
from dataloaderjob.core.control import WINDOW
from dataloaderjob.core.errors import InputError, ServiceError
from dataloaderjob.making import held
from dataloaderjob.making.fetcher import derive_seed
from dataloaderjob.shipping.bundles import make_bundle
from dataloaderjob.trainer.resume import held_draws
from dataloaderjob.trainer.session import service
from dataloaderjob.trainer.session.client import Client
from dataloaderjob.trainer.session.stream import StreamLeftError
from dataloaderjob.trainer.session.taking import Taker
from dataloaderjob.trainer.session.tickets import Placed, as_keys, submit

NO_PID = 1 << 30
"""The PID of worker 0. No process has this PID: torch watches its workers' PIDs, and must not see any of them exit."""
AHEAD = 4
"""Number of batches in the window, per worker. A session does not know torch's `prefetch_factor`."""
LEAST_AHEAD = 16
_U64 = (1 << 64) - 1
_sessions = itertools.count(1 << 29)
"""Numbers for sessions, which differ from the numbers of our own loaders."""


_ANEW: Any = object()
"""A marker among the replies for the start of another epoch of the same workers."""
_NONE: Any = object()


class Context(Protocol):
    """State shared by the sessions of one `FeedersContext`."""

    allow_pickle: bool
    client: Client | None


class FailedBatch(ExceptionWrapper):
    """A failed batch in the form that torch's iterator expects. The iterator raises the original exception."""

    def __init__(self, error: BaseException) -> None:
        # The frames of the traceback hold the iterator.
        self.error: BaseException | None = error.with_traceback(None)

    def reraise(self) -> None:
        error, self.error = self.error, None
        try:
            if error is not None:
                raise error
        finally:
            del error


class Queue:
    """A queue for results or for index lists. Its role is known once a worker that uses it has started."""

    def __init__(self) -> None:
        self.session: ContextSession | None = None
        self.worker: int | None = None
        """The worker whose index lists arrive here; None for the queue of results."""

    def put(self, item: Any, block: bool = True, timeout: float | None = None) -> None:  # noqa: ARG002
        if self.session is not None:
            if self.worker is None:
                self.session.interrupt(item)
            else:
                self.session.order(self.worker, item)

    def get(self, block: bool = True, timeout: float | None = None) -> Any:  # noqa: ARG002
        """Returns the next result. Raises queue.Empty if there was nothing to wait for, and ServiceError if the service
        fails."""
        if self.session is None:
            raise queue.Empty
        return self.session.result(timeout)

    def close(self) -> None:
        """Does nothing: the queue holds no resources."""

    cancel_join_thread = join_thread = close


class Worker:
    """A stand-in for one of torch's worker processes."""

    daemon = True
    exitcode = None

    def __init__(self, target: Callable[..., Any], args: tuple[Any, ...], context: Context) -> None:
        self._target, self._args, self._context = target, args, context
        self.pid: int | None = None

    def start(self) -> None:
        """Joins the session, which the first worker creates. Raises ServiceError if the service fails, and InputError
        if something cannot be sent to feeders."""
        try:
            given = inspect.signature(self._target).bind(*self._args).arguments
            results, orders, number = given["data_queue"], given["index_queue"], given["worker_id"]
            del self._args
        except (TypeError, KeyError) as exc:
            raise InputError(
                "dataloaderjob.context() supports only the iterators of torch.utils.data.DataLoader and "
                f"torchdata's StatefulDataLoader, got a process for {self._target!r}: use "
                "multiprocessing's own context for it"
            ) from exc
        if results.session is None:
            results.session = ContextSession(given, self._target, self._context)
        orders.session, orders.worker = results.session, number
        results.session.join(given.get("worker_state"))
        self.pid = NO_PID + number

    def is_alive(self) -> bool:
        """Returns True. If the service fails, the queue of results raises the error."""
        return True

    def join(self, timeout: float | None = None) -> None:
        """Does nothing: there is nothing to wait for."""

    def terminate(self) -> None:
        """Does nothing: there is no process to terminate."""

    kill = close = terminate


@dataclass(slots=True, order=True)
class _Place:
    """The position in an epoch. torchdata stores it as the state of a worker's dataset."""

    resets: int = 0
    batches: int = 0
    samples: int = 0


class ContextSession:
    """The session that the workers of one iterator share."""

    def __init__(self, given: dict[str, Any], target: Callable[..., Any], context: Context) -> None:
        if given["dataset_kind"] != _DatasetKind.Map:
            raise InputError(
                f"{type(given['dataset']).__name__} is an IterableDataset, but dataloaderjob.context() "
                "serves only map-style datasets (__getitem__ and __len__): omit multiprocessing_context"
            )
        workers = int(given["num_workers"])
        service.begin(workers)
        self._client = context.client = service.connect(context.client, workers)
        allow_pickle = context.allow_pickle or service.is_pickle_allowed()
        self._decoder = Decoder(allow_pickle=allow_pickle)
        told = self._client.settings
        store = BlobStore(Path(str(told["blobs"])), told.get("scratch"))
        made = make_bundle(
            given["dataset"], given["collate_fn"], given["init_fn"],
            store=store, allow_pickle=allow_pickle,
        )  # fmt: skip
        self._manifest = replace(made, loader=next(_sessions), epoch=0, workers=workers).manifest().decode()
        self._window = min(max(LEAST_AHEAD, AHEAD * workers), WINDOW - 24)
        self._bare = not given["auto_collation"]
        self._base_seed = int(given["base_seed"]) & _U64
        self._workers = workers
        self._ended = 0
        self._states = _States(target) if "worker_state" in given else None
        self._draws_from: int | None = self._range(given, held.find(given["dataset"], given["collate_fn"]))
        """The first draw number for generators that the dataset holds; None if the dataset holds none."""
        self._place = _Place()
        self._resets = 0
        """Number of further epochs that torch has requested from the workers. `_place` follows only when results are
        taken."""
        self._taker: Taker | None = None
        self._first = 0
        self._asked: dict[int, tuple[int, int, bool]] = {}
        """Requested batches, by number: the worker, the number of samples up to the batch's end, and whether a state is
        wanted."""
        self._broken = ""
        """The reason why no further batch will arrive."""
        self._replies: deque[Any] = deque()
        self._changed = threading.Condition()

    def _range(self, given: dict[str, Any], holds: list[Any]) -> int | None:
        saved = None if self._states is None else self._states.range_in(given.get("worker_state"))
        if saved is not None:
            held_draws.go_on(given["dataset"], saved)
            first = saved
        else:
            first = held_draws.next_number(given["dataset"]) if holds else 0
        if self._states is not None:
            self._states.draws_from = first
        return first if holds else None

    def join(self, state: Any) -> None:
        """Records that a worker starts. `state` is the worker's state that torchdata kept, if any."""
        if self._states is not None:
            place = self._states.begin(state)
            if place is not None and place > self._place:
                self._place, self._resets = place, place.resets

    # Orders

    def order(self, worker: int, item: Any) -> None:
        """Handles an item that torch has put into a worker's queue."""
        if item is None:
            self._ended += 1
            if self._ended >= self._workers:
                self._leave()
            return
        if isinstance(item, tuple):
            self._ask(worker, *item)
            return
        place = self._place
        if isinstance(item, _ResumeIteration):
            if worker == 0:
                self._broken = ""
                self._resets += 1
                self.interrupt(_ANEW)
            place = _Place(resets=self._resets)
        ack = None if self._states is None else self._states.acknowledged(worker, place)
        self._reply((item, ack))

    def _ask(self, worker: int, number: int, given: Any) -> None:
        wants_state = False
        if self._states is not None:
            given, wants_state = given
        if self._taker is None:
            if type(given) is Placed:
                self._place.batches = given.number
            self._open()
        taker, place = self._taker, self._place
        assert taker is not None  # noqa: S101  opened above
        keys = as_keys(given, bare=self._bare)
        ticket = self._first + number
        seed = derive_seed(self._base_seed, place.resets) if place.resets else self._base_seed
        if type(given) is Placed:
            seed, place.samples = given.seed, given.position
        draws = 0 if self._draws_from is None else (self._draws_from + place.resets) & ticket_codec.MAX_DRAWS
        submit(taker.stream, seed, place.samples, ticket, keys, bare=self._bare, draws=draws)
        place.samples += len(keys)
        place.batches = ticket + 1
        self._asked[ticket] = worker, place.samples, wants_state
        self._client.flush(taker.stream)
        with self._changed:
            self._changed.notify()

    def _open(self) -> None:
        self._first = self._place.batches
        self._asked.clear()
        self._taker = Taker(self._client, self._manifest, self._window, self._decoder, 0.0, self._first)

    # Results, for the single thread that takes them

    def interrupt(self, item: Any) -> None:
        """Passes an item to the thread that takes batches, ahead of further batches. The thread may be waiting for a
        batch."""
        self._reply(item)
        taker = self._taker
        if taker is not None:
            taker.stream.left = True
            self._client.wake()

    def _reply(self, item: Any) -> None:
        with self._changed:
            self._replies.append(item)
            self._changed.notify()

    def result(self, timeout: float | None) -> Any:
        """Waits for the next batch and returns (number, batch), or returns the answer to an order that is not for a
        batch.

        `timeout` is the loader's timeout. torch's own interval between checks of its workers counts as no timeout.
        After an interrupt that is not an `Exception`, such as a KeyboardInterrupt, later calls raise ServiceError,
        because the batch may be lost.
        """
        if self._broken:
            raise ServiceError(self._broken)
        try:
            return self._result(timeout)
        except Exception:
            raise
        except BaseException as exc:
            self._broken = (
                f"{type(exc).__name__} interrupted next(), which ends the iterator: call iter(loader) again"
            )
            raise

    def _result(self, timeout: float | None) -> Any:
        while True:
            with self._changed:
                if not self._replies and not self._is_due():
                    self._changed.wait(timeout)
                if self._replies:
                    reply = self._replies.popleft()
                elif not self._is_due():
                    raise queue.Empty
                else:
                    reply = _NONE
            if reply is _ANEW:
                self._leave()
                self._place = _Place(resets=self._resets)
            elif reply is not _NONE:
                return reply
            else:
                with contextlib.suppress(StreamLeftError):
                    return self._take(timeout)
                if not self._replies:
                    raise queue.Empty  # the iterator ends

    def _is_due(self) -> bool:
        taker = self._taker
        return taker is not None and taker.taken < taker.stream.asked

    def _take(self, timeout: float | None) -> Any:
        taker = self._taker
        if taker is None:
            raise StreamLeftError
        # Compared by identity, because a loader's own timeout may have the same length.
        taker.set_timeout(timeout if timeout and timeout is not MP_STATUS_CHECK_INTERVAL else 0.0)
        ticket = taker.taken
        try:
            return self._packed(ticket, taker.take())
        except StreamLeftError:
            raise
        except Exception as exc:
            if taker.taken == ticket:  # no batch was taken: an error of the service, not of the batch
                if threading.current_thread() is threading.main_thread():
                    raise
                taker.taken += 1  # otherwise torch's pinning thread would end silently
            return self._packed(ticket, FailedBatch(exc))

    def _packed(self, ticket: int, batch: Any) -> tuple[int, Any]:
        worker, samples, wants_state = self._asked.pop(ticket)
        number = ticket - self._first
        if self._states is None:
            return number, batch
        place = _Place(self._place.resets, ticket + 1, samples)
        return number, (batch, worker, self._states.after(worker, place) if wants_state else None)

    # The end

    def _leave(self) -> None:
        taker, self._taker = self._taker, None
        if taker is not None:
            taker.stream.left = True
            taker.leave()
            self._client.wake()
            if self._client.dead is None:
                self._client.close_collected()

    def __del__(self) -> None:
        taker = getattr(self, "_taker", None)
        if taker is not None:
            taker.leave()


class _States:
    """The workers' states in the form that torchdata's iterator expects."""

    def __init__(self, target: Callable[..., Any]) -> None:
        # These names come from torchdata's own worker loop. This module does not import torchdata.
        self._names = vars(sys.modules[target.__module__])
        self._incremental: dict[int, Any] = {}
        self.draws_from = 0

    def range_in(self, state: Any) -> int | None:
        """Returns the first draw number in a worker's state, or None if the dataset held no generators."""
        told = None if state is None else state.get(self._names["_DATASET_STATE"])
        return told.get("draws") if isinstance(told, dict) else None

    def _state(self, worker: int, place: _Place) -> dict[str, Any]:
        names = self._names
        told = {"batches": place.batches, "samples": place.samples, "resets": place.resets}
        told["draws"] = self.draws_from
        return {names["_WORKER_ID"]: worker, names["_FETCHER_STATE"]: None, names["_DATASET_STATE"]: told}

    def begin(self, state: Any) -> _Place | None:
        """Returns the place at which a restored worker resumes, or None if it begins at the start."""
        if state is None:
            return None
        told = state.get(self._names["_DATASET_STATE"])
        if not isinstance(told, dict) or set(told) - {"draws"} != {"batches", "samples", "resets"}:
            raise InputError(
                "the state was saved by a loader whose workers were processes: resume it without "
                "dataloaderjob.context(), or begin a new epoch"
            )
        return _Place(**{name: n for name, n in told.items() if name != "draws"})

    def acknowledged(self, worker: int, place: _Place) -> Any:
        """Returns the answer to a worker's first order of an epoch."""
        state = self._state(worker, place)
        self._incremental[worker] = self._names["_IncrementalWorkerState"](state)
        return self._names["_AckStartup"](worker_id=worker, initial_state=state)

    def after(self, worker: int, place: _Place) -> Any:
        """Returns the change to a worker's state after the worker's last batch."""
        return self._incremental[worker].generate_delta(self._state(worker, place))
