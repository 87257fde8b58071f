"""`dataloaderjob.DataLoader`: torch's DataLoader, with its work done by feeders elsewhere."""

from __future__ import annotations

import itertools
import os
import sys
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.utils.data
from torch.utils.data import Dataset, IterableDataset, Sampler
from torch.utils.data.dataloader import _BaseDataLoaderIter, _SingleProcessDataLoaderIter

from dataloaderjob.core.control import WINDOW
from dataloaderjob.core.errors import InputError, ServiceUnavailable
from dataloaderjob.core.settings import IN_FEEDER_VARIABLE
from dataloaderjob.trainer import client as clients
from dataloaderjob.trainer import private
from dataloaderjob.trainer.client import Client
from dataloaderjob.trainer.iterators import InProcessIterator, ServiceIterator

SOCKET_VARIABLE = "DATALOADERJOB_SOCKET"
PREFETCH_VARIABLE = "DATALOADERJOB_PREFETCH"
FEEDERS_VARIABLE = "DATALOADERJOB_FEEDERS"
DEFAULT_PREFETCH = 16
MAX_PREFETCH = WINDOW - 24
_RANK_VARIABLES = ("RANK", "OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK")
_TORCHS_CONTEXT: Any = torch.utils.data.DataLoader.multiprocessing_context
_ACCELERATE = (
    "Accelerate would replace dataloaderjob.DataLoader by torch's own loader: leave it out of "
    "accelerator.prepare(), give it a sampler for this rank (for instance "
    "DistributedSampler(dataset, accelerator.num_processes, accelerator.process_index)) and move "
    "batches with .to(accelerator.device)"
)
_said: set[str] = set()
_numbers = itertools.count()


