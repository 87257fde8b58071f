"""What a transfer needs of a device, and torch's.

Tests have a simulated one in the place of torch's: what calls CUDA here has not been run. `make test-gpu`
would show it."""

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
    """A device with a stream for copies. The trainer calls `follow`, `wait` and `keep`, one thread all the rest."""

    def follow(self) -> None:
        """Has the stream wait for what the trainer's was asked for until now."""

    def begin(self) -> None:
        """Makes it the thread's device."""

    def register(self, address: int, nbytes: int, mapping: Mapping) -> bool:
        """Has the driver know a region's memory until it is unmapped, so that it is copied without a detour. Returns
        whether it does; if not, it takes no other region either."""

    def stream(self) -> contextlib.AbstractContextManager[None]:
        """Work within it is the stream's."""

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """Asks for a copy. What is read has to stay until an event of the stream that is recorded later."""

    def record(self) -> Any:
        """An event of the stream, behind all that was asked for."""

    def query(self, event: Any) -> bool:
        """Whether it has come."""

    def synchronize(self, event: Any) -> None:
        """Waits until it has come."""

    def wait(self, event: Any) -> None:
        """Has the trainer's stream wait for it."""

    def keep(self, tensor: torch.Tensor) -> None:
        """Its memory is not given away before the trainer's stream is done with it."""

    def generator(self, seed: int) -> torch.Generator:
        """A new one."""


class Accelerator:
    """Uses torch's interface for accelerators, whatever they are. Memory is registered with CUDA's driver only: others
    copy by way of torch's pinned memory."""

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
            f"the driver does not take the pool's memory (cudaHostRegister: error {error}), so batches are copied by "
            "way of torch's pinned memory; raise the limit of locked memory (ulimit -l), if there is one"
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
            torch.accelerator.set_stream(before)  # which makes its device the current one
            torch.accelerator.set_device_index(index)

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        is_dense = tensor.layout is torch.strided and not tensor.is_nested
        if tensor.is_quantized or not (is_dense or tensor.layout is torch.jagged):
            raise InputError(
                "device= needs dense tensors or nested ones with layout=torch.jagged, whose memory torch can keep for "
                f"a stream, found one of {tensor.dtype} with layout {tensor.layout}: bring its parts, such as indices "
                "and values, and put them together in the training loop"
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
    """A call of the driver that failed leaves its error to this thread's next kernel, which torch says has failed."""
    with contextlib.suppress(RuntimeError):
        torch.zeros(1, device=device)


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


def device_of(named: Any, known: dict[torch.device, Device]) -> Device | None:
    """The device of a loader's `device=`, None for "cpu". Raises InputError for one that is not there.

    `known`: the loader's, which is added to. A stream of its own for each epoch would have memory of its own, too:
    torch gives away again only to the same stream what is free.
    """
    try:
        device = torch.device(named)
    except (RuntimeError, TypeError) as exc:
        raise InputError(
            f"device= needs a torch.device or its name, such as 'cuda', found {named!r}: {exc}"
        ) from exc
    if device.type == "cpu":
        return None
    present = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if present is None or present.type != device.type:
        found = "no accelerator" if present is None else present.type
        raise InputError(
            f"device={named!r} needs a device that torch can use here, found {found}: device='cpu' leaves batches in "
            "the memory of this process, and runs device_stage there"
        )
    if device.index is not None and device.index >= (count := torch.accelerator.device_count()):
        raise InputError(f"device={named!r} is not there: torch sees {count}, numbered from 0")
    device = torch.empty(0, device=device).device  # which has its index
    if device not in known:
        known[device] = Accelerator(device)
    return known[device]
