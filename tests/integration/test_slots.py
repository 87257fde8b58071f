"""IterableDatasets over a real service: torch's own loader with as many workers is the reference, byte for byte."""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from covering import seeds
from rig import Rig, until
from services import Service, serving
from stream_data import (
    BadState,
    ByTheClock,
    Counting,
    Deadly,
    Failing,
    Shards,
    Shuffled,
    WithOwnState,
    WithState,
    digests_of,
    state_after,
    stopping_collate,
)

from dataloaderjob import DataLoader
from dataloaderjob.core.errors import FeederLost, InputError
from processes import script


@pytest.fixture(scope="module", params=[1, 2, 3])
def rig(request: pytest.FixtureRequest) -> Iterator[Rig]:
    with Rig(feeders=request.param) as made:
        yield made


def both(dataset, workers: int, **more) -> tuple[list[str], list[str]]:
    """Digests of torch's batches, and of ours."""
    found = []
    for kind in (torch.utils.data.DataLoader, DataLoader):
        torch.manual_seed(7)
        found.append(digests_of(kind(dataset, num_workers=workers, **{"batch_size": 4, **more})))
    return found[0], found[1]


@pytest.mark.cover(1)
@pytest.mark.parametrize("workers", [1, 2, 4])
@pytest.mark.parametrize(
    "case",
    [
        {"dataset": Shards()},
        {"dataset": Shards(), "drop_last": True},
        {"dataset": Shards(), "batch_size": None},
        {"dataset": Failing()},
        {"dataset": Counting()},
        {"dataset": Shards((50,))},
        {"dataset": Shards(())},
    ],
)
def test_batches_equal_those_of_torchs_workers(rig: Rig, workers: int, case: dict):
    theirs, ours = both(workers=workers, **case)
    assert ours == theirs


def test_stop_iteration_of_collate_is_raised_in_place_of_its_batch(rig: Rig):
    """Under torch's loader it ends the worker, as if its data were over."""
    theirs, ours = both(Shards(), 2, collate_fn=stopping_collate)
    assert "RuntimeError" not in theirs
    assert "RuntimeError" in ours
    assert {*theirs} < {*ours}


@pytest.mark.thorough
def test_each_epoch_begins_with_the_current_dataset(rig: Rig):
    data = Shards()
    found = []
    for kind in (torch.utils.data.DataLoader, DataLoader):
        torch.manual_seed(3)
        data.lengths = (9, 9, 9)
        loader = kind(data, batch_size=2, num_workers=2)
        first = digests_of(loader)
        data.lengths = (5, 30)
        found.append((first, digests_of(loader)))
    assert found[0] == found[1]


