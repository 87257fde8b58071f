"""Shorthands for tests of the feeder's machine."""

from __future__ import annotations

from dataloaderjob.feeder.feeding import Feeding
from dataloaderjob.feeder.feeding_states import Instruction, Job

A, B = b"a" * 16, b"b" * 16


def all_free(bundle: bytes) -> bool:
    """Every bundle's builder has nothing to do."""
    return True


def machine(*links: int, limit: int = 2, known: bytes | None = A) -> Feeding:
    made = Feeding(limit)
    for link in links or (1,):
        made.opened(link)
    if known is not None:
        made.bundle_ready(known)
    return made


def ask(
    m: Feeding,
    ticket: int,
    *,
    link: int = 1,
    stream: int = 1,
    room: int = 100,
    bundle: bytes = A,
    generation: int = 1,
):
    return m.ticket(
        link,
        generation=generation,
        stream=stream,
        ticket=ticket,
        bundle=bundle,
        flags=0,
        room=room,
        payload=b"",
    )


def build(m: Feeding, nbytes: int = 10) -> tuple[Job, list[Instruction]]:
    job = m.next_build(all_free)
    assert job is not None
    return job, m.built(job, nbytes)


def send(m: Feeding, job: Job) -> None:
    m.started(job)
    m.sent(job)


def which(ticket: int, *, link: int = 1, stream: int = 1, generation: int = 1) -> dict[str, int]:
    return {"link": link, "generation": generation, "stream": stream, "ticket": ticket}
