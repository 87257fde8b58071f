"""The templates and builders that a feeder uses: asked for, watched, ended. No user code runs in this process.

A session is one loader's one epoch (`Bundle.id`); it has one builder at a time. Its bundle as loaded, the template,
outlives it for the next epoch. All methods are called by the feeder's one loop.

    LOADING   its template is not ready
    STARTING  its builder runs worker_init_fn
    FREE      its builder waits for a job
    BUSY      its builder makes a batch
    ENDING    nobody needs it any more; its builder is about to end
    (none)    forgotten
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import NamedTuple, Protocol

from dataloaderjob.core.blobs import Bundle
from dataloaderjob.core.errors import ServiceError
from dataloaderjob.core.feeding_states import Job, State
from dataloaderjob.core.settings import FeederSettings
from dataloaderjob.feeder import channel as ch
from dataloaderjob.feeder.builder import Session as Introduction
from dataloaderjob.feeder.channel import Channel, Kind, Message
from dataloaderjob.fetch.failures import pack_failure

END_GRACE_S = 2.0
"""What user code is in the middle of when its session ends may take so long."""
HUNG_S = 5.0
"""A builder that still makes what was cancelled so long ago is ended."""
ORPHAN_S = 10.0
"""A session whose receivers are gone is kept so long: a link may come back."""
MAX_FIRST_DEATHS = 2
"""A builder that ends so often before worker_init_fn is through fails its session."""
NOTE_AFTER_S = 2.0
NOTE_EVERY_S = 5.0


class Phase(Enum):
    LOADING = auto()
    STARTING = auto()
    FREE = auto()
    BUSY = auto()
    ENDING = auto()


class Body(NamedTuple):
    """A built batch in shared memory."""

    session: Session
    buffer: int
    view: memoryview
    crc: int


@dataclass(slots=True, eq=False)
class Session:
    """See the table above."""

    bundle: Bundle
    base_seed: int
    since: float
    phase: Phase = Phase.LOADING
    number: int = 0
    """Of its builder, at its template."""
    channel: Channel | None = None
    job: Job | None = None
    buffers: dict[int, mmap.mmap] = field(default_factory=dict)
    deadline: float = float("inf")
    """When its builder is ended."""
    orphan_since: float | None = None
    noted_at: float = 0.0


@dataclass(slots=True, eq=False)
class _Template:
    """A bundle as loaded, by a process that forks builders."""

    bundle: Bundle
    channel: Channel
    loaded: bool = False
    again: bool = False
    """It ended once before it had loaded the bundle: another feeder's failure may have taken it along."""
    used_at: float = 0.0
    last_number: int = 0
    sessions: list[Session] = field(default_factory=list)
    spare: tuple[int, Channel] | None = None
    """A builder that waits for its session, so that the next epoch begins without a fork."""


class Owner(Protocol):
    """What the feeder's loop is told. Called within its turns."""

    def session_free(self, bundle: bytes) -> None: ...
    def built(self, job: Job, body: Body) -> None: ...
    def failed(self, job: Job, payload: bytes) -> None: ...
    def lost(self, job: Job, position: int, text: str) -> None: ...
    def progress(self, job: Job, position: int) -> None: ...
    def bundle_failed(self, bundle: bytes, payload: bytes) -> None: ...
    def session_gone(self, bundle: bytes) -> None: ...
    def watch(self, end: Channel, callback: Callable[[], None]) -> None: ...
    def unwatch(self, end: Channel) -> None: ...


