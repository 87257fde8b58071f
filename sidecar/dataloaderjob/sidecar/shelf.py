"""Which user code and data the trainers of this sidecar use, so that what none uses can be removed."""

from __future__ import annotations

from collections import OrderedDict

from dataloaderjob.core.blobs import BlobStore, Spec

MAX_SPECS = 64
"""Eight ranks with a few loaders each. A dataset that changes at each epoch leaves one behind each time."""
KEEP_UNUSED_S = 120.0
"""A trainer writes its blobs before it tells their spec."""


class Shelf:
    """The specs that were told last, and the blobs that they need."""

    def __init__(self, store: BlobStore) -> None:
        self._store = store
        self._specs: OrderedDict[bytes, Spec] = OrderedDict()

    def use(self, spec: Spec) -> bool:
        """A stream with `spec` was opened. Returns whether it is new; sweeps the store then."""
        known = spec.id in self._specs
        self._specs[spec.id] = spec
        self._specs.move_to_end(spec.id)
        if known:
            return False
        while len(self._specs) > MAX_SPECS:
            self._specs.popitem(last=False)
        keep = {digest for kept in self._specs.values() for digest, _ in kept.blobs}
        self._store.sweep(keep, KEEP_UNUSED_S)
        return True
