"""Base class of this package's samplers. An epoch has one global order, each rank takes a part of it, and the state is
the same on all ranks.

All ranks together consume an epoch from its beginning. After each rank has returned k items, they are at position k *
`stride`. A state holds the epoch and that position, so it is valid for every rank, and for a different number of ranks.

A sampler runs ahead of the training, and a loader may request two iterators and use only one. An iterator therefore
reads the current epoch and the loaded position only when its first item is requested. Each iterator has its own state,
which torch's StatefulDataLoader keeps with each batch.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterator, Mapping, Sized
from typing import TYPE_CHECKING, Any, Generic, Literal, NamedTuple, TypeVar, cast, get_args

from torch.utils.data import DistributedSampler

from dataloaderjob.core.errors import InputError

if TYPE_CHECKING:
    from torch.utils.data import Dataset

Tail = Literal["drop", "pad", "error"]
"""Treatment of items at the end of an epoch that do not fill all ranks. They are dropped, padded with the first items
of the epoch, or cause an InputError."""
VERSION = 1
_MOST = 1 << 53
_T = TypeVar("_T")
_T_co = TypeVar("_T_co", covariant=True)


class OrderPlace(NamedTuple):
    """The place that all ranks have in common: an epoch, and a position in its global order."""

    epoch: int
    position: int


class Cursor(Generic[_T]):
    """The progress of one iteration over a sampler."""

    def __init__(self, sampler: ElasticSampler[_T]) -> None:
        self._sampler = sampler
        self._begun: OrderPlace | None = None
        self._loaded: OrderPlace | None = None
        self._given = 0
        """Number of items up to the end of the current block."""
        self._block: Iterator[_T] = iter(())

    def place(self) -> OrderPlace:
        """Returns the place of the next item."""
        begun = self._loaded or self._begun
        if begun is None:
            return self._sampler.beginning()
        done = 0 if self._loaded else self._given - operator.length_hint(self._block)
        return OrderPlace(begun.epoch, begun.position + done * self._sampler.stride)

    def load(self, place: OrderPlace) -> None:
        """Makes the iteration continue at `place`."""
        self._begun, self._loaded = None, place
        for _ in self._block:  # discard the rest of the block
            pass

    def blocks(self) -> Iterator[Iterator[_T]]:
        """Yields blocks of items. The sampler's iterator resumes this generator for its first item, and whenever a
        block is exhausted."""
        while True:
            begun = self._loaded or self._sampler.beginning()
            self._begun, self._loaded, self._given = begun, None, 0
            self._sampler.begin(self)
            for block in self._sampler.blocks(begun):
                self._given += len(block)
                self._block = iter(block)
                yield self._block
                if self._begun is not begun:
                    break
            else:
                return


class Items(itertools.chain[_T]):
    """The iterator of a sampler. C code yields a block's items, at 20 ns per item. A `__next__` in Python would take
    100 ns."""

    sampler: ElasticSampler[_T]
    cursor: Cursor[_T]

    def state_dict(self) -> dict[str, Any]:
        """Returns the sampler's state after the last item that this iterator returned."""
        return self.sampler.state_at(self.cursor.place())

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Makes this iterator continue from `state`. Raises InputError for a state of a different order."""
        if state:
            self.cursor.load(self.sampler.accept_state(state))
            self.sampler.begin(self.cursor)


class ElasticSampler(DistributedSampler[_T_co]):
    """Base class of the samplers: positions, tails and state. A subclass implements `blocks`, which yields the items.

    The class derives from `DistributedSampler`, so frameworks that check for a distributed sampler do not replace it.
    """

    stride: int
    """Number of positions that all ranks together advance while each returns one item."""

    def __init__(
        self,
        dataset: Sized,
        num_replicas: int | None,
        rank: int | None,
        *,
        shuffle: bool,
        seed: int,
        drop_last: bool,
        tail: Tail | None,
    ) -> None:
        super().__init__(cast("Dataset[Any]", dataset), num_replicas, rank, shuffle, seed, drop_last)
        if tail is None:
            tail = "drop" if drop_last else "pad"
        elif tail not in get_args(Tail):
            raise InputError(f"tail must be one of {', '.join(get_args(Tail))}, but is {tail!r}")
        elif drop_last and tail != "drop":
            raise InputError(
                f"drop_last=True means tail='drop', but tail is {tail!r}: pass only one of the two"
            )
        self.tail: Tail = tail
        self.drop_last = tail == "drop"
        self.stride = self.num_replicas
        self._loaded: OrderPlace | None = None
        self._current: Cursor[Any] | None = None
        """The iteration that determines the sampler's state."""

    def blocks(self, place: OrderPlace) -> Iterator[list[_T_co]]:
        """Yields lists of this rank's items, from a place to the end of its epoch."""
        raise NotImplementedError

    def identity(self) -> dict[str, Any]:
        """Returns everything that determines the meaning of a position, as plain JSON-serializable values."""
        return {"seed": self.seed, "shuffle": self.shuffle}

    def details(self, place: OrderPlace) -> dict[str, Any]:  # noqa: ARG002  for subclasses
        """Returns additional entries for a state at this place."""
        return {}

    def read_details(self, place: OrderPlace, state: Mapping[str, Any]) -> None:
        """Restores the entries that `details` returned. Raises InputError, KeyError, TypeError or ValueError if they
        are invalid."""

    def __iter__(self) -> Iterator[_T_co]:
        cursor: Cursor[_T_co] = Cursor(self)
        items = cast("Items[_T_co]", Items.from_iterable(cursor.blocks()))
        items.sampler, items.cursor = self, cursor
        return items

    def set_epoch(self, epoch: int) -> None:
        """Sets the epoch of the next iteration. A position in a different epoch is dropped."""
        if self.place().epoch != epoch:
            self.restart()
        self.epoch = epoch

    def place(self) -> OrderPlace:
        """Returns the place of all ranks. Assumes that each rank has taken the same number of items as this one."""
        if self._loaded is None and self._current is not None:
            return self._current.place()
        return self.beginning()

    def beginning(self) -> OrderPlace:
        """Returns the start of the next iteration."""
        return self._loaded or OrderPlace(self.epoch, 0)

    def restart(self) -> None:
        """Drops the loaded position and the current one, so that the next iteration is a whole epoch."""
        self._loaded = self._current = None

    def begin(self, cursor: Cursor[Any]) -> None:
        """Records that an iteration starts. It uses up the loaded position, and determines the sampler's state from now
        on."""
        self._loaded, self._current = None, cursor

    def state_dict(self) -> dict[str, Any]:
        """Returns a new dict of plain values: the epoch, the position of all ranks, and the parameters that define the
        order."""
        return self.state_at(self.place())

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Makes the next iteration resume from `state`; later iterations are whole epochs. An empty dict loads nothing.

        Raises InputError for a state of a different order.
        """
        if state:
            self._loaded, self._current = self.accept_state(state), None

    def state_at(self, place: OrderPlace) -> dict[str, Any]:
        kind = type(self).__name__
        found = {"version": VERSION, "sampler": kind, "epoch": int(place.epoch), "position": place.position}
        return found | self.identity() | self.details(place)

    def accept_state(self, state: Mapping[str, Any]) -> OrderPlace:
        """Returns the place of a state, and sets this sampler's epoch from it. Unknown keys are ignored."""
        if not isinstance(state, Mapping):
            raise InputError(
                f"the state of a {type(self).__name__} must be a dict, got {type(state).__name__}"
            )
        expected = {"version": VERSION, "sampler": type(self).__name__, **self.identity()}
        missing = [name for name in ("epoch", "position", *expected) if name not in state]
        if missing:
            raise InputError(
                f"the state of a {type(self).__name__} must have {', '.join(missing)}, but has only "
                f"{', '.join(map(str, state))}: load the result of state_dict() of such a sampler"
            )
        other = {name: value for name, value in expected.items() if state[name] != value}
        if other:
            differences = "; ".join(
                f"{name} is {value!r} here and {state[name]!r} in the state" for name, value in other.items()
            )
            raise InputError(
                "this state belongs to a different order of samples, so its position is meaningless here "
                f"({differences}): create the sampler with the same arguments and data, or begin a new "
                "epoch"
            )
        try:
            place = OrderPlace(operator.index(state["epoch"]), operator.index(state["position"]))
            self.read_details(place, state)
        except InputError:
            raise
        except (KeyError, TypeError, ValueError) as exc:
            raise InputError(f"{dict(state)} is not a state of {type(self).__name__}: {exc!r}") from exc
        if place.position < 0:
            raise InputError(f"a position must be at least 0, but is {place.position} in the state")
        if max(abs(place.epoch), place.position) > _MOST:
            raise InputError(
                f"an epoch and a position may be at most {_MOST}, but are {tuple(place)} in the state"
            )
        # torch's StatefulDataLoader loads the state of an ended epoch after set_epoch has set the next one.
        self.epoch = max(self.epoch, place.epoch)
        return place


def fit(count: int, unit: int, tail: Tail, *, what: str) -> int:
    """Returns `count` rounded down (`tail` "drop") or up ("pad") to a multiple of `unit`. With "error", raises
    InputError unless `count` is a multiple. `what` names both numbers in the message."""
    over = count % unit
    if not over:
        return count
    if tail == "error":
        raise InputError(
            f"with tail='error', the number of {what} ({unit}), but is {count}: choose other sizes, or tail='drop' or "
            "'pad'"
        )
    return count - over if tail == "drop" else count - over + unit
