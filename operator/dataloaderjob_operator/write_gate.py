"""The gate that holds back an operator's writes while another operator may be active."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator


class WriteGate:
    """A gate that writes pass through; it is open at first."""

    def __init__(self) -> None:
        self._open = asyncio.Event()
        self._open.set()
        self._under_way: set[asyncio.Timeout] = set()

    @property
    def is_open(self) -> bool:
        return self._open.is_set()

    def shut(self) -> None:
        """Makes new writes wait, and aborts writes in progress."""
        self._open.clear()
        for write in self._under_way:
            write.reschedule(asyncio.get_running_loop().time())

    def open(self) -> None:
        """Lets waiting writes proceed."""
        self._open.set()

    @contextlib.asynccontextmanager
    async def passing(self) -> AsyncIterator[None]:
        """Waits until the gate is open, then lets one write pass. Raises TimeoutError if the gate shuts before the
        write has finished."""
        await self._open.wait()
        async with asyncio.timeout(None) as write:
            self._under_way.add(write)
            try:
                yield
            finally:
                self._under_way.discard(write)
