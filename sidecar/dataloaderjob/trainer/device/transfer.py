"""The transfer of batches from the pool to their destination.

One thread sends batches, and the trainer's thread accepts them. A device reads memory long after the call that
requested the copy. The source of a copy is therefore held until the copy's event has completed. The pool reuses a
batch's memory as soon as nothing holds the batch.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, Protocol

import torch
from torch.utils.data import _utils

from dataloaderjob.trainer.device.devices import Device
from dataloaderjob.trainer.device.trees import mapped, with_class_of, with_tensors, without_class
from dataloaderjob.trainer.session.pool import Bytes, Region

AHEAD = 2
"""Default number of batches that are sent to the device before the trainer asks for them."""
LOOK_S = 0.002
"""Seconds between checks of unfinished copies while no batch is requested."""
DeviceStage = Callable[[Any, torch.Generator], Any]
"""The user's function, fn(batch, generator). It runs in the trainer's process, and returns a batch."""
Claim = Callable[[], list[Region]]
"""A function that returns the pool's regions that a device may read directly. It returns each region only once."""
Which = Callable[[], str]
"""A function that describes a batch, such as "batch 3, indices [6, 7]"."""
Took = Callable[[int], None]
"""A function that receives a duration, in nanoseconds."""


def ignore(_: int) -> None:
    """Ignores a duration."""


class Transfer(Protocol):
    """A transfer of batches to their destination. One thread calls `begin`, `send`, `let_go` and `end`; the trainer's
    thread calls `accept` and `follow`."""

    def begin(self) -> None:
        """Prepares the calling thread."""

    def follow(self) -> None:
        """Makes all later sends wait for the work that is queued on the trainer's stream now."""

    def send(self, batch: Any, digest: int, which: Which, lent: Bytes | None = None) -> Any:
        """Begins to send a batch, and returns the value to pass to `accept`. `which` describes the batch in messages;
        `lent` is the batch's place in the pool, if it has one."""

    def accept(self, sent: Any) -> Any:
        """Returns the batch at its destination."""

    def let_go(self) -> float | None:
        """Releases the sources of copies that have completed. Returns the seconds until the next call is due, or None
        if nothing is held."""

    def end(self) -> None:
        """Waits until all copies are complete, and releases everything."""


class _AtOnce:
    """A synchronous transfer: a batch has arrived when `send` returns."""

    def begin(self) -> None:
        pass

    def follow(self) -> None:
        pass

    def accept(self, sent: Any) -> Any:
        return sent

    def let_go(self) -> float | None:
        return None

    def end(self) -> None:
        pass


class Pinning(_AtOnce):
    """The transfer for `pin_memory=True`: it copies batches into memory that a device can read directly."""

    def __init__(self, device: str | None) -> None:
        self._device, self._index = device, torch.accelerator.current_device_index()

    def begin(self) -> None:
        torch.accelerator.set_device_index(self._index)

    def send(self, batch: Any, digest: int, which: Which, lent: Bytes | None = None) -> Any:  # noqa: ARG002
        return _utils.pin_memory.pin_memory(batch, self._device)  # type: ignore[no-untyped-call]


class WaySource(Protocol):
    """A loader that knows the destination of its batches."""

    @property
    def has_device_stage(self) -> bool: ...
    def way(self, *, pins: bool, pin_device: str | None) -> Way:
        """Returns the destination of the batches."""


class StageRunner:
    """The user's device_stage, called with a new generator for each batch."""

    def __init__(
        self, function: DeviceStage, seed: int, took: Took = ignore, turn: threading.Lock | None = None
    ) -> None:
        """`seed` is the epoch's seed. `took` receives the duration of each call. `turn` is held during each call,
        because the thread of an abandoned iterator may still be running the stage."""
        self._function, self._seed, self._took = function, seed, took
        self._turn = turn or threading.Lock()

    def __call__(self, batch: Any, digest: int, which: Which, device: Device | None) -> Any:
        """Runs the stage. Adds a note that names the batch to the stage's exceptions. Converts StopIteration to
        RuntimeError, because StopIteration would end the epoch."""
        seed = seed_of(self._seed, digest)
        with self._turn:
            began = time.perf_counter_ns()
            try:
                generator = torch.Generator().manual_seed(seed) if device is None else device.generator(seed)
                with torch.no_grad(), _one_thread():
                    made = self._function(batch, generator)
                if made is None:
                    raise TypeError("device_stage must return a batch, but returned None")
                return made
            except StopIteration as exc:
                raise RuntimeError(f"device_stage raised StopIteration for {which()}") from exc
            except Exception as exc:
                exc.add_note(f"raised by device_stage, in the trainer's process, for {which()}")
                raise
            finally:
                self._took(time.perf_counter_ns() - began)


class OnHost(_AtOnce):
    """The transfer for `device="cpu"`: it runs a stage, and may pin the batches that the stage returns."""

    def __init__(self, stage: StageRunner, pinning: Pinning | None) -> None:
        self._stage, self._pinning = stage, pinning

    def begin(self) -> None:
        if self._pinning is not None:
            self._pinning.begin()

    def send(self, batch: Any, digest: int, which: Which, lent: Bytes | None = None) -> Any:  # noqa: ARG002
        made = self._stage(batch, digest, which, None)
        return made if self._pinning is None else self._pinning.send(made, digest, which)


