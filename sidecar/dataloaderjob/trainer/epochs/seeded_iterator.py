"""The base class of all iterators. It handles an epoch's seeds, its part of a state, and the end of an iterator that
lost a batch."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch.utils.data.dataloader import _BaseDataLoaderIter

from dataloaderjob.core import errors
from dataloaderjob.core.consumption import Consumption
from dataloaderjob.trainer.device.transfer import Transfer, Way
from dataloaderjob.trainer.epochs.source import EpochSource
from dataloaderjob.trainer.resume.progress import Epoch, Progress
from dataloaderjob.trainer.resume.sampling import TrackedSampler, first_keys
from dataloaderjob.trainer.session.spec import EpochSpec

_U64 = (1 << 64) - 1
_is_profiling: Any = vars(torch.autograd)["_profiler_enabled"]


class SeededIterator(_BaseDataLoaderIter):
    """Base class of all iterators. It derives an epoch's seeds, and marks each next() in a profiler trace, as torch
    does.

    An iterator ends if next() may have lost a batch. This is assumed after a KeyboardInterrupt, or anything else that
    is not an `Exception`. An `Exception`, such as one from a signal handler, ends the iterator only if a batch was
    already taken. `progress` counts only the batches that were returned.

    `__slots__` make next() cheaper: in an object with more than 30 attributes, CPython looks up each attribute in a
    dict.
    """

    __slots__ = (
        "_bare", "_broken", "_consumption", "_drawn", "_draws", "_epoch", "_epoch_seed", "_first", "_over", "_position",
        "_way",
    )  # fmt: skip

    def __init__(self, loader: EpochSource, spec: EpochSpec, epoch: Epoch) -> None:
        # As in torch, iter(sampler) comes first, then the base seed is drawn from loader.generator.
        super().__init__(cast("Any", loader))
        self._consumption: Consumption = spec.consumption
        self._bare = spec.bare
        self._way: Way = loader.way(pins=self._pin_memory, pin_device=self._pin_memory_device)
        self._begin(epoch, int(self._base_seed) & _U64)

    def _begin(self, epoch: Epoch, base_seed: int) -> None:
        self._epoch = epoch
        self._epoch_seed = epoch.seeded(base_seed)
        self._draws = epoch.draw_number
        self._drawn, self._position = epoch.first_batches, epoch.first_samples
        self._first = self._num_yielded = self._drawn
        """Number of batches of the epoch that were returned before this iterator was created."""
        self._over = False
        self._broken = ""
        """The reason why no further batch will arrive."""
        epoch.follow(self)
        self._begin_consumption()

    def _begin_consumption(self) -> int:
        """Begins an epoch in the loader's digest. Returns the change to the digest that has not been reported yet."""
        return self._consumption.begin()

    def _reset(self, loader: EpochSource, first_iter: bool = False) -> None:
        """Begins a new epoch of the same iterator (`persistent_workers=True`). torch draws no seed in this case
        either."""
        epoch = loader.begin_epoch(again=True)
        super()._reset(loader, first_iter)
        self._begin(epoch, epoch.base_seed)

    def progress(self) -> Progress:
        """Returns the progress of the epoch. A batch that failed counts as returned."""
        batches, samples, keys = self._returned()
        source = self._sampler_iter
        sampler = source.after(batches) if type(source) is TrackedSampler else None
        return batches, samples, self._over, first_keys(keys), sampler

    def refresh(self) -> None:
        """Reads messages that have arrived and that affect a state."""

    def _returned(self) -> tuple[int, int, Any]:
        """Returns (number of batches returned, number of samples in them, keys of the last batch)."""
        raise NotImplementedError

    def state_dict(self) -> dict[str, Any]:
        """Returns the loader's state, with the progress of this iterator."""
        return self._epoch.state()

    def __del__(self) -> None:
        epoch = getattr(self, "_epoch", None)
        if epoch is not None:
            try:  # noqa: SIM105  during shutdown, the interpreter may have cleared this module's globals
                epoch.ended(self, self.progress())
            except Exception:  # noqa: S110  it may be only partly constructed
                pass

    def __next__(self) -> Any:
        if self._broken:
            raise errors.ServiceError(self._broken)
        try:
            if _is_profiling():
                with torch.autograd.profiler.record_function(self._profile_name):
                    return self._next_data()
            return self._next_data()
        except BaseException as exc:
            if isinstance(exc, StopIteration) and not self._over:
                raise RuntimeError(
                    "the epoch is not over, but a StopIteration was raised within next()"
                ) from exc
            if isinstance(exc, Exception) and not self._has_lost():
                if isinstance(exc, errors.InputError):  # the message is complete, and the frames are internal
                    raise exc.with_traceback(None) from exc.__cause__
                raise
            self._broken = (
                f"{type(exc).__name__} interrupted next(), which ends the iterator: call iter(loader) for a new epoch, "
                "or resume this one from loader.state_dict()"
            )
            self._leave()
            raise

    def _has_lost(self) -> bool:
        """Returns True if a batch was taken that next() will not return."""
        return False

    def _new_transfer(self) -> Transfer | None:
        """Returns a transfer that sends the batches of one stream to their destination."""
        return self._way.transfer(self._epoch_seed)

    def _leave(self) -> None:
        """Abandons all outstanding requests, without waiting."""