class DataLoader(torch.utils.data.DataLoader[Any]):
    """The arguments of `torch.utils.data.DataLoader`, and one more.

    Args:
        num_workers: None (default): the service. n > 0: the service, with n feeders where it is private to
            this machine. 0: in this process, the reference that every other mode equals byte for byte.
        prefetch_factor: batches ahead for each of `num_workers`; None: the job's prefetch, else 16 in all.
        allow_pickle: lets leaves of a batch that are neither tensors, arrays nor plain values travel
            pickled from feeders to this process. Off by default: feeders are then not trusted with code.
        multiprocessing_context: accepted and ignored.
        in_order: accepted; batches are always in order.

    Raises:
        ValueError, TypeError: bad arguments, as torch raises them.
        InputError: an IterableDataset, at `iter()`.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        batch_size: int | None = 1,
        shuffle: bool | None = None,
        sampler: Sampler[Any] | Iterable[Any] | None = None,
        batch_sampler: Sampler[list[Any]] | Iterable[list[Any]] | None = None,
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
        workers = _default_feeders() if num_workers is None else num_workers
        super().__init__(
            dataset, batch_size, shuffle, sampler, batch_sampler, workers, collate_fn, pin_memory, drop_last,
            timeout, worker_init_fn, multiprocessing_context, generator, prefetch_factor=prefetch_factor,
            persistent_workers=persistent_workers, pin_memory_device=pin_memory_device, in_order=in_order,
        )  # fmt: skip
        self.prefetch_factor = prefetch_factor  # torch puts 2 for None, which would not survive a rebuild
        self.allow_pickle = allow_pickle
        self._client: Client | None = None
        self._number: int | None = None
        """Of this loader among those of the process that were iterated."""
        self._epochs = 0
        if multiprocessing_context is not None:
            _say_once("multiprocessing_context is ignored: feeders are processes of the service")
        self._window()
        if workers > 0 and not isinstance(dataset, IterableDataset) and _private():
            private.start(workers)

    @property
    def _is_accelerate_prepared(self) -> bool:
        """`accelerator.prepare()` asks this before it would rebuild the loader as torch's own class."""
        raise InputError(_ACCELERATE)

    def _get_multiprocessing_context(self) -> Any:
        # accelerate.data_loader's functions read all arguments, this one too, to rebuild the loader
        if str(sys._getframe(1).f_globals.get("__name__")).startswith("accelerate."):  # noqa: SLF001
            raise InputError(_ACCELERATE)
        return _TORCHS_CONTEXT.fget(self)

    multiprocessing_context = property(_get_multiprocessing_context, _TORCHS_CONTEXT.fset)

    def _window(self) -> int:
        """Index lists that the sampler is ahead. Fixed by the arguments and the job, by nothing else."""
        if self.prefetch_factor is not None:
            window = self.prefetch_factor * max(1, self.num_workers)
        else:
            window = _number(PREFETCH_VARIABLE, DEFAULT_PREFETCH)
        if not 1 <= window <= MAX_PREFETCH:
            raise InputError(
                f"between 1 and {MAX_PREFETCH} batches can be ahead, found {window}: change prefetch_factor "
                f"(times num_workers) or spec.sidecar.prefetch ({PREFETCH_VARIABLE})"
            )
        return window

    def check_worker_number_rationality(self) -> None:
        """Feeders do not run in this process's cpuset: nothing to check."""

    def __iter__(self) -> _BaseDataLoaderIter:
        iterator = self._iterator
        if isinstance(iterator, ServiceIterator) and iterator.dead:
            self._iterator = None  # persistent_workers, and forked since, or the sidecar did not come back
        return super().__iter__()

    def _get_iterator(self) -> _BaseDataLoaderIter:
        iterable = isinstance(self.dataset, IterableDataset)
        if self.num_workers == 0:
            if iterable:
                return _SingleProcessDataLoaderIter(self)
            return InProcessIterator(self, self._window())
        if iterable:
            raise InputError(
                f"{type(self.dataset).__name__} is an IterableDataset; the service needs a map-style dataset "
                "(__getitem__ and __len__): wrap it, or use num_workers=0"
            )
        return ServiceIterator(self, self._connect(), self._window())

    def begin_session(self) -> tuple[int, int]:
        """Numbers of this loader and of its next iterator, the same in all ranks that run one script."""
        if self._number is None:
            self._number = next(_numbers)
        self._epochs += 1
        return self._number, self._epochs - 1

    def _connect(self) -> Client:
        client = self._client
        if client is None or client.dead is not None:
            if os.environ.get(IN_FEEDER_VARIABLE):
                raise ServiceUnavailable(
                    "a dataloaderjob.DataLoader cannot be iterated inside a feeder: use num_workers=0"
                )
            client = _attach_private(self.num_workers) if _private() else _attach(os.environ[SOCKET_VARIABLE])
            self._client = client
        return client

    def __getstate__(self) -> dict[str, Any]:
        state = dict(self.__dict__)
        state["_client"] = None
        state["_number"] = None
        state["_iterator"] = None
        return state


def _attach(path: str) -> Client:
    try:
        return clients.connect(path, _rank())
    except FileNotFoundError as exc:
        raise ServiceUnavailable(
            f"no sidecar listens at {path} ({SOCKET_VARIABLE}): is the sidecar container running, and is its "
            "socket's folder mounted here?"
        ) from exc
    except OSError as exc:
        raise ServiceUnavailable(f"the sidecar at {path} does not answer: {exc}") from exc


def _attach_private(feeders: int) -> Client:
    """A service that ended between being found and being attached to is started again."""
    for attempt in range(3):
        private.start(feeders)
        path = private.wait()
        try:
            return _attach(path)
        except ServiceUnavailable:
            if attempt == 2 or os.path.exists(path):
                raise
    raise AssertionError("the last attempt returns or raises")


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


def _number(variable: str, default: int) -> int:
    """A whole number that the job put into the environment. Raises InputError."""
    text = os.environ.get(variable)
    try:
        return int(text) if text else default
    except ValueError:
        raise InputError(f"{variable} must be a whole number, found {text!r}: correct or unset it") from None


def _say_once(text: str) -> None:
    if text not in _said:
        _said.add(text)
        warnings.warn(text, stacklevel=3)
