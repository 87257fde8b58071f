"""What frameworks do to our loader beyond training with it: the batches are torch's, or it is refused aloud."""

from __future__ import annotations

import copy
import inspect
import json
import os
import pickle
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import warm
from batches import Numbers, ids
from rig import Rig
from torch.utils import data

from dataloaderjob import DataLoader
from dataloaderjob.trainer.interop.context import FeedersContext


@pytest.fixture(scope="module")
def rig() -> Iterator[Rig]:
    with Rig(feeders=2) as made:
        yield made


COMMON = """
import json, os, sys
import torch
from pathlib import Path
from torch.utils import data
from batches import Numbers, ids
from dataloaderjob import DataLoader

def tell(rank, found):
    Path(sys.argv[1], f"{rank}.json").write_text(json.dumps(found))
"""


def run(rig: Rig, folder: Path, text: str) -> list[Any]:
    """Runs a training script; returns what each rank told, in order."""
    path = folder / "train.py"
    path.write_text(COMMON + textwrap.dedent(text))
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    environment |= {"PYTHONPATH": rig.env["PYTHONPATH"], "DATALOADERJOB_SOCKET": rig.socket}
    found = warm.run([path, folder], modules=warm.FRAMEWORKS, env=environment, cwd=folder)
    assert found.returncode == 0, found.stderr[-6000:]
    return [json.loads(p.read_text()) for p in sorted(folder.glob("*.json"))]


def of_rank(rank: int, epoch: int, *, n: int = 60, shuffle: bool = True) -> list[int]:
    """Ids that torch's loader gives a rank of two."""
    sampler = data.DistributedSampler(Numbers(n), num_replicas=2, rank=rank, shuffle=shuffle)
    sampler.set_epoch(epoch)
    return ids(data.DataLoader(Numbers(n), batch_size=4, sampler=sampler))


# Processes


@pytest.mark.thorough
def test_forked_ranks_work_while_the_parents_loader_is_in_use(rig: Rig, tmp_path: Path) -> None:
    text = """
        import multiprocessing

        def main(rank):
            os.environ["RANK"] = str(rank)
            sampler = data.DistributedSampler(Numbers(60), num_replicas=2, rank=rank)
            tell(rank, ids(DataLoader(Numbers(60), batch_size=4, sampler=sampler)))

        if __name__ == "__main__":
            iterator = iter(DataLoader(Numbers(60), batch_size=4))
            next(iterator)
            children = [multiprocessing.get_context("fork").Process(target=main, args=(r,)) for r in range(2)]
            for child in children:
                child.start()
            for child in children:
                child.join()
                assert child.exitcode == 0
            assert len(list(iterator)) == 14
    """
    assert run(rig, tmp_path, text) == [of_rank(0, 0), of_rank(1, 0)]


@pytest.mark.thorough
def test_spawned_processes_without_ranks_are_distinguished_by_pid(rig: Rig, tmp_path: Path) -> None:
    text = """
        def main(part):
            tell(part, ids(DataLoader(Numbers(60), batch_size=4, sampler=range(part, 60, 2))))

        if __name__ == "__main__":
            iterator = iter(DataLoader(Numbers(60), batch_size=4))
            next(iterator)
            torch.multiprocessing.spawn(main, (), nprocs=2)
            assert len(list(iterator)) == 14
    """
    assert run(rig, tmp_path, text) == [list(range(0, 60, 2)), list(range(1, 60, 2))]


# Lightning


