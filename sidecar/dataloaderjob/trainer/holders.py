"""Who holds the batches? Looked for once, when leases reach their limit, to name the culprit in a warning."""

from __future__ import annotations

import gc
import sys
import types
import warnings
from typing import Any

import torch

from dataloaderjob.trainer.ring import Ring

_warned = False


def warn_once(ring: Ring) -> None:
    """Warns that batches are copied from now on, and says who keeps the earlier ones."""
    global _warned
    if _warned:
        return
    _warned = True
    warnings.warn(
        f"{len(ring.leases)} batches ({ring.leased_nbytes / 1e6:.1f} MB of the ring) are still held by "
        f"{_describe(_find(ring))}; further batches are copied out of the ring. Let go of batches that are not "
        "needed, clone what is kept, or raise spec.sidecar.sharedMemory",
        stacklevel=4,
    )


def _find(ring: Ring) -> Any:
    """A container that refers to a tensor in the ring, None if only native code does."""
    spans = [(r.address, r.address + r.nbytes) for r in ring.regions.values()]
    for thing in gc.get_objects():
        if type(thing) is not torch.Tensor:
            continue
        try:
            address = thing.data_ptr()
        except RuntimeError:
            continue
        if any(low <= address < high for low, high in spans):
            for holder in gc.get_referrers(thing):
                if isinstance(holder, (list, tuple, dict, set, types.FrameType)) and holder is not spans:
                    return _outermost(holder)
    return None


def _outermost(holder: Any) -> Any:
    """Goes up through small tuples and lists to the container that the user would know."""
    for _ in range(4):
        if not isinstance(holder, (tuple, list)) or len(holder) > 8:
            return holder
        above = [
            h for h in gc.get_referrers(holder)
            if isinstance(h, (list, tuple, dict)) and h is not holder and len(h) < 1_000_000
        ]  # fmt: skip
        if not above:
            return holder
        holder = above[0]
    return holder


def _describe(holder: Any) -> str:
    if holder is None:
        return "objects that Python cannot name (an autograd graph, native code)"
    name = _name(holder)
    if isinstance(holder, types.FrameType):
        return (
            f"local variables of {holder.f_code.co_qualname} ({holder.f_code.co_filename}:{holder.f_lineno})"
        )
    return f"a {type(holder).__name__} of {len(holder)} items" + (f" called {name!r}" if name else "")


def _name(holder: Any) -> str | None:
    """The name of a variable that holds `holder`, in a module or a running function."""
    for module_name, module in list(sys.modules.items()):
        for name, value in list(vars(module).items()) if isinstance(module, types.ModuleType) else ():
            if value is holder:
                return f"{module_name}.{name}"
    frame: types.FrameType | None = sys._getframe()  # noqa: SLF001  the only way to a running function's names
    while frame is not None:
        for name, value in frame.f_locals.items():
            if value is holder and frame.f_globals.get("__name__") != __name__:
                return f"{name} in {frame.f_code.co_qualname}"
        frame = frame.f_back
    return None
