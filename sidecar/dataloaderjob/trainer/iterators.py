"""Iterators of the DataLoader: over the service, and in the process itself.

The service's runs the user's own sampler a window ahead, as torch's with workers does: `window` index lists at
`iter()`, then one more at each `next()`. That in the process draws when it is asked, as torch's does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import repeat, starmap
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch
from torch.utils.data import DataLoader, _utils
from torch.utils.data.dataloader import _BaseDataLoaderIter

from dataloaderjob.codec import failures
from dataloaderjob.codec.bundles import make_bundle
from dataloaderjob.codec.decoding import Decoder
from dataloaderjob.codec.fetcher import Fetcher, SampleError, derive_seed, pickle_keys, preserved_generators
from dataloaderjob.core import errors, frames
from dataloaderjob.core.blobs import BlobStore, Bundle
from dataloaderjob.trainer.client import Client
from dataloaderjob.trainer.stream import Stream
from dataloaderjob.trainer.taking import NOTHING, PinningTaker, Taker

_U64 = (1 << 64) - 1
_is_profiling: Any = vars(torch.autograd)["_profiler_enabled"]


class _Seeded(_BaseDataLoaderIter):
    """What both have: the seeds of an epoch, and torch's range in a profile.

    Slots, here and below, make next() cheaper: beyond 30 attributes CPython looks each up in a dict.
    """

    __slots__ = ("_bare", "_drawn", "_epoch_seed", "_first_seed", "_position", "_resets")

    def __init__(self, loader: DataLoader[Any]) -> None:
        super().__init__(loader)  # iter(sampler), then the base seed from loader.generator, in torch's order
        self._seed(loader)

    def _seed(self, loader: DataLoader[Any]) -> None:
        self._bare = not loader._auto_collation  # noqa: SLF001  torch's word for batches made of samples
        self._first_seed = int(self._base_seed) & _U64
        self._epoch_seed = self._first_seed
        self._resets = 0
        self._drawn = self._position = 0

    def _reset(self, loader: Any, first_iter: bool = False) -> None:
        """`persistent_workers=True`: a new epoch of the same iterator; torch draws no seed here either."""
        super()._reset(loader, first_iter)
        self._resets += 1
        self._epoch_seed = derive_seed(self._first_seed, self._resets)
        self._drawn = self._position = 0

    def __next__(self) -> Any:
        if _is_profiling():
            with torch.autograd.profiler.record_function(self._profile_name):
                return self._next_data()
        return self._next_data()

    def _keys(self, given: Any) -> Sequence[Any]:
        """The keys of one batch, as the object that torch hands to its fetcher.

        What can be walked once only, or elsewhere in another order, becomes a list.
        """
        if self._bare:
            return [given]
        if isinstance(given, Sequence | np.ndarray | torch.Tensor):
            len(given)  # raises TypeError for a scalar
            return given  # type: ignore[return-value]
        return list(given)


class InProcessIterator(_Seeded):
    """`num_workers=0`: the reference that every other mode must equal."""

    __slots__ = ("_fetcher",)

    def __init__(self, loader: DataLoader[Any], begun: _Seeded | None = None) -> None:
        """`begun`: an iterator that drew from the loader's generators already, whose epoch this is."""
        if begun is None:
            super().__init__(loader)
        else:
            vars(self).update(vars(begun))
            self._seed(loader)
        self._fetcher = Fetcher(loader.dataset, loader.collate_fn)

    def _next_data(self) -> Any:
        keys = self._keys(next(self._sampler_iter))
        ticket = frames.Ticket(self._epoch_seed, self._position, self._bare, keys)
        number = self._drawn
        self._drawn, self._position = number + 1, self._position + len(keys)
        try:
            with preserved_generators():
                batch = self._fetcher.fetch(number, ticket)
        except SampleError as exc:
            error = failures.as_raised(exc)
            raise error from error.__cause__
        if self._pin_memory:
            batch = _utils.pin_memory.pin_memory(batch, self._pin_memory_device)  # type: ignore[no-untyped-call]
        self._num_yielded += 1
        return batch


