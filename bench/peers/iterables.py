"""The peer of B17 and B8: torch's own DataLoader."""

from __future__ import annotations

import os
from typing import Any

import psutil
import torch

from bench import endtoend, iterables


def torch_loader(case: iterables.Case) -> dict[str, Any]:
    """`producers` workers, torch's default prefetch; trainer and workers are the node's processes."""
    with iterables.dataset(case) as data:
        loader = torch.utils.data.DataLoader(data, batch_size=case.batch, num_workers=case.producers)
        return endtoend.measure(
            iterables.pairs(iter(loader)), case,
            node_pids=lambda: [os.getpid(), *(p.pid for p in psutil.Process().children())],
        )  # fmt: skip


PEERS = {"DataLoader": torch_loader}
