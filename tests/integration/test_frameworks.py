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
from warm import FRAMEWORKS, WarmProcess

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
        WarmProcess(
            command,
            modules=FRAMEWORKS,
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
    command: list[Any] = [script, launcher, script.parent]
    if launcher == "torchrun":
        command[:1] = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", script]
    if launcher != "mpi":
        run([command], [environment], script.parent)
        return
    ranks = [{**environment, "OMPI_COMM_WORLD_RANK": str(r), "OMPI_COMM_WORLD_SIZE": "2"} for r in range(2)]
    run([command] * 2, ranks, script.parent)


@pytest.mark.parametrize("launcher", ["spawn", "torchrun", "mpi"])
@pytest.mark.quick("torchrun", "mpi")
def test_two_ranks_of_a_launcher_get_their_shares_byte_for_byte(
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


def test_lightning_keeps_our_loader_when_it_inserts_its_sampler(
    environment: dict[str, str], tmp_path: Path
) -> None:
    script = write(tmp_path, fit=LIGHTNING) / "fit.py"
    (out,) = run([[script]], [environment], tmp_path)
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
    (out,) = run([[script]], [environment], tmp_path)
    for text in out.splitlines():
        assert json.loads(text) == [list(range(0, 36, 2)), list(range(1, 36, 2))]
    assert len(out.splitlines()) == 2


FABRIC = """
    import torch
    from batches import Augmented, epoch, fingerprint
    from lightning.fabric import Fabric
    from torch.utils import data
    from dataloaderjob import DataLoader

    def made():
        torch.manual_seed(0)
        dataset = Augmented(48)
        loader = DataLoader(dataset, 4, sampler=data.DistributedSampler(dataset, 2, 0, seed=1))
        return loader, fabric.setup_dataloaders(loader, use_distributed_sampler=False)

    fabric = Fabric(accelerator="cpu", devices=1)
    loader, batches = made()
    expected = [epoch(batches) for _ in range(4)]
    loader, batches = made()
    assert epoch(batches) == expected[0]
    for step, batch in enumerate(batches):
        if step == 2:
            break
    state, generator = loader.state_dict(), torch.get_rng_state()
    loader, batches = made()
    loader.load_state_dict(state)
    torch.set_rng_state(generator)
    assert [epoch(batches) for _ in range(3)] == [expected[1][3:], *expected[2:]]
    print("resumed")
"""


def test_fabric_counting_epochs_from_0_resumes_with_the_next_epoch(
    environment: dict[str, str], tmp_path: Path
) -> None:
    script = write(tmp_path, fabric_epochs=FABRIC) / "fabric_epochs.py"
    (out,) = run([[script]], [environment], tmp_path)
    assert out == "resumed\n"


ACCELERATE = """
    import torch
    from accelerate import Accelerator
    from batches import Augmented, Numbers, Whose, epoch, ids
    from dataloaderjob import DataLoader
    from dataloaderjob.accelerate import adopt

    accelerator = Accelerator(cpu=True)
    made = lambda **o: DataLoader(Numbers(40), batch_size=4, **o)
    model = torch.nn.Linear(7, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    model, optimizer, loader = accelerator.prepare(model, optimizer, made())
    for prepared in (
        loader,
        accelerator.prepare_data_loader(made(num_workers=2, persistent_workers=True)),
        adopt(accelerator.prepare(made())),
    ):
        seen = []
        for index, x in prepared:
            accelerator.backward(model(x).square().mean() * 1e-6)
            optimizer.step()
            optimizer.zero_grad()
            seen += index.tolist()
        assert seen == list(range(40)) and prepared.end_of_dataloader
        assert ids(accelerator.skip_first_batches(prepared, 2)) == list(range(8, 40))
    assert ids(accelerator.skip_first_batches(made(), 2)) == list(range(8, 40))

    pids = {int(pid) for pids, _ in accelerator.prepare(DataLoader(Whose(40), batch_size=4)) for pid in pids}
    assert len(pids) <= 2, "feeders made them, and not a worker for each loader"

    adopted = adopt(accelerator.prepare(DataLoader(Augmented(40), batch_size=4)))
    assert isinstance(adopted, DataLoader)
    assert adopt(adopted) is adopted
    adopted.set_epoch(3)
    whole = epoch(adopted)
    adopted.set_epoch(3)
    rest = epoch(accelerator.skip_first_batches(adopted, 4))
    assert rest == whole[4:], "the seeds of a loader that skips are those of one that does not"
    for persistent in (False, True):
        adopted = adopt(accelerator.prepare(
            DataLoader(Augmented(40), batch_size=4, num_workers=1, persistent_workers=persistent)
        ))
        wholes = [epoch(adopted) for _ in range(3)]
        adopted.set_epoch(1)
        assert epoch(accelerator.skip_first_batches(adopted, 4)) == wholes[1][4:]
    assert len({str(w) for w in wholes}) == 3

    from accelerate.data_loader import prepare_data_loader

    def two_ranks(seed):
        torch.manual_seed(seed)
        return adopt(prepare_data_loader(
            DataLoader(Numbers(48), 4, shuffle=True), num_processes=2, process_index=0, put_on_device=False,
            use_seedable_sampler=True,
        ))

    expected = ids(two_ranks(0))
    other = two_ranks(1)
    other.set_sampler(two_ranks(0).get_sampler())
    assert ids(other) == expected, "load_state() puts back the sampler of the checkpoint"
    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self):
            return iter(range(8))

    for wrong in (made(), accelerator.prepare(DataLoader(Stream(), batch_size=4))):
        try:
            adopt(wrong)
        except ValueError as exc:
            print(exc)
"""


@pytest.mark.thorough
def test_accelerates_prepared_loader_keeps_feeders(environment: dict[str, str], tmp_path: Path) -> None:
    script = write(tmp_path, prepare=ACCELERATE) / "prepare.py"
    (out,) = run([[script]], [environment], tmp_path)
    first, second = out.splitlines()
    assert (
        first
        == "adopt() takes the object that accelerator.prepare() returned for a DataLoader, got DataLoader"
    )
    assert "got one of an iterable dataset: use dataloaderjob.DataLoader for it" in second


ON_A_DEVICE = """
    from accelerate import Accelerator
    from batches import Numbers
    from dataloaderjob import DataLoader
    from dataloaderjob.accelerate import adopt

    accelerator = Accelerator(cpu=True)
    options = {"device": "cpu", "device_stage": lambda batch, _: [batch[0] + 100, batch[1]]}
    prepared = accelerator.prepare(DataLoader(Numbers(8), batch_size=4, **options))
    try:
        next(iter(prepared))
    except ValueError as exc:
        print(exc)
    print([batch[0].tolist() for batch in adopt(prepared)])
"""


def test_device_stage_dropped_by_accelerate_is_reported_and_restored(
    environment: dict[str, str], tmp_path: Path
) -> None:
    script = write(tmp_path, staged=ON_A_DEVICE) / "staged.py"
    (out,) = run([[script]], [environment], tmp_path)
    first, second = out.splitlines()
    assert "device_stage= was lost when another library rebuilt this loader" in first
    assert second == "[[100, 101, 102, 103], [104, 105, 106, 107]]"


STATES = """
    import torch
    from accelerate import Accelerator
    from batches import Augmented, epoch
    from torch.utils import data
    from dataloaderjob import DataLoader
    from dataloaderjob.accelerate import adopt
    import sys

    def adopted():
        return adopt(accelerator.prepare(DataLoader(Augmented(40), batch_size=4, shuffle=True)))

    for stateful in (False, True):
        torch.manual_seed(0)
        accelerator = Accelerator(cpu=True)
        loader = adopted()
        epochs = [epoch(loader) for _ in range(3)]
        for at, step in ((0, 3), (1, 1), (1, 9), (1, 10), (2, 10)):
            torch.manual_seed(0)
            accelerator.free_memory()
            loader = adopted()
            for number in range(at):
                assert epoch(loader) == epochs[number]
            for count, batch in enumerate(loader, start=1):
                if count == step:
                    accelerator.save_state(sys.argv[1])
                    break
            torch.manual_seed(9)
            accelerator.free_memory()
            again = adopted()
            accelerator.load_state(sys.argv[1])
            if step < 10:
                assert epoch(again) == epochs[at][step:], (at, step)
            if at < 2:
                assert epoch(again) == epochs[at + 1], (at, step)
    print("resumed")
"""


def test_accelerate_checkpoints_resume_an_adopted_loader_exactly(
    environment: dict[str, str], tmp_path: Path
) -> None:
    script = write(tmp_path, states=STATES) / "states.py"
    (out,) = run([[script, tmp_path / "state"]], [environment], tmp_path)
    assert out.splitlines()[-1] == "resumed"


SKIPPING = """
    import sys
    import torch
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, GradientState
    from accelerate.utils import DataLoaderConfiguration, set_seed
    from batches import Augmented, fingerprint
    from torch.utils import data
    from dataloaderjob import DataLoader
    from dataloaderjob.accelerate import adopt

    def batches(made, path, stop=None, resumed=None):
        AcceleratorState._reset_state(True)
        GradientState._reset_state()
        set_seed(0)
        accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True))
        loader = made(accelerator)
        found = []
        if resumed is not None:
            accelerator.load_state(path)
        for number in range(0 if resumed is None else resumed[0], 3):
            loader.set_epoch(number)
            skips = resumed is not None and number == resumed[0] and resumed[1]
            found.append([])
            for batch in accelerator.skip_first_batches(loader, resumed[1]) if skips else loader:
                found[-1].append(batch)
                if stop == (number, len(found[-1])):
                    accelerator.save_state(path)
                    return found
        return found

    def theirs(accelerator):
        return accelerator.prepare(data.DataLoader(Augmented(40), batch_size=8, shuffle=True))

    def ours(workers):
        return lambda accelerator: adopt(
            accelerator.prepare(DataLoader(Augmented(40), batch_size=8, shuffle=True, num_workers=workers))
        )

    def keys(epochs):
        return [[batch[0].tolist() for batch in epoch] for epoch in epochs]

    path = sys.argv[1]
    for workers in (0, 1):
        whole = batches(ours(workers), path)
        for at, step in ((0, 3), (1, 2)):
            batches(theirs, path, stop=(at, step))
            expected = keys(batches(theirs, path, resumed=(at, step)))
            assert [len(epoch) for epoch in expected] == [5 - step, 5, 5][: 3 - at]
            batches(ours(workers), path, stop=(at, step))
            found = batches(ours(workers), path, resumed=(at, step))
            assert keys(found) == expected, (workers, at, step)
            left = [whole[at][step:], *whole[at + 1 :]]
            since = 0 if workers else 1  # the process itself draws other numbers for an epoch that is skipped into
            assert fingerprint(found[since:]) == fingerprint(left[since:]), (workers, at, step)
            alone = batches(ours(workers), path, resumed=(at, 0))
            assert fingerprint(alone) == fingerprint(left), "without skip_first_batches the loader goes on by itself"
    print("resumed")
"""


def test_adopted_loader_with_skipped_batches_continues_with_whole_epochs(
    environment: dict[str, str], tmp_path: Path
) -> None:
    script = write(tmp_path, skipping=SKIPPING) / "skipping.py"
    (out,) = run([[script, tmp_path / "state"]], [environment], tmp_path)
    assert out == "resumed\n"


UNSEEDED = """
    import sys
    import torch
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, GradientState
    from batches import Augmented, fingerprint
    from dataloaderjob import DataLoader
    from dataloaderjob.accelerate import adopt

    def started(seed, **options):
        AcceleratorState._reset_state(True)
        GradientState._reset_state()
        torch.manual_seed(seed)
        accelerator = Accelerator(cpu=True)
        made = DataLoader(Augmented(40), batch_size=8, shuffle=True, num_workers=1, **options)
        return accelerator, adopt(accelerator.prepare(made))

    def train(loader, found, save=None, stop=None):
        for batch in loader:
            torch.rand(3)  # a dropout
            found.append(batch)
            if len(found) == stop:
                save()
                return True

    path = sys.argv[1]
    for options in ({}, {"persistent_workers": True}):
        for generator in (False, True):
            def begin(seed):
                given = {"generator": torch.Generator().manual_seed(seed)} if generator else {}
                return started(seed, **given, **options)

            _, loader = begin(0)
            whole = [[] for _ in range(4)]
            for epoch in whole:
                train(loader, epoch)
            for at, steps in ((0, [3]), (1, [1, 2]), (2, [4, 1])):
                accelerator, loader = begin(0)
                for _ in range(at):
                    train(loader, [])
                train(loader, [], lambda: accelerator.save_state(path), steps[0])
                done, left = steps[0], steps[1:]
                while True:
                    accelerator, loader = begin(0)  # the same seed, as scripts have it
                    accelerator.load_state(path)
                    assert loader.iteration == at
                    rest = []
                    stopped = train(
                        accelerator.skip_first_batches(loader, done), rest, lambda: accelerator.save_state(path),
                        left[0] if left else None,
                    )
                    expected = whole[at][done:][:len(rest)]
                    assert fingerprint([rest]) == fingerprint([expected]), (options, generator, at, done)
                    if not stopped:
                        break
                    done += left.pop(0)
                for number in range(at + 1, 4):
                    found = []
                    train(loader, found)
                    assert fingerprint([found]) == fingerprint([whole[number]]), (options, generator, at, number)
    print("resumed")
"""


@pytest.mark.thorough
def test_adopted_loader_with_skipped_batches_keeps_the_epochs_order(
    environment: dict[str, str], tmp_path: Path
) -> None:
    script = write(tmp_path, unseeded=UNSEEDED) / "unseeded.py"
    (out,) = run([[script, tmp_path / "state"]], [environment], tmp_path)
    assert out == "resumed\n"
