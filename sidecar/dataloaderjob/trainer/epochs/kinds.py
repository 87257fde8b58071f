"""The choice of an iterator for a loader that gets its batches from feeders. Rarely used iterators are imported on
demand."""

from __future__ import annotations

from torch.utils.data import IterableDataset

from dataloaderjob.trainer.epochs.sampled_iterator import SampledIterator
from dataloaderjob.trainer.epochs.service_iterator import ServiceIterator
from dataloaderjob.trainer.session.spec import EpochSpec


def kind_of_iterator(spec: EpochSpec) -> type[ServiceIterator]:
    if not isinstance(spec.dataset, IterableDataset) and spec.parts is None:
        return SampledIterator
    from dataloaderjob.trainer.epochs.parts_iterator import PartsIterator
    from dataloaderjob.trainer.epochs.planned_iterator import PlannedIterator

    return PlannedIterator if spec.parts is None else PartsIterator
