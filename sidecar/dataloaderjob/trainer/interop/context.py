"""`dataloaderjob.context()`: a multiprocessing context for torch's own iterator, or for another library's.

An iterator requests queues, an event and processes from its context. It puts index lists into one queue per worker, and
gets batches from another queue. Our context starts no processes. Its queues send the index lists to feeders.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from multiprocessing import context as contexts
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from dataloaderjob.core.errors import InputError

if TYPE_CHECKING:
    from dataloaderjob.trainer.interop.queues import Queue, Worker
    from dataloaderjob.trainer.session.client import Client

DEVICE_OPTIONS = ("device", "device_stage", "prefetch_device")
"""Options of our loader that are lost if a torch loader is rebuilt from it."""


class FeedersContext(contexts.ForkContext):
    """A multiprocessing context for `DataLoader(..., num_workers=n, multiprocessing_context=...)`.

    Any torch-like loader that uses the context gets its batches from feeders. The dataset must be map-style. The
    context can be pickled.
    """

    def __init__(self, *, allow_pickle: bool = False, of: Mapping[str, Any] = MappingProxyType({})) -> None:
        """Keeps those options of our loader that torch's loaders do not have, by name, in `of`."""
        self.allow_pickle = allow_pickle
        self.of = of
        self.client: Client | None = None
        """The client, which is kept between epochs. Each epoch has its own queues."""

    @classmethod
    def of_loader(cls, allow_pickle: bool, device_options: tuple[Any, ...] | None) -> FeedersContext:
        """Returns a context for one of our loaders. `device_options` holds the values of DEVICE_OPTIONS, if known."""
        known = device_options is not None and device_options[0] is not None
        of = dict(zip(DEVICE_OPTIONS, device_options or (), strict=True)) if known else {}
        return cls(allow_pickle=allow_pickle, of=of)

    def Queue(self, maxsize: int = 0) -> Queue:  # type: ignore[override]  # noqa: ARG002, N802  the base's
        from dataloaderjob.trainer.interop.queues import Queue

        return Queue()

    def Event(self) -> threading.Event:  # type: ignore[override]  # noqa: N802
        return threading.Event()

    def Process(self, *, target: Any, args: tuple[Any, ...] = (), **_: Any) -> Worker:  # type: ignore[override]  # noqa: N802
        from dataloaderjob.trainer.interop.queues import Worker

        if self.of.get("device_stage") is not None:
            raise InputError(
                "device_stage= was lost when another library rebuilt this loader: use "
                "adopt(accelerator.prepare(loader)) from dataloaderjob.accelerate, and load_state() instead of "
                "skip_first_batches(), or run the stage in the training loop"
            )
        return Worker(target, args, self)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, FeedersContext) and self.__reduce__() == other.__reduce__()

    def __hash__(self) -> int:
        return hash((FeedersContext, self.allow_pickle))

    def __reduce__(self) -> tuple[Any, ...]:
        return _context, (self.allow_pickle, dict(self.of))

    def __repr__(self) -> str:
        return f"dataloaderjob.context({'allow_pickle=True' if self.allow_pickle else ''})"


def _context(allow_pickle: bool, of: Mapping[str, Any]) -> FeedersContext:
    return FeedersContext(allow_pickle=allow_pickle, of=of)


def context(allow_pickle: bool = False) -> FeedersContext:
    """Returns a `multiprocessing_context` that makes torch's DataLoader, or one like it, use feeders.

    `allow_pickle` means the same as in `dataloaderjob.DataLoader`.
    """
    return FeedersContext(allow_pickle=allow_pickle)