@dataclass(frozen=True, slots=True)
class Sent:
    """A batch with copies in progress, and the event that completes when they do."""

    batch: Any
    tensors: list[torch.Tensor]
    event: Any


class _Copies:
    """The copies of one batch's tensors on the device, and their sources."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self.sources: list[torch.Tensor] = []
        self.tensors: list[torch.Tensor] = []
        self._made: dict[int, torch.Tensor] = {}
        """Copies by the `id` of their source. A tensor that occurs twice in a batch is copied only once."""

    def of_leaf(self, leaf: Any) -> Any:
        return with_tensors(leaf, self.of)

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        if (known := self._made.get(id(tensor))) is not None:
            return known
        plain = without_class(tensor)
        self.sources.append(tensor)
        self.tensors.append(made := self._device.copy(plain))
        self._made[id(tensor)] = made  # set before the attributes are copied, which may refer to the tensor
        made = made if plain is tensor else with_class_of(tensor, made, self.of)
        made = made.requires_grad_() if tensor.requires_grad else made
        self._made[id(tensor)] = self._made[id(made)] = made
        return made


class ToDevice:
    """The transfer for `device=`: on its own stream, it runs the user's stage and copies the result to the device."""

    def __init__(self, device: Device, stage: StageRunner | None, claim: Claim = list) -> None:
        """Must be called in the trainer's thread, because copies wait for the work that is queued on that thread's
        stream."""
        self._device, self._stage, self._claim = device, stage, claim
        self._is_registering = True
        self._held: deque[tuple[Any, Any]] = deque()
        """(event, sources) of each group of copies that may be unfinished."""
        self.follow()

    def begin(self) -> None:
        self._device.begin()

    def follow(self) -> None:
        self._device.follow()

    def send(self, batch: Any, digest: int, which: Which, lent: Bytes | None = None) -> Sent:
        """Sends a batch. Raises the stage's errors, and the device's errors with a note. Holds the sources of copies in
        addition to the batch, because a stage may return tensors that are not part of the batch."""
        self.let_go()
        device, copies = self._device, _Copies(self._device)
        with device.stream(), torch.no_grad():
            self._register()
            try:
                made = batch if self._stage is None else self._stage(batch, digest, which, device)
                with _noted(which):
                    sent = mapped(made, copies.of_leaf)
            finally:
                event = device.record()
                self._held.append((event, (lent, batch, copies.sources)))
        return Sent(sent, copies.tensors, event)

    def _register(self) -> None:
        """Registers new regions of the pool with the driver, until the driver refuses one."""
        if not self._is_registering:
            return
        for region in (regions := self._claim()):
            try:
                taken = self._is_registering and self._device.register(
                    region.address, region.nbytes, region.map
                )
            except BaseException:
                for one in regions[regions.index(region) :]:
                    one.map.is_claimed = False
                raise
            self._is_registering = region.map.is_claimed = taken

    def accept(self, sent: Sent) -> Any:
        self._device.wait(sent.event)
        for tensor in sent.tensors:
            self._device.keep(tensor)
        return sent.batch

    def let_go(self) -> float | None:
        held = self._held
        while held and self._device.query(held[0][0]):
            held.popleft()
        return LOOK_S if held else None

    def end(self) -> None:
        while self._held:
            self._device.synchronize(self._held[0][0])
            self._held.popleft()


@contextlib.contextmanager
def _noted(which: Which) -> Iterator[None]:
    try:
        yield
    except Exception as exc:
        exc.add_note(f"raised during the copy to the device, for {which()}")
        raise


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """Limits torch to one thread. Otherwise, sums, and therefore batches, would depend on the number of threads."""
    threads = torch.get_num_threads()
    if threads == 1:  # setting it would affect all later threads
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@dataclass(frozen=True, slots=True)
class Way:
    """The destination of a loader's batches."""

    device: Device | None = None
    """The device; None for this process's memory."""
    stage: DeviceStage | None = None
    ahead: int = AHEAD
    pins: bool = False
    pin_device: str | None = None
    turn: threading.Lock | None = None
    """The loader's lock, held while its stage runs."""

    def transfer(self, seed: int, claim: Claim = list, took: Took = ignore) -> Transfer | None:
        """Returns a new transfer for the batches of one stream, or None if the batches stay in the pool. `seed` is the
        epoch's seed."""
        stage = None if self.stage is None else StageRunner(self.stage, seed, took, self.turn)
        if self.device is not None:
            return ToDevice(self.device, stage, claim)
        pinning = Pinning(self.pin_device) if self.pins else None
        return pinning if stage is None else OnHost(stage, pinning)


def seed_of(epoch_seed: int, digest: int) -> int:
    """Returns the seed of a batch's generator. The seed depends only on the epoch and the batch's content."""
    words = epoch_seed.to_bytes(8, "little") + digest.to_bytes(8, "little")
    return int.from_bytes(blake2b(words, digest_size=8, person=b"devicestage").digest(), "little") >> 1
