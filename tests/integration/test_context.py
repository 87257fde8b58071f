"""`dataloaderjob.context()`: torch's own iterator, and torchdata's, on feeders."""

from __future__ import annotations

import contextlib
import copy
import gc
import json
import os
import pickle
import threading
import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from batches import Augmented, Numbers, Whose, epoch, fingerprint, ids, noisy_collate
from rig import Rig
from torch.utils import data
from torchdata.stateful_dataloader import StatefulDataLoader

import dataloaderjob
from dataloaderjob import DataLoader, InputError, ServiceUnavailable, context
from processes import in_child, open_files


@pytest.fixture(scope="module", autouse=True)
def rig() -> Iterator[Rig]:
    with Rig(feeders=2) as made:
        yield made


def torchs(dataset: Any, **options: Any) -> data.DataLoader:
    return data.DataLoader(dataset, **{"num_workers": 2, "multiprocessing_context": context(), **options})


def seeded(loader: Any) -> list[Any]:
    torch.manual_seed(5)
    return epoch(loader)


OPTIONS: dict[str, dict[str, Any]] = {
    "in batches": {"batch_size": 4},
    "single samples": {"batch_size": None},
    "shuffled": {"batch_size": 4, "shuffle": True},
    "a collate_fn that draws": {"batch_size": 4, "collate_fn": noisy_collate},
    "one worker": {"batch_size": 4, "num_workers": 1},
    "a wide window": {"batch_size": 4, "prefetch_factor": 20},
    "out of order": {"batch_size": 4, "in_order": False},
    "a timeout": {"batch_size": 4, "timeout": 60},
    "persistent": {"batch_size": 4, "persistent_workers": True},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_torchs_iterator_gives_the_same_batches_as_ours(name: str) -> None:
    options = OPTIONS[name]
    theirs = torchs(Augmented(30), **options)
    ours = DataLoader(Augmented(30), **{"num_workers": 2, **options})
    torch.manual_seed(5)
    found = [epoch(theirs) for _ in range(3)]
    torch.manual_seed(5)
    assert [epoch(ours) for _ in range(3)] == found
    assert len({str(f) for f in found}) == 3, "each epoch has its own seeds"


def test_batches_are_made_by_feeders() -> None:
    pids = {int(pid) for pids, _ in torchs(Whose(40), batch_size=2) for pid in pids}
    assert os.getpid() not in pids
    assert pids


def test_copied_or_pickled_context_works_like_the_original() -> None:
    made = DataLoader(Numbers(8), num_workers=1, allow_pickle=True).multiprocessing_context
    for again in (copy.deepcopy(made), pickle.loads(pickle.dumps(made))):
        assert again == made == context(allow_pickle=True) != context()
        assert ids(torchs(Numbers(8), multiprocessing_context=again)) == list(range(8))
    assert str(context()) == "dataloaderjob.context()"


def test_torch_loader_rebuilt_from_our_attributes_keeps_its_feeders() -> None:
    ours = DataLoader(Augmented(30), batch_size=4, num_workers=2)
    names = (
        "dataset",
        "batch_sampler",
        "num_workers",
        "collate_fn",
        "multiprocessing_context",
        "prefetch_factor",
    )
    rebuilt = data.DataLoader(**{name: getattr(ours, name) for name in names})
    assert seeded(rebuilt) == seeded(ours)


def test_sample_error_keeps_its_type_and_the_epoch_continues() -> None:
    class Broken(Numbers):
        def __getitem__(self, i: int) -> Any:
            if i == 5:
                raise LookupError("sample 5 is torn")
            return super().__getitem__(i)

    iterator = iter(torchs(Broken(12), batch_size=2))
    assert [next(iterator)[0].tolist() for _ in range(2)] == [[0, 1], [2, 3]]
    with pytest.raises(LookupError, match="sample 5 is torn"):
        next(iterator)
    assert ids(iterator) == [6, 7, 8, 9, 10, 11]


def test_loader_timeout_raises_with_the_seconds() -> None:
    with pytest.raises(TimeoutError, match="timed out after 1 seconds"):
        ids(torchs(Numbers(4, seconds=30), timeout=1))


@pytest.mark.thorough
def test_timeout_equal_to_torchs_polling_interval_is_honoured() -> None:
    with pytest.raises(TimeoutError, match="timed out after 5 seconds"):
        ids(torchs(Numbers(4, seconds=30), timeout=5.0))


@pytest.fixture
def accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    """Something that torch takes for one: pinning copies."""
    found = types.SimpleNamespace(type="cpu")
    for name, value in (
        ("is_available", lambda: True),
        ("current_device_index", lambda: 0),
        ("set_device_index", lambda _: None),
        ("current_accelerator", lambda *_: found),
    ):
        monkeypatch.setattr(torch.accelerator, name, value)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self, *_: self.clone())


