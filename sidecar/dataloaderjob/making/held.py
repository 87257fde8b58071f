"""Generators of random numbers that a dataset and what makes its batches hold: in an attribute, a closure, a global.

A transform with `np.random.RandomState(0)` would draw from a copy in each process that makes samples. Here each sample
has seeds of its own, as those of the process's three generators (`fetcher`). They follow from the generator as the
trainer had it at iter(), from how many iterators it has had before (`Ticket.draws`), and from the sample's place and
key; not from the epoch's base seed, so that a generator that the user has seeded draws the same in each run. Whoever
makes the sample has them.

What `worker_init_fn` has seeded or replaced follows from the epoch's base seed, of which the user took it.
"""

from __future__ import annotations

import functools
import json
import random
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from hashlib import blake2b
from itertools import islice
from typing import Any, TypeAlias

import numpy as np
import torch

from dataloaderjob.shipping import modules, user_code
from dataloaderjob.shipping.reducers import OF_PROCESS

Held: TypeAlias = np.random.RandomState | np.random.BitGenerator | random.Random | torch.Generator
"""One that is found. A `np.random.Generator` is known by its BitGenerator, which two may share."""
MOST_OBJECTS = 100_000
"""Objects that are looked at. Transforms lie near the dataset, and are found first."""
MOST_ITEMS = 1_000
"""Items of one container that are looked at: longer ones are data."""
_MASK, _INT64 = (1 << 64) - 1, (1 << 63) - 1
_MIX = 0x9E3779B97F4A7C15
_BLOCK = 624
"""Numbers that a Mersenne twister makes at a time."""
_MARK = 1 << 41
_FLAT: Any = (
    str, bytes, bytearray, int, float, complex, bool, type(None), type(Ellipsis), range, slice, torch.Tensor,
    np.ndarray, np.generic, np.dtype, torch.dtype, torch.device, types.ModuleType, types.CodeType, types.GeneratorType,
)  # fmt: skip
_ITEMS: tuple[Any, ...] = (dict, list, tuple, set, frozenset, deque)


def find(*roots: Any) -> list[tuple[Held, str]]:
    """The generators that these reach, each once, in an order that depends on them alone.

    The text is empty but for one of a library's class, which does not travel with its objects: where it is.
    """
    pending: deque[Any] = deque(roots)
    seen: dict[int, Any] = {}
    found: list[tuple[Held, str]] = []
    while pending and len(seen) < MOST_OBJECTS:
        item = pending.popleft()
        kind = type(item)  # not isinstance, which asks proxies of other objects what they are
        if issubclass(kind, _FLAT) or id(item) in seen or id(item) in OF_PROCESS:
            continue
        seen[id(item)] = item
        if issubclass(kind, np.random.Generator):
            pending.appendleft(item.bit_generator)
        elif issubclass(kind, Held):
            if not issubclass(kind, random.SystemRandom):
                found.append((item, ""))
        else:
            try:
                if issubclass(kind, type) and not user_code.is_users(item):
                    new = [(where, one) for where, one in _of_class(item) if id(one) not in seen]
                    seen |= {id(one): one for _, one in new}
                    found += [(one, where) for where, one in new]
                else:
                    pending.extend(_parts(item, kind))
            except Exception:  # noqa: S112  a dict that another thread changes, an object that is half made
                continue
    return found


def _of_class(cls: type) -> list[tuple[str, Held]]:
    """Where they are, and the generators of a library's class, each once."""
    found: dict[int, tuple[str, Held]] = {}
    for name, value in sorted(vars(cls).items()):
        one = value.bit_generator if issubclass(type(value), np.random.Generator) else value
        if issubclass(type(one), Held) and id(one) not in OF_PROCESS:
            found.setdefault(id(one), (f"{user_code.full_name(cls)}.{name}", one))
    return list(found.values())


def _parts(item: Any, kind: type) -> Iterable[Any]:
    """What an object is made of, as far as pickling would take it along. None of its own code runs."""
    if kind is types.FunctionType:
        return _of_function(item)
    if issubclass(kind, types.MethodType | types.BuiltinMethodType):
        return item.__self__, getattr(item, "__func__", None)
    if issubclass(kind, staticmethod | classmethod):
        return (item.__func__,)
    if issubclass(kind, property):
        return item.fget, item.fset
    if issubclass(kind, functools.partial):
        return item.func, item.args, item.keywords, vars(item)
    if issubclass(kind, type):
        return *vars(item).values(), *item.__bases__
    parts = _items(item, kind)
    if kind.__dictoffset__:
        own = object.__getattribute__(item, "__dict__")
        if type(own) is dict and own is not item:
            parts += list(own.values())
    parts += _of_slots(item, kind)
    parts += [cls for cls in kind.__mro__ if cls is not object]
    return parts


