"""Iterators of the DataLoader: over the service, and the reference in the process itself.

Both run the user's own sampler a window ahead: `window` index lists at `iter()`, then one more at each
`next()`. So a sampler with feedback gives the same order in both, whatever feeders do.
"""

from __future__ import annotations

import json
import time
from dataclasses import replace
from itertools import repeat, starmap
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
import torch
from torch.utils.data import _utils
from torch.utils.data.dataloader import _BaseDataLoaderIter

from dataloaderjob.core import errors, seeds, tickets
from dataloaderjob.core.blobs import BlobStore, Bundle
from dataloaderjob.core.control import (
    W_COPIES,
    W_LEASED_NBYTES,
    W_NEXT_CALLS,
    W_READY_CALLS,
    W_STEP_NS,
    W_WAIT_NS,
    W_WANT,
    Entry,
)
from dataloaderjob.fetch import failures
from dataloaderjob.fetch.bundles import make_bundle
from dataloaderjob.fetch.fetcher import Fetcher, SampleError
from dataloaderjob.fetch.seeding import preserved_generators
from dataloaderjob.fetch.tree import Decoder
from dataloaderjob.trainer import holders
from dataloaderjob.trainer.client import Client
from dataloaderjob.trainer.ring import Views
from dataloaderjob.trainer.stream import Stream

if TYPE_CHECKING:
    from dataloaderjob.trainer.loader import DataLoader

_U64 = (1 << 64) - 1
_NOTHING = object()
_now_ns = time.perf_counter_ns
FIGURES_EVERY = 16
PATIENCE_MS = 50
MODERATION_MS = 2
WAKE_AFTER = 8
WAKE_WITHIN_NS = 1_000_000
"""A trainer that waits wakes once for so many batches, if they are expected within this time."""


class _Windowed(_BaseDataLoaderIter):
    """Draws from the sampler: positions, seeds and tickets. Subclasses say what a ticket is for.

    Slots, here and below, make next() cheaper: beyond 30 attributes CPython looks each up in a dict.
    """

    __slots__ = (
        "_bare", "_drawn", "_epoch_seed", "_exhausted", "_first_seed", "_kept", "_key", "_position", "_resets",
        "_sampler_error", "_source", "_taken", "_window",
    )  # fmt: skip

    def __init__(self, loader: DataLoader, window: int) -> None:
        super().__init__(loader)  # iter(sampler), then the base seed from loader.generator, in torch's order
        self._window = window
        self._bare = not loader._auto_collation  # noqa: SLF001  torch's word for batches made of samples
        self._first_seed = int(self._base_seed) & _U64
        self._epoch_seed = self._first_seed
        self._resets = 0
        self._begin()

    def _begin(self) -> None:
        # Not iter() of it: Lightning has a sampler's iterator that begins anew then.
        self._source = starmap(self._sampler_iter.__next__, repeat(()))
        self._drawn = 0
        self._taken = 0
        self._position = 0
        self._key: Any = _NOTHING
        """What the sampler gave and was not submitted: an interrupt came in between."""
        self._kept: Any = _NOTHING
        """A batch that was taken and not returned: an interrupt came in between."""
        self._exhausted = False
        self._sampler_error: BaseException | None = None

    def _reset(self, loader: Any, first_iter: bool = False) -> None:
        """`persistent_workers=True`: a new epoch of the same iterator; torch draws no seed here either."""
        super()._reset(loader, first_iter)
        self._resets += 1
        self._epoch_seed = seeds.derive(self._first_seed, self._resets)
        self._begin()
        self._draw()

    def _draw(self) -> None:
        """Advances the sampler to a window ahead of what was taken. A key is the same until it counts as drawn."""
        target = self._taken + self._window
        while self._drawn < target and not self._exhausted:
            if self._key is _NOTHING:
                try:
                    # Not next(), between whose return and the assignment a signal's handler may run.
                    for self._key in self._source:  # noqa: B020
                        break
                    else:
                        self._exhausted = True
                except Exception as exc:  # raised at its turn: nothing that was drawn is lost
                    self._exhausted, self._sampler_error = True, exc
                    return
                except BaseException as exc:
                    # A sampler that is a generator is over now. Were it to look exhausted, an epoch
                    # would end early and in silence.
                    self._sampler_error = exc
                    raise
                if self._exhausted:
                    self._flush()
                    return
                self._sampler_error = None
            key = self._key
            try:
                keys = [key] if self._bare else key if type(key) is list else list(key)
            except Exception as exc:
                self._exhausted, self._sampler_error = True, exc
                return
            try:
                self._submit(self._drawn, keys)
            except errors.InputError as exc:  # keys that cannot travel: the sampler's error, too
                self._exhausted, self._sampler_error = True, exc
                return
            self._drawn, self._position, self._key = self._drawn + 1, self._position + len(keys), _NOTHING

    def _submit(self, number: int, keys: list[Any]) -> None:
        """Asks for a batch. Called again for the same one after an interrupt."""
        raise NotImplementedError

    def _flush(self) -> None:
        """Sends what `_submit` held back."""

    def _finish(self) -> NoReturn:
        """No batch is left."""
        if self._sampler_error is not None:
            error, self._sampler_error = self._sampler_error, None
            raise error
        raise StopIteration

    def _give(self) -> Any:
        """Lets the sampler advance, then returns what is kept; if that is interrupted, with the next call."""
        try:  # noqa: SIM105  contextlib.suppress takes ten times as long
            self._draw()
        except errors.ServiceError:
            pass  # the next call meets it again, and has no batch to lose
        batch = self._pinned(self._kept) if self._pin_memory else self._kept
        self._kept = _NOTHING
        return batch

    def _pinned(self, batch: Any) -> Any:
        if self._pin_memory and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            return _utils.pin_memory.pin_memory(batch, self._pin_memory_device)  # type: ignore[no-untyped-call]
        return batch


