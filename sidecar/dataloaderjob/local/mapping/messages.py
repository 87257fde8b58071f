"""Messages with the map command's results: one Arrow message for each batch, from a feeder to the command."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from dataloaderjob.core.errors import RemoteProtocolError

LEAST_LIMIT = 1 << 22
"""Number of elements that even the smallest message may have, because nulls and repeated values may take no bytes."""


def to_message(batch: pa.RecordBatch) -> np.ndarray[Any, Any]:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as stream:
        stream.write_batch(batch)
    return np.frombuffer(sink.getvalue(), dtype=np.uint8)


def from_message(message: Any) -> pa.RecordBatch:
    """Unpacks a message into memory of its own. Raises RemoteProtocolError if the message is malformed, because pyarrow
    would follow its offsets to any place in memory. Also raises it if the message has far more elements than bytes,
    because writing the result could then take any amount of memory."""
    if type(message) is not np.ndarray:
        raise RemoteProtocolError(f"a feeder sent a {type(message).__name__} instead of results")
    try:
        with pa.ipc.open_stream(pa.py_buffer(message.tobytes())) as stream:
            batch = stream.read_next_batch()
        batch.validate(full=True)
        found = batch.num_rows + sum(_elements(column) for column in batch.columns)
    except (pa.ArrowException, OSError, ValueError, TypeError, LookupError, StopIteration) as exc:
        raise RemoteProtocolError(f"a feeder sent results that are not valid Arrow data: {exc}") from exc
    limit = max(8 * message.nbytes, LEAST_LIMIT)  # a boolean takes a bit
    if found > limit:
        raise RemoteProtocolError(
            f"a feeder sent results of {found} elements in {message.nbytes} bytes; at most {limit} are allowed"
        )
    return batch


def _elements(array: pa.Array) -> int:
    """Returns the number of elements of an array and of all arrays inside it.

    Raises KeyError if pyarrow has no Python class for the type of one of these arrays, such as Arrow's intervals of
    months.
    """
    return len(array) + _repeated(array) + sum(_elements(one) for one in _inside(array))


def _repeated(array: pa.Array) -> int:
    """Returns the number of elements in all lists of a list view. Elements that several lists share are counted for
    each list."""
    if pa.types.is_list_view(array.type) or pa.types.is_large_list_view(array.type):
        return int(pc.sum(array.sizes.cast(pa.int64())).as_py() or 0)
    return 0


def _inside(array: pa.Array) -> list[pa.Array]:
    kind = array.type
    if isinstance(kind, pa.BaseExtensionType):
        return [array.storage]
    if pa.types.is_dictionary(kind):
        return [array.indices, array.dictionary]
    if pa.types.is_run_end_encoded(kind):
        return [array.run_ends, array.values]
    if pa.types.is_map(kind):
        return [array.keys, array.items]
    if pa.types.is_struct(kind) or pa.types.is_union(kind):
        return [array.field(number) for number in range(kind.num_fields)]
    return [array.values] if kind.num_fields else []
