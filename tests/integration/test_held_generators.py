"""Generators that a dataset, a transform or a collate_fn holds draw for each sample what they draw anywhere."""

from __future__ import annotations

import functools
import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import held_tools
import numpy as np
import pytest
import torch
from held_tools import jitter
from rig import Rig
from torch.utils.data import ConcatDataset, Dataset, Subset, get_worker_info

from dataloaderjob import DataLoader
from dataloaderjob.trainer.resume.held_draws import EPOCHS

N, SIZE = 24, 4
of_this_module = np.random.RandomState(11)


class Draws(Dataset):
    """Each sample is a draw."""

    def __init__(self, draw: Callable[[], float], n: int = N) -> None:
        self.draw, self.n = draw, n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, i: int) -> float:
        return float(self.draw())


class InBatches(Draws):
    def __getitems__(self, keys: list[int]) -> list[float]:
        return [float(self.draw()) for _ in keys]


class Transform:
    """As MONAI's."""

    def __init__(self) -> None:
        self.R = np.random.RandomState(0)

    def __call__(self) -> float:
        return self.R.rand()


class OfClass:
    rng = np.random.default_rng(14)

    def draw(self) -> float:
        return self.rng.random()


class Slotted:
    __slots__ = ("generator",)

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(15)

    def draw(self) -> float:
        return torch.rand(1, generator=self.generator).item()


class Collate:
    def __init__(self) -> None:
        self.rng = np.random.default_rng(16)

    def __call__(self, samples: list[float]) -> torch.Tensor:
        return torch.tensor([self.rng.random() for _ in samples])


def of_a_closure() -> Callable[[], float]:
    rng = random.Random(13)
    return lambda: rng.random()


def of_a_default(rng: np.random.RandomState = np.random.RandomState(12)) -> float:
    return rng.rand()


def of_the_script() -> float:
    return of_this_module.rand()


def of_a_modules_attribute() -> float:
    return held_tools.CONFIG.rng.random()


def of_bits(bits: np.random.BitGenerator) -> float:
    return np.random.Generator(bits).random()


def bits(kind: Any) -> Callable[[], Any]:
    return lambda: {"dataset": Draws(np.random.Generator(kind(3)).random)}


CASES: dict[str, Callable[[], dict[str, Any]]] = {
    "an attribute of a transform": lambda: {"dataset": Draws(Transform())},
    "a partial": lambda: {"dataset": Draws(functools.partial(random.Random.random, random.Random(3)))},
    "a closure": lambda: {"dataset": Draws(of_a_closure())},
    "a default argument": lambda: {"dataset": Draws(of_a_default)},
    "a class": lambda: {"dataset": Draws(OfClass().draw)},
    "a slot": lambda: {"dataset": Draws(Slotted().draw)},
    "collate_fn": lambda: {"dataset": Draws(float), "collate_fn": Collate()},
    "a list with a collate_fn": lambda: {"dataset": [1.0] * N, "collate_fn": Collate()},
    "a global of a module": lambda: {"dataset": Draws(jitter)},
    "an object of a module": lambda: {"dataset": Draws(of_a_modules_attribute)},
    "a global of the script": lambda: {"dataset": Draws(of_the_script)},
    "a dataset in a dataset": lambda: {"dataset": Subset(Draws(Transform()), range(N))},
    "several datasets": lambda: {
        "dataset": ConcatDataset([Draws(Transform(), 12), Draws(of_a_closure(), 12)])
    },
    "batches": lambda: {"dataset": InBatches(Transform())},
    "a method of numpy's": lambda: {"dataset": Draws(np.random.RandomState(4).rand)},
    "bits": lambda: {"dataset": Draws(functools.partial(of_bits, np.random.Philox(3)))},
    "PCG64": bits(np.random.PCG64),
    "PCG64DXSM": bits(np.random.PCG64DXSM),
    "SFC64": bits(np.random.SFC64),
    "MT19937": bits(np.random.MT19937),
    "a RandomState of PCG64": lambda: {"dataset": Draws(np.random.RandomState(np.random.PCG64(3)).rand)},
    "numpy's own": lambda: {"dataset": Draws(vars(np.random.mtrand)["_rand"].rand)},
    "Python's own": lambda: {"dataset": Draws(vars(random)["_inst"].random)},
    "parts": lambda: {"dataset": Draws(Transform()), "parts": 2},
    "persistent workers": lambda: {"dataset": Draws(Transform()), "persistent_workers": True},
}


