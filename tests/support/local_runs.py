"""`dataloaderjob run` as a process of its own, on a small project in a temporary folder."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any, Self

import psutil
import warm
import yaml

from dataloaderjob.local import reaper

DATA = """
import time
import torch

class Numbers(torch.utils.data.Dataset):
    def __init__(self, length, seconds=0.0):
        self.length, self.seconds = length, seconds

    def __len__(self):
        return self.length

    def __getitem__(self, i):
        if i % 100 == 0:
            print("making", i, flush=True)
        time.sleep(self.seconds)
        return torch.full((64,), float(i)) + torch.rand(64), i
"""

TRAIN = """
import hashlib, os, sys, time
import torch
from dataloaderjob import DataLoader
from data import Numbers

length, seconds, mode = int(sys.argv[1]), float(sys.argv[2]), sys.argv[3:]
dataset = Numbers(length, seconds)
rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
if "ddp" in mode:
    torch.distributed.init_process_group("gloo")
    total = torch.ones(1)
    torch.distributed.all_reduce(total)
    assert int(total) == world
sampler = torch.utils.data.DistributedSampler(dataset, world, rank, shuffle=True, seed=5)
loader = DataLoader(
    dataset, batch_size=10, sampler=sampler, num_workers=0 if "here" in mode else None,
    generator=torch.Generator().manual_seed(7),
)
digest, worst, last = hashlib.sha256(), 0.0, None
for number, (x, y) in enumerate(loader):
    now = time.monotonic()
    worst, last = max(worst, 0.0 if last is None else now - last), now
    digest.update(x.numpy().tobytes())
    digest.update(y.numpy().tobytes())
    if number % 20 == 0:
        print("batch", number, flush=True)
    if "crash" in mode and rank == 1 and number == 3:
        os._exit(3)
    last = time.monotonic()
