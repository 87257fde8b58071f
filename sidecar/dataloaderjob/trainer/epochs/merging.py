"""Merging of batches that `default_collate` made from parts of the samples. The result is the batch that
`default_collate` would have made from all samples. This module is pure."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

import torch


class NotMergedError(Exception):
    """Internal: these parts cannot be merged into one batch."""

    def __init__(self, why: str, *, is_final: bool = False) -> None:
        super().__init__(why)
        self.is_final = is_final
        """True if no batch of such samples can be merged. False if later batches might be."""


def merged(parts: Sequence[Any], counts: Sequence[int]) -> Any:
    """Returns the batch of all samples. `counts` holds the number of samples in each part. Raises NotMergedError if the
    parts cannot be merged."""
    kind = type(parts[0])
    if any(type(part) is not kind for part in parts):
        raise NotMergedError("the parts have different types")
    if kind is torch.Tensor:
        return _tensor(parts, counts)
    if kind is dict:
        if any(list(part) != list(parts[0]) for part in parts):
            raise NotMergedError("the dicts have different keys")
        return {key: merged([part[key] for part in parts], counts) for key in parts[0]}
    if issubclass(kind, tuple) and hasattr(kind, "_fields"):
        return kind(*(merged(items, counts) for items in zip(*parts, strict=True)))
    if kind not in (list, tuple):
        raise NotMergedError(f"they contain a value of type {kind.__name__}", is_final=True)
    items = list(chain.from_iterable(parts))
    if any(isinstance(item, str | bytes) for item in items):  # default_collate leaves these as they are
        are_samples = all(isinstance(item, str | bytes) for item in items)
        if not are_samples or [len(part) for part in parts] != list(counts):
            raise NotMergedError("there is not one string for each sample")
        return kind(items)
    if len(set(map(len, parts))) > 1:
        raise NotMergedError(f"a {kind.__name__} has different lengths in the parts")
    return kind(merged(items, counts) for items in zip(*parts, strict=True))


def _tensor(parts: Sequence[torch.Tensor], counts: Sequence[int]) -> torch.Tensor:
    first = parts[0]
    for part, count in zip(parts, counts, strict=True):
        if part.dtype != first.dtype or part.shape != (count, *first.shape[1:]):
            raise NotMergedError("the tensors have different shapes or types")
        if part.layout is not torch.strided or part.requires_grad:
            raise NotMergedError("the tensors are not dense, or require a gradient")
    return torch.cat(list(parts))
