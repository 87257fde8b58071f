"""A loader's state, in the process itself: what it has, what it restores, what it refuses."""

from __future__ import annotations

import json
import pickle
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from batches import Augmented, Numbers, fingerprint, ids
from resuming import (
    BATCH,
    LOADERS,
    SEVERAL_RANKS,
    STEPS,
    Counting,
    N,
    Shuffling,
    epochs_of,
    seed,
    set_epoch,
    stopped,
    whole,
)
from torch.distributed import checkpoint
from torch.utils import data

from dataloaderjob import DataLoader, ElasticDistributedSampler, InputError, ServiceError

HERE = {"num_workers": 0}


@pytest.mark.parametrize("name", LOADERS)
def test_run_stopped_at_any_batch_resumes_as_if_uninterrupted(name: str) -> None:
    expected = whole(LOADERS[name], 3, **HERE)
    for epoch in (0, 1):
        for step in range(1, STEPS + 1):
            assert stopped(LOADERS[name], epoch, step, 3, HERE, HERE) == expected, (epoch, step)


@pytest.mark.parametrize("name", LOADERS)
def test_a_state_between_epochs_gives_the_next_epoch(name: str) -> None:
    expected = whole(LOADERS[name], 3, **HERE)
    seed(5)
    _, state = epochs_of(LOADERS[name](**HERE), range(2))
    generator = torch.get_rng_state()
    seed(8)
    loader = LOADERS[name](**HERE)
    loader.load_state_dict(json.loads(state))
    if LOADERS[name] in SEVERAL_RANKS:
        torch.set_rng_state(generator)
    assert epochs_of(loader, range(2, 3))[0] == expected[2:]


def test_state_before_the_first_epoch_gives_the_whole_epoch() -> None:
    expected = whole(LOADERS["shuffled"], 2, **HERE)
    seed(5)
    state = LOADERS["shuffled"](**HERE).state_dict()
    seed(6)
    loader = LOADERS["shuffled"](**HERE)
    loader.load_state_dict(state)
    assert epochs_of(loader, range(2))[0] == expected


def test_ten_stops_in_one_epoch_leave_no_trace() -> None:
    (expected,) = whole(LOADERS["shuffled"], 1, **HERE)
    seed(5)
    found: list[Any] = []
    state = None
    while len(found) < len(expected):
        loader = LOADERS["shuffled"](**HERE)
        if state is not None:
            loader.load_state_dict(json.loads(state))
        (run,), state = epochs_of(loader, range(1), len(found) + 1) if not found else _one(loader, len(found))
        found += run
        seed(len(found))
    assert found == expected


def _one(loader: DataLoader, taken: int) -> tuple[list[Any], str]:
    batch = next(iter(loader))
    run = [(fingerprint(batch), torch.rand(()).item())]
    state = json.dumps(loader.state_dict())
    assert json.loads(state)["batches"] == taken + 1
    return [run], state


@pytest.mark.parametrize("name", LOADERS)
def test_state_before_the_first_batch_of_an_epoch_gives_the_whole_epoch(name: str) -> None:
    expected = whole(LOADERS[name], 3, **HERE)
    seed(5)
    loader = LOADERS[name](**HERE)
    epochs_of(loader, range(2))
    set_epoch(loader, 2)
    iterator = iter(loader)
    state, generator = json.dumps(iterator.state_dict()), torch.get_rng_state()
    seed(8)
    again = LOADERS[name](**HERE)
    again.load_state_dict(json.loads(state))
    set_epoch(again, 2)
    if LOADERS[name] in SEVERAL_RANKS:
        torch.set_rng_state(generator)
    assert epochs_of(again, range(2, 3))[0] == expected[2:]


def test_loaded_state_survives_a_failing_iter() -> None:
    class Away(data.SequentialSampler):
        fails = 0

        def __iter__(self) -> Any:
            if self.fails:
                self.fails -= 1
                raise OSError("away")
            return super().__iter__()

    loader = DataLoader(Numbers(N), None, sampler=Away(range(N)), **HERE)
    loader.load_state_dict({"batches": 20})
    loader.sampler.fails = 1
    with pytest.raises(OSError, match="away"):
        iter(loader)
    assert loader.state_dict()["batches"] == 20
    assert ids(loader) == [20, 21, 22]


