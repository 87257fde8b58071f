"""The iterator of an IterableDataset over the service. It returns the slots' batches in torch's order (`slot_places`).

Tickets are numbered in the order of the requests. Some yield no batch, because their slot has ended. A state, a record
and the digest count the batches that were returned.
"""

from __future__ import annotations

import functools
import warnings
from dataclasses import replace
from typing import Any

from torch.utils.data import IterDataPipe
from torch.utils.data.dataloader import _sharding_worker_init_fn, _share_dist_seed

from dataloaderjob.core import frames
from dataloaderjob.core.blobs import SLOTS
from dataloaderjob.core.consumption import FOLD, error_mark
from dataloaderjob.core.control import W_DIGEST, W_NEXT_CALLS
from dataloaderjob.core.errors import InputError, ServiceError
from dataloaderjob.core.records import NO_BUNDLE
from dataloaderjob.trainer.epochs.ahead import AheadTaker
from dataloaderjob.trainer.epochs.service_iterator import ServiceIterator
from dataloaderjob.trainer.resume.progress import Progress
from dataloaderjob.trainer.resume.state import slots_of
from dataloaderjob.trainer.session import service, slot_places
from dataloaderjob.trainer.session.iterated import Iterated
from dataloaderjob.trainer.session.slot_places import Places, Saved, SlotPlace
from dataloaderjob.trainer.session.stream import SlotEndedError, Stream
from dataloaderjob.trainer.session.taking import Taker

_U64 = (1 << 64) - 1


