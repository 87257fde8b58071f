"""The digest of a loader is the same whoever makes its batches, and it misses nothing that a trainer took."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from batches import Augmented, InBatches, Keyed, Numbers, Zoo, as_list, noisy_collate
from relay import CutRig
from rig import Rig

from dataloaderjob import DataLoader
from dataloaderjob.core.control import W_DIGEST

N, EPOCHS = 40, 2


class Failing(Numbers):
    """Raises for one sample."""

    def __getitem__(self, i: int) -> Any:
        if i == 13:
            raise LookupError("sample 13")
        return super().__getitem__(i)


def digest(dataset: Any = None, *, workers: int | None = None, **arguments: Any) -> str:
    """What two epochs of a loader give, errors and all."""
    arguments = {"batch_size": 3, "shuffle": True, "generator": torch.Generator().manual_seed(5), **arguments}
    loader = DataLoader(dataset or Numbers(N), num_workers=workers, **arguments)
    for _ in range(EPOCHS):
        batches = iter(loader)
        while True:
            try:
                next(batches)
            except StopIteration:
                break
            except LookupError:
                continue
    return loader.digest


@pytest.fixture(scope="module")
def rig() -> Iterator[Rig]:
    with Rig(feeders=2) as made:
        yield made


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("dataset", "more"),
    [
        pytest.param(Numbers(N), {}, id="plain"),
        pytest.param(Augmented(N), {}, id="random"),
        pytest.param(Augmented(N), {"collate_fn": noisy_collate}, id="random-collate"),
        pytest.param(InBatches(N), {}, id="batch-by-batch"),
        pytest.param(Zoo(N), {"collate_fn": as_list}, id="every-kind-of-leaf"),
        pytest.param(Failing(N), {}, id="one-that-fails"),
        pytest.param(Numbers(N), {"batch_size": None}, id="without-batches"),
        pytest.param(Numbers(N), {"persistent_workers": True}, id="persistent"),
        pytest.param(
            Keyed(N), {"shuffle": None, "sampler": [("a", i) for i in range(N)]}, id="keys-that-are-no-ints"
        ),
    ],
)
@pytest.mark.quick(
    "random-collate", "every-kind-of-leaf", "one-that-fails", "without-batches", "keys-that-are-no-ints"
)
def test_a_loader_over_feeders_has_the_digest_of_one_in_the_process(
    rig: Rig, dataset: Any, more: dict[str, Any]
) -> None:
    here = {name: value for name, value in more.items() if name != "persistent_workers"}
    expected = digest(dataset, workers=0, **here)
    if not more.get("persistent_workers"):  # its second epoch has another seed
        assert digest(dataset, **more) == expected
    assert digest(dataset, **more) == digest(dataset, **more)
    assert digest(dataset, **more) != digest(dataset, **{**more, "batch_size": 4}) or "batch_size" in more


def test_other_order_or_samples_give_another_digest(rig: Rig) -> None:
    orders = [list(range(N)), [1, 0, *range(2, N)], [*range(N - 1), 0], list(range(N - 1))]
    found = {digest(shuffle=None, sampler=order, batch_size=1) for order in orders}
    assert len(found) == len(orders)


def test_batches_not_taken_do_not_count(rig: Rig) -> None:
    loaders = [DataLoader(Numbers(N), batch_size=2, num_workers=workers) for workers in (None, 0)]
    for loader in loaders:
        assert len(list(itertools.islice(loader, 5))) == 5
        iter(loader)  # nothing is taken from it
        assert len(list(loader)) == N // 2
    assert loaders[0].digest == loaders[1].digest != DataLoader(Numbers(N)).digest
    assert loaders[0].consumption.epoch == 1


def test_trainers_digest_word_is_the_sum_of_its_loaders_digests(rig: Rig) -> None:
    loaders = [DataLoader(Numbers(N), batch_size=size) for size in (2, 3)]
    list(loaders[0])
    words = loaders[0]._client.control.words
    before = words[W_DIGEST] - loaders[0].consumption.total
    for first, second in zip(*loaders, strict=False):
        del first, second
        total = sum(loader.consumption.total for loader in loaders)
        assert words[W_DIGEST] == (before + total) % 2**64
    word = words[W_DIGEST]
    assert all(loaders[0].state_dict()["loader"]["probes"]), "samples are made for a state"
    assert words[W_DIGEST] == word


def test_a_sidecar_that_dies_changes_no_digest() -> None:
    expected = digest(workers=0)
    with Rig(feeders=1) as rig:
        loader = DataLoader(
            Numbers(N), batch_size=3, shuffle=True, generator=torch.Generator().manual_seed(5)
        )
        for epoch in range(EPOCHS):
            for step, _ in enumerate(loader):
                if (epoch, step) == (0, 4):
                    rig.kill_sidecar()
                    rig.start_sidecar()
    assert loader.digest == expected


def test_a_body_that_is_damaged_on_its_way_is_made_again() -> None:
    flips = 4
    with CutRig(2, flips=flips, checksum=True) as rig:
        loader = DataLoader(Numbers(400, width=20_000), batch_size=2)
        assert sum(1 for _ in loader) == 200
        assert [relay.flips for relay in rig.relays.values()] == [flips, flips]
        assert rig.status()["receivers"], rig.logs()
    reference = DataLoader(Numbers(400, width=20_000), batch_size=2, num_workers=0)
    list(reference)
    assert loader.digest == reference.digest
