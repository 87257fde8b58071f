"""Ray Data as a source: a `ray.data.Dataset` in the job's own Ray cluster, read by a feeder's slot.

Ray's tasks read and transform data in the feeders' pods. The slot that iterates over the dataset is a driver of that
Ray cluster. The trainer does not use Ray.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import IterableDataset

from dataloaderjob.core.errors import InputError

_READ_ONLY = "The given NumPy array is not writable"
EXIT_NO_RAY = 70
_ROWS = 256
"""Number of rows fetched at a time if the dataset yields them one by one."""
_TASKS_PER_ACTOR = 4
"""Number of tasks submitted ahead for each actor, unless the user sets a different number. Ray waits up to 0.1 s for
running tasks before it submits new ones. With Ray's own default of 2, an actor is often idle in the meantime."""


class RayData(IterableDataset[Any]):
    """An iterable dataset over the `ray.data.Dataset` that `make()` returns, in the same order each time.

    Each slot calls `make` in its own process, once per epoch. In that process, `torch.initial_seed()` is the epoch's
    seed, `get_worker_info()` identifies the slot, and `RANK` and `WORLD_SIZE` identify the rank. Blocks arrive in order
    (`preserve_order`), so a slot can be rebuilt in another process.
    """

    def __init__(
        self,
        make: Callable[[], Any],
        *,
        batch_size: int | None = None,
        drop_last: bool = False,
        shuffle_buffer_size: int | None = None,
        prefetch_batches: int = 2,
    ) -> None:
        """`batch_size` is the number of rows in each batch. Ray assembles such a batch as a dict of arrays, for a
        loader with `batch_size=None`. If `batch_size` is omitted here, the dataset yields single rows, as dicts. With
        `drop_last`, a last batch with fewer rows is dropped. `shuffle_buffer_size` is the number of rows that are
        shuffled together, with the epoch's seed. `prefetch_batches` is the number of batches that Ray keeps ready in
        the slot.

        Raises InputError if `make` is not a function.
        """
        if not callable(make):
            raise InputError(
                f"RayData takes a function that returns the ray.data.Dataset, got {type(make).__name__}: a "
                "dataset created here belongs to this process's Ray. Write RayData(lambda: "
                "ray.data.read_parquet(...))"
            )
        self._make = make
        self._batch_size, self._drop_last = batch_size, drop_last
        self._shuffle_buffer_size, self._prefetch_batches = shuffle_buffer_size, prefetch_batches

    def __iter__(self) -> Iterator[Any]:
        """Raises InputError if the job has no Ray for tasks. Exceptions of `make` and of Ray are not caught."""
        batches = _dataset(self._make).iter_batches(
            batch_size=self._batch_size or _ROWS, batch_format="numpy",
            drop_last=self._drop_last and self._batch_size is not None,
            prefetch_batches=self._prefetch_batches, local_shuffle_buffer_size=self._shuffle_buffer_size,
            local_shuffle_seed=torch.initial_seed() & 0xFFFFFFFF if self._shuffle_buffer_size else None,
        )  # fmt: skip
        # The arrays are in Ray's own read-only memory, and the encoder copies each batch.
        warnings.filterwarnings("ignore", message=_READ_ONLY)
        for batch in batches:
            columns = {name: _plain(column) for name, column in batch.items()}
            if self._batch_size is not None:
                yield columns
            else:
                yield from (
                    dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)
                )


def _dataset(make: Callable[[], Any]) -> Any:
    """Returns the dataset that `make` creates in the job's Ray cluster, with `preserve_order` set. Raises InputError if
    the job has no Ray for tasks, or if `make` does not return a dataset."""
    try:
        import ray
        import ray.data
    except ImportError as exc:
        raise InputError(f"RayData requires ray[data] in the feeders' environment: {exc}") from exc
    if not ray.is_initialized():
        _connect(ray)
    context = ray.data.DataContext.get_current()
    context.execution_options.preserve_order = True
    if context.max_tasks_in_flight_per_actor is None:
        context.max_tasks_in_flight_per_actor = _TASKS_PER_ACTOR
    made = make()
    if not hasattr(made, "iter_batches"):
        raise InputError(
            "the function passed to RayData must return a ray.data.Dataset, but returned "
            f"{type(made).__name__}"
        )
    return made


def _connect(ray: Any) -> None:
    address = os.environ.get("RAY_ADDRESS")
    if address is None:
        raise InputError(
            "RayData requires a job whose Ray has CPUs for tasks, and num_workers of at least 1: set "
            "spec.ray.managed.tasks.cpus in the manifest, and run the job on a cluster or with "
            "`dataloaderjob run`"
        )
    # Ray's workers can then import every module that this process can import.
    path = os.pathsep.join(folder or os.getcwd() for folder in sys.path)
    try:
        ray.init(address, configure_logging=False, runtime_env={"env_vars": {"PYTHONPATH": path}})
    except ConnectionError as exc:
        # The head may still be starting. If this were raised as an error of the dataset, it would end the epoch.
        sys.stderr.write(
            f"RayData: cannot reach the job's Ray at {address}, so the slot starts over: {exc}\n"
        )
        sys.stderr.flush()
        os._exit(EXIT_NO_RAY)


def _plain(column: Any) -> Any:
    """Returns a column of text, bytes or ragged arrays as a list, because a numpy array of objects is not plain
    data."""
    return column.tolist() if column.dtype == object else column
