"""`dataloaderjob.DataLoader`: torch's DataLoader, with its work done by feeders elsewhere."""

from __future__ import annotations

import copy
import itertools
import os
import sys
from collections.abc import Callable, Iterable
from multiprocessing import context as contexts
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar, cast

import torch
import torch.utils.data
from torch.utils.data import Dataset, IterableDataset, Sampler
from torch.utils.data.dataloader import (
    _BaseDataLoaderIter,
    _MultiProcessingDataLoaderIter,
    _SingleProcessDataLoaderIter,
)

from dataloaderjob.core.control import WINDOW
from dataloaderjob.core.errors import InputError, ServiceUnavailable
from dataloaderjob.core.places import (
    ALLOW_PICKLE_VARIABLE,
    FEEDERS_VARIABLE,
    IN_FEEDER_VARIABLE,
    PREFETCH_VARIABLE,
    SOCKET_VARIABLE,
)
from dataloaderjob.trainer import private

if TYPE_CHECKING:  # at run time they are imported while the private service starts
    from dataloaderjob.trainer.client import Client

LEAST_PREFETCH = 16
"""Batches ahead where neither the loader nor the job says so, however few the feeders."""
PER_WORKER = 2
"""torch's default `prefetch_factor`."""
MAX_PREFETCH = WINDOW - 24
_HERE = "num_workers was left out, so batches are made in this process"
_MAP_STYLE = "the service needs a map-style dataset (__getitem__ and __len__)"
_RANK_VARIABLES = ("RANK", "OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK")
_TORCHS_CONTEXT: Any = torch.utils.data.DataLoader.multiprocessing_context
_T_co = TypeVar("_T_co", covariant=True)
_logged: set[str] = set()
_numbers = itertools.count()
_most_workers = 0
"""What any loader of this process asked of the private service so far."""
_ensured_workers = 0
"""What the private service was last asked for."""


class LeftOut(int):
    """`num_workers` where the user gave none: the number that stands for it, also after a rebuild."""

    __slots__ = ()


class FeedersContext(contexts.ForkContext):
    """`multiprocessing_context` of our loaders. It starts no worker.

    Whoever rebuilds a loader of ours as torch's own, from its attributes, meets it at the first `iter()`.
    """

    def Process(self, *_: Any, **__: Any) -> NoReturn:  # type: ignore[override]  # noqa: N802  as there
        """Raises InputError."""
        raise InputError(
            "Accelerate, or what else rebuilt this loader, has replaced dataloaderjob.DataLoader by torch's own "
            "loader: leave it out of accelerator.prepare(), give it a sampler for this rank (for instance "
            "DistributedSampler(dataset, accelerator.num_processes, accelerator.process_index)) and move "
            "batches with .to(accelerator.device)"
        )


FEEDERS_CONTEXT = FeedersContext()


