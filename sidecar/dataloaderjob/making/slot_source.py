"""One slot of an IterableDataset. It makes the same batches as torch's worker with the same number.

The seeds are the same as torch's. `begin_session` seeds the generators once, and user code draws from there on. A batch
depends only on the earlier batches of its slot. So a slot that starts again on another feeder makes the same batches.
"""

from __future__ import annotations

import os
import pickle
import random
from collections.abc import Callable, Iterator, Mapping
from typing import Any, cast

import numpy as np
import torch
from torch.utils.data import default_collate, default_convert

from dataloaderjob.batches.decoding import Decoder
from dataloaderjob.batches.encoding import encode
from dataloaderjob.core.errors import RemoteProtocolError
from dataloaderjob.core.places import DISTRIBUTED_VARIABLE, SHARES
from dataloaderjob.core.snapshots import DATA
from dataloaderjob.core.ticket_codec import SlotTicket
from dataloaderjob.making.fetcher import SampleError, is_of_user, stack_in_private_memory
from dataloaderjob.making.generator_states import checked_numpy, checked_python, checked_torch
from dataloaderjob.making.staged import COLLATE

ITER, NEXT = "__iter__", "__next__"
"""Phases of a slot, named after the user's function that runs."""
OnSample = Callable[[int], None]


class SlotEnded(Exception):
    """Internal: the slot has no batch of this number."""


class SlotSource:
    """The batches of one slot, in order."""

    def __init__(
        self, dataset: Any, collate_fn: Callable[[Any], Any] | None, *, allow_pickle: bool = False
    ) -> None:
        """If `allow_pickle` is true, snapshots may be pickles, which run code when they are loaded."""
        self._dataset, self._collate_fn = dataset, collate_fn
        self.allow_pickle = allow_pickle
        self.on_collate: Callable[[], None] | None = None
        """Called when the samples of a batch have been read, before collate_fn."""
        self._iterator: Iterator[Any] | None = None
        self._has_ended = False
        self.made = 0
        """Number of batches made so far, including failed ones."""
        self.swallowed: BaseException | None = None
        """The last error that was raised while earlier batches were rebuilt."""

    # Snapshots

    def snapshot(self) -> bytes | None:
        """Returns the slot's state for `restore`: the state of the iterator or the dataset, and of the generators.

        Returns None if neither has `state_dict` and `load_state_dict`, or once the slot has ended. Raises errors of
        user code and of pickle, and UnsupportedBatch for a state that only a pickle can contain.
        """
        holder: Any = self._iterator if _has_state(self._iterator) else self._dataset
        if self._has_ended or self._iterator is None or not _has_state(holder):
            return None
        generators = random.getstate(), np.random.get_state(), torch.default_generator.get_state()
        state = holder is self._iterator, holder.state_dict(), generators, self.made
        if self.allow_pickle:
            return pickle.dumps(state, protocol=5)
        return DATA + b"".join(encode(state, allow_pickle=False).buffers)

    def restore(self, snapshot: bytes, made: int) -> None:
        """Resumes from a snapshot after `made` batches, in a slot that has made nothing yet. Raises errors of user
        code, and RemoteProtocolError for an invalid snapshot."""
        of_iterator, state, generators = _checked(self._loaded(snapshot), made)
        if not of_iterator:
            self._dataset.load_state_dict(state)
        self._iterator = iter(self._dataset)
        if of_iterator:
            cast("Any", self._iterator).load_state_dict(state)
        random.setstate(generators[0])
        np.random.set_state(generators[1])
        torch.default_generator.set_state(generators[2])
        self.made = made

    def _loaded(self, snapshot: bytes) -> Any:
        if snapshot.startswith(DATA):
            body = np.frombuffer(
                snapshot, np.uint8, offset=len(DATA)
            ).copy()  # aligned, and writable by its owner
            return Decoder(allow_pickle=False).decode(body)
        if not self.allow_pickle:
            raise RemoteProtocolError("the state of a slot is a pickle, which requires allow_pickle=True")
        return pickle.loads(snapshot)  # noqa: S301  the user allowed it

    # Batches

    def make(
        self,
        ticket: SlotTicket,
        on_sample: OnSample | None = None,
        on_replay: Callable[[int, Any], None] | None = None,
    ) -> Any:
        """Returns the batch of a ticket. Earlier batches that have not been made yet are made first, because the batch
        depends on them.

        `on_sample` is called with the number of each sample in its batch before the sample is made. `on_replay` is
        called with the number of each batch that was made first, and with that batch. Raises SlotEnded if the slot has
        no such batch. Raises SampleError from an exception of user code. `made` counts such a batch, too.
        """
        stack_in_private_memory()
        if on_sample is not None:
            on_sample(0)  # effects of iter() or a state on the process count, too
        if ticket.snapshot is not None and not self.made and ticket.snapshot[0] <= ticket.number:
            self.restore(ticket.snapshot[1], ticket.snapshot[0])
        while self.made < ticket.number:
            try:
                batch = self._next(ticket, on_sample)
            except SampleError as exc:
                self.swallowed = exc.cause  # it was reported when that batch was first made, or is new
                continue
            if on_replay is not None:
                on_replay(self.made - 1, batch)
        return self._next(ticket, on_sample)

    def _next(self, ticket: SlotTicket, on_sample: OnSample | None) -> Any:
        try:
            batch = self._fetch(ticket, on_sample)
        except SampleError:
            self.made += 1
            raise
        self.made += 1
        return batch

    def _fetch(self, ticket: SlotTicket, on_sample: OnSample | None) -> Any:
        if self._has_ended:
            raise SlotEnded
        samples: list[Any] = []
        iterator = self._begun()
        while not self._has_ended and len(samples) < ticket.size:
            if on_sample is not None:
                on_sample(len(samples))
            try:
                samples.append(next(iterator))
            except StopIteration:
                self._has_ended = True
            except BaseException as exc:
                if not is_of_user(exc):
                    raise
                raise SampleError(NEXT, exc) from exc
        if not samples or (ticket.drop_last and len(samples) < ticket.size):
            self._has_ended = True
            raise SlotEnded
        if self.on_collate is not None:
            self.on_collate()
        collate = self._collate_fn or (default_convert if ticket.bare else default_collate)
        try:
            return collate(samples[0] if ticket.bare else samples)
        except BaseException as exc:
            if not is_of_user(exc):
                raise
            raise SampleError(COLLATE, exc) from exc

    def _begun(self) -> Iterator[Any]:
        """Returns the iterator, and creates it at the first call. If `iter(dataset)` raises an exception, the slot has
        ended, and this method raises SampleError from that exception."""
        if self._iterator is None:
            try:
                self._iterator = iter(self._dataset)
            except BaseException as exc:
                if not is_of_user(exc):
                    raise
                self._has_ended = True
                raise SampleError(ITER, exc) from exc
        return self._iterator


