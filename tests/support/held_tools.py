"""A module of the user's with generators of its own."""

from __future__ import annotations

import random
from types import SimpleNamespace

import numpy as np

rng = np.random.default_rng(7)
CONFIG = SimpleNamespace(rng=random.Random(5))


def jitter() -> float:
    return rng.random()
