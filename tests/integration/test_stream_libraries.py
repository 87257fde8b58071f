"""Streams of real libraries over files that are made here: torch's own loader is the reference, byte for byte."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import datasets
import datasets.distributed
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import webdataset as wds
from rig import Rig, until
from services import Service, serving
from stream_data import both, digests_of, gone_on_with

from dataloaderjob import DataLoader

Make = Callable[[Path], Any]


@pytest.fixture(scope="module")
def rig() -> Iterator[Rig]:
    with Rig(feeders=2, modules=("datasets", "webdataset", "pyarrow.parquet")) as made:
        yield made


# WebDataset


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("tar")
    for shard in range(5):
        with wds.TarWriter(f"{folder}/s-{shard}.tar", encoder=True) as out:
            for number in range(7 + shard * 5):
                values = np.random.RandomState(shard * 100 + number).randn(8).astype("f4")
                out.write({"__key__": f"{shard:02}{number:04}", "npy": values, "cls": number})
    return f"{folder}/s-{{0..4}}.tar"


def augmented(values: np.ndarray) -> torch.Tensor:
    return torch.as_tensor(values) + torch.rand(1)


def decoded(dataset: wds.WebDataset) -> Any:
    return dataset.decode().to_tuple("npy", "cls").map_tuple(augmented, int)


@pytest.mark.parametrize(
    ("make", "batch_size"),
    [
        (lambda urls: decoded(wds.WebDataset(urls, shardshuffle=False)), 4),
        (lambda urls: decoded(wds.WebDataset(urls, shardshuffle=5, seed=3, detshuffle=True).shuffle(20, seed=3)), 4),
        (lambda urls: decoded(wds.WebDataset(urls, shardshuffle=False)).batched(4), None),
        (lambda urls: decoded(wds.WebDataset(urls, shardshuffle=False)).with_epoch(13), 4),
    ],
    ids=["in order", "shuffled", "batched", "with epoch"],
)  # fmt: skip
@pytest.mark.quick("shuffled", "batched")
def test_webdataset(rig: Rig, shards: str, make: Callable[[str], Any], batch_size: int | None):
    theirs, ours = both(lambda: make(shards), batch_size=batch_size)
    assert ours == theirs
    assert gone_on_with(lambda: make(shards), 7, batch_size=batch_size) == theirs[7:] != []


def test_webdataset_shares_of_two_ranks_equal_torchs_and_do_not_overlap(
    rig: Rig, shards: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("WORLD_SIZE", "2")

    def split() -> wds.WebDataset:
        return wds.WebDataset(
            shards, shardshuffle=False, nodesplitter=wds.split_by_node, workersplitter=wds.split_by_worker
        )

    keys: list[set[str]] = []
    for rank in "01":
        monkeypatch.setenv("RANK", rank)
        theirs, ours = both(lambda: decoded(split()))
        assert ours == theirs
        loader = DataLoader(split().to_tuple("__key__"), batch_size=4, num_workers=2)
        keys.append({key for (batch,) in loader for key in batch})
    assert len(keys[0]) + len(keys[1]) == len(keys[0] | keys[1]) == sum(7 + shard * 5 for shard in range(5))


def test_webdataset_resampling_resumes_with_a_warning_that_it_differs(
    rig: Rig, shards: str, capsys: pytest.CaptureFixture[str]
):
    def loader() -> DataLoader[Any]:
        dataset = decoded(wds.WebDataset(shards, shardshuffle=False, resampled=True)).with_epoch(400)
        return DataLoader(dataset, batch_size=4, num_workers=2)

    first, second = loader(), loader()
    assert len(list(first)) == 200
    iterator = iter(first)
    for _ in range(60):  # after some shards chance has drawn others
        next(iterator)
    second.load_state_dict(first.state_dict())
    del iterator
    assert len(list(second)) == 140
    assert "batch 29 of slot 0 differed when it was rebuilt" in capsys.readouterr().err


# HF datasets


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    datasets.disable_progress_bars()
    folder, paths = tmp_path_factory.mktemp("parquet"), []
    for shard in range(3):
        rows = range(20 + shard)
        path = str(folder / f"{shard}.parquet")
        pq.write_table(pa.table({"x": [float(i + 100 * shard) for i in rows], "y": list(rows)}), path)
        paths.append(path)
    return paths


def streamed(files: list[str]) -> Any:
    return datasets.load_dataset("parquet", data_files=files, split="train", streaming=True)


def doubled(row: dict[str, Any]) -> dict[str, Any]:
    return {**row, "x": row["x"] * 2 + float(torch.rand(1))}


def counted(shards: list[int]) -> Iterator[dict[str, int]]:
    for shard in shards:
        yield from ({"a": shard * 10 + number} for number in range(9))


@pytest.mark.parametrize(
    "make",
    [
        lambda files: streamed(files).with_format("torch"),
        pytest.param(lambda files: streamed(files).map(doubled).with_format("torch"), marks=pytest.mark.slow),
        lambda files: streamed(files).shuffle(seed=3, buffer_size=10).map(doubled),
        pytest.param(
            lambda files: datasets.interleave_datasets(
                [streamed(files), streamed(files).map(doubled)], seed=2, probabilities=[0.4, 0.6]
            ),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            lambda files: datasets.distributed.split_dataset_by_node(streamed(files), rank=1, world_size=3),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            lambda _: datasets.IterableDataset.from_generator(counted, gen_kwargs={"shards": [0, 1, 2, 3]}),
            marks=pytest.mark.slow,
        ),
        lambda files: datasets.load_dataset("parquet", data_files=files, split="train").with_format("torch"),
    ],
    ids=["in order", "mapped", "shuffled", "interleaved", "split by node", "generator", "map-style"],
)
@pytest.mark.quick("in order", "map-style")
def test_hf_datasets(rig: Rig, files: list[str], make: Callable[[list[str]], Any]):
    theirs, ours = both(lambda: make(files))
    assert ours == theirs
    half = len(theirs) // 2
    assert gone_on_with(lambda: make(files), half) == theirs[half:] != []


@pytest.mark.thorough
def test_hugging_face_state_is_used_only_if_it_restores_everything(
    rig: Rig, files: list[str], capsys: pytest.CaptureFixture[str]
):
    """It fills its shuffle buffer again from the samples before it, for which a map that draws would draw anew."""

    def loader(draws: bool) -> DataLoader[Any]:
        torch.manual_seed(1)
        stream = streamed(files).shuffle(seed=3, buffer_size=10)
        return DataLoader(stream.map(doubled) if draws else stream, batch_size=4, num_workers=1)

    for draws in (False, True):
        whole, said = digests_of(loader(draws)), list[str]()
        first = loader(draws)
        iterator = iter(first)
        for _ in range(8):
            next(iterator)
        if draws:
            until(lambda: tried(first, capsys, said), 20, "the trial of the state")
        else:
            until(lambda: first.state_dict()["sampler"]["slots"] != [None], 20, "a state")
        state = first.state_dict()
        del iterator
        assert (state["sampler"]["slots"] == [None]) == draws
        second = loader(draws)
        second.load_state_dict(state)
        assert digests_of(second) == whole[8:]


def tried(loader: DataLoader[Any], capsys: pytest.CaptureFixture[str], said: list[str]) -> bool:
    """Whether it was said that the state is not exact, and the loader has none: another may have been told of late."""
    state = loader.state_dict()  # reads what has come
    said.append(capsys.readouterr().err)
    return state["sampler"]["slots"] == [None] and "does not restore its iterator's state" in "".join(said)


# Feeders that die


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    with serving(tmp_path_factory.mktemp("s"), "local", 2) as made:
        yield made


@pytest.mark.thorough
def test_shuffled_webdataset_survives_the_loss_of_all_feeders(service: Service, shards: str):
    def make() -> Any:
        return decoded(wds.WebDataset(shards, shardshuffle=5, seed=3, detshuffle=True).shuffle(20, seed=3))

    assert_nothing_is_lost_with_its_feeders(service, make)


@pytest.mark.slow
def test_shuffled_hugging_face_stream_survives_the_loss_of_all_feeders(service: Service, files: list[str]):
    assert_nothing_is_lost_with_its_feeders(
        service, lambda: streamed(files).shuffle(seed=3, buffer_size=10).map(doubled)
    )


def assert_nothing_is_lost_with_its_feeders(service: Service, make: Callable[[], Any]) -> None:
    torch.manual_seed(1)
    expected = digests_of(torch.utils.data.DataLoader(make(), batch_size=2, num_workers=2))
    torch.manual_seed(1)
    iterator = iter(DataLoader(make(), batch_size=2, num_workers=2))
    found = digests_of([next(iterator) for _ in range(9)])
    for pid in service.feeder_pids():
        os.kill(pid, signal.SIGKILL)
    found += digests_of(iterator)
    assert found == expected
    service.settled()
