"""Random number generators that a dataset and its collate_fn hold in an attribute, a closure or a global.

A transform with its own `np.random.RandomState(0)` would draw from a different copy in each process that makes samples.
This module therefore seeds the generator for each sample, in the same way as the process's three generators (see
`fetcher`). The seed depends on four things: the state of the trainer's generator at iter(), the number of earlier
iterators (`Ticket.draws`), the sample's position and its key. It does not depend on the epoch's base seed, so a
generator that the user has seeded draws the same numbers in each run.

If `worker_init_fn` has seeded or replaced a generator, its seeds depend on the epoch's base seed instead.
`worker_init_fn` derives its own seeds from that base seed, too.
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
"""Types of generators that are found. An `np.random.Generator` is represented by its BitGenerator, because several
generators may share it."""
MOST_OBJECTS = 100_000
"""Maximum number of objects to search. Objects close to the dataset, such as transforms, are searched first."""
MOST_ITEMS = 1_000
"""Maximum number of items to search in a container. A longer container is assumed to hold data."""
_MASK, _INT64 = (1 << 64) - 1, (1 << 63) - 1
_MIX = 0x9E3779B97F4A7C15
_BLOCK = 624
"""Number of values that a Mersenne Twister generates at a time."""
_MARK = 1 << 41
_FLAT: Any = (
    str, bytes, bytearray, int, float, complex, bool, type(None), type(Ellipsis), range, slice, torch.Tensor,
    np.ndarray, np.generic, np.dtype, torch.dtype, torch.device, types.ModuleType, types.CodeType, types.GeneratorType,
)  # fmt: skip
_ITEMS: tuple[Any, ...] = (dict, list, tuple, set, frozenset, deque)


def find(*roots: Any) -> list[tuple[Held, str]]:
    """Returns (generator, path) for each generator that is reachable from `roots`, in an order that depends only on the
    objects.

    The path is usually empty. Only a generator that a library's class holds has a path, because it is not sent with the
    objects of that class.
    """
    pending: deque[Any] = deque(roots)
    seen: dict[int, Any] = {}
    found: list[tuple[Held, str]] = []
    while pending and len(seen) < MOST_OBJECTS:
        item = pending.popleft()
        kind = type(item)  # not isinstance, because a proxy answers for the object behind it
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
            except Exception:  # noqa: S112  a dict that another thread changes, an object under construction
                continue
    return found


def _of_class(cls: type) -> list[tuple[str, Held]]:
    """Returns (path, generator) for each generator that a library's class holds. Each generator is listed once."""
    found: dict[int, tuple[str, Held]] = {}
    for name, value in sorted(vars(cls).items()):
        one = value.bit_generator if issubclass(type(value), np.random.Generator) else value
        if issubclass(type(one), Held) and id(one) not in OF_PROCESS:
            found.setdefault(id(one), (f"{user_code.full_name(cls)}.{name}", one))
    return list(found.values())


def _parts(item: Any, kind: type) -> Iterable[Any]:
    """Returns the parts of an object that pickling would include. Runs none of the object's own code."""
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
    """Returns the first items of a container, using the methods of its built-in type."""
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
            except AttributeError:  # the slot is not set
                continue
    return found


def _of_function(function: types.FunctionType) -> list[Any]:
    parts: list[Any] = [function.__defaults__, function.__kwdefaults__, vars(function)]
    for cell in function.__closure__ or ():
        try:
            parts.append(cell.cell_contents)
        except ValueError:  # the cell is empty
            continue
    own = function.__globals__
    if modules.is_users(own):
        reached = [own[name] for name in user_code.globals_used(function.__code__) if name in own]
        parts += [*reached, *_of_modules(function.__code__, reached)]
    return parts


def _of_modules(code: types.CodeType, reached: Iterable[Any]) -> list[Any]:
    """Returns the values that code reads as attributes of user modules, as in `import tools; tools.rng`."""
    found = [vars(m) for m in reached if isinstance(m, types.ModuleType) and modules.is_users(vars(m))]
    names = set(code.co_names)
    for const in code.co_consts:
        if isinstance(const, types.CodeType):
            names |= set(const.co_names)
    return [own[name] for own in found for name in sorted(names) if name in own]


