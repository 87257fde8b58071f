"""Making one batch from one ticket, as torch's map-style fetcher does, but with seeds derived from the ticket.

The same class runs in feeders and, for `num_workers=0`, in the trainer.

Seeds of samples and batches are derived from the iterator's base seed. A seed depends only on (base seed, purpose,
position, key), so a batch is the same in every process. The hash is BLAKE2b over little-endian words, which takes 0.7
µs. splitmix64 in plain Python takes 1.2 µs.

If `get_worker_info()` is not None, torch's default_collate stacks tensors into a new shared-memory file for each batch.
torch's own transport needs this file. The result also has the dtype of the first sample, instead of the promoted dtype.
A feeder does not need the file, and the dtype would make its batches differ from those of `num_workers=0`. So this
module prevents both.

A sampler's keys that are not integers are pickled for each batch. The script's classes are sent only once, in the
bundle. A class of `__main__` is pickled by name, together with its definition. If the bundle contains the class, the
feeder uses the bundle's class, so that `isinstance` and `==` work. Otherwise, it loads the definition once.
"""

from __future__ import annotations

import io
import operator
import pickle
import random
import struct
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from hashlib import blake2b
from typing import Any

import numpy as np
import torch
from torch.utils.data import default_collate, default_convert, get_worker_info
from torch.utils.data._utils import worker
from torch.utils.data._utils.collate import default_collate_fn_map
from torch.utils.data._utils.worker import _generate_state

from dataloaderjob.core import digests, values
from dataloaderjob.core.ticket_codec import ReadSamples, SlotTicket, Ticket, all_ints
from dataloaderjob.making import libraries
from dataloaderjob.making.held import NOTHING_HELD, HeldGenerators
from dataloaderjob.making.staged import COLLATE
from dataloaderjob.shipping import names
from dataloaderjob.shipping.modules import MAINS
from dataloaderjob.shipping.pickling import UserCodePickler, rest_of, with_main

SAMPLE = "__getitem__"
SAMPLES = "__getitems__"
"""The phases of a fetch, named after the user's function that runs in each."""
OnSample = Callable[[int], None]
_MASK = (1 << 64) - 1
OF_SAMPLE, OF_BATCH = 1, 2
"""Purposes of seeds. They make the seed of sample 3 differ from the seed of batch 3."""
_sample_words = struct.Struct("<4Q").pack
# Used instead of torch.manual_seed, which also seeds the accelerators: 1.2 µs instead of 150 to 180 µs.
_seed_torch = torch.default_generator.manual_seed
_seed_numpy = np.random.seed
_seed_random = random.seed
_INT64 = (1 << 63) - 1
_definitions: dict[int, tuple[Any, bytes]] = {}


@cache
def stack_in_private_memory() -> None:
    """Makes torch's collate function for tensors ignore the worker info, so that it does not use shared memory. Runs
    once per process."""
    original = default_collate_fn_map[torch.Tensor]

    def stack(batch: Any, *, collate_fn_map: Any = None) -> Any:
        info, worker._worker_info = worker._worker_info, None  # noqa: SLF001  torch has no other switch
        try:
            return original(batch, collate_fn_map=collate_fn_map)
        finally:
            worker._worker_info = info  # noqa: SLF001

    default_collate_fn_map[torch.Tensor] = stack


class SampleError(Exception):
    """Internal: user code raised an exception. This error holds the phase and the sample. Users receive its
    `__cause__`."""

    def __init__(self, phase: str, cause: BaseException, *, position: int | None = None, key: Any = None):
        super().__init__(f"{phase} raised {type(cause).__name__}")
        self.phase = phase
        """SAMPLE, SAMPLES or COLLATE."""
        self.cause = _error(phase, cause)
        """The exception that the user gets, in this process or from a feeder."""
        self.position = position
        """The position of the failed sample in its batch, if the phase is SAMPLE."""
        self.key = key
        """The sampler's key for that sample."""


def _error(phase: str, cause: BaseException) -> BaseException:
    """Returns the exception itself, or a RuntimeError in place of a StopIteration. Under torch's loader, a
    StopIteration ends the loop, as if the epoch were over."""
    if not isinstance(cause, StopIteration | StopAsyncIteration):
        return cause
    text = f"{phase} raised {type(cause).__name__}" + (f": {cause}" if cause.args else "")
    error = RuntimeError(text).with_traceback(cause.__traceback__)
    error.__cause__ = cause.with_traceback(None)  # else the traceback would show the same frames twice
    return error


