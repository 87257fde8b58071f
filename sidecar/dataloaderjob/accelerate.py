"""Our own iterator and its state, inside a loader that Accelerate has prepared.

`accelerator.prepare()` rebuilds a loader as a plain torch loader. A loader that was a `dataloaderjob.DataLoader` keeps
its feeders through its `multiprocessing_context`. `adopt` restores our iterator, which costs less per batch, and its
state. `accelerator.save_state()` and `load_state()` then resume the loader at the exact batch.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch.utils.data import BatchSampler, IterableDataset
from torch.utils.data.dataloader import _BaseDataLoaderIter

from dataloaderjob.core.errors import InputError
from dataloaderjob.making.fetcher import derive_seed
from dataloaderjob.trainer.interop.context import FeedersContext
from dataloaderjob.trainer.loader import DataLoader
from dataloaderjob.trainer.resume import generators, sampling
from dataloaderjob.trainer.resume.progress import new_epoch
from dataloaderjob.trainer.resume.state import LoaderState, Resume
from dataloaderjob.trainer.session import service
from dataloaderjob.trainer.session.service import LeftOut
from dataloaderjob.trainer.session.tickets import Placed

_KEPT = (
    "collate_fn", "pin_memory", "timeout", "worker_init_fn", "generator", "prefetch_factor", "persistent_workers",
    "pin_memory_device", "in_order",
)  # fmt: skip
_SKIPPED_INTO = "skipped_into"
"""Marks the state of an epoch that one of Accelerate's loaders resumed. Such a state does not record how far the epoch
got."""
_Prepared = TypeVar("_Prepared")


@dataclass(frozen=True, slots=True)
class _Begun:
    """The beginning of an epoch whose state was loaded, for the Accelerate loader that resumes the epoch."""

    resume: Resume
    own: dict[str, generators.Own]
    seeds: torch.Generator | None
    """The loader's generator. torch draws an iterator's seed from it before the sampler draws."""
    prepared: weakref.ref[Any] | None

    def order_of(self, sampler: Iterable[Any]) -> Iterator[Any]:
        """Returns the sampler's batches in that epoch's order. Leaves the process's generators in the states that the
        script gave them."""
        state, found = self.resume.state, generators.now(others=True)
        states, saved = state.get("generators") or {}, (state.get("now") or {}).get(generators.DEFAULT)
        if saved is not None and self.seeds is None:
            found[generators.DEFAULT] = generators.before_a_seed(saved, found[generators.DEFAULT])
        self._put(states)
        try:
            batches = iter(sampler)
            first = list(itertools.islice(batches, 1))
        finally:
            generators.put_shared({name: text for name, text in found.items() if name in states})
        holder: Any = None if self.prepared is None else self.prepared()
        if holder is not None:
            holder.dl_state_dict = {**state, _SKIPPED_INTO: True}
        return itertools.chain(first, batches)

    def _put(self, states: Mapping[str, str]) -> None:
        drawn = dict(self.resume.state.get("drawn") or ())
        generators.put_own(self.own, {**states, **drawn})
        generators.put_shared({**states, **drawn})
        draws = self.seeds is not None or generators.DEFAULT in states
        if draws and not drawn and not self.resume.resets:
            torch.empty((), dtype=torch.int64).random_(generator=self.seeds)

    def check(self, number: int, keys: Any, sampler: Any) -> None:
        """Raises InputError if this is the last batch that the state counts, and its keys differ."""
        if number == self.resume.batches - 1 and not self.resume.state.get(_SKIPPED_INTO):
            self.resume.check_order(keys, sampler)


class Placing(BatchSampler):
    """A batch sampler that adds to each batch its place in the epoch.

    Accelerate and Hugging Face's Trainer resume with `skip_first_batches`. This function creates a torch loader that
    knows neither how many batches it skips nor the seed with which the epoch began. The seed therefore depends only on
    the epoch and on the seed of the process.
    """

    def __init__(self, inner: Any) -> None:
        self.batch_sampler = inner
        self._epoch = 0
        self.begun = 0
        """Number of iterations so far, by any loader."""
        self.goes_on: _Begun | None = None
        """The epoch of a loaded state, until a loader resumes the epoch."""

    def __getattr__(self, name: str) -> Any:
        if name == "batch_sampler":
            raise AttributeError(name)
        return getattr(self.batch_sampler, name)

    def __len__(self) -> int:
        return len(self.batch_sampler)

    @property
    def sampler(self) -> Any:
        """The innermost sampler. Accelerate takes it out and puts it back when it saves and loads a checkpoint."""
        return self._innermost.sampler

    @sampler.setter
    def sampler(self, sampler: Any) -> None:
        self._innermost.sampler = sampler

    @property
    def _innermost(self) -> Any:
        one = self.batch_sampler
        while getattr(one, "batch_sampler", None) is not None:
            one = one.batch_sampler
        return one

    @property
    def epoch(self) -> int:
        """The sampler's epoch, or the epoch passed to `set_epoch` if the sampler has none."""
        epoch = sampling.epoch_of(self.batch_sampler)
        return self._epoch if epoch is None else epoch

    def set_epoch(self, epoch: int) -> None:
        self._epoch = epoch
        sampling.set_epoch(self.batch_sampler, epoch)

    def epoch_seed(self) -> int:
        """Returns the seed to use instead of the seed that torch would draw for an iterator."""
        return derive_seed(torch.initial_seed(), self.epoch) >> 1

    def __iter__(self) -> Iterator[list[Any]]:
        self.begun += 1
        begun, self.goes_on = self.goes_on, None
        seed, position = self.epoch_seed(), 0
        batches = iter(self.batch_sampler) if begun is None else begun.order_of(self.batch_sampler)
        for number, keys in enumerate(batches):
            if begun is not None:
                begun.check(number, keys, self.batch_sampler)
            yield Placed(keys, number, position, seed)
            position += len(keys)


