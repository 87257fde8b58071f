"""How a trainer comes to a sidecar that is overrun, and what it says when there is none any more."""

from __future__ import annotations

import socket
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from dataloaderjob.core import ipc
from dataloaderjob.core.errors import ServiceUnavailable
from dataloaderjob.trainer.session import attach


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with (
        tempfile.TemporaryDirectory(prefix="dlj") as folder,
        socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock,
    ):
        sock.bind(str(Path(folder) / "s"))
        sock.listen()
        yield sock


def test_overloaded_sidecar_is_retried(listener: socket.socket):
    def serve() -> None:
        for _ in range(3):
            listener.accept()[0].close()
        peer, _ = listener.accept()
        peer.recv(1 << 16)
        peer.send(ipc.pack_json(ipc.Type.REFUSED, {"error": "enough of you"})[0])
        peer.close()

    threading.Thread(target=serve, daemon=True).start()
    with pytest.raises(ServiceUnavailable, match="enough of you"):
        attach.attach(listener.getsockname(), "0", None, [])


def test_sidecar_overloaded_for_long_is_given_up(listener: socket.socket, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(attach, "BUSY_S", 0.2)

    def serve() -> None:
        while True:
            listener.accept()[0].close()

    threading.Thread(target=serve, daemon=True).start()
    with pytest.raises(ConnectionError):
        attach.attach(listener.getsockname(), "0", None, [])


def test_outcome_of_a_service_is_read_from_its_folder(tmp_path: Path):
    path = tmp_path / "run" / "s"
    assert attach.failure(str(path)) == "it was killed, and its folder is gone"
    path.parent.mkdir()
    assert attach.failure(str(path)) is None
    path.with_name("failed").write_text("no memory\n")
    assert attach.failure(str(path)) == "no memory"
