"""The device interface that a transfer needs, and its implementation with torch.

The CUDA calls in this module have never been run: the tests use a simulated device. `make test-gpu` would show whether
they work.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Protocol

import torch

from dataloaderjob.core.errors import InputError
from dataloaderjob.trainer.session import service
from dataloaderjob.trainer.session.pool import Mapping

PORTABLE = 1
"""cudaHostRegisterPortable: the memory is pinned for all devices."""


class Device(Protocol):
    """A device with a stream for copies. The trainer calls `follow`, `wait` and `keep`; a single thread calls the other
    methods."""

    def follow(self) -> None:
        """Makes the stream wait for all work queued on the trainer's stream so far."""

    def begin(self) -> None:
        """Makes this device the calling thread's current device."""

    def register(self, address: int, nbytes: int, mapping: Mapping) -> bool:
        """Registers a region's memory with the driver, so that the device can copy from it directly. The memory stays
        registered until the region is unmapped. Returns False if the driver refuses the region. The driver is then
        assumed to refuse all others, too."""

    def stream(self) -> contextlib.AbstractContextManager[None]:
        """Returns a context whose work runs on the stream."""

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """Starts a copy. The caller must keep the source until an event recorded on the stream after the copy has
        completed."""

    def record(self) -> Any:
        """Records an event on the stream after all work queued so far, and returns it."""

    def query(self, event: Any) -> bool:
        """Returns True if the event has completed."""

    def synchronize(self, event: Any) -> None:
        """Waits until the event has completed."""

    def wait(self, event: Any) -> None:
        """Makes the trainer's stream wait for the event."""

    def keep(self, tensor: torch.Tensor) -> None:
        """Prevents the tensor's memory from being reused before the trainer's stream is done with it."""

    def generator(self, seed: int) -> torch.Generator:
        """Returns a new generator on the device."""


class Accelerator:
    """A device that is used through torch's interface for accelerators of any kind. Only CUDA's driver registers
    memory. For other accelerators, copies go through torch's pinned memory."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.Stream(device)

    def follow(self) -> None:
        self._stream.wait_stream(torch.accelerator.current_stream(self._device))

    def begin(self) -> None:
        torch.accelerator.set_device_index(self._device.index or 0)

    def register(self, address: int, nbytes: int, mapping: Mapping) -> bool:
        if self._device.type != "cuda":
            return False
        error = int(_cuda().cudaHostRegister(address, nbytes, PORTABLE))
        if not error:
            mapping.before_unmap = partial(_unregister, address, os.getpid())
            return True
        _clear_error(self._device)
        service.say_once(
            f"the driver cannot register the pool's memory (cudaHostRegister: error {error}), so batches "
            "are copied through torch's pinned memory; raise the locked-memory limit (ulimit -l), if there "
            "is one"
        )
        return False

    @contextlib.contextmanager
    def stream(self) -> Iterator[None]:
        index = torch.accelerator.current_device_index()
        before = torch.accelerator.current_stream(self._device)
        torch.accelerator.set_stream(self._stream)
        try:
            yield
        finally:
            torch.accelerator.set_stream(before)  # also makes the stream's device the current one
            torch.accelerator.set_device_index(index)

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        is_dense = tensor.layout is torch.strided and not tensor.is_nested
        if tensor.is_quantized or not (is_dense or tensor.layout is torch.jagged):
            raise InputError(
                "device= supports only dense tensors, and nested tensors with layout=torch.jagged, but the batch has a "
                f"tensor of {tensor.dtype} with layout {tensor.layout}: return its parts, such as indices and values, "
                "and assemble them in the training loop"
            )
        if tensor.device == self._device:
            return tensor
        if tensor.device.type != "cpu" or not is_dense:
            return tensor.to(self._device)
        source = tensor if tensor.is_pinned() else tensor.pin_memory()
        return source.to(self._device, non_blocking=True)

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

    def keep(self, tensor: torch.Tensor) -> None:
        tensor.record_stream(torch.accelerator.current_stream(self._device))

    def generator(self, seed: int) -> torch.Generator:
        return torch.Generator(self._device).manual_seed(seed)


def _clear_error(device: torch.device) -> None:
    """Clears the error of a failed driver call. Otherwise, torch would report it as a failure of this thread's next
    kernel."""
    with contextlib.suppress(RuntimeError):
        torch.zeros(1, device=device)


def _unregister(
    address: int,
    pid: int,
    is_at_exit: Callable[[], bool] = sys.is_finalizing,
    getpid: Callable[[], int] = os.getpid,
) -> None:
    # A forked child cannot use CUDA, and at exit, the driver itself unregisters the memory.
    if not is_at_exit() and getpid() == pid:
        _cuda().cudaHostUnregister(address)


def _cuda() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


def device_of(named: Any, known: dict[torch.device, Device]) -> Device | None:
    """Returns the device that a loader's `device=` argument names, or None for "cpu". Raises InputError if the device
    does not exist.

    The loader keeps its devices in `known`, to which this function adds new ones. Devices are reused, because each has
    its own stream, and torch reuses free memory only within one stream.
    """
    try:
        device = torch.device(named)
    except (RuntimeError, TypeError) as exc:
        raise InputError(
            f"device= must be a torch.device or its name, such as 'cuda', but is {named!r}: {exc}"
        ) from exc
    if device.type == "cpu":
        return None
    present = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if present is None or present.type != device.type:
        found = "no accelerator" if present is None else present.type
        raise InputError(
            f"device={named!r} must be a device that torch can use here, but torch has {found}: "
            "device='cpu' leaves batches in this process's memory, and runs device_stage there"
        )
    if device.index is not None and device.index >= (count := torch.accelerator.device_count()):
        raise InputError(f"device={named!r} does not exist: torch sees {count}, numbered from 0")
    device = torch.empty(0, device=device).device  # the same device, now with its index
    if device not in known:
        known[device] = Accelerator(device)
    return known[device]
