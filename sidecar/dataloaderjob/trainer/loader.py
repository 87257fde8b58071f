"""`dataloaderjob.DataLoader`: torch's DataLoader, with batches made by feeders."""

from __future__ import annotations

import copy
import gc
import itertools
import os
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping
from multiprocessing import context as contexts
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypeVar, cast

import torch
import torch.utils.data
from torch.utils.data import Dataset, IterableDataset, Sampler
from torch.utils.data.dataloader import _BaseDataLoaderIter, _SingleProcessDataLoaderIter

from dataloaderjob.core.consumption import Consumption
from dataloaderjob.core.errors import InputError, ScratchTooSmall
from dataloaderjob.core.places import IN_FEEDER_VARIABLE
from dataloaderjob.making.staged import Staged
from dataloaderjob.trainer.device.transfer import AHEAD, Way
from dataloaderjob.trainer.epochs import arguments
from dataloaderjob.trainer.interop.context import FeedersContext
from dataloaderjob.trainer.session import service
from dataloaderjob.trainer.session.service import LeftOut
from dataloaderjob.trainer.session.spec import EpochSpec
from dataloaderjob.trainer.session.window import PER_WORKER, window_of

if TYPE_CHECKING:  # at run time, these are imported while the private service starts
    from dataloaderjob.trainer.device.devices import Device
    from dataloaderjob.trainer.resume.progress import Epoch
    from dataloaderjob.trainer.resume.state import LoaderState, Resume
    from dataloaderjob.trainer.session.client import Client

Devices: TypeAlias = "tuple[int, threading.Lock, dict[torch.device, Device]]"
_TORCHS_CONTEXT: Any = torch.utils.data.DataLoader.multiprocessing_context
_T_co = TypeVar("_T_co", covariant=True)
_numbers = itertools.count()
_made = itertools.count()


