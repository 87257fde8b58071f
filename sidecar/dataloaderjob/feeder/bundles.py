"""Bundles of a feeder: manifests that came, blobs on their way, and the notes for those who wait.

All methods but `loading` are called under the server's lock; blobs come in threads of their own.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

from dataloaderjob.core.blobs import BlobStore, Bundle
from dataloaderjob.core.errors import ProtocolError, RemoteProtocolError, ServiceError
from dataloaderjob.core.feeding import Feeding
from dataloaderjob.core.feeding_states import Instruction, Job
from dataloaderjob.core.settings import FeederSettings
from dataloaderjob.feeder import supplies
from dataloaderjob.fetch.failures import pack_failure

log = logging.getLogger(__name__)

NOTE_AFTER_S = 2.0
NOTE_EVERY_S = 5.0
MAX_BUNDLES = 256
"""Manifests kept; the oldest that no ticket needs goes first."""
_FIRST_RETRY_S = 0.2
_LAST_RETRY_S = 5.0

Ended = Callable[[list[Instruction], bytes], None]


class _Wait(NamedTuple):
    what: str
    since: float
    next_note: float


class BundleStore:
    """What is known of every bundle that a receiver named."""

    def __init__(
        self,
        settings: FeederSettings,
        key: bytes,
        store: BlobStore,
        *,
        machine: Feeding,
        lock: threading.Lock,
        ended: Ended,
    ) -> None:
        """`ended(instructions, failure)` is called without the lock when a bundle is here, or lost."""
        self._settings, self._key, self._store = settings, key, store
        self._machine, self._lock, self._ended = machine, lock, ended
        self._bundles: dict[bytes, Bundle] = {}
        self._waits: dict[bytes, _Wait] = {}
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
            if old != bundle_id and self._machine.forget_bundle(old):
                del self._bundles[old]
        missing = self._store.missing(bundle)
        if not missing:
            self._machine.bundle_ready(bundle_id)
            return
        self._wait(bundle_id, f"waits for {sum(n for _, n in missing) / 1e6:.1f} MB of user code and data")
        threading.Thread(
            target=self._supply, args=(bundle_id, bundle), name="dlj-supply", daemon=True
        ).start()

    def notes(self) -> list[tuple[Job, bytes]]:
        """Lines that are due, each for a ticket that waits: the user sees what takes time."""
        now = time.monotonic()
        due = []
        for bundle_id, wait in self._waits.items():
            if now < wait.next_note:
                continue
            self._waits[bundle_id] = wait._replace(next_note=now + NOTE_EVERY_S)
            text = f"{wait.what}, since {now - wait.since:.0f} s".encode()
            due += [(job, text) for job in self._machine.waiting(bundle_id)]
        return due

    @contextlib.contextmanager
    def loading(self, bundle_id: bytes) -> Iterator[Bundle]:
        """Notes while the build thread loads this bundle. Call without the lock."""
        with self._lock:
            bundle = self._bundles[bundle_id]
            self._wait(
                bundle_id, f"loads user code and data ({sum(n for _, n in bundle.blobs) / 1e6:.1f} MB)"
            )
        try:
            yield bundle
        finally:
            with self._lock:
                self._waits.pop(bundle_id, None)

    def _wait(self, bundle_id: bytes, what: str) -> None:
        now = time.monotonic()
        self._waits[bundle_id] = _Wait(what, now, now + NOTE_AFTER_S)

    def _wanted(self, bundle_id: bytes) -> bool:
        with self._lock:
            return self._machine.wanted(bundle_id) and not self.stopping

    def _supply(self, bundle_id: bytes, bundle: Bundle) -> None:
        """Brings a bundle's blobs here, trying for as long as a ticket waits for them."""
        delay_s = _FIRST_RETRY_S
        while True:
            here, failure = self._bring(bundle_id, bundle)
            with self._lock:
                over = here or failure or self.stopping or not self._machine.wanted(bundle_id)
                if over:
                    self._waits.pop(bundle_id, None)
                    instructions: list[Instruction] = []
                    if here:
                        self._machine.bundle_ready(bundle_id)
                    else:
                        instructions = self._machine.bundle_lost(bundle_id)
            if over:
                self._ended(instructions, failure)
                return
            time.sleep(delay_s)
            delay_s = min(2 * delay_s, _LAST_RETRY_S)

    def _bring(self, bundle_id: bytes, bundle: Bundle) -> tuple[bool, bytes]:
        """Returns whether all blobs are here, and a packed failure if they never will be."""
        try:
            for digest, nbytes in self._store.missing(bundle):
                if not supplies.fetch(
                    self._settings,
                    self._key,
                    self._store,
                    digest,
                    nbytes,
                    wanted=lambda: self._wanted(bundle_id),
                ):
                    return False, b""
        except ServiceError as exc:
            return False, pack_failure(
                exc, position=None, key=None, phase="loading", feeder=self._settings.name
            )
        except (OSError, ProtocolError) as exc:
            log.warning("%s: a blob did not come, trying again: %s", self._settings.name, exc)
            return False, b""
        return True, b""