def test_torchs_thread_that_pins_takes_the_batches(accelerator: None) -> None:
    options = {"batch_size": 4, "pin_memory": True}
    assert seeded(torchs(Augmented(30), **options)) == seeded(DataLoader(Augmented(30), 4, num_workers=2))


@pytest.mark.thorough
def test_abandoned_epochs_do_not_end_the_pinning_thread(accelerator: None) -> None:
    options = {"batch_size": 1, "pin_memory": True, "persistent_workers": True, "prefetch_factor": 8}
    loader = torchs(Numbers(100), **options)
    for round_ in range(40):
        iterator = iter(loader)
        for _ in range(round_ % 7):
            next(iterator)
    assert ids(loader) == list(range(100))


def test_service_error_reaches_the_trainer_through_the_pinning_thread(accelerator: None) -> None:
    feeders = context()
    iterator = iter(
        torchs(Numbers(40, seconds=0.1), batch_size=4, pin_memory=True, multiprocessing_context=feeders)
    )
    next(iterator)
    client = feeders.client
    assert client is not None
    client.dead = "the sidecar is gone, said this test"
    try:
        with pytest.raises(ServiceUnavailable, match="said this test"):
            list(iterator)
    finally:
        client.dead = None


def test_pool_is_released_with_the_last_loader_using_it() -> None:
    def used_and_let_go() -> str:
        loader = torchs(Numbers(40), batch_size=4)
        assert ids(loader) == list(range(40))
        held = [target for target in open_files() if "dlj" in target]
        del loader
        gc.collect()
        return str((bool(held), [target for target in open_files() if "dlj" in target]))

    assert in_child(used_and_let_go) == "(True, [])"


@pytest.mark.thorough
def test_iterator_with_a_failed_batch_leaves_no_stream_open() -> None:
    class Broken(Numbers):
        def __getitem__(self, i: int) -> Any:
            raise LookupError("torn")

    feeders = context()
    next(iter(torchs(Numbers(4), multiprocessing_context=feeders)))
    client = feeders.client
    assert client is not None
    gc.collect()
    gc.disable()
    try:
        client.close_collected()
        before = len(client.streams)
        for _ in range(3):
            iterator = iter(torchs(Broken(8), multiprocessing_context=feeders))
            with contextlib.suppress(LookupError):
                next(iterator)
            del iterator
        client.close_collected()
        assert len(client.streams) == before
    finally:
        gc.enable()


def test_whole_epoch_follows_an_abandoned_one() -> None:
    for persistent in (False, True):
        loader = torchs(Numbers(40), batch_size=2, persistent_workers=persistent)
        for _ in range(3):
            for step, _batch in enumerate(loader):
                if step == 3:
                    break
        assert ids(loader) == list(range(40))


def test_an_iterable_dataset_is_refused() -> None:
    class Stream(data.IterableDataset):
        def __iter__(self) -> Any:
            return iter(range(4))

    with pytest.raises(InputError, match="Stream is an IterableDataset"):
        iter(torchs(Stream()))