def test_interrupted_batch_is_given_again_after_resuming() -> None:
    class Interrupted(Numbers):
        interrupts = 1

        def __getitem__(self, i: int) -> Any:
            if i == 4 and self.interrupts:
                self.interrupts -= 1
                raise KeyboardInterrupt
            return super().__getitem__(i)

    loader = DataLoader(Interrupted(9), BATCH, dataset_id="", **HERE)
    iterator = iter(loader)
    next(iterator)
    with pytest.raises(KeyboardInterrupt):
        next(iterator)
    state = loader.state_dict()
    assert state["batches"] == 1
    with pytest.raises(ServiceError, match="KeyboardInterrupt interrupted next"):
        next(iterator)
    again = DataLoader(Interrupted(9), BATCH, dataset_id="", **HERE)
    again.dataset.interrupts = 0
    again.load_state_dict(state)
    assert ids(again) == [3, 4, 5, 6, 7, 8]


def test_cached_half_of_a_pair_of_normals_is_in_the_state() -> None:
    def make() -> DataLoader:
        return DataLoader(Numbers(N), BATCH, sampler=Shuffling(N), **HERE)

    seed(5)
    np.random.randn(1)
    random.gauss(0, 1)
    loader = make()
    iterator = iter(loader)
    next(iterator)
    state, expected = json.dumps(loader.state_dict()), (np.random.randn(1)[0], random.gauss(0, 1))
    rest = [batch[0].tolist() for batch in iterator]
    seed(6)
    np.random.randn(1)
    again = make()
    again.load_state_dict(json.loads(state))
    np.random.randn(1)
    resumed = iter(again)
    assert [batch[0].tolist() for batch in resumed] == rest
    seed(6)
    third = make()
    third.load_state_dict(json.loads(state))
    iter(third)
    assert (np.random.randn(1)[0], random.gauss(0, 1)) == expected


def distributed_once(rank: int = 0) -> DataLoader:
    dataset = Numbers(40)
    return DataLoader(dataset, 4, sampler=data.DistributedSampler(dataset, 2, rank, seed=1), **HERE)


def test_state_sets_no_epoch_if_the_script_never_does() -> None:
    loader = distributed_once()
    epochs = [ids(loader) for _ in range(3)]
    assert epochs[0] == epochs[2]
    for done in (1, 2):
        loader = distributed_once()
        for _ in range(done):
            ids(loader)
        again = distributed_once()
        again.load_state_dict(loader.state_dict())
        assert ids(again) == epochs[done]


@pytest.mark.parametrize("step", [2, 5])
def test_epochs_counted_from_0_after_a_restart_are_mapped_correctly(step: int) -> None:
    """Fabric does; the state is of epoch 1, in its middle or at its end."""
    loader = distributed_once()
    expected: list[list[int]] = []
    for epoch in range(5):
        loader.sampler.set_epoch(epoch)
        expected.append(ids(loader))
    loader = distributed_once()
    for epoch in range(2):
        loader.sampler.set_epoch(epoch)
        for number, _batch in enumerate(loader, start=1):
            if (epoch, number) == (1, step) and step < 5:
                break
    again = distributed_once()
    again.load_state_dict(loader.state_dict())
    found: list[list[int]] = []
    for epoch in range(3):
        again.sampler.set_epoch(epoch)
        found.append(ids(again))
    rest = [expected[1][4 * step :], *expected[2:4]] if step < 5 else expected[2:5]
    assert found == rest


def test_state_of_another_rank_is_refused_if_ranks_shuffle_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    for shuffle in (True, False):
        monkeypatch.setenv("RANK", "0")
        loader = DataLoader(Numbers(N), BATCH, shuffle=shuffle, **HERE)
        next(iter(loader))
        state = loader.state_dict()
        monkeypatch.setenv("RANK", "1")
        again = DataLoader(Numbers(N), BATCH, shuffle=shuffle, **HERE)
        again.load_state_dict(state)
        if shuffle:
            with pytest.raises(InputError, match="belongs to rank 0, but this is rank 1"):
                iter(again)
        else:
            assert ids(again) == list(range(3, N))


