"""What this process states about itself in handshakes and bundles; compared by `sidecar.dispatch.choose`.

It stays alone: the zygote needs it before anything else of ours.
"""

from __future__ import annotations

import platform
import sys
from typing import Any

import numpy as np
import torch


def facts() -> dict[str, Any]:
    """Versions as major.minor, and the machine with the vector units that torch uses: `x86_64 AVX2`."""
    return {
        "python": f"{sys.version_info.major}.{sys.version_info.minor}",
        "torch": _minor(torch.__version__),
        "numpy": _minor(np.__version__),
        "cpu": f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}",
    }


def _minor(version: str) -> str:
    return ".".join(version.split(".")[:2])
