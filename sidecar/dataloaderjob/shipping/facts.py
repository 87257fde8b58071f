"""Facts about this process, for handshakes and bundles. `sidecar.dispatch.choose` compares them.

These facts have their own module because the zygote needs them before it imports any of our other modules.
"""

from __future__ import annotations

import platform
import sys
from typing import Any

import numpy as np
import torch


def facts() -> dict[str, Any]:
    """Returns the versions of Python, torch and numpy as major.minor. `cpu` is the machine type, followed by the vector
    instructions that torch uses, such as `x86_64 AVX2`."""
    return {
        "python": f"{sys.version_info.major}.{sys.version_info.minor}",
        "torch": _minor(torch.__version__),
        "numpy": _minor(np.__version__),
        "cpu": f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}",
    }


def _minor(version: str) -> str:
    return ".".join(version.split(".")[:2])
