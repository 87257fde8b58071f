"""Checks of the DataLoader arguments that torch does not have, and notes on who makes the batches.

The checks raise the same kinds of errors as torch, or InputError.
"""

from __future__ import annotations

from typing import Any

from torch.utils.data import IterableDataset, default_collate

from dataloaderjob.core.control import MOST_AHEAD
from dataloaderjob.core.errors import InputError
from dataloaderjob.trainer.session.spec import EpochSpec

MADE_HERE = "num_workers was omitted, so batches are made in this process"
MADE_BY_TORCH = "torch's worker processes make the batches"
NO_STATE = (
    "an IterableDataset cannot be resumed unless feeders read it (they do not with num_workers=0, or if it cannot be "
    "sent to them): the next epoch begins at its first sample"
)
TAILS = ("drop", "pad", "error")


def steps(batches: int, tail: str) -> int:
    """Returns the number of batches that each rank gets if `batches` are dealt to all ranks."""
    from dataloaderjob.trainer.session import slot_places  # not while the service starts

    return batches // slot_places.world() if tail == "drop" else -(-batches // slot_places.world())


def check(spec: EpochSpec, device: Any, device_stage: Any, prefetch_device: Any) -> None:
    """Checks the arguments of a loader. Raises ValueError, TypeError and InputError."""
    is_stream = isinstance(spec.dataset, IterableDataset)
    if spec.tail is not None:
        _check_tail(spec, is_stream)
    if spec.stage is not None:
        _check_stage(spec, is_stream)
    if spec.parts is not None:
        _check_parts(spec, is_stream)
    _check_device(device, device_stage, prefetch_device)


def _check_tail(spec: EpochSpec, is_stream: bool) -> None:
    if spec.tail not in TAILS:
        raise ValueError(f"tail must be 'drop', 'pad' or 'error', but is {spec.tail!r}")
    if not is_stream:
        raise InputError(
            "tail= is only for an IterableDataset: for other datasets, use DistributedSampler and its drop_last"
        )
    if spec.num_workers == 0:
        raise InputError(
            "tail= deals batches from feeders, but num_workers is 0: set it to the number of workers that read the "
            "dataset for all ranks together"
        )


def _check_stage(spec: EpochSpec, is_stream: bool) -> None:
    if not callable(spec.stage):
        raise TypeError(f"stage must be a function of one sample, but is of type {type(spec.stage).__name__}")
    if not is_stream:
        raise InputError(
            "stage= is only for an IterableDataset: for other datasets, do the same work in __getitem__"
        )


def _check_device(device: Any, stage: Any, ahead: Any) -> None:
    if stage is not None and not callable(stage):
        raise TypeError(
            f"device_stage must be a function of a batch and a generator, but is of type {type(stage).__name__}"
        )
    if type(ahead) is not int or not 1 <= ahead <= MOST_AHEAD:
        raise ValueError(f"prefetch_device must be a number from 1 to {MOST_AHEAD}, but is {ahead!r}")
    if stage is not None and device is None:
        raise InputError("device_stage= needs device=, the device of its batches, such as 'cuda' or 'cpu'")


def _check_parts(spec: EpochSpec, is_stream: bool) -> None:
    if type(spec.parts) is not int or not 1 <= spec.parts <= MOST_AHEAD:
        raise ValueError(f"parts must be a number from 1 to {MOST_AHEAD}, but is {spec.parts!r}")
    if is_stream or spec.batch_sampler is None or getattr(spec.dataset, "__getitems__", None):
        raise InputError(
            "parts= requires a map-style dataset whose samples are made one by one. It does not support an "
            "IterableDataset, batch_size=None or a dataset with __getitems__, such as torch's Subset: instead of a "
            "Subset, pass its original dataset, and sampler=SubsetRandomSampler(subset.indices)"
        )
    if spec.collate_fn is not default_collate:
        raise InputError(
            "parts= assembles batches as torch's default_collate does: omit either collate_fn or parts="
        )
