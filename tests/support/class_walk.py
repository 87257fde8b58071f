"""A program: sends crafted batches that name each class of this process in each way, and prints what became of them.

It imports the modules that are named as arguments, and those of the standard library. The result is JSON. `created` has
the full names of the classes whose objects came out, for each way; `records` those among them that are fields and
nothing else. `errors` has the exceptions that came out of failures, each with the modules of its other bases. `events`
is what the interpreter's audit hook reported meanwhile.
"""

from __future__ import annotations

import base64
import contextlib
import enum
import importlib
import io
import json
import signal
import sys
import types
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from dataloaderjob.batches.decoding import Decoder
from dataloaderjob.core import layout, values
from dataloaderjob.core.errors import InputError, RemoteProtocolError
from dataloaderjob.core.layout import NodeKind, node
from dataloaderjob.making.failures import unpack_failure

NOT_IMPORTED = {"antigravity", "this", "idlelib", "turtledemo", "turtle", "tkinter", "__main__", "lib2to3"}
EVENTS = (
    "open", "import", "exec", "compile", "os.system", "os.exec", "os.posix_spawn", "subprocess.Popen", "os.listdir",
    "socket.", "ctypes.", "shutil.", "tempfile.", "os.mkdir", "os.remove", "marshal.", "pickle.", "mmap.", "urllib.",
)  # fmt: skip
DEADLINE_S = 20
IMAGE = ({}, "L", (1, 1), None, b"x")
WAYS: dict[str, Any] = {
    "str": "a", "bytes": b"a", "bytearray": bytearray(b"a"), "int": 1, "float": 1.5, "complex": 1j, "list": [1],
    "tuple": (1,), "set": {1}, "frozenset": frozenset({1}), "dict": {"a": 1}, "own dict": {"a": 1}, "instance": None,
    "mapping": {"a": 1}, "defaultdict": {"a": 1}, "PIL.Image": (*IMAGE, []), "tokenizers.Encoding": b"{}",
    "torch_geometric": (False, [(None, {"a": 1}, {})]),
}  # fmt: skip
"""Content for each way whose content is a plain value."""


def main(modules: list[str]) -> None:
    warnings.simplefilter("ignore")
    for name in [*sorted(sys.stdlib_module_names - NOT_IMPORTED), *modules]:
        imported(name)
    walk = Walk()
    sys.addaudithook(walk.note)
    if "tokenizers" in sys.modules:
        WAYS["tokenizers.Encoding"] = sys.modules["tokenizers"].Encoding().__getstate__()
    classes = sorted(every_class(), key=lambda one: (one.__module__, one.__qualname__))
    for cls in classes:
        for way, schema, content in bodies(cls):
            walk.try_one(cls, way, forged(schema, content))
        if BaseException in type.__dict__["__mro__"].__get__(cls):
            walk.try_error(cls)
    json.dump(
        {
            "errors": walk.errors,
            "tried": len(classes),
            "events": walk.events,
            "created": walk.created,
            "records": walk.records,
        },
        sys.stdout,
    )


class Walk:
    """What came of the batches so far."""

    def __init__(self) -> None:
        self.created: dict[str, list[str]] = {}
        self.records: list[str] = []
        self.errors: list[str] = []
        self.events: list[str] = []
        self._now = ""

    def note(self, event: str, args: Any) -> None:
        if self._now and event.startswith(EVENTS) and not is_cythons(event, args):
            self.events.append(f"{self._now}: {event} {args!r}"[:200])

    def try_one(self, cls: type, way: str, body: Any) -> None:
        name = f"{cls.__module__}.{cls.__qualname__}"
        self._now = f"{name} as {way}"
        found = None
        with contextlib.suppress(RemoteProtocolError, InputError):
            found = Decoder(allow_pickle=False).decode(body)
        if found is not None and way in ("DEFAULTDICT", "defaultdict"):
            with contextlib.suppress(Exception):
                found.default_factory()
        self._now = ""
        if found is not None and type(found) is not dict:
            self.created.setdefault(way, []).append(name)
            if way in ("NAMEDTUPLE", "DATACLASS") and is_bare(cls):
                self.records.append(name)

    def try_error(self, cls: type) -> None:
        """Sends a failure, as a feeder reports an error of the user's code."""
        failure = {
            "type": [cls.__module__, cls.__qualname__], "text": "/etc/passwd", "args": packed(("/etc/passwd", 1)),
            "attributes": packed({"filename": "/etc/passwd", "args": ("/etc/passwd",)}), "complete": True,
            "traceback": "", "position": None, "key": None, "phase": "", "feeder": "",
        }  # fmt: skip
        self._now = f"{cls.__module__}.{cls.__qualname__} as an error"
        found = unpack_failure(json.dumps(failure).encode())
        self._now = ""
        if type(found) is cls:
            bases = [base.__module__ for base in cls.__mro__ if BaseException not in base.__mro__]
            self.errors.append(f"{cls.__module__}.{cls.__qualname__} {' '.join(sorted(set(bases)))}")


def is_cythons(event: str, args: Any) -> bool:
    """True for the frame that Cython compiles to add a line to the traceback of a `__str__` that fails."""
    return event == "compile" and args[0] == b"_getframe()"


