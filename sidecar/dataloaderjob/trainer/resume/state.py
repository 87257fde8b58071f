"""A loader's position as a dict. It can be made at any time and loaded into another loader, and is exact to the batch.

    version      1
    epoch        the sampler's epoch; null if it has none
    iterations   number of epochs begun by this loader and by the loaders that it resumed
    batches      number of batches that next() has returned in this epoch, on each rank
    samples      number of samples in those batches, on one rank; a sample's seed depends on its position in this count
    finished     true if the epoch is over, or none has begun: everything but `epoch` then describes the next epoch
    base_seed    torch's base seed of the epoch's iterator
    resets       number of epochs of a persistent iterator before this one
    draws        first draw number for generators that the dataset holds (see `held_draws`)
    generators   {path: text} of generators when the epoch began; "default" is torch's default generator
    drawn        [[path, text]] of generators at the first draw from the sampler, if other draws came between iter() and
                 that draw; otherwise null
    now          {name: hex} of the process's generators when the state was made; null if several ranks train
    sampler      the sampler's state after the last batch returned; null if it has no state. For an IterableDataset: the
                 rank and, for each slot, [batches made, snapshot in base64], or null if it starts at its beginning
    seen         first keys of the last batch returned, which reveal a sampler with a different order; null with several
                 ranks
    rank         the rank to which this state belongs, if the sampler does not deal to several ranks; otherwise null
    digest       the rank, and the digest of all batches that this rank has returned (see `core.consumption`), or null
    loader       batch size, ranks, the sampler's class, seeds of samplers, properties that distinguish one dataset from
                 another, and the arguments that affect later batches

Positions are global. If a sampler deals to ranks, and all ranks have the same torch seed, the states of all ranks
differ only in the digest. Any of them is then valid for all ranks. No part of a state depends on the number of feeders.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch.utils.data import IterableDataset

from dataloaderjob.core.errors import InputError
from dataloaderjob.trainer.resume import generators, schema
from dataloaderjob.trainer.resume.sampling import chain, first_keys, order_of, rank_of, ranks_of, skipped
from dataloaderjob.trainer.session import slot_places
from dataloaderjob.trainer.session.service import LeftOut
from dataloaderjob.trainer.session.spec import EpochSpec

VERSION = 1
LoaderState = dict[str, Any]


# Identity of a loader's data


def batch_size_of(spec: EpochSpec) -> int | None:
    """Returns the number of samples in one rank's batch, or None if a batch sampler does not report its batch size."""
    size = spec.batch_size
    if size is None and spec.batch_sampler is not None:
        size = getattr(spec.batch_sampler, "batch_size", None)
    return size if type(size) is int else None


def length_of(dataset: Any) -> int | None:
    try:
        return len(dataset)
    except (TypeError, NotImplementedError, AttributeError):
        return None


def described(spec: EpochSpec, dataset_id: str | None) -> LoaderState:
    """Returns the loader's description for a state. The caller adds probes if the dataset has no id."""
    kind, sampler = type(spec.dataset), spec.index_sampler
    seeds = (getattr(one, name, None) for _, one in chain(sampler) for name in ("seed", "initial_seed"))
    return {
        "batch_size": batch_size_of(spec),
        "ranks": ranks_of(sampler) or 1,
        "sampler": order_of(sampler),
        "seeds": sorted({seed for seed in seeds if type(seed) is int}),
        "generator=": "left out" if spec.generator is None else "given",
        "drop_last": bool(spec.drop_last or getattr(spec.batch_sampler, "drop_last", False)),
        "persistent_workers": bool(spec.persistent_workers and spec.num_workers),
        "collate_fn": _name_of(spec.collate_fn),
        "dataset_id": dataset_id,
        "dataset": f"{kind.__module__}.{kind.__qualname__}",
        "length": length_of(spec.dataset),
        **(
            {"slots": slots_of(spec), "world": slot_places.world(), "stage": spec.stage is not None}
            if isinstance(spec.dataset, IterableDataset)
            else {}
        ),
        **({"tail": spec.tail} if spec.tail else {}),
    }


def slots_of(spec: EpochSpec) -> int:
    """Returns the number of slots of an IterableDataset: torch's `num_workers`, or one if that was omitted. With more
    slots, a dataset that is not sharded would return all of its data in each of them."""
    return 1 if isinstance(spec.num_workers, LeftOut) else int(spec.num_workers)


def _name_of(function: Any) -> str:
    named = function if hasattr(function, "__qualname__") else type(function)
    return f"{named.__module__}.{named.__qualname__}"


_ALWAYS = (
    "sampler",
    "seeds",
    "generator=",
    "drop_last",
    "persistent_workers",
    "slots",
    "world",
    "tail",
    "stage",
)
"""Entries of a state that must be equal, if the saved state has them. The dataset's entries must be equal, too."""


