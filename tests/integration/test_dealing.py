"""One stream dealt to ranks that step together, in the order that torch's own loader has in one process."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import staged_data
import torch
from covering import seeds
from rig import Rig
from services import Service, serving
from staged_data import Both, bright
from stream_data import Failing, Shards, WithState, digests_of

from dataloaderjob import DataLoader, InputError

RANKS = Path(__file__).parents[1] / "support" / "dealt_ranks.py"


@pytest.fixture(scope="module")
def rig() -> Iterator[Rig]:
    with Rig(feeders=2) as made:
        yield made


Ran = Callable[..., list[dict[str, Any]]]


@pytest.fixture(scope="module")
def forks() -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, str(RANKS)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
    )  # fmt: skip
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


@pytest.fixture
def ran(forks: subprocess.Popen[str], tmp_path: Path) -> Ran:
    """Runs a job, and says what each of its ranks had."""

    def run(service: Rig | Service, **config: Any) -> list[dict[str, Any]]:
        folder = tmp_path / str(time.monotonic_ns())
        folder.mkdir()
        path = folder / "config.json"
        path.write_text(json.dumps({**config, "folder": str(folder), "socket": service.socket}))
        assert forks.stdin is not None
        assert forks.stdout is not None
        print(path, file=forks.stdin, flush=True)
        assert forks.stdout.readline() == "0\n"
        return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(config["ranks"])]

    return run


def in_order(dataset: Any, workers: int, stage: str = "") -> list[str]:
    torch.manual_seed(7)
    whole = Both(dataset, getattr(staged_data, stage)) if stage else dataset
    return digests_of(torch.utils.data.DataLoader(whole, batch_size=2, num_workers=workers))


STAGES = pytest.mark.parametrize("stage", ["", "bright"], ids=["unstaged", "stage"])


def dealt(order: list[str], ranks: int, steps: int | None = None) -> list[list[str]]:
    steps = len(order) // ranks if steps is None else steps
    return [order[rank : steps * ranks : ranks] for rank in range(ranks)]


@STAGES
@pytest.mark.quick("unstaged")
def test_three_files_feed_eight_ranks_evenly_and_once_per_sample(
    rig: Rig, ran: Ran, tmp_path: Path, stage: str
):
    log = tmp_path / "log"
    order = in_order(WithState(samples=300), 3, stage)
    data = {"samples": 300, "log": str(log)}
    found = ran(rig, ranks=8, workers=3, kind="WithState", dataset=data, stage=stage)
    assert [rank["digests"] for rank in found] == dealt(order, 8)
    made = Counter(log.read_text().split())
    assert len(made) == 300
    assert made.total() < 2 * 300, "but for those by which the first snapshot of each slot is tried"


@pytest.mark.thorough
@STAGES
@pytest.mark.parametrize("workers", [1, 2, 4])
def test_shards_of_any_length_are_dealt_to_two_ranks(rig: Rig, ran: Ran, workers: int, stage: str):
    found = ran(rig, ranks=2, workers=workers, stage=stage)
    assert [rank["digests"] for rank in found] == dealt(in_order(Shards(), workers, stage), 2)


@STAGES
@pytest.mark.parametrize(
    ("ranks", "lengths"),
    [(2, (180,)), (2, (200, 20)), (2, (4, 0)), (3, (2, 4)), (4, (28, 0, 10, 80)), (8, (400, 20))],
    ids=str,
)
@pytest.mark.quick("2-(4, 0)-unstaged", "3-(2, 4)-stage", "4-(28, 0, 10, 80)-unstaged", "8-(400, 20)-stage")
def test_epoch_ends_however_large_the_ranks_windows_are(
    rig: Rig, ran: Ran, ranks: int, lengths: tuple[int, ...], stage: str
):
    data = {"lengths": lengths}
    found = ran(rig, ranks=ranks, workers=len(lengths), prefetch_factor=40, dataset=data, stage=stage)
    order = in_order(Shards(lengths), len(lengths), stage)
    assert [rank["digests"] for rank in found] == dealt(order, ranks)


@STAGES
def test_unsynchronised_ranks_get_the_same_batches(rig: Rig, ran: Ran, stage: str):
    found = ran(rig, ranks=3, workers=2, together=False, stage=stage)
    assert [rank["digests"] for rank in found] == dealt(in_order(Shards(), 2, stage), 3)


def test_stage_draws_the_same_whichever_rank_gets_the_batch(rig: Rig, ran: Ran):
    torch.manual_seed(7)
    (one,) = ran(rig, ranks=1, workers=2, stage="noisy")
    three = ran(rig, ranks=3, workers=2, stage="noisy")
    assert [rank["digests"] for rank in three] == dealt(one["digests"], 3)
    assert len(set(one["digests"])) == len(one["digests"])


def test_stage_error_hits_one_rank_and_the_others_continue(rig: Rig, ran: Ran):
    found = ran(rig, ranks=2, workers=2, stage="picky")
    order = in_order(Shards(), 2)
    failed = sum(rank["digests"].count("error") for rank in found)
    assert failed == 1
    for rank, plain in zip(found, dealt(order, 2), strict=True):
        assert [d for d in rank["digests"] if d != "error"] == [
            p for p, d in zip(plain, rank["digests"], strict=True) if d != "error"
        ]
    assert sorted("sample 3007 is damaged" in rank["ended"] for rank in found) == [False, True]


@STAGES
def test_the_last_batches_are_padded_on_request_or_refused(rig: Rig, ran: Ran, stage: str):
    order = in_order(Shards(), 2, stage)
    ranks = next(ranks for ranks in (3, 4, 5) if len(order) % ranks)
    steps, rest = divmod(len(order), ranks)
    padded = ran(rig, ranks=ranks, workers=2, tail="pad", stage=stage)
    last = [order[steps * ranks + rank % rest] for rank in range(ranks)]
    assert [rank["digests"] for rank in padded] == [
        [*a, b] for a, b in zip(dealt(order, ranks), last, strict=True)
    ]
    for rank in ran(rig, ranks=ranks, workers=2, tail="error", stage=stage):
        assert len(rank["digests"]) == steps
        assert f"{rest} batches are left for {ranks} ranks" in rank["ended"]


@pytest.mark.thorough
@STAGES
@pytest.mark.quick("unstaged")
def test_all_ranks_resume_from_the_first_ranks_state(rig: Rig, ran: Ran, stage: str):
    order = in_order(Shards(), 3, stage)
    for stop in range(0, len(order) // 2 + 1, 5):
        first = ran(rig, ranks=2, workers=3, stop=stop, stage=stage)
        assert [rank["digests"] for rank in first] == dealt(order, 2, stop)
        second = ran(rig, ranks=2, workers=3, state=first[0]["state"], stage=stage)
        both = [a["digests"] + b["digests"] for a, b in zip(first, second, strict=True)]
        assert both == dealt(order, 2)


@STAGES
@pytest.mark.parametrize(("before", "after"), [(2, 3), (4, 1), (1, 2)])
@pytest.mark.quick("2-3-unstaged", "4-1-stage")
def test_different_number_of_ranks_resumes_in_the_same_order(
    rig: Rig, ran: Ran, before: int, after: int, stage: str
):
    order = in_order(Shards(), 3, stage)
    first = ran(rig, ranks=before, workers=3, stop=9, stage=stage)
    second = ran(rig, ranks=after, workers=3, state=first[0]["state"], stage=stage)
    assert [rank["digests"] for rank in second] == dealt(order[9 * before :], after)


@pytest.mark.thorough
@STAGES
@pytest.mark.quick("stage")
def test_resumed_epoch_begins_at_the_first_ranks_snapshots(rig: Rig, ran: Ran, tmp_path: Path, stage: str):
    log, samples = tmp_path / "log", 2400
    data = {"samples": samples, "log": str(log)}
    first = ran(rig, ranks=2, workers=2, kind="WithState", dataset=data, stop=550, stage=stage)
    snapshots = [made for made, _ in first[0]["state"]["sampler"]["slots"]]
    log.unlink()
    second = ran(
        rig, ranks=2, workers=2, kind="WithState", dataset=data, state=first[0]["state"], stage=stage
    )
    order = in_order(WithState(samples=samples), 2, stage)
    assert [a["digests"] + b["digests"] for a, b in zip(first, second, strict=True)] == dealt(order, 2)
    assert len(set(log.read_text().split())) <= samples - 2 * sum(snapshots)


@STAGES
def test_error_in_mid_shard_hits_one_rank_and_the_others_continue(rig: Rig, ran: Ran, stage: str):
    torch.manual_seed(7)
    whole = Both(Failing(), bright) if stage else Failing()
    iterator, order = iter(torch.utils.data.DataLoader(whole, batch_size=2, num_workers=2)), []
    while True:
        try:
            order += digests_of([next(iterator)])
        except StopIteration:
            break
        except ValueError:
            order.append("error")
    found = ran(rig, ranks=2, workers=2, kind="Failing", stage=stage)
    assert [rank["digests"] for rank in found] == dealt(order, 2)
    assert sorted("shard 3 is damaged" in rank["ended"] for rank in found) == [False, True]


def test_ranks_with_different_seeds_data_or_workers_are_refused(rig: Rig, ran: Ran):
    slow = {"lengths": [400, 400], "pause_s": 0.005}
    config: dict[str, Any] = {"ranks": 2, "workers": 1, "together": False, "dataset": slow}
    said = [rank["ended"] for rank in ran(rig, **config, seeds=[1, 2])]
    assert any("draw the same base seed" in text for text in said)
    others = [{"lengths": [400, 400]}, {"lengths": [400, 401]}]
    said = [rank["ended"] for rank in ran(rig, **config, others=others)]
    assert any("the same dataset" in text for text in said)
    said = [rank["ended"] for rank in ran(rig, **config, more_workers=1)]
    assert any("num_workers" in text for text in said)


@pytest.mark.thorough
def test_rank_that_iterates_alone_fails_with_a_hint_to_iterate_together(rig: Rig, ran: Ran):
    slow = {"lengths": [400, 400], "pause_s": 0.005}
    found = ran(rig, ranks=2, workers=1, together=False, dataset=slow, peeks=True)
    assert "call iter(loader) equally often in all ranks" in found[0]["ended"]


def test_late_rank_still_gets_its_whole_share(rig: Rig, ran: Ran):
    found = ran(rig, ranks=2, workers=1, together=False, late_s=2.0, dataset={"pause_s": 0.004})
    assert [rank["digests"] for rank in found] == dealt(in_order(Shards(), 1), 2)


def test_batch_count_is_refused_as_the_state_of_a_dealt_epoch(rig: Rig):
    loader = DataLoader(Shards(), batch_size=2, num_workers=2, tail="drop")
    loader.load_state_dict({"batches": 3})
    with pytest.raises(InputError, match="state_dict"):
        iter(loader)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"num_workers": 2, "tail": "wrap"}, "'drop', 'pad' or 'error'"),
        ({"num_workers": 0, "tail": "drop"}, "num_workers is 0: set it"),
        ({"dataset": [1, 2], "num_workers": 2, "tail": "drop"}, "DistributedSampler"),
    ],
)
def test_invalid_use_of_tail_is_refused_at_once(arguments: dict[str, Any], said: str):
    with pytest.raises(ValueError, match=said):
        DataLoader(**{"dataset": Shards(), **arguments})


def test_missing_rank_is_refused(rig: Rig, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(InputError, match="RANK must be from 0 to 1"):
        iter(DataLoader(Shards(), num_workers=1, tail="drop"))


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    with serving(tmp_path_factory.mktemp("s"), "local", 3, announced=False) as made:
        yield made


@pytest.mark.thorough
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", seeds("SLOT_SEEDS", 6))
@pytest.mark.quick("0")
def test_ranks_get_the_same_when_feeders_are_killed(service: Service, ran: Ran, seed: int):
    workers, ranks, stage = (1, 2, 4)[seed % 3], 2 + seed % 2, ("bright", "")[seed // 3 % 2]
    order = in_order(Shards(), workers, stage)

    # its longest slot takes 1.8 s by its pauses alone
    with service.killing(random.Random(seed), 0.5, 1.5):
        found = ran(service, ranks=ranks, workers=workers, dataset={"pause_s": 0.01 * workers}, stage=stage)
    assert [rank["digests"] for rank in found] == dealt(order, ranks)
    service.settled()
