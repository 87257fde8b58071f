"""The interface of a DataLoader that its iterators may use. They read the loader's arguments from an `EpochSpec`."""

from __future__ import annotations

from typing import Protocol

from dataloaderjob.trainer.device.transfer import WaySource
from dataloaderjob.trainer.resume.progress import Epoch
from dataloaderjob.trainer.session.spec import EpochSpec


class EpochSource(WaySource, Protocol):
    """Our DataLoader as its iterators see it. It numbers its epochs and sessions."""

    def epoch_spec(self) -> EpochSpec:
        """Returns the loader's current arguments."""

    def begin_epoch(self, *, again: bool = False) -> Epoch:
        """Returns the epoch of the next iterator or, with `again`, the next epoch of the same iterator."""

    def begin_session(self) -> tuple[int, int]:
        """Returns the numbers of this loader and of its next iterator."""
