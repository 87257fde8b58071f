"""Who holds the batches? Looked for once, when leases reach their limit, to name the culprit in a warning."""

from __future__ import annotations

import gc
import inspect
import sys
import types
import warnings
from typing import Any

import torch

from dataloaderjob.trainer.ring import Ring

_US = "dataloaderjob"
_LEVELS = 4
_SMALL = 8
"""A container of no more items is one batch: what holds it is looked for."""
_warned = False


def warn_once(ring: Ring) -> None:
    """Warns that batches are copied from now on, and says who keeps the earlier ones."""
    global _warned
    if _warned:
        return
    _warned = True
    ring.drop_spares()  # else these were found
    mb = ring.leased_nbytes / 1e6
    if len(ring.leases) > 1:
        why = (
            f"{len(ring.leases)} batches ({mb:.1f} MB of the ring) are still held by {_describe(_find(ring))}"
        )
        remedy = (
            "Let go of batches that are not needed, clone what is kept, or raise spec.sidecar.sharedMemory"
        )
    else:
        why = f"the shared memory of this sidecar has no room for a ring of batches of {mb:.1f} MB"
        remedy = "Raise spec.sidecar.sharedMemory"
    warnings.warn(f"{why}; further batches are copied out of the ring. {remedy}", stacklevel=_users_level())


def _users_level() -> int:
    """warnings' stack level, for our caller, of the line of the user's that called next()."""
    level = 0
    above: types.FrameType | None = sys._getframe(1)  # noqa: SLF001  as below
    while above is not None and _ours(above):
        level, above = level + 1, above.f_back
    return level + 1


def _ours(frame: types.FrameType) -> bool:
    return str(frame.f_globals.get("__name__")).partition(".")[0] == _US


def _find(ring: Ring) -> Any:
    """The container that holds batches, None if Python knows of none."""
    level: list[Any] = _tensors_in(ring)
    for _ in range(_LEVELS):
        level = _above(level)
        found = max(level, key=len, default=())
        if len(found) > _SMALL:
            return found
    return None


def _tensors_in(ring: Ring) -> list[Any]:
    spans = [(r.address, r.address + r.nbytes) for r in ring.regions.values()]
    found = []
    for thing in gc.get_objects():
        if type(thing) is not torch.Tensor:
            continue
        try:
            address = thing.data_ptr()
        except RuntimeError:
            continue
        if any(low <= address < high for low, high in spans):
            found.append(thing)
    return found


def _above(level: list[Any]) -> list[Any]:
    """Containers that refer to any of `level`. A function of its own: its lists are gone before the next look."""
    return [
        found
        for found in gc.get_referrers(*level)
        if isinstance(found, list | tuple | dict | set) and found is not level and len(found) < 1_000_000
    ]


def _describe(holder: Any) -> str:
    if holder is None:
        return "objects that Python cannot name (numpy arrays, an autograd graph, native code)"
    name = _name(holder) or _attribute(holder)
    return f"a {type(holder).__name__} of {len(holder)} items" + (f" called {name!r}" if name else "")


def _attribute(holder: Any) -> str | None:
    """The name of an attribute that holds `holder`."""
    for owner in gc.get_referrers(holder):
        for name, value in list(getattr(owner, "__dict__", {}).items()):
            if value is holder:
                return f"{type(owner).__qualname__}.{name}"
    return None


def _name(holder: Any) -> str | None:
    """The name of a variable that holds `holder`, in a module or a running function."""
    for module_name, module in list(sys.modules.items()):
        for name, value in list(vars(module).items()) if isinstance(module, types.ModuleType) else ():
            if value is holder:
                return f"{module_name}.{name}"
    frame: types.FrameType | None = sys._getframe().f_back  # noqa: SLF001  the only way to names of locals
    while frame is not None:
        if not _ours(frame):
            for name, value in _locals(frame):
                if value is holder:
                    return f"{name} in {frame.f_code.co_qualname}"
        frame = frame.f_back
    return None


def _locals(frame: types.FrameType) -> list[tuple[str, Any]]:
    """Names and values of a running function.

    Before Python 3.13 a frame keeps the dict that `f_locals` makes, and with it all that its locals held
    at this moment, for as long as the function runs: it is emptied here.
    """
    names = frame.f_locals
    found = list(names.items())
    if frame.f_code.co_flags & inspect.CO_OPTIMIZED and type(names) is dict:
        names.clear()
    return found