def test_skipping_counts_the_samples_of_batches_of_any_size() -> None:
    def make() -> DataLoader:
        torch.manual_seed(5)
        return DataLoader(Augmented(9), batch_sampler=[[0, 1, 2], [3], [4, 5], [6, 7, 8]], **HERE)

    expected = [fingerprint(batch) for batch in make()]
    loader = make()
    loader.skip(2)
    assert [fingerprint(batch) for batch in loader] == expected[2:]


def test_state_shares_no_data_with_a_changing_sampler() -> None:
    class Live(Counting):
        def state_dict(self) -> Any:
            self.seen = [*getattr(self, "seen", []), self.given][-1:]
            return {"round": self.round, "given": self.seen}

        def load_state_dict(self, state: Any) -> None:
            super().load_state_dict({"round": state["round"], "given": state["given"][0]})

    loader = DataLoader(Numbers(N), BATCH, sampler=Live(N), **HERE)
    iterator = iter(loader)
    next(iterator)
    state = loader.state_dict()
    rest = [batch[0].tolist() for batch in iterator]
    again = DataLoader(Numbers(N), BATCH, sampler=Live(N), **HERE)
    again.load_state_dict(state)
    assert [batch[0].tolist() for batch in again] == rest


def test_samples_random_by_themselves_are_not_compared() -> None:
    class Unsteady(Numbers):
        def __init__(self, start: float) -> None:
            super().__init__(N)
            self.numbers = np.random.RandomState(int(start))

        def __getitem__(self, i: int) -> Any:
            return i, self.numbers.rand()

    loader = DataLoader(Unsteady(1), BATCH, **HERE)
    next(iter(loader))
    again = DataLoader(Unsteady(2), BATCH, **HERE)
    again.load_state_dict(loader.state_dict())
    assert ids(again) == list(range(3, N))


def test_dataset_that_grew_in_the_same_process_is_a_different_one() -> None:
    samples = [torch.tensor(i) for i in range(6)]
    loader = DataLoader(samples, 2, **HERE)
    next(iter(loader))
    small = loader.state_dict()
    samples += [torch.tensor(i) for i in range(6, 12)]
    next(iter(loader))
    loader.load_state_dict(loader.state_dict())
    with pytest.raises(InputError, match="length was 6, but is 12"):
        loader.load_state_dict(small)


def test_generators_set_after_loading_a_state_between_epochs_are_kept() -> None:
    loader = LOADERS["shuffled"](**HERE)
    epochs_of(loader, range(1))
    state = loader.state_dict()
    orders = []
    for number in (1, 2):
        again = LOADERS["shuffled"](**HERE)
        again.load_state_dict(state)
        torch.manual_seed(number)
        orders.append(ids(again))
    assert orders[0] != orders[1]


def test_digest_of_a_resumed_run_equals_that_of_an_uninterrupted_one() -> None:
    seed(5)
    loader = LOADERS["shuffled"](**HERE)
    epochs_of(loader, range(3))
    digest = loader.digest
    for epoch, step in ((0, 3), (1, STEPS), (2, 1)):
        seed(5)
        loader = LOADERS["shuffled"](**HERE)
        epochs_of(loader, range(epoch))
        _, state = epochs_of(loader, range(epoch, epoch + 1), step)
        seed(9)
        again = LOADERS["shuffled"](**HERE)
        again.load_state_dict(json.loads(state))
        epochs_of(again, range(epoch, 3))
        assert again.digest == digest != LOADERS["shuffled"](**HERE).digest


def test_the_rest_of_an_epoch_is_followed_by_a_whole_one() -> None:
    loader = DataLoader(Numbers(N), BATCH, **HERE)
    loader.load_state_dict({"batches": 5})
    assert ids(loader) == list(range(15, N))
    assert ids(loader) == list(range(N))


def test_state_after_the_last_batch_gives_an_empty_epoch_then_a_whole_one() -> None:
    loader = DataLoader(Numbers(N), BATCH, **HERE)
    iterator = iter(loader)
    for _ in range(STEPS):
        next(iterator)
    state = loader.state_dict()
    again = DataLoader(Numbers(N), BATCH, **HERE)
    again.load_state_dict(state)
    assert ids(again) == []
    assert ids(again) == list(range(N))


