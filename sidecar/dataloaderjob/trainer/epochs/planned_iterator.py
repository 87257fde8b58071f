"""The iterator of an IterableDataset over the service. A plan decides which batches it requests and returns (see
`plans`).

Tickets are numbered in the order of the requests. A ticket yields no batch if its slot has ended. States, records and
the digest count only the batches that were returned. With `stage=`, feeders make batches from the samples that slots
have read (see `relay`).
"""

from __future__ import annotations

import functools
import warnings
from dataclasses import replace
from typing import Any, NoReturn

from torch.utils.data import IterDataPipe
from torch.utils.data.dataloader import _sharding_worker_init_fn, _share_dist_seed

from dataloaderjob.core.blobs import SLOTS
from dataloaderjob.core.consumption import error_mark
from dataloaderjob.core.control import MOST_AHEAD, W_WAIT_NS
from dataloaderjob.core.errors import InputError
from dataloaderjob.core.records import NO_BUNDLE, RowKind
from dataloaderjob.making.fetcher import derive_seed
from dataloaderjob.trainer.epochs.ahead import AheadTaker
from dataloaderjob.trainer.epochs.plan_kinds import PlanKind
from dataloaderjob.trainer.epochs.reading import SlotBatches, SlotReading
from dataloaderjob.trainer.epochs.relay import Relay
from dataloaderjob.trainer.epochs.service_iterator import ServiceIterator
from dataloaderjob.trainer.epochs.source import EpochSource
from dataloaderjob.trainer.resume.progress import Progress
from dataloaderjob.trainer.resume.state import slots_of
from dataloaderjob.trainer.session import slot_places
from dataloaderjob.trainer.session.slot_places import Saved
from dataloaderjob.trainer.session.spec import EpochSpec
from dataloaderjob.trainer.session.taking import Taker, Unopened, now_ns

_Due = tuple[bytes, Any, Any, int | None, Exception | None]
"""Arguments of `_give`: the slot's ticket, the position after the batch (for states), the batch, its digest, and the
error in its place."""