def packed(value: Any) -> str:
    return base64.b64encode(values.pack(value)).decode()


def imported(name: str) -> None:
    """Imports a module if that succeeds soon."""

    def late(number: int, frame: Any) -> None:
        raise TimeoutError(name)

    signal.signal(signal.SIGALRM, late)
    signal.alarm(DEADLINE_S)
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            importlib.import_module(name)
    except BaseException:  # a module may even exit
        pass
    finally:
        signal.alarm(0)


def every_class() -> Iterator[type]:
    """The classes that a batch can name, and thousands that only a subclass list knows."""
    seen: set[int] = set()
    for module in list(sys.modules.values()):
        if issubclass(
            type(module), types.ModuleType
        ):  # isinstance() is also true of what only claims to be a module
            yield from within(list(object.__getattribute__(module, "__dict__").values()), seen)


def within(found: list[Any], seen: set[int]) -> Iterator[type]:
    for one in found:
        if isinstance(one, type) and id(one) not in seen:
            seen.add(id(one))
            if isinstance(one.__module__, str) and one.__module__ != "__main__":
                yield one
            yield from within(list(type.__dict__["__dict__"].__get__(one).values()), seen)


def bodies(cls: type) -> Iterator[tuple[str, Any, list[Any]]]:
    """Schemas that name a class in each way, with their values."""
    name = cls.__module__, cls.__qualname__
    value = node(NodeKind.VALUE, 0)
    fields = static(cls, "_fields")
    count = len(fields) if type(fields) is tuple else 0
    yield (
        "NAMEDTUPLE",
        node(NodeKind.NAMEDTUPLE, name, tuple(node(NodeKind.VALUE, i) for i in range(count))),
        [1] * count,
    )
    length = static(cls, "n_sequence_fields")
    length = length if type(length) is int else 1
    yield (
        "SEQUENCE",
        node(NodeKind.SEQUENCE, name, tuple(node(NodeKind.VALUE, i) for i in range(length))),
        [1] * length,
    )
    yield "MAPPING", node(NodeKind.MAPPING, name, ("a",), (value,)), [1]
    yield "DEFAULTDICT", node(NodeKind.DEFAULTDICT, name, ("a",), (value,)), [1]
    found = static(cls, "__dataclass_fields__")
    names = tuple(found) if type(found) is dict else ()
    yield (
        "DATACLASS",
        node(NodeKind.DATACLASS, name, names, tuple(node(NodeKind.VALUE, i) for i in range(len(names)))),
        [1 for _ in names],
    )
    for way, content in WAYS.items():
        yield way, node(NodeKind.MADE, way, name, value), [content]
    tensor = node(NodeKind.TENSOR, "float32", 4, (0,), None, 0)
    yield "tensor", node(NodeKind.MADE, "tensor", name, node(NodeKind.TUPLE, (tensor, value))), [False]
    yield "ndarray", node(NodeKind.MADE, "ndarray", name, node(NodeKind.ARRAY, "<f4", 4, (0,), None, 0)), []
    if isinstance(cls, enum.EnumType) and cls.__members__:
        yield "enum", node(NodeKind.MADE, "enum", name, value), [(next(iter(cls.__members__)), None)]


def static(cls: type, name: str) -> Any:
    """What a class or its bases have under a name, whatever the metaclass makes of it."""
    for base in type.__dict__["__mro__"].__get__(cls):
        if name in type.__dict__["__dict__"].__get__(base):
            return type.__dict__["__dict__"].__get__(base)[name]
    return None


def forged(schema: Any, content: list[Any]) -> Any:
    head = layout.pack_schema(schema)
    head += bytes(-len(head) % layout.ALIGNMENT) if _has_leaf(schema) else b""
    return np.frombuffer(bytearray(head + (values.pack(content) if content else b"")), np.uint8)


def _has_leaf(schema: Any) -> bool:
    if type(schema) is not tuple or not schema:
        return False
    return schema[0] in (NodeKind.TENSOR, NodeKind.ARRAY) or any(map(_has_leaf, schema))


SPECIAL = {
    "__init__", "__new__", "__repr__", "__str__", "__eq__", "__hash__", "__post_init__", "__getnewargs__", "__lt__",
    "__le__", "__gt__", "__ge__", "__getstate__", "__setstate__", "__setattr__", "__delattr__", "__replace__",
    "__class_getitem__",
}  # fmt: skip
"""Functions that say nothing of what an object does by itself, and that decoding does not call."""
GENERATED = ("<string>", "namedtuple_", "dataclasses.py", "collections/__init__.py", "typing.py")
"""Parts of file names of functions that the standard library writes."""


def is_bare(cls: type) -> bool:
    """True for a dataclass or named tuple without a property, or a function that its author wrote."""
    for base in cls.__mro__[:-1]:
        for name, found in vars(base).items():
            code = getattr(getattr(found, "__func__", found), "__code__", None)
            is_own = code is not None and not any(part in code.co_filename for part in GENERATED)
            if isinstance(found, property) or (is_own and name not in SPECIAL):
                return False
    return True


if __name__ == "__main__":
    del torch
    main(sys.argv[1:])
