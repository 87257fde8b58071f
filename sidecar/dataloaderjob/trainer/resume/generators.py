"""States, as text, of the generators that a sampler may draw from: a loader's own, torch's, Python's and numpy's.

A loader's own generators are its `generator`, and torch, numpy or Python generators in attributes of its samplers.
"""

from __future__ import annotations

import copy
import json
import random
import struct
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from dataloaderjob.making.generator_states import (
    WORDS,
    checked_numpy,
    checked_position,
    checked_python,
    checked_torch,
    numpys_words,
)
from dataloaderjob.trainer.resume.draws import Twister, drawn_between, stepped_back
from dataloaderjob.trainer.resume.sampling import chain
from dataloaderjob.trainer.session.spec import EpochSpec

DEFAULT, PYTHON, NUMPY = "default", "random", "numpy"
"""Names of the process's generators. A loader's own are named by their paths."""
_KNOWN = (
    RandomSampler,
    SequentialSampler,
    DistributedSampler,
    WeightedRandomSampler,
    SubsetRandomSampler,
    BatchSampler,
)
"""Samplers that draw from torch's generators only."""
_PYTHON = struct.Struct("<625I?d")
_NUMPY = struct.Struct("<I?d")
_last_default = b"", ""
"""Last known state of torch's default generator, and its hex text. Formatting the text takes 5 µs. The state changes
only when something draws on the CPU."""
_SEED_WORDS = 2
"""Number of 32-bit draws for an iterator's base seed."""
_puts = 0
"""Number of times that `put_shared` has set generators of the process."""
Own = torch.Generator | np.random.Generator | np.random.RandomState | random.Random
"""A generator of a loader or a sampler."""
_ARRAY = "array"


def generators_of(spec: EpochSpec) -> dict[str, Own]:
    """Returns the loader's own generators by path. Each is listed once."""
    found: dict[str, Own] = {}
    owners: list[tuple[str, Any]] = [("loader", spec)]
    for name in ("batch_sampler", "sampler"):
        owners += [(f"{name}.{path}".rstrip("."), one) for path, one in chain(getattr(spec, name))]
    for path, owner in owners:
        names = ["generator"] if owner is spec else [*getattr(owner, "__dict__", ()), "generator"]
        for name in names:
            generator = getattr(owner, name, None)
            if isinstance(generator, random.SystemRandom) or not isinstance(generator, Own):
                continue
            if all(generator is not known for known in found.values()):
                found[f"{path}.{name}"] = generator
    return found


def draws_elsewhere(sampler: Any) -> bool:
    """Returns True if a sampler may draw from generators other than torch's."""
    return not all(type(one) in _KNOWN for _, one in chain(sampler))


def all_now(own: Mapping[str, Own], *, shared: bool, others: bool) -> dict[str, str]:
    """Returns the states of all generators that a sampler may draw from. `shared` adds torch's default generator and,
    with `others`, those of Python and numpy."""
    found = {path: _read(generator) for path, generator in own.items()}
    return {**found, **now(others=others)} if shared else found


def now(*, others: bool) -> dict[str, str]:
    """Returns the state of torch's default generator (10 KB) and, with `others`, those of Python and numpy."""
    global _last_default
    known, text = _last_default
    data = torch.default_generator.get_state().numpy().tobytes()
    if data != known:
        text = data.hex()
        _last_default = data, text
    return {DEFAULT: text, **_python_state()} if others else {DEFAULT: text}


class Moment:
    """The process's generators at one moment, to detect later changes to them."""

    def __init__(self) -> None:
        self._text, self._puts = now(others=True), _puts

    def set_since(self, saved: Mapping[str, str]) -> frozenset[str]:
        """Returns the names of the generators in `saved` that have been set since this moment. A mere draw does not
        count.

        `saved` contains the generators' states from an earlier run. A generator that the script restored to about that
        point is ahead of its saved state by at most the number of draws since this moment.
        """
        changed = {
            name: text
            for name, text in now(others=True).items()
            if name in saved and text != self._text.get(name)
        }
        if (
            self._puts != _puts
        ):  # by another loader's state: this loader draws after it, as in the earlier run
            return frozenset(changed)
        return frozenset(
            name for name, text in changed.items() if not self._is_drawn(name, text, saved[name])
        )

    def _is_drawn(self, name: str, text: str, saved: str) -> bool:
        before, after = self._text.get(name), _twister(name, text)
        drawn = None if before is None else drawn_between(_twister(name, before), after)
        if drawn is None:
            return False
        return drawn_between(_twister(name, saved), after, limit=drawn) is None