@pytest.mark.parametrize("rig", [2], indirect=True)
class TestWithTwoFeeders:
    def test_loader_resumes_from_any_state_with_the_same_digest(self, rig: Rig):
        def loader() -> DataLoader:
            torch.manual_seed(7)
            return DataLoader(Shards(), batch_size=4, num_workers=3)

        reference = loader()
        whole = digests_of(reference)
        for stop in range(0, len(whole) + 1, 5):
            state = state_after(loader(), stop)
            torch.manual_seed(1234)
            second = DataLoader(Shards(), batch_size=4, num_workers=3)
            second.load_state_dict(state)
            assert digests_of(second) == whole[stop:], stop
            assert second.digest == reference.digest

    def test_epoch_after_a_resume_equals_that_of_an_uninterrupted_run(self, rig: Rig):
        def loader() -> DataLoader:
            torch.manual_seed(7)
            return DataLoader(Shards(), batch_size=4, num_workers=3)

        undisturbed = loader()
        digests_of(undisturbed)
        following = digests_of(undisturbed)
        first = loader()
        iterator = iter(first)
        next(iterator)
        state = first.state_dict()
        del iterator
        second = loader()
        second.load_state_dict(state)
        digests_of(second)
        assert digests_of(second) == following

    def test_state_for_a_different_number_of_workers_is_refused(self, rig: Rig):
        first = DataLoader(Shards(), batch_size=4, num_workers=3)
        next(iter(first))
        other = DataLoader(Shards(), batch_size=4, num_workers=2)
        with pytest.raises(InputError, match="slots was 3, but is 2 now"):
            other.load_state_dict(first.state_dict())

    def test_omitted_num_workers_makes_one_slot(self, rig: Rig):
        torch.manual_seed(7)
        ours = digests_of(DataLoader(Shards(), batch_size=4))
        torch.manual_seed(7)
        assert ours == digests_of(torch.utils.data.DataLoader(Shards(), batch_size=4, num_workers=1))

    def test_sidecar_death_loses_and_repeats_no_batch(self, rig: Rig):
        torch.manual_seed(7)
        whole = digests_of(torch.utils.data.DataLoader(Shards(), batch_size=4, num_workers=2))
        torch.manual_seed(7)
        found: list[str] = []
        iterator = iter(DataLoader(Shards(pause_s=0.002), batch_size=4, num_workers=2))

        class Rest:
            def __iter__(self):
                return iterator

        for number in range(len(whole)):
            if number in (5, 20):
                rig.kill_sidecar()
                rig.start_sidecar()
            batch = next(iterator)
            found += digests_of([batch])
        assert found == whole
        assert digests_of(Rest()) == []

    def test_a_sample_that_ends_its_process_is_named(self, rig: Rig):
        loader = DataLoader(Deadly(), batch_size=4, num_workers=1)
        iterator = iter(loader)
        for _ in range(5):
            next(iterator)
        for number in (5, 6):  # the next one cannot be made without it
            with pytest.raises(FeederLost, match=f"sample 0 of batch {number} of slot 0"):
                next(iterator)
        assert len(rig.endpoints()) == 2  # no feeder died of it

    def test_unsendable_dataset_is_refused_if_the_job_has_feeders(self, rig: Rig):
        class Open(Shards):
            lock = threading.Lock()

            def __init__(self):
                super().__init__()
                self.file = open(os.devnull)  # noqa: SIM115

        with pytest.raises(InputError, match="file"):
            iter(DataLoader(Open(), batch_size=4, num_workers=2))

    def test_two_iterators_of_one_loader_coexist(self, rig: Rig):
        torch.manual_seed(7)
        loader = DataLoader(Shards(), batch_size=4, num_workers=2)
        one, other = iter(loader), iter(loader)
        ids = [[], []]
        for _ in range(20):
            for found, iterator in zip(ids, (one, other), strict=True):
                found += next(iterator)["id"].tolist()
        assert ids[0] == ids[1]

    def test_breaking_out_of_an_endless_stream_ends_its_slots(self, rig: Rig):
        short = DataLoader(Shards((1,)), num_workers=1)
        digests_of(short)
        loader = DataLoader(Shards((10**9, 10**9)), batch_size=4, num_workers=2)
        for number, _ in enumerate(loader):
            if number == 50:
                break
        busy = set(builders(rig))
        del loader, _
        digests_of(short)  # the client tells of it with its next message
        until(lambda: len(busy & set(builders(rig))) <= len(busy) - 2, 10, "the end of two builders")