class ServiceIterator(_Seeded):
    """Batches from the sidecar, in order, as views of the pool.

    A batch, an error and a key of the sampler survive an interrupt, which may come anywhere within next().
    """

    __slots__ = (
        "_bundle", "_client", "_exhausted", "_key", "_pickle_allowed", "_sampler_error", "_source", "_stream",
        "_taken", "_taker", "_window",
    )  # fmt: skip
    _workers: tuple[()] = ()
    """Empty, for those who look at torch's: this process has none."""

    def __init__(self, loader: DataLoader[Any], client: Client, window: int, *, pickle_allowed: bool) -> None:
        self._client = client
        self._window = window
        self._bundle: Bundle | None = None
        self._stream: Stream | None = None
        self._taker: Taker | PinningTaker | None = None
        super().__init__(loader)
        self._pickle_allowed = pickle_allowed

    @property
    def dead(self) -> bool:
        """Whether this iterator can give no further batch, in this process or at all."""
        return self._client.dead is not None

    def ship(
        self,
        loader: DataLoader[Any],
        begin_session: Callable[[], tuple[int, int]],
        slow: Callable[[float], None],
    ) -> None:
        """Packs the user's code and data for feeders. Raises InputError where that cannot be.

        `begin_session` gives the numbers of the loader and of this epoch; it is called once all is packed.
        `slow` is called with the seconds that it took, if they are many and another iterator will take as many.
        """
        store = BlobStore(Path(str(self._client.settings["blobs"])))
        made = make_bundle(
            loader.dataset,
            loader.collate_fn,
            loader.worker_init_fn,
            store=store,
            allow_pickle=self._pickle_allowed,
            slow=slow,
        )
        number, epoch = begin_session()
        self._bundle = replace(made, loader=number, epoch=epoch, workers=int(loader.num_workers))

    def start(self, *, again: bool = False) -> None:
        """Asks for the first batches of an epoch. `again`: of the sampler's second iter(), which torch's loader with
        workers makes once it has them; a sampler may do its work there."""
        assert self._bundle is not None  # noqa: S101  shipped before
        taker = Taker(
            self._client,
            self._bundle.manifest().decode(),
            self._window,
            Decoder(allow_pickle=self._pickle_allowed),
            0.0 if self._pin_memory else float(self._timeout),
        )
        self._taker = taker
        self._stream = taker.stream
        if self._pin_memory:
            self._taker = PinningTaker(taker, self._pin_memory_device, float(self._timeout))
        if again:
            self._sampler_iter = iter(self._index_sampler)
        # Not iter() of it: Lightning has a sampler's iterator that begins anew then.
        self._source = starmap(self._sampler_iter.__next__, repeat(()))
        self._taken = 0
        self._key: Any = NOTHING
        """What the sampler gave and was not submitted: an interrupt came in between."""
        self._exhausted = False
        self._sampler_error: BaseException | None = None
        self._draw()
        self._client.flush(taker.stream)

    def _reset(self, loader: Any, first_iter: bool = False) -> None:
        before = self._taker if self._stream is not None else None
        super()._reset(loader, first_iter)
        try:
            self.start()  # first: feeders keep what a stream uses, which is the meaning of persistent_workers
        finally:
            if before is not None:
                before.leave()
                self._client.close_collected()

    def _draw(self) -> None:
        """Advances the sampler to a window ahead of what was taken. A key is the same until it counts as drawn."""
        target = self._taken + self._window
        while self._drawn < target and not self._exhausted:
            if self._key is NOTHING:
                try:
                    # Not next(), between whose return and the assignment a signal's handler may run.
                    for self._key in self._source:  # noqa: B020
                        break
                    else:
                        self._exhausted = True
                except Exception as exc:  # raised at its turn: nothing that was drawn is lost
                    self._exhausted, self._sampler_error = True, exc
                    break
                except BaseException as exc:
                    # A sampler that is a generator is over now. Were it to look exhausted, an epoch
                    # would end early and in silence.
                    self._sampler_error = exc
                    raise
                if self._exhausted:
                    if self._stream is not None:
                        self._client.flush(self._stream)
                    break
                self._sampler_error = None
            key = self._key
            try:
                keys = key if type(key) is list and not self._bare else self._keys(key)
                self._submit(self._drawn, keys)
            except errors.ServiceError:
                raise
            except Exception as exc:  # keys that are none, or cannot travel: the sampler's error, too
                self._exhausted, self._sampler_error = True, exc
                break
            self._drawn, self._position, self._key = self._drawn + 1, self._position + len(keys), NOTHING
        taker = self._taker
        if type(taker) is PinningTaker:
            taker.order(self._drawn)

    def _submit(self, number: int, keys: Sequence[Any]) -> None:
        """Asks for a batch. Called again for the same one after an interrupt."""
        stream = self._stream
        assert stream is not None  # noqa: S101  drawn only while a stream is open
        if type(keys) is list and frames.all_ints(keys):
            # Packed with its neighbours; the list may be the sampler's own.
            kept = keys if self._bare else keys.copy()
            stream.pending[number] = self._epoch_seed, self._position, kept, self._bare
        else:
            stream.pending[number] = self._pack(number, keys)
        stream.asked = number + 1
        if stream.asked - stream.sent >= stream.together:
            self._client.flush(stream)

    def _pack(self, number: int, keys: Sequence[Any]) -> bytes:
        try:
            if type(keys) is list and len(keys) > 1 and set(map(type, keys)) == {np.int64}:
                array = np.array(keys)  # one pickle of all, where each would have one of its own
                return frames.pack_ticket_of_items(self._epoch_seed, self._position, array)
            return frames.pack_ticket(
                self._epoch_seed, self._position, keys, bare=self._bare, pickle_keys=pickle_keys
            )
        except Exception as exc:
            raise errors.InputError(
                f"the sampler's keys for batch {number} cannot be sent to feeders ({exc}): use keys that pickle"
            ) from exc

    def _next_data(self) -> Any:
        taker = self._taker
        if taker is None or self._stream is None:
            self._finish()
        if taker.kept is NOTHING:
            number = taker.taken
            if not self._exhausted and self._drawn < number + self._window:
                self._taken = number
                self._draw()  # an interrupt kept an earlier call from it
            if number >= self._drawn:
                if not self._persistent_workers:
                    self._close()
                self._finish()
            try:
                taker.take()
            except Exception:
                self._taken = taker.taken
                self._draw()
                raise
        # What is taken survives an interrupt; the sampler advances before it is given.
        self._taken = self._num_yielded = taker.taken
        try:  # noqa: SIM105  contextlib.suppress takes ten times as long
            self._draw()
        except errors.ServiceError:
            pass  # the next call meets it again, and has no batch to lose
        batch, taker.kept = taker.kept, NOTHING
        return batch

    def _finish(self) -> NoReturn:
        """No batch is left."""
        error = getattr(self, "_sampler_error", None)
        if error is not None:
            self._sampler_error = None
            raise error
        raise StopIteration

    def _close(self) -> None:
        taker = self._taker
        if taker is not None and self._stream is not None:
            taker.leave()
            self._stream = None
            self._client.close_collected()

    def __del__(self) -> None:
        if getattr(self, "_stream", None) is not None and self._taker is not None:
            self._taker.leave()
