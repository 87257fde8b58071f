"""Secrets of jobs, which no watch reports."""

from __future__ import annotations

import asyncio
from typing import Any

from dataloaderjob_operator.client import ApiError
from dataloaderjob_operator.observe import watch
from dataloaderjob_operator.observe.watch import SecretPoller

KEY, SECRET = ("team", "mnist"), ("Secret", "mnist-key")


def secret(uid: str = "u") -> dict[str, Any]:
    return {"kind": "Secret", "metadata": {"name": "mnist-key", "uid": uid}}


class Server:
    """What is there, and how often it was asked."""

    def __init__(self, there: Any) -> None:
        self.there, self.asked = there, 0

    async def read(self, namespace: str, key: tuple[str, str]) -> Any:
        self.asked += 1
        if isinstance(self.there, Exception):
            raise self.there
        return self.there


def tracked(server: Server) -> tuple[SecretPoller, list[Any]]:
    changed: list[Any] = []
    known = SecretPoller(server, changed.append)
    known.track(KEY, secret())
    asyncio.run(known.check(KEY, SECRET))
    return known, changed


def test_one_that_is_there_stays_known():
    known, changed = tracked(Server(secret()))
    assert (KEY, SECRET) in known
    assert changed == []


def test_a_secret_that_is_gone_or_another_brings_a_reconcile():
    for there in (None, secret("another")):
        known, changed = tracked(Server(there))
        assert (KEY, SECRET) not in known
        assert changed == [KEY]


def test_one_that_cannot_be_read_just_now_stays_known():
    known, changed = tracked(Server(ApiError(503, "not now")))
    assert (KEY, SECRET) in known
    assert changed == []


def test_kinds_that_are_watched_and_jobs_that_are_gone_are_not_asked_for():
    known = SecretPoller(Server(None), lambda key: None)
    known.track(KEY, {"kind": "Service", "metadata": {"name": "mnist-head"}})
    assert (KEY, ("Service", "mnist-head")) not in known
    known.track(KEY, secret())
    known.forget(KEY)
    assert (KEY, SECRET) not in known


def test_each_has_its_turn(monkeypatch):
    monkeypatch.setattr(watch, "SECRETS_EVERY_S", 0.02)
    monkeypatch.setattr(watch, "SECRETS_LEAST_S", 0.001)
    server, changed = Server(None), []

    async def run() -> None:
        known = SecretPoller(server, changed.append)
        task = asyncio.create_task(known.run())
        await asyncio.sleep(0)
        for number in range(5):
            known.track(("team", str(number)), secret())
        while len(changed) < 5:
            await asyncio.sleep(0.001)
        task.cancel()

    asyncio.run(asyncio.wait_for(run(), 20))
    assert sorted(changed) == [("team", str(number)) for number in range(5)]
    assert server.asked == 5, "one that is gone is asked for no more"
