"""IterableDatasets with a stage, over a real service: torch's loader over dataset and stage is the reference."""

from __future__ import annotations

import collections
import contextlib
import gc
import random
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from covering import seeds
from resuming import state_after
from rig import Rig
from services import Service, serving
from staged_data import (
    Both,
    Heavy,
    Odd,
    Photos,
    Slowly,
    bright,
    developed,
    doubled,
    noisy,
    picky,
    slow,
    summed,
    worker,
)
from stream_data import Counting, Failing, Shards, WithOwnState, WithState, digests_of

from dataloaderjob import DataLoader
from dataloaderjob.core.errors import DeadlineExceeded, InputError, ServiceError
from dataloaderjob.trainer.epochs import relay
from dataloaderjob.trainer.epochs.reading import SlotReading

NOISY: dict[str, list[str]] = {}
"""What a random stage made, by the first number of feeders."""


@pytest.fixture(scope="module", params=[1, 2, 3])
def rig(request: pytest.FixtureRequest) -> Iterator[Rig]:
    with Rig(feeders=request.param) as made:
        yield made


def torchs(dataset: Any, stage: Any, **more: Any) -> list[str]:
    torch.manual_seed(7)
    return digests_of(torch.utils.data.DataLoader(Both(dataset, stage), **{"batch_size": 4, **more}))


def ours(dataset: Any, stage: Any, **more: Any) -> DataLoader:
    torch.manual_seed(7)
    return DataLoader(dataset, stage=stage, **{"batch_size": 4, **more})


@pytest.mark.cover(1)
@pytest.mark.parametrize("workers", [1, 2, 4])
@pytest.mark.parametrize(
    "case",
    [
        {"dataset": Shards()},
        {"dataset": Shards(), "drop_last": True},
        {"dataset": Shards(), "batch_size": None},
        {"dataset": Failing()},
        {"dataset": Shards((50,))},
        {"dataset": Shards(())},
    ],
)
def test_batches_equal_those_of_torchs_workers(rig: Rig, workers: int, case: dict):
    assert digests_of(ours(stage=bright, num_workers=workers, **case)) == torchs(
        stage=bright, num_workers=workers, **case
    )


@pytest.mark.thorough
def test_digest_of_a_loader_equals_that_without_a_stage(rig: Rig):
    found = set()
    for dataset, stage in ((Shards(), bright), (Both(Shards(), bright), None)):
        loader = ours(dataset, stage, num_workers=2)
        digests_of(loader)
        found.add(loader.digest)
    assert len(found) == 1


@pytest.mark.thorough
def test_stage_error_is_raised_in_turn_and_ends_nothing(rig: Rig):
    iterator, found, errors = iter(ours(Shards(), picky, num_workers=2)), [], []
    while True:
        try:
            found.append(next(iterator)["id"].tolist())
        except StopIteration:
            break
        except ValueError as exc:
            found.append(str(exc))
            errors.append(exc)
    assert all("by stage in feeder-" in note for exc in errors for note in exc.__notes__)
    unharmed = [batch["id"].tolist() for batch in ours(Shards(), bright, num_workers=2)]
    assert len(errors) == 1
    assert found == ["sample 3007 is damaged" if 3007 in ids else ids for ids in unharmed]


def test_iterator_continues_after_a_stage_error(rig: Rig):
    assert digests_of(ours(Counting(), abs, num_workers=1)) == torchs(Counting(), int, num_workers=1)