class InProcessIterator(_Windowed):
    """`num_workers=0`: the reference that every other mode must equal."""

    __slots__ = ("_fetcher", "_queue")

    def __init__(self, loader: DataLoader, window: int) -> None:
        super().__init__(loader, window)
        self._fetcher = Fetcher(loader.dataset, loader.collate_fn)
        self._queue: dict[int, tickets.Ticket] = {}
        self._draw()

    def _submit(self, number: int, keys: list[Any]) -> None:
        self._queue[number] = tickets.Ticket(self._epoch_seed, self._position, self._bare, keys)

    def __next__(self) -> Any:
        if self._kept is not _NOTHING:
            return self._give()
        if not self._exhausted and self._drawn < self._taken + self._window:
            self._draw()  # an interrupt kept an earlier call from it
        number = self._taken
        if number >= self._drawn:
            self._finish()
        try:
            with preserved_generators():
                batch = self._fetcher.fetch(number, self._queue[number])
        except SampleError as exc:
            self._count(number, _NOTHING)
            self._draw()
            error = failures.as_raised(exc)
            raise error from error.__cause__
        self._count(number, batch)
        return self._give()

    def _count(self, number: int, batch: Any) -> None:
        self._kept, self._taken = batch, number + 1
        self._num_yielded = number + 1
        self._queue.pop(number, None)

    _next_data = __next__


