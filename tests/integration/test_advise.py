"""`dataloaderjob advise` on unchanged scripts: frameworks, known limits, unchanged batches, nothing left behind."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from documents import ROOT

sys.path.insert(0, str(ROOT))
from bench.model import known
from bench.model.known import KNOWN, Known

PROGRAMS = Path(sys.executable).parent
SLOW = """
import os, sys, time
import torch
from torch.utils.data import DataLoader, Dataset

def work(seconds):
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass

class Slow(Dataset):
    def __len__(self):
        return 4000
    def __getitem__(self, i):
        work(0.002)
        return torch.full((1000,), float(i)) + torch.rand(1)

def taken(batch):
    with open(f"batches-{os.environ.get('RANK', 0)}.txt", "a") as file:
        print(batch[:, 0].tolist(), file=file)

torch.manual_seed(0)
"""
LOOP = (
    SLOW
    + """
if __name__ == "__main__":
    for batch in DataLoader(Slow(), batch_size=8, shuffle=True, num_workers=1):
        taken(batch)
        time.sleep(0.01)
"""
)
LIGHTNING = (
    SLOW
    + """
import lightning as L

class Module(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1000, 1)
    def training_step(self, batch, index):
        taken(batch)
        time.sleep(0.01)
        return self.layer(batch).pow(2).mean()
    def validation_step(self, batch, index):
        self.layer(batch)
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 1e-9)

if __name__ == "__main__":
    trainer = L.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False)
    trainer.fit(Module(), DataLoader(Slow(), 8, shuffle=True, num_workers=1), DataLoader(Slow(), batch_size=8))
"""
)
ACCELERATE = (
    SLOW
    + """
from accelerate import Accelerator

if __name__ == "__main__":
    for batch in Accelerator(cpu=True).prepare(DataLoader(Slow(), batch_size=8, shuffle=True, num_workers=1)):
        taken(batch)
        time.sleep(0.01)
"""
)
TRANSFORMERS = (
    SLOW
    + """
from transformers import Trainer, TrainingArguments

class Rows(Dataset):
    def __init__(self):
        self.slow = Slow()
    def __len__(self):
        return len(self.slow)
    def __getitem__(self, i):
        return {"x": self.slow[i], "labels": torch.tensor(0.0)}

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1000, 1)
    def forward(self, x, labels):
        taken(x)
        time.sleep(0.01)
        return {"loss": self.layer(x).pow(2).mean()}

if __name__ == "__main__":
    arguments = TrainingArguments("out", per_device_train_batch_size=8, report_to=[], use_cpu=True, max_steps=400,
                                  dataloader_num_workers=1, save_strategy="no", disable_tqdm=True)
    Trainer(Model(), arguments, train_dataset=Rows()).train()
"""
)
TORCHRUN = (
    SLOW
    + """
import torch.distributed as dist
from torch.utils.data import DistributedSampler

if __name__ == "__main__":
    dist.init_process_group("gloo")
    dataset = Slow()
    for batch in DataLoader(dataset, batch_size=8, sampler=DistributedSampler(dataset), num_workers=1):
        taken(batch)
        dist.all_reduce(torch.ones(1))
        time.sleep(0.01)
"""
)


def processes_with(folder: Path) -> list[str]:
    """Processes whose working directory is the folder."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cwd"):
        try:
            if path.readlink() == folder:
                found.append((path.parent / "cmdline").read_text().replace("\0", " "))
        except OSError:
            continue
    return found