LIGHTNING = """
    import lightning, logging, warnings
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(7, 1)
            self.found = {"train": [], "val": [], "kinds": [], "options": []}

        def on_train_epoch_start(self):
            self.found["train"].append([])

        def training_step(self, batch, step):
            self.found["train"][-1] += batch[0].tolist()
            return self.layer(batch[1]).mean()

        def validation_step(self, batch, step):
            self.found["val"] += batch[0].tolist()

        def predict_step(self, batch, step):
            return batch[0].tolist()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 0.01)

        def on_train_end(self):
            loader = self.trainer.train_dataloader
            self.found["kinds"] += [f"{type(loader).__module__}.{type(loader).__name__}", type(loader.sampler).__name__]
            self.found["options"] += [loader.allow_pickle, loader.prefetch_factor, loader.num_workers]

    options = {"max_epochs": 3, "accelerator": "cpu", "logger": False, "enable_checkpointing": False,
               "enable_progress_bar": False, "enable_model_summary": False, "num_sanity_val_steps": 0}
    train = DataLoader(Numbers(60), batch_size=4, shuffle=True, allow_pickle=True, num_workers=2, prefetch_factor=3)
    val = DataLoader(Numbers(20), batch_size=4)
    module = Module()
"""


def test_lightning_predicts_each_batch_once(rig: Rig, tmp_path: Path) -> None:
    """It wraps the batch_sampler in one whose iterator begins anew with each iter()."""
    text = """
    trainer = lightning.Trainer(devices=1, **options)
    tell(0, trainer.predict(module, DataLoader(Numbers(20), batch_size=8)))
    """
    (found,) = run(rig, tmp_path, LIGHTNING + text)
    assert found == [list(range(8)), list(range(8, 16)), list(range(16, 20))]


@pytest.mark.slow
def test_lightning_on_two_ranks_gives_each_torchs_batches_in_every_epoch(rig: Rig, tmp_path: Path) -> None:
    text = """
    trainer = lightning.Trainer(devices=2, strategy="ddp", **options)
    trainer.fit(module, train, val)
    tell(trainer.global_rank, module.found)
    """
    found = run(rig, tmp_path, LIGHTNING + text)
    assert len(found) == 2
    for rank, told in enumerate(found):
        assert told["train"] == [of_rank(rank, epoch) for epoch in range(3)]
        assert told["val"] == of_rank(rank, 0, n=20, shuffle=False) * 3
        assert told["kinds"] == ["dataloaderjob.trainer.loader.DataLoader", "DistributedSampler"]
        assert told["options"] == [True, 3, 2]


# Accelerate


def test_accelerate_keeps_feeders_wherever_it_replaces_the_loader(rig: Rig) -> None:
    accelerate = pytest.importorskip("accelerate")
    from accelerate.data_loader import prepare_data_loader, skip_first_batches

    loader = DataLoader(Numbers(20), batch_size=4)
    accelerator = accelerate.Accelerator(cpu=True)
    for replaced, first in (
        (accelerator.prepare(torch.nn.Linear(7, 1), loader)[1], 0),
        (accelerator.prepare_data_loader(loader), 0),
        (prepare_data_loader(loader, put_on_device=True), 0),
        (accelerator.skip_first_batches(loader, 2), 8),
        (skip_first_batches(loader, 2), 8),
    ):
        assert isinstance(replaced.multiprocessing_context, FeedersContext)
        assert ids(replaced) == list(range(first, 20))
    theirs = accelerator.prepare(data.DataLoader(Numbers(20)))
    assert theirs.multiprocessing_context is None, "torch's own is let by"


def test_looking_into_a_loader_never_raises(rig: Rig) -> None:
    for options in ({}, {"num_workers": 2, "persistent_workers": True}, {"num_workers": 0}):
        loader = DataLoader(Numbers(20), batch_size=4, **options)
        for used in (False, True):
            if used:
                next(iter(loader))
            members = dict(inspect.getmembers(loader))
            assert members["batch_size"] == 4
            assert "_is_accelerate_prepared" not in members
            assert repr(loader)
            assert vars(loader)
            for again in (copy.copy(loader), copy.deepcopy(loader), pickle.loads(pickle.dumps(loader))):
                assert type(again.num_workers) is type(loader.num_workers)
                assert again.num_workers == loader.num_workers