class DataLoader(torch.utils.data.DataLoader[_T_co]):
    """The arguments of `torch.utils.data.DataLoader`, and one more.

    Args:
        num_workers: None (default): the service, or this process for a dataset that cannot be sent to it.
            n > 0: the service, with n feeders at least where it is private to this machine. 0: in this process.
        prefetch_factor: batches ahead for each of `num_workers`; None: 2 where `num_workers` is given,
            else the job's prefetch, else 2 for each feeder of the job and 16 at least.
        allow_pickle: lets leaves of a batch that are neither tensors, arrays nor plain values travel
            pickled from feeders to this process. Off by default: feeders are then not trusted with code.
        multiprocessing_context: checked, and ignored where feeders make the batches.
        in_order: accepted; batches are always in order.

    Raises:
        ValueError, TypeError: bad arguments, as torch raises them.
        InputError: at `iter()`, what cannot be sent to feeders though `num_workers` asks for them.
    """

    def __init__(
        self,
        dataset: Dataset[_T_co],
        batch_size: int | None = 1,
        shuffle: bool | None = None,
        sampler: Sampler[Any] | Iterable[Any] | None = None,
        batch_sampler: Sampler[Any] | Iterable[Any] | None = None,
        num_workers: int | None = None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        pin_memory: bool = False,
        drop_last: bool = False,
        timeout: float = 0,
        worker_init_fn: Callable[[int], None] | None = None,
        multiprocessing_context: Any = None,
        generator: torch.Generator | None = None,
        *,
        prefetch_factor: int | None = None,
        persistent_workers: bool = False,
        pin_memory_device: str = "",
        in_order: bool = True,
        allow_pickle: bool = False,
    ) -> None:
        workers = LeftOut(_default_feeders()) if num_workers is None else num_workers
        if multiprocessing_context is FEEDERS_CONTEXT:
            multiprocessing_context = None
        super().__init__(
            dataset, batch_size, shuffle, sampler, batch_sampler, workers, collate_fn, pin_memory, drop_last,
            timeout, worker_init_fn, multiprocessing_context, generator, prefetch_factor=prefetch_factor,
            persistent_workers=persistent_workers, pin_memory_device=pin_memory_device, in_order=in_order,
        )  # fmt: skip
        if isinstance(workers, LeftOut):
            self.prefetch_factor = prefetch_factor  # torch puts 2 for None
        self.allow_pickle = allow_pickle
        self._client: Client | None = None
        self._number: int | None = None
        """Number of this loader among those of the process that were iterated."""
        self._epochs = 0
        self._stays_here = False
        self.own_workers = False
        """Torch's worker processes are to make the batches."""
        if multiprocessing_context is not None and not isinstance(dataset, IterableDataset):
            _say_once("multiprocessing_context is ignored: feeders are processes of the service")
        if workers > 0:
            self._window()
            if not isinstance(dataset, IterableDataset):
                _expect(workers)

    @property
    def multiprocessing_context(self) -> contexts.BaseContext | None:
        """What keeps a rebuild as torch's own loader from starting workers; the user's with `num_workers=0`."""
        if self.num_workers > 0 and not self.__dict__.get("own_workers"):
            return FEEDERS_CONTEXT
        return cast("contexts.BaseContext | None", _TORCHS_CONTEXT.fget(self))

    @multiprocessing_context.setter
    def multiprocessing_context(self, value: Any) -> None:
        _TORCHS_CONTEXT.fset(self, None if value is FEEDERS_CONTEXT else value)

    @property
    def pickle_allowed(self) -> bool:
        """Whether batches may bring pickles: this side alone decides, by the argument or its environment."""
        return self.allow_pickle or os.environ.get(ALLOW_PICKLE_VARIABLE) == "1"

    def _window(self) -> int:
        """Index lists that the sampler is ahead. Fixed by the arguments and the job, by nothing else."""
        factor = self.prefetch_factor
        if factor is not None:
            window = factor * self.num_workers
            if factor == PER_WORKER:
                window = min(window, MAX_PREFETCH)
        else:
            window = _number(PREFETCH_VARIABLE, 0)
            if not os.environ.get(PREFETCH_VARIABLE):
                window = min(max(LEAST_PREFETCH, PER_WORKER * self.num_workers), MAX_PREFETCH)
        if not 1 <= window <= MAX_PREFETCH:
            raise InputError(
                f"between 1 and {MAX_PREFETCH} batches can be ahead, found {window}: change prefetch_factor "
                f"(times num_workers) or spec.sidecar.prefetch ({PREFETCH_VARIABLE})"
            )
        return window

    def check_worker_number_rationality(self) -> None:
        """Warns as torch does, where the feeders will be processes of this machine."""
        if not isinstance(self.num_workers, LeftOut) and _private():
            super().check_worker_number_rationality()

    def __iter__(self) -> _BaseDataLoaderIter:
        iterator = self._iterator
        if getattr(iterator, "dead", False) or isinstance(iterator, _SingleProcessDataLoaderIter):
            # persistent_workers, and forked since, or the sidecar did not come back, or a stream of this process
            self._iterator = None
        return super().__iter__()

    def _get_iterator(self) -> _BaseDataLoaderIter:
        if isinstance(self.dataset, IterableDataset):
            return self._stream_here()
        self._begin_service()
        from dataloaderjob.trainer.iterators import InProcessIterator, ServiceIterator

        left_out = isinstance(self.num_workers, LeftOut)
        if self.num_workers == 0:
            if self.timeout != 0:
                raise AssertionError("an iterator of this process (num_workers=0) requires timeout == 0")
            return InProcessIterator(self)
        if left_out and (self._stays_here or os.environ.get(IN_FEEDER_VARIABLE)):
            return InProcessIterator(self)
        client, window = self._connect(), self._window()
        _compare_with_feeders(window)
        iterator = ServiceIterator(self, client, window, pickle_allowed=self.pickle_allowed)
        try:
            iterator.ship(self, self.begin_session, self._say_slow)
        except InputError as exc:
            if not left_out:
                raise
            self._stays_here = True
            _say_once(f"{_HERE}: {exc}")
            return InProcessIterator(self, begun=iterator)
        iterator.start(again=not left_out)
        return iterator

    def _say_slow(self, elapsed_s: float) -> None:
        if not self.persistent_workers:
            _say_once(
                f"copying {type(self.dataset).__name__} for feeders took {elapsed_s:.1f} s, and is done at each "
                "iter(): persistent_workers=True does it once",
                about="copying",
            )

    def _stream_here(self) -> _BaseDataLoaderIter:
        """An iterator over an IterableDataset, which the service does not serve."""
        if self.num_workers == 0:
            return _SingleProcessDataLoaderIter(self)
        what = f"{type(self.dataset).__name__} is an IterableDataset"
        here = copy.copy(self)
        if isinstance(self.num_workers, LeftOut):
            _say_once(f"{_HERE}: {what}; {_MAP_STYLE}")
            here.num_workers, here.timeout = 0, 0
            return _SingleProcessDataLoaderIter(here)
        if not _private():
            raise InputError(f"{what}; {_MAP_STYLE}: wrap it, or use num_workers=0")
        _say_once(f"{what}, which feeders do not serve: torch's worker processes make its batches")
        here.own_workers = True
        return _MultiProcessingDataLoaderIter(here)

    def begin_session(self) -> tuple[int, int]:
        """Numbers of this loader and of its next iterator, the same in all ranks that run one script."""
        if self._number is None:
            self._number = next(_numbers)
        self._epochs += 1
        return self._number, self._epochs - 1

    def _begin_service(self) -> None:
        """Starts the private service, if this loader is about to need one, before anything else."""
        waits = self.num_workers > 0 and self._client is None and not self._stays_here
        if waits and _private():
            _expect(self.num_workers)
            _ensure()

    def _connect(self) -> Client:
        client = self._client
        if os.environ.get(IN_FEEDER_VARIABLE):
            raise ServiceUnavailable(
                "a dataloaderjob.DataLoader cannot be iterated inside a feeder: use num_workers=0. If it is a module's "
                "top level that iterates it, put that into a function or under if __name__ == '__main__', since "
                "feeders import the module, too"
            )
        if _private():
            _expect(self.num_workers)
        if client is None or client.dead is not None:
            client = _attach_private() if _private() else _attach_announced(os.environ[SOCKET_VARIABLE])
            self._client = client
        elif _private() and _most_workers > _ensured_workers:
            _ensure()
        return client

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_client": None, "_number": None, "_iterator": None}


