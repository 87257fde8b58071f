"""Which user code and data the trainers of this sidecar use, so that what none uses can be removed."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable

from dataloaderjob.core.blobs import BlobStore, Bundle

KEEP_UNUSED_S = 120.0
"""A trainer writes its blobs before it tells their bundle, and may have to attach again meanwhile."""

MAX_LOADERS = 16
"""Loaders of one trainer whose last bundles are kept: who uses another again stores it again."""


class BundleGc:
    """The bundles of live streams, and the last one of each loader, whose next epoch may need it again.

    So the disk holds what is in use, and a dataset that changes at each epoch leaves nothing behind.
    """

    def __init__(self, store: BlobStore) -> None:
        self._store = store
        self._live: dict[tuple[int, bytes], Bundle] = {}
        """(receiver's pid, `Bundle.id`) -> bundle."""
        self._last: dict[tuple[int, int], Bundle] = {}
        """(receiver's pid, number of the loader) -> bundle."""
        # A sidecar before this one may have known who uses them: trainers have time to attach again.
        self._touch(path.name for path in store.folder.iterdir())

    def use(self, receiver: int, bundle: Bundle) -> None:
        """A stream with `bundle` was opened."""
        self._live[receiver, bundle.id] = bundle
        before = self._last.get((receiver, bundle.loader))
        self._last.pop((receiver, bundle.loader), None)
        self._last[receiver, bundle.loader] = bundle  # the newest comes last
        for key in [key for key in self._last if key[0] == receiver][:-MAX_LOADERS]:
            self._let_go([self._last.pop(key)])
        if before is None or before.code != bundle.code:
            self._store.sweep(self._kept(), KEEP_UNUSED_S)

    def released(self, receiver: int, bundle_id: bytes) -> None:
        """The last stream with that bundle was closed."""
        bundle = self._live.pop((receiver, bundle_id), None)
        self._let_go([] if bundle is None else [bundle])

    def gone(self, receiver: int) -> None:
        """The receiver ended; its trainer, too, or it attaches again."""
        self._let_go([self._live.pop(key) for key in list(self._live) if key[0] == receiver])
        self._let_go([self._last.pop(key) for key in list(self._last) if key[0] == receiver])

    def _kept(self) -> set[str]:
        bundles = (*self._live.values(), *self._last.values())
        return {digest for bundle in bundles for digest, _ in bundle.blobs}

    def _let_go(self, bundles: Iterable[Bundle]) -> None:
        self._touch(digest for bundle in bundles for digest, _ in bundle.blobs)

    def _touch(self, names: Iterable[str]) -> None:
        for name in names:
            with contextlib.suppress(OSError):
                os.utime(self._store.folder / name)
