"""One epoch of a loader, as the loader's state describes it. The description outlives the epoch's iterator.

An iterator that resumes from a state draws as the original one did. Generators are set to their states at the beginning
of the epoch, and the sampler is iterated again. Batches that were already returned are skipped, and only their keys are
drawn. If only one rank trains, the process's generators are then set to the states that they had when the loader's
state was made. Generators that the script has set since the state was loaded are left alone; draws alone do not count.
With several ranks, all generators are left alone, because the state may be another rank's.

Some frameworks count epochs from 0 after a restart, and pass these numbers to the sampler's `set_epoch`. The number of
epochs before the restart is then added.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.utils.data import BatchSampler, IterableDataset, SequentialSampler

from dataloaderjob.core.consumption import Consumption
from dataloaderjob.core.ticket_codec import MAX_DRAWS
from dataloaderjob.making import held
from dataloaderjob.making.fetcher import derive_seed
from dataloaderjob.samplers.elastic import ElasticSampler
from dataloaderjob.trainer.resume import generators, held_draws, recording, sampling
from dataloaderjob.trainer.resume.sampling import TrackedSampler
from dataloaderjob.trainer.resume.state import VERSION, LoaderState, Resume
from dataloaderjob.trainer.session.spec import EpochSpec

Progress = tuple[int, int, bool, list[int] | None, Any]
"""(batches returned, samples returned, whether the epoch is over, first keys of the last batch, state of the
sampler)."""
Probes = Callable[[], Callable[[], list[str | None] | None] | None]
"""A weak reference to a loader's `probes` method. It returns None once the loader was garbage-collected."""
_IN_ORDER = (SequentialSampler, BatchSampler)
"""Samplers that give all ranks the same keys, regardless of their generators."""