def test_context_refuses_to_start_other_processes() -> None:
    with pytest.raises(InputError, match="use multiprocessing's own"):
        context().Process(target=print, args=("x",)).start()


def test_two_torch_loaders_and_one_of_ours_work_at_the_same_time() -> None:
    loaders = [
        torchs(Numbers(20), batch_size=2),
        torchs(Numbers(20), batch_size=2),
        DataLoader(Numbers(20), 2),
    ]
    for batches in zip(*loaders, strict=True):
        assert len({str(b[0].tolist()) for b in batches}) == 1


def test_used_context_leaves_no_streams_or_threads() -> None:
    before, feeders = threading.active_count(), context()
    for persistent in (False, True):
        loader = torchs(
            Numbers(20), batch_size=2, persistent_workers=persistent, multiprocessing_context=feeders
        )
        next(iter(loader))
        assert ids(loader) == list(range(20))
        del loader
    client = feeders.client
    assert client is not None
    client.close_collected()
    assert not client.streams
    assert threading.active_count() == before


# torchdata


def stateful(**options: Any) -> StatefulDataLoader:
    return StatefulDataLoader(
        Augmented(30), **{"batch_size": 4, "num_workers": 2, "multiprocessing_context": context(), **options}
    )


@pytest.mark.parametrize(
    "options", [{}, {"snapshot_every_n_steps": 3}, {"persistent_workers": True}], ids=str
)
def test_torchdatas_loader_resumes_from_any_batch(options: dict[str, Any]) -> None:
    torch.manual_seed(5)
    expected = [fingerprint(b) for b in stateful(**options)]
    assert expected == seeded(DataLoader(Augmented(30), 4, num_workers=2))
    for step in range(len(expected)):
        torch.manual_seed(5)
        loader = stateful(**options)
        iterator = iter(loader)
        for _ in range(step):
            next(iterator)
        state = json.loads(json.dumps(loader.state_dict()))
        torch.manual_seed(6)
        again = stateful(**options)
        again.load_state_dict(state)
        assert [fingerprint(b) for b in again] == expected[step:], step


@pytest.mark.thorough
@pytest.mark.cover(1)
@pytest.mark.parametrize("every", range(4), ids="snapshots each {}".format)
@pytest.mark.parametrize("workers", [1, 2, 3], ids="workers {}".format)
def test_torchdatas_persistent_workers_resume_in_any_epoch(workers: int, every: int) -> None:
    options = {"num_workers": workers, "snapshot_every_n_steps": every, "persistent_workers": True}
    options |= {"batch_size": 8, "shuffle": True}

    def made(seed: int) -> StatefulDataLoader:
        torch.manual_seed(seed)
        return stateful(**options, generator=torch.Generator().manual_seed(seed))

    loader, expected, states = made(5), [], {}
    for at in range(3):
        expected.append([])
        for batch in loader:
            expected[at].append(fingerprint(batch))
            states[at, len(expected[at])] = copy.deepcopy(loader.state_dict())
        states[at, 5] = copy.deepcopy(loader.state_dict())
    for at, step in (0, 3), (0, 5), (1, 1), (1, 2), (1, 4), (1, 5):
        again = made(6)
        again.load_state_dict(states[at, step])
        twice = made(7)
        twice.load_state_dict(copy.deepcopy(again.state_dict()))
        assert epoch(twice) == (expected[at][step:] if step < 5 else expected[at + 1]), (at, step)


def test_torchdatas_state_of_worker_processes_is_refused() -> None:
    loader = stateful(multiprocessing_context=None)
    next(iter(loader))
    again = stateful()
    again.load_state_dict(loader.state_dict())
    with pytest.raises(InputError, match="whose workers were processes"):
        next(iter(again))


def test_the_context_is_public() -> None:
    assert dataloaderjob.context is context
