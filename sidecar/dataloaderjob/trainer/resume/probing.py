"""Probes: three samples that identify a dataset in a state. They are made twice, in the same kind of process as the
loader's batches."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.utils.data

from dataloaderjob.batches.digest import digest_update
from dataloaderjob.core.consumption import PROBING, Consumption
from dataloaderjob.core.errors import InputError
from dataloaderjob.making.staged import unchanged
from dataloaderjob.trainer.resume.state import length_of

PROBE_S = 2.0
"""Time limit in seconds for a sample that a state needs. It is short because a script may save the state just before
the process is terminated."""


def digests(loader: torch.utils.data.DataLoader[Any], *, number: int, here: bool) -> list[str | None]:
    """Returns the digests of a loader's probes. `number` is the loader's number. With `here`, this process makes the
    samples."""
    keys = keys_of(length_of(loader.dataset))
    first, second = (_probe(_probing(loader, keys, number, here=here), len(keys)) for _ in range(2))
    return _steady(first, second)


def keys_of(length: int | None) -> list[int]:
    """Returns the keys of the first sample, the middle one and the last."""
    return sorted({0, length // 2, length - 1}) if length else []


def _probe(samples: Iterable[Any], count: int) -> list[str | None]:
    """Returns digests of the first `count` samples. The digest is None for a sample that cannot be made in time, or
    cannot be hashed."""
    found: list[str | None] = [None] * count
    try:
        iterator = iter(samples)
    except Exception:
        return found
    for number in range(count):
        try:
            hasher = hashlib.sha256()
            digest_update(hasher, next(iterator))
            found[number] = hasher.hexdigest()[:16]
        except Exception:  # noqa: S112  whatever it is, there is nothing to compare
            continue
    return found


def _steady(first: Sequence[str | None], second: Sequence[str | None]) -> list[str | None]:
    """Returns the digests that were the same both times, and None in place of the others. A sample that changes from
    one time to the next proves nothing."""
    return [a if a == b else None for a, b in zip(first, second, strict=True)]


def compare(saved: Mapping[str, Any], probes: Callable[[], Sequence[str | None] | None]) -> None:
    """Compares a loader's samples with those of a state. Raises InputError if they differ; a sample that either side
    lacks is ignored.

    `saved` is the state's description of its loader. `probes` returns this loader's digests, or None if its samples
    cannot be made.
    """
    theirs = None if saved.get("dataset_id") else saved.get("probes")
    own = probes() if theirs else None
    for a, b, key in zip(theirs or (), own or (), keys_of(saved.get("length")), strict=False):
        if a is not None and b is not None and a != b:
            raise InputError(
                f"the state belongs to a different dataset: sample {key} differs. If this is intended, or "
                "if samples change with the epoch, give this loader a dataset_id="
            )


def _probing(
    loader: torch.utils.data.DataLoader[Any], keys: list[int], number: int, *, here: bool
) -> torch.utils.data.DataLoader[Any]:
    """Returns a loader that yields the samples of `keys` one at a time. They are made in the same kind of process as
    this loader's batches."""
    made = type(loader).__new__(type(loader))
    vars(made).update(vars(loader))
    vars(made).update(
        batch_size=None, batch_sampler=None, sampler=keys, collate_fn=unchanged, drop_last=False,
        persistent_workers=False, pin_memory=False, device=None, device_stage=None, parts=None,
        _sent_to=(None, None, vars(loader)["_sent_to"][2]),
        generator=torch.Generator().manual_seed(0), timeout=0 if here else PROBE_S,
        _iterator=None, _resume=None, _epoch=None, _probes=[], _number=PROBING + number,
        consumption=Consumption(PROBING),
    )  # fmt: skip
    return made