class Epoch:
    """The part of a state that describes an epoch. Only the epoch's progress comes from its iterator."""

    __slots__ = (
        "_before",
        "_consumption",
        "_counted",
        "_drawn",
        "_epoch_drawn",
        "_facts",
        "_final",
        "_iterator",
        "_others",
        "_own",
        "_persistent",
        "_probes",
        "_put_back",
        "_rank",
        "_resume",
        "_sampler",
        "_set_since",
        "_shared",
        "_single",
        "_undrawn",
        "base_seed",
        "begun",
        "draws_from",
        "first_batches",
        "first_samples",
        "holds",
        "iterations",
        "rank",
        "resets",
        "sampler_epoch",
    )  # fmt: skip

    def __init__(
        self,
        spec: EpochSpec,
        facts: LoaderState,
        previous: Epoch | None,
        resume: Resume | None,
        *,
        probes: Probes,
        again: bool,
    ) -> None:
        """Sets the loader's generators and epoch from `resume`. Raises InputError if `resume` belongs to another rank.

        `previous` is the loader's previous epoch. `again` is true if that epoch has the same iterator as this one.
        `facts` is the loader's description for a state.
        """
        sampler = spec.index_sampler
        self._facts, self._resume, self._sampler = facts, resume, sampler
        self._probes = probes
        self._own = generators.generators_of(spec)
        self._others = generators.draws_elsewhere(sampler)
        ranks = sampling.ranks_of(sampler)
        self._single = (ranks or 1) == 1 and not _several_ranks()
        self._shared = self._single or ranks is None
        """True if the sampler may draw from generators that the whole process shares."""
        is_stream = isinstance(spec.dataset, IterableDataset)
        self._rank = _rank_alone(sampler) if not self._single and ranks is None and not is_stream else None
        self.rank = sampling.rank_of(sampler)
        self._persistent = bool(spec.persistent_workers and spec.num_workers)
        self._before: dict[str, str] | None = None
        self._put_back: Mapping[str, str] = {}
        """States of the process's generators at the beginning of the epoch."""
        self._undrawn: dict[str, str] | None = None
        """States of the generators after iter(), until the first draw from the sampler."""
        self._drawn: list[list[str]] | None = None
        self._set_since: frozenset[str] = frozenset()
        self._counted: tuple[int, int] | None = None
        """The epoch that a framework set last, counted from 0 after a restart, and the number added to it."""
        self.iterations: int = 1 + (previous.iterations if previous is not None else 0)
        self.holds = held.find(spec.dataset, spec.collate_fn)
        """Generators that the dataset and `collate_fn` hold."""
        self.draws_from = self._range(spec.dataset, previous, resume) if self.holds else 0
        self.base_seed = self.resets = 0
        if again and previous is not None:
            self.base_seed, self.resets = previous.base_seed, previous.resets + 1
        self._consumption: Consumption = spec.consumption
        self.first_batches, self.first_samples = 0, 0
        if resume is not None:
            resume.check_rank(sampler)
            self._go_on(resume, is_first=previous is None)
        elif previous is not None:
            self._count_on(previous._counted)  # noqa: SLF001  of the same class
        self.begun = self._generators()
        self.sampler_epoch = self._epoch_drawn = sampling.epoch_of(sampler)
        self._iterator: weakref.ref[Any] | None = None
        self._final: Progress = (self.first_batches, self.first_samples, False, None, None)

    @staticmethod
    def _range(dataset: Any, previous: Epoch | None, resume: Resume | None) -> int:
        """Returns the first number of this loader's range (see `held_draws`)."""
        if resume is not None and isinstance(first := resume.state.get("draws"), int):
            held_draws.go_on(dataset, first)
            return first
        return held_draws.next_range(dataset) if previous is None else previous.draws_from

    @property
    def draw_number(self) -> int:
        """The draw number that tickets contain, for generators that the dataset and `collate_fn` hold; 0 if they hold
        none."""
        number = self.draws_from + max(self.iterations - 1, 0) % held_draws.EPOCHS
        return number & MAX_DRAWS if self.holds else 0

    def _go_on(self, resume: Resume, *, is_first: bool) -> None:
        state = resume.state
        self._set_epoch(resume, is_first=is_first)
        self.iterations = state.get("iterations", 0) + resume.is_new_epoch
        self.resets = resume.resets
        if not resume.is_new_epoch:
            self.first_batches, self.first_samples = resume.batches, self._samples_before(resume)
            if resume.base_seed is not None:
                self._before = generators.now(others=self._others)
        self._choose_generators(resume)
        self._put(resume)
        rank, *digest = state.get("digest") or [None]
        if rank == self.rank:
            self._consumption.restore(digest, goes_on=not resume.is_new_epoch)

    def _set_epoch(self, resume: Resume, *, is_first: bool) -> None:
        """Sets the sampler's epoch to the state's epoch, or to the next one if the state is between epochs. A framework
        may already have set an epoch that it counts from 0.

        `is_first` marks the loader's first iter(). If the sampler's epoch is then later than the state's, it was set
        before the state was loaded.
        """
        epoch, sampler = resume.state.get("epoch"), self._sampler
        found = sampling.epoch_of(sampler)
        if found is None:
            return
        is_set = not sampling.is_unset(sampler)
        if epoch is None:
            epoch = found
        elif resume.is_new_epoch and is_first and found > epoch:
            is_set = True
        if resume.is_new_epoch:
            if not resume.state.get("iterations"):
                epoch = found if is_set else epoch
            elif is_set:  # otherwise, the script never sets epochs
                epoch = max(epoch + 1, found)
        sampling.set_epoch(sampler, epoch)
        if is_set and epoch != found:
            self._counted = found, epoch - found
            sampling.mark_unset(sampler)

    def _count_on(self, counted: tuple[int, int] | None) -> None:
        if counted is None or sampling.is_unset(self._sampler):
            self._counted = counted
            return
        found, (before, missing) = sampling.epoch_of(self._sampler), counted
        if found == before + 1:
            sampling.set_epoch(self._sampler, found + missing)
            self._counted = found, missing
            sampling.mark_unset(self._sampler)

    def _choose_generators(self, resume: Resume) -> None:
        if self._shared:
            states: Mapping[str, str] = resume.state.get("generators") or {}
            # Many checkpoints restore generators themselves, and many scripts seed each epoch.
            self._set_since = resume.at_load.set_since(resume.state.get("now") or states)
            stays = self._set_since if resume.is_new_epoch else ()
            self._put_back = {name: text for name, text in states.items() if name not in stays}

    def _put(self, resume: Resume) -> None:
        """Sets generators to the states that they had at the beginning of the epoch."""
        generators.put_own(self._own, resume.state.get("generators") or {})
        generators.put_shared(self._put_back)

    def _samples_before(self, resume: Resume) -> int:
        size, own = (resume.state.get("loader") or {}).get("batch_size"), self._facts.get("batch_size")
        if resume.samples is None:
            return 0  # `place` counts the samples
        return resume.samples * own // size if size and own else resume.samples

    def _digest(self) -> list[int] | None:
        """Returns the rank and its rolling digest. Returns None under Accelerate, which has all ranks write the same
        file."""
        if not self._single and hasattr(self._sampler, "epoch_seed"):
            return None
        return [self.rank, *self._consumption.state()]

    def _generators(self) -> dict[str, str]:
        return generators.all_now(self._own, shared=self._shared, others=self._others)

    @property
    def slots(self) -> Any:
        """The resumed state's entry for an IterableDataset's slots (see `slot_places.pack`); None if no epoch is
        resumed."""
        resume = self._resume
        return None if resume is None or resume.is_new_epoch else resume.state.get("sampler")

    # The iterator's calls, in this order

    def seeded(self, drawn: int) -> int:
        """Returns the seed from which samples' seeds are derived. `drawn` is the base seed that torch drew."""
        resume, own = self._resume, getattr(self._sampler, "epoch_seed", None)
        if own is not None:  # a seed of the epoch, not of the iterator
            self.base_seed = own()
            return self.base_seed
        self.base_seed = drawn if resume is None or resume.base_seed is None else resume.base_seed
        return derive_seed(self.base_seed, self.resets) if self.resets else self.base_seed

    def place(self, iterator: Any, ahead: int, *, bare: bool) -> Any:
        """Returns an iterator over the sampler that starts at the first batch to return. `ahead` is the maximum number
        of batches that the sampler runs ahead."""
        resume, sampler = self._resume, self._sampler
        stateful, saved = sampling.with_state(sampler), None
        if resume is not None:
            if resume.resets:
                # For another epoch of the same iterator, torch iterates the sampler once, and draws no seed.
                self._put(resume)
                iterator = iter(sampler)
            if drawn := resume.state.get("drawn"):
                self._drawn = drawn
                generators.put_own(self._own, dict(drawn))
                generators.put_shared(dict(drawn) if self._shared else {})
            saved = resume.state.get("sampler") if stateful is not None else None
            if saved is not None:
                sampling.load_state(stateful, saved)
                if resume.is_new_epoch and isinstance(stateful, ElasticSampler):
                    stateful.restart()  # the epoch is over: a different number of ranks may leave a remainder
                iterator = iter(sampler)
            elif not resume.is_new_epoch:
                samples = resume.forward(iterator, sampler, bare=bare)
                self.first_samples = samples if resume.samples is None else self.first_samples
        if stateful is None:
            return iterator
        recorded = TrackedSampler(stateful, iterator, self.first_batches, ahead)
        if saved is not None and not self.first_batches:
            recorded.begin_anew(sampler)
        return recorded

    def late(self) -> bool:
        """Returns True if `set_epoch` was called since the sampler was iterated. Iterators check this before they
        return their first batch."""
        epoch = sampling.epoch_of(self._sampler)
        if epoch == self._epoch_drawn:
            return False
        self.sampler_epoch = self._epoch_drawn = epoch
        return True

    def settle(self) -> None:
        """Restores the process's generators, once a resumed epoch has made its initial draws."""
        # Accelerate's sampler increments its epoch when an iteration ends.
        self._epoch_drawn = sampling.epoch_of(self._sampler)
        before, self._before = self._before, None
        if before is None or self._resume is None:
            return
        now = (self._resume.state.get("now") or {}) if self._single else {}
        kept = {n: text if n in self._set_since else now.get(n, text) for n, text in before.items()}
        generators.put_shared(kept)

    def waits(self) -> None:
        """Records that the first draw from the sampler happens in next(), not in iter()."""
        if self._resume is None or self._resume.is_new_epoch:
            self._undrawn = self._generators()

    def draws(self) -> None:
        """Records that the first draw from the sampler is about to happen."""
        before, self._undrawn = self._undrawn, None
        if before is not None and (now := self._generators()) != before:
            self._drawn = [[name, text] for name, text in now.items()]

    def follow(self, iterator: Any) -> None:
        """Makes later states report the `progress()` of this iterator."""
        self._iterator = weakref.ref(iterator)

    def ended(self, iterator: Any, final: Progress) -> None:
        """Keeps the last `progress()` of an iterator that was garbage-collected."""
        followed = None if self._iterator is None else self._iterator()
        if followed is None or followed is iterator:
            self._iterator, self._final = None, final

    # State

    def state(self) -> LoaderState:
        """Returns the loader's state as a new dict. The recording, if any, already contains every batch that the dict
        counts."""
        recording.flush()
        iterator = None if self._iterator is None else self._iterator()
        if iterator is not None:
            iterator.refresh()
        batches, samples, finished, keys, sampler = self._final if iterator is None else iterator.progress()
        if finished:
            return self._after()
        epoch = self.sampler_epoch
        if batches == self.first_batches and (found := sampling.epoch_of(self._sampler)) != self._epoch_drawn:
            epoch = found  # the next call of next() draws again
        return {
            "version": VERSION,
            "epoch": epoch,
            "iterations": self.iterations,
            "batches": batches,
            "samples": samples,
            "finished": False,
            "base_seed": self.base_seed,
            "resets": self.resets,
            "draws": self.draws_from,
            "generators": self.begun,
            "drawn": self._drawn,
            "now": generators.now(others=self._others) if self._single else None,
            "sampler": sampler,
            "seen": keys if self._single else None,
            "rank": self._rank,
            "digest": self._digest(),
            "loader": self._probed(),
        }

    def _probed(self) -> LoaderState:
        """Returns the loader's description for a state. The first call makes the samples that the description needs."""
        if self._facts.get("probes") is None:
            probes = self._probes()
            self._facts = {**self._facts, "probes": None if probes is None else probes()}
        return self._facts

    def _after(self) -> LoaderState:
        stateful, persistent = sampling.with_state(self._sampler), self._persistent
        return new_epoch(
            self._probed(), self._generators(),
            epoch=self.sampler_epoch, iterations=self.iterations,
            base_seed=self.base_seed if persistent else None, resets=self.resets + persistent,
            sampler=None if stateful is None else sampling.state_of(stateful),
            rank=self._rank, digest=self._digest(), now=generators.now(others=self._others) if self._single else None,
            draws=self.draws_from,
        )  # fmt: skip