def advise(
    folder: Path, script: str, *words: str, options: tuple[str, ...] = (), launcher: tuple[str, ...] = ()
) -> Any:
    (folder / "train.py").write_text(script)
    command = launcher or (sys.executable,)
    done = subprocess.run(
        [PROGRAMS / "dataloaderjob", "advise", "--json", *options, "--", *command, "train.py", *words],
        cwd=folder, capture_output=True, text=True, timeout=240, env={**os.environ, "HF_HUB_OFFLINE": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


FRAMEWORKS = [
    pytest.param(LOOP, (), 1, id="loop"),
    pytest.param(LIGHTNING, (), 1, id="lightning"),
    pytest.param(ACCELERATE, (), 1, id="accelerate"),
    pytest.param(TRANSFORMERS, (), 1, id="transformers"),
    pytest.param(TORCHRUN, (str(PROGRAMS / "torchrun"), "--nproc-per-node", "2"), 2, id="torchrun"),
]
ANSWER_S = 90.0


@pytest.mark.thorough
@pytest.mark.quick("loop", "torchrun")
@pytest.mark.parametrize(("script", "launcher", "ranks"), FRAMEWORKS)
def test_frameworks_get_advice_from_an_unchanged_script(
    tmp_path: Path, script: str, launcher: tuple[str, ...], ranks: int
) -> None:
    began = time.monotonic()
    found = advise(tmp_path, script, launcher=launcher)
    assert time.monotonic() - began < ANSWER_S
    assert found["ranks"] == ranks
    assert (found["steps"], found["steps_without_input"]) == (50, 20)
    assert found["input_bound"] > 0.2
    assert found["gain"] > 1.2
    assert found["limit"] == "cpu"
    assert 0.014 < found["pipeline"]["cpu_s"] < 0.03
    assert found["feeders"] >= ranks
    assert found["cannot_ship"] is None
    assert processes_with(tmp_path) == []


def digests(folder: Path, batches: int) -> list[str]:
    """Digests of the first batches that each rank has taken; an empty one for a rank that has taken fewer."""
    taken = [path.read_text().splitlines()[:batches] for path in sorted(folder.glob("batches-*.txt"))]
    return [
        hashlib.sha256("\n".join(rows).encode()).hexdigest() if len(rows) == batches else "" for rows in taken
    ]


@pytest.mark.quick("loop")
@pytest.mark.parametrize(("script", "launcher", "ranks"), FRAMEWORKS)
def test_frameworks_get_the_batches_that_they_get_without_advice(
    tmp_path: Path, script: str, launcher: tuple[str, ...], ranks: int
) -> None:
    steps = 20
    own = steps + 3  # of which three do not count
    advise(tmp_path, script, launcher=launcher, options=("--steps", str(steps)))
    watched = digests(tmp_path, own)
    assert len([digest for digest in watched if digest]) == ranks
    for path in tmp_path.glob("batches-*.txt"):
        path.unlink()
    command = [*(launcher or (sys.executable,)), "train.py"]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    alone = subprocess.Popen(command, cwd=tmp_path, env=environment, start_new_session=True)
    try:
        while len([digest for digest in digests(tmp_path, own) if digest]) < ranks:
            assert alone.poll() is None
            time.sleep(0.1)
    finally:
        os.killpg(alone.pid, signal.SIGKILL)
        alone.wait()
    assert digests(tmp_path, own) == watched


@pytest.mark.quick("storage", "stream", "none", others="nightly")
@pytest.mark.parametrize("one", KNOWN, ids=lambda one: one.kind)
def test_a_pipeline_with_a_known_limit_gets_it_named(one: Known) -> None:
    found = known.advise(one, first=False)
    assert one.is_right(found), found
    if one.kind != "network":  # there, feeders help as long as the link is not full
        assert bool(found["feeders"]) is (one.limit != "trainer")


def test_the_replay_hands_out_the_last_batches_again(tmp_path: Path) -> None:
    advise(tmp_path, LOOP, options=("--steps", "10"))
    taken = (tmp_path / "batches-0.txt").read_text().splitlines()
    # Three batches that do not count, ten that do; the replay repeats the last ones.
    assert len(set(taken)) == 13
    assert taken[13:17] == taken[17:21]


@pytest.mark.parametrize(
    ("script", "why", "returncode"),
    [
        pytest.param(
            SLOW + "raise SystemExit(3)", "ended with exit code 3 before it could be measured", 1, id="fails"
        ),
        pytest.param(SLOW + "list(DataLoader([1, 2]))", "give it more data or epochs", 2, id="too-short"),
        pytest.param("print(1)", "the script did not import torch's DataLoader", 2, id="no-loader"),
    ],
)
def test_a_script_that_gives_nothing_to_judge_is_named(
    tmp_path: Path, script: str, why: str, returncode: int
) -> None:
    (tmp_path / "train.py").write_text(script)
    command = [PROGRAMS / "dataloaderjob", "advise", "--", sys.executable, "train.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == returncode
    assert why in done.stderr
    assert done.stdout == ""


@pytest.mark.thorough
def test_loaders_that_are_iterated_together_count_as_one_input(tmp_path: Path) -> None:
    script = LOOP.replace(
        "for batch in DataLoader(Slow(), batch_size=8, shuffle=True, num_workers=1):",
        "for batch, _ in zip(DataLoader(Slow(), 8, num_workers=0), DataLoader(Slow(), 8, num_workers=0)):",
    )
    found = advise(tmp_path, script)
    assert found["pipeline"]["step_s"] == pytest.approx(0.0105, abs=0.004)
    assert found["input_bound"] > 0.6


def test_a_script_that_ends_early_is_judged_by_the_steps_so_far(tmp_path: Path) -> None:
    found = advise(tmp_path, LOOP.replace("return 4000", "return 80"))
    assert (found["steps"], found["steps_without_input"]) == (7, 0)
    assert found["input_bound"] > 0.2
    assert found["limit"] == "cpu"


def test_a_script_with_one_short_epoch_is_replayed_within_it(tmp_path: Path) -> None:
    found = advise(tmp_path, LOOP.replace("return 4000", "return 160"))
    assert (found["steps"], found["steps_without_input"]) == (16, 20)


@pytest.mark.thorough
def test_a_loader_within_a_dataset_is_left_alone(tmp_path: Path) -> None:
    script = LOOP.replace(
        "        work(0.002)\n", "        list(DataLoader([1, 2], num_workers=0)); work(0.002)\n"
    )
    found = advise(tmp_path, script)
    assert found["pipeline"]["nbytes"] > 32_000


@pytest.mark.thorough
def test_a_script_that_never_takes_a_batch_is_ended_at_the_timeout(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SLOW + "time.sleep(600)")
    command = [PROGRAMS / "dataloaderjob", "advise", "--timeout", "3", "--", sys.executable, "train.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert "ran for 3 s without five steps" in done.stderr
    assert processes_with(tmp_path) == []


def test_a_dataset_that_cannot_travel_is_named_with_a_remedy(tmp_path: Path) -> None:
    script = LOOP.replace(
        "class Slow(Dataset):\n", "class Slow(Dataset):\n    lock = __import__('threading').Lock()\n"
    ).replace(
        "Slow(), batch",
        "type('Held', (Slow,), {'__init__': lambda self: setattr(self, 'own', Slow.lock)})(), batch",
    )
    found = advise(tmp_path, script, options=("--steps", "5"))
    assert "lock" in found["cannot_ship"]
    assert found["feeders"] > 0


def test_a_sitecustomize_of_the_users_still_runs(tmp_path: Path) -> None:
    (tmp_path / "site").mkdir()
    (tmp_path / "site/sitecustomize.py").write_text("open('ran.txt', 'a').write('ran ')")
    (tmp_path / "train.py").write_text(LOOP)
    command = [PROGRAMS / "dataloaderjob", "advise", "--steps", "5", "--", sys.executable, "train.py"]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "site")}
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, env=environment)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "ran.txt").read_text()
    assert done.stdout.startswith("train.py waits for input for ")
