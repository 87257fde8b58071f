"""B17 and B8: streams of B3's pictures, and a map-style dataset with a heavy tail. Phases and figures are B3's.

A stream is an IterableDataset, or a library's dataset over files that are written here. Each of its n workers, or
slots, reads every n-th batch, so batches arrive in the order of their indices for all parties.
"""

from __future__ import annotations

import contextlib
import shutil
import tarfile
import tempfile
import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import torch

from bench import endtoend
from bench.endtoend import numbers_of

ITERABLE, WEBDATASET, HUGGING_FACE, TAIL = "IterableDataset", "WebDataset", "HF datasets", "heavy tail"
ONE_READER = "one generator"
"""A stream that cannot be shared. Torch's loader makes whole samples in one worker; ours reads there and has a
stage."""
STREAMS = (ITERABLE, WEBDATASET, HUGGING_FACE, ONE_READER)
FILE_NBYTES = 25_000
"""Bytes read for a picture, a sixth of its own size."""
RARE, SLOWER = 100, 50
"""One in RARE samples takes SLOWER times as long as the others."""


@dataclass(frozen=True, slots=True)
class Case(endtoend.Case):
    kind: str = ITERABLE
    batches: int = 560

    @property
    def name(self) -> str:
        return f"{self.kind}, {self.producers} producers"


class _Iterable(torch.utils.data.IterableDataset[Any]):
    def __init__(self, case: Case) -> None:
        self._case, self._images = case, endtoend.Images(case)

    def __iter__(self) -> Iterator[Any]:
        info = torch.utils.data.get_worker_info()
        first, every = (info.id, info.num_workers) if info else (0, 1)
        for batch in range(first, self._case.batches, every):
            for index in numbers_of(self._case, batch):
                yield self._images[index]


class _Files(torch.utils.data.IterableDataset[Any]):
    """The bytes that would be read of a file, in order."""

    def __init__(self, case: Case) -> None:
        self._count = case.batches * case.batch

    def __iter__(self) -> Iterator[tuple[int, bytes]]:
        for index in range(self._count):
            yield index, index.to_bytes(FILE_NBYTES, "little")


class _Decoded:
    """The stage, which makes a picture from the bytes read."""

    def __init__(self, case: Case) -> None:
        self._images = endtoend.Images(case)

    def __call__(self, read: tuple[int, bytes]) -> tuple[torch.Tensor, int]:
        index = int.from_bytes(read[1], "little")
        return self._images[index]


class Whole(torch.utils.data.IterableDataset[Any]):
    """A dataset that runs the stage itself."""

    def __init__(self, dataset: Any, stage: Callable[[Any], Any]) -> None:
        self._dataset, self._stage = dataset, stage

    def __iter__(self) -> Iterator[Any]:
        return map(self._stage, self._dataset)


class _HeavyTail(endtoend.Images):
    """Pictures, a few of them much slower, like long documents and large pictures."""

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        began = time.thread_time()
        made = super().__getitem__(index)
        if index * 2_654_435_761 % 2**32 % RARE == 0:
            until = began + SLOWER * _SAMPLE_S
            while time.thread_time() < until:
                super().__getitem__(index)
        return made


_SAMPLE_S = 150e-6
"""Approximate CPU time of one picture here."""


def _shares(case: Case) -> list[list[int]]:
    """Returns the indices in each file. There is one file for each producer."""
    return [
        [i for batch in range(first, case.batches, case.producers) for i in numbers_of(case, batch)]
        for first in range(case.producers)
    ]


def _webdataset(case: Case, folder: Path) -> Any:
    import webdataset as wds

    for share, indices in enumerate(_shares(case)):
        with tarfile.open(folder / f"{share}.tar", "w") as out:
            for index in indices:
                data = str(index).encode()
                member = tarfile.TarInfo(f"{index:08}.id")
                member.size = len(data)
                out.addfile(member, BytesIO(data))
    images = endtoend.Images(case)
    urls = [str(folder / f"{share}.tar") for share in range(case.producers)]
    return wds.WebDataset(urls, shardshuffle=False).map(lambda sample: images[int(sample["id"])])


def _hugging_face(case: Case, folder: Path) -> Any:
    import datasets
    import pyarrow as pa
    import pyarrow.parquet as pq

    datasets.disable_progress_bars()
    paths = [str(folder / f"{share}.parquet") for share in range(case.producers)]
    for path, indices in zip(paths, _shares(case), strict=True):
        pq.write_table(pa.table({"id": indices}), path, row_group_size=4096)
    images = endtoend.Images(case)
    read = datasets.load_dataset(
        "parquet", data_files=paths, split="train", streaming=True, cache_dir=str(folder)
    )
    return read.map(lambda row: {"picture": images[row["id"]][0], "id": row["id"]})


@contextlib.contextmanager
def dataset(case: Case) -> Generator[Any, None, None]:
    """Yields the dataset for a loader of either side."""
    folder = Path(tempfile.mkdtemp(prefix="bench-"))
    made = {WEBDATASET: _webdataset, HUGGING_FACE: _hugging_face}
    try:
        if case.kind in made:
            yield made[case.kind](case, folder)
        else:
            yield {ITERABLE: _Iterable, TAIL: _HeavyTail, ONE_READER: _Files}[case.kind](case)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def stage(case: Case) -> Callable[[Any], Any] | None:
    """Returns the function that makes a sample from an item of `dataset`; None if items are samples."""
    return _Decoded(case) if case.kind == ONE_READER else None


def readers(case: Case) -> int:
    """Returns the number of processes that can share the dataset."""
    return 1 if case.kind == ONE_READER else case.producers


def pairs(batches: Iterator[Any]) -> Iterator[Any]:
    """Yields batches as `endtoend.measure` takes them: pictures and indices."""
    for batch in batches:
        yield (batch["picture"], batch["id"]) if isinstance(batch, dict) else batch
