"""Map-style datasets over files of libraries that read them by index, on real files that are made here.

torch's own loader is the reference, byte for byte. What cannot be sent to a feeder is refused by its name.
"""

from __future__ import annotations

import io
import logging
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import av
import fsspec
import h5py
import lmdb
import numpy as np
import pyarrow as pa
import pyarrow.dataset
import pyarrow.parquet
import pytest
import torch
from array_record.python.array_record_data_source import ArrayRecordDataSource
from moto.server import ThreadedMotoServer
from PIL import Image
from rig import Rig
from stream_data import both, digests_of
from torch.utils.data import Dataset

from dataloaderjob import DataLoader, InputError

SAMPLES = 40
WRITE = """
import numpy
from array_record.python.array_record_module import ArrayRecordWriter
writer = ArrayRecordWriter("x.array_record", "group_size:1")
for row in numpy.load("rows.npy"):
    writer.write(row.tobytes())
writer.close()
"""
"""A process by itself: one that has used the library has threads, without which torch's forked workers crash."""


@pytest.fixture(scope="module")
def rig() -> Iterator[Rig]:
    with Rig(feeders=2) as made:
        yield made


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("files")
    rows = np.random.RandomState(7).randn(SAMPLES, 4).astype("f4")
    table = pa.table({"x": list(rows)})
    pa.parquet.write_table(table, folder / "x.parquet", row_group_size=8)
    with pa.ipc.new_file(str(folder / "x.arrow"), table.schema) as arrow:
        arrow.write_table(table, max_chunksize=8)
    with lmdb.open(str(folder / "lmdb")) as env, env.begin(write=True) as out:
        for number, row in enumerate(rows):
            out.put(b"%04d" % number, row.tobytes())
    np.save(folder / "rows.npy", rows)
    subprocess.run([sys.executable, "-c", WRITE], cwd=folder, check=True)
    with h5py.File(folder / "x.h5", "w") as file:
        file["x"] = rows
    for number in range(SAMPLES):
        pixels = np.random.RandomState(number).randint(0, 256, (16, 16, 3), np.uint8)
        Image.fromarray(pixels).save(folder / f"{number}.jpg")
        Image.fromarray(pixels[..., 0] // 100).save(folder / f"{number}.png")
    with av.open(str(folder / "x.mp4"), "w") as video:
        stream = video.add_stream("mpeg4", rate=10)
        stream.width = stream.height = 32
        for number in range(SAMPLES):
            video.mux(stream.encode(av.VideoFrame.from_ndarray(np.full((32, 32, 3), number * 6, np.uint8))))
        video.mux(stream.encode())
    return folder


class Rows(Dataset[Any]):
    """Opens what it reads at its first sample, in each process anew."""

    opened: Any = None

    def __init__(self, folder: Path, *, opens_at_once: bool = False) -> None:
        self.folder = folder
        if opens_at_once:
            self.opened = self.open()

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, number: int) -> Any:
        if self.opened is None:
            self.opened = self.open()
        return self.read(number)

    def open(self) -> Any:
        raise NotImplementedError

    def read(self, number: int) -> Any:
        raise NotImplementedError


