"""Random transforms of libraries, which hold their generators: the same draws whoever makes the samples."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from rig import Rig
from torch.utils.data import Dataset

os.environ["NO_ALBUMENTATIONS_UPDATE"] = "1"  # it would ask the network for its version

import albumentations
import monai
from monai.data.utils import worker_init_fn

from dataloaderjob import DataLoader, context

N = 12
PICTURE = np.random.RandomState(0).randint(0, 255, (8, 8, 3)).astype(np.uint8)
transforms = monai.transforms


@pytest.fixture(scope="module")
def rig() -> Iterator[Rig]:
    with Rig(feeders=2) as made:
        yield made


class OfMonai(Dataset):
    def __init__(self) -> None:
        noise = transforms.RandGaussianNoise(prob=1.0)
        self.transform = transforms.Compose([noise, transforms.RandShiftIntensity(offsets=1.0, prob=1.0)])
        self.transform.set_random_state(3)

    def __len__(self) -> int:
        return N

    def __getitem__(self, i: int) -> Any:
        return torch.as_tensor(np.asarray(self.transform(PICTURE.transpose(2, 0, 1).astype("f4"))))


def of_monais_dataset() -> Any:
    noise = transforms.RandGaussianNoise(prob=1.0)
    compose = transforms.Compose(
        [lambda i: np.full((1, 4), i, "f4"), noise, transforms.ToTensor(track_meta=False)]
    )
    return monai.data.Dataset(list(range(N)), compose.set_random_state(5))


class OfAlbumentations(Dataset):
    def __init__(self) -> None:
        noise = albumentations.GaussNoise(p=1)
        self.transform = albumentations.Compose([noise, albumentations.RandomBrightnessContrast(p=1)], seed=4)

    def __len__(self) -> int:
        return N

    def __getitem__(self, i: int) -> Any:
        return torch.as_tensor(self.transform(image=PICTURE)["image"])


def given(workers: int, dataset: Any, **more: Any) -> tuple[list[bytes], str]:
    torch.manual_seed(0)
    loader = DataLoader(dataset, 4, num_workers=workers, **more)
    return samples_of(loader), loader.digest


def samples_of(loader: Any) -> list[bytes]:
    return [sample.numpy().tobytes() for _ in range(2) for batch in loader for sample in batch]


@pytest.mark.thorough
@pytest.mark.quick("OfMonai", "OfAlbumentations")
@pytest.mark.parametrize("make", [OfMonai, of_monais_dataset, OfAlbumentations])
def test_transform_draws_the_same_in_feeders_as_in_the_process(rig: Rig, make: Callable[[], Any]) -> None:
    found = [given(workers, make()) for workers in (0, 1)]
    assert found[0] == found[1]
    assert len(set(found[0][0])) == 2 * N


@pytest.mark.slow
@pytest.mark.parametrize("make", [OfMonai, of_monais_dataset])
def test_monais_worker_init_fn_gives_the_same_in_each_run(rig: Rig, make: Callable[[], Any]) -> None:
    found = [given(1, make(), worker_init_fn=worker_init_fn) for _ in range(2)]
    assert found[0] == found[1]
    assert len(set(found[0][0])) == 2 * N


@pytest.mark.slow
def test_monais_own_loader_over_feeders_gives_the_same_in_each_run(rig: Rig) -> None:
    found = []
    for _ in range(2):
        torch.manual_seed(0)
        loader = monai.data.DataLoader(
            OfMonai(), batch_size=4, num_workers=1, multiprocessing_context=context()
        )
        found.append(samples_of(loader))
    assert found[0] == found[1]
    assert len(set(found[0])) == 2 * N


def flips() -> Any:
    keys, made = "picture", monai.transforms
    return made.Compose(
        [
            made.EnsureChannelFirstd(keys, channel_dim="no_channel"), made.RandFlipd(keys, prob=0.5),
            made.RandRotate90d(keys, prob=0.5), made.ResizeWithPadOrCropd(keys, spatial_size=(20, 20)),
        ]
    ).set_random_state(1)  # fmt: skip


@pytest.mark.slow
def test_monai_inverse_undoes_feeders_transforms_and_digests_repeat(rig: Rig) -> None:
    pictures = [{"picture": torch.arange(256.0).reshape(16, 16) + i} for i in range(N)]

    def given() -> tuple[list[Any], str]:
        torch.manual_seed(0)
        transform = flips()
        inverse = transforms.Invertd("back", transform=transform, orig_keys="picture", nearest_interp=False)
        loader = DataLoader(
            monai.data.Dataset(pictures, transform), 4, num_workers=1,
            collate_fn=monai.data.list_data_collate,
        )  # fmt: skip
        found = []
        for batch in loader:
            batch["back"] = batch["picture"].clone()
            found += [inverse(sample)["back"] for sample in monai.data.decollate_batch(batch)]
        return found, loader.digest

    (taken_back, digest), (_, again) = given(), given()
    assert all(torch.equal(a[0], b["picture"]) for a, b in zip(taken_back, pictures, strict=True))
    assert digest == again, "the number of a process's object was in each batch"
