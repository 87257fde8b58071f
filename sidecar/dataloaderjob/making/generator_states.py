"""Checks of generator states that came from a checkpoint or from a feeder. Pure.

torch and numpy accept a position beyond the last word of a state. They then draw from the memory after the state, or
crash. Each function returns the value that it was given, or raises ValueError if the value is invalid.
"""

from __future__ import annotations

import struct
from types import NoneType
from typing import Any

import numpy as np
import torch

WORDS = 624
"""Number of words in the state of MT19937, the generator that torch, Python and numpy use."""
_PHILOX_WORDS = 4
"""Number of words in the buffer of numpy's Philox."""
_TORCHS = struct.Struct("<QiiQ")
"""Beginning of the state of torch's CPU generator: seed, draws left + 1, whether it was seeded, the next position."""
_KEYS = ("uint32", "uint64")
_MAX_KEY = 4096
"""Maximum number of words in a state's array. numpy's own generators have up to 624."""


def checked_position(position: Any, most: int = WORDS) -> int:
    """Checks the number of words that a generator has used."""
    if type(position) is not int or not 0 <= position <= most:
        raise ValueError(f"expected a position from 0 to {most}, got {position!r}")
    return position


def checked_torch(state: Any) -> torch.Tensor:
    """Checks a state of torch's CPU generator. The generator reads the words that are left, from the next position
    on."""
    if type(state) is not torch.Tensor or state.dtype != torch.uint8 or state.ndim != 1:
        raise ValueError(f"expected the state of torch's generator, got {type(state).__name__}")
    data = state.numpy().tobytes()
    if len(data) < _TORCHS.size:
        raise ValueError(f"expected the state of torch's generator, got {len(data)} bytes")
    _, left, _, following = _TORCHS.unpack_from(data)
    if not 1 <= left <= WORDS or following > WORDS + 1 - left:
        raise ValueError(
            f"expected at most {WORDS + 1} used and unused words, got {following} used and {left} unused ones"
        )
    return state


def checked_python(state: Any) -> tuple[Any, ...]:
    """Checks a state of Python's generator, whose words and position Python checks itself."""
    if type(state) is not tuple or len(state) != 3 or type(state[2]) not in (float, NoneType):
        raise ValueError(f"expected the state of Python's generator, got {type(state).__name__}")
    return state


def checked_numpy(state: Any) -> Any:
    """Checks a state of numpy's generators: a legacy tuple, or a dict."""
    if type(state) is tuple and len(state) == 5:
        kind, words, position, _, gauss = state
        is_legacy = kind == "MT19937" and type(words) is np.ndarray and type(gauss) is float
        if not is_legacy or words.shape != (WORDS,) or words.dtype != np.uint32:
            raise ValueError(f"expected {WORDS} words of MT19937, got something else")
        checked_position(position)
        return state
    if type(state) is not dict:
        raise ValueError(f"expected the state of numpy's generator, got {type(state).__name__}")
    inner = state.get("state")
    if type(inner) not in (dict, int):
        raise ValueError(f"expected the state of numpy's generator, got a {type(inner).__name__} in it")
    if type(inner) is dict and "pos" in inner:
        checked_position(inner["pos"])
    if "buffer_pos" in state:
        checked_position(state["buffer_pos"], _PHILOX_WORDS)
    return state


def numpys_words(words: Any, dtype: Any) -> np.ndarray[Any, Any]:
    """Makes the array of words in a state of numpy's generators. Refuses other dtypes, which could take any amount of
    memory."""
    if dtype not in _KEYS or type(words) is not list or len(words) > _MAX_KEY:
        raise ValueError(
            f"expected at most {_MAX_KEY} words of {' or '.join(_KEYS)}, got an array of {dtype!r:.40}"
        )
    if not all(type(word) is int for word in words):
        raise ValueError("the words of a generator's state must be whole numbers")
    return np.array(words, dtype)