def compare(saved: LoaderState, own: LoaderState, *, is_new_epoch: bool) -> list[str]:
    """Raises InputError, which lists the differences, if the state belongs to another loader. Returns notes on
    differences that do not matter.

    With `is_new_epoch`, a dataset with an id may have grown since the state was saved.
    """
    differ: list[str] = []
    ids = saved.get("dataset_id"), own.get("dataset_id")
    has_ids = None not in ids
    names = [
        "dataset_id" if has_ids else "dataset",
        *(() if has_ids and is_new_epoch else ("length",)),
        *(
            name for name in _ALWAYS if name != "world" or not saved.get("tail")
        ),  # with a tail, one order is dealt to any number of ranks
    ]
    differ += [
        f"{n} was {saved[n]!r}, but is {own[n]!r} now" for n in names if n in saved and saved[n] != own.get(n)
    ]
    (a, ranks_a), (b, ranks_b) = ((s.get("batch_size"), s.get("ranks") or 1) for s in (saved, own))
    if a is not None and b is not None and a * ranks_a != b * ranks_b:
        differ.append(f"batch_size was {a} on each of {ranks_a} ranks, but is {b} on each of {ranks_b} now")
    if differ:
        raise InputError(
            f"the state belongs to a different loader: {'; '.join(differ)}. Load it into the loader that "
            "saved it, or begin a new epoch without it. If the datasets are the same, give both loaders the same "
            "dataset_id="
        )
    said = []
    if saved and (ids[0] is None) != (ids[1] is None):
        named, not_named = (
            ("the state", "this loader") if ids[0] is not None else ("this loader", "the state")
        )
        said.append(
            f"{named} has a dataset_id ({ids[0] or ids[1]}), but {not_named} has none, so the datasets are "
            "compared only by type and length: give both the same dataset_id="
        )
    functions = saved.get("collate_fn"), own.get("collate_fn")
    if None not in functions and functions[0] != functions[1]:
        said.append(f"collate_fn was {functions[0]} when the state was saved, but is {functions[1]} now")
    return said


# Resuming


@dataclass(frozen=True, slots=True, kw_only=True)
class Resume:
    """A loaded state. Everything that can be checked without the loader has been checked."""

    state: LoaderState
    batches: int
    samples: int | None
    base_seed: int | None
    resets: int
    is_new_epoch: bool
    """True if the state is between epochs: generators are set, and everything else happens as in a normal epoch."""
    at_load: generators.Moment
    """The process's generators at the time when the state was loaded."""

    @classmethod
    def of(cls, state: Mapping[str, Any], spec: EpochSpec | None = None) -> Resume:
        """Returns the checked state. Raises InputError, with the path of the invalid field, unless one of our loaders
        may have made the state. With `spec`, also checks that the loader's own generators accept their states."""
        if not isinstance(state, Mapping):
            raise InputError(
                f"load_state_dict() takes the result of state_dict(), got {type(state).__name__}: was the "
                "checkpoint saved without the loader's state?"
            )
        if "batches" not in state:
            keys = ", ".join(sorted(map(str, state))) or "nothing"
            raise InputError(
                f"the state of a dataloaderjob.DataLoader must have 'batches', but has {keys}: load the "
                f"result of its state_dict(), or {{'batches': n}} to begin after n batches"
            )
        version, batches = state.get("version", VERSION), state["batches"]
        if version != VERSION:
            raise InputError(
                f"the state has version {version!r}, but this release reads version {VERSION}: use the "
                "release that saved it"
            )
        if type(batches) is not int or batches < 0:
            raise InputError(
                f"the number of batches to begin after must be a whole number, at least 0, but is {batches!r}"
            )
        own = {} if spec is None else generators.generators_of(spec)
        schema.validate(
            state,
            takes=partial(generators.try_state, own),
            is_stream=spec is not None and isinstance(spec.dataset, IterableDataset),
        )
        resets = state.get("resets") or 0
        begins = bool(state.get("finished"))
        return cls(
            state=dict(state), batches=batches, samples=state.get("samples"), base_seed=state.get("base_seed"),
            resets=resets, is_new_epoch=begins, at_load=generators.Moment(),
        )  # fmt: skip

    def compare_with(self, own: LoaderState) -> list[str]:
        """Raises InputError if the state belongs to a loader other than the one that `own` describes. Returns notes on
        differences that do not matter."""
        return compare(self.state.get("loader") or {}, own, is_new_epoch=self.is_new_epoch)

    def check_rank(self, sampler: Any) -> None:
        """Raises InputError if the state belongs to another rank and is not valid for this one."""
        rank = self.state.get("rank")
        if rank is not None and rank != rank_of(sampler):
            raise InputError(
                f"the state belongs to rank {rank}, but this is rank {rank_of(sampler)}, whose sampler "
                "does not distribute samples among ranks: save and load each rank's own state, or use "
                "DistributedSampler"
            )

    def forward(self, batches: Iterator[Any], sampler: Any, *, bare: bool) -> int:
        """Skips the batches that were already returned, and returns the number of samples in them.

        Raises InputError if the sampler ends earlier or has a different order.
        """
        count, samples, last = skipped(batches, self.batches, bare=bare)
        if count < self.batches:
            found, remedy = (
                f"the state was saved after {self.batches} batches",
                "was the dataset or the sampler changed?",
            )
            if "version" not in self.state:  # only a number of batches, as from skip()
                found, remedy = (
                    f"{self.batches} batches are to be skipped",
                    "skip at most the batches of one epoch",
                )
            raise InputError(f"{found}, but the sampler ends after {count}: {remedy}")
        self.check_order(last, sampler)
        return samples

    def check_order(self, last: Any, sampler: Any) -> None:
        """Raises InputError if the first keys of the last skipped batch differ from those in the state."""
        seen = self.state.get("seen")
        keys = first_keys(last) if seen else None
        if keys is not None and keys != seen and (ranks_of(sampler) or 1) == 1:
            raise InputError(
                f"the sampler's batch {self.batches - 1} begins with {keys}, but began with {seen} when "
                "the state was saved: restore its seed, or give the sampler state_dict() and "
                "load_state_dict()"
            )
