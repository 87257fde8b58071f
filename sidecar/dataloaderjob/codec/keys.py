"""A sampler's keys that are no integers, on their way to a feeder.

They are pickled for each batch, while the script's classes travel once, in the bundle. So a class of
`__main__` goes by name and with its definition: where the bundle brought the class, that one is used, so that
`isinstance` and `==` hold there; else the definition is loaded, once.
"""

from __future__ import annotations

import io
import pickle
import sys
import types
from typing import Any

from dataloaderjob.codec import names
from dataloaderjob.codec.modules import MAINS
from dataloaderjob.codec.pickling import UserCodePickler, with_main

_definitions: dict[int, tuple[Any, bytes]] = {}


class _Pickler(pickle.Pickler):
    def reducer_override(self, obj: Any) -> Any:
        if not isinstance(obj, type | types.FunctionType) or obj.__module__ not in MAINS:
            return NotImplemented
        return _attribute_of_main, (obj.__qualname__, _definition(obj))


def pickle_keys(keys: list[Any]) -> bytes:
    """Raises what pickle raises for keys that cannot travel."""
    out = io.BytesIO()
    _Pickler(out, protocol=5).dump(keys)
    return out.getvalue()


def _definition(obj: Any) -> bytes:
    known = _definitions.get(id(obj))
    if known is None:
        out = io.BytesIO()
        pickler = UserCodePickler(out, None)
        for part in with_main(obj, pickler.reached, with_names=True):
            pickler.dump(part)
        pickler.close()
        known = _definitions[id(obj)] = obj, out.getvalue()
    return known[1]


def _attribute_of_main(path: str, definition: bytes) -> Any:
    """Called where keys are unpickled."""
    found = names.look_up("__main__", path)
    if found is not None:
        return found
    unpickler = pickle.Unpickler(io.BytesIO(definition))  # noqa: S301  authenticated, trainer to feeder only
    found = unpickler.load()
    main = vars(sys.modules["__main__"])
    while True:
        try:
            name, value = unpickler.load()
        except EOFError:
            break
        main.setdefault(name, value)
    if "." not in path:
        main.setdefault(path, found)
    return found
