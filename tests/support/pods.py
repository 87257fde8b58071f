"""The pods of a job as processes of this machine: an address of 127.0.0.0/8 and a folder for each.

Their settings are the operator's, but for paths and ports.
"""

from __future__ import annotations

import base64
import json
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import psutil
from manifests import manifest
from ports import reserve_port
from rig import until

from dataloaderjob.api import parse_object
from dataloaderjob.api.ray import ExternalRaySpec
from dataloaderjob.core import supervision
from dataloaderjob.core.errors import DataLoaderJobError
from dataloaderjob.core.keys import Holder
from dataloaderjob.core.places import RUN_VARIABLE
from dataloaderjob.local import reaper
from dataloaderjob_operator.objects import OperatorConfig, settings

SETUP = OperatorConfig(version="1.0", sidecar_image="example/sidecar:1", root_key=b"r" * 32)
HEAD = "127.0.0.2"
FAST = {"initialDelayMs": 1000, "periodMs": 500, "timeoutMs": 2000, "failureThreshold": 8}
"""A raylet that was killed is known to be dead after 4 s; as the operator has it by default, after 15 s."""
SUPPORT = Path(__file__).parent


class Pod:
    """One main process; its container's volume stays when it ends."""

    def __init__(
        self, name: str, process: subprocess.Popen[bytes], volume: Path, out: Path, err: Path
    ) -> None:
        self.name, self.process, self.volume, self._out, self._err = name, process, volume, out, err

    @property
    def out(self) -> str:
        return self._out.read_text(errors="replace")

    @property
    def err(self) -> str:
        return self._err.read_text(errors="replace")

    def vital(self, name: str) -> int:
        """The pid of a process of Ray's in it, which have its folder in their arguments."""
        for process in psutil.process_iter(["pid", "cmdline"]):
            args = process.info["cmdline"] or [""]
            if args[0].endswith(f"/{name}") and any(str(self.volume) in a for a in args):
                return int(process.info["pid"])
        raise AssertionError(f"{self.name} has no {name}:\n{self.out[-2000:]}{self.err[-2000:]}")

    def terminate(self, timeout_s: float = 60.0) -> int:
        """The code with which it ends."""
        self.process.terminate()
        return self.process.wait(timeout_s)


