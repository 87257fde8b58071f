"""Bundles that receivers named: their manifests, and their blobs on the way to this node.

All methods are called by the feeder's loop; blobs come in threads of their own, which hand their end to the loop.
"""

from __future__ import annotations

import functools
import itertools
import logging
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from dataloaderjob.core import supervision
from dataloaderjob.core.blobs import NODE_KEEP_S, BlobStore, Bundle
from dataloaderjob.core.errors import ProtocolError, RemoteProtocolError, ServiceError
from dataloaderjob.core.processes import Backoff
from dataloaderjob.core.settings import FeederSettings
from dataloaderjob.feeder import supervisor_client
from dataloaderjob.feeder.feeding import Feeding
from dataloaderjob.feeder.feeding_states import Instruction

log = logging.getLogger(__name__)

NOTE_AFTER_S = 2.0
NOTE_EVERY_S = 5.0
MAX_BUNDLES = 256
"""Manifests kept; the oldest that no ticket needs goes first."""
_BACKOFF = Backoff(0.2, 5.0)

Soon = Callable[[Callable[[], None]], None]
"""Has the loop call a function; from any thread."""


@dataclass(slots=True)
class _Wait:
    """Blobs on their way."""

    nbytes: int
    since: float
    noted_at: float = 0.0


class BundleStore:
    """What is known of every bundle."""

    def __init__(
        self,
        settings: FeederSettings,
        key: bytes,
        machine: Feeding,
        *,
        soon: Soon,
        here: Callable[[bytes], None],
        lost: Callable[[list[Instruction], bytes], None],
    ) -> None:
        """`here(bundle)`: its blobs are here. `lost(instructions, failure)`: they never will be."""
        self._settings, self._key, self._machine = settings, key, machine
        self._store = BlobStore(settings.blob_path)
        self._soon, self._here, self._lost = soon, here, lost
        self._bundles: dict[bytes, Bundle] = {}
        self._waits: dict[bytes, _Wait] = {}
        self._kept_at = 0.0
        self.stopping = False

    def __getitem__(self, bundle_id: bytes) -> Bundle:
        return self._bundles[bundle_id]

    def learn(self, bundle_id: bytes, manifest: bytes) -> None:
        """A BUNDLE frame. Raises RemoteProtocolError when the manifest is not that bundle's."""
        bundle = Bundle.parse(manifest)
        if bundle.id != bundle_id:
            raise RemoteProtocolError(
                f"the manifest of bundle {bundle.id.hex()} came as that of {bundle_id.hex()}"
            )
        if not self._machine.bundle_coming(bundle_id):
            return
        self._bundles[bundle_id] = bundle
        for old in list(self._bundles)[: max(0, len(self._bundles) - MAX_BUNDLES)]:
            if old != bundle_id:
                self.forget(old)
        missing = self._store.missing(bundle)
        if not missing:
            self._here(bundle_id)
            return
        self._waits[bundle_id] = _Wait(sum(n for _, n in missing), time.monotonic())
        threading.Thread(
            target=self._supply, args=(bundle_id, bundle), name="dlj-supply", daemon=True
        ).start()

    def forget(self, bundle_id: bytes) -> None:
        """Nobody uses it; if somebody does again, its manifest is asked for."""
        if self._machine.forget_bundle(bundle_id):
            self._bundles.pop(bundle_id, None)

    def keep(self, now: float) -> None:
        """Marks blobs in use from time to time, where feeders of this node remove those that are not."""
        if self._settings.sweeps_blobs and now - self._kept_at > NODE_KEEP_S / 10:
            self._kept_at = now
            for bundle in self._bundles.values():
                self._store.touch(bundle)
            self._store.sweep(set(), NODE_KEEP_S)

    def notes(self, now: float) -> Iterator[tuple[bytes, str]]:
        """Lines that are due about blobs that take time to come: (bundle, text)."""
        for bundle_id, wait in self._waits.items():
            if now - wait.since >= NOTE_AFTER_S and now - wait.noted_at >= NOTE_EVERY_S:
                wait.noted_at = now
                since = now - wait.since
                yield (
                    bundle_id,
                    f"waits for {wait.nbytes / 1e6:.1f} MB of user code and data, since {since:.0f} s",
                )

    def _wanted(self, bundle_id: bytes) -> bool:
        return self._machine.wanted(bundle_id) and not self.stopping

    def _supply(self, bundle_id: bytes, bundle: Bundle) -> None:
        """Brings a bundle's blobs here, trying for as long as a ticket waits for them."""
        for failures in itertools.count(1):
            try:
                here, failure = self._bring(bundle_id, bundle)
            except Exception as exc:  # a thread that broke would leave its tickets waiting for ever
                here, failure = False, self._failure(exc)
            if here or failure or not self._wanted(bundle_id):
                self._soon(functools.partial(self._over, bundle_id, here, failure))
                return
            time.sleep(_BACKOFF.wait_s(failures))

    def _over(self, bundle_id: bytes, here: bool, failure: bytes) -> None:
        self._waits.pop(bundle_id, None)
        if here:
            self._here(bundle_id)
        else:
            self._lost(self._machine.bundle_lost(bundle_id), failure)

    def _bring(self, bundle_id: bytes, bundle: Bundle) -> tuple[bool, bytes]:
        """Returns whether all blobs are here, and a packed failure if they never will be."""
        try:
            for digest, nbytes in self._store.missing(bundle):
                if not supervisor_client.fetch(
                    self._settings, self._key, self._store, digest, nbytes,
                    wanted=lambda: self._wanted(bundle_id),
                ):  # fmt: skip
                    return False, b""
        except ServiceError as exc:
            return False, self._failure(exc)
        except (OSError, ProtocolError) as exc:
            log.warning("%s: a blob did not come, trying again: %s", self._settings.name, exc)
            return False, b""
        return True, b""

    def _failure(self, exc: Exception) -> bytes:
        return supervision.pack_failure("ServiceError", f"{self._settings.name}: {exc}")
