"""Chooses the iterator for a loader whose batches feeders make. Rarer iterators are imported when they are needed."""

from __future__ import annotations

from torch.utils.data import IterableDataset

from dataloaderjob.trainer.epochs.service_iterator import ServiceIterator
from dataloaderjob.trainer.session.iterated import Iterated


def kind_of_iterator(loader: Iterated) -> type[ServiceIterator]:
    if not isinstance(loader.dataset, IterableDataset) and loader.parts is None:
        return ServiceIterator
    from dataloaderjob.trainer.epochs.parts_iterator import PartsIterator
    from dataloaderjob.trainer.epochs.planned_iterator import PlannedIterator

    return PlannedIterator if loader.parts is None else PartsIterator