def _checked(loaded: Any, made: int) -> tuple[Any, Any, tuple[Any, ...]]:
    """Checks a slot's state after `made` batches, which comes from a checkpoint or from another feeder. Returns its
    parts. Raises RemoteProtocolError if the state is invalid."""
    try:
        of_iterator, state, (pythons, numpys, torchs), counted = loaded
        if type(counted) is not int or counted != made:
            raise ValueError(f"expected the state after {made} batches, got {counted!r:.40}")
        generators = checked_python(pythons), checked_numpy(numpys), checked_torch(torchs)
    except (ValueError, TypeError) as exc:
        raise RemoteProtocolError(f"the state of a slot cannot be resumed: {exc}") from exc
    return of_iterator, state, generators


def _has_state(holder: Any) -> bool:
    return callable(getattr(holder, "state_dict", None)) and callable(
        getattr(holder, "load_state_dict", None)
    )


# The rank that a slot belongs to


def be_of_rank(env: Mapping[str, str]) -> None:
    """Makes the process report its trainer's rank to a dataset that is sharded by rank.

    A worker that torch forks has its trainer's process group, whose rank and size it can read. Here, a substitute group
    has only a rank and a size. Operations that communicate with other ranks raise an exception.
    """
    for name in SHARES:
        os.environ.pop(name, None)
    os.environ.update(env)
    if DISTRIBUTED_VARIABLE in env and torch.distributed.is_available():
        group = torch.distributed.ProcessGroup(int(env["RANK"]), int(env["WORLD_SIZE"]))  # type: ignore[call-arg]
        torch.distributed.distributed_c10d._update_default_pg(group)  # noqa: SLF001  torch has no other way
