"""Launchers and training frameworks around our loader, each as a trainer of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rig import Rig

PARTS = """
    import torch
    from batches import Augmented

    class Beside(Augmented):
        '''In a module beside the script, which feeders do not have.'''
"""
TRAIN = """
    import hashlib, json, os, sys
    import torch
    from torch.utils import data
    from batches import epoch, ids
    from dataloaderjob import DataLoader
    from parts import Beside

    def digest(loader):
        torch.manual_seed(7)
        return hashlib.sha256(repr(epoch(loader)).encode()).hexdigest()

    def train(rank, world, folder):
        dataset = Beside(61)
        sampler = data.DistributedSampler(dataset, num_replicas=world, rank=rank, seed=3)
        loader, reference = (DataLoader(dataset, batch_size=4, sampler=sampler, **o) for o in ({}, {"num_workers": 0}))
        told = {"ids": [], "ours": [], "reference": []}
        for number in range(2):
            sampler.set_epoch(number)
            told["ids"].append(ids(loader))
            told["ours"].append(digest(loader))
            told["reference"].append(digest(reference))
        told["claimed"] = loader._connect().rank
        with open(f"{folder}/{rank}.json", "w") as out:
            json.dump(told, out)

    def spawned(rank, folder):
        torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
        train(rank, 2, folder)
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()

    if __name__ == "__main__":
        launcher, folder = sys.argv[1:]
        if launcher == "spawn":
            torch.multiprocessing.spawn(spawned, (folder,), nprocs=2)
        elif launcher == "torchrun":
            torch.distributed.init_process_group("gloo")
            train(torch.distributed.get_rank(), torch.distributed.get_world_size(), folder)
            torch.distributed.barrier()
            torch.distributed.destroy_process_group()
        else:
            train(int(os.environ["OMPI_COMM_WORLD_RANK"]), int(os.environ["OMPI_COMM_WORLD_SIZE"]), folder)
"""


@pytest.fixture(scope="module")
def rig() -> Iterator[Rig]:
    with Rig(feeders=2, processes=2) as made:
        yield made


@pytest.fixture
def environment(rig: Rig) -> dict[str, str]:
    """That of a trainer which no launcher has touched yet."""
    kept = {
        k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT")
    }
    path = os.pathsep.join(p for p in sys.path if p)
    return {**kept, "PYTHONPATH": path, "DATALOADERJOB_SOCKET": rig.socket, "OMP_NUM_THREADS": "1"}


def write(folder: Path, **files: str) -> Path:
    for name, text in files.items():
        (folder / f"{name}.py").write_text(textwrap.dedent(text))
    return folder


def run(commands: list[list[Any]], environments: list[dict[str, str]], folder: Path) -> list[str]:
    """Runs all at the same time, to their end; returns what they printed."""
    processes = [
        subprocess.Popen(
            list(map(str, command)),
            env=env,
            cwd=folder,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for command, env in zip(commands, environments, strict=True)
    ]
    try:
        told = [process.communicate(timeout=150) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert [p.returncode for p in processes] == [0] * len(processes), "\n".join(
        err[-4000:] for _, err in told
    )
    return [out for out, _ in told]


def launch(launcher: str, script: Path, environment: dict[str, str]) -> None:
    command: list[Any] = [sys.executable, script, launcher, script.parent]
    if launcher == "torchrun":
        command[1:2] = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", script]
    if launcher != "mpi":
        run([command], [environment], script.parent)
        return
    ranks = [{**environment, "OMPI_COMM_WORLD_RANK": str(r), "OMPI_COMM_WORLD_SIZE": "2"} for r in range(2)]
    run([command] * 2, ranks, script.parent)


@pytest.mark.parametrize("launcher", ["spawn", "torchrun", "mpi"])
def test_two_ranks_of_a_launcher_see_their_parts_with_the_bytes_of_the_process_itself(
    environment: dict[str, str], tmp_path: Path, launcher: str
) -> None:
    write(tmp_path, parts=PARTS, train=TRAIN)
    launch(launcher, tmp_path / "train.py", environment)
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2))
    for told in (first, second):
        assert told["ours"] == told["reference"]
        assert told["ids"][0] != told["ids"][1], "each epoch has its own order"
    for a, b in zip(first["ids"], second["ids"], strict=True):
        assert len(a) == len(b) == 31
        assert set(a) | set(b) == set(range(61))
        assert len(set(a) & set(b)) == 1, "the sampler gives one sample to both, to make their parts equal"
    assert [first["claimed"], second["claimed"]] == ["0", "1"]


LIGHTNING = """
    import json
    import lightning
    import torch
    from batches import Numbers, ids
    from lightning.pytorch.callbacks import Callback
    from torch.utils import data
    from dataloaderjob import DataLoader

    class Model(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(7, 1)
            self.seen = {"training": [], "validation": []}

        def training_step(self, batch, _):
            self.seen["training"] += batch[0].tolist()
            return self.layer(batch[1]).square().mean() * 1e-6

        def validation_step(self, batch, _):
            self.seen["validation"] += batch[0].tolist()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=1e-6)

        def train_dataloader(self):
            return DataLoader(Numbers(40), batch_size=4, shuffle=True, allow_pickle=True)

    def fit(validation, **options):
        lightning.seed_everything(1, verbose=False)
        model = Model()
        trainer = lightning.Trainer(
            accelerator="cpu", devices=1, max_epochs=2, num_sanity_val_steps=0, logger=False, barebones=False,
            enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, **options,
        )
        trainer.fit(model, val_dataloaders=validation)
        used = [trainer.train_dataloader, trainer.val_dataloaders]
        return model, [
            (type(x).__module__, type(x.sampler).__name__, x.batch_size, x.allow_pickle, x.num_workers) for x in used
        ]

    validation = DataLoader(Numbers(10), batch_size=5, prefetch_factor=3, num_workers=2, collate_fn=None)
    for options in ({}, {"strategy": "ddp"}):
        model, used = fit(validation, **options)
        print(json.dumps([model.seen, used]), flush=True)