class ServiceIterator(_Windowed):
    """Batches from the sidecar, in order, as views of the ring."""

    __slots__ = (
        "_bundle",
        "_client",
        "_control",
        "_decoder",
        "_held",
        "_returned_ns",
        "_ring",
        "_stream",
        "_timeout_s",
        "_wake_after",
        "_woken",
        "_words",
    )  # fmt: skip

    def __init__(self, loader: DataLoader, client: Client, window: int) -> None:
        self._client = client
        self._control = client.control.twin()
        self._words = client.control.words
        self._ring = client.ring
        self._stream: Stream | None = None
        self._bundle: Bundle | None = None
        self._returned_ns = 0
        self._woken = 0, 0
        """(number, time) of the last batch that was waited for."""
        self._wake_after = 1
        self._held: tuple[int, int, Views] | None = None
        """(number, attachment, views) of the batch that is being taken: it outlives an interrupt."""
        super().__init__(loader, window)
        self._timeout_s = float(loader.timeout)
        self._decoder = Decoder(allow_pickle=loader.allow_pickle or bool(client.settings["allow_pickle"]))
        self._open(loader)
        self._draw()
        self._flush()

    @property
    def dead(self) -> bool:
        """Whether this iterator can give no further batch, in this process or at all."""
        return self._client.dead is not None

    def _open(self, loader: DataLoader) -> None:
        if self._bundle is None:
            store = BlobStore(_path(self._client.settings["blobs"]))
            allow = loader.allow_pickle or bool(self._client.settings["allow_pickle"])
            made = make_bundle(
                loader.dataset, loader.collate_fn, loader.worker_init_fn, store=store, allow_pickle=allow
            )
            number, epoch = loader.begin_session()
            self._bundle = replace(made, loader=number, epoch=epoch, workers=loader.num_workers)
        self._stream = self._client.open(self._bundle.manifest().decode(), self._window)

    def _reset(self, loader: Any, first_iter: bool = False) -> None:
        before = self._stream
        self._open(
            loader
        )  # first: feeders keep what a stream uses, which is the meaning of persistent_workers
        if before is not None:
            self._leave(before)
            self._client.close_collected()
        super()._reset(loader, first_iter)
        self._flush()

    def _submit(self, number: int, keys: list[Any]) -> None:
        stream = self._stream
        assert stream is not None  # noqa: S101  drawn only while a stream is open
        if tickets.all_ints(keys):
            # Packed with its neighbours; the list may be the sampler's own.
            kept = keys if self._bare else keys.copy()
            stream.pending[number] = self._epoch_seed, self._position, kept, self._bare
        else:
            stream.pending[number] = self._pack(number, keys)
        stream.asked = number + 1
        if stream.asked - stream.told >= stream.together:
            self._client.flush(stream)

    def _pack(self, number: int, keys: list[Any]) -> bytes:
        try:
            return tickets.pack(self._epoch_seed, self._position, keys, bare=self._bare)
        except Exception as exc:
            raise errors.InputError(
                f"the sampler's keys for batch {number} cannot be sent to feeders ({exc}): use keys that pickle"
            ) from exc

    def _flush(self) -> None:
        if self._stream is not None:
            self._client.flush(self._stream)

    def __next__(self) -> Any:
        if self._kept is not _NOTHING:
            return self._give()
        number = self._taken
        if not self._exhausted and self._drawn < number + self._window and self._stream is not None:
            self._draw()  # an interrupt kept an earlier call from it
        stream = self._stream
        if stream is None or number >= self._drawn:
            if not self._persistent_workers:
                self._close()
            self._finish()
        words = self._words
        began = _now_ns()
        if self._returned_ns:
            words[W_STEP_NS] += began - self._returned_ns
        try:
            if self._control.ready(stream.id, number) is not None and self._take(stream, number):
                words[W_READY_CALLS] += 1
                self._returned_ns = began
            else:
                self._wait(stream, number)
                self._returned_ns = now = _now_ns()
                words[W_WAIT_NS] += now - began
                if now - began < 4 * WAKE_WITHIN_NS:
                    self._pace_wakes(number, now)
                else:
                    self._wake_after = 1
        except Exception:
            self._draw()
            raise
        return self._give()

    _next_data = __next__

    def _wait(self, stream: Stream, number: int) -> None:
        """Sleeps until batch `number` is ready, and takes it.

        Where batches come every few 100 µs it wakes once for several (a network card's interrupt moderation):
        waking up costs more than taking one, and the second is taken from warm caches.
        """
        client, control, after = self._client, self._control, 1
        if self._wake_after > 1 and control.ready(stream.id, number + 1) is None:
            after = max(1, min(self._wake_after, stream.told - number))
        if self._words[W_WANT]:  # the ring is full: the receiver must know whose place comes first
            client.flush(stream, waiting=True)
        # Most batches come soon: what is held back, and who waits, need not be told for that.
        woken = client.sleep(stream, number, control, PATIENCE_MS if after == 1 else MODERATION_MS, after)
        if not self._take(stream, number):
            if woken or after > 1:  # by what came before; or not all came that it waited for
                client.sleep(stream, number, control, PATIENCE_MS)
            while not self._take(stream, number):
                client.wait(stream, number, control, self._timeout_s)

    def _pace_wakes(self, number: int, now: int) -> None:
        """Batch `number` was waited for until `now`: how many shall come before the next wake-up?"""
        before, then = self._woken
        self._woken = number, now
        count, elapsed = number - before, now - then
        if 2 * elapsed > WAKE_WITHIN_NS * count:
            self._wake_after = 1
        else:
            self._wake_after = max(1, min(WAKE_AFTER, self._window // 3, WAKE_WITHIN_NS * count // elapsed))

    def _take(self, stream: Stream, number: int) -> bool:
        """Keeps batch `number`, counted as taken, if it is ready. Raises its error, which counts as taking it."""
        client = self._client
        with client.lock:  # a new sidecar may be told by another thread what is taken and what is not
            if client.dead is not None:
                client.check()
            found = self._control.find(stream.id, number)
            if found is None:
                return False
            lease, entry = found
            if number not in stream.failures if entry is None else entry[2] not in self._ring.regions:
                return False  # what it needs comes over the socket
            try:
                batch = self._failed(stream, number) if entry is None else self._decode(number, lease, entry)
            except Exception:
                self._count(stream, number, _NOTHING)
                raise
            self._count(stream, number, batch)
        return True

    def _decode(self, number: int, lease: int, entry: Entry) -> Any:
        ring, attachment = self._ring, self._client.attachment
        held = self._held
        if held is not None and (held[0] != number or held[1] != attachment):
            held[2][1].tail = ring.tail  # of what an interrupt left: it ends here
            held = self._held = None
        region = ring.regions[entry[2]]
        try:
            plan = self._decoder.plan(region.map, entry[3], entry[4])
            if held is None:
                self._held = held = number, attachment, ring.lend(lease, region, entry, plan)
        except Exception:
            if held is None:  # it counts as taken: its place must come back
                self._held = number, attachment, ring.lend_unseen(lease, entry)
            raise
        lent, _, made, _ = held[2]
        if len(ring.leases) > ring.surely and ring.over_limit:
            ring.copies += 1
            self._words[W_COPIES], self._words[W_LEASED_NBYTES] = ring.copies, ring.leased_nbytes
            holders.warn_once(ring)
            return self._decoder.decode(np.array(lent))
        return plan.batch(lent, made)

    def _count(self, stream: Stream, number: int, batch: Any) -> None:
        words = self._words
        # No call between these two, so that no signal's handler runs there.
        self._kept = batch
        self._taken = stream.awaited = self._num_yielded = number + 1
        held = self._held
        if held is not None:
            held[2][1].tail = self._ring.tail
            self._held = None
        stream.pending.pop(number, None)
        if stream.failures:
            stream.failures.pop(number, None)
        words[W_NEXT_CALLS] += 1
        if number % FIGURES_EVERY == 0:
            words[W_LEASED_NBYTES] = self._ring.leased_nbytes

    def _failed(self, stream: Stream, number: int) -> Any:
        payload = stream.failures[number]
        message = json.loads(payload)
        if "service" in message:
            raise getattr(errors, message["service"])(message["message"])
        raise failures.unpack_failure(payload)

    def _close(self) -> None:
        stream = self._stream
        if stream is not None:
            self._leave(stream)
            self._stream = None
            self._client.close_collected()

    def _leave(self, stream: Stream) -> None:
        """What the next call of the client's tells the receiver. May be called again after an interrupt."""
        held = self._held
        if held is not None:
            if held[0] < stream.awaited or held[1] != self._client.attachment:
                held[2][1].tail = self._ring.tail
            else:
                self._ring.forget(held[2][1].number)  # the receiver ends it with its ticket
            self._held = None
        self._client.closed_streams.append((stream.id, stream.awaited))

    def __del__(self) -> None:
        stream = getattr(self, "_stream", None)
        if stream is not None:
            self._leave(stream)


def _path(text: object) -> Any:
    from pathlib import Path

    return Path(str(text))