@pytest.mark.parametrize("rig", [2], indirect=True)
class TestWithTwoFeeders:
    @pytest.mark.thorough
    def test_loader_resumes_from_any_state_with_the_same_digest(self, rig: Rig):
        reference = ours(Shards(), noisy, num_workers=3)
        whole = digests_of(reference)
        for stop in range(0, len(whole) + 1, 5):
            state = state_after(ours(Shards(), noisy, num_workers=3), stop)
            torch.manual_seed(1234)
            second = DataLoader(Shards(), batch_size=4, num_workers=3, stage=noisy)
            second.load_state_dict(state)
            assert digests_of(second) == whole[stop:], stop
            assert second.digest == reference.digest

    @pytest.mark.thorough
    @pytest.mark.parametrize("kind", [WithState, WithOwnState])
    @pytest.mark.quick("WithOwnState")
    def test_state_has_snapshots_of_returned_batches_not_of_read_ones(self, rig: Rig, kind: type, tmp_path):
        log, samples = tmp_path / "log", 4000
        more = {"batch_size": 20, "num_workers": 2}
        expected = digests_of(ours(kind(samples), noisy, **more))
        state = state_after(ours(kind(samples), noisy, **more), 150, pause_s=0.02)
        assert all(20 < made <= 75 for made, _ in state["sampler"]["slots"])
        second = ours(kind(samples, str(log)), noisy, **more)
        second.load_state_dict(state)
        assert digests_of(second) == expected[150:]
        assert len(log.read_text().split()) < samples - 1000

    def test_state_with_a_stage_differs_from_one_without(self, rig: Rig):
        first = ours(Shards(), bright, num_workers=2)
        next(iter(first))
        with pytest.raises(InputError, match="stage was True, but is False now"):
            ours(Shards(), None, num_workers=2).load_state_dict(first.state_dict())

    def test_next_epoch_starts_from_the_beginning(self, rig: Rig):
        loader = ours(Shards(), bright, num_workers=2, persistent_workers=True)
        one, two = ([batch["id"].tolist() for batch in loader] for _ in range(2))
        assert one == two

    @pytest.mark.slow
    def test_breaking_out_of_an_endless_stream_leaves_nothing_open(self, rig: Rig):
        loader = ours(Shards((10**9, 10**9)), bright, num_workers=2)
        for _ in range(70):  # more than iterators can live at once
            for number, _batch in enumerate(loader):
                if number == 3:
                    break
        assert len(digests_of(ours(Shards((1,)), bright, num_workers=1))) == 1

    def test_sidecar_death_loses_and_repeats_no_batch(self, rig: Rig):
        expected = torchs(Shards(), bright, num_workers=2)
        iterator, found = iter(ours(Slowly(), bright, num_workers=2)), []
        for number in range(len(expected)):
            if number in (5, 20):
                rig.kill_sidecar()
                rig.start_sidecar()
            found += digests_of([next(iterator)])
        assert found == expected
        with pytest.raises(StopIteration):
            next(iterator)

    def test_samples_of_user_classes_and_pickled_ones_reach_the_stage(self, rig: Rig):
        found = torch.cat(list(ours(Photos(21), developed, num_workers=1)))
        assert found.tolist() == [[n, 3 * (n % 5 + 1) * (n + 1), n] for n in range(21)]

    def test_samples_too_large_for_the_stage_are_refused_and_later_ones_come(self, rig: Rig):
        sizes = (1000, relay.MOST_READ_NBYTES + 1, 30 << 20, 5)
        iterator, found = iter(ours(Heavy(sizes), summed, num_workers=1, batch_size=1)), []
        while True:
            try:
                found.append(next(iterator).tolist())
            except StopIteration:
                break
            except InputError as exc:
                found.append(str(exc).partition(":")[0])
        refused = "batch 1 of slot 0 has 50.3 MB before its stage, but at most 50 MB can be passed to another feeder"
        assert found == [[[1000, 0]], refused, [[30 << 20, 2]], [[5, 3]]]

    def test_few_samples_wait_in_the_trainer_if_they_are_large(
        self, rig: Rig, monkeypatch: pytest.MonkeyPatch
    ):
        monkeypatch.setattr(relay, "MOST_WAITING_NBYTES", 3 << 20)
        loader = ours(Heavy((1 << 20,) * 40), summed, num_workers=1, batch_size=1, prefetch_factor=16)
        iterator, most = iter(loader), 0
        for _ in range(40):
            time.sleep(0.02)
            next(iterator)
            most = max(most, iterator._relay._waiting_nbytes)
            assert not any(iterator._stream.recent)
        assert 2 << 20 < most < 5 << 20

    def test_timeout_also_applies_to_reading(self, rig: Rig):
        iterator = iter(ours(Slowly(20.0), bright, num_workers=1, timeout=1))
        for _ in range(2):
            with pytest.raises(DeadlineExceeded, match="timed out after 1 seconds"):
                next(iterator)

    def test_worker_info_is_that_of_the_reading_slots(self, rig: Rig):
        """worker_init_fn looks up what is its own by its number."""
        for batch in ours(Shards((40,)), worker, num_workers=1, worker_init_fn=["only one"].__getitem__):
            assert batch.tolist() == [[0, 1]] * 4

    def test_handler_error_while_requesting_slots_ends_the_iterator(
        self, rig: Rig, monkeypatch: pytest.MonkeyPatch
    ):
        iterator = iter(ours(Shards((400,)), bright, num_workers=1))
        next(iterator)

        def interrupted(*_: Any) -> None:
            raise ValueError("a handler's")

        with monkeypatch.context() as patch:
            patch.setattr(SlotReading, "submit", interrupted)
            with pytest.raises(ValueError, match="a handler's"):
                for _ in range(40):
                    next(iterator)
        with pytest.raises(ServiceError, match="which ends the iterator"):
            next(iterator)

    def test_pool_full_of_read_samples_still_takes_results(self, rig: Rig, monkeypatch: pytest.MonkeyPatch):
        path = rig.another_sidecar("small", processes=1, shared_memory_nbytes=4 << 20)
        monkeypatch.setenv("DATALOADERJOB_SOCKET", path)
        found = []
        for batch in ours(Heavy((1 << 20,) * 40), doubled, num_workers=2, batch_size=1, prefetch_factor=8):
            found.append(batch.shape[1])
            time.sleep(0.02)  # what is read comes meanwhile
        assert found == [1 << 20] * 80


