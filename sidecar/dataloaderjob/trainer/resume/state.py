"""A loader's position as a dict: made at any time, loaded into another loader, exact to the batch.

    version      1
    epoch        of the sampler, where it has one; null
    iterations   epochs begun by this loader and those that it goes on from
    batches      returned by next() in this epoch, by each rank
    samples      in those batches, of one rank: what the seeds of samples count by
    finished     the epoch is over, or none has begun: all but the epoch is that of the next one
    base_seed    torch's base seed of the epoch's iterator
    resets       epochs of a persistent iterator before this one
    draws        first of the numbers that generators held by the dataset draw by (`held_draws`)
    generators   {path: text} of generators when the epoch began; "default" is torch's
    drawn        [[path, text]] of them at the first draw, where that came later and somebody drew in between; null
    now          {name: hex} of the process's generators when the state was made; null where several ranks train
    sampler      state of a sampler that has one, as of the last batch returned; null. Of an IterableDataset the rank,
                 and for each of its slots [batches made, snapshot in base64], or null where it begins at its start
    seen         first keys of that batch, by which a sampler in another order is found out; null with several ranks
    rank         of several, whose state this is, since the sampler does not deal to ranks; null
    digest       the rank, and what names all that this rank was given (`core.consumption`); null
    loader       batch size, ranks, the sampler's class, seeds of samplers, what tells one dataset from another, and
                 of the arguments those that change what later batches are

Positions are global: where a sampler deals to ranks, and all have one torch seed, the states of all ranks are equal but
for the digest, and any of them is right for all. Nothing of a state depends on how many feeders there are.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch.utils.data import IterableDataset

from dataloaderjob.batches.digest import digest_update
from dataloaderjob.core.errors import InputError
from dataloaderjob.trainer.resume import generators
from dataloaderjob.trainer.resume.sampling import chain, first_keys, order_of, rank_of, ranks_of, skipped
from dataloaderjob.trainer.session import slot_places
from dataloaderjob.trainer.session.service import LeftOut

VERSION = 1
State = dict[str, Any]


# What tells one loader's data from another's


def batch_size_of(loader: Any) -> int | None:
    """Samples in a batch of one rank; None where a batch sampler does not say."""
    size = loader.batch_size
    if size is None and loader.batch_sampler is not None:
        size = getattr(loader.batch_sampler, "batch_size", None)
    return size if type(size) is int else None


def length_of(dataset: Any) -> int | None:
    try:
        return len(dataset)
    except (TypeError, NotImplementedError, AttributeError):
        return None


def described(loader: Any, dataset_id: str | None) -> State:
    """What a state says of the loader; probes are added where the dataset has no id."""
    kind, sampler = type(loader.dataset), loader._index_sampler  # noqa: SLF001  torch's name
    seeds = (getattr(one, name, None) for _, one in chain(sampler) for name in ("seed", "initial_seed"))
    return {
        "batch_size": batch_size_of(loader),
        "ranks": ranks_of(sampler) or 1,
        "sampler": order_of(sampler),
        "seeds": sorted({seed for seed in seeds if type(seed) is int}),
        "generator=": "left out" if loader.generator is None else "given",
        "drop_last": bool(loader.drop_last or getattr(loader.batch_sampler, "drop_last", False)),
        "persistent_workers": bool(loader.persistent_workers and loader.num_workers),
        "collate_fn": _name_of(loader.collate_fn),
        "dataset_id": dataset_id,
        "dataset": f"{kind.__module__}.{kind.__qualname__}",
        "length": length_of(loader.dataset),
        **(
            {
                "slots": slots_of(loader),
                "world": slot_places.world(),
                "stage": getattr(loader, "stage", None) is not None,
            }
            if isinstance(loader.dataset, IterableDataset)
            else {}
        ),
        **({"tail": loader.tail} if getattr(loader, "tail", None) else {}),
    }


def slots_of(loader: Any) -> int:
    """Slots of an IterableDataset: torch's `num_workers`, and one where it was left out: a dataset that takes no share
    would give all of it by each."""
    return 1 if isinstance(loader.num_workers, LeftOut) else int(loader.num_workers)


def _name_of(function: Any) -> str:
    named = function if hasattr(function, "__qualname__") else type(function)
    return f"{named.__module__}.{named.__qualname__}"


def probe_keys(length: int | None) -> list[int]:
    """The first sample, that in the middle and the last."""
    return sorted({0, length // 2, length - 1}) if length else []


def probe(samples: Iterable[Any], count: int) -> list[str | None]:
    """Digests of so many samples; None for one that cannot be made, or not in time, or not hashed."""
    found: list[str | None] = [None] * count
    try:
        iterator = iter(samples)
    except Exception:
        return found
    for number in range(count):
        try:
            hasher = hashlib.sha256()
            digest_update(hasher, next(iterator))
            found[number] = hasher.hexdigest()[:16]
        except Exception:  # noqa: S112  whatever it is, there is nothing to compare
            continue
    return found


def steady(first: Sequence[str | None], second: Sequence[str | None]) -> list[str | None]:
    """The digests that came twice: a sample that differs by itself tells nothing."""
    return [a if a == b else None for a, b in zip(first, second, strict=True)]


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
"""What has to be equal, beside the dataset, where both say it."""


def compare(saved: State, own: State, *, is_new_epoch: bool) -> list[str]:
    """Raises InputError that says in what a state is another loader's. Returns what else differs, for people.

    is_new_epoch: a dataset of one id may have grown since.
    """
    differ: list[str] = []
    ids = saved.get("dataset_id"), own.get("dataset_id")
    has_ids = None not in ids
    names = [
        "dataset_id" if has_ids else "dataset",
        *(() if has_ids and is_new_epoch else ("length",)),
        *(
            name for name in _ALWAYS if name != "world" or not saved.get("tail")
        ),  # one order, dealt to any number
    ]
    differ += [f"{n} was {saved[n]!r}, is {own[n]!r}" for n in names if n in saved and saved[n] != own.get(n)]
    (a, ranks_a), (b, ranks_b) = ((s.get("batch_size"), s.get("ranks") or 1) for s in (saved, own))
    if a is not None and b is not None and a * ranks_a != b * ranks_b:
        differ.append(f"batch_size was {a} in each of {ranks_a} ranks, is {b} in each of {ranks_b}")
    if differ:
        raise InputError(
            f"the state is of another loader: {'; '.join(differ)}. Load it into the loader that it was made by, or "
            "begin a new epoch without it; dataset_id= says that two datasets of one length are one"
        )
    said = []
    if saved and (ids[0] is None) != (ids[1] is None):
        named, not_named = (
            ("the state", "this loader") if ids[0] is not None else ("this loader", "the state")
        )
        said.append(
            f"{named} has a dataset_id ({ids[0] or ids[1]}) and {not_named} has none, so that the datasets are one is "
            "known by type and length only: give both the same dataset_id="
        )
    functions = saved.get("collate_fn"), own.get("collate_fn")
    if None not in functions and functions[0] != functions[1]:
        said.append(f"collate_fn was {functions[0]} when the state was made, is {functions[1]}")
    return said


def compare_probes(saved: Sequence[str | None], own: Sequence[str | None], keys: Sequence[int]) -> None:
    """Raises InputError if a sample differs that both could make."""
    for a, b, key in zip(saved, own, keys, strict=False):
        if a is not None and b is not None and a != b:
            raise InputError(
                f"the state is of another dataset: sample {key} differs. If the change is meant, or samples change "
                "with the epoch, give this loader a dataset_id="
            )


# Going on


@dataclass(frozen=True, slots=True, kw_only=True)
class Resume:
    """A state that was loaded, checked as far as a dict by itself can be."""

    state: State
    batches: int
    samples: int | None
    base_seed: int | None
    resets: int
    is_new_epoch: bool
    """No epoch is gone on with: generators are set, and all else goes as in any epoch."""
    at_load: generators.Moment
    """When the state was loaded."""

    @classmethod
    def of(cls, state: Mapping[str, Any]) -> Resume:
        """Raises InputError for what no loader of ours has made."""
        if not isinstance(state, Mapping):
            raise InputError(
                f"load_state_dict() takes what state_dict() returned, found {type(state).__name__}: was the checkpoint "
                "saved without the loader's state?"
            )
        if "batches" not in state:
            keys = ", ".join(sorted(map(str, state))) or "nothing"
            raise InputError(
                f"a state of dataloaderjob.DataLoader has 'batches', found {keys}: load what its state_dict() "
                "returned, or {'batches': n} to begin after n batches"
            )
        version, batches = state.get("version", VERSION), state["batches"]
        if version != VERSION:
            raise InputError(
                f"the state has version {version!r}, {VERSION} is needed: use the release that made it"
            )
        if type(batches) is not int or batches < 0:
            raise InputError(
                f"the number of batches to begin after is a whole number from 0 on, found {batches!r}"
            )
        resets = state.get("resets") or 0
        begins = bool(state.get("finished"))
        return cls(
            state=dict(state), batches=batches, samples=state.get("samples"), base_seed=state.get("base_seed"),
            resets=resets, is_new_epoch=begins, at_load=generators.Moment(),
        )  # fmt: skip

    def check_rank(self, sampler: Any) -> None:
        """Raises InputError for the state of another rank, where that is not this one's, too."""
        rank = self.state.get("rank")
        if rank is not None and rank != rank_of(sampler):
            raise InputError(
                f"the state is that of rank {rank}, and this is rank {rank_of(sampler)}, whose sampler does not deal "
                "to ranks: save and load each rank's own, or use DistributedSampler"
            )

    def forward(self, batches: Iterator[Any], sampler: Any, *, bare: bool) -> int:
        """Skips what was returned before; returns the samples in it.

        Raises InputError where the sampler ends before, or has another order.
        """
        count, samples, last = skipped(batches, self.batches, bare=bare)
        if count < self.batches:
            found, remedy = (
                f"the state is after {self.batches} batches",
                "was the dataset or the sampler changed?",
            )
            if "version" not in self.state:  # a bare number, as of skip()
                found, remedy = (
                    f"{self.batches} batches are to be skipped",
                    "skip as many as one epoch has at most",
                )
            raise InputError(f"{found}, but the sampler ends after {count}: {remedy}")
        self.check_order(last, sampler)
        return samples

    def check_order(self, last: Any, sampler: Any) -> None:
        """Raises InputError where the last batch to be skipped is not that which was returned last."""
        seen = self.state.get("seen")
        keys = first_keys(last) if seen else None
        if keys is not None and keys != seen and (ranks_of(sampler) or 1) == 1:
            raise InputError(
                f"the sampler's batch {self.batches - 1} begins with {keys}, and began with {seen} when the state was "
                "made: restore its seed, or give the sampler state_dict() and load_state_dict()"
            )
