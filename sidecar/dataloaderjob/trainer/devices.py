"""What a transfer needs of a device, and torch's."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch

from dataloaderjob.core.errors import InputError
from dataloaderjob.trainer import service
from dataloaderjob.trainer.pool import Mapping


class Device(Protocol):
    """A device with a stream for copies. All but `wait` and `keep` are called by one thread."""

    def begin(self) -> None:
        """Makes it the thread's device."""

    def register(self, address: int, nbytes: int, mapping: Mapping) -> None:
        """Has the driver know a region's memory, once, until it is unmapped, so that it is copied without a detour."""

    def stream(self) -> contextlib.AbstractContextManager[None]:
        """Work within it is the stream's."""

    def copy(self, leaf: Any) -> Any:
        """Asks for the copy of a tensor. What is read has to stay until an event of the stream that is recorded later.
        What is no tensor does not go to a device: it is copied, if it is memory of the pool."""

    def record(self) -> Any:
        """An event of the stream, behind all that was asked for."""

    def query(self, event: Any) -> bool:
        """Whether it has come."""

    def synchronize(self, event: Any) -> None:
        """Waits until it has come."""

    def wait(self, event: Any) -> None:
        """Has the trainer's stream wait for it."""

    def keep(self, leaf: Any) -> Any:
        """The memory of a tensor is not given away before the trainer's stream is done with it."""

    def generator(self, seed: int) -> torch.Generator:
        """A new one."""


class Host:
    """`device="cpu"`: batches stay where they are."""

    def begin(self) -> None:
        pass

    def register(self, address: int, nbytes: int, mapping: Mapping) -> None:
        pass

    def stream(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def copy(self, leaf: Any) -> Any:
        return leaf

    def record(self) -> Any:
        return None

    def query(self, event: Any) -> bool:  # noqa: ARG002
        return True

    def synchronize(self, event: Any) -> None:
        pass

    def wait(self, event: Any) -> None:
        pass

    def keep(self, leaf: Any) -> Any:
        return leaf

    def generator(self, seed: int) -> torch.Generator:
        return torch.Generator().manual_seed(seed)


class Accelerator:
    """Uses torch's interface for accelerators, whatever they are. Memory is registered with CUDA's driver only: others
    copy by way of torch's pinned memory."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.Stream(device)
        self._is_registering = device.type == "cuda"

    def begin(self) -> None:
        torch.accelerator.set_device_index(self._device.index or 0)

    def register(self, address: int, nbytes: int, mapping: Mapping) -> None:
        if not self._is_registering or not nbytes or mapping.before_unmap is not None:
            return
        error = int(_cuda().cudaHostRegister(address, nbytes, 0))
        if error:
            self._is_registering = False
            service.say_once(
                f"the driver does not take the pool's memory (cudaHostRegister: error {error}), so batches are copied "
                "by way of torch's pinned memory; raise the limit of locked memory (ulimit -l), if there is one"
            )
            return
        mapping.before_unmap = partial(_unregister, address, os.getpid())

    @contextlib.contextmanager
    def stream(self) -> Iterator[None]:
        before = torch.accelerator.current_stream(self._device)
        torch.accelerator.set_stream(self._stream)
        try:
            yield
        finally:
            torch.accelerator.set_stream(before)

    def copy(self, leaf: Any) -> Any:
        if isinstance(leaf, np.ndarray):
            return leaf.copy()
        if not isinstance(leaf, torch.Tensor) or leaf.device == self._device:
            return leaf
        if leaf.device.type == "cpu" and not leaf.is_pinned():
            leaf = leaf.pin_memory()
        return leaf.to(self._device, non_blocking=True)

    def record(self) -> torch.Event:
        event = torch.Event(self._device)
        event.record(self._stream)
        return event

    def query(self, event: Any) -> bool:
        return bool(event.query())

    def synchronize(self, event: Any) -> None:
        event.synchronize()

    def wait(self, event: Any) -> None:
        torch.accelerator.current_stream(self._device).wait_event(event)

    def keep(self, leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor) and leaf.device == self._device:
            leaf.record_stream(torch.accelerator.current_stream(self._device))
        return leaf

    def generator(self, seed: int) -> torch.Generator:
        return torch.Generator(self._device).manual_seed(seed)


def _unregister(
    address: int,
    pid: int,
    is_at_exit: Callable[[], bool] = sys.is_finalizing,
    getpid: Callable[[], int] = os.getpid,
) -> None:
    if not is_at_exit() and getpid() == pid:  # a forked child has no CUDA; at the end the driver sees to it
        _cuda().cudaHostUnregister(address)


def _cuda() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


def device_of(named: Any) -> Device:
    """The device of a loader's `device=`. Raises InputError for one that is not there."""
    try:
        device = torch.device(named)
    except (RuntimeError, TypeError) as exc:
        raise InputError(
            f"device= needs a torch.device or its name, such as 'cuda', found {named!r}: {exc}"
        ) from exc
    if device.type == "cpu":
        return Host()
    present = torch.accelerator.current_accelerator()
    if present is None or present.type != device.type or not torch.accelerator.is_available():
        found = "no accelerator" if present is None else present.type
        raise InputError(
            f"device={named!r} needs a device that torch can use here, found {found}: device='cpu' leaves batches in "
            "the memory of this process, and runs device_stage there"
        )
    return Accelerator(torch.empty(0, device=device).device)  # which has its index
