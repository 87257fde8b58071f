"""Sessions and templates of a feeder, as values; `builders` and `templates` change them.

A session is one loader's one epoch (`Bundle.id`); it has one builder at a time. Its bundle as loaded, the template,
outlives it for the next epoch.

    LOADING   its template is not ready
    STARTING  its builder runs worker_init_fn
    FREE      its builder waits for a task
    BUSY      its builder makes a batch
    ENDING    nobody needs it any more; its builder is about to end
    (none)    forgotten
"""

from __future__ import annotations

import json
import mmap
from dataclasses import asdict, dataclass, field
from enum import Enum, auto
from typing import NamedTuple

from dataloaderjob.core.blobs import Bundle
from dataloaderjob.feeder.channel import Channel
from dataloaderjob.feeder.feeding_states import Task


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
    template: Template
    base_seed: int
    since: float
    phase: Phase = Phase.LOADING
    number: int = 0
    """Of its builder, at its template."""
    channel: Channel | None = None
    task: Task | None = None
    buffers: dict[int, mmap.mmap] = field(default_factory=dict)
    deadline: float = float("inf")
    """When its builder is ended."""
    ended_at: float = 0.0
    orphan_since: float | None = None
    noted_at: float = 0.0


@dataclass(slots=True, eq=False)
class Template:
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Introduction:
    """Whom a builder works for, and as whom."""

    feeder: str
    index: int
    num_workers: int
    base_seed: int
    allow_pickle: bool

    def pack(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @staticmethod
    def parse(data: bytes) -> Introduction:
        return Introduction(**json.loads(data))
