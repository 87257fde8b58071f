"""The local provider against a host whose every answer the test gives."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dataloaderjob.core import sockets
from dataloaderjob.core.errors import InputError, ServiceError
from dataloaderjob.core.settings import SupervisorSettings
from dataloaderjob.core.supervision import Cause
from dataloaderjob.providers import local
from dataloaderjob.providers.local import LocalProvider
from dataloaderjob.supervisor.main import provider_of

Answer = Callable[[dict[str, Any]], dict[str, Any] | None]


class FakeHost:
    """Answers by `answer`; None hangs up."""

    def __init__(self, path: Path, answer: Answer) -> None:
        self.heard: list[dict[str, Any]] = []
        self._sock = socket.socket(socket.AF_UNIX)
        self._sock.bind(str(path))
        self._sock.listen()
        self._answer = answer
        self._peers: list[socket.socket] = []
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        while True:
            try:
                peer, _ = self._sock.accept()
            except OSError:
                return
            self._peers.append(peer)
            with peer:
                try:
                    while True:
                        self.heard.append(sockets.recv_message(peer))
                        answer = self._answer(self.heard[-1])
                        if answer is None:
                            break
                        sockets.send_message(peer, answer)
                except OSError:
                    continue

    def close(self) -> None:
        for sock in (self._sock, *self._peers):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()


@pytest.fixture
def path() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="dlj") as folder:
        yield Path(folder) / "f"


def provider(path: Path, **fields: Any) -> LocalProvider:
    made = provider_of(
        SupervisorSettings(
            job="j", key_path="k", blob_folder="b", feeder_blob_folder="b", state_path="s", port=1, provider="local",
            host_socket=str(path), **fields,
        )
    )  # fmt: skip
    assert isinstance(made, LocalProvider)
    return made


def feeder(name: str, code: int | None, words: str = "") -> dict[str, Any]:
    return {"name": name, "pid": 1, "code": code, "words": words}


def test_a_feeder_is_started_with_its_settings_and_ended_by_its_name(path: Path):
    host = FakeHost(path, lambda _: {"type": "ok", "pid": 5})
    made = provider(path)
    made.place(3, 8, "0f")
    made.kill(3)
    start, kill = host.heard
    settings = start["settings"]
    assert (settings["name"], settings["index"], settings["num_feeders"]) == ("feeder-3", 3, 8)
    assert settings["own_key"] == "0f"
    assert (settings["supervisor_host"], settings["supervisor_port"]) == ("127.0.0.1", 1)
    assert kill == {"type": "kill", "name": "feeder-3"}
    host.close()


def test_running_feeders_are_found_and_missing_ones_explained(path: Path):
    feeders = [
        feeder("feeder-1", None), feeder("feeder-0", 3, "No module named 'torch'"), feeder("feeder-2", -9),
        feeder("stranger", None),
    ]  # fmt: skip
    host = FakeHost(path, lambda _: {"type": "feeders", "feeders": feeders})
    made = provider(path)
    assert made.found() == [1]
    why = made.late([0, 1, 2, 3], taken=0, now=0.0)
    assert [(w.feeder, w.cause, w.dead) for w in why] == [
        (0, Cause.FAILS, True), (1, Cause.STARTS, False), (2, Cause.FAILS, True), (3, Cause.LOST, True),
    ]  # fmt: skip
    assert why[0].text == "its process ended with code 3: No module named 'torch'"
    assert "was killed by SIGKILL: memory may have run out" in why[2].text
    host.close()


def test_refusal_by_the_host_is_an_error_with_its_message(path: Path):
    host = FakeHost(path, lambda _: {"type": "error", "message": "no memory"})
    with pytest.raises(ServiceError, match="the feeder host refused 'start': no memory"):
        provider(path).place(0, 1, "")
    host.close()


def test_late_or_restarted_host_is_waited_for(path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(local, "ANSWER_TIMEOUT_S", 10.0)
    made = provider(path, init_timeout_s=10.0)
    late = threading.Timer(
        0.2, lambda: hosts.append(FakeHost(path, lambda _: {"type": "feeders", "feeders": []}))
    )
    hosts: list[FakeHost] = []
    late.start()
    made.connect()
    assert made.found() == []
    hosts[0].close()
    path.unlink()
    hosts.append(FakeHost(path, lambda _: {"type": "ok", "pid": 1}))
    made.place(0, 1, "")
    assert hosts[1].heard[-1]["type"] == "start"
    hosts[1].close()


def test_missing_host_is_reported_with_its_path(path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(local, "GONE_TIMEOUT_S", 0.1)
    made = provider(path, init_timeout_s=0.1)
    with pytest.raises(ServiceError, match=f"the feeder host at {path} does not answer: FileNotFoundError"):
        made.connect()
    made.kill(0)  # it has taken its feeders along


def test_unknown_provider_is_refused_with_the_valid_choices(path: Path):
    settings = provider(path)._settings
    with pytest.raises(InputError, match="one of ray, local, but is 'slurm'"):
        provider_of(type(settings)(**{**vars_of(settings), "provider": "slurm"}))
    with pytest.raises(InputError, match="needs host_socket"):
        provider_of(type(settings)(**{**vars_of(settings), "host_socket": None}))


def vars_of(settings: SupervisorSettings) -> dict[str, Any]:
    return {name: getattr(settings, name) for name in settings.__dataclass_fields__}


def test_a_supervisor_without_ray_imports_neither_ray_nor_torch():
    code = (
        "import sys, dataloaderjob.supervisor.main, dataloaderjob.providers.local\n"
        "print([name for name in ('ray', 'torch', 'numpy', 'pydantic') if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=os.environ
    )
    assert done.stdout.strip() == "[]"
