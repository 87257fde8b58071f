"""The peer of B16: torch's DataLoader with workers of its own for each rank, which cannot leave the node."""

from __future__ import annotations

from typing import Any

from bench.ranks import Case, measure


def dataloader(case: Case) -> dict[str, Any]:
    """Uses two workers for each rank, because a single one leaves the rank waiting while it makes a batch."""
    return measure("2", case, list)


PEERS = {"DataLoader": dataloader}
