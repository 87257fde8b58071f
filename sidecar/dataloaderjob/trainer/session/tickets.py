"""A stream's tickets, made from a sampler's keys. Pure except for the pickling of the user's keys."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import Any

import numpy as np
import torch

from dataloaderjob.core import ticket_codec
from dataloaderjob.core.errors import InputError
from dataloaderjob.making.fetcher import pickle_keys
from dataloaderjob.trainer.session.stream import Stream

SHOWN = 8
"""Maximum number of a batch's keys in a message."""


class Placed(list[Any]):
    """Keys of one batch, with their place in the epoch. The place is correct even if earlier batches were skipped."""

    __slots__ = ("number", "position", "seed")

    def __init__(self, keys: Sequence[Any], number: int, position: int, seed: int) -> None:
        super().__init__(keys)
        self.number, self.position, self.seed = number, position, seed


def as_keys(given: Any, *, bare: bool) -> Sequence[Any]:
    """Returns the keys of one batch, as the object that torch passes to its fetcher.

    Keys that can be iterated only once, or that another process would iterate in a different order, become a list.
    """
    if bare:
        return [given]
    if type(given) is Placed:
        return list(given)
    if isinstance(given, Sequence | np.ndarray | torch.Tensor):
        len(given)  # raises TypeError for a scalar
        return given  # type: ignore[return-value]
    return list(given)


def submit(
    stream: Stream,
    seed: int,
    position: int,
    number: int,
    keys: Sequence[Any],
    *,
    bare: bool,
    batch: int | None = None,
    draws: int = 0,
) -> None:
    """Adds a ticket for the next flush. If the ticket is for a part of a batch, `batch` is the number of that batch.
    For `draws`, see `Ticket.draws`.

    Raises InputError if the keys cannot be pickled.
    """
    if draws:
        packed = _pack(seed, position, number if batch is None else batch, keys, bare=bare)
        stream.pending[number] = ticket_codec.with_draws(packed, draws)
    elif type(keys) is list and ticket_codec.all_ints(keys):
        # Packed later, with its neighbors; the list may be the sampler's own.
        stream.pending[number] = seed, position, keys if bare else keys.copy(), bare
    else:
        stream.pending[number] = _pack(seed, position, number if batch is None else batch, keys, bare=bare)
    stream.asked = number + 1


def _pack(seed: int, position: int, number: int, keys: Sequence[Any], *, bare: bool) -> bytes:
    try:
        if type(keys) is list and len(keys) > 1 and set(map(type, keys)) == {np.int64}:
            array = np.array(keys)  # a single pickle instead of one for each key
            return ticket_codec.pack_ticket_of_items(seed, position, array)
        return ticket_codec.pack_ticket(seed, position, keys, bare=bare, pickle_keys=pickle_keys)
    except Exception as exc:
        raise InputError(
            f"the sampler's keys for batch {number} cannot be sent to feeders ({exc}): use keys that can "
            "be pickled"
        ) from exc


def described(number: int, keys: Sequence[Any]) -> str:
    """Describes a batch for a message."""
    shown = ", ".join(map(str, islice(keys, SHOWN)))
    more = f", ... {len(keys)} in all" if len(keys) > SHOWN else ""
    return f"batch {number}, indices [{shown}{more}]"
