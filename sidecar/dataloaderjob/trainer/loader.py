"""`dataloaderjob.DataLoader`: torch's DataLoader, with its work done by feeders elsewhere."""

from __future__ import annotations

import copy
import gc
import itertools
import os
import threading
from collections.abc import Callable, Iterable, Mapping
from multiprocessing import context as contexts
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypeVar, cast

import torch
import torch.utils.data
from torch.utils.data import Dataset, IterableDataset, Sampler
from torch.utils.data.dataloader import _BaseDataLoaderIter, _SingleProcessDataLoaderIter

from dataloaderjob.core.consumption import PROBING, Consumption
from dataloaderjob.core.control import MOST_AHEAD
from dataloaderjob.core.errors import InputError, ScratchTooSmall
from dataloaderjob.core.places import IN_FEEDER_VARIABLE, PREFETCH_VARIABLE
from dataloaderjob.making.staged import Staged, unchanged
from dataloaderjob.trainer.device.transfer import AHEAD, Way
from dataloaderjob.trainer.epochs import arguments
from dataloaderjob.trainer.interop.context import DEVICE_OPTIONS, FeedersContext
from dataloaderjob.trainer.session import service
from dataloaderjob.trainer.session.service import LeftOut

if TYPE_CHECKING:  # at run time they are imported while the private service starts
    from dataloaderjob.trainer.device.devices import Device
    from dataloaderjob.trainer.epochs.iterators import ServiceIterator
    from dataloaderjob.trainer.resume.progress import Epoch
    from dataloaderjob.trainer.resume.state import Resume, State
    from dataloaderjob.trainer.session.client import Client

Devices: TypeAlias = "tuple[int, threading.Lock, dict[torch.device, Device]]"
LEAST_PREFETCH = 16
"""Batches ahead where neither the loader nor the job says so, however few the feeders."""
PER_WORKER = 2
"""torch's default `prefetch_factor`."""
MAX_PREFETCH = MOST_AHEAD
_HERE = "num_workers was left out, so batches are made in this process"
_TORCHS = "torch's worker processes make the batches"
_NO_STATE = (
    "an IterableDataset cannot be resumed where feeders do not make it (num_workers=0, or it cannot be sent to them): "
    "the next epoch begins at its first sample"
)
_TORCHS_CONTEXT: Any = torch.utils.data.DataLoader.multiprocessing_context
_T_co = TypeVar("_T_co", covariant=True)
_numbers = itertools.count()
_made = itertools.count()
PROBE_S = 2.0
"""Time for a sample that is made for a state. A state may be what is saved before the process is ended."""


