"""What all samplers here share: one global order for an epoch, a part of it for each rank, a state without a rank.

All ranks together consume an epoch from its beginning: after k items on each of W ranks they are at position
k * `stride`. A state has the epoch and that position, so any rank's is right for all, and for another number of ranks.

A sampler runs ahead of what was trained on, and loaders ask twice for an iterator and use one. So an iterator begins
with its first item, not before: then it takes the epoch that is set and the position that was loaded. It has a state
of its own, which torch's StatefulDataLoader keeps with each batch.
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
"""What becomes of items at the end of an epoch that do not fill all ranks: they are left out, filled up with the first
ones of the epoch, or refused by InputError."""
VERSION = 1
_T = TypeVar("_T")
_T_co = TypeVar("_T_co", covariant=True)


class Place(NamedTuple):
    """Where all ranks stand together."""

    epoch: int
    position: int


class Cursor(Generic[_T]):
    """How far one iteration of a sampler is."""

    def __init__(self, sampler: ElasticSampler[_T]) -> None:
        self._sampler = sampler
        self._begun: Place | None = None
        self._loaded: Place | None = None
        self._given = 0
        """Items up to the end of the block at hand."""
        self._block: Iterator[_T] = iter(())

    def place(self) -> Place:
        """Where the item comes from that is next."""
        begun = self._loaded or self._begun
        if begun is None:
            return self._sampler.beginning()
        done = 0 if self._loaded else self._given - operator.length_hint(self._block)
        return Place(begun.epoch, begun.position + done * self._sampler.stride)

    def load(self, place: Place) -> None:
        """Goes on from there with the next item."""
        self._begun, self._loaded = None, place
        for _ in self._block:  # none of it is to come
            pass

    def blocks(self) -> Iterator[Iterator[_T]]:
        """Runs with the first item, and whenever a block is used up."""
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
    """The iterator of a sampler: C gives the items of a block, 20 ns each, where a `__next__` in Python takes 100."""

    sampler: ElasticSampler[_T]
    cursor: Cursor[_T]

    def state_dict(self) -> dict[str, Any]:
        """The state after the last item that was given."""
        return self.sampler.state_at(self.cursor.place())

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from there with the next item. Raises InputError for a state of another order."""
        if state:
            self.cursor.load(self.sampler.accept_state(state))
            self.sampler.begin(self.cursor)


class ElasticSampler(DistributedSampler[_T_co]):
    """Base of the samplers: positions, tails and state. A subclass says what stands where, by `blocks`.

    It is a `DistributedSampler`, so frameworks that look for one leave it in place.
    """

    stride: int
    """Positions that all ranks together pass while each gives one item."""

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
            raise InputError(f"tail must be one of {', '.join(get_args(Tail))}, found {tail!r}")
        elif drop_last and tail != "drop":
            raise InputError(f"drop_last=True means tail='drop', found tail={tail!r}: give one of the two")
        self.tail: Tail = tail
        self.drop_last = tail == "drop"
        self.stride = self.num_replicas
        self._loaded: Place | None = None
        self._current: Cursor[Any] | None = None
        """The iteration whose state is the sampler's."""

    def blocks(self, place: Place) -> Iterator[list[_T_co]]:
        """This rank's items from a place to the end of its epoch, list after list."""
        raise NotImplementedError

    def identity(self) -> dict[str, Any]:
        """What has to be equal for a position to mean the same: plain values that JSON carries."""
        return {"seed": self.seed, "shuffle": self.shuffle}

    def details(self, place: Place) -> dict[str, Any]:  # noqa: ARG002  for subclasses
        """What else a state has that was taken at this place."""
        return {}

    def read_details(self, place: Place, state: Mapping[str, Any]) -> None:
        """Takes that back. Raises InputError, KeyError, TypeError or ValueError where it cannot be."""

    def __iter__(self) -> Iterator[_T_co]:
        cursor: Cursor[_T_co] = Cursor(self)
        items = cast("Items[_T_co]", Items.from_iterable(cursor.blocks()))
        items.sampler, items.cursor = self, cursor
        return items

    def set_epoch(self, epoch: int) -> None:
        """Sets the epoch that the next iteration is. A position in another one is given up."""
        if self.place().epoch != epoch:
            self.restart()
        self.epoch = epoch

    def place(self) -> Place:
        """Where all ranks stand, if each has taken as many items as this one."""
        if self._loaded is None and self._current is not None:
            return self._current.place()
        return self.beginning()

    def beginning(self) -> Place:
        """Where the next iteration begins."""
        return self._loaded or Place(self.epoch, 0)

    def restart(self) -> None:
        """Gives a position up: the next iteration is a whole epoch."""
        self._loaded = self._current = None

    def begin(self, cursor: Cursor[Any]) -> None:
        """An iteration takes over: what was loaded is used up, and the state is that iteration's."""
        self._loaded, self._current = None, cursor

    def state_dict(self) -> dict[str, Any]:
        """A fresh dict of plain values: the epoch, the position that all ranks have reached, what orders the epoch."""
        return self.state_at(self.place())

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Has the next iteration go on from there; those after it are whole epochs. An empty dict loads nothing.

        Raises InputError for a state of another order.
        """
        if state:
            self._loaded, self._current = self.accept_state(state), None

    def state_at(self, place: Place) -> dict[str, Any]:
        """The state for a place."""
        kind = type(self).__name__
        found = {"version": VERSION, "sampler": kind, "epoch": int(place.epoch), "position": place.position}
        return found | self.identity() | self.details(place)

    def accept_state(self, state: Mapping[str, Any]) -> Place:
        """The place of a state, whose epoch becomes this sampler's. Keys that are not known are ignored."""
        expected = {"version": VERSION, "sampler": type(self).__name__, **self.identity()}
        missing = [name for name in ("epoch", "position", *expected) if name not in state]
        if missing:
            raise InputError(
                f"a state of {type(self).__name__} has {', '.join(missing)}, found {', '.join(state)}: load what "
                "state_dict() of such a sampler returned"
            )
        other = {name: value for name, value in expected.items() if state[name] != value}
        if other:
            differences = "; ".join(
                f"{name} is {value!r} here and {state[name]!r} in the state" for name, value in other.items()
            )
            raise InputError(
                f"this state is of another order of samples, in which its position has no meaning ({differences}): "
                "make the sampler with the same arguments and data, or begin a new epoch"
            )
        try:
            place = Place(operator.index(state["epoch"]), operator.index(state["position"]))
            self.read_details(place, state)
        except InputError:
            raise
        except (KeyError, TypeError, ValueError) as exc:
            raise InputError(f"{dict(state)} is no state of {type(self).__name__}: {exc!r}") from exc
        if place.position < 0:
            raise InputError(f"a position is 0 or more, found {place.position} in the state")
        # torch's StatefulDataLoader loads the state of an epoch that has ended after set_epoch named the next one.
        self.epoch = max(self.epoch, place.epoch)
        return place


def fit(count: int, unit: int, tail: Tail, *, what: str) -> int:
    """`count` as a multiple of `unit`, by the rule for the tail. `what` names both in the error."""
    over = count % unit
    if not over:
        return count
    if tail == "error":
        raise InputError(
            f"{what} must divide without a rest (tail='error'), found {count} and {unit}: choose other sizes, or "
            "tail='drop' or 'pad'"
        )
    return count - over if tail == "drop" else count - over + unit
