"""When a feeder on somebody else's nodes ends because its supervisor is gone, in virtual time."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dataloaderjob.core.settings import FeederSettings
from dataloaderjob.feeder import connections
from dataloaderjob.feeder.connections import EXIT_LEASE_OVER, Registration

LEASE_S = 20.0


class SupervisorOfSpans:
    """A supervisor that answers in some spans of time, and the clock. A feeder that ends raises SystemExit."""

    def __init__(self, spans: list[tuple[float, float]]) -> None:
        self.now, self._spans = 0.0, spans

    def _until(self) -> float | None:
        return next((end for start, end in self._spans if start <= self.now < end), None)

    @contextlib.contextmanager
    def connect(self, *_: Any) -> Iterator[None]:
        if self._until() is None:
            raise ConnectionRefusedError("nobody listens")
        yield

    def listen(self, *_: Any) -> None:
        self.now = self._until() or self.now
        raise ConnectionError("the supervisor has closed the connection")

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def exit(self, code: int) -> None:
        raise SystemExit(code)


@pytest.mark.parametrize(
    ("spans", "ends"),
    [
        pytest.param([], LEASE_S, id="it never comes"),
        pytest.param([(3.0, 3600.0)], 3600.0 + LEASE_S, id="it goes"),
        pytest.param(
            [(3.0, 3600.0), (3615.0, 7200.0)], 7200.0 + LEASE_S, id="it was away for less than a lease"
        ),
        pytest.param([(3.0, 3600.0), (3625.0, 7200.0)], 3600.0 + LEASE_S, id="it was away for longer"),
    ],
)
def test_feeder_ends_a_lease_after_it_last_had_a_supervisor(
    spans: list[tuple[float, float]], ends: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = SupervisorOfSpans(spans)
    (tmp_path / "key").write_bytes(bytes(32))
    settings = FeederSettings(
        job="j", key_path=str(tmp_path / "key"), blob_folder=str(tmp_path), lease_s=LEASE_S
    )
    monkeypatch.setattr(connections, "time", SimpleNamespace(monotonic=lambda: world.now, sleep=world.sleep))
    monkeypatch.setattr(connections, "connect_as_feeder", world.connect)
    monkeypatch.setattr(connections.sockets, "send_message", lambda *_: None)
    monkeypatch.setattr(connections.os, "_exit", world.exit)
    monkeypatch.setattr(connections.logging, "shutdown", lambda: None)
    monkeypatch.setattr(Registration, "_listen", world.listen)
    registration = Registration(
        settings, host="127.0.0.1", port=7, instance="i", link_key=bytes(32), idle=lambda: True
    )
    with pytest.raises(SystemExit) as ended:
        registration._forever()
    assert ended.value.code == EXIT_LEASE_OVER
    assert ends <= world.now < ends + 2.5
