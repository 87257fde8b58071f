"""When a pod of feeders is ready, and the trial of its image, with real processes."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any

import psutil
import pytest
from rig import until

from dataloaderjob.core.errors import ServiceError
from dataloaderjob.core.settings import NODE_OUTPUT
from dataloaderjob.pod import readiness
from dataloaderjob.pod.feeder import Output
from dataloaderjob.pod.readiness import Feeders, Readiness, Step, Trial, next_step
from dataloaderjob.providers.ray import actor, node

NOBODY: dict[str, Any] = {
    "placed": 0,
    "serving": 0,
    "empty_since": 100.0,
    "shown": False,
    "patience_s": 10.0,
    "now": 105.0,
}


@pytest.mark.parametrize(
    ("seen", "step"),
    [
        pytest.param({"placed": 1}, Step.WAIT, id="a feeder starts here"),
        pytest.param({"placed": 1, "now": 900.0, "shown": True}, Step.WAIT, id="one starts again, and takes long"),
        pytest.param({"placed": 1, "serving": 1}, Step.READY, id="it serves"),
        pytest.param({"placed": 2, "serving": 1}, Step.WAIT, id="one of two serves"),
        pytest.param({}, Step.WAIT, id="none yet"),
        pytest.param({"shown": True}, Step.WAIT, id="the last one has just ended"),
        pytest.param({"now": 110.0}, Step.TRY, id="none comes"),
        pytest.param({"now": 110.0, "shown": True}, Step.READY, id="none comes, and the image can feed"),
    ],
)  # fmt: skip
def test_pod_is_ready_while_its_feeders_serve_or_after_a_passed_trial(seen: dict[str, Any], step: Step):
    assert next_step(**{**NOBODY, **seen}) is step


class FakeTrial:
    """Answers what the test says."""

    made: list[FakeTrial]
    answer: bool | Exception | None = None
    closed = False

    def __init__(self, *_: object) -> None:
        self.made.append(self)

    def passed(self) -> bool | None:
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer

    def close(self) -> None:
        self.closed = True


class Clocked:
    """A pod's readiness in virtual time."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr(readiness.time, "monotonic", lambda: self.now)
        FakeTrial.made = []
        monkeypatch.setattr(readiness, "Trial", FakeTrial)
        self.feeders = Feeders()
        self.path = folder / "ready"
        self.readiness = Readiness(self.path, self.feeders, patience_s=10.0, trial_timeout_s=300.0)
        self.readiness.joined()

    def ready(self, later_s: float = 0.0) -> bool:
        self.now += later_s
        self.readiness.look()
        return self.path.exists()

    @property
    def trials(self) -> list[FakeTrial]:
        return FakeTrial.made


