"""Iterators of the DataLoader: over the service, and the reference in the process itself.

Both run the user's own sampler a window ahead: `window` index lists at `iter()`, then one more at each
`next()`. So a sampler with feedback gives the same order in both, whatever feeders do.
"""

from __future__ import annotations

import json
import time
from collections import deque
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch.utils.data import _utils
from torch.utils.data.dataloader import _BaseDataLoaderIter

from dataloaderjob.core import control as ctl
from dataloaderjob.core import errors, seeds, tickets
from dataloaderjob.core.blobs import BlobStore, Spec
from dataloaderjob.fetch import failures
from dataloaderjob.fetch.fetcher import Fetcher, SampleError
from dataloaderjob.fetch.seeding import preserved_generators
from dataloaderjob.fetch.ship import make_spec
from dataloaderjob.fetch.tree import Decoder
from dataloaderjob.trainer import holders
from dataloaderjob.trainer.client import Client, Stream

if TYPE_CHECKING:
    from dataloaderjob.trainer.loader import DataLoader

_U64 = (1 << 64) - 1


class _Windowed(_BaseDataLoaderIter):
    """Draws from the sampler: positions, seeds and tickets. Subclasses say what a ticket is for."""

    def __init__(self, loader: DataLoader, window: int) -> None:
        super().__init__(loader)  # iter(sampler), then the base seed from loader.generator, in torch's order
        self._window = window
        self._bare = not loader._auto_collation
        self._first_seed = int(self._base_seed) & _U64
        self._epoch_seed = self._first_seed
        self._resets = 0
        self._begin()

    def _begin(self) -> None:
        self._drawn = 0
        self._taken = 0
        self._position = 0
        self._exhausted = False
        self._sampler_error: BaseException | None = None

    def _reset(self, loader: Any, first_iter: bool = False) -> None:
        """`persistent_workers=True`: a new epoch of the same iterator; torch draws no seed here either."""
        super()._reset(loader, first_iter)
        self._resets += 1
        self._epoch_seed = seeds.derive(self._first_seed, self._resets)
        self._begin()
        self._draw(self._window)

    def _draw(self, count: int) -> None:
        """Advances the sampler by at most `count` batches."""
        for _ in range(count):
            if self._exhausted:
                return
            try:
                keys = next(self._sampler_iter)
            except StopIteration:
                self._exhausted = True
                return
            except BaseException as exc:
                self._exhausted, self._sampler_error = True, exc  # raised at its turn: nothing drawn is lost
                return
            if self._bare:
                keys = [keys]
            elif type(keys) is not list:
                keys = list(keys)
            self._submit(self._drawn, keys)
            self._drawn += 1
            self._position += len(keys)

    def _submit(self, number: int, keys: list[Any]) -> None:
        raise NotImplementedError

    def _finish(self) -> NoReturn:
        """No batch is left."""
        if self._sampler_error is not None:
            error, self._sampler_error = self._sampler_error, None
            raise error
        raise StopIteration

    def _pinned(self, batch: Any) -> Any:
        if self._pin_memory and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            return _utils.pin_memory.pin_memory(batch, self._pin_memory_device)  # type: ignore[no-untyped-call]
        return batch


class InProcessIterator(_Windowed):
    """`num_workers=0`: the reference that every other mode must equal."""

    def __init__(self, loader: DataLoader, window: int) -> None:
        super().__init__(loader, window)
        self._fetcher = Fetcher(loader.dataset, loader.collate_fn)
        self._queue: deque[tuple[int, tickets.Ticket]] = deque()
        self._draw(window)

    def _submit(self, number: int, keys: list[Any]) -> None:
        self._queue.append((number, tickets.Ticket(self._epoch_seed, self._position, self._bare, keys)))

    def __next__(self) -> Any:
        if not self._queue:
            self._finish()
        number, ticket = self._queue.popleft()
        try:
            with preserved_generators():
                batch = self._fetcher.fetch(number, ticket)
        except SampleError as exc:
            raise failures.as_raised(exc) from None
        finally:
            self._num_yielded += 1
            self._draw(1)
        return self._pinned(batch)

    _next_data = __next__


