"""torch's own iterators with `device=`, for an IterableDataset that no feeder can serve."""

from __future__ import annotations

from typing import Any

from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter, _SingleProcessDataLoaderIter

from dataloaderjob.trainer.device.transfer import WaySource, seed_of

_U64 = (1 << 64) - 1


class _Sending:
    """A mixin that sends each batch to the loader's device. The seed of the stage's generator derives from the epoch
    and the batch's number."""

    _is_made_here = False
    """True if batches may be made on the trainer's stream."""
    _base_seed: Any
    _pin_memory: bool
    _pin_memory_device: str | None

    def __init__(self, loader: WaySource) -> None:
        super().__init__(loader)  # type: ignore[call-arg]
        # torch itself pins the batches of its workers or of the dataset, so only a stage's output remains to be pinned.
        pins = self._pin_memory and loader.has_device_stage
        self._way = loader.way(pins=pins, pin_device=self._pin_memory_device)
        self._epochs = 0
        self._begin()

    def _reset(self, loader: WaySource, first_iter: bool = False) -> None:
        super()._reset(loader, first_iter)  # type: ignore[misc]
        if not first_iter:  # with persistent workers, torch draws no seed
            self._epochs += 1
            self._begin()

    def _begin(self) -> None:
        seed = int(self._base_seed) & _U64
        self._transfer = self._way.transfer(seed_of(seed, self._epochs) if self._epochs else seed)
        self._sent = 0

    def _next_data(self) -> Any:
        batch, transfer = super()._next_data(), self._transfer  # type: ignore[misc]
        if transfer is None:
            return batch
        number, self._sent = self._sent, self._sent + 1
        if self._is_made_here:
            transfer.follow()
        return transfer.accept(transfer.send(batch, number, lambda: f"batch {number}"))


class InThisProcess(_Sending, _SingleProcessDataLoaderIter):
    """The iterator for `num_workers=0`: this process makes the batches."""

    _is_made_here = True


class ByWorkers(_Sending, _MultiProcessingDataLoaderIter):
    """The iterator for `num_workers` above 0: torch's worker processes make the batches."""