def test_state_counts_returned_batches_even_after_a_break() -> None:
    loader = DataLoader(Numbers(N), BATCH, **HERE)
    for _, _batch in zip(range(4), loader, strict=False):
        pass
    assert loader.state_dict()["batches"] in (4, 5), "zip may take one more"
    for step, _batch in enumerate(loader, start=1):
        if step == 3:
            break
    assert loader.state_dict()["batches"] == 3


def test_loaded_state_applies_to_the_next_iterator_and_empty_means_none() -> None:
    loader = DataLoader(Numbers(N), BATCH, **HERE)
    iterator = iter(loader)
    next(iterator)
    loader.load_state_dict({})
    assert loader.state_dict()["batches"] == 1
    loader.load_state_dict({"batches": 6})
    assert next(iterator)[0].tolist() == [3, 4, 5]
    assert ids(loader) == list(range(18, N))


def test_loaded_state_is_returned_unchanged_until_the_next_iterator() -> None:
    loader = DataLoader(Numbers(N), BATCH, **HERE)
    next(iter(loader))
    state = loader.state_dict()
    again = DataLoader(Numbers(N), BATCH, **HERE)
    again.load_state_dict({**state, "_iterator_finished": False})
    assert {k: v for k, v in again.state_dict().items() if k != "_iterator_finished"} == state


def test_state_does_not_change_as_the_loader_continues() -> None:
    loader = LOADERS["a sampler with state"](**HERE)
    iterator = iter(loader)
    next(iterator)
    state = loader.state_dict()
    before = json.dumps(state)
    list(iterator)
    loader.state_dict()
    assert json.dumps(state) == before


def test_iterator_returns_the_same_state_as_its_loader() -> None:
    loader = DataLoader(Numbers(N), BATCH, **HERE)
    iterator = iter(loader)
    next(iterator)
    assert iterator.state_dict() == loader.state_dict()


def test_load_sets_the_epoch_and_the_state_holds_no_rank() -> None:
    """Accelerate sets epoch 0 before it iterates a loader that was resumed."""
    made = []
    for rank in range(2):
        seed(5)
        dataset = Numbers(40)
        loader = DataLoader(dataset, 4, sampler=data.DistributedSampler(dataset, 2, rank, seed=1), **HERE)
        loader.sampler.set_epoch(3)
        iterator = iter(loader)
        next(iterator)
        made.append((loader.state_dict(), [b[0].tolist() for b in iterator]))
    assert [made[rank][0].pop("digest")[0] for rank in range(2)] == [0, 1]
    assert json.dumps(made[0][0]) == json.dumps(made[1][0])
    for rank in range(2):
        dataset = Numbers(40)
        loader = DataLoader(dataset, 4, sampler=data.DistributedSampler(dataset, 2, rank, seed=1), **HERE)
        loader.load_state_dict(made[0][0])
        loader.sampler.set_epoch(0)
        assert [b[0].tolist() for b in loader] == made[rank][1]


def test_epoch_set_after_iter_takes_effect() -> None:
    """Lightning does so when it restores."""
    dataset = Numbers(40)
    loader = DataLoader(dataset, 4, sampler=data.DistributedSampler(dataset, 2, 0, seed=1), **HERE)
    loader.sampler.set_epoch(2)
    expected = ids(loader)
    loader.sampler.set_epoch(0)
    iterator = iter(loader)
    loader.sampler.set_epoch(2)
    assert ids(iterator) == expected


def test_the_same_global_batch_may_be_dealt_to_other_numbers_of_ranks() -> None:
    def loader(ranks: int, rank: int) -> DataLoader:
        dataset = Numbers(64)
        return DataLoader(
            dataset, 8 // ranks, sampler=data.DistributedSampler(dataset, ranks, rank, seed=1), **HERE
        )

    seen: list[int] = []
    iterator = iter(loader(1, 0))
    for _ in range(3):
        seen += next(iterator)[0].tolist()
    state = iterator.state_dict()
    for rank in range(2):
        again = loader(2, rank)
        again.load_state_dict(state)
        seen += ids(again)
    assert sorted(seen) == list(range(64))