def builders(rig: Rig) -> list[int]:
    found = []
    for process, _ in rig.feeders:
        for child in psutil.Process(process.pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                found += [child.pid] if child.name() == "dlj-builder" else []
    return found


RANKS = """
import os, sys, torch
from stream_data import {data}, digests_of
from dataloaderjob import DataLoader
if __name__ == "__main__" and {group}:
    torch.distributed.init_process_group("gloo", init_method="file://{folder}/group", rank=int(os.environ["RANK"]),
        world_size=2)
if __name__ == "__main__":
    torch.manual_seed(5)
    batches = list({kind}({data}(), batch_size=4, num_workers=2))
    print(*digests_of(batches), "ids", *[i for batch in batches for i in batch["id"].tolist()])
"""


@pytest.mark.thorough
@pytest.mark.parametrize("data", ["Shards", "ByGroup", "ByNames"])
@pytest.mark.parametrize("rig", [2], indirect=True)
@pytest.mark.quick("Shards", "ByNames")
def test_two_ranks_get_their_own_shares(rig: Rig, data: str, tmp_path):
    """A feeder's process has neither the variables nor the process group of the trainer that it works for."""
    shares = {}
    for kind in ("DataLoader", "torch.utils.data.DataLoader"):
        folder = tmp_path / kind
        folder.mkdir()
        script = folder / "script.py"
        script.write_text(RANKS.format(data=data, group=data != "Shards", folder=folder, kind=kind))
        started = [
            subprocess.Popen(
                [sys.executable, str(script)], stdout=subprocess.PIPE, text=True,
                env={**os.environ, "PYTHONPATH": rig.env["PYTHONPATH"], "RANK": str(rank), "WORLD_SIZE": "2"},
            )
            for rank in range(2)
        ]  # fmt: skip
        shares[kind] = [process.communicate(timeout=60)[0] for process in started]
        assert all(process.returncode == 0 for process in started), rig.logs()
    assert shares["DataLoader"] == shares["torch.utils.data.DataLoader"]
    first, second = (set(text.partition("ids")[2].split()) for text in shares["DataLoader"])
    assert first
    assert second
    assert not first & second


@pytest.mark.thorough
@pytest.mark.cover(1)
@pytest.mark.parametrize("workers", [1, 2, 4])
def test_each_rank_resumes_its_share_from_any_state_of_the_first(
    rig: Rig, workers: int, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("WORLD_SIZE", "2")

    def made(kind: type, rank: int) -> Any:
        monkeypatch.setenv("RANK", str(rank))
        torch.manual_seed(7)
        return kind(Shards(), batch_size=4, num_workers=workers)

    shares = [digests_of(made(torch.utils.data.DataLoader, rank)) for rank in range(2)]
    assert shares[0] != shares[1]
    assert [digests_of(made(DataLoader, rank)) for rank in range(2)] == shares
    for stop in range(0, min(map(len, shares)) + 1, 5):
        state = state_after(made(DataLoader, 0), stop)
        for rank in range(2):
            loader = made(DataLoader, rank)
            loader.load_state_dict(state)
            assert digests_of(loader) == shares[rank][stop:], (rank, stop)


# Feeders that die


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    with serving(tmp_path_factory.mktemp("s"), "local", 3) as made:
        yield made


@pytest.mark.thorough
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", seeds("SLOT_SEEDS", 6))
def test_digest_survives_killed_feeders(service: Service, seed: int):
    workers = (1, 2, 4)[seed % 3]
    torch.manual_seed(seed)
    expected = digests_of(torch.utils.data.DataLoader(Shards(), batch_size=2, num_workers=workers))
    torch.manual_seed(seed)
    loader = DataLoader(Shards(pause_s=0.004 * workers), batch_size=2, num_workers=workers)

    # its longest slot takes 0.7 s by its pauses alone
    with service.killing(random.Random(seed), 0.0, 0.6):
        found = digests_of(loader)
    assert found == expected
    service.settled()


@pytest.mark.thorough
def test_slots_move_to_feeders_that_arrive_later(service: Service, capfd: pytest.CaptureFixture[str]):
    samples = 6000
    torch.manual_seed(1)
    expected = digests_of(torch.utils.data.DataLoader(WithState(samples), batch_size=4, num_workers=3))
    service.scale(1)
    service.settled()
    try:
        torch.manual_seed(1)
        loader = DataLoader(WithState(samples), batch_size=4, num_workers=3)
        found = []
        for number, batch in enumerate(loader):
            found += digests_of([batch])
            if number == 100:
                service.scale(3)
            if number > 100:
                time.sleep(0.008)
    finally:
        service.scale(3)
        service.settled()
    assert found == expected
    assert len(re.findall(r"slot \d continues at ", capfd.readouterr().err)) >= 2


# Snapshots


def made_again(log: Path, samples: int) -> int:
    """Samples that were made more than once, as far as the dataset has written them down."""
    return len(log.read_text().split()) - samples


@pytest.mark.parametrize("kind", [pytest.param(WithState, marks=pytest.mark.slow), WithOwnState])
def test_lost_slot_resumes_at_its_last_snapshot(service: Service, kind: type, tmp_path: Path):
    """Its first 3,000 samples would be made again, were there none."""
    log, samples = tmp_path / "log", 6000
    torch.manual_seed(1)
    expected = digests_of(torch.utils.data.DataLoader(kind(samples), batch_size=20, num_workers=1))
    torch.manual_seed(1)
    loader = DataLoader(kind(samples, str(log)), batch_size=20, num_workers=1)
    found = []
    for number, batch in enumerate(loader):
        found += digests_of([batch])
        if number == 150:
            for pid in service.feeder_pids():
                os.kill(pid, signal.SIGKILL)
    assert found == expected
    assert 0 < made_again(log, samples) < 2500
    service.settled()


@pytest.mark.thorough
@pytest.mark.parametrize("rig", [2], indirect=True)
@pytest.mark.parametrize("kind", [WithState, WithOwnState])
@pytest.mark.quick("WithOwnState")
def test_epoch_resumes_at_the_last_snapshots(rig: Rig, kind: type, tmp_path: Path):
    log, samples = tmp_path / "log", 4000
    torch.manual_seed(1)
    expected = digests_of(torch.utils.data.DataLoader(kind(samples), batch_size=20, num_workers=2))
    torch.manual_seed(1)
    first = DataLoader(kind(samples), batch_size=20, num_workers=2)
    iterator = iter(first)
    for _ in range(150):
        next(iterator)
    state = json.loads(json.dumps(first.state_dict()))
    assert all(made > 20 for made, _ in state["sampler"]["slots"])
    del iterator
    second = DataLoader(kind(samples, str(log)), batch_size=20, num_workers=2)
    second.load_state_dict(state)
    assert digests_of(second) == expected[150:]
    assert len(log.read_text().split()) < samples - 1000
    third = DataLoader(kind(samples), batch_size=20, num_workers=2)
    state["sampler"]["rank"] = 1  # that of another rank: its slots begin at their start
    third.load_state_dict(state)
    assert digests_of(third) == expected[150:]


@pytest.mark.parametrize("rig", [2], indirect=True)
@pytest.mark.parametrize(
    ("dataset", "said"),
    [
        (Shuffled(200), "slot 0 of the dataset: its state_dict() does not restore its iterator's state"),
        (BadState(200), "slot 0 of the dataset: its state cannot be kept (RuntimeError: no state today)"),
        (WithOwnState(200), ""),
        (Shards(), ""),
    ],
)
def test_unusable_dataset_state_is_reported(rig: Rig, dataset, said: str, capsys: pytest.CaptureFixture[str]):
    loader = DataLoader(dataset, batch_size=5, num_workers=1)
    for number, _ in enumerate(loader):
        time.sleep(0.03 if number < 20 else 0)
    printed = capsys.readouterr().err
    assert said in printed
    assert ("slot 0" in printed) == bool(said)


@pytest.mark.parametrize("kind", [ByTheClock, Shards])
def test_resumed_epoch_that_differs_from_the_original_is_reported(
    service: Service, kind: type, capsys: pytest.CaptureFixture[str]
):
    first = DataLoader(kind(), batch_size=5, num_workers=1)
    iterator = iter(first)
    for _ in range(6):
        next(iterator)
    second = DataLoader(kind(), batch_size=5, num_workers=1)
    second.load_state_dict(first.state_dict())
    next(iter(second))
    said = "batch 5 of slot 0 differed when it was rebuilt" in capsys.readouterr().err
    assert said == (kind is ByTheClock)


@pytest.mark.parametrize("kind", [ByTheClock, WithState])
def test_lost_slot_that_is_remade_differently_is_reported(
    service: Service, kind: type, capsys: pytest.CaptureFixture[str]
):
    loader = DataLoader(kind(400), batch_size=5, num_workers=1)
    for number, _ in enumerate(loader):
        if number == 20:
            for pid in service.feeder_pids():
                os.kill(pid, signal.SIGKILL)
    said = "a rebuilt batch differs from the one sent before" in capsys.readouterr().err
    assert said == (kind is ByTheClock)
    service.settled()


@pytest.mark.parametrize("rig", [2], indirect=True)
class TestGoingOnAtASnapshot:
    def taken(self, log: Path) -> tuple[DataLoader, Iterator]:
        """An epoch of which something was taken, and a snapshot is there."""
        loader = DataLoader(WithOwnState(3000, str(log)), batch_size=20, num_workers=1)
        iterator = iter(loader)
        for _ in range(60):
            next(iterator)
        until(lambda: loader.state_dict()["sampler"]["slots"][0], 10, "a snapshot")
        return loader, iterator

    def test_slots_resume_after_the_sidecar_restarts(self, rig: Rig, tmp_path: Path):
        _, iterator = self.taken(tmp_path / "log")
        for _ in range(2):
            rig.kill_sidecar()
            rig.start_sidecar()
            next(iterator)
        assert sum(1 for _ in iterator) == 88
        assert made_again(tmp_path / "log", 3000) < 1500

    @pytest.mark.thorough
    def test_slots_resume_after_their_idle_process_dies(self, rig: Rig, tmp_path: Path):
        _, iterator = self.taken(tmp_path / "log")
        time.sleep(0.5)  # all that was asked for is made
        for pid in builders(rig):
            os.kill(pid, signal.SIGKILL)
        assert sum(1 for _ in iterator) == 90
        assert made_again(tmp_path / "log", 3000) < 1300


FORKED = """
import os, torch
from stream_data import Shards
from dataloaderjob import DataLoader
def first(kind, seed):
    torch.manual_seed(seed)
    return [float(batch["x"].sum()) for batch in kind(Shards(), batch_size=4, num_workers=1)][:3]
if __name__ == "__main__":
    list(DataLoader(Shards((3,)), num_workers=1))
    for seed in (1, 2):
        if os.fork() == 0:
            is_same = first(DataLoader, seed) == first(torch.utils.data.DataLoader, seed)
            print(f"{seed} {is_same}\\n", end="", flush=True)  # in one piece: the two print at the same time
            os._exit(0)
    os.wait(), os.wait()
"""


@pytest.mark.parametrize("rig", [2], indirect=True)
def test_forked_processes_have_their_own_slots(rig: Rig):
    with script(FORKED) as process:
        out, err = process.communicate(timeout=60)
    assert sorted(out.splitlines()) == ["1 True", "2 True"], err


def test_stream_made_by_torch_has_no_position(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.delenv("DATALOADERJOB_SOCKET", raising=False)

    def loader() -> DataLoader:
        data = Shards((40,))
        data.lock = threading.Lock()
        return DataLoader(data, batch_size=5, num_workers=2, multiprocessing_context="fork")

    first = loader()
    first.load_state_dict({"batches": 5})
    iterator = iter(first)
    assert next(iterator)["id"][0] == 0
    assert "an IterableDataset cannot be resumed unless feeders read it" in capsys.readouterr().err
    assert first.state_dict() == {"version": 1, "iterable": True, "batches": 0}
    assert sum(1 for _ in iterator) == 7
