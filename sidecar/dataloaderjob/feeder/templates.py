"""The templates that a feeder has at its host: asked for, kept while a loader may use them, ended."""

from __future__ import annotations

import contextlib
import json
import socket
from typing import Protocol

from dataloaderjob.core import supervision
from dataloaderjob.core.blobs import Bundle
from dataloaderjob.core.settings import FeederSettings
from dataloaderjob.feeder import channel as ch
from dataloaderjob.feeder.channel import Channel, Kind, Message, Template, Watching

MAX_IDLE = 8
"""Templates that no session uses: their loaders may have been collected, of which nobody tells."""
MAX_SPARES = 2
"""Most templates with a builder forked ahead."""


class Owner(Protocol):
    """What is told of templates."""

    def loaded(self, template: Template) -> None: ...
    def load_failed(self, template: Template, payload: bytes) -> None: ...
    def builder_ended(self, template: Template, message: Message) -> None: ...
    def template_ended(self, template: Template) -> None: ...


class Templates:
    """A feeder's templates by `Bundle.code`."""

    def __init__(
        self,
        settings: FeederSettings,
        requests: socket.socket,
        watching: Watching,
        owner: Owner,
        *,
        relayed: bool,
    ) -> None:
        """`requests`: to the zygote. `relayed`: what user code prints while it is loaded goes where ours goes."""
        self.loads = 0
        """Bundles that were loaded for this feeder."""
        self._settings, self._requests, self._watching, self._owner = settings, requests, watching, owner
        self._output = [1] if relayed else []
        self._templates: dict[bytes, Template] = {}
        self._latest: dict[tuple[int, int], bytes] = {}
        """The bundle that each loader of each receiver's trainer used last: (receiver, loader) -> `Bundle.code`."""

    def get(self, bundle: Bundle) -> Template:
        """The template of a bundle whose blobs are here; `Owner.loaded` tells when a new one can be used."""
        return self._templates.get(bundle.code) or self._load(bundle)

    def has(self, template: Template) -> bool:
        """Whether it is still in use."""
        return self._templates.get(template.bundle.code) is template

    def use(self, receiver: int, bundle: Bundle) -> None:
        """A receiver's trainer works with this bundle now: what the same loader had before is of no further use."""
        before = self._latest.get((receiver, bundle.loader))
        if before != bundle.code:
            self._latest[receiver, bundle.loader] = bundle.code
            if before is not None:
                self.trim()

    def closed(self, receiver: int) -> None:
        """A receiver is gone; its trainer, too, or it comes back."""
        self._latest = {key: code for key, code in self._latest.items() if key[0] != receiver}
        self.trim()

    def trim(self) -> None:
        """Ends templates that no loader may use, and the oldest idle ones beyond their bounds."""
        latest = set(self._latest.values())
        idle = [t for t in self._templates.values() if not t.sessions]
        for template in idle:
            if template.bundle.code not in latest:
                self.drop(template)
        idle = sorted(filter(self.has, idle), key=lambda t: t.used_at)
        nbytes = sum(t.bundle.nbytes for t in idle)
        while len(idle) > MAX_IDLE or (len(idle) > 1 and nbytes > self._settings.max_idle_nbytes):
            nbytes -= idle[0].bundle.nbytes
            self.drop(idle.pop(0))
        for template in idle[:-MAX_SPARES]:
            _end_spare(template)

    def drop(self, template: Template) -> None:
        """Ends a template, with all its builders."""
        del self._templates[template.bundle.code]
        self._watching.unwatch(template.channel)
        template.channel.close()
        _end_spare(template)
        with contextlib.suppress(OSError):
            self._requests.send(json.dumps({"code": template.bundle.code.hex()}).encode())

    def close(self) -> None:
        for template in self._templates.values():
            template.channel.close()
        self._requests.close()

    # Builders

    def builder(self, template: Template) -> tuple[int, Channel]:
        """A new builder: the one that was forked ahead, or one forked now."""
        spare, template.spare = template.spare, None
        return spare or self._fork(template)

    def fork_ahead(self, template: Template, nbytes: int) -> None:
        """Has a builder ready, so that the next session begins without a fork. `nbytes`: of a body."""
        if template.spare is None and self.has(template):
            template.spare = self._fork(template, nbytes)

    def _fork(self, template: Template, nbytes: int = 0) -> tuple[int, Channel]:
        here, there = ch.pair()
        template.last_number += 1
        template.channel.post(Kind.FORK, a=template.last_number, b=nbytes, fd=there.detach())
        return template.last_number, Channel(here)

    # Within

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
        """A template's messages."""
        messages, alive = template.channel.read()
        template.channel.flush()
        for message in messages:
            if message.kind == Kind.LOADED:
                self.loads += 1
                template.loaded = True
                self._owner.loaded(template)
            elif message.kind == Kind.LOAD_FAILED:
                self._failed(template, message.payload)
                return
            elif message.kind == Kind.ENDED and not self._spare_ended(template, message.a):
                self._owner.builder_ended(template, message)
        if not alive and self.has(template):
            self._ended(template)

    def _ended(self, template: Template) -> None:
        if template.loaded:
            self.drop(template)
            self._owner.template_ended(template)
        elif not template.again:
            self.drop(template)
            another = self._load(template.bundle)
            another.again, another.sessions = True, template.sessions
            for session in another.sessions:
                session.template = another
        else:
            text = (
                f"{self._settings.name}: the process that loads the dataset ended while it did so: look for a crash "
                "in native code or too little memory there; see what this feeder printed last"
            )
            self._failed(template, supervision.pack_failure("ServiceError", text))

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