"""


def test_lightning_trains_and_keeps_our_loader_when_it_puts_its_sampler_in(
    environment: dict[str, str], tmp_path: Path
) -> None:
    script = write(tmp_path, fit=LIGHTNING) / "fit.py"
    (out,) = run([[sys.executable, script]], [environment], tmp_path)
    told = [json.loads(text) for text in out.splitlines() if text.startswith("[{")]
    for (seen, used), samplers in zip(
        told,
        [("RandomSampler", "SequentialSampler"), ("DistributedSampler", "DistributedSampler")],
        strict=True,
    ):
        train = seen["training"]
        assert sorted(train[:40]) == sorted(train[40:]) == list(range(40))
        assert train[:40] != train[40:], "each epoch has its own order"
        assert seen["validation"] == list(range(10)) * 2
        assert [x[0] for x in used] == ["dataloaderjob.trainer.loader"] * 2
        assert tuple(x[1].replace("UnrepeatedDistributed", "Distributed") for x in used) == samplers
        assert [x[2:4] for x in used] == [[4, True], [5, False]]
        assert used[1][4] == 2


REBUILD = '''
    import json
    from batches import Numbers, ids
    from lightning.pytorch.utilities.data import _update_dataloader
    from torch.utils import data
    from dataloaderjob import DataLoader

    class Three(data.BatchSampler):
        """Not torch's own, which Lightning forgets outside of its hooks, ours or not."""

        def __init__(self, sampler, batch_size=3, drop_last=True):
            super().__init__(sampler, batch_size, drop_last)

    kept = {"timeout": 60, "allow_pickle": True, "prefetch_factor": 2, "num_workers": 3, "persistent_workers": True}
    for first in (
        DataLoader(Numbers(40), batch_size=3, drop_last=True, **kept),
        DataLoader(Numbers(40), batch_sampler=Three(range(40)), **kept),
    ):
        told = []
        for rank in range(2):
            sampler = data.DistributedSampler(first.dataset, num_replicas=2, rank=rank, shuffle=False)
            again = _update_dataloader(first, sampler)
            assert type(again) is DataLoader
            assert {name: getattr(again, name) for name in kept} == kept
            assert type(again.batch_sampler) is type(first.batch_sampler)
            assert again.batch_sampler.batch_size == 3
            told.append(ids(again))
        print(json.dumps(told))
'''


def test_lightnings_rebuild_keeps_class_and_arguments(environment: dict[str, str], tmp_path: Path) -> None:
    script = write(tmp_path, rebuild=REBUILD) / "rebuild.py"
    (out,) = run([[sys.executable, script]], [environment], tmp_path)
    for text in out.splitlines():
        assert json.loads(text) == [list(range(0, 36, 2)), list(range(1, 36, 2))]
    assert len(out.splitlines()) == 2


ACCELERATE = """
    import torch
    from accelerate import Accelerator
    from batches import Numbers, ids
    from torch.utils import data
    from dataloaderjob import DataLoader

    accelerator = Accelerator(cpu=True)
    loader, model = DataLoader(Numbers(40), batch_size=4), torch.nn.Linear(7, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    for prepare in (
        lambda: accelerator.prepare(model, optimizer, loader)[2],
        lambda: accelerator.prepare_data_loader(loader),
        lambda: accelerator.skip_first_batches(loader, 2),
    ):
        try:
            next(iter(prepare()))
        except ValueError as exc:
            print(type(exc).__name__, exc)
    model, optimizer = accelerator.prepare(model, optimizer)
    ranks = accelerator.num_processes, accelerator.process_index
    sampler = data.DistributedSampler(loader.dataset, *ranks, shuffle=False)
    seen = []
    for index, x in DataLoader(loader.dataset, batch_size=4, sampler=sampler):
        accelerator.backward(model(x.to(accelerator.device)).square().mean() * 1e-6)
        optimizer.step()
        optimizer.zero_grad()
        seen += index.tolist()
    assert seen == list(range(40))
    assert ids(loader) == seen
    print("trained")
"""


def test_accelerates_prepare_is_refused_with_what_works_instead(
    environment: dict[str, str], tmp_path: Path
) -> None:
    script = write(tmp_path, prepare=ACCELERATE) / "prepare.py"
    (out,) = run([[sys.executable, script]], [environment], tmp_path)
    *refused, last = out.splitlines()
    assert len(refused) == 3
    for message in refused:
        assert message.startswith(
            "InputError Accelerate, or what else rebuilt this loader, has replaced dataloaderjob.DataLoader"
        )
        assert "leave it out of accelerator.prepare()" in message
        assert "DistributedSampler(dataset, accelerator.num_processes, accelerator.process_index)" in message
        assert message.endswith("and move batches with .to(accelerator.device)")
    assert last == "trained", "what the message says works"
