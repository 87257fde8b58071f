"""Makes one batch from one ticket, as torch's map-style fetcher does, with seeds from the ticket.

The same class runs in feeders and, for `num_workers=0`, in the trainer.

Where `get_worker_info()` answers, torch's default_collate stacks tensors into a new shared-memory file per batch, for
torch's own way to the trainer, and into the dtype of the first sample, where it otherwise promotes. A feeder has no
use for the one, and the other would make its batches differ from those of `num_workers=0`: it is kept from both.

A sampler's keys that are no integers are pickled for each batch, while the script's classes travel once, in the
bundle. So a class of `__main__` goes by name and with its definition: where the bundle brought the class, that one is
used, so that `isinstance` and `==` hold there; else the definition is loaded, once.
"""

from __future__ import annotations

import io
import pickle
import sys
import types
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch.utils.data import default_collate, default_convert, get_worker_info
from torch.utils.data._utils import worker
from torch.utils.data._utils.collate import default_collate_fn_map

from dataloaderjob.codec import names
from dataloaderjob.codec.modules import MAINS
from dataloaderjob.codec.pickling import UserCodePickler, with_main
from dataloaderjob.codec.seeding import seed_batch, seed_sample
from dataloaderjob.core.frames import Ticket

SAMPLE = "__getitem__"
SAMPLES = "__getitems__"
COLLATE = "collate_fn"
"""Phases of a fetch, by the user's function that runs."""
OnSample = Callable[[int], None]
_definitions: dict[int, tuple[Any, bytes]] = {}


@cache
def stack_in_private_memory() -> None:
    """Once for the process: replaces torch's entry for tensors by one that looks away from the worker."""
    original = default_collate_fn_map[torch.Tensor]

    def stack(batch: Any, *, collate_fn_map: Any = None) -> Any:
        info, worker._worker_info = worker._worker_info, None  # noqa: SLF001  torch has no other switch
        try:
            return original(batch, collate_fn_map=collate_fn_map)
        finally:
            worker._worker_info = info  # noqa: SLF001

    default_collate_fn_map[torch.Tensor] = stack


class SampleError(Exception):
    """User code raised. Internal: it says where; the cause (`__cause__`) is what the user gets to see."""

    def __init__(self, phase: str, cause: BaseException, *, position: int | None = None, key: Any = None):
        super().__init__(f"{phase} raised {type(cause).__name__}")
        self.phase = phase
        """SAMPLE, SAMPLES or COLLATE."""
        self.cause = cause
        self.position = position
        """The sample's place in its batch, for SAMPLE."""
        self.key = key
        """The sampler's key of that sample."""


class Fetcher:
    """Dataset and collate_fn of one loader."""

    def __init__(self, dataset: Any, collate_fn: Callable[[Any], Any] | None) -> None:
        """collate_fn None: torch's own, `default_collate` for batches, `default_convert` for bare keys."""
        self._dataset = dataset
        self._collate_fn = collate_fn
        self._getitems = getattr(dataset, "__getitems__", None) or None

    def fetch(self, ticket_no: int, ticket: Ticket, on_sample: OnSample | None = None) -> Any:
        """Returns the batch of one ticket. Seeds the process's generators before each piece of user code.

        `on_sample` is told the number of each sample in the batch before it is made.
        Raises SampleError from the exception when user code raises one.
        """
        if get_worker_info() is not None:
            stack_in_private_memory()
        seed, keys = ticket.base_seed, ticket.keys
        if ticket.bare:
            data = self._sample(ticket, 0, on_sample)
        elif self._getitems is not None:
            if on_sample is not None:
                on_sample(0)
            seed_batch(seed, ticket_no)
            data = _call(SAMPLES, self._getitems, keys)
        else:
            data = [self._sample(ticket, i, on_sample) for i in range(len(keys))]
        seed_batch(seed, ticket_no)
        collate = self._collate_fn or (default_convert if ticket.bare else default_collate)
        return _call(COLLATE, collate, data)

    def _sample(self, ticket: Ticket, i: int, on_sample: OnSample | None) -> Any:
        key = ticket.keys[i]
        if on_sample is not None:
            on_sample(i)
        seed_sample(ticket.base_seed, ticket.first_position + i, key)
        try:
            return self._dataset[key]
        except (Exception, SystemExit) as exc:
            raise SampleError(SAMPLE, exc, position=i, key=key) from exc


def _call(phase: str, function: Callable[[Any], Any], argument: Any) -> Any:
    # SystemExit, too: a sys.exit() in user code fails the batch and must not end a feeder.
    try:
        return function(argument)
    except (Exception, SystemExit) as exc:
        raise SampleError(phase, exc) from exc


class _Pickler(pickle.Pickler):
    def reducer_override(self, obj: Any) -> Any:
        if not isinstance(obj, type | types.FunctionType) or obj.__module__ not in MAINS:
            return NotImplemented
        return _attribute_of_main, (obj.__qualname__, _definition(obj))


def pickle_keys(keys: list[Any]) -> bytes:
    """Raises what pickle raises for keys that cannot travel."""
    out = io.BytesIO()
    _Pickler(out, protocol=5).dump(keys)
    return out.getvalue()


def _definition(obj: Any) -> bytes:
    known = _definitions.get(id(obj))
    if known is None:
        out = io.BytesIO()
        pickler = UserCodePickler(out, None)
        for part in with_main(obj, pickler.reached, with_names=True):
            pickler.dump(part)
        pickler.close()
        known = _definitions[id(obj)] = obj, out.getvalue()
    return known[1]


def _attribute_of_main(path: str, definition: bytes) -> Any:
    """Called where keys are unpickled."""
    found = names.look_up("__main__", path)
    if found is not None:
        return found
    unpickler = pickle.Unpickler(io.BytesIO(definition))  # noqa: S301  authenticated, trainer to feeder only
    found = unpickler.load()
    main = vars(sys.modules["__main__"])
    while True:
        try:
            name, value = unpickler.load()
        except EOFError:
            break
        main.setdefault(name, value)
    if "." not in path:
        main.setdefault(path, found)
    return found