class Builders:
    """All templates and sessions of one feeder."""

    def __init__(self, settings: FeederSettings, requests: socket.socket, owner: Owner) -> None:
        """`requests`: to the host."""
        self.loads = 0
        """Bundles that were loaded for this feeder."""
        self._settings, self._requests, self._owner = settings, requests, owner
        self._templates: dict[bytes, _Template] = {}
        self._sessions: dict[bytes, Session] = {}
        self._latest: dict[tuple[int, int], bytes] = {}
        """The bundle that each loader of each receiver's trainer used last: (link, loader) -> `Bundle.code`."""
        self._first_deaths: dict[bytes, int] = {}

    # The feeder's side

    def has(self, bundle: bytes) -> bool:
        return bundle in self._sessions

    def free(self, bundle: bytes) -> bool:
        session = self._sessions.get(bundle)
        return session is not None and session.phase is Phase.FREE

    def discards(self, bundle: bytes) -> bool:
        """Whether its builder makes what was cancelled meanwhile."""
        session = self._sessions.get(bundle)
        return session is not None and session.job is not None and session.job.state is State.DISCARDED

    def busy(self) -> Iterator[Job]:
        """Jobs that builders make."""
        yield from (session.job for session in self._sessions.values() if session.job is not None)

    def open(self, bundle: Bundle, base_seed: int) -> None:
        """Begins a session whose blobs are here; `Owner.session_free` tells when it can be used."""
        now = time.monotonic()
        session = self._sessions[bundle.id] = Session(bundle, base_seed, now)
        template = self._templates.get(bundle.code) or self._load(bundle)
        template.sessions.append(session)
        if template.loaded:
            self._start(template, session)

    def use(self, link: int, bundle: Bundle) -> None:
        """A receiver's trainer works with this bundle now: what the same loader had before is of no further use."""
        before = self._latest.get((link, bundle.loader))
        if before != bundle.code:
            self._latest[link, bundle.loader] = bundle.code
            if before is not None:
                self._trim()

    def closed(self, link: int) -> None:
        """A receiver is gone; its trainer, too, or it comes back."""
        self._latest = {key: code for key, code in self._latest.items() if key[0] != link}

    def build(self, job: Job) -> None:
        """Has the builder of a session that is FREE make a batch."""
        session = self._sessions[job.bundle]
        session.phase, session.job = Phase.BUSY, job
        if session.channel is not None:
            session.channel.post(Kind.BUILD, a=job.serial, b=job.ticket, flags=job.flags, payload=job.payload)

    def release(self, body: Body) -> None:
        """The body is sent, or given up."""
        body.view.release()
        if body.session.channel is not None:
            body.session.channel.post(Kind.FREE, a=body.buffer)

    def acknowledge(self, job: Job) -> None:
        """What `Owner.progress` told has left."""
        session = self._sessions.get(job.bundle)
        if session is not None and session.job is job and session.channel is not None:
            session.channel.post(Kind.ACK)

    def end(self, bundle: bytes) -> None:
        """No receiver needs the session any more."""
        session = self._sessions.get(bundle)
        if session is None or session.phase is Phase.ENDING:
            return
        if session.channel is None:
            self._forget(session)
            return
        self._close(session)
        session.phase, session.deadline = Phase.ENDING, time.monotonic() + END_GRACE_S

    def tick(self, now: float, used: Callable[[bytes], bool]) -> None:
        """What time asks for. Call about once a second."""
        for bundle, session in list(self._sessions.items()):
            if session.phase is not Phase.ENDING:
                if used(bundle):
                    session.orphan_since = None
                else:
                    session.orphan_since = session.orphan_since or now
                    if now - session.orphan_since > ORPHAN_S:
                        self.end(bundle)
            if session.job is None or session.job.state is not State.DISCARDED:
                if session.phase is Phase.BUSY:
                    session.deadline = float("inf")
            elif session.phase is Phase.BUSY and session.deadline == float("inf"):
                session.deadline = now + HUNG_S
            if now >= session.deadline:
                self._kill(session)

    def notes(self, now: float) -> Iterator[tuple[bytes, str]]:
        """Lines that are due about sessions that take time to begin: (bundle, text)."""
        for bundle, session in self._sessions.items():
            since = session.since
            if session.phase not in (Phase.LOADING, Phase.STARTING) or now - since < NOTE_AFTER_S:
                continue
            if now - session.noted_at >= NOTE_EVERY_S:
                session.noted_at = now
                loading = f"loads user code and data ({session.bundle.nbytes / 1e6:.1f} MB)"
                what = loading if session.phase is Phase.LOADING else "runs worker_init_fn"
                yield bundle, f"{what}, since {now - since:.0f} s"

    def close(self) -> None:
        """The feeder ends: so do all its templates and builders, of which the host takes care."""
        for session in self._sessions.values():
            if session.channel is not None:
                session.channel.close()
        for template in self._templates.values():
            template.channel.close()
        self._requests.close()

    # Templates

    def _load(self, bundle: Bundle) -> _Template:
        here, there = ch.pair()
        request = {
            "code": bundle.code.hex(), "manifest": bundle.manifest().decode(), "blobs": self._settings.blob_folder,
        }  # fmt: skip
        with there:
            socket.send_fds(self._requests, [json.dumps(request).encode()], [there.fileno()])
        template = self._templates[bundle.code] = _Template(bundle, Channel(here))
        self._owner.watch(template.channel, lambda: self._hear(template))
        return template

    def _hear(self, template: _Template) -> None:
        """A template's messages."""
        messages, alive = template.channel.read()
        template.channel.flush()
        for message in messages:
            if message.kind == Kind.LOADED:
                self.loads += 1
                template.loaded = True
                for session in template.sessions[:]:
                    self._start(template, session)
            elif message.kind == Kind.LOAD_FAILED:
                self._fail_all(template, message.payload)
                return
            elif message.kind == Kind.ENDED:
                self._builder_ended(template, message)
        if not alive and self._templates.get(template.bundle.code) is template:
            self._template_ended(template)

    def _template_ended(self, template: _Template) -> None:
        if not template.loaded and not template.again:
            self._drop(template)
            another = self._load(template.bundle)
            another.again, another.sessions = True, template.sessions
            return
        if not template.loaded:
            error = ServiceError(
                "the process that loads the dataset ended while it did so: look for a crash in native code or too "
                "little memory there; its last output is in the job's log"
            )
            self._fail_all(template, pack_failure(error, phase="loading", feeder=self._settings.name))
            return
        self._drop(template)
        for session in template.sessions[:]:
            self._died(template, session, "ended with the process that had loaded its dataset", ch.NOWHERE)

    def _fail_all(self, template: _Template, payload: bytes) -> None:
        self._drop(template)
        for session in template.sessions[:]:
            self._forget(session, template)
            self._owner.bundle_failed(session.bundle.id, payload)

    def _drop(self, template: _Template) -> None:
        """Ends a template, with all its builders."""
        del self._templates[template.bundle.code]
        self._owner.unwatch(template.channel)
        template.channel.close()
        if template.spare is not None:
            template.spare[1].close()
        with contextlib.suppress(OSError):
            self._requests.send(json.dumps({"code": template.bundle.code.hex()}).encode())

    def _trim(self) -> None:
        """Ends templates that are of no further use, and the oldest idle ones beyond their bound in bytes."""
        latest = set(self._latest.values())
        idle = [t for t in self._templates.values() if not t.sessions]
        for template in idle:
            if template.bundle.code not in latest:
                self._drop(template)
        idle = sorted((t for t in idle if t.bundle.code in self._templates), key=lambda t: t.used_at)
        nbytes = sum(t.bundle.nbytes for t in idle)
        while len(idle) > 1 and nbytes > self._settings.max_idle_nbytes:
            nbytes -= idle[0].bundle.nbytes
            self._drop(idle.pop(0))

    # Builders

    def _fork(self, template: _Template) -> tuple[int, Channel]:
        here, there = ch.pair()
        template.last_number += 1
        template.channel.post(Kind.FORK, a=template.last_number, fd=there.detach())
        return template.last_number, Channel(here)

    def _start(self, template: _Template, session: Session) -> None:
        """Gives the session a builder."""
        number, channel = template.spare or self._fork(template)
        template.spare = None
        session.number, session.channel, session.phase = number, channel, Phase.STARTING
        self._owner.watch(channel, lambda: self._listen(session, channel))
        introduction = Introduction(
            feeder=self._settings.name, index=self._settings.index, num_workers=self._settings.num_feeders,
            base_seed=session.base_seed, allow_pickle=session.bundle.allow_pickle,
        )  # fmt: skip
        channel.post(Kind.INIT, payload=introduction.pack())

    def _listen(self, session: Session, channel: Channel) -> None:
        """A builder's messages. That it ended is told by its template."""
        if session.channel is not channel:
            return
        messages, alive = channel.read()
        channel.flush()
        for message in messages:
            self._message(session, message)
        if not alive and session.channel is channel:
            self._close(session)

    def _message(self, session: Session, message: Message) -> None:
        job = session.job
        if message.kind == Kind.UP:
            self._first_deaths.pop(session.bundle.id, None)
            session.phase = Phase.FREE
            self._owner.session_free(session.bundle.id)
        elif message.kind == Kind.INIT_FAILED:
            self.end(session.bundle.id)
            self._owner.bundle_failed(session.bundle.id, message.payload)
        elif message.kind == Kind.BUFFER and message.fd is not None:
            session.buffers[message.a] = _mapped(message.fd, message.b)
        elif message.kind == Kind.DROP:
            session.buffers.pop(message.a, None)
        elif job is None or message.a != job.serial:
            return
        elif message.kind == Kind.PROGRESS:
            self._owner.progress(job, message.b)
        elif message.kind == Kind.BUILT:
            number, nbytes, crc = ch.BUILT.unpack(message.payload)
            body = Body(session, number, memoryview(session.buffers[number])[:nbytes], crc)
            self._finished(session)
            self._owner.built(job, body)
        elif message.kind == Kind.FAILED:
            self._finished(session)
            self._owner.failed(job, message.payload)

    def _finished(self, session: Session) -> None:
        session.phase, session.job, session.deadline = Phase.FREE, None, float("inf")
        template = self._templates.get(session.bundle.code)
        if template is not None and template.spare is None:
            template.spare = self._fork(template)

    def _builder_ended(self, template: _Template, message: Message) -> None:
        code, serial, position = ch.ENDED.unpack(message.payload)
        if template.spare is not None and template.spare[0] == message.a:
            template.spare[1].close()
            template.spare = None
            return
        session = next((s for s in template.sessions if s.number == message.a), None)
        if session is None:
            return
        if session.job is None or session.job.serial != serial:
            position = ch.NOWHERE
        self._died(template, session, _how(code), position)

    def _died(self, template: _Template, session: Session, how: str, position: int) -> None:
        was, job = session.phase, session.job
        self._forget(session, template)
        if job is not None:
            self._owner.lost(job, position, how)
        if was is Phase.STARTING and self._hopeless(session):
            error = ServiceError(f"the process that runs worker_init_fn {how}, {MAX_FIRST_DEATHS} times")
            failure = pack_failure(error, phase="worker_init_fn", feeder=self._settings.name)
            self._owner.bundle_failed(session.bundle.id, failure)
        else:
            self._owner.session_gone(session.bundle.id)

    def _hopeless(self, session: Session) -> bool:
        deaths = self._first_deaths.pop(session.bundle.id, 0) + 1
        if deaths < MAX_FIRST_DEATHS:
            self._first_deaths[session.bundle.id] = deaths
        return deaths >= MAX_FIRST_DEATHS

    def _kill(self, session: Session) -> None:
        session.deadline = float("inf")
        template = self._templates.get(session.bundle.code)
        if template is not None:
            template.channel.post(Kind.KILL, a=session.number)

    def _close(self, session: Session) -> None:
        """The builder ends when it reads on."""
        if session.channel is not None:
            self._owner.unwatch(session.channel)
            session.channel.close()
            session.channel = None

    def _forget(self, session: Session, template: _Template | None = None) -> None:
        self._close(session)
        template = template or self._templates.get(session.bundle.code)
        if self._sessions.get(session.bundle.id) is session:
            del self._sessions[session.bundle.id]
        if template is not None:
            template.used_at = time.monotonic()
            if session in template.sessions:
                template.sessions.remove(session)
        self._trim()


def _mapped(fd: int, nbytes: int) -> mmap.mmap:
    try:
        return mmap.mmap(fd, nbytes, prot=mmap.PROT_READ)
    finally:
        os.close(fd)


def _how(code: int) -> str:
    if code >= 0:
        return f"ended with exit code {code}"
    with contextlib.suppress(ValueError):
        return f"was ended by {signal.Signals(-code).name}"
    return f"was ended by signal {-code}"
