"""Which user code and data the trainers of this sidecar use, so that what none uses can be removed."""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from pathlib import Path

from dataloaderjob.core.blobs import BlobStore, Spec
from dataloaderjob.core.errors import RemoteProtocolError

MAX_SPECS = 64
"""Eight ranks with a few loaders each. A dataset that changes at each epoch leaves one behind each time."""
KEEP_UNUSED_S = 120.0
"""A trainer writes its blobs before it tells their spec."""
MARK = ".spec-"
"""A file for each spec in use: a sidecar that is started again does not sweep what it has not heard of yet."""


class Shelf:
    """The specs that were told last, and the blobs that they need."""

    def __init__(self, store: BlobStore) -> None:
        self._store = store
        self._specs: OrderedDict[bytes, Spec] = OrderedDict()
        for path in sorted(store.folder.glob(f"{MARK}*"), key=lambda p: p.stat().st_mtime):
            with contextlib.suppress(RemoteProtocolError, OSError):
                spec = Spec.parse(path.read_bytes())
                self._specs[spec.id] = spec

    def use(self, spec: Spec) -> bool:
        """A stream with `spec` was opened. Returns whether it is new; sweeps the store then."""
        known = spec.id in self._specs
        self._specs[spec.id] = spec
        self._specs.move_to_end(spec.id)
        if known:
            return False
        self._mark(spec).write_bytes(spec.manifest())
        while len(self._specs) > MAX_SPECS:
            _, gone = self._specs.popitem(last=False)
            self._mark(gone).unlink(missing_ok=True)
        keep = {digest for kept in self._specs.values() for digest, _ in kept.blobs}
        self._store.sweep(keep, KEEP_UNUSED_S)
        return True

    def _mark(self, spec: Spec) -> Path:
        return self._store.folder / f"{MARK}{spec.id.hex()}"