BY_KEY = "SEEDS_BY_KEY"
"""Name of an attribute of a dataset's class. If it is true, the seeds of the dataset's own generators depend on a
sample's key, but not on its position."""


class Fetcher:
    """A builder of batches from the dataset and the collate_fn of one loader."""

    def __init__(
        self,
        dataset: Any,
        collate_fn: Callable[[Any], Any] | None,
        held: HeldGenerators = NOTHING_HELD,
    ) -> None:
        """If `collate_fn` is None, torch's defaults are used: `default_collate` for batches, and `default_convert` for
        single samples.

        `held` has the generators that `dataset` and `collate_fn` hold. They are seeded in the same way as the process's
        generators.
        """
        self.held = held
        self.on_collate: Callable[[], None] | None = None
        """Called after the samples of a batch were made, before collate_fn."""
        self._by_key = bool(getattr(type(dataset), BY_KEY, False))
        self._dataset = dataset
        self._collate_fn = collate_fn
        self._getitems = getattr(dataset, "__getitems__", None) or None

    @property
    def is_by_sample(self) -> bool:
        """True if samples are made one by one, rather than by `__getitems__`."""
        return self._getitems is None

    def fetch(self, ticket_no: int, ticket: Ticket, on_sample: OnSample | None = None) -> Any:
        """Returns the batch of one ticket. Seeds the process's generators before each call of user code.

        `on_sample` is called with the position of each sample in the batch before the sample is made. If user code
        raises an exception, raises SampleError from it.
        """
        if get_worker_info() is not None:
            stack_in_private_memory()
        keys = ticket.keys
        if ticket.bare:
            data = self._sample(ticket, 0, on_sample)
        elif self._getitems is not None:
            if on_sample is not None:
                on_sample(0)
            self._seed_batch(ticket_no, ticket)
            data = _call(SAMPLES, self._getitems, keys)
        else:
            data = [self._sample(ticket, i, on_sample) for i in range(len(keys))]
        if self.on_collate is not None:
            self.on_collate()
        self._seed_batch(ticket_no, ticket)
        collate = self._collate_fn or (default_convert if ticket.bare else default_collate)
        return _call(COLLATE, collate, data)

    def _seed_batch(self, ticket_no: int, ticket: Ticket) -> None:
        seed_batch(ticket.base_seed, ticket_no)
        if self.held:
            draws, number = (0, ticket.keys[0]) if self._by_key else (ticket.draws, ticket_no)
            self.held.seed(batch_seed(draws, number), ticket.base_seed)

    def _sample(self, ticket: Ticket, i: int, on_sample: OnSample | None) -> Any:
        key = ticket.keys[i]
        if on_sample is not None:
            on_sample(i)
        seed_sample(ticket.base_seed, ticket.first_position + i, key)
        if self.held:
            draws, position = (0, key) if self._by_key else (ticket.draws, ticket.first_position + i)
            self.held.seed(sample_seed(draws, position, key), ticket.base_seed)
        try:
            return self._dataset[key]
        except BaseException as exc:
            if not is_of_user(exc):
                raise
            raise SampleError(SAMPLE, exc, position=i, key=key) from exc


def is_of_user(exc: BaseException) -> bool:
    """Returns True if the exception counts as a failure of the batch. SystemExit counts, because it must not terminate
    a feeder. A KeyboardInterrupt counts only in a feeder. A feeder's process receives no Ctrl-C, so user code must have
    raised it."""
    return isinstance(exc, Exception | SystemExit) or get_worker_info() is not None


def _call(phase: str, function: Callable[[Any], Any], argument: Any) -> Any:
    try:
        return function(argument)
    except BaseException as exc:
        if not is_of_user(exc):
            raise
        raise SampleError(phase, exc) from exc


# Seeds of the generators that user code draws from: `random`, numpy's legacy generator and torch's default generator


def derive_seed(base_seed: int, *parts: int) -> int:
    """Returns a seed in [0, 2**64) that depends on every part and on the order of the parts.

    Parts are taken modulo 2**64, so they may be negative.
    """
    words = struct.pack(f"<{1 + len(parts)}Q", base_seed & _MASK, *[part & _MASK for part in parts])
    return int.from_bytes(blake2b(words, digest_size=8).digest(), "little")


def sample_seed(base_seed: int, position: int, key: Any) -> int:
    """Returns the seed of one sample. `position` counts samples from the start of the iterator."""
    number = key if type(key) is int else key_number(key)
    # derive_seed(base_seed, OF_SAMPLE, position, number), inlined, which saves 0.8 µs per sample.
    words = _sample_words(base_seed & _MASK, OF_SAMPLE, position & _MASK, number & _MASK)
    return int.from_bytes(blake2b(words, digest_size=8).digest(), "little")


