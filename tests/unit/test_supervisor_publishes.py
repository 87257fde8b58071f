"""Sidecars hear of feeders without holding up the feeders, however many come at once."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest
from feeder_client import wait_until

from dataloaderjob.core.settings import SupervisorSettings
from dataloaderjob.supervisor.feeder_set import Drain, Endpoint
from dataloaderjob.supervisor.main import Supervisor

FEEDERS = 256
SLOW_S = 0.05


@pytest.fixture
def supervisor(tmp_path: Path) -> Supervisor:
    (tmp_path / "key").write_bytes(bytes(32))
    settings = SupervisorSettings(
        job="job", key_path=str(tmp_path / "key"), blob_folder=str(tmp_path / "blobs"), provider="local",
        host_socket=str(tmp_path / "s"), state_path=str(tmp_path / "state"), port=0, num_feeders=FEEDERS,
        feeder_blob_folder=str(tmp_path / "blobs"),
    )  # fmt: skip
    return Supervisor(settings)


def test_256_feeders_reporting_at_once_need_few_lists_and_no_waiting(
    supervisor: Supervisor, monkeypatch: pytest.MonkeyPatch
):
    told: list[int] = []

    def publish() -> None:
        told.append(len(supervisor.listing()["feeders"]))
        time.sleep(SLOW_S)  # a sidecar that reads slowly

    monkeypatch.setattr(supervisor._server, "publish", publish)
    threading.Thread(target=supervisor._publish_forever, daemon=True).start()
    begun = time.monotonic()
    for index in range(FEEDERS):
        assert supervisor.feeder_ready(Endpoint(f"feeder-{index}", f"i{index}", "127.0.0.1", 1 + index))
    assert time.monotonic() - begun < FEEDERS * SLOW_S / 4
    wait_until(lambda: told[-1:] == [FEEDERS], 5, "sidecars are told of all feeders")
    assert len(told) < FEEDERS / 4


def test_leaving_feeder_is_drained_after_the_sidecars_are_informed(
    supervisor: Supervisor, monkeypatch: pytest.MonkeyPatch
):
    log: list[str] = []
    monkeypatch.setattr(supervisor._server, "publish", lambda: log.append("list"))
    monkeypatch.setattr(supervisor._server, "drain", lambda process: log.append(process[1]))
    endpoint = Endpoint("feeder-0", "i0", "127.0.0.1", 1)
    assert supervisor.feeder_ready(endpoint)
    supervisor._act(Drain(endpoint), desired=0)
    assert log == []
    threading.Thread(target=supervisor._publish_forever, daemon=True).start()
    wait_until(lambda: "i0" in log, 5, "the feeder is told")
    assert log == ["list", "i0"]
