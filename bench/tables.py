"""B20: tabular Parquet files into one trainer, in batches of rows: float32 features, and each row's number.

The files are made once, below `build/`, and are in the page cache for all parties. Parties run flat out, within one
epoch. A row's features follow from its number, so batches can be checked in any order; all parties have the same number
of checks. No party shuffles. Nothing of ours is imported here, because one party runs in an environment of its own.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench import machine

FEATURES = tuple(f"f{i:02}" for i in range(40))
GROUP_ROWS = 131_072
ROWS = 1_048_576
"""Rows in each file."""
CHECKED = 8
PANDAS, PYARROW = READERS = ("pandas", "pyarrow")
FOLDER = machine.ROOT / "build" / "bench-tables"
_MULTIPLIERS = np.arange(len(FEATURES), dtype=np.int64) * 7_919 + 104_729


@dataclass(frozen=True, slots=True)
class Case:
    reader: str = PANDAS
    """The library with which ours and torch's read. Petastorm has its own."""
    producers: int = 2
    """Number of workers, feeders or threads that read."""
    seconds: float = 4.0
    batch: int = 16_384
    files: int = 16
    smoke: bool = False

    @property
    def name(self) -> str:
        nbytes = self.files * ROWS * (4 * len(FEATURES) + 8)
        return f"{nbytes / 1e9:.1f} GB by {self.reader}, {self.producers} producers"


def features_of(numbers: np.ndarray) -> np.ndarray:
    """Returns the features of rows with these numbers, float32 of shape (rows, features): whole numbers below 2**20."""
    return ((numbers[:, None] * _MULTIPLIERS) & 0xFFFFF).astype(np.float32)


def files(case: Case) -> list[Path]:
    """Returns the paths of the files, and makes missing ones."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    FOLDER.mkdir(parents=True, exist_ok=True)
    paths = [FOLDER / f"{number:03}.parquet" for number in range(2 if case.smoke else case.files)]
    for number, path in enumerate(paths):
        if not path.exists():
            numbers = np.arange(number * ROWS, (number + 1) * ROWS, dtype=np.int64)
            made = dict(zip(FEATURES, np.ascontiguousarray(features_of(numbers).T), strict=True))
            part = path.with_suffix(f".{os.getpid()}")
            pq.write_table(pa.table({"id": numbers, **made}), part, row_group_size=GROUP_ROWS)
            part.rename(path)
    return paths


class Tables(torch.utils.data.IterableDataset[Any]):
    """Batches of rows. Each worker reads every n-th file."""

    def __init__(self, case: Case) -> None:
        self._paths, self._case = files(case), case

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        info = torch.utils.data.get_worker_info()
        first, every = (info.id, info.num_workers) if info else (0, 1)
        read = {PANDAS: by_pandas, PYARROW: by_pyarrow}[self._case.reader]
        for path in self._paths[first::every]:
            yield from read(path, self._case.batch)


def by_pandas(path: Path, rows: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    import pandas as pd

    frame = pd.read_parquet(path)
    for start in range(0, len(frame), rows):
        part = frame.iloc[start : start + rows]
        yield torch.tensor(part[list(FEATURES)].to_numpy()), torch.tensor(part["id"].to_numpy())


def by_pyarrow(path: Path, rows: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    import pyarrow.parquet as pq

    file = pq.ParquetFile(path)
    for group in range(file.num_row_groups):
        table = file.read_row_group(group)
        numbers, columns = table["id"].to_numpy(), [table[name].to_numpy() for name in FEATURES]
        for start in range(0, len(numbers), rows):
            part = slice(start, start + rows)
            features = np.stack([column[part] for column in columns], axis=1)
            yield torch.from_numpy(features), torch.tensor(numbers[part])


def measure(stream: Iterator[Any], case: Case, *, node_pids: Callable[[], Iterable[int]]) -> dict[str, Any]:
    """Measures a stream of features and numbers. `node_pids` returns processes that must be on the trainer's node."""
    warm, seen = 2 if case.smoke else 16, set[int]()
    for number in range(warm):
        features, numbers = next(stream)
        if number < CHECKED:
            _check(np.asarray(features), np.asarray(numbers), seen)
    pids = sorted(set(node_pids()))
    node, rows, nbytes, began = machine.cpu_ns(pids), 0, 0, time.perf_counter()
    everything = machine.cpu_ns(own_tree())
    for features, numbers in stream:
        rows += len(numbers)
        nbytes += features.nbytes + numbers.nbytes
        if time.perf_counter() - began >= case.seconds:
            break
    took = time.perf_counter() - began
    figures = {
        "rows_per_s": rows / took,
        "node_cpu_s_per_gb": (machine.cpu_ns(pids) - node) / nbytes,
        "all_cpu_s_per_gb": (machine.cpu_ns(own_tree()) - everything) / nbytes,
    }
    checked = min(warm, CHECKED)
    digest = hashlib.blake2b(f"{checked} batches of {case.batch} rows".encode(), digest_size=8).hexdigest()
    proof = {"batches": checked, "nbytes": checked * case.batch * (4 * len(FEATURES) + 8), "digest": digest}
    return {"figures": {case.name: figures}, "proof": proof}


def _check(features: np.ndarray, numbers: np.ndarray, seen: set[int]) -> None:
    """Raises RuntimeError if the features do not belong to the rows with these numbers, or if a number is repeated.

    `seen` has the numbers of earlier batches, and receives these.
    """
    before = len(seen)
    seen.update(numbers.tolist())
    if len(seen) - before != len(numbers) or not np.array_equal(features, features_of(numbers)):
        raise RuntimeError(f"a batch of {len(numbers)} rows is not what its rows' numbers say")


def own_tree() -> list[int]:
    """Returns the pids of this process and its descendants."""
    import psutil

    me = psutil.Process()
    return [me.pid, *(child.pid for child in me.children(recursive=True))]
