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
_warned = False


def warn_once(ring: Ring) -> None:
    """Warns that batches are copied from now on, and says who keeps the earlier ones."""
    global _warned
    if _warned:
        return
    _warned = True
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
    # 5: the line of the user's that called next()
    warnings.warn(f"{why}; further batches are copied out of the ring. {remedy}", stacklevel=5)


def _find(ring: Ring) -> Any:
    """A container that refers to a tensor in the ring, None if only native code does."""
    tensor = _tensor_in(ring)
    if tensor is None:
        return None
    for holder in gc.get_referrers(tensor):
        if isinstance(holder, list | tuple | dict | set) or _is_users_frame(holder):
            return _outermost(holder)
    return None


def _tensor_in(ring: Ring) -> torch.Tensor | None:
    spans = [(r.address, r.address + r.nbytes) for r in ring.regions.values()]
    for thing in gc.get_objects():
        if type(thing) is not torch.Tensor:
            continue
        try:
            address = thing.data_ptr()
        except RuntimeError:
            continue
        if any(low <= address < high for low, high in spans):
            return thing
    return None


def _outermost(holder: Any) -> Any:
    """Goes up through small tuples and lists to the container that the user would know."""
    for _ in range(4):
        if not isinstance(holder, tuple | list) or len(holder) > 8:
            return holder
        above = _above(holder)
        if above is None:
            return holder
        holder = above
    return holder


def _above(holder: Any) -> Any:
    """A container that refers to `holder`. A function of its own: its lists are gone before the next look."""
    for found in gc.get_referrers(holder):
        if isinstance(found, list | tuple | dict) and len(found) < 1_000_000:
            return found
    return None


def _describe(holder: Any) -> str:
    if holder is None:
        return "objects that Python cannot name (an autograd graph, native code)"
    if isinstance(holder, types.FrameType):
        code = holder.f_code
        return f"local variables of {code.co_qualname} ({code.co_filename}:{holder.f_lineno})"
    name = _name(holder)
    return f"a {type(holder).__name__} of {len(holder)} items" + (f" called {name!r}" if name else "")


def _name(holder: Any) -> str | None:
    """The name of a variable that holds `holder`, in a module or a running function."""
    for module_name, module in list(sys.modules.items()):
        for name, value in list(vars(module).items()) if isinstance(module, types.ModuleType) else ():
            if value is holder:
                return f"{module_name}.{name}"
    frame: types.FrameType | None = sys._getframe().f_back  # noqa: SLF001  the only way to names of locals
    while frame is not None:
        if _is_users_frame(frame):
            for name, value in _locals(frame):
                if value is holder:
                    return f"{name} in {frame.f_code.co_qualname}"
        frame = frame.f_back
    return None


def _is_users_frame(frame: object) -> bool:
    if not isinstance(frame, types.FrameType):
        return False
    return str(frame.f_globals.get("__name__")).partition(".")[0] != _US


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