def new_epoch(facts: LoaderState, states: Mapping[str, str], **more: Any) -> LoaderState:
    """Returns a state between epochs, with the `states` of the generators."""
    nothing = dict.fromkeys(("base_seed", "drawn", "now", "sampler", "seen", "rank", "digest"))
    return {
        "version": VERSION, **nothing, "iterations": 0, "batches": 0, "samples": 0, "finished": True, "resets": 0,
        "draws": 0, "generators": states, "loader": facts, **more,
    }  # fmt: skip


def fresh(spec: EpochSpec, facts: LoaderState) -> LoaderState:
    """Returns the state of a loader that has not been iterated yet."""
    sampler = spec.index_sampler
    several, ranks = _several_ranks(), sampling.ranks_of(sampler)
    others = generators.draws_elsewhere(sampler)
    begun = generators.all_now(
        generators.generators_of(spec), shared=ranks is None or (ranks == 1 and not several), others=others
    )
    stateful = sampling.with_state(sampler)
    return new_epoch(
        facts, begun, epoch=sampling.epoch_of(sampler),
        rank=_rank_alone(sampler) if several and ranks is None else None,
        # Later states have this entry, and torch.distributed.checkpoint loads only into a state of the same shape.
        now=generators.now(others=others) if (ranks or 1) == 1 and not several else None,
        sampler=sampling.state_of(stateful) if isinstance(stateful, ElasticSampler) else None,
    )  # fmt: skip


def _rank_alone(sampler: Any) -> int | None:
    """Returns the process's rank if the sampler does not deal to ranks and may have a different order on each rank.
    Returns None otherwise."""
    same = all(type(one) in _IN_ORDER for _, one in sampling.chain(sampler))
    return None if same else sampling.rank_of(sampler)


def _several_ranks() -> bool:
    if os.environ.get("WORLD_SIZE", "1") not in ("", "1"):
        return True
    distributed = torch.distributed
    return distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1