class _Adopted(DataLoader[Any]):
    """The loader that replaces torch's loader inside a prepared loader."""

    prepared: weakref.ref[Any] | None = None
    _begun_before = 0
    """Number of iterations of the batch sampler when a state was loaded."""
    _left: Resume | None = None
    """State of an epoch that a batch-skipping loader resumes, or had resumed when the state was saved."""

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        super().load_state_dict(state_dict)
        if self._resume is None:
            return
        self._begun_before = self._begun()
        resume, epoch = self._resume, state_dict.get("epoch")
        prepared = self._holder
        if prepared is not None:
            prepared.dl_state_dict = dict(state_dict)
            if epoch is not None:
                is_over = state_dict.get("finished") and state_dict.get("iterations")
                # Accelerate sets the sampler's epoch from this number.
                prepared.iteration = epoch + bool(is_over)
        if not resume.is_new_epoch and isinstance(self.batch_sampler, Placing):
            self.batch_sampler.goes_on = _Begun(
                resume, generators.generators_of(self.epoch_spec()), self.generator, self.prepared
            )
            if epoch is not None:
                self.batch_sampler.set_epoch(epoch)
                sampling.mark_unset(self._index_sampler)
        self._left = resume if state_dict.get(_SKIPPED_INTO) else None

    def state_dict(self) -> dict[str, Any]:
        self._leave_to_another()
        return super().state_dict()

    def _get_iterator(self) -> _BaseDataLoaderIter:
        self._leave_to_another()
        if isinstance(self.batch_sampler, Placing):  # otherwise the loader yields single samples
            if self._left is not None:
                self._follow(self._left)
            self.batch_sampler.goes_on = None
        return super()._get_iterator()

    def _follow(self, left: Resume) -> None:
        """Begins with the epoch after the one that another loader resumed, unless the script has set an epoch."""
        if self._resume is not None:
            service.say_once(
                "the checkpoint was saved in an epoch that skip_first_batches had resumed, so the loader "
                "begins with the next epoch: call skip_first_batches to resume the saved one"
            )
        self._resume, self._left = None, None
        epoch, prepared = left.state.get("epoch"), self._holder
        if prepared is not None and epoch is not None and prepared.iteration == epoch:
            prepared.set_epoch(epoch + 1)
        if self.persistent_workers and self.num_workers:  # one iterator for all epochs, which draws one seed
            self._resume = Resume.of(self._next_of_persistent(left))

    def _next_of_persistent(self, left: Resume) -> LoaderState:
        """Returns the state between the epoch of `left` and the same iterator's next epoch, with the generators'
        current states."""
        state, own = left.state, generators.generators_of(self.epoch_spec())
        states = state.get("generators") or {}
        now = generators.all_now(own, shared=generators.DEFAULT in states, others=generators.PYTHON in states)
        kept = {
            name: state[name]
            for name in ("epoch", "iterations", "base_seed", "rank", "digest")
            if name in state
        }
        return new_epoch(state.get("loader") or {}, now, resets=left.resets + 1, **kept)

    @property
    def _holder(self) -> Any:
        """The prepared loader, or None if it no longer exists."""
        return None if self.prepared is None else self.prepared()

    def _begun(self) -> int:
        return getattr(self.batch_sampler, "begun", 0)

    def _leave_to_another(self) -> None:
        """Drops the loaded state if a batch-skipping loader has resumed its epoch in the meantime."""
        if self._resume is not None and self._begun() != self._begun_before:
            self._left, self._resume = self._resume, None
            service.say_once(
                "skip_first_batches resumes the epoch, so the position that load_state() restored is not used"
            )

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "prepared": None}


