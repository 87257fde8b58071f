"""How batches get from the pool to where the trainer wants them.

A thread sends, the trainer accepts. What a copy reads is held until the copy's event has come: a device reads memory
long after the call that asked for it, and the pool gives a place to another batch as soon as nobody holds it.
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
from dataloaderjob.trainer.device.trees import like, mapped, plain_of, with_tensors
from dataloaderjob.trainer.session.pool import Bytes, Region

AHEAD = 2
"""Batches that were sent, or are being sent, before the trainer asks for them."""
LOOK_S = 0.002
"""Interval between two looks at copies that are on their way, while no batch is asked for."""
DeviceStage = Callable[[Any, torch.Generator], Any]
"""The user's: (batch, generator) to batch, in the trainer's process."""
Claim = Callable[[], list[Region]]
"""Gives regions that a device may read by itself, each once."""
Which = Callable[[], str]
"""Words for a batch, such as "batch 3, indices [6, 7]"."""
Took = Callable[[int], None]
"""Is told how long something took, in nanoseconds."""


def ignore(_: int) -> None:
    """Nobody wants to know."""


class Transfer(Protocol):
    """Sends batches on. `begin`, `send`, `let_go` and `end` are called by one thread, `accept` and `follow` by the
    trainer's."""

    def begin(self) -> None:
        """Prepares the thread."""

    def follow(self) -> None:
        """Has what is sent from now on come behind what the trainer's stream was asked for until now."""

    def send(self, batch: Any, digest: int, which: Which, lent: Bytes | None = None) -> Any:
        """Begins to send a batch. Returns what `accept` needs. `which` names it in a message; `lent` is its place in
        the pool, if it has one."""

    def accept(self, sent: Any) -> Any:
        """The batch, where the trainer wants it."""

    def let_go(self) -> float | None:
        """Lets go of what has arrived. Returns the seconds until it is to be called again; None: nothing is held."""

    def end(self) -> None:
        """Waits until nothing is on its way, and lets go of it."""


class _AtOnce:
    """What has arrived when `send` returns."""

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
    """`pin_memory=True`: copies into memory that a device can read by itself."""

    def __init__(self, device: str | None) -> None:
        self._device, self._index = device, torch.accelerator.current_device_index()

    def begin(self) -> None:
        torch.accelerator.set_device_index(self._index)

    def send(self, batch: Any, digest: int, which: Which, lent: Bytes | None = None) -> Any:  # noqa: ARG002
        return _utils.pin_memory.pin_memory(batch, self._device)  # type: ignore[no-untyped-call]


class Stage:
    """The user's device_stage, with a generator for each batch."""

    def __init__(
        self, function: DeviceStage, seed: int, took: Took = ignore, turn: threading.Lock | None = None
    ) -> None:
        """`seed`: the epoch's. `took` is told the time of each batch. `turn` is held while it runs, since the thread of
        an iterator that was given up may be in its last call."""
        self._function, self._seed, self._took = function, seed, took
        self._turn = turn or threading.Lock()

    def __call__(self, batch: Any, digest: int, which: Which, device: Device | None) -> Any:
        """Raises what it raises, with a note of which batch it was; a StopIteration as RuntimeError, since it would end
        the epoch."""
        seed = seed_of(self._seed, digest)
        with self._turn:
            began = time.perf_counter_ns()
            try:
                generator = torch.Generator().manual_seed(seed) if device is None else device.generator(seed)
                with torch.no_grad(), _one_thread():
                    made = self._function(batch, generator)
                if made is None:
                    raise TypeError("device_stage returned None, where the batch is needed that it makes")
                return made
            except StopIteration as exc:
                raise RuntimeError(f"device_stage raised StopIteration for {which()}") from exc
            except Exception as exc:
                exc.add_note(f"raised by device_stage, in the trainer's process, for {which()}")
                raise
            finally:
                self._took(time.perf_counter_ns() - began)


