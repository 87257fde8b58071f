"""Counting the numbers that were drawn from a Mersenne Twister between two of its states.

A script that has loaded a loader's state may draw from the process's generators, for example to initialize a model. It
may also restore them from its own checkpoint. Both change a generator's state, but only draws advance the generator
from the old state to the new one. torch, Python and numpy all use MT19937. Its state is 624 words, which are replaced
all at once, and a position in them.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from dataloaderjob.making.generator_states import WORDS, checked_position

LIMIT = 1 << 26
"""Maximum number of draws to search through, which takes 0.3 s. Initializing a model with some 60 million parameters
takes about this many draws."""
_BLOCKS = 1024
_TORCHS = np.dtype(
    [("seed", "<u8"), ("left", "<i4"), ("seeded", "<i4"), ("next", "<u8"), ("words", "<u8", WORDS)]
)
"""The first fields of the result of `torch.Generator.get_state()`, in the layout of torch's CPU generator."""
Words = npt.NDArray[np.uint32]


class Twister(NamedTuple):
    """A state of an MT19937 generator."""

    words: Words
    position: int
    """Number of words already used; 624 if the next draw replaces all of them."""

    @classmethod
    def of_torch(cls, data: bytes) -> Twister:
        """Returns the state in `data`, which is the content of `torch.Generator.get_state()`."""
        found = np.frombuffer(data, _TORCHS, count=1)[0]
        return cls(found["words"].astype(np.uint32), checked_position(WORDS + 1 - int(found["left"])))

    def into_torchs(self, data: bytes) -> bytes:
        """Returns a copy of `data`, the content of `torch.Generator.get_state()`, in which this state replaces the old
        one."""
        changed = bytearray(data)
        found = np.frombuffer(changed, _TORCHS, count=1)
        found["words"], found["left"], found["next"] = self.words, WORDS + 1 - self.position, self.position
        return bytes(changed)


def drawn_between(before: Twister, after: Twister, limit: int = LIMIT) -> int | None:
    """Returns the number of 32-bit draws between `before` and `after`. Returns None if the number exceeds `limit`, or
    if draws do not lead to `after`."""
    if np.array_equal(before.words, after.words):
        count = after.position - before.position
        return count if 0 <= count <= limit else None
    wanted = _outputs(after.words)
    generator = np.random.MT19937()
    # numpy's stubs require one type of key, but any array of integers is accepted.
    generator.state = {"bit_generator": "MT19937", "state": {"key": before.words, "pos": WORDS}}
    for first in range(0, limit // WORDS + 1, _BLOCKS):
        made = generator.random_raw(WORDS * _BLOCKS).reshape(_BLOCKS, WORDS)
        for block in np.flatnonzero(made[:, 0] == wanted[0]).tolist():
            if np.array_equal(made[block], wanted):
                count = WORDS - before.position + (first + block) * WORDS + after.position
                return count if count <= limit else None
    return None


def stepped_back(before: Twister, after: Twister, count: int) -> Twister | None:
    """Returns the state that is `count` draws before `after`, or None if that state is not between `before` and
    `after`."""
    drawn = drawn_between(before, after)
    if drawn is None or drawn < count:
        return None
    generator = np.random.MT19937()
    generator.state = {"bit_generator": "MT19937", "state": {"key": before.words, "pos": before.position}}
    generator.random_raw(drawn - count, output=False)
    found: Any = generator.state["state"]
    return Twister(found["key"], int(found["pos"]))


def _outputs(words: Words) -> npt.NDArray[np.uint64]:
    """Returns the numbers that MT19937 outputs for a block of words. It computes them by tempering the words."""
    y = words.astype(np.uint64)
    y ^= y >> np.uint64(11)
    y ^= (y << np.uint64(7)) & np.uint64(0x9D2C5680)
    y ^= (y << np.uint64(15)) & np.uint64(0xEFC60000)
    return y ^ (y >> np.uint64(18))