def _items(item: Any, kind: type) -> list[Any]:
    """The first items of a container, by its built-in type's own methods."""
    if kind is types.MappingProxyType:
        return [part for pair in islice(item.items(), MOST_ITEMS) for part in pair]
    for base in _ITEMS:
        if issubclass(kind, base):
            if base is dict:
                return [part for pair in islice(dict.items(item), MOST_ITEMS) for part in pair]
            return list(islice(base.__iter__(item), MOST_ITEMS))
    return []


def _of_slots(item: Any, kind: type) -> list[Any]:
    found = []
    for cls in kind.__mro__:
        for slot in [value for value in vars(cls).values() if type(value) is types.MemberDescriptorType]:
            try:
                found.append(slot.__get__(item))
            except AttributeError:  # not set
                continue
    return found


def _of_function(function: types.FunctionType) -> list[Any]:
    parts: list[Any] = [function.__defaults__, function.__kwdefaults__, vars(function)]
    for cell in function.__closure__ or ():
        try:
            parts.append(cell.cell_contents)
        except ValueError:  # empty
            continue
    own = function.__globals__
    if modules.is_users(own):
        reached = [own[name] for name in user_code.globals_used(function.__code__) if name in own]
        parts += [*reached, *_of_modules(function.__code__, reached)]
    return parts


def _of_modules(code: types.CodeType, reached: Iterable[Any]) -> list[Any]:
    """What code takes of user modules that it reaches, as in `import tools; tools.rng`."""
    found = [vars(m) for m in reached if isinstance(m, types.ModuleType) and modules.is_users(vars(m))]
    names = set(code.co_names)
    for const in code.co_consts:
        if isinstance(const, types.CodeType):
            names |= set(const.co_names)
    return [own[name] for own in found for name in sorted(names) if name in own]


def state_of(one: Held) -> int:
    """A number for a generator's state, the same in every process; below 2**64."""
    if isinstance(one, torch.Generator):
        data = one.get_state().numpy().tobytes()
    elif isinstance(one, random.Random):
        data = repr(one.getstate()).encode()
    else:
        data = json.dumps(_read(one), default=_plain, sort_keys=True).encode()
    return int.from_bytes(blake2b(data, digest_size=8).digest(), "little")


def _plain(value: Any) -> Any:
    return value.tobytes().hex() if isinstance(value, np.ndarray) else value.item()


def _seeding(one: Held) -> Callable[[int], Any]:
    """What seeds a generator from a number below 2**64."""
    if isinstance(one, torch.Generator):
        return lambda seed: one.manual_seed(seed & _INT64)
    if isinstance(one, random.Random):
        return functools.partial(random.Random.seed, one)
    if isinstance(one, np.random.RandomState):
        bits = one._bit_generator  # noqa: SLF001  it has no public name
        if type(bits) is np.random.MT19937:
            return lambda seed: one.seed(seed >> 32)
        seed_bits = _seeding(bits)

        def seed_old(seed: int) -> None:
            seed_bits(seed)
            one.set_state({**one.get_state(legacy=False), "has_gauss": 0, "gauss": 0.0})

        return seed_old
    kind: Any = type(one)
    name = kind.__name__
    if name in ("PCG64", "PCG64DXSM"):

        def seed_pcg(seed: int) -> None:
            state = {"state": (seed << 64) | (seed * _MIX & _MASK), "inc": (seed << 1 | 1) & _MASK}
            one.state = {"bit_generator": name, "state": state, "has_uint32": 0, "uinteger": 0}

        return seed_pcg

    def seed_any(seed: int) -> None:
        one.state = kind(seed).state

    return seed_any