class SlotIterator(ServiceIterator):
    """Batches of an IterableDataset's slots."""

    __slots__ = ("_handled", "_most", "_placed", "_places", "_size", "_slots", "_to_ship")

    def ship(self, loader: Iterated) -> None:
        """Packs code and data. Raises InputError if that is impossible, or if the sidecar cannot serve slots."""
        self._to_ship: Any = None
        self._ship(loader)
        if isinstance(loader.dataset, IterDataPipe):
            # torch's loader with workers draws twice for the first epoch.
            _share_dist_seed(loader.generator, self._pg)  # type: ignore[no-untyped-call]

    def _ship(self, loader: Iterated) -> None:
        told = self._client.settings
        if not told.get(SLOTS):
            raise InputError(
                "the sidecar is of a release that does not serve IterableDatasets: use the image of this release "
                "(spec.sidecar.image, or the operator's), or num_workers=0"
            )
        self._slots = slots_of(loader)
        self._size = 1 if self._bare else int(loader.batch_size or 1)
        self._most = self._most_batches()
        made, _ = self._packed(loader)
        number, epoch = loader.begin_session()
        session = {
            "loader": number,
            "epoch": epoch,
            "workers": self._slots,
            **self._session(loader, made.facts),
        }
        self._bundle = replace(made, **session)
        self._kept = NO_BUNDLE  # a batch of a slot cannot be remade on its own

    def _held_by_classes(self) -> dict[str, int]:
        """Returns nothing: a slot draws random numbers as torch's worker does, and ranks that share slots have equal
        bundles."""
        return {}

    def _init_fn(self, loader: Iterated) -> Any:
        """Returns worker_init_fn. For an IterDataPipe it also sets each slot's shard filter, as torch's workers do for
        themselves. The pipe's seeds are in the pipe, where torch's iterator has put them."""
        own = super()._init_fn(loader)
        if not isinstance(loader.dataset, IterDataPipe):
            return own
        return functools.partial(_sharding_worker_init_fn, own, self._world_size, self._rank)

    def _session(self, loader: Iterated, facts: dict[str, Any]) -> dict[str, Any]:  # noqa: ARG002
        """Returns the bundle's fields that identify the owner of the slots."""
        return {"env": slot_places.shares(), "facts": slot_places.facts(facts)}

    def start(self, *, again: bool = False) -> None:  # noqa: ARG002  no sampler is iterated
        """Asks for the first batches of an epoch."""
        stream = self._open(0)
        self._begin_places(stream)
        self._draw()
        self._epoch.settle()
        self._client.flush(stream)

    def _begin_places(self, stream: Stream) -> None:
        saved = Saved.of(
            self._epoch.slots, self._epoch.rank, slots=self._slots, allow_pickle=self._pickle_allowed
        )
        self._places = stream.places = Places(
            self._slots, self._first, saved.snapshots, saved.ends, saved.digests
        )
        self._placed: dict[int, tuple[SlotPlace, bytes]] = {}
        self._drawn = self._taken = self._handled = 0
        self._most = self._most_batches()

    def _reset(self, loader: Iterated, first_iter: bool = False) -> None:
        assert self._bundle is not None  # noqa: S101  shipped before
        self._to_ship = loader if isinstance(loader.dataset, IterDataPipe) else None
        if self._to_ship is None:
            self._bundle = replace(self._bundle, epoch=loader.begin_session()[1])
        super()._reset(loader, first_iter)

    def _restart(self, before: Taker | AheadTaker | None) -> None:
        loader, self._to_ship = self._to_ship, None
        if loader is not None:  # torch's reset has put new seeds into the pipe
            self._ship(loader)
        super()._restart(before)

    def progress(self) -> Progress:
        batches, samples, finished, keys, _ = super().progress()
        return batches, samples, finished, keys, None if finished else self._slots_state()

    def _slots_state(self) -> Any:
        """Returns the state's entry for the slots."""
        places = getattr(self, "_places", None)
        return None if places is None else slot_places.pack(places, self._epoch.rank)

    def refresh(self) -> None:
        self._client.hear()

    def _returned(self) -> tuple[int, int, Any]:
        return self._num_yielded, 0, None

    def _draw(self) -> None:
        """Asks for batches up to one window ahead of the batches taken."""
        target, stream = self._taken + self._window, self._stream
        assert stream is not None  # noqa: S101  drawn only while a stream is open
        self._ask_slots(stream, target)
        self._sent(is_all=self._drawn < target)  # the end, or answers must come first

    def _ask_slots(self, stream: Stream, target: int) -> None:
        """Asks for batches until `target` batches have been requested."""
        self._client.hear()  # a trainer that never sleeps would read no snapshot
        places = self._places
        while self._drawn < target and (place := places.next()) is not None:
            needed = places.needed[place.slot]
            ticket = frames.SlotTicket(
                self._epoch_seed, place.number, place.slot, self._size, self._bare, self._drop_last, needed
            )
            packed = frames.pack_slot_ticket(ticket)
            if not needed:  # its feeder may not know the slot yet
                packed = places.with_beginning(packed, place)
            self._submit(stream, place, packed)

    def _submit(self, stream: Stream, place: SlotPlace, packed: bytes) -> None:
        stream.pending[self._drawn] = packed
        self._placed[self._drawn] = place, packed
        self._drawn += 1
        stream.asked = self._drawn
        if stream.asked - stream.sent >= stream.together:
            self._client.flush(stream)

    def _sent(self, *, is_all: bool) -> None:
        """Ends a round of requests. With `is_all`, no further ticket will follow that could share a message."""
        if is_all and self._stream is not None:
            self._client.flush(self._stream)
        taker = self._taker
        if type(taker) is AheadTaker:
            taker.order(self._drawn)

    def _next_data(self) -> Any:
        while True:
            taker = self._taker
            if taker is None or self._stream is None:
                self._finish()
            number = taker.taken
            if number >= self._drawn:
                self._end_epoch()
            try:
                batch = taker.take()
            except SlotEndedError as end:
                place, _ = self._placed.pop(number)
                self._places.ended(place, end.batches)
                self._passed(taker.taken)
                continue
            except Exception as exc:
                if taker.taken == number:
                    raise
                place, packed = self._placed.pop(number)
                if place.is_probe and isinstance(exc, ServiceError):
                    raise  # the length of the slot is now unknown; _has_lost() ends the iterator
                self._places.took(place, None)
                if place.is_probe:  # it was raised before the epoch was resumed
                    self._pass_over(taker.taken)
                    continue
                if self._recording is not None:
                    self._recording.ask(self._num_yielded, packed)
                self._fail(self._num_yielded, error_mark(exc))
                self._advance(taker.taken)
                self._handled = taker.taken
                raise
            place, packed = self._placed.pop(number)
            self._places.took(place, taker.digest)
            if place.is_probe:
                self._compare(place, taker.digest)
                self._pass_over(taker.taken)
                continue
            self._advance(taker.taken)
            self._give(packed, taker.digest)
            self._handled = taker.taken
            return batch

    def _pass_over(self, taken: int) -> None:
        """Skips a batch that was taken but is not returned."""
        self._client.control.words[W_NEXT_CALLS] -= 1
        self._passed(taken)

    def _passed(self, taken: int) -> None:
        """Notes that the ticket taken last yielded no batch, or a batch that is returned later."""
        self._advance(taken)
        self._handled = taken

    def _compare(self, place: SlotPlace, digest: int) -> None:
        """Prints a note if a batch returned before the state was made differs when it is made again."""
        if self._places.expected.get(place, digest) != digest:
            service.say_once(slot_places.DIFFERS.format(slot=place.slot, number=place.number))

    def _give(self, packed: bytes, digest: int) -> None:
        """Counts a batch that next() is about to return."""
        consumption, words, number = self._consumption, self._words, self._num_yielded
        before = consumption.rolling
        after = (before * FOLD + digest) & _U64
        if self._recording is not None:
            self._recording.ask(number, packed)
            self._recording.give(number, digest, after)
        if self._most is not None and number >= self._most:
            self._warn_that_long()
        consumption.rolling, self._num_yielded = after, number + 1
        words[W_DIGEST] = (words[W_DIGEST] + after - before) & _U64

    def _most_batches(self) -> int | None:
        """Returns the maximum number of batches implied by the dataset's `len()`, if `len()` was called. The last batch
        of each slot may be short."""
        told: Any = self._IterableDataset_len_called
        return None if told is None else -(-told // self._size) + self._slots - 1

    def _warn_that_long(self) -> None:
        """Warns once that a stream yields more than its `len()`."""
        self._most = None
        warnings.warn(
            f"the dataset's len() is {self._IterableDataset_len_called}, and it gives more: each of its {self._slots} "
            "slots gives all that __iter__ yields there. If every sample comes several times, let __iter__ yield a "
            "share by torch.utils.data.get_worker_info()",
            stacklevel=5,
        )

    def _has_lost(self) -> bool:
        taker = self._taker
        return self._stream is not None and taker is not None and taker.taken != self._handled