@pytest.fixture(scope="module")
def rigs() -> Iterator[dict[int, Rig]]:
    with Rig(feeders=1) as one, Rig(feeders=3) as three:
        yield {1: one, 3: three}


@pytest.fixture
def over(rigs: dict[int, Rig], monkeypatch: pytest.MonkeyPatch) -> Callable[[int], int]:
    """Has loaders served by so many feeders; gives a number for `num_workers`."""

    def choose(feeders: int) -> int:
        if feeders:
            monkeypatch.setenv("DATALOADERJOB_SOCKET", rigs[feeders].socket)
        return min(feeders, 1)

    return choose


def seed(number: int | None) -> None:
    if number is not None:
        random.seed(number)
        np.random.seed(number)
        torch.manual_seed(number)


def loader(case: Callable[[], dict[str, Any]], workers: int) -> DataLoader:
    arguments = case()
    if not workers:
        for name in ("parts", "persistent_workers", "worker_init_fn"):
            arguments.pop(name, None)
    return DataLoader(batch_size=SIZE, num_workers=workers, **arguments)


def given(made: DataLoader, epochs: int = 2) -> list[float]:
    return [sample for _ in range(epochs) for batch in made for sample in batch.tolist()]


QUICK = (
    "an attribute of a transform", "a closure", "a class", "a slot", "a list with a collate_fn", "a global of a module",
    "several datasets", "batches", "a RandomState of PCG64", "numpy's own", "parts", "persistent workers",
)  # fmt: skip


@pytest.mark.thorough
@pytest.mark.quick(*QUICK, others="nightly")
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_draws_are_distinct_and_equal_to_in_process_draws(case: Callable[[], dict[str, Any]], over) -> None:
    found, digests = [], set()
    for feeders in (0, 1, 3):
        seed(5)
        made = loader(case, over(feeders))
        found.append(given(made))
        digests.add(made.digest)
    assert found[0] == found[1] == found[2]
    assert len(digests) == 1
    assert len(set(found[0])) == 2 * N


@pytest.mark.thorough
@pytest.mark.parametrize(
    "name", ["an attribute of a transform", "collate_fn", "numpy's own", "parts", "a slot"]
)
@pytest.mark.quick("an attribute of a transform", "parts")
def test_resumed_epoch_repeats_its_original_draws(name: str, over) -> None:
    seed(5)
    whole = loader(CASES[name], over(3))
    expected = given(whole, 3)
    seed(5)
    first = loader(CASES[name], over(3))
    given(first, 1)
    iterator = iter(first)
    for _ in range(2):
        next(iterator)
    state = first.state_dict()
    del iterator
    second = loader(CASES[name], over(1))
    second.load_state_dict(state)
    assert given(second, 2) == expected[N + 2 * SIZE :]
    assert second.digest == whole.digest


def test_state_between_epochs_continues_with_new_draws(over) -> None:
    whole = loader(CASES["a closure"], over(1))
    expected = given(whole, 3)
    first = loader(CASES["a closure"], over(1))
    given(first, 2)
    second = loader(CASES["a closure"], 0)
    second.load_state_dict(first.state_dict())
    assert given(second, 1) == expected[2 * N :]


def test_generators_seeded_by_the_user_do_not_depend_on_torchs_seed(over) -> None:
    found = []
    for number in (1, 2):
        seed(number)
        found.append(given(loader(CASES["an attribute of a transform"], over(3))))
    assert found[0] == found[1]


def test_different_user_seed_draws_differently(over) -> None:
    found = [
        given(DataLoader(Draws(np.random.default_rng(n).random), SIZE, num_workers=over(1))) for n in (1, 2)
    ]
    assert not set(found[0]) & set(found[1])


