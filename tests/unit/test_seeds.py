"""Seeds: the same everywhere, different for everything else."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dataloaderjob.making.fetcher import OF_SAMPLE, batch_seed, derive_seed, key_number, sample_seed
from dataloaderjob.shipping.facts import facts
from dataloaderjob.sidecar.dispatch.choose import caution, mismatch


def test_seeds_never_change_between_versions() -> None:
    assert derive_seed(0) == 1786884285633530058
    assert sample_seed(1234, 5, 7) == 10829500007652332684
    assert batch_seed(1234, 5) == 7699915390511872804


@given(st.integers(0, 2**64 - 1), st.lists(st.integers(), max_size=4))
def test_a_seed_is_an_unsigned_number_of_64_bits(base: int, parts: list[int]) -> None:
    assert 0 <= derive_seed(base, *parts) < 2**64


def test_every_part_and_their_order_matter() -> None:
    found = {
        derive_seed(0), derive_seed(1), derive_seed(0, 0), derive_seed(0, 1), derive_seed(0, 3, 4),
        derive_seed(0, 4, 3), derive_seed(1, 0), sample_seed(0, 1, 2), batch_seed(0, 1),
    }  # fmt: skip
    assert len(found) == 9


def test_two_draws_of_one_index_get_different_seeds() -> None:
    assert sample_seed(9, 0, 5) != sample_seed(9, 1, 5)


@given(st.integers(0, 2**64 - 1), st.integers(0, 2**63), st.integers())
def test_a_sample_s_seed_is_derived_like_any_other(base: int, position: int, key: int) -> None:
    assert sample_seed(base, position, key) == derive_seed(base, OF_SAMPLE, position, key)


def test_seeds_of_an_epoch_do_not_collide() -> None:
    assert len({sample_seed(3, i, i) for i in range(50_000)}) == 50_000


@pytest.mark.parametrize(
    "key",
    [np.int64(7), np.uint8(7), torch.tensor(7), torch.tensor([7])],
    ids=["numpy-int64", "numpy-uint8", "tensor", "tensor-of-one"],
)
def test_an_integer_of_any_type_counts_as_its_value(key: Any) -> None:
    assert sample_seed(0, 0, key) == sample_seed(0, 0, 7)


def test_keys_that_are_not_integers_count_by_their_value() -> None:
    keys: list[Any] = ["a", "b", ("a", 1), ("a", 2), b"a", None, 1.5, frozenset({"a", "b"}), 2**80]
    assert len({key_number(k) for k in keys}) == len(keys)


def test_keys_of_strings_and_sets_give_the_same_seed_in_every_process() -> None:
    code = "from dataloaderjob.making import fetcher; print(fetcher.sample_seed(1, 2, ('x', frozenset('abcdef'))))"
    found = {
        subprocess.run(
            [sys.executable, "-c", code], env={**os.environ, "PYTHONHASHSEED": str(seed)},
            capture_output=True, text=True, check=True,
        ).stdout
        for seed in range(3)
    }  # fmt: skip
    assert found == {f"{sample_seed(1, 2, ('x', frozenset('abcdef')))}\n"}


def test_object_counts_only_by_its_type() -> None:
    assert key_number(object()) == key_number(object())


def test_equal_facts_do_not_differ() -> None:
    assert mismatch(facts(), {**facts(), "feeder": "feeder-0", "instance": "ab"}) is None
    assert set(facts()) == {"python", "torch", "numpy", "cpu"}


@pytest.mark.parametrize(
    ("fact", "found", "said"),
    [
        pytest.param("python", "3.9", "the trainer has Python 3.11, but the feeder has 3.9", id="python"),
        pytest.param("torch", "1.0", "the trainer has torch 2.13, but the feeder has 1.0", id="torch"),
        pytest.param("numpy", None, "the trainer has numpy 2.4, but the feeder has none", id="numpy-missing"),
    ],
)
def test_difference_is_named_with_a_remedy(fact: str, found: str | None, said: str) -> None:
    trainer = {"python": "3.11", "torch": "2.13", "numpy": "2.4", "cpu": "x86_64 AVX2"}
    feeder = {**trainer, fact: found}
    if found is None:
        del feeder[fact]
    message = mismatch(trainer, feeder)
    assert message is not None
    assert said in message
    assert "feeder image from the trainer's image" in message


def test_different_cpu_is_reported_but_not_refused() -> None:
    trainer, feeder = {"cpu": "x86_64 AVX512"}, {"cpu": "x86_64 AVX2"}
    assert mismatch(trainer, feeder) is None
    message = caution(trainer, feeder)
    assert message is not None
    assert "ATEN_CPU_CAPABILITY" in message
    assert caution(trainer, trainer) is None


def test_facts_that_the_trainer_does_not_state_are_not_compared() -> None:
    assert mismatch({}, facts()) is None
