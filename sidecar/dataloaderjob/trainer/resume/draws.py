"""How many numbers were drawn from a Mersenne Twister between two of its states.

A script draws from the process's generators after it has loaded a loader's state, as it makes a model, or it restores
them by a checkpoint of its own. Both leave a generator in another state; only drawing leads there from the one before.
torch, Python and numpy have one kind of generator, MT19937: 624 words, replaced all at once, and a position in them.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

WORDS = 624
LIMIT = 1 << 26
"""So many numbers are looked through, 0.3 s: as many as a model of some 60 million parameters draws."""
_BLOCKS = 1024
_TORCHS = np.dtype(
    [("seed", "<u8"), ("left", "<i4"), ("seeded", "<i4"), ("next", "<u8"), ("words", "<u8", WORDS)]
)
"""The beginning of what `torch.Generator.get_state()` returns: its CPU generator's own layout."""
Words = npt.NDArray[np.uint32]


class Twister(NamedTuple):
    """A state."""

    words: Words
    position: int
    """Words used up, 624 when the next draw replaces them all."""

    @classmethod
    def of_torch(cls, data: bytes) -> Twister:
        """data: what `torch.Generator.get_state()` holds."""
        found = np.frombuffer(data, _TORCHS, count=1)[0]
        return cls(found["words"].astype(np.uint32), WORDS + 1 - int(found["left"]))

    def into_torchs(self, data: bytes) -> bytes:
        """`data`, what `torch.Generator.get_state()` holds, with this state in it."""
        changed = bytearray(data)
        found = np.frombuffer(changed, _TORCHS, count=1)
        found["words"], found["left"], found["next"] = self.words, WORDS + 1 - self.position, self.position
        return bytes(changed)


def drawn_between(before: Twister, after: Twister, limit: int = LIMIT) -> int | None:
    """Numbers of 32 bits that were drawn from `before` on; None if `after` is not reached by `limit` of them."""
    if np.array_equal(before.words, after.words):
        count = after.position - before.position
        return count if 0 <= count <= limit else None
    wanted = _outputs(after.words)
    generator = np.random.MT19937()
    # Its stubs want a key of one kind; any array of whole numbers is taken.
    generator.state = {"bit_generator": "MT19937", "state": {"key": before.words, "pos": WORDS}}
    for first in range(0, limit // WORDS + 1, _BLOCKS):
        made = generator.random_raw(WORDS * _BLOCKS).reshape(_BLOCKS, WORDS)
        for block in np.flatnonzero(made[:, 0] == wanted[0]).tolist():
            if np.array_equal(made[block], wanted):
                count = WORDS - before.position + (first + block) * WORDS + after.position
                return count if count <= limit else None
    return None


def stepped_back(before: Twister, after: Twister, count: int) -> Twister | None:
    """The state `count` numbers before `after`; None where it does not lie on the way there from `before`."""
    drawn = drawn_between(before, after)
    if drawn is None or drawn < count:
        return None
    generator = np.random.MT19937()
    generator.state = {"bit_generator": "MT19937", "state": {"key": before.words, "pos": before.position}}
    generator.random_raw(drawn - count, output=False)
    found: Any = generator.state["state"]
    return Twister(found["key"], int(found["pos"]))


def _outputs(words: Words) -> npt.NDArray[np.uint64]:
    """What is drawn from a block of words: MT19937's tempering."""
    y = words.astype(np.uint64)
    y ^= y >> np.uint64(11)
    y ^= (y << np.uint64(7)) & np.uint64(0x9D2C5680)
    y ^= (y << np.uint64(15)) & np.uint64(0xEFC60000)
    return y ^ (y >> np.uint64(18))
