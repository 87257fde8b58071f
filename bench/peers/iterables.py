"""The peer of B17 and B8: torch's own DataLoader."""

from __future__ import annotations

import os
from typing import Any

import psutil
import torch

from bench import endtoend, iterables


def torch_loader(case: iterables.Case) -> dict[str, Any]:
    """Uses one worker for each reader of the dataset, with torch's default prefetch.

    Trainer and workers are the node's processes.
    """
    with iterables.dataset(case) as data:
        stage = iterables.stage(case)
        whole = data if stage is None else iterables.Whole(data, stage)
        loader = torch.utils.data.DataLoader(
            whole, batch_size=case.batch, num_workers=iterables.readers(case)
        )
        return endtoend.measure(
            iterables.pairs(iter(loader)), case,
            node_pids=lambda: [os.getpid(), *(p.pid for p in psutil.Process().children())],
        )  # fmt: skip


PEERS = {"DataLoader": torch_loader}
