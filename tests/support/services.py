"""A service of either provider in a process of its own, and what tests ask of it."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rig import until

from dataloaderjob.local.status import live_runs

SUPPORT = Path(__file__).parent


class Service:
    """Started with so many feeders; `end` it."""

    def __init__(self, folder: Path, provider: str, feeders: int) -> None:
        self.provider, self.feeders = provider, feeders
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
        self.log = folder / "log"
        with self.log.open("wb") as out:
            self.process = subprocess.Popen(
                [sys.executable, str(SUPPORT / "cluster_service.py"), str(folder), str(feeders), provider],
                stdout=out,
                stderr=out,
                env=environment,
            )
        self.socket = str(folder / "s")
        until(lambda: os.path.exists(self.socket), 60, "the socket")
        self.run = until(lambda: next((r for r in live_runs() if r.about["socket"] == self.socket), None), 10)

    def status(self) -> dict:
        return self.run.ask({"type": "status"})

    def settled(self) -> None:
        """Waits until as many feeders as are wanted are ready, and every receiver is connected to them."""
        feeders = self.feeders

        def ready() -> bool:
            try:
                status = self.status()
            except Exception:
                return False
            receivers = self.run.snapshot().sidecar.get("receivers", [])
            connected = all(r["feeders_up"] == feeders and not r["feeders_suspect"] for r in receivers)
            return status["ready"] == status["desired"] == feeders and connected

        until(ready, 90, f"{feeders} ready feeders")

    def feeder_pids(self) -> list[int]:
        return [f["pid"] for f in self.status()["feeders"] if f.get("pid")]

    @contextmanager
    def killing(self, rng: random.Random, earliest_s: float, latest_s: float) -> Iterator[None]:
        """Kills one or two feeders at some time within the block, which ends no sooner."""

        def kill() -> None:
            for pid in rng.sample(self.feeder_pids(), rng.choice([1, 2])):
                os.kill(pid, signal.SIGKILL)

        thread = threading.Timer(rng.uniform(earliest_s, latest_s), kill)
        thread.start()
        yield
        thread.join()

    def scale(self, feeders: int) -> None:
        self.feeders = feeders
        self.run.ask({"type": "scale", "feeders": feeders})

    def end(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(30)
        finally:
            self.process.kill()


@contextmanager
def serving(folder: Path, provider: str, feeders: int, *, announced: bool = True) -> Iterator[Service]:
    """A settled service; `announced`: this process's loaders use it."""
    made = Service(folder, provider, feeders)
    if announced:
        os.environ["DATALOADERJOB_SOCKET"] = made.socket
    try:
        made.settled()
        yield made
    finally:
        if announced:
            os.environ.pop("DATALOADERJOB_SOCKET", None)
        made.end()