class ParquetRows(Rows):
    def open(self) -> Any:
        return pa.parquet.ParquetFile(self.folder / "x.parquet")

    def read(self, number: int) -> Any:
        return np.array(self.opened.read_row_group(number // 8)["x"][number % 8].as_py())


class ParquetDataset(Rows):
    def open(self) -> Any:
        return pa.dataset.dataset(self.folder / "x.parquet")

    def read(self, number: int) -> Any:
        return np.array(self.opened.take([number])["x"][0].as_py())


class ArrowRows(Rows):
    def open(self) -> Any:
        return pa.ipc.open_file(pa.memory_map(str(self.folder / "x.arrow")))

    def read(self, number: int) -> Any:
        return np.array(self.opened.get_batch(number // 8)["x"][number % 8].as_py())


class ArrowTable(ArrowRows):
    def open(self) -> Any:
        return super().open().read_all()

    def read(self, number: int) -> Any:
        return np.array(self.opened["x"][number].as_py())


class LmdbRows(Rows):
    def open(self) -> Any:
        return lmdb.open(str(self.folder / "lmdb"), readonly=True, lock=False)

    def read(self, number: int) -> Any:
        with self.opened.begin() as reader:
            return np.frombuffer(reader.get(b"%04d" % number), "f4").copy()


class ArrayRecordRows(Rows):
    def open(self) -> Any:
        return ArrayRecordDataSource(str(self.folder / "x.array_record"))

    def read(self, number: int) -> Any:
        return np.frombuffer(self.opened[number], "f4").copy()


class Hdf5Rows(Rows):
    def open(self) -> Any:
        return h5py.File(self.folder / "x.h5", "r")

    def read(self, number: int) -> Any:
        return self.opened["x"][number]


class Frames(Rows):
    def open(self) -> Any:
        return av.open(str(self.folder / "x.mp4"))

    def read(self, number: int) -> Any:
        self.opened.seek(0)
        for place, frame in enumerate(self.opened.decode(video=0)):
            if place == number:
                return frame.to_ndarray(format="rgb24")
        raise IndexError(number)


class Pictures(Rows):
    def open(self) -> Any:
        return self.folder

    def read(self, number: int) -> Any:
        with Image.open(self.opened / f"{number}.jpg") as image:
            return np.asarray(image.convert("RGB").resize((8, 8)))


KINDS = [
    ParquetRows, ParquetDataset, ArrowRows, ArrowTable, LmdbRows, ArrayRecordRows, Hdf5Rows, Frames, Pictures,
]  # fmt: skip
REFUSED = {
    ParquetRows: "pyarrow._parquet.ParquetReader",
    ArrowRows: "pyarrow.ipc.RecordBatchFileReader",
    LmdbRows: "Environment",
    Hdf5Rows: "h5py._hl.files.File",
    Frames: "av.container.input.InputContainer",
}


@pytest.mark.thorough
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.quick("ParquetDataset", "LmdbRows", "Hdf5Rows", "Pictures")
def test_files_opened_in_the_reading_process_give_torchs_batches(rig: Rig, files: Path, kind: type[Rows]):
    theirs, ours = both(lambda: kind(files), shuffle=True)
    assert ours == theirs
    assert len(ours) == SAMPLES // 4


@pytest.mark.thorough
@pytest.mark.parametrize("kind", [ParquetDataset, ArrowTable, Pictures])
def test_shippable_open_files_of_a_dataset_give_torchs_batches(rig: Rig, files: Path, kind: type[Rows]):
    theirs, ours = both(lambda: kind(files, opens_at_once=True), shuffle=True)
    assert ours == theirs


@pytest.mark.thorough
def test_open_array_record_source_of_a_dataset_is_shipped(rig: Rig, files: Path):
    """torch's forked workers crash by it, so the same rows of another file are the reference."""
    found = []
    for dataset in (LmdbRows(files), ArrayRecordRows(files, opens_at_once=True)):
        torch.manual_seed(1)
        found.append(digests_of(DataLoader(dataset, batch_size=4, num_workers=2, shuffle=True)))
    assert found[0] == found[1]
    assert len(found[0]) == SAMPLES // 4


@pytest.mark.parametrize("kind", REFUSED)
def test_open_files_that_cannot_be_shipped_are_refused_by_name(rig: Rig, files: Path, kind: type[Rows]):
    dataset = kind(files, opens_at_once=True)
    try:
        with pytest.raises(InputError, match=r"when __getitem__ first needs it") as caught:
            next(iter(DataLoader(dataset, batch_size=4, num_workers=2)))
    finally:
        getattr(dataset.opened, "close", int)()
    assert "dataset.opened" in str(caught.value)
    assert REFUSED[kind] in str(caught.value)


# The same transform for an image and its mask


class Segmentation(Rows):
    """Crops and flips both by the same draws, of torch and of `random`."""

    def open(self) -> Any:
        return self.folder

    def read(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        left, top = torch.randint(0, 8, (2,)).tolist()
        flips = random.random() < 0.5
        found = []
        for suffix in ("jpg", "png"):
            with Image.open(self.opened / f"{number}.{suffix}") as image:
                part = image.crop((left, top, left + 8, top + 8))
                part = part.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if flips else part
                found.append(torch.from_numpy(np.array(part)))
        return found[0], found[1]


def test_an_image_and_its_mask_get_the_same_random_transform(rig: Rig, files: Path):
    found = []
    for workers in (0, 1, 2):
        torch.manual_seed(1)
        found.append(
            digests_of(DataLoader(Segmentation(files), batch_size=4, num_workers=workers, shuffle=True))
        )
    assert found[0] == found[1] == found[2]
    coarse = torch.utils.data.default_collate([Coarse(files)[i] for i in range(SAMPLES)])
    assert torch.equal(coarse[0], coarse[1])


class Coarse(Segmentation):
    """The mask, read twice: draws that were not shared would tell."""

    def read(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        _, mask = super().read(number)
        return mask, mask


# S3


@pytest.fixture(scope="module")
def bucket(rig: Rig, files: Path) -> Iterator[str]:
    """Served by moto. The feeders were started before anything of it was in the environment."""
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
        patch.setenv("AWS_ACCESS_KEY_ID", "key")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
        patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        store = fsspec.filesystem("s3")
        store.mkdir("files")
        store.put(str(files / "x.parquet"), "files/x.parquet")
        for number in range(SAMPLES):
            store.put(str(files / f"{number}.jpg"), f"files/{number}.jpg")
        yield f"http://{host}:{port}"
    server.stop()


class Objects(Dataset[Any]):
    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, number: int) -> Any:
        with fsspec.open(f"s3://files/{number}.jpg") as file:
            return np.asarray(Image.open(io.BytesIO(file.read())))


class ObjectsOfArrow(Rows):
    """pyarrow's own client of S3 travels."""

    endpoint = ""

    def open(self) -> Any:
        store = pa.fs.S3FileSystem(endpoint_override=self.endpoint, region="us-east-1")
        return pa.dataset.dataset("files/x.parquet", filesystem=store)

    def read(self, number: int) -> Any:
        return np.array(self.opened.take([number])["x"][0].as_py())


@pytest.mark.thorough
def test_s3_objects_are_read_with_the_scripts_credentials(rig: Rig, bucket: str):
    theirs, ours = both(Objects, shuffle=True)
    assert ours == theirs


@pytest.mark.slow
def test_parquet_in_s3_is_read_by_pyarrow(
    rig: Rig, bucket: str, files: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(ObjectsOfArrow, "endpoint", bucket)
    made: list[Callable[[], Rows]] = [
        lambda: ObjectsOfArrow(files, opens_at_once=True),
        lambda: ParquetRows(files),
    ]
    theirs, ours = (digests_of(DataLoader(make(), batch_size=4, num_workers=2)) for make in made)
    assert ours == theirs


class Keeping(Objects):
    def __init__(self) -> None:
        self.store = fsspec.filesystem("s3")

    def __getitem__(self, number: int) -> Any:
        return len(self.store.cat(f"files/{number}.jpg"))


def test_file_system_kept_by_a_dataset_is_not_fork_safe_as_in_torch(rig: Rig, bucket: str):
    for kind in (torch.utils.data.DataLoader, DataLoader):
        with pytest.raises(RuntimeError, match="not fork-safe"):
            next(iter(kind(Keeping(), batch_size=4, num_workers=1)))
