"""Ray Data as a source: real Ray, two trainers, and a slot whose process is killed."""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import ray
import ray.data
import torch
from documents import ROOT
from local_runs import LocalRun, Project

from dataloaderjob import DataLoader, InputError, RayData

pytestmark = pytest.mark.timeout(300)

SCRIPT = """
import json, os, sys, time
import torch
from torch import distributed
from dataloaderjob import DataLoader, RayData
from helpers import tripled

mode = sys.argv[1]

def halved(batch):
    time.sleep(0.1 * (mode != "grouped"))
    return {"id": batch["id"], "half": batch["id"] / 2}

def bucketed(batch):
    return {"id": batch["id"], "bucket": batch["id"] // 100}

def whole(group):
    assert len(group["id"]) == 100
    return {"id": group["id"]}

def quartered(row):
    return {**row, "quarter": row["id"] / 4}

def named(row):
    return {**row, "text": f"row {row['id']}"}

def make():
    import ray
    print("slot in", os.getpid(), flush=True)
    data = ray.data.range(2_400, override_num_blocks=24)
    if mode == "grouped":
        data = data.map_batches(bucketed).groupby("bucket", num_partitions=4).map_groups(whole).sort("id")
    if mode == "shuffled":
        data = data.random_shuffle(seed=torch.initial_seed() % 2**32)
    return data.map_batches(halved).map_batches(tripled).filter(lambda row: row["id"] % 3).map(named)

distributed.init_process_group("gloo")
torch.manual_seed(5)
rows, window = mode in ("shuffled", "windows"), 300 if mode == "windows" else None
source = RayData(make, batch_size=None if rows else 20, shuffle_buffer_size=window)
stage = quartered if window else None
loader = DataLoader(source, batch_size=20 if rows else None, num_workers=1, tail="drop", stage=stage)
for epoch in range(2):
    ids = []
    for number, batch in enumerate(loader):
        assert torch.equal(batch["half"] * 2, batch["id"].double())
        assert torch.equal(batch["triple"], batch["id"] * 3)
        assert stage is None or torch.equal(batch["quarter"] * 4, batch["id"].double())
        assert batch["text"] == [f"row {i}" for i in batch["id"].tolist()]
        ids.append(batch["id"].tolist())
        distributed.barrier()  # ranks that share dealt batches step together, as in training
        if number % 4 == 0:
            print("epoch", epoch, "batch", number, flush=True)
            time.sleep(0.1)
    print("ids", json.dumps(ids), flush=True)
print("digest", loader.digest)
"""
TELLING = """
class Telling(RayData):
    def __iter__(self):
        print("variables of Ray", [name for name in os.environ if name.startswith("RAY_")], flush=True)
        return super().__iter__()

torch.manual_seed(5)
"""
HELPERS = """
def tripled(batch):
    return {**batch, "triple": batch["id"] * 3}
"""
END_S = 180.0
TASKS: dict[str, Any] = {"managed": {"tasks": {"cpus": 2}}}


class RayProject(Project):
    def __init__(self, folder: Path, mode: str, **spec: Any) -> None:
        super().__init__(folder, mode, replicas=2, feeders=2, **spec)
        (folder / "train.py").write_text(SCRIPT)
        (folder / "helpers.py").write_text(HELPERS)


def ids_of(run: LocalRun, rank: int) -> list[list[list[int]]]:
    """The ids of each batch, by epoch."""
    marker = f"[trainer-{rank}] ids "
    return [json.loads(line.removeprefix(marker)) for line in run.lines if line.startswith(marker)]


def dealt(run: LocalRun) -> list[list[int]]:
    """All ids of each epoch, in the order of one process."""
    of_ranks = [ids_of(run, rank) for rank in range(2)]
    return [
        [i for step in zip(*(ids[epoch] for ids in of_ranks), strict=True) for batch in step for i in batch]
        for epoch in range(2)
    ]


@pytest.mark.slow
def test_ray_data_reaches_two_trainers_in_order_though_its_process_dies(tmp_path: Path):
    project = RayProject(tmp_path, "batches", ray=TASKS)
    with LocalRun(project.path) as run:
        run.until("slot in")
        run.until("epoch 1 batch 8", END_S)
        pid = [int(found) for line in run.lines for found in re.findall(r"slot in (\d+)", line)][-1]
        os.kill(pid, signal.SIGKILL)
        run.until("slot in")
        assert run.end(END_S) == 0, run.text
    assert dealt(run) == [[i for i in range(2_400) if i % 3]] * 2