class DataLoader(torch.utils.data.DataLoader[_T_co]):
    """The arguments of `torch.utils.data.DataLoader`, and one more.

    Args:
        num_workers: None (default): the service, or this process for a dataset that cannot be sent to it.
            n > 0: the service, with n feeders at least where it is private to this machine. 0: in this process.
            An IterableDataset is made as torch's n workers would make it, one where it is None, by any number of
            feeders.
        prefetch_factor: batches ahead for each of `num_workers`; None: 2 where `num_workers` is given,
            else the job's prefetch, else 2 for each feeder of the job and 16 at least.
        allow_pickle: lets leaves of a batch that are neither tensors, arrays nor plain values travel
            pickled from feeders to this process. Off by default: feeders are then not trusted with code.
        multiprocessing_context: checked, and ignored where feeders make the batches.
        in_order: accepted; batches are always in order.
        dataset_id: what the dataset is called in `state_dict()`. Without it a state knows a dataset by its type, its
            length and three samples, which are made for that.
        tail: of an IterableDataset that is the same in all ranks: its batches, in the order in which one process would
            have them, are dealt to the ranks in turn, so that all have equally many. It says what becomes of the last
            ones if they are fewer than the ranks: "drop", "pad" (some are given twice) or "error".
        stage: of an IterableDataset: what is done to each of its samples before `collate_fn`, such as to decode it. The
            dataset is read where its slots are, and any feeder makes the batches of what was read.
        parts: of a map-style dataset with torch's own collate_fn: batches are made in so many parts, by as many
            feeders, and put together in this process. It is for batches that one feeder makes too slowly.
        device: where tensors of a batch are to be, such as "cuda": they are copied there on a stream of the loader's,
            ahead of the trainer. "cpu": they stay, and only `device_stage` runs. Arrays stay in this process. Tests
            run it with a simulated device; no GPU was there.
        device_stage: what is done to each batch in this process, on that stream: fn(batch, generator) to batch. The
            generator is one of the device, with a seed of the epoch's and the batch's own.
        prefetch_device: batches that lie on the device, or are on their way, before the trainer asks for them. Without
            `device` it means nothing.
        snapshot_every_n_steps: accepted for torchdata's sake; each state is exact.

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
        dataset_id: str | None = None,
        tail: Literal["drop", "pad", "error"] | None = None,
        stage: Callable[[Any], Any] | None = None,
        parts: int | None = None,
        device: torch.device | str | int | None = None,
        device_stage: Callable[[Any, torch.Generator], Any] | None = None,
        prefetch_device: int = AHEAD,
        snapshot_every_n_steps: int | None = 1,
    ) -> None:
        workers = LeftOut(service.default_feeders()) if num_workers is None else num_workers
        if isinstance(collate_fn, Staged):  # of a loader that is made of another one's attributes
            stage, collate_fn = collate_fn.stage, collate_fn.collate_fn
        self.stage = stage
        if isinstance(multiprocessing_context, FeedersContext):
            multiprocessing_context = None
        super().__init__(
            dataset, batch_size, shuffle, sampler, batch_sampler, workers, collate_fn, pin_memory, drop_last,
            timeout, worker_init_fn, multiprocessing_context, generator, prefetch_factor=prefetch_factor,
            persistent_workers=persistent_workers, pin_memory_device=pin_memory_device, in_order=in_order,
        )  # fmt: skip
        if isinstance(workers, LeftOut) or stage is not None:
            self.prefetch_factor = prefetch_factor  # torch puts 2 for None
        self.allow_pickle = allow_pickle
        self.consumption = Consumption(next(_made))
        """What was taken so far; its iterators keep it."""
        self._client: Client | None = None
        self._number: int | None = None
        """Number of this loader among those of the process that were iterated."""
        self._epochs = 0
        self.dataset_id = dataset_id
        self.tail = tail
        self.parts = parts
        self.device, self.device_stage, self.prefetch_device = device, device_stage, prefetch_device
        self._sent_to = device, device_stage, prefetch_device
        """The same, whatever a class of the user's has under those names."""
        arguments.check(self)
        if stage is not None:
            self.collate_fn = Staged(stage, self.collate_fn, is_bare=batch_size is None)
        self.snapshot_every_n_steps = snapshot_every_n_steps
        self._epoch: Epoch | None = None
        """The last one that was begun."""
        self._resume: Resume | None = None
        """What was loaded, until the next `iter()`."""
        self._probes: list[str | None] | None = None
        self._devices: Devices | None = None
        """The process, what is held while `device_stage` runs, and devices that batches went to."""
        self._stays_here = False
        if multiprocessing_context is not None and not self._is_stream:
            service.say_once("multiprocessing_context is ignored: feeders are processes of the service")
        if workers > 0:
            self._window()

    @property
    def multiprocessing_context(self) -> contexts.BaseContext | None:
        """What keeps feeders in a rebuild as torch's own loader. The user's where this process makes the batches, and
        for an IterableDataset."""
        if self.num_workers > 0 and not self._is_stream:
            sent_to = self.__dict__.get("_sent_to") or (None,)  # torch's constructor asks before it is set
            own = {} if sent_to[0] is None else dict(zip(DEVICE_OPTIONS, sent_to, strict=True))
            return FeedersContext(allow_pickle=self.__dict__.get("allow_pickle", False), of=own)
        return cast("contexts.BaseContext | None", _TORCHS_CONTEXT.fget(self))

    @multiprocessing_context.setter
    def multiprocessing_context(self, value: Any) -> None:
        _TORCHS_CONTEXT.fset(self, None if isinstance(value, FeedersContext) else value)

    @property
    def pickle_allowed(self) -> bool:
        """Whether batches may bring pickles: this side alone decides, by the argument or its environment."""
        return self.allow_pickle or service.is_pickle_allowed()

    @property
    def digest(self) -> str:
        """Names all that this loader gave so far: keys, order and bytes, epoch after epoch; 16 hex digits."""
        return f"{self.consumption.total:016x}"

    @property
    def _feeders(self) -> int:
        """How many the loader wants: any number of them can run a stage."""
        workers = int(self.num_workers)
        return max(workers, self.parts or 0, service.default_feeders() if self.stage is not None else 0)

    def _window(self) -> int:
        """Index lists that the sampler is ahead. Fixed by the arguments and the job, by nothing else."""
        factor = self.prefetch_factor
        if factor is not None:
            window = factor * self._feeders
            if factor == PER_WORKER:
                window = min(window, MAX_PREFETCH)
        else:
            window = service.number(PREFETCH_VARIABLE, 0)
            if not os.environ.get(PREFETCH_VARIABLE):
                window = min(max(LEAST_PREFETCH, PER_WORKER * self._feeders), MAX_PREFETCH)
        if not 1 <= window <= MAX_PREFETCH:
            raise InputError(
                f"between 1 and {MAX_PREFETCH} batches can be ahead, found {window}: change prefetch_factor "
                f"(times num_workers) or spec.loader.prefetch ({PREFETCH_VARIABLE})"
            )
        return window

    def way(self, *, pins: bool, pin_device: str | None) -> Way:
        """Where batches go. Raises InputError for a device that is not there."""
        from dataloaderjob.trainer.device.devices import device_of

        named, stage, ahead = self._sent_to
        if named is None:
            return Way(pins=pins, pin_device=pin_device)
        _, turn, known = self._devices_here()
        return Way(device_of(named, known), stage, ahead, pins, pin_device, turn)

    @property
    def has_device_stage(self) -> bool:
        return self._sent_to[1] is not None

    def _devices_here(self) -> Devices:
        if self._devices is None or self._devices[0] != os.getpid():  # a forked child's may be taken for ever
            self._devices = os.getpid(), threading.Lock(), {}
        return self._devices

    def check_worker_number_rationality(self) -> None:
        """Warns as torch does, where the feeders will be processes of this machine."""
        if not isinstance(self.num_workers, LeftOut) and service.is_private():
            super().check_worker_number_rationality()

    def __iter__(self) -> _BaseDataLoaderIter:
        iterator = self._iterator
        if getattr(iterator, "dead", False) or isinstance(iterator, _SingleProcessDataLoaderIter):
            # persistent_workers, and forked since, or the sidecar did not come back, or a stream of this process
            self._iterator = None
        try:
            return super().__iter__()
        except InputError as exc:
            # The message says all, and the frames below are ours.
            raise exc.with_traceback(None) from exc.__cause__

    def _get_iterator(self) -> _BaseDataLoaderIter:
        if self._is_stream and (self._stays_here or self._is_made_here()):
            if self.tail is not None:
                raise InputError(
                    "tail= is for feeders, and this process is one, or makes the batches: leave it out"
                )
            return self._stream_here()
        self._begin_service()
        resume, previous = self._resume, self._epoch
        collects = gc.isenabled()
        gc.disable()  # one collection of torch's modules takes 80 ms of CPU, beside the feeders' import of them
        try:
            return self._begin_iterator()
        except BaseException:
            # What was loaded is there for the next try.
            if self._epoch is not None and self._epoch is not previous:
                self._epoch.settle()
            self._resume, self._epoch = resume, previous
            raise
        finally:
            if collects:
                gc.enable()

    def _begin_iterator(self) -> _BaseDataLoaderIter:
        left_out, here = isinstance(self.num_workers, LeftOut), self._is_made_here()
        if self.num_workers == 0 and self.timeout != 0:
            raise AssertionError("an iterator of this process (num_workers=0) requires timeout == 0")
        client = (
            None if here else self._connect()
        )  # before this import, which would delay the service's start
        from dataloaderjob.trainer.epochs.iterators import InProcessIterator

        if client is None:
            self._check_resume()
            return InProcessIterator(self, self.begin_epoch())
        window = self._window()
        service.compare_with_feeders(window)
        self._check_resume()
        epoch = self.begin_epoch()
        kind = self._kind_of_iterator()
        source = self.generator or torch.default_generator
        drawn_from = source.get_state()
        iterator = kind(self, epoch, client, window, pickle_allowed=self.pickle_allowed)
        try:
            iterator.ship(self, self.begin_session, self._say_slow)
        except InputError as exc:
            wrong_setting = isinstance(exc, ScratchTooSmall) and not service.is_private()
            if wrong_setting or self.tail or not (left_out or (self._is_stream and service.is_private())):
                raise  # a job whose feeders idle would look well
            self._stays_here = True
            service.say_once(f"{_HERE if left_out else _TORCHS}: {exc}")
            if self._is_stream:
                return self._give_up_epoch(epoch, source, drawn_from)
            return InProcessIterator(self, epoch, begun=iterator)
        iterator.start(again=not left_out)
        return iterator

    def _kind_of_iterator(self) -> type[ServiceIterator]:
        from dataloaderjob.trainer.epochs.iterators import ServiceIterator

        if not self._is_stream and self.parts is None:
            return ServiceIterator
        from dataloaderjob.trainer.epochs.deal_iterator import DealIterator
        from dataloaderjob.trainer.epochs.deal_staged_iterator import DealtStagedIterator
        from dataloaderjob.trainer.epochs.parts_iterator import PartsIterator
        from dataloaderjob.trainer.epochs.slot_iterator import SlotIterator
        from dataloaderjob.trainer.epochs.staged_iterator import StagedIterator

        if self.parts is not None:
            return PartsIterator
        if self.stage is not None:
            return StagedIterator if self.tail is None else DealtStagedIterator
        return SlotIterator if self.tail is None else DealIterator

    def __len__(self) -> int:
        batches = super().__len__()
        if self.tail is None:
            return batches
        from dataloaderjob.trainer.session import slot_places

        return batches // slot_places.world() if self.tail == "drop" else -(-batches // slot_places.world())

    def _is_made_here(self) -> bool:
        """Whether this process makes the batches, as far as is known."""
        left_out = isinstance(self.num_workers, LeftOut)
        return self.num_workers == 0 or (
            left_out and (self._stays_here or bool(os.environ.get(IN_FEEDER_VARIABLE)))
        )

    def _say_slow(self, elapsed_s: float) -> None:
        if not self.persistent_workers:
            service.say_once(
                f"copying {type(self.dataset).__name__} for feeders took {elapsed_s:.1f} s, and is done at each "
                "iter(): persistent_workers=True does it once",
                about="copying",
            )

    @property
    def _is_stream(self) -> bool:
        return isinstance(self.dataset, IterableDataset)

    @property
    def _is_torchs(self) -> bool:
        """Whether torch makes the batches, of a stream that no feeder makes."""
        return self._is_stream and (self._stays_here or self.num_workers == 0)

    def _give_up_epoch(
        self, epoch: Epoch, source: torch.Generator, drawn_from: torch.Tensor
    ) -> _BaseDataLoaderIter:
        """torch makes the stream after all: nothing was drawn for an iterator of ours, and there is no state."""
        if epoch.first_batches:
            service.say_once(_NO_STATE)
        source.set_state(drawn_from)
        epoch.settle()
        self._epoch = None
        return self._stream_here()

    def _stream_here(self) -> _BaseDataLoaderIter:
        """An iterator of torch's over an IterableDataset."""
        from dataloaderjob.trainer.interop.torchs import ByWorkers, InThisProcess

        here = copy.copy(self)
        here._devices = self._devices_here()  # noqa: SLF001  a loader of this class
        here.prefetch_factor = here.prefetch_factor or PER_WORKER
        if self.num_workers == 0:
            return InThisProcess(here)
        if isinstance(self.num_workers, LeftOut):
            here.num_workers, here.timeout = 0, 0
            return InThisProcess(here)
        return ByWorkers(here)

    def begin_session(self) -> tuple[int, int]:
        """Numbers of this loader and of its next iterator, the same in all ranks that run one script."""
        self._epochs += 1
        return self._number_of_this(), self._epochs - 1

    def _number_of_this(self) -> int:
        if self._number is None:
            self._number = next(_numbers)
        return self._number

    def _begin_service(self) -> None:
        """Starts the private service, if this loader is about to need one, before anything else."""
        if self.num_workers > 0 and self._client is None and not self._stays_here:
            service.begin(self._feeders)

    def _connect(self) -> Client:
        self._client = service.connect(self._client, self._feeders)
        return self._client

    def __getstate__(self) -> dict[str, Any]:
        lost = dict.fromkeys(("_client", "_number", "_iterator", "_epoch", "_devices"))
        return {**self.__dict__, **lost, "consumption": Consumption(self.consumption.loader)}

    # State

    def state_dict(self) -> dict[str, Any]:
        """Where the loader is, counted by the batches that `next()` has returned. Keys: `trainer/resume/state.py`.

        A new dict each time, which JSON can hold unless a sampler's own state is none. In an epoch, also after
        `break`: that epoch, from the next batch on. Before or after one: the next epoch.
        """
        epoch = self._epoch
        if epoch is not None and self._resume is None:
            return epoch.state()
        return self._state_between()

    def _state_between(self) -> State:
        from dataloaderjob.trainer.resume import progress
        from dataloaderjob.trainer.resume import state as states

        if self._is_torchs:
            return {"version": 1, "iterable": True, "batches": 0}
        if self._resume is not None:
            return dict(self._resume.state)
        facts = {**states.described(self, self.dataset_id), "probes": self.probes()}
        return progress.fresh(self, facts)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Has the next `iter()` go on where `state_dict()` was called, in this loader or one like it.

        {} means nothing to load, which is said; {"batches": n} skips n batches of the next epoch.
        Raises InputError, a ValueError, naming the difference, if the state is another loader's; what a sample tells
        is found out at `iter()`.
        """
        from dataloaderjob.trainer.resume import sampling
        from dataloaderjob.trainer.resume import state as states

        if isinstance(state_dict, Mapping) and not state_dict:
            service.say_once("the loader's state is empty, so the next epoch begins at its first batch")
            return
        is_streamed = isinstance(state_dict, Mapping) and state_dict.get("iterable")
        if is_streamed or self._is_torchs:
            service.say_once(_NO_STATE)
            return
        resume = states.Resume.of(state_dict)
        saved, own = resume.state.get("loader") or {}, states.described(self, self.dataset_id)
        for said in states.compare(saved, own, is_new_epoch=resume.is_new_epoch):
            service.say_once(said)
        sampling.mark_unset(self._index_sampler)
        self._iterator = None
        self._resume = resume

    def skip(self, batches: int) -> None:
        """Has the next `iter()` begin after so many batches of its epoch. None of them is made, but for those of an
        IterableDataset."""
        self.load_state_dict({"batches": batches})

    def begin_epoch(self, *, again: bool = False) -> Epoch:
        """The epoch of the next iterator, or of the same one (`again`)."""
        from dataloaderjob.trainer.resume import state as states
        from dataloaderjob.trainer.resume.progress import Epoch

        resume, self._resume = self._resume, None
        facts = states.described(self, self.dataset_id)
        self._epoch = Epoch(self, facts, self._epoch, resume, again=again)
        return self._epoch

    def probes(self) -> list[str | None] | None:
        """Digests of three samples, by which a state knows the dataset; made at the first call that can make them.

        None: the dataset has an id, or the service is not at hand.
        """
        if self.dataset_id is not None or self._is_stream:
            return None
        can_make = self._is_made_here() or (self._client is not None and self._client.is_connected)
        if self._probes is None and can_make:
            from dataloaderjob.trainer.resume import state as states

            keys = states.probe_keys(states.length_of(self.dataset))
            self._probes = states.steady(*(states.probe(self._probing(keys), len(keys)) for _ in range(2)))
        return self._probes

    def _check_resume(self) -> None:
        """Compares samples with those of a state that was loaded. Raises InputError."""
        from dataloaderjob.trainer.resume import state as states

        saved = {} if self._resume is None else (self._resume.state.get("loader") or {})
        probes = None if saved.get("dataset_id") else saved.get("probes")
        own = self.probes() if probes else None
        if probes and own:
            states.compare_probes(probes, own, states.probe_keys(saved.get("length")))

    def _probing(self, keys: list[int]) -> DataLoader[Any]:
        """A loader of the same samples, one by one, made where this one's are made."""

        probing: DataLoader[Any] = type(self).__new__(type(self))
        vars(probing).update(vars(self))
        vars(probing).update(
            batch_size=None, batch_sampler=None, sampler=keys, collate_fn=unchanged, drop_last=False,
            persistent_workers=False, pin_memory=False, device=None, device_stage=None, parts=None,
            _sent_to=(None, None, AHEAD),
            generator=torch.Generator().manual_seed(0), timeout=0 if self._is_made_here() else PROBE_S,
            _iterator=None, _resume=None, _epoch=None, _probes=[], _number=PROBING + self._number_of_this(),
            consumption=Consumption(PROBING),
        )  # fmt: skip
        return probing
