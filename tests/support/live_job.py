"""A job that runs while tests attack it: a service without Ray, and two trainers that tell of all their batches."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

from link_keys import link_keys
from live_trainer import BATCH, SAMPLES, TOLD, epochs
from local_runs import started_as
from rig import until
from services import SUPPORT, Service
from warm import WarmProcess

from dataloaderjob.local import reaper

FEEDERS = 2
LONGEST_WAIT_S = 3.5
"""3 s, one batch, and the noise of a machine whose two cores run everything."""
IN_EPOCH = SAMPLES // BATCH // TOLD


class Trainer:
    """A process, and what it told so far."""

    def __init__(self, rank: int, socket: str, folder: Path) -> None:
        self.told: list[tuple[str, float]] = []
        self._errors = folder / f"trainer-{rank}.log"
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
        env |= {"DATALOADERJOB_SOCKET": socket, "RANK": str(rank), "WORLD_SIZE": "2"}
        with self._errors.open("wb") as errors:
            self.process = WarmProcess(
                [SUPPORT / "live_trainer.py", rank],
                stdout=subprocess.PIPE, stderr=errors, env=env, text=True,
            )  # fmt: skip
        threading.Thread(target=self._listen, daemon=True).start()
        own = epochs(rank, pause_s=0, num_workers=0)
        self.expected = [digest for digest, _ in itertools.islice(own, IN_EPOCH)]

    def _listen(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as lines:
            for line in lines:
                digest, longest_s = line.split()
                self.told.append((digest, float(longest_s)))

    def reach(self, count: int) -> None:
        """Waits until it has told so often."""
        until(lambda: len(self.told) >= count or self.process.poll() is not None, 30, f"line {count}")
        assert self.process.poll() is None, self._errors.read_text()[-4000:]

    def check(self, since: int, longest_wait_s: float) -> None:
        """What it told since then is what it should have."""
        for at, (digest, wait_s) in enumerate(self.told[since:], since):
            assert digest == self.expected[at % IN_EPOCH], f"the batches of line {at} differ"
            assert wait_s < longest_wait_s


class LiveJob:
    """`with LiveJob(folder) as job:` everything ends with the block."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.trainers: list[Trainer] = []

    def __enter__(self) -> Self:
        self.service = Service(self._folder, "local", FEEDERS)
        try:
            for rank in range(2):
                self.trainers.append(Trainer(rank, self.service.socket, self._folder))
            self.service.settled()
            for trainer in self.trainers:
                trainer.reach(2)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for trainer in self.trainers:
            trainer.process.kill()
            trainer.process.wait()
        self.service.end()

    # Where its parts are

    @property
    def socket(self) -> str:
        """The sidecar's."""
        return self.service.socket

    @property
    def name(self) -> str:
        return str(self.service.run.job)

    @property
    def home(self) -> Path:
        """The folder of the service."""
        return Path(self.service.run.home)

    @property
    def key(self) -> bytes:
        return (self.home / "key").read_bytes()

    def link_key(self, feeder: str) -> bytes:
        """The key of connections to a feeder."""
        return link_keys(self.ports["supervisor"], self.key, self.name)[feeder]

    @property
    def ports(self) -> dict[str, int]:
        """Of the feeders, the supervisor and the sidecar's metrics."""
        found = {feeder["name"]: feeder["port"] for feeder in self.service.status()["feeders"]}
        metrics = self.sidecar()["metrics_port"]
        return {**found, "supervisor": self.service.run.about["port"], "metrics": metrics}

    @property
    def pids(self) -> dict[str, int]:
        """Of its parts that are to live as long as it."""
        status, sidecar = self.service.status(), self.sidecar()
        own = {str(trainer.process.pid) for trainer in self.trainers}
        return {
            **{feeder["name"]: feeder["pid"] for feeder in status["feeders"]},
            **{f"receiver-{r['rank']}": r["receiver"] for r in sidecar["receivers"] if str(r["trainer"]) in own},
            "supervisor": status["pid"], "sidecar": sidecar["pid"],
            "host": started_as(self.service.run.about["run"], "dataloaderjob.feeder.host"),
        }  # fmt: skip

    def sidecar(self) -> dict[str, Any]:
        """What it says of itself."""
        return dict(self.service.run.snapshot().sidecar)

    def all_pids(self) -> list[int]:
        """Of all its processes, trainers among them."""
        return [*reaper.tagged(self.service.run.about["run"]), *(t.process.pid for t in self.trainers)]

    def said(self) -> str:
        """All that was shown or logged."""
        logs = (self.service.log, *self.home.glob("*.log"))
        return "\n".join(log.read_text(errors="replace") for log in logs)

    @contextmanager
    def unimpressed(self, longest_wait_s: float = LONGEST_WAIT_S) -> Iterator[None]:
        """What is done within ends no process, changes no batch and delays none for long."""
        pids, told = self.pids, [len(trainer.told) for trainer in self.trainers]
        assert sorted(pids) == [
            "feeder-0",
            "feeder-1",
            "host",
            "receiver-0",
            "receiver-1",
            "sidecar",
            "supervisor",
        ]
        yield
        for trainer in self.trainers:
            trainer.reach(len(trainer.told) + 2)
        for trainer, since in zip(self.trainers, told, strict=True):
            trainer.check(since, longest_wait_s)
        assert self.pids == pids, self.said()[-4000:]
