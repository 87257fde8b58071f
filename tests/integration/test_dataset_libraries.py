"""Streams of libraries that cut their data into shares themselves, over files that are made here.

torch's own loader is the reference, byte for byte. WebDataset and HF's datasets are in test_stream_libraries.py.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import litdata
import numpy as np
import pyarrow as pa
import pyarrow.dataset
import pyarrow.parquet
import pytest
import tfrecord
import torch
from rig import Rig, until
from stream_data import both, digests_of, gone_on_with
from tfrecord.tools import tfrecord2idx
from tfrecord.torch.dataset import MultiTFRecordDataset, TFRecordDataset
from torch.utils.data import IterableDataset, get_worker_info
from torchdata import nodes

from dataloaderjob import DataLoader

SAMPLES = 400


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    """Feeders that can import Streaming: its image datasets are the only part that needs torchvision."""
    folder = tmp_path_factory.mktemp("modules") / "torchvision"
    (folder / "transforms").mkdir(parents=True)
    (folder / "__init__.py").touch()
    (folder / "transforms" / "__init__.py").touch()
    (folder / "datasets.py").write_text("class VisionDataset: ...\n")
    (folder / "transforms" / "functional.py").write_text("def to_tensor(image): raise NotImplementedError\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder.parent))
        with Rig(feeders=2) as made:
            yield made
    # Streaming has globals from this torchvision, which the rigs of later files cannot import.
    for name in [name for name in sys.modules if name.partition(".")[0] in ("torchvision", "streaming")]:
        del sys.modules[name]


def sample(number: int) -> dict[str, Any]:
    return {"x": np.full(8, number, "f4"), "id": number}


def share(samples: int) -> range:
    info = get_worker_info()
    return range(info.id, samples, info.num_workers) if info else range(samples)


def halves(make: Callable[[], Any], monkeypatch: pytest.MonkeyPatch) -> list[set[int]]:
    """The samples of two ranks."""
    found = []
    for rank in "01":
        monkeypatch.setenv("GLOBAL_RANK", rank)  # as Lightning sets it
        monkeypatch.setenv("WORLD_SIZE", "2")
        found.append(
            {int(i) for batch in DataLoader(make(), batch_size=4, num_workers=2) for i in batch["id"]}
        )
    return found


def resumed(loader: Callable[[], DataLoader[Any]], *, batches: int, slots: list[Any] | None) -> bool:
    """Whether a loader that begins at the state after `batches` gives what the first one would have given.

    `slots`: what the state is to have of slots, or None if they are to have states.
    """
    whole = digests_of(loader())
    first, second = loader(), loader()
    iterator = iter(first)
    for _ in range(batches):
        next(iterator)
    if slots is None:
        until(lambda: None not in first.state_dict()["sampler"]["slots"], 20, "a state of each slot")
    state = first.state_dict()
    del iterator
    assert slots is None or state["sampler"]["slots"] == slots
    second.load_state_dict(state)
    return digests_of(second) == whole[batches:] != []


# torchdata.nodes


class Share:
    """An iterable whose state is its place."""

    def __init__(self, samples: int) -> None:
        self.samples, self.at = samples, 0

    def __iter__(self) -> Iterator[int]:
        for self.at, number in enumerate(share(self.samples)[self.at :], self.at + 1):
            yield number
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


class Nodes(IterableDataset[Any]):
    """Its Loader looks one sample ahead: one that draws has done so before the state that precedes it."""

    def __init__(self, samples: int, *, draws: bool = False) -> None:
        node = nodes.Mapper(nodes.IterableWrapper(Share(samples)), drawn if draws else sample)
        self.loader = nodes.Loader(nodes.Prefetcher(node, 4))

    def __iter__(self) -> Iterator[Any]:
        return iter(self.loader)

    def state_dict(self) -> dict[str, Any]:
        return self.loader.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.loader.load_state_dict(state)


def drawn(number: int) -> dict[str, Any]:
    return {"x": torch.rand(8) + number, "id": number}


@pytest.mark.thorough
@pytest.mark.parametrize("draws", [False, True])
def test_torchdata_nodes_run_in_feeders(rig: Rig, draws: bool):
    theirs, ours = both(lambda: Nodes(SAMPLES, draws=draws))
    assert ours == theirs


@pytest.mark.thorough
def test_nodes_without_random_draws_resume_from_their_state(rig: Rig):
    def loader() -> DataLoader[Any]:
        torch.manual_seed(1)
        return DataLoader(Nodes(3000), batch_size=4, num_workers=2)

    assert resumed(loader, batches=300, slots=None)


def test_our_loader_serves_as_the_source_of_nodes(rig: Rig):
    def made() -> nodes.Loader[Any]:
        torch.manual_seed(1)
        loader = DataLoader([sample(i) for i in range(40)], batch_size=4, num_workers=2, shuffle=True)
        return nodes.Loader(nodes.Mapper(nodes.IterableWrapper(loader), lambda batch: batch["id"].tolist()))

    whole, first, second = list(made()), made(), made()
    iterator = iter(first)
    assert [next(iterator) for _ in range(4)] == whole[:4]
    second.load_state_dict(first.state_dict())
    assert list(second) == whole[4:]
    assert len(whole) == 10


# LitData


@pytest.fixture(scope="module")
def chunks(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = str(tmp_path_factory.mktemp("chunks"))
    litdata.optimize(
        sample, list(range(SAMPLES)), folder, num_workers=1, chunk_bytes=1 << 11, start_method="fork"
    )
    return folder


@pytest.mark.thorough
@pytest.mark.parametrize(
    "more", [{}, {"shuffle": True, "seed": 3}, {"shuffle": True, "drop_last": True}], ids=str
)
def test_litdata(rig: Rig, chunks: str, more: dict[str, Any]):
    theirs, ours = both(lambda: litdata.StreamingDataset(chunks, **more))
    assert ours == theirs


def test_litdata_shares_of_two_ranks_do_not_overlap(rig: Rig, chunks: str, monkeypatch: pytest.MonkeyPatch):
    first, second = halves(lambda: litdata.StreamingDataset(chunks, shuffle=True), monkeypatch)
    assert not first & second
    assert first | second == set(range(SAMPLES))


def test_litdata_resumes_by_replaying_its_slots_from_the_start(
    rig: Rig, chunks: str, capsys: pytest.CaptureFixture[str]
):
    """Its `state_dict` wants to be told how many samples were had, which its own loader does."""

    def loader() -> DataLoader[Any]:
        return DataLoader(litdata.StreamingDataset(chunks, shuffle=True), batch_size=4, num_workers=2)

    assert resumed(loader, batches=21, slots=[None, None])
    assert "its state cannot be kept" in capsys.readouterr().err


# MosaicML Streaming


@pytest.fixture(scope="module")
def mds(rig: Rig, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Any]]:
    """Makes datasets, each with a folder of its own to copy the shards to."""
    import streaming

    folder = tmp_path_factory.mktemp("mds")
    with streaming.MDSWriter(
        out=f"{folder}/remote", columns={"x": "ndarray:float32:8", "id": "int"}, size_limit=1 << 11
    ) as out:
        for number in range(SAMPLES):
            out.write(sample(number))
    made: list[Path] = []

    def make(**more: Any) -> Any:
        made.append(folder / f"local-{len(made)}")
        return streaming.StreamingDataset(
            remote=f"{folder}/remote", local=str(made[-1]), batch_size=4, **more
        )

    yield make
    streaming.base.util.clean_stale_shared_memory()


@pytest.mark.thorough
@pytest.mark.parametrize("more", [{}, {"shuffle": True, "shuffle_seed": 3}], ids=str)
@pytest.mark.quick("{'shuffle': True, 'shuffle_seed': 3}")
def test_mosaicml_streaming(rig: Rig, mds: Callable[..., Any], more: dict[str, Any]):
    theirs, ours = both(lambda: mds(**more))
    assert ours == theirs
    assert gone_on_with(lambda: mds(**more), 21) == theirs[21:] != []


def test_streaming_reshuffles_each_epoch(rig: Rig, mds: Callable[..., Any]):
    """The number of the epoch is in memory that trainer and feeders share: feeders on another machine have none."""
    loader = DataLoader(mds(shuffle=True), batch_size=4, num_workers=2)
    first, second = ([int(i) for batch in loader for i in batch["id"]] for _ in range(2))
    assert first != second
    assert sorted(first) == sorted(second) == list(range(SAMPLES))


# TFRecord

FEATURES = {"x": "float", "id": "int"}


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tfrecord")
    for part in range(2):
        writer = tfrecord.TFRecordWriter(str(folder / f"{part}.tfrecord"))
        for number in range(part * 50, part * 50 + 50):
            writer.write({"x": (np.full(4, number, "f4"), "float"), "id": (number, "int")})
        writer.close()
        tfrecord2idx.create_index(str(folder / f"{part}.tfrecord"), str(folder / f"{part}.index"))
    return folder


@pytest.mark.thorough
@pytest.mark.parametrize(
    "make",
    [
        lambda at: TFRecordDataset(f"{at}/0.tfrecord", f"{at}/0.index", FEATURES),
        lambda at: TFRecordDataset(f"{at}/0.tfrecord", f"{at}/0.index", FEATURES, shuffle_queue_size=8),
        lambda at: TFRecordDataset(f"{at}/0.tfrecord", None, FEATURES),
        lambda at: MultiTFRecordDataset(
            f"{at}/{{}}.tfrecord", f"{at}/{{}}.index", {"0": 0.6, "1": 0.4}, FEATURES, infinite=False
        ),
    ],
    ids=["in order", "shuffled", "without an index", "of several files"],
)
@pytest.mark.quick("shuffled", "of several files")
def test_tfrecord(rig: Rig, records: Path, make: Callable[[Path], Any]):
    theirs, ours = both(lambda: make(records))
    assert ours == theirs
    assert gone_on_with(lambda: make(records), 5) == theirs[5:] != []


# Parquet and Arrow, as streams


class Batches(IterableDataset[Any]):
    """Fragments of a dataset of pyarrow, which travels as its files' names."""

    def __init__(self, folder: Path) -> None:
        self.dataset = pyarrow.dataset.dataset(folder)

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        fragments = sorted(self.dataset.get_fragments(), key=lambda fragment: fragment.path)
        for place in share(len(fragments)):
            for batch in fragments[place].to_batches(batch_size=6):
                yield {"x": torch.from_numpy(batch["x"].to_numpy().copy()) + torch.rand(1)}


