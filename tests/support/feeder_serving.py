"""A FeederServer in this process, or a feeder by itself in another, for tests."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from feeder_client import Receiver

from dataloaderjob.core.settings import FeederSettings, dump
from dataloaderjob.feeder.server import FeederServer

KEY = bytes(range(32))
Connect = Callable[[], Receiver]


def blobs(folder: Path) -> Path:
    return folder / "blobs"


def settings_in(folder: Path) -> FeederSettings:
    (folder / "key").write_bytes(KEY)
    return FeederSettings(job="job", key_path=str(folder / "key"), blob_folder=str(blobs(folder)))


@contextmanager
def serving(folder: Path) -> Iterator[FeederServer]:
    interval = sys.getswitchinterval()
    made = FeederServer(settings_in(folder))
    made.start()
    yield made
    made.stop()
    assert made.join(10) is None
    sys.setswitchinterval(interval)


@contextmanager
def connecting(server: FeederServer) -> Iterator[Connect]:
    """A function that opens links; all are closed at the end."""
    made: list[Receiver] = []

    def connect() -> Receiver:
        made.append(Receiver(server.port, KEY))
        return made[-1]

    yield connect
    for receiver in made:
        receiver.sock.close()


@contextmanager
def feeder_process(folder: Path) -> Iterator[tuple[subprocess.Popen[str], dict[str, Any]]]:
    """A feeder by itself, and what it said when it was ready."""
    dump(settings_in(folder), folder / "feeder.json")
    process = subprocess.Popen(
        [sys.executable, "-m", "dataloaderjob.feeder.server", "--settings", str(folder / "feeder.json")],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parent)},
    )
    try:
        assert process.stdout is not None
        yield process, json.loads(process.stdout.readline())
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
