"""Shorthands for tests of the feeder's machine."""

from __future__ import annotations

from dataloaderjob.feeder.feeding import Feeding
from dataloaderjob.feeder.feeding_states import Instruction, Task

A, B = b"a" * 16, b"b" * 16


def all_free(bundle: bytes) -> bool:
    """Every bundle's builder has nothing to do."""
    return True


def machine(*receivers: int, limit: int = 2, known: bytes | None = A) -> Feeding:
    made = Feeding(limit)
    for receiver in receivers or (1,):
        made.opened(receiver)
    if known is not None:
        made.bundle_ready(known)
    return made


def ask(
    m: Feeding,
    ticket: int,
    *,
    receiver: int = 1,
    stream: int = 1,
    room: int = 100,
    bundle: bytes = A,
):
    return m.ticket(
        receiver,
        stream=stream,
        ticket=ticket,
        bundle=bundle,
        flags=0,
        room=room,
        payload=b"",
    )


def build(m: Feeding, nbytes: int = 10) -> tuple[Task, list[Instruction]]:
    task = m.next_build(all_free)
    assert task is not None
    return task, m.built(task, nbytes)


def send(m: Feeding, task: Task) -> None:
    m.started(task)
    m.sent(task)


def which(ticket: int, *, receiver: int = 1, stream: int = 1) -> dict[str, int]:
    return {"receiver": receiver, "stream": stream, "ticket": ticket}