print(f"digest {digest.hexdigest()} worst {worst:.2f}")
"""


class Project:
    """A manifest, a training script and its dataset."""

    def __init__(self, folder: Path, *args: Any, replicas: int = 1, feeders: int = 1, **spec: Any) -> None:
        self.folder = folder
        (folder / "data.py").write_text(DATA)
        (folder / "train.py").write_text(TRAIN)
        self.args = [str(arg) for arg in args]
        container = {"name": "trainer", "image": "none", "command": ["python", "train.py", *self.args]}
        self.manifest: dict[str, Any] = {
            "apiVersion": "dataloading.dev/v1alpha1",
            "kind": "DataLoaderJob",
            "metadata": {"name": "small"},
            "spec": {
                "feeders": {"replicas": feeders},
                "loader": {"memoryPerProcess": "64Mi"},
                "trainers": {
                    "job": {"replicas": replicas, "template": {"spec": {"containers": [container]}}}
                },
                **spec,
            },
        }
        self.path = folder / "job.yaml"
        self.write()

    def write(self, **spec: Any) -> None:
        """The manifest, with these parts of its spec instead."""
        self.manifest["spec"].update(spec)
        self.path.write_text(yaml.safe_dump(self.manifest))

    def reference(self, rank: int = 0, world: int = 1) -> str:
        """The digest of the loader in the process itself. Samples need no time there, which no batch shows."""
        env = {**os.environ, "RANK": str(rank), "WORLD_SIZE": str(world)}
        done = warm.run(["train.py", self.args[0], "0", "here"], cwd=self.folder, env=env)
        assert done.returncode == 0, done.stderr
        return digest(done.stdout.splitlines())


def path_first(folder: Path) -> str:
    """A PYTHONPATH with `folder` before what is there."""
    return os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))


def broken_ray(folder: Path) -> str:
    """A PYTHONPATH that keeps Ray from starting."""
    (folder / "broken").mkdir()
    (folder / "broken" / "ray.py").write_text("raise RuntimeError('this Ray is broken')")
    return path_first(folder / "broken")


def broken_host(folder: Path) -> str:
    """A PYTHONPATH that keeps the feeder host from starting."""
    (folder / "broken").mkdir(parents=True)
    (folder / "broken" / "sitecustomize.py").write_text(
        "import os, sys\n"
        "class Broken:\n"
        "    def find_spec(name, path=None, target=None):\n"
        "        if name == 'dataloaderjob.feeder.host':\n"
        "            os.write(2, b'this machine is broken\\n')\n"
        "            os._exit(1)\n"
        "sys.meta_path.insert(0, Broken)\n"
    )
    return path_first(folder / "broken")


def digest(lines: list[str]) -> str:
    return next(match[1] for line in lines if (match := re.search(r"digest ([0-9a-f]{64})", line)))


def started_as(run_id: str, module: str) -> int:
    """Pid of the process of this run that was started as `module`: not of one that it forked."""
    parents = {}
    for pid in reaper.tagged(run_id):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has ended since
            if module in Path(f"/proc/{pid}/cmdline").read_text().split("\0"):
                parents[pid] = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return next(pid for pid, parent in parents.items() if parent not in parents)


def sidecars(service: int) -> set[int]:
    """The pid of the sidecar, a child of this process, which is forked or started as a module; empty while there is
    none."""
    found = set()
    for child in psutil.Process(service).children():
        with contextlib.suppress(psutil.NoSuchProcess):
            if child.name() == "dlj-sidecar" or "dataloaderjob.sidecar" in child.cmdline():
                found.add(child.pid)
    return found


def called(run_id: str, name: str) -> int:
    """Pid of the process of this run that `ps` shows by this name."""
    for pid in reaper.tagged(run_id):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has ended since
            if Path(f"/proc/{pid}/comm").read_text().strip() == name:
                return pid
    raise LookupError(f"no process of the run {run_id} is called {name}")


class LocalRun:
    """A started `dataloaderjob run`."""

    def __init__(
        self, manifest: Path, *options: str, env: dict[str, str] | None = None, max_files: int | None = None
    ) -> None:
        """`max_files`: the limit of open files, of each of its processes."""
        limited = [] if max_files is None else ["sh", "-c", f'ulimit -n {max_files}; exec "$@"', "-"]
        self.lines: list[str] = []
        self._queue: queue.Queue[str | None] = queue.Queue()
        self.process = subprocess.Popen(
            [*limited, sys.executable, "-m", "dataloaderjob.local.cli", "run", str(manifest), *options],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env={**os.environ, **(env or {})},
        )  # fmt: skip
        threading.Thread(target=self._read, daemon=True).start()
        self.about: dict[str, Any] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(30)
            self.process.kill()
            self.process.wait()

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as out:
            for line in out:
                self._queue.put(line.rstrip("\n"))
        self._queue.put(None)

    def until(self, text: str, timeout_s: float = 90.0) -> str:
        """The next line with `text`."""
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                line = self._queue.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                raise AssertionError(f"{text!r} did not come in {timeout_s} s:\n{self.text}") from None
            assert line is not None, f"{text!r} did not come before the end:\n{self.text}"
            self.lines.append(line)
            if text in line:
                return line

    def end(self, timeout_s: float = 90.0) -> int:
        """The exit code; all lines are in `lines` then."""
        code = self.process.wait(timeout_s)
        while (line := self._queue.get(timeout=10)) is not None:
            self.lines.append(line)
        return code

    @property
    def text(self) -> str:
        return "\n".join(self.lines)

    def find(self) -> dict[str, Any]:
        """What the run wrote about itself; sets `home`."""
        for path in Path(tempfile.gettempdir()).glob("dlj-run-*/run.json"):
            about = json.loads(path.read_text())
            if about["pid"] == self.process.pid:
                self.about, self.home = about, path.parent
                return about
        raise AssertionError(f"no folder of process {self.process.pid}:\n{self.text}")

    def pid_of(self, *words: str, name: str = "") -> int:
        """The first process of this run with this name, or with all these words in its command line."""
        for pid in sorted(reaper.tagged(self.about["run"])):
            command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
            comm = Path(f"/proc/{pid}/comm").read_text().strip()
            if comm == name if name else all(word in command for word in words):
                return pid
        raise AssertionError(f"no process {words} {name}")

    def left(self) -> list[str]:
        """What is left of it on this machine."""
        found = [f"process {pid}" for pid in reaper.tagged(self.about["run"])]
        return found + [str(path) for path in (self.home, Path(self.about["socket"])) if path.exists()]