class ServiceIterator(_Windowed):
    """Batches from the sidecar, in order, as views of the ring."""

    def __init__(self, loader: DataLoader, client: Client, window: int) -> None:
        self._client = client
        self._control = client.control
        self._words = client.control.words
        self._ring = client.ring
        self._stream: Stream | None = None
        self._spec: Spec | None = None
        self._returned_ns = 0
        super().__init__(loader, window)
        self._timeout_s = float(loader.timeout)
        self._decoder = Decoder(allow_pickle=loader.allow_pickle or bool(client.settings["allow_pickle"]))
        self._open(loader)
        self._draw(window)
        self._flush()

    def _open(self, loader: DataLoader) -> None:
        if self._spec is None or not loader.persistent_workers:
            store = BlobStore(_path(self._client.settings["blobs"]))
            allow = loader.allow_pickle or bool(self._client.settings["allow_pickle"])
            self._spec = make_spec(
                loader.dataset, loader.collate_fn, loader.worker_init_fn, store=store, allow_pickle=allow
            )
        self._stream = self._client.open(self._spec.manifest().decode(), self._window)

    def _reset(self, loader: Any, first_iter: bool = False) -> None:
        self._close()
        self._open(loader)
        super()._reset(loader, first_iter)
        self._flush()

    def _submit(self, number: int, keys: list[Any]) -> None:
        stream = self._stream
        assert stream is not None  # noqa: S101  drawn only while a stream is open
        try:
            payload = tickets.pack(self._epoch_seed, self._position, keys, bare=self._bare)
        except Exception as exc:
            raise errors.InputError(
                f"the sampler's keys for batch {number} cannot be sent to feeders ({exc}): use keys that pickle"
            ) from exc
        self._client.ticket(stream, number, payload)

    def _flush(self) -> None:
        if self._stream is not None:
            self._client.flush(self._stream)

    def __next__(self) -> Any:
        stream = self._stream
        number = self._taken
        if stream is None or number >= self._drawn:
            self._close()
            self._finish()
        words = self._words
        began = time.perf_counter_ns()
        lease = self._control.ready(stream.id, number) if self._client.dead is None else None
        if lease is None:
            lease = self._client.wait(stream, number, self._timeout_s)
            words[ctl.W_WAIT_NS] += time.perf_counter_ns() - began
        else:
            words[ctl.W_READY_CALLS] += 1
        if self._returned_ns:
            words[ctl.W_STEP_NS] += began - self._returned_ns
        try:
            batch = self._failed(stream, number) if lease == ctl.FAILED else self._take(lease)
        finally:
            stream.pending.pop(number, None)
            self._taken = stream.awaited = number + 1
            self._num_yielded += 1
            words[ctl.W_NEXT_CALLS] += 1
            if not self._exhausted:
                self._draw(1)
                if self._exhausted:
                    self._flush()
        if self._pin_memory:
            batch = self._pinned(batch)
        self._returned_ns = time.perf_counter_ns()
        return batch

    _next_data = __next__

    def _take(self, lease: int) -> Any:
        ring = self._ring
        if ring.tail.log:
            ring.settle()
        entry = self._control.entry(lease)
        if entry.region not in ring.regions:
            self._client.until(lambda: entry.region in ring.regions)
        body = ring.lend(lease, entry)
        if ring.leased_nbytes > ring.lease_limit and ring.full:
            body = body.copy()  # the lease ends here
            ring.copies += 1
            self._words[ctl.W_COPIES] = ring.copies
            holders.warn_once(ring)
        self._words[ctl.W_LEASED_NBYTES] = ring.leased_nbytes
        return self._decoder.decode(body)

    def _failed(self, stream: Stream, number: int) -> Any:
        self._client.until(lambda: number in stream.failures)
        payload = stream.failures.pop(number)
        message = json.loads(payload)
        if "service" in message:
            raise getattr(errors, message["service"])(message["message"])
        raise failures.unpack_failure(payload)

    def _close(self) -> None:
        stream, self._stream = self._stream, None
        if stream is not None:
            self._client.close(stream)

    def __del__(self) -> None:
        stream = getattr(self, "_stream", None)
        if stream is not None:
            self._client.closed_streams.append((stream.id, stream.awaited))


def _path(text: object) -> Any:
    from pathlib import Path

    return Path(str(text))