class OnHost(_AtOnce):
    """`device="cpu"` with a stage, after which batches may be pinned."""

    def __init__(self, stage: Stage, pinning: Pinning | None) -> None:
        self._stage, self._pinning = stage, pinning

    def begin(self) -> None:
        if self._pinning is not None:
            self._pinning.begin()

    def send(self, batch: Any, digest: int, which: Which, lent: Bytes | None = None) -> Any:  # noqa: ARG002
        made = self._stage(batch, digest, which, None)
        return made if self._pinning is None else self._pinning.send(made, digest, which)


@dataclass(frozen=True, slots=True)
class Sent:
    """A batch whose copies were asked for."""

    batch: Any
    tensors: list[torch.Tensor]
    event: Any


class _Copies:
    """What was made of one batch on the device, and from what."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self.sources: list[torch.Tensor] = []
        self.tensors: list[torch.Tensor] = []
        self._made: dict[int, torch.Tensor] = {}
        """Copies by the `id` of what was copied: what one batch has twice is one tensor there, too."""

    def of_leaf(self, leaf: Any) -> Any:
        return with_tensors(leaf, self.of)

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        if (known := self._made.get(id(tensor))) is not None:
            return known
        plain = plain_of(tensor)
        self.sources.append(tensor)
        self.tensors.append(made := self._device.copy(plain))
        self._made[id(tensor)] = made  # before its attributes, which may refer to it
        made = made if plain is tensor else like(tensor, made, self.of)
        made = made.requires_grad_() if tensor.requires_grad else made
        self._made[id(tensor)] = self._made[id(made)] = made
        return made


class ToDevice:
    """`device=`: copies on a stream of its own, after the user's stage there."""

    def __init__(self, device: Device, stage: Stage | None, claim: Claim = list) -> None:
        """The trainer's thread makes it: what its stream was asked for is done first."""
        self._device, self._stage, self._claim = device, stage, claim
        self._is_registering = True
        self._held: deque[tuple[Any, Any]] = deque()
        """Events of copies, and what those read."""
        self.follow()

    def begin(self) -> None:
        self._device.begin()

    def follow(self) -> None:
        self._device.follow()

    def send(self, batch: Any, digest: int, which: Which, lent: Bytes | None = None) -> Sent:
        """Raises what the stage raises, and with a note what the device does. What copies read is held, not the batch
        alone: a stage may have put other things into it."""
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
        """Has the driver know new regions of the pool, until it takes one no more."""
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
        exc.add_note(f"raised on the way to the device, for {which()}")
        raise


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """Runs torch with one thread: sums differ with the number of threads, and with them a batch would, too."""
    threads = torch.get_num_threads()
    if threads == 1:  # to set it would be for all threads to come
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@dataclass(frozen=True, slots=True)
class Way:
    """Where a loader's batches go."""

    device: Device | None = None
    """None: the memory of this process."""
    stage: DeviceStage | None = None
    ahead: int = AHEAD
    pins: bool = False
    pin_device: str | None = None
    turn: threading.Lock | None = None
    """The loader's, held while its stage runs."""

    def transfer(self, seed: int, claim: Claim = list, took: Took = ignore) -> Transfer | None:
        """A new one, for the batches of one stream; None: they stay where they are. `seed`: the epoch's."""
        stage = None if self.stage is None else Stage(self.stage, seed, took, self.turn)
        if self.device is not None:
            return ToDevice(self.device, stage, claim)
        pinning = Pinning(self.pin_device) if self.pins else None
        return pinning if stage is None else OnHost(stage, pinning)


def seed_of(epoch_seed: int, digest: int) -> int:
    """The seed of a batch's generator: of the epoch, and of what the batch is, so of nothing that timing changes."""
    words = epoch_seed.to_bytes(8, "little") + digest.to_bytes(8, "little")
    return int.from_bytes(blake2b(words, digest_size=8, person=b"devicestage").digest(), "little") >> 1
