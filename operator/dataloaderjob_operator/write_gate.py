"""Holds back an operator's writes while it does not know whether another one works."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator


class WriteGate:
    """Open at first."""

    def __init__(self) -> None:
        self._open = asyncio.Event()
        self._open.set()
        self._under_way: set[asyncio.Timeout] = set()

    @property
    def is_open(self) -> bool:
        return self._open.is_set()

    def shut(self) -> None:
        """Has writes wait, and gives up those that are under way."""
        self._open.clear()
        for write in self._under_way:
            write.reschedule(asyncio.get_running_loop().time())

    def open(self) -> None:
        """Lets the writes that wait go on."""
        self._open.set()

    @contextlib.asynccontextmanager
    async def passing(self) -> AsyncIterator[None]:
        """Waits until the gate is open, for one write. Raises TimeoutError when it is shut meanwhile."""
        await self._open.wait()
        async with asyncio.timeout(None) as write:
            self._under_way.add(write)
            try:
                yield
            finally:
                self._under_way.discard(write)