def test_new_loader_for_each_epoch_draws_differently_as_in_torch(over) -> None:
    dataset = Draws(Transform())
    found = [x for _ in range(3) for x in given(DataLoader(dataset, SIZE, num_workers=over(1)), 1)]
    assert len(set(found)) == 3 * N
    validation = given(DataLoader(Subset(dataset, range(12)), SIZE, num_workers=1), 1)
    assert not set(found) & set(validation)


@pytest.mark.thorough
def test_killed_feeders_change_no_draw() -> None:
    expected = given(loader(lambda: {"dataset": Draws(Transform(), 200)}, 0), 1)
    found: list[float] = []
    with Rig(feeders=3) as rig:
        for number, batch in enumerate(loader(lambda: {"dataset": Draws(Transform(), 200)}, 1)):
            found += batch.tolist()
            if number in (5, 20):
                rig.feeders[number // 20][0].kill()
    assert found == expected


class Reseeded(Dataset):
    def __init__(self) -> None:
        self.R = np.random.RandomState(0)

    def __len__(self) -> int:
        return N

    def __getitem__(self, i: int) -> float:
        return self.R.rand()


def replaces(worker: int) -> None:
    """As MONAI's worker_init_fn."""
    info: Any = get_worker_info()
    info.dataset.R = np.random.RandomState(info.seed % 2**32)


def reseeds(worker: int) -> None:
    info: Any = get_worker_info()
    info.dataset.R.seed(info.seed % 2**32)


def seeds_by_its_number(worker: int) -> None:
    """Worker 0 has the generator as it was."""
    info: Any = get_worker_info()
    info.dataset.R.seed(worker)


@pytest.mark.thorough
@pytest.mark.parametrize("init", [replaces, reseeds, seeds_by_its_number])
def test_a_worker_init_fn_that_seeds_gives_the_same_in_each_run(init: Callable[[int], None], over) -> None:
    found = []
    for feeders, number in ((1, 5), (3, 5), (3, 6)):
        seed(number)
        found.append(given(loader(lambda: {"dataset": Reseeded(), "worker_init_fn": init}, over(feeders))))
    assert found[0] == found[1]
    assert len(set(found[0])) == 2 * N
    assert not set(found[1]) & set(found[2]), "it took the seed that torch.manual_seed gave"


def test_the_users_own_generators_stay_as_they_were(over) -> None:
    transform, before = Transform(), np.random.RandomState(0).rand(3).tolist()
    for feeders in (0, 1):
        given(DataLoader(Draws(transform), SIZE, num_workers=over(feeders)))
    assert transform.R.rand(3).tolist() == before


SCRIPT = """
import numpy as np, torch
from dataloaderjob import DataLoader
class Noisy(torch.utils.data.Dataset):
    def __init__(self): self.rng = np.random.default_rng(1)
    def __len__(self): return 24
    def __getitem__(self, i): return self.rng.random()
if __name__ == "__main__":
    loader = DataLoader(Noisy(), 4, num_workers=2)
    print(len({x for _ in range(2) for batch in loader for x in batch.tolist()}), loader.digest)
"""


def test_two_runs_of_a_script_have_the_same_digest(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    env = {name: value for name, value in os.environ.items() if name != "DATALOADERJOB_SOCKET"}
    words = {
        subprocess.run(
            [sys.executable, script], env=env, capture_output=True, text=True, timeout=120, check=True
        ).stdout
        for _ in range(2)
    }
    assert len(words) == 1
    assert words.pop().startswith("48 ")


def test_tickets_of_loaders_without_held_generators_are_unchanged(over) -> None:
    made = loader(lambda: {"dataset": list(range(N))}, over(1))
    given(made)
    assert made.state_dict()["draws"] == 0
    held = loader(CASES["a closure"], over(1))
    given(held)
    again = DataLoader(held.dataset, SIZE, num_workers=over(1))
    given(again, 1)
    assert again.state_dict()["draws"] == EPOCHS
