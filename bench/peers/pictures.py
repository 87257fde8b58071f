"""The peer of B19: torch's own DataLoader, whose workers decode."""

from __future__ import annotations

import os
from typing import Any

import psutil
import torch

from bench import endtoend, pictures


def torch_loader(case: pictures.Case) -> dict[str, Any]:
    """Uses `producers` workers and torch's default prefetch. Trainer and workers are the node's processes."""
    loader = torch.utils.data.DataLoader(
        pictures.Decoded(case), batch_size=case.batch, num_workers=case.producers
    )
    return endtoend.measure(
        iter(loader), case, node_pids=lambda: [os.getpid(), *(p.pid for p in psutil.Process().children())]
    )


PEERS = {"DataLoader": torch_loader}
