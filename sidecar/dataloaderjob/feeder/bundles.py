"""Bundles that receivers have named: their manifests, the transfer of their blobs, and the templates that load them.

The feeder's loop calls all methods. Threads fetch the blobs, one thread per bundle, and report to the loop when done.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from dataloaderjob.core import supervision
from dataloaderjob.core.blobs import NODE_KEEP_S, BlobStore, Bundle
from dataloaderjob.core.errors import ProtocolError, RemoteProtocolError
from dataloaderjob.core.frames import SINCE
from dataloaderjob.core.processes import Backoff
from dataloaderjob.core.settings import FeederSettings
from dataloaderjob.feeder import channel as ch
from dataloaderjob.feeder.blobs import BlobFetcher
from dataloaderjob.feeder.channel import Channel, Message, MessageKind, Template, Watching
from dataloaderjob.feeder.ends import End
from dataloaderjob.feeder.feeding import Feeding
from dataloaderjob.feeder.feeding_states import Instruction

if TYPE_CHECKING:
    from dataloaderjob.core.credentials import Credentials

log = logging.getLogger(__name__)

NOTE_AFTER_S = 2.0
NOTE_EVERY_S = 5.0
MAX_BUNDLES = 256
"""Maximum number of manifests kept. The oldest one that no ticket needs is dropped first."""
MAX_IDLE_TEMPLATES = 8
"""Maximum number of templates to keep without a session, because nobody reports that a loader was garbage-collected."""
LOADING = "the process that loads the dataset"
LOOK = (
    "look for a crash in native code or a lack of memory there; see the last lines that this feeder printed"
)
MAX_SPARES = 2
"""Maximum number of idle templates for which one builder is forked ahead of time."""
_BACKOFF = Backoff(0.2, 5.0)
Soon = Callable[[Callable[[], None]], None]
"""Makes the loop call the function that is passed. Safe to call from any thread."""


@dataclass(slots=True)
class _Wait:
    """The blobs of a bundle that are being fetched."""

    nbytes: int
    since: float
    noted_at: float = 0.0


class BundleStore:
    """The manifests and blobs of all bundles."""

    def __init__(
        self,
        settings: FeederSettings,
        key: bytes,
        machine: Feeding,
        *,
        address: Callable[[], tuple[str, int]],
        soon: Soon,
        here: Callable[[bytes], None],
        lost: Callable[[list[Instruction], bytes], None],
        tls: Credentials | None = None,
    ) -> None:
        """`address`: returns this feeder's host and port. `here(bundle)`: reports that a bundle's blobs are on this
        node. `lost(instructions, failure)`: reports that they cannot be obtained."""
        self._settings, self._machine = settings, machine
        self._store = BlobStore(Path(settings.blob_folder))
        self.blobs = BlobFetcher(settings, key, self._store, address, tls)
        self._soon, self._here, self._lost = soon, here, lost
        self._bundles: dict[bytes, Bundle] = {}
        self._waits: dict[bytes, _Wait] = {}
        self._kept_at = 0.0
        self.stopping = False

    def __getitem__(self, bundle_id: bytes) -> Bundle:
        return self._bundles[bundle_id]

    def learn(self, bundle_id: bytes, manifest: bytes) -> None:
        """Handles a BUNDLE frame. Raises RemoteProtocolError if the manifest is not that bundle's."""
        bundle = Bundle.parse(manifest)
        if bundle.id != bundle_id:
            raise RemoteProtocolError(
                f"the manifest of bundle {bundle.id.hex()} was sent under id {bundle_id.hex()}"
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
        """Forgets a bundle that nobody uses. If a ticket needs it again, its manifest is requested again."""
        if self._machine.forget_bundle(bundle_id):
            self._bundles.pop(bundle_id, None)

    def keep(self, now: float) -> None:
        """Occasionally marks the blobs that are in use, and removes unused ones, if the folder belongs to this node
        alone."""
        if self._settings.sweeps_blobs and now - self._kept_at > NODE_KEEP_S / 10:
            self._kept_at = now
            for bundle in self._bundles.values():
                self._store.touch(bundle)
            self._store.sweep(set(), NODE_KEEP_S)

    def notes(self, now: float) -> Iterator[tuple[bytes, str]]:
        """Yields (bundle, text) for each note that is due about blobs that are slow to arrive."""
        for bundle_id, wait in self._waits.items():
            if is_due(now, wait.since, wait.noted_at):
                wait.noted_at = now
                since = now - wait.since
                yield (
                    bundle_id,
                    f"is waiting for {wait.nbytes / 1e6:.1f} MB of user code and data{SINCE}{since:.0f} s",
                )

    def _wanted(self, bundle_id: bytes) -> bool:
        return self._machine.wanted(bundle_id) and not self.stopping

    def _supply(self, bundle_id: bytes, bundle: Bundle) -> None:
        """Fetches a bundle's blobs, retrying while a ticket waits for them."""
        fetch = functools.partial(self.blobs.fetch, wanted=lambda: self._wanted(bundle_id))
        here, failure = False, b""
        for failures in itertools.count(1):
            try:
                here = all(fetch(digest, nbytes) for digest, nbytes in self._store.missing(bundle))
            except (OSError, ProtocolError) as exc:
                log.warning("%s: could not fetch a blob, trying again: %s", self._settings.name, exc)
            except Exception as exc:  # if the thread died, the bundle's tickets would wait forever
                failure = supervision.pack_failure("ServiceError", f"{self._settings.name}: {exc}")
            if here or failure or not self._wanted(bundle_id):
                self._soon(functools.partial(self._over, bundle_id, here, failure))
                return
            time.sleep(_BACKOFF.spread_s(failures))

    def _over(self, bundle_id: bytes, here: bool, failure: bytes) -> None:
        self._waits.pop(bundle_id, None)
        if here:
            self._here(bundle_id)
        else:
            self._lost(self._machine.bundle_lost(bundle_id), failure)


def is_due(now: float, since: float, noted_at: float) -> bool:
    """Returns True if a note is due about something that began at `since`. The intervals between notes grow."""
    return now - since >= NOTE_AFTER_S and now - noted_at >= max(NOTE_EVERY_S, noted_at - since)


class TemplateOwner(Protocol):
    """A handler of templates' events."""

    def loaded(self, template: Template) -> None: ...
    def load_failed(self, template: Template, payload: bytes) -> None: ...
    def builder_ended(self, template: Template, message: Message) -> None: ...
    def template_ended(self, template: Template) -> None: ...
    def loading_ended(self) -> End: ...


class Templates:
    """A feeder's templates, by `Bundle.code`."""

    def __init__(
        self,
        settings: FeederSettings,
        requests: socket.socket,
        watching: Watching,
        owner: TemplateOwner,
        *,
        relayed: bool,
    ) -> None:
        """`requests`: the socket to the zygote. `relayed`: user code that is loading prints to this process's
        output."""
        self.loads = 0
        """Number of bundles loaded for this feeder."""
        self._settings, self._requests, self._watching, self._owner = settings, requests, watching, owner
        self._output = [1] if relayed else []
        self._templates: dict[bytes, Template] = {}
        self._latest: dict[tuple[int, int], bytes] = {}
        """(receiver, loader) -> `Bundle.code` of the last bundle that this loader of the receiver's trainer used."""

    def get(self, bundle: Bundle) -> Template:
        """Returns the template of a bundle whose blobs are on this node. `TemplateOwner.loaded` reports when it is
        ready."""
        return self._templates.get(bundle.code) or self._load(bundle)

    def has(self, template: Template) -> bool:
        """Returns True while the template is in use."""
        return self._templates.get(template.bundle.code) is template

    def use(self, receiver: int, bundle: Bundle) -> None:
        """Records that a receiver's trainer uses this bundle now. The same loader no longer needs its previous
        bundle."""
        before = self._latest.get((receiver, bundle.loader))
        if before != bundle.code:
            self._latest[receiver, bundle.loader] = bundle.code
            if before is not None:
                self.trim()

    def closed(self, receiver: int) -> None:
        """Records that a receiver is gone. Either its trainer is gone, too, or the receiver will reconnect."""
        self._latest = {key: code for key, code in self._latest.items() if key[0] != receiver}
        self.trim()

    def trim(self) -> None:
        """Ends templates that no loader can use, and the oldest idle ones beyond the limits."""
        latest = set(self._latest.values())
        idle = [t for t in self._templates.values() if not t.sessions]
        for template in idle:
            if template.bundle.code not in latest:
                self.drop(template)
        idle = sorted(filter(self.has, idle), key=lambda t: t.used_at)
        nbytes = sum(t.bundle.nbytes for t in idle)
        while len(idle) > MAX_IDLE_TEMPLATES or (len(idle) > 1 and nbytes > self._settings.max_idle_nbytes):
            nbytes -= idle[0].bundle.nbytes
            self.drop(idle.pop(0))
        for template in idle[:-MAX_SPARES]:
            _end_spare(template)

    def drop(self, template: Template) -> None:
        """Ends a template and all its builders."""
        del self._templates[template.bundle.code]
        self._watching.unwatch(template.channel)
        template.channel.close()
        _end_spare(template)
        with contextlib.suppress(OSError):
            self._requests.send(json.dumps({"code": template.bundle.code.hex()}).encode())

    # Builders

    def builder(self, template: Template) -> tuple[int, Channel]:
        """Returns (number, channel) of a new builder: the one that was forked ahead of time, or one that is forked
        now."""
        spare, template.spare = template.spare, None
        return spare or self._fork(template)

    def fork_ahead(self, template: Template, nbytes: int) -> None:
        """Forks a builder ahead of time, so that the next session begins without a fork. `nbytes`: the size of a
        body."""
        if template.spare is None and self.has(template):
            template.spare = self._fork(template, nbytes)

    def _fork(self, template: Template, nbytes: int = 0) -> tuple[int, Channel]:
        here, there = ch.pair()
        template.last_number += 1
        template.channel.post(MessageKind.FORK, a=template.last_number, b=nbytes, fd=there.detach())
        return template.last_number, Channel(here)

    # Internals

    def _load(self, bundle: Bundle) -> Template:
        here, there = ch.pair()
        request = {
            "code": bundle.code.hex(), "manifest": bundle.manifest().decode(), "blobs": self._settings.blob_folder,
        }  # fmt: skip
        with there:
            socket.send_fds(self._requests, [json.dumps(request).encode()], [there.fileno(), *self._output])
        template = self._templates[bundle.code] = Template(bundle, Channel(here))
        self._watching.watch(template.channel, lambda: self._listen(template))
        return template

    def _listen(self, template: Template) -> None:
        """Handles a template's messages."""
        messages, alive = template.channel.read()
        template.channel.flush()
        for message in messages:
            if message.kind == MessageKind.LOADED:
                self.loads += 1
                template.loaded = True
                self._owner.loaded(template)
            elif message.kind == MessageKind.LOAD_FAILED:
                self._failed(template, message.payload)
                return
            elif message.kind == MessageKind.ENDED and not self._spare_ended(template, message.a):
                self._owner.builder_ended(template, message)
        if not alive and self.has(template):
            self._ended(template)

    def _ended(self, template: Template) -> None:
        if template.loaded:
            self.drop(template)
            self._owner.template_ended(template)
        elif not template.again:
            self.drop(template)
            self._owner.loading_ended()
            another = self._load(template.bundle)
            another.again, another.sessions = True, template.sessions
            for session in another.sessions:
                session.template = another
        else:
            end = self._owner.loading_ended()
            self._failed(template, end.failure(f"{self._settings.name}: {LOADING}", f": {LOOK}"))

    def _failed(self, template: Template, payload: bytes) -> None:
        self.drop(template)
        self._owner.load_failed(template, payload)

    def _spare_ended(self, template: Template, number: int) -> bool:
        if template.spare is None or template.spare[0] != number:
            return False
        _end_spare(template)
        return True


def _end_spare(template: Template) -> None:
    if template.spare is not None:
        template.spare[1].close()
        template.spare = None