def before_a_seed(saved: str, found: str) -> str:
    """Returns the state of torch's default generator before a torch iterator drew its seed. `found` is the state after
    that draw.

    `saved` is an earlier state. Returns `found` if draws do not lead from `saved` to `found`.
    """
    data = bytes.fromhex(found)
    earlier = stepped_back(_twister(DEFAULT, saved), Twister.of_torch(data), _SEED_WORDS)
    return found if earlier is None else earlier.into_torchs(data).hex()


def try_state(own: Mapping[str, Own], name: str, text: str) -> None:
    """Raises an exception unless the generator of this name accepts the state in `text`. Tries the state on a new
    generator or on a copy."""
    if name == DEFAULT:
        torch.Generator().set_state(_tensor(text))
    elif name == PYTHON:
        random.Random().setstate(_of_python(text))  # noqa: S311  tries a state
    elif name == NUMPY:
        np.random.RandomState().set_state(_of_numpy(text))
    elif name in own:
        one = own[name]
        _write(torch.Generator(one.device) if isinstance(one, torch.Generator) else copy.deepcopy(one), text)


def put_own(own: Mapping[str, Own], states: Mapping[str, str]) -> None:
    """Sets a loader's own generators, if `states` contains them."""
    for path, generator in own.items():
        if path in states:
            _write(generator, states[path])


def put_shared(states: Mapping[str, str]) -> None:
    """Sets the process's generators, if `states` contains them."""
    global _puts
    _puts += bool(states)
    if DEFAULT in states:
        torch.default_generator.set_state(_tensor(states[DEFAULT]))
    if PYTHON in states:
        random.setstate(_of_python(states[PYTHON]))
    if NUMPY in states:
        np.random.set_state(_of_numpy(states[NUMPY]))


def _of_python(text: str) -> tuple[int, tuple[int, ...], float | None]:
    *words, has_gauss, gauss = _PYTHON.unpack(bytes.fromhex(text))
    return 3, tuple(words), gauss if has_gauss else None


def _of_numpy(text: str) -> tuple[str, np.ndarray[Any, Any], int, int, float]:
    data = bytes.fromhex(text)
    position, has_gauss, gauss = _NUMPY.unpack(data[-_NUMPY.size :])
    state = "MT19937", np.frombuffer(data[: -_NUMPY.size], np.uint32), position, int(has_gauss), gauss
    checked_numpy(state)
    return state


def _python_state() -> dict[str, str]:
    _, words, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    found = {PYTHON: _PYTHON.pack(*words, gauss is not None, gauss or 0.0).hex()}
    if kind == "MT19937" and isinstance(keys, np.ndarray):
        found[NUMPY] = (keys.tobytes() + _NUMPY.pack(position, bool(has_gauss), cached)).hex()
    return found


def _read(generator: Own) -> str:
    if isinstance(generator, torch.Generator):
        return generator.get_state().numpy().tobytes().hex()
    if isinstance(generator, random.Random):
        return json.dumps(generator.getstate())
    if isinstance(generator, np.random.RandomState):
        state: Any = generator.get_state(legacy=False)
    else:
        state = generator.bit_generator.state
    return json.dumps(state, default=lambda array: {_ARRAY: array.tolist(), "dtype": str(array.dtype)})


def _write(generator: Own, text: str) -> None:
    if isinstance(generator, torch.Generator):
        generator.set_state(_tensor(text, is_of_cpu=generator.device.type == "cpu"))
        return
    if isinstance(generator, random.Random):
        version, words, gauss = json.loads(text)
        generator.setstate(checked_python((version, tuple(words), gauss)))
        return
    state = json.loads(text, object_hook=lambda d: numpys_words(d[_ARRAY], d["dtype"]) if _ARRAY in d else d)
    checked_numpy(state)
    if isinstance(generator, np.random.RandomState):
        generator.set_state(state)
    else:
        generator.bit_generator.state = state


def _twister(name: str, text: str) -> Twister:
    data = bytes.fromhex(text)
    if name == DEFAULT:
        return Twister.of_torch(data)
    if name == PYTHON:
        words = np.frombuffer(data, np.uint32, WORDS + 1)
        return Twister(words[:WORDS], checked_position(int(words[WORDS])))
    position = checked_position(_NUMPY.unpack(data[-_NUMPY.size :])[0])
    return Twister(np.frombuffer(data, np.uint32, WORDS), position)


def _tensor(text: str, *, is_of_cpu: bool = True) -> torch.Tensor:
    """Returns the state of a torch generator as a tensor. On devices other than the CPU, the state is a seed and an
    offset."""
    state = torch.frombuffer(bytearray.fromhex(text), dtype=torch.uint8)
    return checked_torch(state) if is_of_cpu else state
