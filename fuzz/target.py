"""A target, and the mutations that know the format of its input. Pure."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from dataloaderjob.core import values
from dataloaderjob.core.errors import RemoteProtocolError

Parse = Callable[[bytes], object]
Mutate = Callable[[bytes, random.Random], bytes]

HOSTILE = (
    "null", "true", "0", "-1", "1e400", "NaN", "-Infinity", "9" * 30, "9" * 4200, "9" * 4400,
    "18446744073709551616", "9223372036854775807", "0.5", '""', '"\\ud800"', '"\\u202e\\n\\u2028"', '"x"', "[]", "{}",
    "[[]]", "[null]", '{"":null}', '"' + "A" * 4000 + '"', '"../../etc"', '"__class__"',
)  # fmt: skip
"""JSON texts that replace a part of a message."""
_VALUES: tuple[Any, ...] = (
    None, True, 0, -1, 1 << 63, 1 << 64, -(1 << 70), 1 << 200, 0.5, float("nan"), float("inf"), 1j, "", "x", "\ud800",
    "__class__", b"", b"\0" * 9, bytearray(b"a"), (), [], {}, set(), frozenset(), ((),), [[]], {"": None}, {1: {2: 3}},
    (1 << 40, 0), (0, 1 << 70),
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """One parser of bytes that another process chose."""

    name: str
    parse: Parse
    seeds: Callable[[], Sequence[bytes]]
    """Makes valid inputs with the real encoders."""
    declared: tuple[type[Exception], ...]
    """The errors by which the parser refuses an input."""
    mutate: Mutate | None = None
    """Changes an input within its format; None: only bytes are changed."""
    max_nbytes: int = 8192

    def run(self, data: bytes) -> bool:
        """Parses `data`. Returns False if it was refused; raises what is a finding."""
        try:
            self.parse(data)
        except self.declared:
            return False
        return True


def _hostile(chance: random.Random) -> str:
    """Returns a JSON text. Python's decoder stops at some 990 levels, and code that handles the result earlier."""
    if chance.random() < 0.7:
        return chance.choice(HOSTILE)
    levels = chance.choice((3, 180, 400, chance.randrange(800, 1000), chance.randrange(930, 1000), 3000))
    return "[" * levels + "]" * levels if chance.random() < 0.7 else '{"a":' * levels + "0" + "}" * levels


def mutate_bytes(data: bytes, chance: random.Random) -> bytes:
    """Flips, inserts, deletes or repeats a few bytes."""
    found = bytearray(data)
    for _ in range(chance.choice((1, 1, 2, 4))):
        at = chance.randrange(len(found) + 1)
        match chance.randrange(5):
            case 0 if at < len(found):
                found[at] ^= 1 << chance.randrange(8)
            case 1:
                found[at:at] = chance.randbytes(chance.randrange(1, 9))
            case 2:
                del found[at : at + chance.randrange(1, 17)]
            case 3:
                found[at : at + 8] = chance.choice((b"\xff" * 8, b"\0" * 8, b"\0\0\0\0\0\0\0\x80"))
            case _:
                found[at:at] = found[at : at + chance.randrange(1, 65)]
    return bytes(found)


def mutate_json(data: bytes, chance: random.Random) -> bytes:
    """Replaces a part of a JSON text with a hostile one, or removes or repeats it."""
    try:
        tree = json.loads(data)
    except (ValueError, RecursionError):
        return mutate_bytes(data, chance)
    mark = f"mark-{chance.randrange(1 << 30)}"
    try:
        text = json.dumps(_changed(tree, mark, chance))
    except (ValueError, RecursionError):
        return mutate_bytes(data, chance)
    return text.replace(f'"{mark}"', _hostile(chance)).encode()


def mutate_values(data: bytes, chance: random.Random) -> bytes:
    """Does the same as `mutate_json` for a value of `core.values`."""
    try:
        tree = values.unpack(data)
        return values.pack(_changed(tree, chance.choice(_VALUES), chance))
    except (RemoteProtocolError, values.NotPlainError, TypeError):
        return mutate_bytes(data, chance)


def _changed(tree: Any, new: Any, chance: random.Random, depth: int = 0) -> Any:
    """Returns the tree with one part replaced by `new`."""
    is_branch = isinstance(tree, dict | list | tuple) and len(tree)
    if not is_branch or depth > 60 or chance.random() < 0.15:
        return new
    if isinstance(tree, dict):
        name = chance.choice(list(tree))
        if chance.random() < 0.1:
            return {key: value for key, value in tree.items() if key != name}
        return {**tree, name: _changed(tree[name], new, chance, depth + 1)}
    at = chance.randrange(len(tree))
    items = list(tree)
    match chance.randrange(10):
        case 0:
            del items[at]
        case 1:
            items.insert(at, items[at])
        case _:
            items[at] = _changed(items[at], new, chance, depth + 1)
    return type(tree)(items)
