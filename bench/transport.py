"""B2: bytes from another process over the network stack into a warm pool. All parties use the same pool; no torch.

The pool is shared memory of fixed slots, written once before the measurement. A receiver puts batch i into slot i. The
checks read the slots outside the measured time. The sender rotates known contents.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from bench import machine
from bench.meter import Meter
from bench.work import KINDS, Contents, Proof, content, size_name


@dataclass(frozen=True, slots=True)
class Case:
    nbytes: int
    seconds: float
    """Least measured time."""
    smoke: bool = False

    @property
    def slots(self) -> int:
        return 8 if self.nbytes > 4e6 else 64

    @property
    def depth(self) -> int:
        """Number of batches requested ahead, for peers that pull."""
        return 4 if self.nbytes > 4e6 else 32

    @property
    def name(self) -> str:
        return size_name(self.nbytes)


class Slots:
    """`slots` writable uint8 arrays of `nbytes` each in one shared mapping, all pages present."""

    def __init__(self, case: Case) -> None:
        self._map = mmap.mmap(-1, case.slots * case.nbytes)
        whole = np.frombuffer(self._map, np.uint8)
        whole[:] = 255
        self.slots = np.split(whole, case.slots)


def bodies(nbytes: int) -> list[np.ndarray]:
    """Returns the bodies that a sender sends in turn: body i is bodies[i % KINDS]."""
    return [content(kind, nbytes) for kind in range(KINDS)]


def endless(nbytes: int) -> Iterator[np.ndarray]:
    made = bodies(nbytes)
    while True:
        yield from made


def measure(receive: Callable[[np.ndarray], None], case: Case, *, also: Sequence[int] = ()) -> dict[str, Any]:
    """Returns the figures of `receive`, which puts the next batch into the slot that it is given.

    `also`: further processes that belong to the receiver.
    """
    steps = Steps(case, also)
    for slot in steps:
        receive(slot)
    return steps.found


class Steps:
    """Yields the slots to fill, for `case.seconds` and whole turns of the pool, and then sets `found`.

    It is an iterator instead of a loop around a callback, so that a coroutine can fill the slots, too.
    """

    found: dict[str, Any]

    def __init__(self, case: Case, also: Sequence[int] = ()) -> None:
        self._case, self._also = case, also

    def __iter__(self) -> Iterator[np.ndarray]:
        case = self._case
        pool, contents, proof, meter = Slots(case), Contents(case.nbytes, 1), Proof(), Meter()
        warm_turns = 1 if case.smoke else 2
        yield from pool.slots * warm_turns
        number = first = warm_turns * case.slots
        turn = 0
        before, elsewhere = machine.snapshot(), machine.cpu_ns(self._also)
        meter.start()
        while meter.wall_s < case.seconds:
            yield from pool.slots
            meter.pause()
            if case.nbytes > 4e6 or turn % 8 == 0:
                for i, slot in enumerate(pool.slots):
                    proof.add(number + i, [slot], contents.expected(number + i, stamped=False))
                    slot[-64:] = 255  # so that the next turn must write again
            number += case.slots
            turn += 1
            meter.resume()
        cpu_s, wall_s = meter.stop()
        cpu_s += (machine.cpu_ns(self._also) - elsewhere) / 1e9
        load = machine.between(before, machine.snapshot())
        self.found = result(case, number - first, cpu_s, wall_s, load, proof)


def result(
    case: Case, count: int, cpu_s: float, wall_s: float, load: machine.Load, proof: Proof
) -> dict[str, Any]:
    """Returns the figures of B2 from the receiver's CPU seconds for `count` batches."""
    nbytes = count * case.nbytes
    figures = {
        "rx_cpu_s_per_gb": cpu_s / nbytes * 1e9,
        "rx_us_per_batch": 1e6 * cpu_s / count,
        "batches_per_core_s": count / cpu_s,
        "batches_per_s": count / wall_s,
        "gb_per_s": nbytes / wall_s / 1e9,
        "machine_busy_share": load.busy_share,
    }
    return {"figures": {case.name: figures}, "proof": proof.as_json()}
