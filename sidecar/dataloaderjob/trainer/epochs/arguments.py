"""Checks the arguments of DataLoader that torch does not have against the others. Raises the same errors as torch, or
InputError."""

from __future__ import annotations

from torch.utils.data import IterableDataset, default_collate

from dataloaderjob.core.control import MOST_AHEAD
from dataloaderjob.core.errors import InputError
from dataloaderjob.trainer.session.iterated import Iterated

TAILS = ("drop", "pad", "error")


def check(loader: Iterated) -> None:
    """Checks the arguments of a loader. Raises ValueError, TypeError and InputError."""
    is_stream = isinstance(loader.dataset, IterableDataset)
    if loader.tail is not None:
        _check_tail(loader, is_stream)
    if loader.stage is not None:
        _check_stage(loader, is_stream)
    if loader.parts is not None:
        _check_parts(loader, is_stream)
    _check_device(loader)


def _check_tail(loader: Iterated, is_stream: bool) -> None:
    if loader.tail not in TAILS:
        raise ValueError(f"tail is 'drop', 'pad' or 'error', found {loader.tail!r}")
    if not is_stream:
        raise InputError(
            "tail= is for an IterableDataset; the samples of others are dealt to ranks by a sampler: "
            "DistributedSampler, and its drop_last"
        )
    if loader.num_workers == 0:
        raise InputError(
            "tail= deals out what feeders make: give num_workers, the number of workers that read the dataset for "
            "all ranks together, found 0"
        )


def _check_stage(loader: Iterated, is_stream: bool) -> None:
    if not callable(loader.stage):
        raise TypeError(f"stage is a function of one sample, found {type(loader.stage).__name__}")
    if not is_stream:
        raise InputError(
            "stage= is for an IterableDataset, whose slots read in order; any feeder makes any batch of others: do it "
            "in __getitem__"
        )


def _check_device(loader: Iterated) -> None:
    stage, ahead = loader.device_stage, loader.prefetch_device
    if stage is not None and not callable(stage):
        raise TypeError(
            f"device_stage is a function of a batch and a generator, found {type(stage).__name__}"
        )
    if type(ahead) is not int or not 1 <= ahead <= MOST_AHEAD:
        raise ValueError(f"prefetch_device is a number from 1 to {MOST_AHEAD}, found {ahead!r}")
    if stage is not None and loader.device is None:
        raise InputError("device_stage= needs device=: where its batches are to be, such as 'cuda', or 'cpu'")


def _check_parts(loader: Iterated, is_stream: bool) -> None:
    if type(loader.parts) is not int or not 1 <= loader.parts <= MOST_AHEAD:
        raise ValueError(f"parts is a number from 1 to {MOST_AHEAD}, found {loader.parts!r}")
    if is_stream or loader.batch_sampler is None or getattr(loader.dataset, "__getitems__", None):
        raise InputError(
            "parts= is for batches whose samples are made one by one, of a map-style dataset: not for an "
            "IterableDataset, batch_size=None or a dataset with __getitems__, such as torch's Subset: give the "
            "subset's own dataset, and sampler=SubsetRandomSampler(subset.indices)"
        )
    if loader.collate_fn is not default_collate:
        raise InputError(
            "parts= puts batches together as torch's default_collate makes them: leave out collate_fn, or parts="
        )