def state_of(one: Held) -> int:
    """Returns a hash below 2**64 of a generator's state. The hash is the same in every process."""
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
    """Returns a function that seeds a generator from a number below 2**64."""
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
    """The generators that one loader's dataset and collate_fn hold, in a process that makes the loader's batches."""

    __slots__ = ("_known", "_roots", "_seeds")

    def __init__(self, *roots: Any, of_classes: Mapping[str, int] | None = None) -> None:
        """Assumes that the generators have the same states as in the trainer. `of_classes` contains the trainer's
        states of generators that library classes hold, by path."""
        self._roots = roots
        self._known: dict[int, tuple[Held, int]] = {}
        """Each generator and its last known state, by the generator's id."""
        self._seeds: list[tuple[Callable[[int], Any], int | None, int]] = []
        """Seeding function, origin and number of each generator. The origin is None if worker_init_fn has seeded it."""
        told = of_classes or {}
        for number, one, where, state in self._readable():
            self._known[id(one)] = one, state
            self._seeds.append((_seeding(one), told.get(where, state), number))

    def __bool__(self) -> bool:
        return bool(self._seeds)

    def _readable(self) -> Iterator[tuple[int, Held, str, int]]:
        """Yields (number, generator, path, state) for each generator with a state that can be read."""
        for number, (one, where) in enumerate(find(*self._roots)):
            try:
                state = state_of(one)
            except Exception:  # noqa: S112  a user's class without a state, such as one that reads the system's source
                continue
            yield number, one, where, state

    def mark(self) -> None:
        """Marks the generators so that `look_again` can detect seeding by worker_init_fn, even with the same seed."""
        for one, _ in list(self._known.values()):
            _mark(one)
            self._known[id(one)] = one, state_of(one)

    def look_again(self) -> None:
        """Finds the generators that worker_init_fn has seeded or created. From then on, their seeds depend on the
        epoch's base seed. Called after worker_init_fn."""
        origins = {key: origin for key, (_, origin, _) in zip(self._known, self._seeds, strict=True)}
        known, self._known, self._seeds = self._known, {}, []
        for number, one, _, state in self._readable():
            untouched = id(one) in known and known[id(one)][1] == state
            if untouched and isinstance(one, torch.Generator):
                _mark(one)  # marking a second time removes the mark
                state = state_of(one)
            self._known[id(one)] = one, state
            self._seeds.append((_seeding(one), origins[id(one)] if untouched else None, number))

    def seed(self, seed: int, base_seed: int) -> None:
        """Seeds the generators before a call of user code. `seed` is the seed of the call, and `base_seed` is the base
        seed of the epoch."""
        for put, origin, number in self._seeds:
            put(_mixed(seed, _mixed(base_seed, number) if origin is None else origin))

    @contextmanager
    def preserved(self) -> Iterator[None]:
        """Restores the generators' states at the end."""
        states = [(one, _read(one)) for one, _ in self._known.values()]
        try:
            yield
        finally:
            for one, state in states:
                _write(one, state)


NOTHING_HELD = HeldGenerators()


def states_of_classes(*roots: Any) -> dict[str, int]:
    """Returns the states, by path, of generators that are not sent with these objects. `HeldGenerators` needs these
    states in another process."""
    return {where: state_of(one) for one, where in find(*roots) if where}


def _mixed(seed: int, origin: int) -> int:
    """Mixes the two numbers into a seed, using the finalizer of SplitMix64."""
    x = (seed ^ origin * _MIX) & _MASK
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & _MASK
    x = (x ^ x >> 27) * 0x94D049BB133111EB & _MASK
    return x ^ x >> 31


def _mark(one: Held) -> None:
    """Rewrites the state of a freshly seeded Mersenne Twister in a different form that yields the same numbers. In this
    form, the next block has been generated, but none of its numbers drawn. In torch's generator, flips a bit of the
    stored initial seed instead."""
    if isinstance(one, random.Random):
        version, words, gauss = random.Random.getstate(one)
        if words[-1] == _BLOCK:
            random.Random.getrandbits(one, 32)
            random.Random.setstate(one, (version, (*random.Random.getstate(one)[1][:-1], 0), gauss))
    elif isinstance(one, torch.Generator):
        state = one.get_state()
        # These bytes are the result of initial_seed(). No drawn number depends on them.
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
