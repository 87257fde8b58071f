"""The state of a loader whose feeders are Ray's, resumed at every step, with other numbers of them."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
import torch
from batches import Augmented, fingerprint
from services import Service
from torch.utils import data

from dataloaderjob import DataLoader

LENGTH = 24
"""Batches of an epoch; each resume loads the rest of it."""
FEEDERS = {0: 2, 8: 1, 16: 3}
"""Their number from a step on."""


@pytest.fixture
def ray(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[Service]:
    service = Service(tmp_path_factory.mktemp("f"), "ray", FEEDERS[0])
    monkeypatch.setenv("DATALOADERJOB_SOCKET", service.socket)
    try:
        service.settled()
        yield service
    finally:
        service.end()


def short(ranks: int, rank: int, **options: int) -> DataLoader:
    """A loader of LENGTH batches; the seed is that of the process."""
    torch.manual_seed(5)
    dataset = Augmented(LENGTH * ranks)
    sampler = data.DistributedSampler(dataset, ranks, rank, seed=1)
    return DataLoader(dataset, 1, sampler=sampler, dataset_id="short", **options)


@pytest.mark.slow
def test_ray_feeders_resume_at_every_step_of_an_epoch(ray: Service) -> None:
    here = {"num_workers": 0}
    for ranks in (1, 2):
        expected = [[fingerprint(batch) for batch in short(ranks, rank, **here)] for rank in range(ranks)]
        before = [iter(short(ranks, rank)) for rank in range(ranks)]
        for step in range(LENGTH + 1):
            if step in FEEDERS:
                ray.scale(FEEDERS[step])
                ray.settled()
            for rank in range(ranks):
                again = short(ranks, rank)
                again.load_state_dict(json.loads(json.dumps(before[rank].state_dict())))
                assert [fingerprint(batch) for batch in again] == expected[rank][step:], (ranks, rank, step)
                if step < LENGTH:
                    assert fingerprint(next(before[rank])) == expected[rank][step]
