"""The part of the map command that runs in feeders: inputs with their index, and results turned into columns.

Feeders convert results to columns, so that the writing process does not have to. The results of each batch travel as
one Arrow message. Generators are seeded by an input's index, so a resumed run draws the same random numbers as an
uninterrupted run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from torch.utils.data import Dataset, default_collate

from dataloaderjob.core.errors import InputError
from dataloaderjob.local.mapping.messages import to_message
from dataloaderjob.local.mapping.plan import shown
from dataloaderjob.making.fetcher import batch_seed, seed_batch, seed_generators, seed_sample
from dataloaderjob.making.held import NOTHING_HELD, HeldGenerators

INDEX = "index"
"""Name of the column with the row's index, which the map command adds to the function's columns."""
RESULT = "result"
"""Name of the column for a function that returns one array, tensor or list."""
_SEED = 0
REMEDY = (
    "return arrays or tensors of one shape and type, a list with one array per row if lengths differ, or a "
    "pyarrow.RecordBatch"
)


class Inputs(Dataset[tuple[int, Any]]):
    """A dataset that contains (index, sample) for each index of the user's dataset."""

    SEEDS_BY_KEY = True
    """Seeds depend on a sample's index, because a resumed run may load the sample at a different position
    (`fetcher.BY_KEY`)."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __getitem__(self, index: int) -> tuple[int, Any]:
        seed_sample(_SEED, index, index)
        try:
            return index, self._dataset[index]
        except StopIteration as exc:  # it would end the loop over the loader
            raise RuntimeError("the dataset raised StopIteration") from exc


class BatchedInputs(Inputs):
    """The same as `Inputs`, for a dataset with `__getitems__`, which loads all samples of a batch at once."""

    def __getitems__(self, indices: list[int]) -> list[tuple[int, Any]]:
        seed_batch(_SEED, indices[0])
        try:
            samples = self._dataset.__getitems__(indices)
        except StopIteration as exc:
            raise RuntimeError("the dataset raised StopIteration") from exc
        return list(zip(indices, samples, strict=True))


def inputs(dataset: Any) -> Inputs:
    return BatchedInputs(dataset) if getattr(dataset, "__getitems__", None) else Inputs(dataset)


class Apply:
    """The loader's collate_fn, which turns (index, sample) pairs into the function's results, as an Arrow message."""

    def __init__(self, function: Callable[[Any], Any], collate_fn: Callable[[Any], Any] | None) -> None:
        """`function`: the function to call. A class is instantiated once in each process, for the process's first
        batch."""
        self._function = function
        self._collate_fn = collate_fn
        self._made: Callable[[Any], Any] | None = None
        self._held = NOTHING_HELD
        """Generators held by an instance that this object created. The fetcher seeds the generators that a function
        holds."""

    def __call__(self, pairs: list[tuple[int, Any]]) -> np.ndarray[Any, Any]:
        rows = range(pairs[0][0], pairs[-1][0] + 1)
        try:
            with torch.no_grad():
                if self._made is None:
                    self._made = make(self._function)
                    if isinstance(self._function, type):
                        self._held = HeldGenerators(self._made)
                seed_batch(_SEED, rows.start)
                self._held.seed(batch_seed(_SEED, rows.start), _SEED)
                result = self._made(self._collate([sample for _, sample in pairs], rows))
        except StopIteration as exc:
            raise RuntimeError("the function raised StopIteration") from exc
        return to_message(record_batch(result, rows))

    def _collate(self, samples: list[Any], rows: range) -> Any:
        if self._collate_fn is not None:
            return self._collate_fn(samples)
        try:
            return default_collate(samples)
        except Exception as exc:  # for example, different lengths or unknown types
            raise InputError(
                f"torch's default_collate cannot collate the samples of {shown(rows)}: {exc}. Use "
                "--collate-fn to name a function in the script that collates them"
            ) from exc


def make(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Returns the function, or an instance if it is a class; a torch.nn.Module is put in evaluation mode."""
    if isinstance(function, type):
        seed_generators(_SEED)  # random initial weights are the same in all feeders
        function = function()
    return function.eval() if isinstance(function, torch.nn.Module) else function