def batch_seed(base_seed: int, ticket_no: int) -> int:
    """Returns the seed of collate_fn, and of `__getitems__`, for one ticket."""
    return derive_seed(base_seed, OF_BATCH, ticket_no)


def key_number(key: Any) -> int:
    """Returns a number for a sampler's key of any kind. The number is the same in every process.

    An integer is identified by its value. This includes numpy integers and tensors of one integer. A plain value is
    identified by its encoding. Any other object is identified only by its type, because its pickle or repr may differ
    between processes. This suffices, because the position already distinguishes two samples.
    """
    try:
        return operator.index(key)
    except TypeError:
        pass
    try:
        data = values.pack(key)
    except values.NotPlainError:
        data = f"{type(key).__module__}.{type(key).__qualname__}".encode()
    return int.from_bytes(blake2b(data, digest_size=8).digest(), "little")


def identity_of(ticket_no: int, ticket: Ticket) -> int:
    """Returns a number that identifies a ticket's batch by the batch's place and keys (see `key_number`). The number is
    the same in every process."""
    keys = ticket.keys
    if type(keys) is ReadSamples:  # the same number as if the slot had made the batch itself
        return digests.identity(ticket.first_position, 0, ticket.bare, [keys.slot, keys.size])
    numbers = keys if type(keys) is list and all_ints(keys) else list(map(key_number, keys))
    return digests.identity(ticket_no, ticket.first_position, ticket.bare, numbers)


def identity_in_slot(ticket: SlotTicket) -> int:
    """Returns a number that identifies a batch of an IterableDataset by its slot and its number in the slot."""
    return digests.identity(ticket.number, 0, ticket.bare, [ticket.slot, ticket.size])


def seed_generators(seed: int) -> None:
    """Seeds all three generators from a seed below 2**64, in 8 µs.

    numpy's generator gets the upper half of the seed, and torch's (which uses only 32 bits) the lower half. Both are
    Mersenne Twisters with the same seeding. So they would produce the same stream from the same half. Afterwards,
    `torch.initial_seed()` fits into an int64, as in torch's workers, so that a sample may contain it.
    """
    _seed_random(seed)
    _seed_numpy(seed >> 32)
    _seed_torch(seed & _INT64)
    libraries.seed(seed)


def seed_worker(seed: int, number: int) -> None:
    """Seeds the process as torch seeds worker `number` for worker_init_fn: with `seed + number`, which is that worker's
    `get_worker_info().seed`."""
    _seed_random(seed + number)
    _seed_torch((seed + number) & _INT64)
    _seed_numpy(_generate_state(seed, number))  # type: ignore[no-untyped-call]
    libraries.leave_out_identities()


def seed_sample(base_seed: int, position: int, key: Any) -> None:
    """Seeds the generators before `dataset[key]`. `position` counts samples from the start of the iterator."""
    seed_generators(sample_seed(base_seed, position, key))


def seed_batch(base_seed: int, ticket_no: int) -> None:
    """Seeds the generators before `__getitems__`, and again before collate_fn."""
    seed_generators(batch_seed(base_seed, ticket_no))


@contextmanager
def preserved_generators() -> Iterator[None]:
    """Restores the process's three generators at the end. Within the context, torch runs with one thread, because sums
    depend on the number of threads.

    Entering and leaving the context take about 100 µs together.
    """
    threads = torch.get_num_threads()
    states = random.getstate(), np.random.get_state(), torch.default_generator.get_state()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.default_generator.set_state(states[2])


# A sampler's keys


class _Pickler(pickle.Pickler):
    def reducer_override(self, obj: Any) -> Any:
        if not isinstance(obj, type | types.FunctionType) or obj.__module__ not in MAINS:
            return NotImplemented
        return _attribute_of_main, (obj.__qualname__, _definition(obj))


def pickle_keys(keys: list[Any]) -> bytes:
    """Pickles a sampler's keys. Raises the errors of pickle if a key cannot be pickled."""
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
    """Returns the object at `path` in `__main__`. Called when keys are unpickled."""
    found = names.look_up("__main__", path)
    if found is not None:
        return found
    unpickler = pickle.Unpickler(io.BytesIO(definition))  # noqa: S301  authenticated, trainer to feeder only
    found = unpickler.load()
    main = vars(sys.modules["__main__"])
    for name, value in rest_of(unpickler):
        main.setdefault(name, value)
    if "." not in path:
        main.setdefault(path, found)
    return found
