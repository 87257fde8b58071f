"""torch's own iterators, for an IterableDataset that no feeder makes, with `device=`."""

from __future__ import annotations

from typing import Any

from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter, _SingleProcessDataLoaderIter

_U64 = (1 << 64) - 1


class _Sending:
    """Sends each batch where the loader's go. A stage's generator is the epoch's and the batch's number's."""

    _base_seed: Any
    _num_yielded: int

    def __init__(self, loader: Any) -> None:
        super().__init__(loader)  # type: ignore[call-arg]
        self._transfer = loader.way(pins=False, pin_device=None).transfer(int(self._base_seed) & _U64)

    def _next_data(self) -> Any:
        batch, transfer = super()._next_data(), self._transfer  # type: ignore[misc]
        if transfer is None:
            return batch
        number = self._num_yielded
        return transfer.accept(transfer.send(batch, number, lambda: f"batch {number}"))


class InThisProcess(_Sending, _SingleProcessDataLoaderIter):
    """`num_workers=0`."""


class ByWorkers(_Sending, _MultiProcessingDataLoaderIter):
    """torch's worker processes make the batches."""