@pytest.mark.parametrize("rig", [2], indirect=True)
@pytest.mark.parametrize("kind", ["stage", "dataset", "parts"])
def test_failed_iterator_closes_its_streams_when_released(rig: Rig, kind: str):
    loader = {
        "stage": lambda: ours(Shards(), picky, num_workers=1),
        "dataset": lambda: ours(Failing(), bright, num_workers=1),
        "parts": lambda: DataLoader(Odd(40, "fails"), batch_size=10, parts=2),
    }[kind]()
    for _ in range(2):
        iterator = iter(loader)
        client = iterator._client
        gc.collect()
        gc.disable()
        try:
            client.close_collected()
            before = len(client.streams)
            with contextlib.suppress(ValueError):
                while True:
                    next(iterator)
            del iterator
            client.close_collected()
            assert len(client.streams) == before - (1 if kind == "parts" else 2)
        finally:
            gc.enable()


def test_random_stages_do_not_depend_on_who_runs_them(rig: Rig):
    found = digests_of(ours(Shards(), noisy, num_workers=2))
    assert len(set(found)) == len(found)
    assert found == NOISY.setdefault("first", found), "with another number of feeders"


def test_one_generator_keeps_four_feeders_busy():
    with Rig(feeders=4):
        made: collections.Counter[int] = collections.Counter()
        for number, batch in enumerate(ours(Shards((800,)), slow, num_workers=1, prefetch_factor=16)):
            if number >= 40:
                made.update(set(batch["pid"].tolist()))
    assert len(made) == 4
    assert min(made.values()) > 160 / 4 / 2, made


def test_ranks_that_read_the_same_draw_differently(rig: Rig, monkeypatch: pytest.MonkeyPatch):
    found = []
    for rank in ("0", "1"):
        monkeypatch.setenv("RANK", rank)
        monkeypatch.setenv("WORLD_SIZE", "1")
        found.append(digests_of(ours(Photos(8), lambda _: torch.rand(2), num_workers=1)))
    assert not set(found[0]) & set(found[1])


# Without feeders, and where it cannot be


def test_loader_without_workers_runs_the_stage_in_process():
    found = digests_of(ours(Photos(9), developed, num_workers=0))
    assert found == torchs(Photos(9), developed, num_workers=0)
    assert len(found) == 3


def test_torchs_workers_run_the_stage_of_an_unsendable_dataset(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.delenv("DATALOADERJOB_SOCKET", raising=False)  # a service of this process refuses it
    data = Shards()
    data.lock = threading.Lock()
    found = digests_of(ours(data, bright, num_workers=2))
    assert "torch's worker processes make the batches" in capsys.readouterr().err
    del data.lock
    assert found == torchs(data, bright, num_workers=2)


def test_rebuilt_loader_applies_the_stage_once():
    first = ours(Photos(9), developed, num_workers=1)
    again = DataLoader(
        first.dataset, batch_size=4, num_workers=0, collate_fn=first.collate_fn, stage=first.stage
    )
    plain = torch.utils.data.DataLoader(first.dataset, batch_size=4, collate_fn=first.collate_fn)
    assert digests_of(again) == digests_of(plain) == torchs(Photos(9), developed)


def test_stage_on_a_map_dataset_or_without_a_callable_is_refused():
    with pytest.raises(InputError, match="do the same work in __getitem__"):
        DataLoader([1, 2], stage=bright)
    with pytest.raises(TypeError, match="a function of one sample, but is of type str"):
        DataLoader(Shards(), stage="decode")


# Feeders that die


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    with serving(tmp_path_factory.mktemp("s"), "local", 3) as made:
        yield made


@pytest.mark.thorough
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", seeds("STAGE_SEEDS", 4))
def test_digest_survives_killed_feeders(service: Service, seed: int):
    rng = random.Random(seed)
    workers = rng.choice([1, 2, 4])
    expected = torchs(Shards(), bright, num_workers=workers, batch_size=2)
    loader = ours(Slowly(), bright, num_workers=workers, batch_size=2)

    with service.killing(rng, 0.0, 0.5):
        found = digests_of(loader)
    assert found == expected
    service.settled()