def adopt(prepared: _Prepared, *, allow_pickle: bool = False, dataset_id: str | None = None) -> _Prepared:
    """Installs our loader in `prepared`, a loader that `accelerator.prepare()` returned. Returns `prepared`.

    `prepared` must have a map-style dataset. The class that the loader had before `prepare()` does not matter.
    `allow_pickle` and `dataset_id` mean the same as in `dataloaderjob.DataLoader`. Raises InputError if `prepared` is
    anything else.
    """
    base = getattr(prepared, "base_dataloader", None)
    if base is None or not hasattr(prepared, "use_stateful_dataloader"):
        raise InputError(
            "adopt() takes the object that accelerator.prepare() returned for a DataLoader, got "
            f"{type(prepared).__name__}"
        )
    if isinstance(base.dataset, IterableDataset):
        raise InputError(
            "adopt() takes loaders of map-style datasets (__getitem__ and __len__), got one of an iterable "
            "dataset: use dataloaderjob.DataLoader for it, without prepare(), and move its batches to the "
            "device yourself"
        )
    if isinstance(base, _Adopted):
        return prepared
    workers, given = base.num_workers, base.multiprocessing_context
    sampler: dict[str, Any] = {"batch_size": None, "sampler": base.sampler}
    if base.batch_sampler is not None:
        sampler = {"batch_sampler": Placing(base.batch_sampler)}
    if not workers:
        service.say_once(
            "num_workers is 0, so this process makes the batches. A loader that skips some of them, as "
            "Hugging Face's Trainer does to resume, then draws different random numbers: set num_workers "
            "to 1 or more"
        )
    ours: _Adopted = _Adopted(
        base.dataset,
        **sampler,
        num_workers=None if isinstance(workers, LeftOut) else workers,
        allow_pickle=allow_pickle or (isinstance(given, FeedersContext) and given.allow_pickle),
        dataset_id=dataset_id,
        **(given.of if isinstance(given, FeedersContext) else {}),
        **{name: getattr(base, name) for name in _KEPT if not (name == "prefetch_factor" and not workers)},
    )
    ours.prepared = weakref.ref(prepared)
    holder: Any = prepared
    holder.base_dataloader, holder.use_stateful_dataloader = ours, True
    holder.dl_state_dict = {}
    return prepared