def _attach_announced(path: str) -> Client:
    """Attaches to a sidecar that somebody else starts, and may be starting again just now."""
    from dataloaderjob.trainer import client as clients
    from dataloaderjob.trainer.attach import Absence

    absence = Absence(path)
    while True:
        try:
            return clients.connect(path, _rank())
        except (ConnectionError, FileNotFoundError) as exc:
            if not os.path.isdir(os.path.dirname(path)):
                raise ServiceUnavailable(
                    f"no sidecar listens at {path} ({SOCKET_VARIABLE}): is the sidecar container running, and is its "
                    "socket's folder mounted here?"
                ) from exc
            absence.wait(exc)
        except OSError as exc:
            raise ServiceUnavailable(f"the sidecar at {path} does not answer: {exc}") from exc


def _attach_private() -> Client:
    """A service that ended between being found and being attached to is started again."""
    from dataloaderjob.trainer import client as clients

    for attempt in range(3):
        _ensure()
        path = private.wait()
        try:
            return clients.connect(path, _rank())
        except OSError as exc:
            if attempt == 2 or os.path.exists(path):
                raise ServiceUnavailable(f"the sidecar at {path} does not answer: {exc}") from exc
    raise AssertionError("the last attempt returns or raises")


def _expect(workers: int) -> None:
    """Notes a loader's number of feeders: the private service gets the largest at the next `iter()`."""
    global _most_workers
    _most_workers = max(_most_workers, int(workers))


def _ensure() -> None:
    """Starts the private service, or has it scale up to what the loaders of this process ask for."""
    global _ensured_workers
    private.ensure(_most_workers)
    _ensured_workers = _most_workers


def _private() -> bool:
    return not os.environ.get(SOCKET_VARIABLE) and not os.environ.get(IN_FEEDER_VARIABLE)


def _rank() -> str:
    """What this process claims at the sidecar: its rank in the job, else its own pid."""
    for name in _RANK_VARIABLES:
        if os.environ.get(name):
            return os.environ[name]
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return str(torch.distributed.get_rank())
    return f"pid-{os.getpid()}"


def _default_feeders() -> int:
    return max(1, _number(FEEDERS_VARIABLE, min(8, len(os.sched_getaffinity(0)) - 1)))


def _compare_with_feeders(window: int) -> None:
    """Says it when some of a job's feeders cannot have anything to do."""
    feeders, ranks = _number(FEEDERS_VARIABLE, 0), max(1, _number("WORLD_SIZE", 1))
    per_rank = -(-feeders // ranks)
    if not _private() and window < per_rank:
        _say_once(
            f"{window} batches ahead cannot keep {per_rank} feeders busy ({feeders} of the job, {ranks} ranks): "
            "leave num_workers out, or raise prefetch_factor (times num_workers)"
        )


def _number(variable: str, default: int) -> int:
    """A whole number that the job put into the environment. Raises InputError."""
    text = os.environ.get(variable)
    try:
        return int(text) if text else default
    except ValueError:
        raise InputError(f"{variable} must be a whole number, found {text!r}: correct or unset it") from None


def _say_once(text: str, about: str = "") -> None:
    if (about or text) not in _logged:
        _logged.add(about or text)
        sys.stderr.write(f"[dataloaderjob] {text}\n")
        sys.stderr.flush()
