"""`parts=` over a real service: the same loader without it is the reference, digest and state with it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from batches import Numbers
from resuming import state_after
from rig import Rig
from staged_data import Counted, Odd
from torch.utils.data import IterableDataset

from dataloaderjob import DataLoader
from dataloaderjob.core.control import W_NEXT_CALLS, W_READY_CALLS
from dataloaderjob.core.errors import FeederLost, InputError


@pytest.fixture(scope="module")
def rig() -> Iterator[Rig]:
    with Rig(feeders=3) as made:
        yield made


def loader(dataset: Any, parts: int | None = None, **more: Any) -> DataLoader:
    torch.manual_seed(7)
    return DataLoader(dataset, parts=parts, **{"batch_size": 10, "shuffle": True, **more})


def given(of: DataLoader) -> list[Any]:
    """Batches as nested lists; for errors their text."""
    found, iterator = [], iter(of)
    while True:
        try:
            batch = next(iterator)
        except StopIteration:
            return found
        except (ValueError, RuntimeError) as exc:
            notes = [note.partition(" in feeder")[0] for note in exc.__notes__]
            found.append((type(exc).__name__, str(exc), notes))
        else:
            found.append(
                [value.tolist() if isinstance(value, torch.Tensor) else value for value in batch.values()]
            )


@pytest.mark.thorough
@pytest.mark.parametrize("parts", [1, 2, 3, 7, 64])
@pytest.mark.parametrize(("kind", "failing"), [("", 0), ("fails", 3), ("ragged", 3), ("mixed", 0)])
def test_batches_errors_and_digest_are_those_without_parts(rig: Rig, parts: int, kind: str, failing: int):
    found = []
    for split in (None, parts):
        of = loader(Odd(57, kind), split)
        found.append((given(of), of.digest))
    assert found[0] == found[1]
    assert 1 <= sum(isinstance(one, tuple) for one in found[1][0]) <= failing or not failing


def test_parts_of_a_batch_are_made_by_different_feeders(rig: Rig):
    pids = [set(batch["pid"].tolist()) for batch in loader(Counted(120), 3, batch_size=30)]
    assert max(map(len, pids)) == 3
    assert len(set().union(*pids)) == 3


@pytest.mark.thorough
def test_loader_with_parts_resumes_from_any_state(rig: Rig):
    reference = loader(Odd(57), 3)
    torch.manual_seed(7)
    whole = given(reference)
    for stop in range(7):
        torch.manual_seed(7)
        state = state_after(loader(Odd(57), 3), stop)
        torch.manual_seed(99)
        for parts in (3, None):
            second = DataLoader(Odd(57), batch_size=10, shuffle=True, parts=parts)
            second.load_state_dict(state)
            assert given(second) == whole[stop:]
            assert second.digest == reference.digest


def test_sidecar_death_loses_and_repeats_no_batch(rig: Rig):
    found = []
    for number, batch in enumerate(loader(Numbers(200), 3, shuffle=False)):
        found += batch[0].tolist()
        if number in (3, 11):
            rig.kill_sidecar()
            rig.start_sidecar()
    assert found == list(range(200))


def test_epochs_of_one_iterator_follow_each_other(rig: Rig):
    of = loader(Odd(57), 3, num_workers=3, persistent_workers=True)
    without = loader(Odd(57), None, num_workers=3, persistent_workers=True)
    for one in (of, without):
        torch.manual_seed(3)
        for _ in range(3):
            given(one)
    assert of.digest == without.digest


@pytest.mark.parametrize("keys", [list, tuple, np.array, torch.tensor])
def test_keys_of_a_batch_sampler_may_be_any_sequence(rig: Rig, keys: Any):
    batches = [keys([5, 3, 8, 1]), keys([2]), keys([4, 4, 4])]
    found = [batch[0].tolist() for batch in DataLoader(Numbers(9), batch_sampler=batches, parts=3)]
    assert found == [[5, 3, 8, 1], [2], [4, 4, 4]]


def test_a_sample_that_ends_its_process_fails_its_batch_alone(rig: Rig):
    iterator, found = iter(loader(Odd(40, "deadly"), 2, shuffle=False)), []
    for _ in range(4):
        try:
            found.append(len(next(iterator)["id"]))
        except FeederLost:
            found.append(0)
    assert found == [10, 10, 0, 10]


def test_state_taken_within_next_is_the_one_before_or_after_it(rig: Rig):
    """A handler may save a checkpoint at any time; here a sampler does, and a dataset while it is sent."""
    seen: list[tuple[int, int]] = []

    class Telling(list):
        def __iter__(self):
            for keys in super().__iter__():
                if of is not None:
                    state = of.state_dict()
                    seen.append((state["batches"], state["samples"]))
                yield keys

    of = None
    batches = Telling([i, i + 1, i + 2, i + 3] for i in range(0, 160, 4))
    of = DataLoader(Numbers(160), batch_sampler=batches, parts=2, dataset_id="numbers")
    assert len(list(of)) == 40
    assert len(set(seen)) > 20
    assert all(samples == 4 * number for number, samples in seen)


def test_key_buffer_reused_by_a_sampler_is_copied(rig: Rig):
    class Refilled:
        def __iter__(self):
            keys = np.zeros(4, np.int64)
            for i in range(0, 40, 4):
                keys[:] = range(i, i + 4)
                yield keys

    digests = set()
    for parts in (2, None):
        torch.manual_seed(1)
        of = DataLoader(Odd(40), batch_sampler=Refilled(), parts=parts)
        list(of)
        digests.add(of.digest)
    assert len(digests) == 1


def test_first_error_of_a_batch_is_raised_and_later_ones_kill_no_process(rig: Rig):
    found = []
    for parts in (2, None):
        of = loader(Odd(40, "fails and dies"), parts, batch_size=40, shuffle=False)
        with pytest.raises(ValueError, match="sample 7 is damaged"):
            next(iter(of))
        found.append(of.digest)
    assert found[0] == found[1]


def test_next_calls_are_counted_and_not_parts(rig: Rig):
    of = loader(Numbers(80), 4, shuffle=False)
    iterator = iter(of)
    words = iterator._client.control.words
    before = words[W_NEXT_CALLS], words[W_READY_CALLS]
    for _ in range(8):
        next(iterator)
    assert words[W_NEXT_CALLS] - before[0] == 8
    assert words[W_READY_CALLS] - before[1] <= 8


def test_unpicklable_keys_fail_only_the_batch_that_has_them(rig: Rig):
    batches = [[0, 1, 2], [3, 4, 5], [6, threading.Lock()]]
    iterator = iter(DataLoader(Numbers(9), batch_sampler=batches, parts=3))
    next(iterator)
    next(iterator)
    with pytest.raises(InputError, match="keys for batch 2 cannot be sent"):
        next(iterator)


def test_batches_that_cannot_be_merged_are_reported_and_made_whole(
    rig: Rig, capsys: pytest.CaptureFixture[str], tmp_path: Path
):
    digests, made = set(), []
    for parts in (3, None):
        of = loader(Odd(400, "ordered", str(tmp_path / f"{parts}")), parts)
        given(of)
        digests.add(of.digest)
        made.append(len((tmp_path / f"{parts}").read_text()))
    assert len(digests) == 1
    assert made[0] < made[1] + 200, "only what was ahead by then is made a second time"
    said = "batches cannot be put together from parts (they contain a value of type OrderedDict)"
    assert said in capsys.readouterr().err


def test_loaders_that_cannot_use_parts_are_refused():
    class Stream(IterableDataset):
        def __iter__(self) -> Any:
            return iter(())

    class Many(Numbers):
        def __getitems__(self, keys: Any) -> Any:
            return keys

    for arguments in (
        {"dataset": Stream()},
        {"dataset": Numbers(3), "batch_size": None},
        {"dataset": Many(3)},
    ):
        with pytest.raises(InputError, match="whose samples are made one by one"):
            DataLoader(parts=2, **arguments)
    with pytest.raises(InputError, match="omit either collate_fn"):
        DataLoader(Numbers(3), collate_fn=list, parts=2)
    for wrong in (0, 2.0, True, 10**6):
        with pytest.raises(ValueError, match="parts must be a number from 1"):
            DataLoader(Numbers(3), parts=wrong)


def test_without_feeders_parts_change_nothing():
    digests = set()
    for parts in (3, None):
        of = loader(Odd(57), parts, num_workers=0)
        assert len(given(of)) == 6
        digests.add(of.digest)
    assert len(digests) == 1