@pytest.fixture
def pod(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Clocked:
    return Clocked(tmp_path, monkeypatch)


def test_readiness_follows_the_feeders_of_the_pod(pod: Clocked):
    assert not pod.ready()
    first = pod.feeders.begins()
    assert not pod.ready(60.0)
    pod.feeders.serves(first)
    assert pod.ready()
    second = pod.feeders.begins()
    assert not pod.ready(), "one that is placed here serves not yet"
    pod.feeders.serves(second)
    assert pod.ready()
    pod.feeders.ends(first)
    assert pod.ready()
    pod.feeders.ends(second)
    assert not pod.ready()
    assert pod.ready(10.0), "none is wanted here, and the image has shown what it can"
    assert pod.trials == []
    pod.readiness.close()
    assert not pod.path.exists()


def test_a_pod_without_feeders_is_ready_once_its_trial_has_passed(pod: Clocked):
    assert not pod.ready(9.0)
    assert pod.trials == []
    assert not pod.ready(1.0)
    assert not pod.ready(60.0)
    (trial,) = pod.trials
    trial.answer = True
    assert pod.ready()
    assert trial.closed
    assert pod.ready(600.0)
    assert len(pod.trials) == 1


def test_failed_trial_ends_the_pod_unless_a_feeder_was_placed_meanwhile(pod: Clocked):
    pod.ready(10.0)
    pod.trials[0].answer = ServiceError("this image cannot run feeders: no torch")
    number = pod.feeders.begins()
    assert not pod.ready(), "the feeder itself shows it, and the supervisor tells why it does not come"
    assert pod.trials[0].closed
    pod.feeders.ends(number)
    pod.ready(10.0)
    pod.trials[1].answer = pod.trials[0].answer
    with pytest.raises(ServiceError, match="no torch"):
        pod.ready()
    assert not pod.path.exists()
    pod.readiness.close()
    assert pod.trials[1].closed


def test_feeder_that_never_served_requires_a_new_trial(pod: Clocked):
    pod.ready(10.0)
    pod.trials[0].answer = True
    assert pod.ready()
    pod.feeders.ends(pod.feeders.begins())
    assert not pod.ready(10.0)
    pod.trials[1].answer = True
    assert pod.ready()


def test_ready_file_of_an_earlier_container_is_removed(tmp_path: Path):
    (tmp_path / "ready").touch()
    Readiness(tmp_path / "ready", Feeders(), patience_s=10.0, trial_timeout_s=300.0)
    assert not (tmp_path / "ready").exists()


def children() -> list[psutil.Process]:
    return psutil.Process().children(recursive=True)


def test_trial_of_a_working_image_starts_a_real_feeder_and_cleans_up():
    before = children()
    trial = Trial(120.0)
    try:
        assert until(trial.passed, 120.0, "a feeder serves")
        (host,) = [
            process
            for process in children()
            if process not in before and "dataloaderjob.feeder.host" in process.cmdline()
        ][:1]
    finally:
        trial.close()
    assert not host.is_running() or host.status() == psutil.STATUS_ZOMBIE
    until(lambda: children() == before, 10.0, "all it started has gone")


def test_trial_without_torch_fails_with_the_last_line_of_its_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise ImportError('libcudart.so.13: cannot open it')\n")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    trial = Trial(120.0)

    def failure() -> str:
        try:
            return "passed" if trial.passed() else ""
        except ServiceError as exc:
            return str(exc)

    try:
        words = until(failure, 120.0, "the trial's end")
    finally:
        trial.close()
    assert words.startswith("this image cannot run feeders: its process ended with code ")
    assert "libcudart.so.13: cannot open it" in words
    assert "libcudart" in capsys.readouterr().err


def test_trial_that_takes_too_long_reports_the_missing_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "slow_host.py").write_text("import time\nprint('reading', flush=True)\ntime.sleep(600)\n")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    monkeypatch.setattr(node, "HOST_MODULE", "slow_host")
    trial = Trial(3.0)
    try:
        with pytest.raises(
            ServiceError, match=r"a feeder did not start serving within 3 s; its last line: reading"
        ):
            until(trial.passed, 30.0, "its deadline")
    finally:
        trial.close()


def test_pod_notices_when_its_feeder_serves_and_ends(tmp_path: Path):
    feeders = Feeders()
    output = Output(tmp_path / NODE_OUTPUT, feeders)
    try:
        pid = os.fork()
        if pid == 0:
            _play_feeder(tmp_path)
        until(lambda: feeders.counts()[:2] == (1, 0), 10.0, "it was placed")
        (tmp_path / "go").touch()
        until(lambda: feeders.counts()[:2] == (1, 1), 10.0, "it serves")
        (tmp_path / "end").touch()
        os.waitpid(pid, 0)
        until(lambda: feeders.counts()[:2] == (0, 0), 10.0, "it has ended")
        assert not feeders.take_failed()
    finally:
        output.close()


def _play_feeder(folder: Path) -> None:
    life = actor.hand_over("feeder-3", folder)
    until((folder / "go").exists, 20.0)
    if life is not None:
        os.write(life, b"\1")
    until((folder / "end").exists, 20.0)
    os._exit(0)


def test_message_without_a_life_descriptor_registers_no_feeder(tmp_path: Path):
    feeders = Feeders()
    output = Output(tmp_path / NODE_OUTPUT, feeders)
    reader, writer = os.pipe()
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
            sock.connect(str(tmp_path / NODE_OUTPUT))
            socket.send_fds(sock, [b"feeder-3"], [reader, reader])
    finally:
        os.close(reader)
    output.close()
    os.close(writer)
    assert feeders.counts()[:2] == (0, 0)
