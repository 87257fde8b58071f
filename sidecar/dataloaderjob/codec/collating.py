"""Keeps torch's default_collate, in a process where `get_worker_info()` answers, out of shared memory.

There it stacks tensors into a new shared-memory file per batch, for torch's own way to the trainer, and
into the dtype of the first sample, where it otherwise promotes. A feeder has no use for the one, and the
other would make its batches differ from those of `num_workers=0`.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch.utils.data._utils import worker
from torch.utils.data._utils.collate import default_collate_fn_map


@cache
def stack_in_private_memory() -> None:
    """Once for the process: replaces torch's entry for tensors by one that looks away from the worker."""
    original = default_collate_fn_map[torch.Tensor]

    def stack(batch: Any, *, collate_fn_map: Any = None) -> Any:
        info, worker._worker_info = worker._worker_info, None  # noqa: SLF001  torch has no other switch
        try:
            return original(batch, collate_fn_map=collate_fn_map)
        finally:
            worker._worker_info = info  # noqa: SLF001

    default_collate_fn_map[torch.Tensor] = stack
