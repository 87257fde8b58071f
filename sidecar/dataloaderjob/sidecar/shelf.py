"""Which user code and data the trainers of this sidecar use, so that what none uses can be removed."""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from pathlib import Path

from dataloaderjob.core.blobs import BlobStore, Bundle
from dataloaderjob.core.errors import RemoteProtocolError

MAX_BUNDLES = 64
"""Eight ranks with a few loaders each. A dataset that changes at each epoch leaves one behind each time."""
KEEP_UNUSED_S = 120.0
"""A trainer writes its blobs before it tells their bundle."""
MARK = ".bundle-"
"""A file for each bundle in use: a sidecar that is started again does not sweep what it has not heard of yet."""


class Shelf:
    """The bundles that were told last, and the blobs that they need."""

    def __init__(self, store: BlobStore) -> None:
        self._store = store
        self._bundles: OrderedDict[bytes, Bundle] = OrderedDict()
        for path in sorted(store.folder.glob(f"{MARK}*"), key=lambda p: p.stat().st_mtime):
            with contextlib.suppress(RemoteProtocolError, OSError):
                bundle = Bundle.parse(path.read_bytes())
                self._bundles[bundle.id] = bundle

    def use(self, bundle: Bundle) -> bool:
        """A stream with `bundle` was opened. Returns whether it is new; sweeps the store then."""
        known = bundle.id in self._bundles
        self._bundles[bundle.id] = bundle
        self._bundles.move_to_end(bundle.id)
        if known:
            return False
        self._mark(bundle).write_bytes(bundle.manifest())
        while len(self._bundles) > MAX_BUNDLES:
            _, gone = self._bundles.popitem(last=False)
            self._mark(gone).unlink(missing_ok=True)
        keep = {digest for kept in self._bundles.values() for digest, _ in kept.blobs}
        self._store.sweep(keep, KEEP_UNUSED_S)
        return True

    def _mark(self, bundle: Bundle) -> Path:
        return self._store.folder / f"{MARK}{bundle.id.hex()}"
