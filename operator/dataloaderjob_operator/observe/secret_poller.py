"""Children that no watch tells of: Secrets, which nobody should have to list. Each is asked for by its name, in turns.

With up to EVERY_S / LEAST_S jobs that have not ended, one that was deleted is missed within EVERY_S; with more the turn
takes longer, and the API server is asked no more often.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Protocol

from dataloaderjob_operator.client import ApiError
from dataloaderjob_operator.decide.observed import Key
from dataloaderjob_operator.objects import Manifest
from dataloaderjob_operator.observe.cache import JobKey

log = logging.getLogger(__name__)

EVERY_S = 8.0
LEAST_S = 0.1
KINDS = frozenset({"Secret"})


class Reader(Protocol):
    """What they are asked of."""

    async def read(self, namespace: str, key: Key) -> Manifest | None:
        """An object as it is now, None if it is not there. Raises ApiError."""


class SecretPoller:
    """Those known to be there. `run` until cancelled finds out which are no longer."""

    def __init__(
        self,
        api: Reader,
        changed: Callable[[JobKey], None],
        ended: Callable[[JobKey], bool] = lambda _: False,
    ) -> None:
        """`ended`: jobs of which no pod needs any more."""
        self._api, self._changed, self._ended = api, changed, ended
        self._there: dict[JobKey, dict[Key, str]] = {}

    def __contains__(self, what: tuple[JobKey, Key]) -> bool:
        key, child = what
        return child in self._there.get(key, ())

    def saw(self, key: JobKey, thing: Manifest) -> None:
        """It is there, or has just been made. One of a kind that is watched is not remembered."""
        if thing["kind"] in KINDS:
            metadata = thing["metadata"]
            self._there.setdefault(key, {})[thing["kind"], metadata["name"]] = metadata.get("uid", "")

    def forget(self, key: JobKey) -> None:
        """The job is gone."""
        self._there.pop(key, None)

    async def run(self) -> None:
        while True:
            there = {key: children for key, children in self._there.items() if not self._ended(key)}
            turn = [(key, child) for key, children in there.items() for child in children]
            if not turn:
                await asyncio.sleep(EVERY_S)
            for key, child in turn:
                await asyncio.sleep(max(LEAST_S, EVERY_S / len(turn)))
                await self.look(key, child)

    async def look(self, key: JobKey, child: Key) -> None:
        """Once, at one of them."""
        try:
            found = await self._api.read(key[0], child)
        except ApiError as exc:
            log.warning("cannot read %s %s/%s: %s", child[0], key[0], child[1], exc)
            return
        mine = self._there.get(key, {})
        if child in mine and (found is None or found["metadata"].get("uid") != mine[child]):
            del mine[child]
            self._changed(key)