def test_worlds_of_2_1_4_and_2_ranks_take_the_same_global_batches() -> None:
    def loader(ranks: int, rank: int) -> DataLoader:
        dataset = Numbers(96)
        sampler = ElasticDistributedSampler(dataset, ranks, rank, seed=1)
        return DataLoader(dataset, 8 // ranks, sampler=sampler, **HERE)

    def steps(ranks: int, count: int, state: Any) -> tuple[list[set[int]], Any]:
        """The global batches of some steps of all ranks, and the state of any of them."""
        seen: list[set[int]] = [set() for _ in range(count)]
        for rank in range(ranks):
            loaded = loader(ranks, rank)
            loaded.load_state_dict(state)
            iterator = iter(loaded)
            for batch in seen:
                batch.update(next(iterator)[0].tolist())
            state_of_rank = json.loads(json.dumps(iterator.state_dict()))
        return seen, state_of_rank

    expected, _ = steps(1, 12, {})
    found, state = [], {}
    for ranks in (2, 1, 4, 2):
        some, state = steps(ranks, 3, state)
        found += some
    assert found == expected
    assert set().union(*found) == set(range(96))


def test_samples_before_a_state_are_those_of_the_ranks_own_batches() -> None:
    def loader(ranks: int) -> DataLoader:
        dataset = Numbers(96)
        return DataLoader(
            dataset, 8 // ranks, sampler=ElasticDistributedSampler(dataset, ranks, 0, seed=1), **HERE
        )

    two, one = iter(loader(2)), loader(1)
    for _ in range(3):
        next(two)
    one.load_state_dict(two.state_dict())
    found = iter(one).state_dict()
    assert (two.state_dict()["samples"], found["batches"], found["samples"]) == (3 * 4, 3, 3 * 8)


def test_process_generators_are_restored_to_the_stopping_point() -> None:
    seed(5)
    loader = LOADERS["a sampler without state"](**HERE)
    next(iter(loader))
    state, wanted = loader.state_dict(), torch.rand(())
    python, numpys = random.getstate(), np.random.get_state()[1]
    seed(6)
    again = LOADERS["a sampler without state"](**HERE)
    again.load_state_dict(state)
    next(iter(again))
    assert torch.rand(()) == wanted
    assert (random.getstate(), np.random.get_state()[1].tolist()) == (python, numpys.tolist())


REFUSED = {
    "not a state": ({"step": 3}, "must have 'batches', but has step"),
    "negative": ({"batches": -1}, "whole number, at least 0, but is -1"),
    "of a later release": ({"version": 9, "batches": 1}, "the state has version 9"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_invalid_state_is_refused(name: str) -> None:
    state, message = REFUSED[name]
    with pytest.raises(InputError, match=message):
        DataLoader(Numbers(N), BATCH, **HERE).load_state_dict(state)


OTHERS: dict[str, tuple[Any, str]] = {
    "length": (lambda: DataLoader(Augmented(N + 1), BATCH, **HERE), f"length was {N}, but is {N + 1}"),
    "type": (
        lambda: DataLoader(Numbers(N), BATCH, **HERE),
        "dataset was 'batches.Augmented', but is 'batches.Numbers'",
    ),
    "batch size": (
        lambda: DataLoader(Augmented(N), 5, **HERE),
        "batch_size was 3 on each of 1 ranks, but is 5",
    ),
    "samples": (lambda: DataLoader(Augmented(N, width=8), BATCH, **HERE), "sample 0 differs"),
    "order": (
        lambda: DataLoader(Augmented(N), BATCH, sampler=list(range(N))[::-1], **HERE),
        "sampler was .*Sequential",
    ),
}


@pytest.mark.parametrize("name", OTHERS)
def test_state_of_a_different_loader_is_refused_with_the_difference(name: str) -> None:
    loader = DataLoader(Augmented(N), BATCH, **HERE)
    next(iter(loader))
    other, message = OTHERS[name]
    with pytest.raises(InputError, match=message):
        resumed = other()
        resumed.load_state_dict(loader.state_dict())
        next(iter(resumed))


def test_sampler_with_a_different_seed_is_refused() -> None:
    dataset = Numbers(N)
    first, second = (
        DataLoader(dataset, BATCH, sampler=data.DistributedSampler(dataset, 2, 0, seed=s), **HERE)
        for s in (1, 2)
    )
    next(iter(first))
    with pytest.raises(InputError, match=r"seeds was \[1\], but is \[2\]"):
        second.load_state_dict(first.state_dict())


def test_equal_dataset_id_makes_two_datasets_interchangeable() -> None:
    first = DataLoader(Augmented(N), BATCH, dataset_id="faces", **HERE)
    next(iter(first))
    second = DataLoader(Augmented(N, width=9), BATCH, dataset_id="faces", **HERE)
    second.load_state_dict(first.state_dict())
    assert ids(second) == list(range(3, N))
    third = DataLoader(Augmented(N), BATCH, dataset_id="cats", **HERE)
    with pytest.raises(InputError, match="dataset_id was 'faces', but is 'cats'"):
        third.load_state_dict(first.state_dict())


def test_a_sampler_that_ends_before_the_state_is_refused() -> None:
    loader = DataLoader(Numbers(N), BATCH, **HERE)
    loader.load_state_dict({"version": 1, "batches": 50})
    with pytest.raises(
        InputError, match=f"the state was saved after 50 batches, but the sampler ends after {STEPS}"
    ):
        iter(loader)


def test_dataset_with_incomparable_samples_can_be_resumed() -> None:
    class Odd(Numbers):
        def __getitem__(self, i: int) -> Any:
            if i == 0:
                raise OSError("not here")
            return i, object()

    loader = DataLoader(
        Odd(N), BATCH, collate_fn=lambda samples: [s[0] for s in samples], sampler=range(1, N), **HERE
    )
    next(iter(loader))
    again = DataLoader(
        Odd(N), BATCH, collate_fn=lambda samples: [s[0] for s in samples], sampler=range(1, N), **HERE
    )
    again.load_state_dict(loader.state_dict())
    assert next(iter(again)) == [4, 5, 6]


def test_iterable_dataset_warns_that_it_starts_over(capsys: pytest.CaptureFixture[str]) -> None:
    class Stream(data.IterableDataset):
        def __iter__(self) -> Any:
            return iter(range(5))

    loader = DataLoader(Stream(), None, **HERE)
    next(iter(loader))
    loader.load_state_dict(loader.state_dict())
    assert list(loader) == list(range(5))
    assert "an IterableDataset cannot be resumed" in capsys.readouterr().err


def test_self_shuffling_sampler_is_iterated_as_often_as_by_torch() -> None:
    class Once(Shuffling):
        iterated = 0

        def __iter__(self) -> Any:
            self.iterated += 1
            return super().__iter__()

    sampler = Once(N)
    loader = DataLoader(Numbers(N), None, sampler=sampler, **HERE)
    loader.load_state_dict({"batches": 4})
    next(iter(loader))
    assert sampler.iterated == 1


def test_a_distributed_checkpoint_holds_a_state_as_torchtitan_keeps_one(tmp_path: Path) -> None:
    class Kept:
        def __init__(self, loader: DataLoader) -> None:
            self.loader = loader

        def state_dict(self) -> dict[str, Any]:
            return {"dp_rank_0": pickle.dumps(self.loader.state_dict())}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.loader.load_state_dict(pickle.loads(state["dp_rank_0"]))

    loader = DataLoader(Numbers(N), BATCH, **HERE)
    iterator = iter(loader)
    for _ in range(3):
        next(iterator)
    checkpoint.save({"dataloader": Kept(loader)}, checkpoint_id=tmp_path, no_dist=True)
    again = DataLoader(Numbers(N), BATCH, **HERE)
    checkpoint.load({"dataloader": Kept(again)}, checkpoint_id=tmp_path, no_dist=True)
    assert ids(again) == list(range(9, N))


def test_probe_samples_for_a_state_are_made_once() -> None:
    made: list[int] = []

    class Noted(Numbers):
        def __getitem__(self, i: int) -> Any:
            made.append(i)
            return super().__getitem__(i)

    loader = DataLoader(Noted(N), BATCH, **HERE)
    iterator = iter(loader)
    next(iterator)
    for _ in range(3):
        loader.state_dict()
    assert made == [0, 1, 2, *[0, N // 2, N - 1] * 2], "twice: a sample that differs by itself tells nothing"