@pytest.mark.thorough
def test_fragments_of_parquet_are_streamed(rig: Rig, tmp_path: Path):
    for part in range(5):
        table = pa.table({"x": np.arange(20 + part, dtype="f4")})
        pyarrow.parquet.write_table(table, tmp_path / f"{part}.parquet")
    theirs, ours = both(lambda: Batches(tmp_path), batch_size=None)
    assert ours == theirs
    assert gone_on_with(lambda: Batches(tmp_path), 5, batch_size=None) == theirs[5:] != []


def test_record_batches_of_arrow_are_streamed(rig: Rig, tmp_path: Path):
    schema = pa.schema([("x", pa.float32())])
    with pa.ipc.new_file(str(tmp_path / "x.arrow"), schema) as out:
        for part in range(7):
            out.write(pa.record_batch({"x": np.arange(part, part + 5, dtype="f4")}))
    theirs, ours = both(lambda: Records(tmp_path / "x.arrow"))
    assert ours == theirs
    assert gone_on_with(lambda: Records(tmp_path / "x.arrow"), 5) == theirs[5:] != []


class Records(IterableDataset[Any]):
    def __init__(self, path: Path) -> None:
        self.path = path

    def __iter__(self) -> Iterator[float]:
        with pa.memory_map(str(self.path)) as source:
            reader = pa.ipc.open_file(source)
            for place in share(reader.num_record_batches):
                yield from reader.get_batch(place)["x"].to_pylist()
