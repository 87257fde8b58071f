"""A Ray head of its own for tests, and supervisors on it."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

from feeder_client import wait_until
from link_keys import link_keys
from ports import reserve_port

from dataloaderjob.core import keys, supervision
from dataloaderjob.core.settings import RayTuning, SupervisorSettings, dump
from dataloaderjob.local.head import RayHead

KEY = bytes(range(32))
SUPPORT = Path(__file__).parent


class Head(RayHead):
    """A head whose Ray is told more."""

    told: Mapping[str, str] = MappingProxyType({})

    def env(self) -> dict[str, str]:
        return {**super().env(), **self.told}


@contextmanager
def up(made: RayHead) -> Iterator[None]:
    """Has a head run for this block."""
    made.start()
    try:
        wait_until(lambda: made.poll_up() is not None, 60)
        yield
    finally:
        made.stop(2.0)


@contextmanager
def head(
    *, tuning: RayTuning | None = None, env: dict[str, str] | None = None, **told: str
) -> Iterator[RayHead]:
    """A head that is up, in a short folder of its own, with a home of its own. `told`: environment of Ray's."""
    with tempfile.TemporaryDirectory(prefix="dlj", ignore_cleanup_errors=True) as folder:
        home = Path(folder) / "home"
        home.mkdir()
        path = with_support((env or {}).get("PYTHONPATH"))
        made = Head(
            Path(folder) / "ray", tuning=tuning, num_feeders=64,
            env={**os.environ, **(env or {}), "PYTHONPATH": path, "HOME": str(home)},
        )  # fmt: skip
        made.told = told
        with up(made):
            yield made


def with_support(first: str | None = None) -> str:
    """A PYTHONPATH on which the datasets of tests are."""
    return os.pathsep.join(
        filter(None, [first, str(SUPPORT), str(SUPPORT.parents[1]), os.environ.get("PYTHONPATH")])
    )


class Supervised:
    """One job's supervisor, started in a folder of its own; may be killed and started again."""

    def __init__(self, folder: Path, ray: RayHead, *, job: str = "job", **options: Any) -> None:
        self.folder, self.ray, self.job = folder, ray, job
        (folder / "key").write_bytes(KEY)
        (folder / "key-feeder").write_bytes(keys.derive(KEY, keys.Holder.FEEDER))
        options.setdefault("ready_timeout_s", 60.0)
        self.settings = SupervisorSettings(
            job=job,
            key_path=str(folder / "key"),
            feeder_key_path=str(folder / "key-feeder"),
            blob_folder=str(folder / "blobs"),
            feeder_blob_folder=options.pop("feeder_blob_folder", str(folder / "blobs")),
            ray_address=options.pop("ray_address", None) or ray.address,
            state_path=str(folder / "feeders.json"),
            port=reserve_port(),
            **options,
        )
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def output(self) -> str:
        return (self.folder / "supervisor.log").read_text()

    def start(self, env: dict[str, str] | None = None) -> None:
        dump(self.settings, self.folder / "supervisor.json")
        env = env if env is not None else {**os.environ, **self.ray.env()}
        with (self.folder / "supervisor.log").open("ab") as log:
            self.process = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "dataloaderjob.supervisor.main",
                    "--settings",
                    self.folder / "supervisor.json",
                ],
                env={**env, "HOME": str(self.ray.folder.parent / "home"), "PYTHONPATH": with_support()},
                stdout=log,
                stderr=log,
            )

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    def end(self) -> None:
        """Stops the feeders, too."""
        if self.process is None or self.process.poll() is not None:
            return
        try:
            self.ask("stop")
            self.process.wait(20)
        except OSError:
            pass
        finally:
            self.kill()

    def ask(self, kind: str, **fields: Any) -> dict[str, Any]:
        return supervision.ask(
            "127.0.0.1", self.settings.port, KEY, job=self.job, message={"type": kind, **fields}
        )

    def link_key(self, feeder: str) -> bytes:
        """The key of connections to a feeder."""
        return link_keys(self.settings.port, KEY, self.job)[feeder]

    def scale(self, feeders: int) -> None:
        self.ask("scale", feeders=feeders)

    def wait(self, condition: Callable[[dict[str, Any]], Any], timeout_s: float = 90.0) -> dict[str, Any]:
        """The first status that fulfils `condition`."""
        seen: dict[str, Any] = {}

        def fulfilled() -> bool:
            try:
                seen.update(self.ask("status"))
            except OSError:
                return False
            return bool(condition(seen))

        try:
            wait_until(fulfilled, timeout_s)
        except AssertionError as exc:
            raise AssertionError(f"{exc}\nlast status: {seen}\n{self.output[-4000:]}") from None
        return seen

    def ready(self, feeders: int, timeout_s: float = 90.0) -> list[dict[str, Any]]:
        """Waits until so many feeders are there, and no others."""
        return list(
            self.wait(lambda s: s["ready"] == len(s["feeders"]) == feeders == s["desired"], timeout_s)[
                "feeders"
            ]
        )
