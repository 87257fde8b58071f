"""NVIDIA DALI's own readers, in datasets that feeders run on their CPUs: what they read is what was written, and what
the Python package of the format reads."""

from __future__ import annotations

import io
import struct
import tarfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import lmdb
import numpy as np
import pytest
import tfrecord
import torch
import webdataset
from rig import Rig
from stream_data import state_after
from tfrecord.tools.tfrecord2idx import create_index
from torch.utils.data import IterableDataset, get_worker_info

from dataloaderjob import DataLoader

ROWS = 50
Row = tuple[int, bytes]


def row(number: int) -> Row:
    return number, bytes([number, number + 1, number + 2]) * (1 + number % 5)


class Reads(IterableDataset):
    """A reader's rows; it is shared by the slots. reader: (num_shards, shard_id) to the operator's outputs."""

    def __init__(self, reader: Callable[..., Any]) -> None:
        self.reader = reader

    def __iter__(self) -> Iterator[Row]:
        from nvidia.dali import pipeline_def

        info = get_worker_info()
        shard, shards = (info.id, info.num_workers) if info else (0, 1)

        @pipeline_def(batch_size=8, num_threads=1, device_id=None)
        def rows() -> Any:
            return tuple(self.reader(name="rows", num_shards=shards, shard_id=shard, stick_to_shard=True))

        pipeline = rows()
        pipeline.build()
        # Shards are as even as they can be; those of the first rows may have one less.
        left = ROWS * (shard + 1) // shards - ROWS * shard // shards
        while left:
            data, numbers = pipeline.run()
            for i in range(min(left, len(data))):
                yield int(np.asarray(numbers[i]).reshape(-1)[0]), np.asarray(data[i]).tobytes()
            left -= min(left, len(data))


def tfrecords(folder: Path) -> tuple[Callable[..., Any], list[Row]]:
    path, index = str(folder / "rows.tfrecord"), str(folder / "rows.index")
    writer = tfrecord.TFRecordWriter(path)
    for number, data in map(row, range(ROWS)):
        writer.write({"data": (data, "byte"), "id": (number, "int")})
    writer.close()
    create_index(path, index)

    def reader(**options: Any) -> Any:
        from nvidia.dali import fn
        from nvidia.dali import tfrecord as features

        wanted = {
            "data": features.FixedLenFeature((), features.string, ""),
            "id": features.FixedLenFeature([1], features.int64, 0),
        }
        found = fn.readers.tfrecord(path=[path], index_path=[index], features=wanted, **options)
        return found["data"], found["id"]

    package = tfrecord.torch.TFRecordDataset(path, None, {"data": "byte", "id": "int"})
    return reader, [(int(one["id"][0]), bytes(one["data"])) for one in package]


def tars(folder: Path) -> tuple[Callable[..., Any], list[Row]]:
    path = str(folder / "rows.tar")
    with tarfile.open(path, "w", format=tarfile.USTAR_FORMAT) as out:
        for number, data in map(row, range(ROWS)):
            for name, part in ((f"{number:04}.bin", data), (f"{number:04}.id", bytes([number]))):
                member = tarfile.TarInfo(name)
                member.size = len(part)
                out.addfile(member, io.BytesIO(part))

    def reader(**options: Any) -> Any:
        from nvidia.dali import fn

        return fn.readers.webdataset(paths=[path], ext=["bin", "id"], **options)

    package = webdataset.WebDataset(path, shardshuffle=False)
    return reader, [(one["id"][0], one["bin"]) for one in package]


def records(folder: Path) -> tuple[Callable[..., Any], list[Row]]:
    """RecordIO, as MXNet has it: no package that reads it is kept, so what was written is what is compared."""
    path, index = folder / "rows.rec", folder / "rows.idx"
    with path.open("wb") as out, index.open("w") as places:
        for number, data in map(row, range(ROWS)):
            places.write(f"{number}\t{out.tell()}\n")
            body = struct.pack("<IfQQ", 0, float(number), number, 0) + data
            out.write(struct.pack("<II", 0xCED7230A, len(body)) + body + bytes(-len(body) % 4))

    def reader(**options: Any) -> Any:
        from nvidia.dali import fn

        return fn.readers.mxnet(path=[str(path)], index_path=[str(index)], **options)

    return reader, [row(number) for number in range(ROWS)]


def databases(folder: Path) -> tuple[Callable[..., Any], list[Row]]:
    """LMDB with Caffe's records: field 4 the bytes, 5 the label, 7 whether they are encoded (caffe.proto, Datum)."""
    with lmdb.open(str(folder / "rows")) as env, env.begin(write=True) as out:
        for number, data in map(row, range(ROWS)):
            datum = b"\x22" + bytes([len(data)]) + data + b"\x28" + bytes([number]) + b"\x38\x01"
            out.put(b"%04d" % number, datum)

    def reader(**options: Any) -> Any:
        from nvidia.dali import fn

        return fn.readers.caffe(path=str(folder / "rows"), **options)

    found = []
    with lmdb.open(str(folder / "rows"), readonly=True) as env, env.begin() as opened:
        for _, value in opened.cursor():
            data = value[2 : 2 + value[1]]
            found.append((value[2 + len(data) + 1], data))
    return reader, found


@pytest.mark.thorough
@pytest.mark.parametrize("written", [tfrecords, tars, records, databases])
@pytest.mark.quick("tfrecords", "tars")
def test_dali_reader_on_feeders_matches_the_formats_own_package(
    tmp_path: Path, written: Callable[[Path], tuple[Callable[..., Any], list[Row]]]
) -> None:
    reader, expected = written(tmp_path)
    assert expected == [row(number) for number in range(ROWS)]
    with Rig(feeders=2):
        assert _flat(_loader(reader, 1)) == expected
        two = list(_loader(reader, 2))
        assert _flat(two) != expected
        assert sorted(_flat(two)) == expected
        assert list(_loader(reader, 2)) == two
        second = _loader(reader, 2)
        second.load_state_dict(state_after(_loader(reader, 2), 4))
        assert list(second) == two[4:] != []


def _flat(batches: Iterable[list[Row]]) -> list[Row]:
    return [one for batch in batches for one in batch]


def _loader(reader: Callable[..., Any], slots: int) -> DataLoader[Any]:
    torch.manual_seed(0)
    return DataLoader(Reads(reader), batch_size=5, num_workers=slots, collate_fn=list)
