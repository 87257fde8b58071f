"""A collate_fn that leaves encoded samples as they are: `keep_bytes`."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
from torch.utils.data._utils.collate import collate, default_collate_fn_map


class RaggedBytes(NamedTuple):
    """Byte strings of different lengths, one behind the other."""

    data: torch.Tensor
    """uint8, shape (bytes of all,)."""
    offsets: torch.Tensor
    """int64, shape (strings + 1,): where each begins, and the end."""

    def views(self) -> list[torch.Tensor]:
        """Each as a uint8 tensor, without a copy."""
        ends = self.offsets.tolist()
        return [self.data[begin:end] for begin, end in pairwise(ends)]


def keep_bytes(samples: Sequence[Any]) -> Any:
    """torch's `default_collate`, but that bytes of samples, such as files of JPEG, become one `RaggedBytes` instead of
    a list: nothing is padded, and they travel and are copied in one piece. They are decoded later, as in
    `DataLoader(..., device_stage=)`."""
    return collate(list(samples), collate_fn_map=_MAP)


def _joined(strings: Sequence[Any], *, collate_fn_map: Any = None) -> RaggedBytes:  # noqa: ARG001  torch's signature
    joined = bytearray().join(strings)
    data = torch.frombuffer(joined, dtype=torch.uint8) if joined else torch.empty(0, dtype=torch.uint8)
    return RaggedBytes(data, torch.tensor([0, *accumulate(map(len, strings))]))


_MAP: dict[Any, Any] = {
    **{kind: how for kind, how in default_collate_fn_map.items() if kind is not bytes},
    (bytes, bytearray): _joined,
}