class DataLoader(torch.utils.data.DataLoader[_T_co]):
    """torch's DataLoader, with batches made by feeders instead of worker processes.

    It accepts all arguments of `torch.utils.data.DataLoader`. Only arguments that are new or that differ from torch's
    are listed here.

    Args:
        num_workers: None (default): feeders make the batches, or this process does if the dataset cannot be sent to
            them. n > 0: feeders make the batches; a service that is private to this machine has at least n of them. 0:
            this process makes the batches. An IterableDataset yields what n torch workers would yield (one worker for
            None), regardless of the number of feeders.
        prefetch_factor: number of batches to prefetch for each of `num_workers`. None: 2 if `num_workers` is given,
            otherwise the job's prefetch setting. Without such a setting, 2 for each feeder of the job, and at least 16
            batches in all.
        allow_pickle: allows feeders to send pickles to this process, for leaves of a batch that are neither tensors,
            arrays nor plain values. Off by default, because a feeder's pickle can run code in this process.
        multiprocessing_context: validated, but ignored if feeders make the batches.
        in_order: accepted, but has no effect, because batches are always in order.
        dataset_id: name of the dataset in `state_dict()`. Without it, a state identifies the dataset by its type, its
            length and three samples, which are made for this purpose.
        tail: deals the batches of an IterableDataset to the ranks in turn, in the order in which a single process would
            return them. All ranks then get the same number. The dataset must be the same on all ranks. If fewer batches
            than ranks are left at the end, "drop" drops them, "pad" repeats some of them, and "error" raises
            InputError.
        stage: function applied to each sample of an IterableDataset before `collate_fn`, such as a decoder. The dataset
            is still read in its slots, but any feeder may apply the stage to the samples that a slot has read.
        parts: number of parts into which each batch is split. Several feeders make the parts, and this process merges
            them. Useful if one feeder takes too long for a batch. Requires a map-style dataset and torch's default
            `collate_fn`.
        device: device on which the tensors of a batch arrive, such as "cuda". The loader copies them to the device
            ahead of the trainer, on its own stream. With "cpu", nothing is copied, and only `device_stage` runs. Arrays
            stay on the host. Tested with a simulated device only, not on a GPU.
        device_stage: function applied to each batch in this process, on the loader's stream: fn(batch, generator)
            returns a batch. The generator is on the device, and its seed depends on the epoch and the batch.
        prefetch_device: number of batches that are sent to the device before the trainer asks for them. Has no effect
            without `device`.
        snapshot_every_n_steps: accepted for compatibility with torchdata; every state is exact.

    Raises:
        ValueError, TypeError: invalid arguments, as in torch.
        InputError: at `iter()`, if `num_workers` requests feeders, but something cannot be sent to them.
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
        if isinstance(collate_fn, Staged):  # the loader is rebuilt from another one's attributes
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
            self.prefetch_factor = prefetch_factor  # torch replaces None with 2
        self.allow_pickle = allow_pickle
        self.consumption = Consumption(next(_made))
        """Digest of all batches taken so far. The iterators update it."""
        self._client: Client | None = None
        self._number: int | None = None
        """This loader's number among the loaders over which the process has iterated."""
        self._epochs = 0
        self.dataset_id, self.tail, self.parts = dataset_id, tail, parts
        self.device, self.device_stage, self.prefetch_device = device, device_stage, prefetch_device
        self._sent_to = device, device_stage, prefetch_device
        """The three arguments, kept in addition to the attributes, because a user's subclass may have its own
        attributes of these names."""
        arguments.check(self.epoch_spec(), device, device_stage, prefetch_device)
        if stage is not None:
            self.collate_fn = Staged(stage, self.collate_fn, is_bare=batch_size is None)
        self.snapshot_every_n_steps = snapshot_every_n_steps
        self._epoch: Epoch | None = None
        """The most recent epoch."""
        self._resume: Resume | None = None
        """The loaded state, until the next `iter()`."""
        self._probes: list[str | None] | None = None
        self._devices: Devices | None = None
        """The process id, the lock held while `device_stage` runs, and the devices to which batches were sent."""
        self._stays_here = False
        if multiprocessing_context is not None and not self._is_stream:
            service.say_once("multiprocessing_context is ignored: feeders are processes of the service")
        if workers > 0:
            self._window()

    @property
    def multiprocessing_context(self) -> contexts.BaseContext | None:
        """Context that keeps feeders in use if a library rebuilds this loader as a plain torch DataLoader. If this
        process makes the batches, or if the dataset is an IterableDataset, the value is the user's own context."""
        if self.num_workers > 0 and not self._is_stream:
            known = self.__dict__  # torch's constructor reads this property before the attributes are set
            return FeedersContext.of_loader(known.get("allow_pickle", False), known.get("_sent_to"))
        return cast("contexts.BaseContext | None", _TORCHS_CONTEXT.fget(self))

    @multiprocessing_context.setter
    def multiprocessing_context(self, value: Any) -> None:
        _TORCHS_CONTEXT.fset(self, None if isinstance(value, FeedersContext) else value)

    @property
    def pickle_allowed(self) -> bool:
        """True if batches may contain pickles, because `allow_pickle` is true or this process's environment allows
        them."""
        return self.allow_pickle or service.is_pickle_allowed()

    @property
    def digest(self) -> str:
        """Digest of the keys, order and bytes of all batches returned so far, in all epochs, as 16 hex digits."""
        return f"{self.consumption.total:016x}"

    @property
    def _feeders(self) -> int:
        """Number of feeders that the loader requests. With a stage, more feeders than slots can be used."""
        workers = int(self.num_workers)
        return max(workers, self.parts or 0, service.default_feeders() if self.stage is not None else 0)

    def _window(self) -> int:
        """Returns the number of index lists that the sampler draws ahead. The number depends only on the arguments and
        the job."""
        return window_of(self.prefetch_factor, self._feeders)

    def way(self, *, pins: bool, pin_device: str | None) -> Way:
        """Returns the destination of the batches. Raises InputError if the device does not exist."""
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
        if self._devices is None or self._devices[0] != os.getpid():  # a fork may copy a held lock
            self._devices = os.getpid(), threading.Lock(), {}
        return self._devices

    def check_worker_number_rationality(self) -> None:
        """Warns about `num_workers`, as torch does, if the feeders will be processes on this machine."""
        if not isinstance(self.num_workers, LeftOut) and service.is_private():
            super().check_worker_number_rationality()

    def __iter__(self) -> _BaseDataLoaderIter:
        iterator = self._iterator
        if getattr(iterator, "dead", False) or isinstance(iterator, _SingleProcessDataLoaderIter):
            # persistent_workers cannot reuse a dead iterator, or one that makes a stream's batches in this process.
            self._iterator = None
        try:
            return super().__iter__()
        except InputError as exc:
            # The message is complete, and the inner frames are internal.
            raise exc.with_traceback(None) from exc.__cause__

    def _get_iterator(self) -> _BaseDataLoaderIter:
        if self._is_stream and (self._stays_here or self._is_made_here()):
            if self.tail is not None:
                raise InputError(
                    "tail= requires feeders, but this process is one or makes the batches itself: omit it"
                )
            return self._stream_here()
        self._begin_service()
        resume, previous = self._resume, self._epoch
        collects = gc.isenabled()
        gc.disable()  # a garbage collection over torch's modules takes 80 ms of CPU time while the feeders import them
        try:
            return self._begin_iterator()
        except BaseException:
            # The next attempt resumes from the same state.
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
        client = None if here else self._connect()  # first: the imports would delay the service's start
        from dataloaderjob.trainer.epochs.in_process_iterator import InProcessIterator
        from dataloaderjob.trainer.epochs.kinds import kind_of_iterator

        if client is None:
            self._check_resume()
            return InProcessIterator(self, self.epoch_spec(), self.begin_epoch())
        window = self._window()
        service.compare_with_feeders(window)
        self._check_resume()
        epoch, spec = self.begin_epoch(), self.epoch_spec()
        kind = kind_of_iterator(spec)
        source = self.generator or torch.default_generator
        drawn_from = source.get_state()
        iterator = kind(self, spec, epoch, client, window)
        try:
            iterator.ship(self, spec)
        except InputError as exc:
            wrong_setting = isinstance(exc, ScratchTooSmall) and not service.is_private()
            if wrong_setting or self.tail or not (left_out or (self._is_stream and service.is_private())):
                raise  # otherwise a job would look healthy while its feeders are idle
            self._stays_here = True
            service.say_once(f"{arguments.MADE_HERE if left_out else arguments.MADE_BY_TORCH}: {exc}")
            if self._is_stream:
                return self._give_up_epoch(epoch, source, drawn_from)
            return InProcessIterator(self, spec, epoch, begun=iterator)
        iterator.start(again=not left_out)
        return iterator

    def __len__(self) -> int:
        batches = super().__len__()
        return batches if self.tail is None else arguments.steps(batches, self.tail)

    def _is_made_here(self) -> bool:
        """Returns True if this process makes the batches, as far as is currently known."""
        left_out = isinstance(self.num_workers, LeftOut)
        return self.num_workers == 0 or (
            left_out and (self._stays_here or bool(os.environ.get(IN_FEEDER_VARIABLE)))
        )

    @property
    def _is_stream(self) -> bool:
        return isinstance(self.dataset, IterableDataset)

    @property
    def _is_torchs(self) -> bool:
        """True if torch makes the batches, because the dataset is an IterableDataset that no feeder can serve."""
        return self._is_stream and (self._stays_here or self.num_workers == 0)

    def _give_up_epoch(
        self, epoch: Epoch, source: torch.Generator, drawn_from: torch.Tensor
    ) -> _BaseDataLoaderIter:
        """Falls back to torch's iterator over the stream. The epoch then has no state. Restores the loader's
        generator."""
        if epoch.first_batches:
            service.say_once(arguments.NO_STATE)
        source.set_state(drawn_from)
        epoch.settle()
        self._epoch = None
        return self._stream_here()

    def _stream_here(self) -> _BaseDataLoaderIter:
        """Returns one of torch's iterators over an IterableDataset."""
        from dataloaderjob.trainer.interop.torchs import ByWorkers, InThisProcess

        here = copy.copy(self)
        here._devices = self._devices_here()  # noqa: SLF001  a loader of this class
        here.prefetch_factor = here.prefetch_factor or PER_WORKER
        if isinstance(self.num_workers, LeftOut):
            here.num_workers, here.timeout = 0, 0
        return InThisProcess(here) if here.num_workers == 0 else ByWorkers(here)

    def epoch_spec(self) -> EpochSpec:
        """Returns the current arguments. A user may reassign some of them between epochs."""
        return EpochSpec(
            dataset=self.dataset, batch_size=self.batch_size, sampler=self.sampler, batch_sampler=self.batch_sampler,
            index_sampler=self._index_sampler, drop_last=self.drop_last, num_workers=self.num_workers,
            generator=self.generator, collate_fn=self.collate_fn, worker_init_fn=self.worker_init_fn,
            persistent_workers=self.persistent_workers, bare=not self._auto_collation, tail=self.tail,
            stage=self.stage, parts=self.parts, pickle_allowed=bool(self.pickle_allowed), consumption=self.consumption,
        )  # fmt: skip

    def begin_session(self) -> tuple[int, int]:
        """Returns the numbers of this loader and of its next iterator. They are equal on all ranks that run the same
        script."""
        self._epochs += 1
        return self._number_of_this(), self._epochs - 1

    def _number_of_this(self) -> int:
        if self._number is None:
            self._number = next(_numbers)
        return self._number

    def _begin_service(self) -> None:
        """Starts the private service early, if this loader is about to need one."""
        if self.num_workers > 0 and self._client is None and not self._stays_here:
            service.begin(self._feeders)

    def _connect(self) -> Client:
        self._client = service.connect(self._client, self._feeders)
        return self._client

    def __getstate__(self) -> dict[str, Any]:
        lost = dict.fromkeys(("_client", "_number", "_iterator", "_epoch", "_devices"))
        return {**self.__dict__, **lost, "consumption": Consumption(self.consumption.loader)}

    def state_dict(self) -> dict[str, Any]:
        """Returns the position of the loader, counted in batches that `next()` has returned.

        Each call returns a new dict. The dict can be stored as JSON, unless it contains a sampler's own state that
        cannot. During an epoch, even after `break`, the dict describes the next batch of that epoch. Before or after an
        epoch, it describes the start of the next epoch. `trainer/resume/state.py` lists the keys.
        """
        epoch = self._epoch
        if epoch is not None and self._resume is None:
            return epoch.state()
        return self._state_between()

    def _state_between(self) -> LoaderState:
        from dataloaderjob.trainer.resume import progress
        from dataloaderjob.trainer.resume import state as states

        if self._is_torchs:
            return {"version": 1, "iterable": True, "batches": 0}
        if self._resume is not None:
            return dict(self._resume.state)
        spec = self.epoch_spec()
        facts = {**states.described(spec, self.dataset_id), "probes": self.probes()}
        return progress.fresh(spec, facts)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Makes the next `iter()` resume where `state_dict()` was called, on this loader or an equivalent one.

        An empty dict loads nothing and prints a note; {"batches": n} skips n batches of the next epoch. If the state
        belongs to another loader, raises InputError (a ValueError), which names the difference. Samples are compared
        only in `iter()`.
        """
        from dataloaderjob.trainer.resume import sampling
        from dataloaderjob.trainer.resume import state as states

        if isinstance(state_dict, Mapping) and not state_dict:
            service.say_once("the loader's state is empty, so the next epoch begins at its first batch")
            return
        is_streamed = isinstance(state_dict, Mapping) and state_dict.get("iterable")
        if is_streamed or self._is_torchs:
            service.say_once(arguments.NO_STATE)
            return
        spec = self.epoch_spec()
        resume = states.Resume.of(state_dict, spec)
        for note in resume.compare_with(states.described(spec, self.dataset_id)):
            service.say_once(note)
        sampling.mark_unset(spec.index_sampler)
        self._iterator = None
        self._resume = resume

    def skip(self, batches: int) -> None:
        """Makes the next `iter()` begin after the first `batches` batches of its epoch. The skipped batches are not
        made, unless the dataset is an IterableDataset."""
        self.load_state_dict({"batches": batches})

    def begin_epoch(self, *, again: bool = False) -> Epoch:
        """Returns the epoch for the next iterator or, with `again`, the next epoch for the same iterator."""
        from dataloaderjob.trainer.resume import state as states
        from dataloaderjob.trainer.resume.progress import Epoch

        resume, self._resume = self._resume, None
        spec, probes = self.epoch_spec(), weakref.WeakMethod(self.probes)
        facts = states.described(spec, self.dataset_id)
        self._epoch = Epoch(spec, facts, self._epoch, resume, probes=probes, again=again)
        return self._epoch

    def probes(self) -> list[str | None] | None:
        """Returns digests of three samples, which identify the dataset in a state. The first call that can make the
        samples does so.

        Returns None if the dataset has an id or is an IterableDataset, or if the service is not available.
        """
        if self.dataset_id is not None or self._is_stream:
            return None
        can_make = self._is_made_here() or (self._client is not None and self._client.is_connected)
        if self._probes is None and can_make:
            from dataloaderjob.trainer.resume import probing

            number, here = self._number_of_this(), self._is_made_here()
            self._probes = probing.digests(self, number=number, here=here)
        return self._probes

    def _check_resume(self) -> None:
        """Compares samples with those in a loaded state. Raises InputError if they differ."""
        if self._resume is not None:
            from dataloaderjob.trainer.resume import probing

            probing.compare(self._resume.state.get("loader") or {}, self.probes)
