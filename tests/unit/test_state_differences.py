"""In what a loader's state may differ from the loader that it is loaded into: refused by name, or said."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from batches import Augmented, Numbers, ids
from torch.utils.data import IterableDataset

from dataloaderjob import DataLoader, InputError

N, BATCH = 24, 3
HERE: dict[str, Any] = {"num_workers": 0}


def collate_upwards(samples: list[Any]) -> Any:
    return torch.stack([sample[1] for sample in samples])


def collate_downwards(samples: list[Any]) -> Any:
    return torch.stack([sample[1] for sample in reversed(samples)])


@pytest.fixture
def said(capsys: pytest.CaptureFixture[str]) -> Callable[[], str]:
    return lambda: capsys.readouterr().err


def state_of(**options: Any) -> dict[str, Any]:
    loader: DataLoader[Any] = DataLoader(Augmented(N), BATCH, **{**HERE, **options})
    next(iter(loader))
    return loader.state_dict()


ARGUMENTS: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "drop_last": ({"drop_last": True}, {}, "drop_last was True, but is False"),
    "a generator": ({"generator": torch.Generator()}, {}, "generator= was 'given', but is 'left out' now"),
    "a generator more": (
        {},
        {"generator": torch.Generator()},
        "generator= was 'left out', but is 'given' now",
    ),
    "persistent_workers": (
        {},
        {"num_workers": 1, "persistent_workers": True},
        "persistent_workers was False, but is True",
    ),
    "the length under one id": (
        {"dataset_id": "faces"},
        {"dataset_id": "faces", "dataset": Augmented(N + 1)},
        f"length was {N}, but is {N + 1}",
    ),
}


@pytest.mark.parametrize("name", ARGUMENTS)
def test_an_argument_that_changes_later_batches_is_refused(name: str) -> None:
    first, second, message = ARGUMENTS[name]
    state = state_of(**first)
    options = {"dataset": Augmented(N), **HERE, **second}
    with pytest.raises(InputError, match=message):
        DataLoader(options.pop("dataset"), BATCH, **options).load_state_dict(state)


def test_dataset_with_the_same_id_may_grow_between_epochs() -> None:
    loader = DataLoader(Numbers(N), BATCH, dataset_id="faces", **HERE)
    assert ids(loader) == list(range(N))
    grown = DataLoader(Numbers(N + 3), BATCH, dataset_id="faces", **HERE)
    grown.load_state_dict(loader.state_dict())
    assert ids(grown) == list(range(N + 3))


def test_state_of_an_earlier_release_with_fewer_fields_is_accepted() -> None:
    state = state_of()
    for name in ("drop_last", "generator=", "persistent_workers", "collate_fn"):
        del state["loader"][name]
    loader = DataLoader(Augmented(N), BATCH, drop_last=True, **HERE)
    loader.load_state_dict(state)
    assert ids(loader) == list(range(BATCH, N))


def test_different_collate_fn_is_reported(said: Callable[[], str]) -> None:
    state = state_of(collate_fn=collate_upwards)
    DataLoader(Augmented(N), BATCH, collate_fn=collate_upwards, **HERE).load_state_dict(state)
    assert said() == ""
    DataLoader(Augmented(N), BATCH, collate_fn=collate_downwards, **HERE).load_state_dict(state)
    assert said().endswith(
        f"collate_upwards when the state was saved, but is {__name__}.collate_downwards now\n"
    )


@pytest.mark.parametrize("has", ["the state", "this loader"])
def test_dataset_id_on_one_side_only_is_reported(said: Callable[[], str], has: str) -> None:
    named, plain = {"dataset_id": "faces"}, {}
    first, second = (named, plain) if has == "the state" else (plain, named)
    state = state_of(**first)
    DataLoader(Augmented(N), BATCH, **HERE, **second).load_state_dict(state)
    assert f"{has} has a dataset_id (faces)" in said()


def test_empty_state_is_reported_and_none_is_refused(said: Callable[[], str]) -> None:
    loader = DataLoader(Numbers(N), BATCH, **HERE)
    loader.load_state_dict({})
    assert (
        said() == "[dataloaderjob] the loader's state is empty, so the next epoch begins at its first batch\n"
    )
    with pytest.raises(InputError, match="got NoneType: was the checkpoint saved without the loader's state"):
        loader.load_state_dict(None)  # type: ignore[arg-type]


def test_more_batches_than_an_epoch_has_cannot_be_skipped() -> None:
    loader = DataLoader(Numbers(N), BATCH, **HERE)
    loader.skip(50)
    with pytest.raises(
        InputError, match="50 batches are to be skipped, but the sampler ends after 8: skip at most"
    ):
        next(iter(loader))
    with pytest.raises(InputError, match="whole number, at least 0, but is -1"):
        loader.skip(-1)


class Numbered(IterableDataset):
    def __iter__(self) -> Iterator[int]:
        return iter(range(3))


def test_stream_accepts_any_loaders_state_and_warns_that_it_starts_over(
    said: Callable[[], str],
) -> None:
    loader = DataLoader(Numbered(), **HERE)
    loader.load_state_dict({"_num_yielded": 2})
    assert "an IterableDataset cannot be resumed" in said()
    assert len(list(loader)) == 3
