"""A feeder is not killed on the word of one receiver that cannot reach it."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from dataloaderjob.supervisor import main
from dataloaderjob.supervisor.main import Supervisor
from dataloaderjob.supervisor.reports import Reports


class Feeders:
    """What the supervisor would replace."""

    def __init__(self) -> None:
        self.replaced: list[str] = []

    def listed(self) -> list[Any]:
        return [type("Endpoint", (), {"instance": "i0"})()]

    def replace(self, name: str, *_: Any) -> list[str]:
        self.replaced.append(name)
        return ["kill"]


@pytest.fixture
def supervisor() -> Supervisor:
    made = object.__new__(Supervisor)
    made._lock = threading.Lock()
    made._changed = threading.Condition(made._lock)
    made._feeders = Feeders()  # type: ignore[assignment]
    made._urgent, made._witnesses, made._reports = [], {}, Reports()
    made._server = type("Server", (), {"publish": lambda self: None})()  # type: ignore[assignment]
    for sidecar in ("a", "b"):
        made._reports.add(sidecar, {"type": "metrics", "receivers": 2})
    return made


def replaced(supervisor: Supervisor) -> list[str]:
    return supervisor._feeders.replaced  # type: ignore[attr-defined, no-any-return]


def test_one_disconnected_receiver_of_four_ends_nothing(supervisor: Supervisor) -> None:
    for _ in range(5):
        supervisor.replace("feeder-0", "i0", "not reachable for 20 s", ("a", "0"))
    assert replaced(supervisor) == []


def test_majority_of_disconnected_receivers_ends_a_feeder(supervisor: Supervisor) -> None:
    for witness in (("a", "0"), ("a", "1"), ("b", "2")):
        supervisor.replace("feeder-0", "i0", "not reachable for 20 s", witness)
    assert replaced(supervisor) == ["feeder-0"]


def test_old_reports_do_not_count(supervisor: Supervisor, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(main.time, "monotonic", lambda: now)
    supervisor.replace("feeder-0", "i0", "not reachable", ("a", "0"))
    supervisor.replace("feeder-0", "i0", "not reachable", ("a", "1"))
    now += main.WITNESS_S + 1
    supervisor.replace("feeder-0", "i0", "not reachable", ("b", "2"))
    assert replaced(supervisor) == []


def test_connected_receiver_that_reports_a_hang_is_believed(supervisor: Supervisor) -> None:
    supervisor.replace("feeder-0", "i0", "silent while it had work to do", None)
    assert replaced(supervisor) == ["feeder-0"]
