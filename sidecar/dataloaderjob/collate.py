"""`keep_bytes`, a `collate_fn` that leaves encoded samples, such as JPEG files, as they are."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
from torch.utils.data._utils.collate import collate, default_collate_fn_map


class RaggedBytes(NamedTuple):
    """Byte strings of different lengths, stored back to back in one tensor."""

    data: torch.Tensor
    """uint8, shape (total bytes,)."""
    offsets: torch.Tensor
    """int64, shape (strings + 1,): the start of each string, then the end of the last."""

    def views(self) -> list[torch.Tensor]:
        """Returns each string as a uint8 tensor that shares the memory of `data`."""
        ends = self.offsets.tolist()
        return [self.data[begin:end] for begin, end in pairwise(ends)]


def keep_bytes(samples: Sequence[Any]) -> Any:
    """Collates as torch's `default_collate` does, but combines byte strings, such as JPEG files, into one `RaggedBytes`
    instead of a list. Nothing is padded, and all strings are sent and copied in one piece. The script decodes them
    later, for example in `DataLoader(..., device_stage=)`."""
    return collate(list(samples), collate_fn_map=_MAP)


def _joined(strings: Sequence[Any], *, collate_fn_map: Any = None) -> RaggedBytes:  # noqa: ARG001  torch's signature
    joined = bytearray().join(strings)
    data = torch.frombuffer(joined, dtype=torch.uint8) if joined else torch.empty(0, dtype=torch.uint8)
    return RaggedBytes(data, torch.tensor([0, *accumulate(map(len, strings))]))


_MAP: dict[Any, Any] = {
    **{kind: how for kind, how in default_collate_fn_map.items() if kind is not bytes},
    (bytes, bytearray): _joined,
}