class PlannedIterator(ServiceIterator):
    """The iterator over this rank's batches from an IterableDataset's slots.

    `SlotReading` provides the next batch, and the plan decides when it is due. The iterator then returns the batch, or
    hands its samples to the relay.
    """

    __slots__ = (
        "_all_read", "_error", "_is_giving", "_kind", "_most", "_reading", "_relay", "_size", "_slots", "_to_ship",
        "_with_stage",
    )  # fmt: skip
    _reading: SlotReading
    _relay: Relay | None

    # Shipping

    def ship(self, loader: EpochSource, spec: EpochSpec) -> None:
        """Packs the user's code and data. Raises InputError if they cannot be packed, or if the sidecar cannot serve
        slots."""
        self._kind, self._relay = PlanKind.of(spec), None
        self._with_stage = spec.stage is not None
        self._window = min(self._window, MOST_AHEAD // self._kind.ranks) * self._kind.ranks
        self._to_ship: EpochSource | None = None
        self._ship(loader, spec)
        if isinstance(spec.dataset, IterDataPipe):
            # torch's loader with workers draws two seeds for the first epoch.
            _share_dist_seed(spec.generator, self._pg)  # type: ignore[no-untyped-call]

    def _ship(self, loader: EpochSource, spec: EpochSpec) -> None:
        told = self._client.settings
        if not told.get(SLOTS):
            raise InputError(
                "the sidecar's release does not serve IterableDatasets: use the image of this release "
                "(spec.sidecar.image, or the operator's), or num_workers=0"
            )
        self._slots = slots_of(spec)
        self._size = 1 if self._bare else int(spec.batch_size or 1)
        self._most = self._most_batches()
        made, _ = self._packed(spec)
        number, epoch = loader.begin_session()
        own = self._kind.session(loader, made.facts, [self._size, self._bare, self._drop_last])
        session = {"loader": number, "epoch": epoch, "workers": self._slots, **own}
        self._bundle = replace(made, **session)
        self._kept = NO_BUNDLE  # a slot's batch cannot be remade on its own

    def _held_by_classes(self) -> dict[str, int]:
        """Returns an empty dict. A slot draws random numbers as torch's worker does, and ranks that share slots need
        equal bundles."""
        return {}

    def _init_fn(self, spec: EpochSpec) -> Any:
        """Returns worker_init_fn. For an IterDataPipe, it also sets each slot's sharding filter, as each of torch's
        workers does. torch's iterator has already set the pipe's seeds."""
        own = super()._init_fn(spec)
        if not isinstance(spec.dataset, IterDataPipe):
            return own
        return functools.partial(_sharding_worker_init_fn, own, self._world_size, self._rank)

    def _tickets_ahead(self) -> int:
        """Returns how many tickets ahead the sending thread may run. In a relay's stream, all tickets are for this
        rank's batches. Otherwise, only one ticket in `ranks` is."""
        return super()._tickets_ahead() * (1 if self._with_stage else self._kind.ranks)

    # Beginning and ending

    def start(self, *, again: bool = False) -> None:  # noqa: ARG002  no sampler is iterated
        """Requests the first batches of an epoch."""
        before = None if self._relay is None else self._reading
        try:
            self._start()
        finally:
            if before is not None:
                before.taker.leave()

    def _start(self) -> None:
        assert self._bundle is not None  # noqa: S101  shipped before
        saved = Saved.of(
            self._epoch.slots, self._epoch.rank, slots=self._slots, allow_pickle=self._pickle_allowed
        )
        plan = self._kind.plan(self._slots, self._first, saved)
        if self._kind.tail is not None:
            self._bundle = replace(self._bundle, taken=tuple(saved.taken))
        batches = SlotBatches(self._epoch_seed, self._size, self._bare, self._drop_last)
        self._reading = SlotReading(
            self._client, self._open_reader(batches), plan, batches, is_ahead=self._with_stage
        )
        self._taken = 0
        self._is_giving = self._all_read = False
        self._error = ""
        """The error that ends the epoch once all batches read so far were returned."""
        self._most = self._most_batches()
        self._draw()
        self._epoch.settle()
        assert self._stream is not None  # noqa: S101  just opened
        self._client.flush(self._stream)

    def _open_reader(self, batches: SlotBatches) -> Taker | AheadTaker:
        """Opens the stream of the batches that next() returns. With a stage, also opens a stream for the slots'
        answers. Returns the taker of these answers."""
        bundle = self._bundle
        assert bundle is not None  # noqa: S101  shipped before
        if self._with_stage:  # batches made from this rank's samples belong only to this rank
            self._bundle = replace(bundle, ranks=0, facts=slot_places.facts(bundle.facts))
        self._open(0, self._window // (self._kind.ranks if self._with_stage else 1))
        self._bundle = bundle
        assert self._taker is not None  # noqa: S101  just opened
        if not self._with_stage:
            return self._taker
        seed = derive_seed(self._epoch_seed, self._kind.stage_rank())
        self._relay = Relay(self._client, self._taker, replace(batches, seed=seed), self._draws)
        return self._new_taker(0, self._window, Unopened())

    def _reset(self, loader: EpochSource, first_iter: bool = False) -> None:
        assert self._bundle is not None  # noqa: S101  shipped before
        self._to_ship = loader if isinstance(loader.epoch_spec().dataset, IterDataPipe) else None
        if self._to_ship is None:
            self._bundle = replace(self._bundle, epoch=loader.begin_session()[1])
        super()._reset(loader, first_iter)

    def _restart(self, before: Taker | AheadTaker | None) -> None:
        loader, self._to_ship = self._to_ship, None
        if loader is not None:  # torch's reset has set new seeds in the pipe
            self._ship(loader, loader.epoch_spec())
        super()._restart(before)

    def _leave(self) -> None:
        reading = getattr(self, "_reading", None)
        if reading is not None and self._relay is not None and self._stream is not None:
            reading.taker.leave()
        super()._leave()

    def _has_lost(self) -> bool:
        if self._stream is None:
            return False
        relay = self._relay
        return self._is_giving or self._reading.has_lost or (relay is not None and relay.has_lost)

    # State

    def progress(self) -> Progress:
        batches, samples, finished, keys, _ = super().progress()
        reading = getattr(self, "_reading", None)
        packed = None if finished or reading is None else reading.plan.pack(self._epoch.rank)
        return batches, samples, finished, keys, packed

    def refresh(self) -> None:
        self._client.hear()

    def _returned(self) -> tuple[int, int, Any]:
        return self._num_yielded, 0, None

    # Reading

    def _draw(self) -> None:
        """Requests the window's batches from the slots."""
        reading, most = self._reading, self._window
        if self._relay is not None:
            most -= len(self._relay.line) * self._kind.ranks
        reading.ask(most)

    def _read_on(self, *, waits: bool) -> bool:
        """Performs one action towards this rank's next batch. Returns False if no answer has arrived."""
        reading, relay = self._reading, self._relay
        if reading.taker.taken >= reading.asked:
            self._draw()  # first of all, because batches known to exist may complete the step
        if reading.is_due:
            if relay is not None:
                self._hand_on(relay)
            return True
        if reading.taker.taken < reading.asked:
            has_come = reading.take(waits=waits)
            if relay is None and not reading.is_due:
                self._advance(reading.read)
            return has_come
        if relay is not None and relay.line and not reading.plan.is_over:
            return False  # nothing more is read ahead
        try:
            self._all_read = not reading.plan.pads()
        except InputError as exc:
            self._all_read, self._error = True, str(exc)
        if self._all_read:
            reading.next = None
        return True

    def _hand_on(self, relay: Relay) -> None:
        reading = self._reading
        read, reading.read = reading.read, -1  # an error below this line ends the iterator
        relay.hand_on(*reading.took())
        reading.read = read

    # Giving

    def _next_data(self) -> Any:
        while True:
            if self._taker is None or self._stream is None:
                self._finish()
            relay = self._relay
            if relay is not None:
                self._read_ahead(relay)
                if relay.line:
                    return self._give(*self._made(relay))
            elif self._reading.is_due:
                return self._give(*self._due())
            if self._all_read:
                self._end_epoch()
            if relay is None:
                self._read_on(waits=True)
            else:
                self._await_read()

    def _read_ahead(self, relay: Relay) -> None:
        """Hands the batches that slots have read to the relay."""
        while not self._all_read and relay.has_room and self._read_on(waits=False):
            pass
        self._draw()
        relay.order()

    def _await_read(self) -> None:
        """Waits for a slot to read a batch, and counts the wait as the trainer's."""
        began = now_ns()
        try:
            self._read_on(waits=True)
        finally:
            waited = now_ns() - began
            self._client.control.words[W_WAIT_NS] += waited
            if self._taker is not None:
                self._taker.passed(waited)

    def _due(self) -> _Due:
        """Takes this rank's next batch. Returns the arguments of `_give`."""
        self._is_giving = True  # an error below this line ends the iterator
        answer, mark = self._reading.took()
        return answer.packed, mark, answer.batch, answer.digest, answer.error

    def _made(self, relay: Relay) -> _Due:
        """Takes the batch made from the first samples in line. Returns the arguments of `_give`."""
        first, taker = relay.line[0], relay.taker
        batch, error = None, first.error
        if error is not None:
            self._reading.count_calls(1)
        else:
            try:
                batch = taker.take()
            except Exception as exc:
                if not relay.has_lost:
                    raise
                error = exc.with_traceback(None)
        self._is_giving = True  # an error below this line ends the iterator
        relay.passes()
        return first.packed, first.mark, batch, taker.digest, error

    def _give(self, packed: bytes, mark: Any, batch: Any, digest: int | None, error: Exception | None) -> Any:
        """Counts and returns a batch, or raises the error in its place."""
        number = self._num_yielded
        reading = self._reading
        reading.plan.stands(mark)
        if self._relay is None:
            self._advance(reading.read)
        if self._recording is not None:
            self._recording.ask(number, packed)
        if error is not None or digest is None:
            assert error is not None  # noqa: S101  there is no digest
            self._count(number, error_mark(error), RowKind.FAILED)
            self._is_giving = False
            try:
                raise error
            finally:
                del error  # its traceback contains this frame
        if self._most is not None and number >= self._most:
            self._warn_that_long()
        self._count(number, digest)
        self._is_giving = False
        return batch

    def _end_epoch(self) -> NoReturn:
        if self._error:
            raise InputError(self._error)
        super()._end_epoch()

    def _most_batches(self) -> int | None:
        """Returns the maximum number of batches that the dataset's `len()` allows. Returns None if torch has not called
        `len()`. The last batch of each slot may be short."""
        told: Any = self._IterableDataset_len_called
        return None if told is None else -(-told // self._size) + self._slots - 1

    def _warn_that_long(self) -> None:
        """Warns once that the dataset yields more samples than its `len()`."""
        self._most = None
        warnings.warn(
            f"the dataset's len() is {self._IterableDataset_len_called}, but it yields more: each of its {self._slots} "
            "slots returns all that __iter__ yields there. If every sample is repeated, make __iter__ yield only its "
            "worker's shard, using torch.utils.data.get_worker_info()",
            stacklevel=5,
        )