class Pods:
    """One job; `with` ends whatever is left of it."""

    def __init__(self, *, feeders: int = 2, changes: Mapping[str, Any] | None = None) -> None:
        """`changes` of the manifest, by paths of fields."""
        self._manifest = {
            "metadata.uid": secrets.token_hex(4),
            "metadata.namespace": "team",
            "spec.feeders.replicas": feeders,
            "spec.ray.managed.tuning.healthCheck": FAST,
        }
        self.change(changes or {})
        self.home = Path(tempfile.mkdtemp(prefix="dlj-"))
        self.run_id = secrets.token_hex(8)
        self.gcs_port, self.port = reserve_port(), reserve_port()
        for name, value in settings.secret(self.job, SETUP)["data"].items():
            (self.home / name).write_bytes(base64.b64decode(value))
        self.key = (self.home / settings.JOB_KEY).read_bytes()
        self.made: list[subprocess.Popen[bytes]] = []
        self.running: dict[str, Pod] = {}
        self.socket = str(self.home / "s")

    def change(self, changes: Mapping[str, Any]) -> None:
        """The job is edited: pods that are started from now on have it so."""
        self._manifest.update(changes)
        self.job = parse_object(manifest(self._manifest))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.made:
            process.kill()
            process.wait()
        reaper.sweep(self.run_id, grace_s=0.0)
        shutil.rmtree(self.home, ignore_errors=True)

    def left(self) -> list[int]:
        """What lives on of pods that have ended."""
        return reaper.tagged(self.run_id, but=[process.pid for process in self.made])

    def up(self, feeders: int = 2) -> tuple[Pod, list[Pod]]:
        """Head, sidecar and feeder pods, those started anew that have ended, once so many feeders serve."""
        for number in range(feeders):
            if not self._runs(f"f{number}"):
                self.feeder(number)
        if not self._runs("s"):
            self.supervisor()
        if not self._runs("h"):
            self.head()
        if not self._runs("sidecar"):
            self.sidecar()
        self.ready(feeders)
        return self.running["h"], [self.running[f"f{number}"] for number in range(feeders)]

    def _runs(self, name: str) -> bool:
        return name in self.running and self.running[name].process.poll() is None

    def head(self, **more: Any) -> Pod:
        """Ray's container of the head's pod, and the supervisor's unless it runs."""
        if not self._runs("s"):
            self.supervisor()
        fields = {
            **self._head(),
            "token_path": self._at(settings.RAY_TOKEN),
            "temp_dir": self._at("h"),
            **more,
        }
        return self._start("dataloaderjob.pod.head", "h", HEAD, fields)

    def driver(self, address: str, token: str | None = None, **more: Any) -> Pod:
        """Ray's container of the supervisor's pod on an existing Ray cluster, and the supervisor's unless it runs.
        `token`: path of the cluster's token; `more`: settings about the cluster."""
        found = settings.on_external_ray(self.job, ExternalRaySpec(address=address))["external"]
        external = {**found, "raylet_port": 0, **more}
        if not self._runs("s"):
            self.supervisor(external=external)
        fields = {**self._head(), "token_path": token, "temp_dir": self._at("h"), "external": external}
        return self._start("dataloaderjob.pod.driver", "h", HEAD, fields)

    def supervisor(self, **more: Any) -> Pod:
        fields = {
            **self._head(), "key_path": self._at(settings.JOB_KEY), "temp_dir": self._at("v"), **more,
        }  # fmt: skip
        return self._start("dataloaderjob.pod.supervisor", "s", HEAD, fields)

    def _head(self) -> dict[str, Any]:
        """The settings that both containers read. Neither finds the other's secret."""
        link = self.home / "l"
        link.mkdir(exist_ok=True)
        return {
            **settings.head(self.job, SETUP), "count_path": None, "num_feeders": self.job.spec.feeders.count,
            "key_path": self._at("no-key"), "token_path": self._at("no-token"), "link_folder": str(link),
            "feeder_key_path": self._at(Holder.FEEDER), "host": HEAD, "gcs_port": self.gcs_port,
            "supervisor_port": self.port,
        }  # fmt: skip

    def feeder(self, number: int, **more: Any) -> Pod:
        name = f"f{number}"
        fields = {
            **settings.feeder(self.job, SETUP), "token_path": self._at(settings.RAY_TOKEN),
            "head": f"{HEAD}:{self.gcs_port}", "temp_dir": self._at(name), **more,
        }  # fmt: skip
        return self._start("dataloaderjob.pod.feeder", name, f"127.0.0.{3 + number}", fields)

    def sidecar(self) -> None:
        """In the trainer's pod, which this process is."""
        fields = {
            **settings.sidecar(self.job, SETUP), "socket": self.socket, "key_path": self._at(Holder.SIDECAR),
            "blobs": self._at("blobs"), "supervisor_host": HEAD, "supervisor_port": self.port,
            "shared_memory_nbytes": 256 * 1024**2, "metrics_host": "127.0.0.1", "metrics_port": 0,
        }  # fmt: skip
        self._start("dataloaderjob.sidecar", "sidecar", "127.0.0.1", fields, tag={})
        until(lambda: os.path.exists(self.socket), 20, "the sidecar's socket")

    def _at(self, name: str) -> str:
        return str(self.home / name)

    def _start(
        self, module: str, name: str, address: str, fields: Mapping[str, Any],
        tag: Mapping[str, str] | None = None,
    ) -> Pod:  # fmt: skip
        path = self.home / f"{name}.json"
        path.write_text(json.dumps(fields))
        number = len(self.made)
        out, err = self.home / f"{number}-{name}.out", self.home / f"{number}-{name}.err"
        path_of_modules = os.pathsep.join([str(SUPPORT), *(p for p in sys.path if p)])
        with out.open("wb") as to, err.open("wb") as err_to:
            process = subprocess.Popen(
                [sys.executable, "-m", module, "--settings", str(path)], stdout=to, stderr=err_to,
                env={
                    **os.environ, "POD_IP": address, "HOME": str(self.home), "PYTHONUNBUFFERED": "1",
                    "PYTHONPATH": path_of_modules,
                    **({RUN_VARIABLE: self.run_id} if tag is None else tag),
                },
            )  # fmt: skip
        self.made.append(process)
        self.running[name] = Pod(name, process, self.home / name, out, err)
        return self.running[name]

    def status(self) -> dict[str, Any]:
        return self.ask("status")

    def ask(self, kind: str) -> dict[str, Any]:
        """The supervisor's answer to a request without fields."""
        return supervision.ask(
            HEAD, self.port, self.key, job=settings.unique(self.job), message={"type": kind}
        )

    def scale(self, feeders: int) -> None:
        message = {"type": "scale", "feeders": feeders}
        supervision.ask(HEAD, self.port, self.key, job=settings.unique(self.job), message=message)

    def ready(self, feeders: int, timeout_s: float = 90.0) -> dict[str, Any]:
        """The supervisor's status once so many feeders serve."""
        seen: Any = None

        def reached() -> dict[str, Any] | None:
            nonlocal seen
            try:
                seen = self.status()
            except (OSError, DataLoaderJobError) as exc:
                seen = exc
                return None
            return seen if seen["ready"] == feeders else None

        try:
            return dict(until(reached, timeout_s, f"{feeders} feeders"))
        except AssertionError as exc:
            codes = {name: pod.process.poll() for name, pod in self.running.items()}
            said = [f"{name}:\n{pod.out[-1000:]}{pod.err[-2000:]}" for name, pod in self.running.items()]
            raise AssertionError(
                f"{exc}; the supervisor's last answer: {seen!r}; exit codes: {codes}\n" + "\n".join(said)
            ) from None