@pytest.mark.slow
def test_ray_data_reaches_two_trainers_in_order_though_its_ray_head_dies(tmp_path: Path):
    project = RayProject(tmp_path, "batches", ray=TASKS)
    with LocalRun(project.path) as run:
        run.until("ready after")
        run.find()
        run.until("epoch 0 batch 8", END_S)
        os.kill(run.pid_of(name="gcs_server"), signal.SIGKILL)
        run.until("Ray head 1 was lost")
        assert run.end(END_S) == 0, run.text
    assert dealt(run) == [[i for i in range(2_400) if i % 3]] * 2


@pytest.mark.slow
@pytest.mark.quick("windows", others="nightly")
@pytest.mark.parametrize("mode", ["shuffled", "windows"])
def test_row_shuffle_differs_each_epoch_and_repeats_in_each_run(tmp_path: Path, mode: str):
    """In windows there is a stage, too."""
    project, found = RayProject(tmp_path, mode, ray=TASKS), []
    for _ in range(2):
        with LocalRun(project.path) as run:
            run.until("ready after")
            assert run.end(END_S) == 0, run.text
        found.append((dealt(run), sorted(line for line in run.lines if "digest" in line)))
    assert found[0] == found[1]
    first, second = found[0][0]
    assert first != second
    assert sorted(first) == sorted(second) == [i for i in range(2_400) if i % 3]
    assert first != sorted(first)


@pytest.mark.slow
def test_sorted_groups_arrive_in_order(tmp_path: Path):
    with LocalRun(RayProject(tmp_path, "grouped", ray=TASKS).path) as run:
        assert run.end(END_S) == 0, run.text
    assert dealt(run) == [[i for i in range(2_400) if i % 3]] * 2


@pytest.mark.thorough
def test_job_without_room_for_tasks_reports_the_setting_and_hides_ray(tmp_path: Path):
    project = RayProject(tmp_path, "batches")
    script = SCRIPT.replace("torch.manual_seed(5)", TELLING).replace("source = RayData(", "source = Telling(")
    (tmp_path / "train.py").write_text(script)
    with LocalRun(project.path) as run:
        assert run.end() == 1, run.text
    assert "RayData requires a job whose Ray has CPUs for tasks" in run.text
    assert "set spec.ray.managed.tasks.cpus" in run.text
    assert set(re.findall(r"variables of Ray (.*)", run.text)) == {"[]"}


def test_ray_data_in_the_trainers_process_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    loader = DataLoader(RayData(lambda: None, batch_size=4), batch_size=None, num_workers=0)
    with pytest.raises(InputError, match="num_workers of at least 1"):
        next(iter(loader))


def test_a_dataset_in_place_of_a_function_is_refused():
    with pytest.raises(InputError, match=r"got Tensor: a dataset created here .* RayData\(lambda: "):
        RayData(torch.zeros(3))  # type: ignore[arg-type]


@pytest.mark.thorough
@pytest.mark.parametrize(("of_the_user", "found"), [(None, 4), (7, 7)])
def test_actors_have_tasks_ahead_unless_the_user_has_set_how_many(
    monkeypatch: pytest.MonkeyPatch, of_the_user: int | None, found: int
):
    context = ray.data.DataContext.get_current()
    monkeypatch.setattr(context, "max_tasks_in_flight_per_actor", of_the_user)
    monkeypatch.setattr(context.execution_options, "preserve_order", False)
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    seen = []
    with pytest.raises(InputError, match="but returned NoneType"):
        next(iter(RayData(lambda: seen.append(context.max_tasks_in_flight_per_actor))))
    assert seen == [found]


@pytest.mark.slow
def test_example_of_the_guide_runs_as_printed(tmp_path: Path):
    guide = (ROOT / "docs/guide/ray-data.md").read_text()
    for language, name in (("python", "train.py"), ("yaml", "job.yaml")):
        (block,) = re.findall(rf"^```{language}\n(.*?)^```", guide, re.MULTILINE | re.DOTALL)
        (tmp_path / name).write_text(block)
    pq.write_table(
        pa.table({"id": range(160), "x": [float(i) for i in range(160)]}), tmp_path / "rows.parquet"
    )
    with LocalRun(tmp_path / "job.yaml") as run:
        assert run.end(END_S) == 0, run.text
    for rank in range(2):
        assert run.text.count(f"[trainer-{rank}] batch of 16 rows") == 2 * 5