class HeldGenerators:
    """Those of one loader, in a process that makes its batches."""

    __slots__ = ("_known", "_roots", "_seeds")

    def __init__(self, *roots: Any, of_classes: Mapping[str, int] | None = None) -> None:
        """Takes their states as those that the trainer has. of_classes: its own of classes of libraries."""
        self._roots = roots
        self._known: dict[int, tuple[Held, int]] = {}
        """Each generator and the state that it had, by its id."""
        self._seeds: list[tuple[Callable[[int], Any], int | None, int]] = []
        """What seeds each, its origin, and its number; no origin: worker_init_fn has seeded it."""
        told = of_classes or {}
        for number, one, where, state in self._readable():
            self._known[id(one)] = one, state
            self._seeds.append((_seeding(one), told.get(where, state), number))

    def __bool__(self) -> bool:
        return bool(self._seeds)

    def _readable(self) -> Iterator[tuple[int, Held, str, int]]:
        """(number, generator, where it is, state) of those that have a state."""
        for number, (one, where) in enumerate(find(*self._roots)):
            try:
                state = state_of(one)
            except Exception:  # noqa: S112  a class of the user's, such as one of the system's source
                continue
            yield number, one, where, state

    def mark(self) -> None:
        """Has a generator show whether worker_init_fn, which runs next, seeds it, also with the number that it had."""
        for one, _ in list(self._known.values()):
            _mark(one)
            self._known[id(one)] = one, state_of(one)

    def look_again(self) -> None:
        """Has what worker_init_fn seeded or put in place follow from the epoch's base seed; called after it."""
        origins = {key: origin for key, (_, origin, _) in zip(self._known, self._seeds, strict=True)}
        known, self._known, self._seeds = self._known, {}, []
        for number, one, _, state in self._readable():
            untouched = id(one) in known and known[id(one)][1] == state
            if untouched and isinstance(one, torch.Generator):
                _mark(one)  # once more, which takes it away
                state = state_of(one)
            self._known[id(one)] = one, state
            self._seeds.append((_seeding(one), origins[id(one)] if untouched else None, number))

    def seed(self, seed: int, base_seed: int) -> None:
        """Seeds them for a piece of user code whose own seed this is, of an epoch with that base seed."""
        for put, origin, number in self._seeds:
            put(_mixed(seed, _mixed(base_seed, number) if origin is None else origin))

    @contextmanager
    def preserved(self) -> Iterator[None]:
        """Leaves them as they were."""
        states = [(one, _read(one)) for one, _ in self._known.values()]
        try:
            yield
        finally:
            for one, state in states:
                _write(one, state)


NOTHING_HELD = HeldGenerators()


def states_of_classes(*roots: Any) -> dict[str, int]:
    """The states of generators that do not travel with these, for `HeldGenerators` elsewhere."""
    return {where: state_of(one) for one, where in find(*roots) if where}


def _mixed(seed: int, origin: int) -> int:
    """A seed of both, by the finish of SplitMix64."""
    x = (seed ^ origin * _MIX) & _MASK
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & _MASK
    x = (x ^ x >> 27) * 0x94D049BB133111EB & _MASK
    return x ^ x >> 31


def _mark(one: Held) -> None:
    """Writes the state of a Mersenne twister that was just seeded in another way, from which the same numbers follow:
    its next block is made already, and nothing of that is given. torch's keeps its seed, too, where there is room."""
    if isinstance(one, random.Random):
        version, words, gauss = random.Random.getstate(one)
        if words[-1] == _BLOCK:
            random.Random.getrandbits(one, 32)
            random.Random.setstate(one, (version, (*random.Random.getstate(one)[1][:-1], 0), gauss))
    elif isinstance(one, torch.Generator):
        state = one.get_state()
        # What initial_seed() tells, which no number follows from.
        state[:8].view(torch.int64).bitwise_xor_(_MARK)
        one.set_state(state)
    else:
        bits: Any = one._bit_generator if isinstance(one, np.random.RandomState) else one  # noqa: SLF001
        if type(bits) is np.random.MT19937 and bits.state["state"]["pos"] == _BLOCK:
            bits.random_raw()
            made = bits.state
            made["state"]["pos"] = 0
            bits.state = made


def _read(one: Held) -> Any:
    if isinstance(one, random.Random):
        return one.getstate()
    if isinstance(one, np.random.RandomState):
        return one.get_state(legacy=False)
    return one.get_state() if isinstance(one, torch.Generator) else one.state


def _write(one: Held, state: Any) -> None:
    if isinstance(one, random.Random):
        one.setstate(state)
    elif isinstance(one, np.random.RandomState | torch.Generator):
        one.set_state(state)
    else:
        one.state = state
