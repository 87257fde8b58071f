"""The end of the operator's process."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest

from dataloaderjob_operator.__main__ import close_generators


async def closing_slowly(closed: list[str]) -> AsyncIterator[int]:
    """A stream whose end takes several turns of the loop, as that of kopf's watches does."""
    try:
        while True:
            yield 1
    finally:
        await asyncio.sleep(0.01)
        closed.append("in order")


async def stream(closed: list[str]) -> AsyncIterator[int]:
    async for number in closing_slowly(closed):
        yield number


async def abandon(closed: list[str]) -> None:
    """Ends a task in the middle of a stream, which leaves the stream to asyncio."""

    async def consume() -> None:
        async for _ in stream(closed):
            await asyncio.sleep(60)

    task = asyncio.create_task(consume())
    await asyncio.sleep(0.01)
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task


@pytest.mark.parametrize("waits", [True, False])
def test_abandoned_streams_are_closed_before_the_loop_ends(waits: bool) -> None:
    closed: list[str] = []

    async def main() -> None:
        await abandon(closed)
        if waits:
            await close_generators()

    asyncio.run(main())
    assert closed == (["in order"] if waits else [])


def test_stream_that_does_not_close_ends_the_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dataloaderjob_operator.__main__.CLOSING_S", 0.05)

    async def endless() -> AsyncIterator[int]:
        try:
            yield 1
        finally:
            await asyncio.sleep(60)

    async def main() -> float:
        await anext(endless())
        began = asyncio.get_running_loop().time()
        await close_generators()
        return asyncio.get_running_loop().time() - began

    assert asyncio.run(main()) < 5
