"""The sidecar of an attached pod: it is there before feeders, and may have been started with an earlier job's files."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from batches import Numbers
from ports import reserve_port
from rig import JOB, Rig, until
from supervisor_alone import SupervisorAlone

from dataloaderjob import DataLoader
from dataloaderjob.core import keys
from dataloaderjob.core.errors import ServiceUnavailable
from dataloaderjob.core.keys import Holder
from dataloaderjob.supervisor.feeder_set import Endpoint
from dataloaderjob.trainer.session import client

OWN_KEY = "sidecar-key"
DEADLINE_S = 6.0
"""Enough for the first batch on a busy machine."""


@pytest.fixture
def rig() -> Iterator[Rig]:
    """A sidecar whose supervisor is not there yet, with a batch deadline that a test can wait for."""
    port = reserve_port()
    options = {"supervisor_host": "127.0.0.1", "supervisor_port": port, "awaits_feeders": True}
    made = Rig(feeders=1, batch_deadline_s=DEADLINE_S, progress_after_s=0.5, **options)
    own = keys.derive((made.home / "key").read_bytes(), Holder.SIDECAR)
    (made.home / OWN_KEY).write_bytes(own)
    made.sidecar_options["key_path"] = str(made.home / OWN_KEY)
    with made:
        yield made


def supervisor(rig: Rig, folder: Path) -> SupervisorAlone:
    """Knows the rig's feeder."""
    key, port = (rig.home / "key").read_bytes(), rig.sidecar_options["supervisor_port"]
    made = SupervisorAlone(folder, job=JOB, key=key, host="127.0.0.1", port=port)
    made.has_ray()
    _, about = rig.feeders[0]
    instance = about["instance"]
    link = keys.wrap(
        keys.derive(key, Holder.SIDECAR), key, instance
    )  # without a supervisor, a feeder's is its own key
    made.reports(Endpoint(about["name"], instance, about["host"], about["port"], link=link))
    return made


def change(rig: Rig, **settings: str) -> None:
    """Replaces the settings file as the kubelet does, at once."""
    path = rig.home / "sidecar.json"
    (rig.home / "new").write_text(json.dumps({**json.loads(path.read_text()), **settings}))
    os.replace(rig.home / "new", path)


def take() -> list[int]:
    return [int(batch[0]) for batch in DataLoader(Numbers(4), batch_size=1)]


@pytest.mark.thorough
def test_trainer_waits_longer_than_its_deadline_for_the_first_feeder(
    rig: Rig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "GRACE_S", 0.0)  # the trainer's own limit, beyond the sidecar's
    started = time.monotonic()
    later = threading.Timer(1.5 * DEADLINE_S, lambda: supervisor(rig, tmp_path))
    later.start()
    try:
        assert take() == [0, 1, 2, 3]
    finally:
        later.join()
    assert time.monotonic() - started > 1.5 * DEADLINE_S
    assert (
        f"the job's supervisor at 127.0.0.1:{rig.sidecar_options['supervisor_port']} cannot be" in rig.logs()
    )


def test_trainer_of_a_job_that_has_ended_is_told_why(rig: Rig) -> None:
    change(rig, ended="StartupDeadlineExceeded: no feeder within 900 s")
    with pytest.raises(ServiceUnavailable, match="the job has ended: StartupDeadlineExceeded"):
        take()


@pytest.mark.thorough
@pytest.mark.parametrize("what", ["key", "job"])
def test_sidecar_with_files_of_an_earlier_job_starts_again(rig: Rig, what: str, tmp_path: Path) -> None:
    right = (rig.home / OWN_KEY).read_bytes()
    rig.kill_sidecar()
    rig.start_sidecar()
    if what == "job":
        change(rig, job="team/mnist/a-later-uid")
    else:
        (rig.home / OWN_KEY).write_bytes(bytes(reversed(right)))
    process = rig.sidecar
    assert process is not None
    until(lambda: process.poll() is not None, 15.0, "the sidecar ends, and the kubelet starts it again")
    assert process.returncode == 0
    text = "the job's key has changed" if what == "key" else "are now for team/mnist/a-later-uid"
    assert text in rig.logs()
    change(rig, job=JOB)
    (rig.home / OWN_KEY).write_bytes(right)
    rig.start_sidecar()
    supervisor(rig, tmp_path)
    assert take() == [0, 1, 2, 3]


@pytest.mark.thorough
def test_files_that_are_missing_for_a_moment_change_nothing(rig: Rig, tmp_path: Path) -> None:
    path = rig.home / "sidecar.json"
    text = path.read_text()
    path.unlink()
    started = time.monotonic()
    until(lambda: time.monotonic() - started > 3.0, what="it has looked")
    assert rig.sidecar is not None
    assert rig.sidecar.poll() is None
    path.write_text(text)
    supervisor(rig, tmp_path)
    torch.manual_seed(0)
    assert take() == [0, 1, 2, 3]