# Columns


def record_batch(result: Any, rows: range) -> pa.RecordBatch:
    """Returns a record batch that contains the rows' indices and the function's result. Raises InputError if the result
    cannot become columns."""
    # For example, a DataFrame from pandas.
    if hasattr(result, "columns") and hasattr(result, "__arrow_c_stream__"):
        result = pa.table(result)
    if isinstance(result, pa.Table | pa.RecordBatch):
        columns = dict(zip(result.schema.names, result.columns, strict=True))
        if len(columns) < len(result.schema.names):
            raise InputError(f"columns of the result for {shown(rows)} share a name: {result.schema.names}")
    elif isinstance(result, Mapping):
        columns = dict(result)
    elif hasattr(result, "_asdict"):  # a namedtuple
        columns = result._asdict()
    elif isinstance(result, tuple):
        raise InputError(
            f"the function returned a tuple of {len(result)} for {shown(rows)}: return a dict, which names its columns"
        )
    else:
        columns = {RESULT: result}
    if not columns:
        raise InputError(f"the function returned no column for {shown(rows)}: {REMEDY}")
    if INDEX in columns:
        raise InputError(
            f"the function returned a column {INDEX!r} for {shown(rows)}, but that column holds a row's index in the "
            "dataset: rename yours"
        )
    arrays = [pa.array(np.arange(rows.start, rows.stop, dtype=np.int64))]
    arrays += [_column(name, value, rows) for name, value in columns.items()]
    return pa.RecordBatch.from_arrays(arrays, names=[INDEX, *columns])


def _column(name: Any, value: Any, rows: range) -> pa.Array:
    if not isinstance(name, str):
        raise InputError(f"column names must be strings, but the result for {shown(rows)} has {name!r}")
    try:
        array = as_arrow(value)
    except Exception as exc:  # the object's library may raise anything
        raise InputError(
            f"column {name!r} of the result for {shown(rows)} cannot be written: {exc}; {REMEDY}"
        ) from exc
    if len(array) != len(rows):
        raise InputError(
            f"column {name!r} of the result for {shown(rows)} must have {len(rows)} rows, but has "
            f"{len(array)}: a function returns one row for each input"
        )
    return array


def as_arrow(value: Any) -> pa.Array:
    """Returns an array with one element for each row. If the value cannot become a column, raises an error of pyarrow
    or of the value's own library."""
    if isinstance(value, pa.ChunkedArray):
        return value.combine_chunks()
    if isinstance(value, pa.Array):
        return value
    if isinstance(value, list | tuple | range):
        return pa.array([_element(one) for one in value])
    if isinstance(value, torch.Tensor):
        return _nested(_numpy(value))
    if isinstance(value, np.ndarray):
        return _nested(value)
    if hasattr(value, "__arrow_c_array__") or hasattr(value, "__array__"):  # for example a Series
        return pa.array(value)
    raise TypeError(f"it is of type {type(value).__name__}, which has no rows")


def _numpy(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    plain = tensor.detach().cpu()
    return (plain.float() if plain.dtype == torch.bfloat16 else plain).numpy()


def _nested(array: np.ndarray[Any, Any]) -> pa.Array:
    """Converts rows of fixed shape to nested lists of fixed size."""
    if not array.ndim:
        raise TypeError("it has no dimensions, but the first dimension must be the rows")
    if not array.size and array.ndim > 1:
        raise ValueError(f"its shape is {array.shape}, so a row has no elements")
    flat = array.tolist() if array.dtype == object else np.ascontiguousarray(array).reshape(-1)
    made = pa.array(flat)
    for size in reversed(array.shape[1:]):
        made = pa.FixedSizeListArray.from_arrays(made, size)
    return made


def _element(value: Any) -> Any:
    """Converts a value to a form that Arrow accepts within a list: a one-dimensional array, or a list of such
    arrays."""
    if isinstance(value, torch.Tensor):
        value = _numpy(value)
    if not isinstance(value, np.ndarray):
        return value
    if not value.ndim:
        return value[()]
    return value if value.ndim == 1 else [_element(row) for row in value]
