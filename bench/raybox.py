"""A separate Ray for one cell: local, with its own folder and a small object store, ended by pid."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

MIN_STORE_NBYTES = 80 * 1024 * 1024
SCRATCH = "BENCH_SCRATCH"
"""Environment variable with a folder that the harness removes after the cell."""
_GRACE_S = 3.0
_FAR_TIMEOUT_S = 30.0
_END_TIMEOUT_S = 20.0


@contextlib.contextmanager
def ray_box(
    *,
    num_cpus: int,
    store_nbytes: int,
    far_node: bool = False,
    addresses: tuple[str, str, str] | None = None,
) -> Iterator[list[int]]:
    """Starts Ray, and yields the pids of the processes that must be on the trainer's node.

    These are this driver and its raylet, which holds the object store. GCS, agents and workers could be elsewhere and
    are left out, in the peer's favour. With `far_node` a second raylet has all CPUs and the resource "far", so objects
    made there arrive through Ray's own transfer. `addresses` are this node's address, the second node's address, and
    the second node's network namespace.
    """
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    os.environ["RAY_ENABLE_AUTO_CONNECT"] = "0"  # a late finalizer of Ray Data would start another Ray
    os.environ["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "0"
    import ray

    logging.getLogger("ray").setLevel(logging.ERROR)
    # Unix socket paths below the folder must stay under 108 bytes, hence the short prefix
    folder = tempfile.mkdtemp(prefix="r", dir=os.environ.get(SCRATCH, "/tmp"))
    store_nbytes = max(store_nbytes, MIN_STORE_NBYTES)
    before = set(psutil.Process().children(recursive=True))
    try:
        ray.init(
            address="local", num_cpus=0 if far_node else num_cpus, object_store_memory=store_nbytes,
            include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR, _temp_dir=folder,
            **({"_node_ip_address": addresses[0]} if addresses else {}),
        )  # fmt: skip
        raylet = next(p.pid for p in psutil.Process().children(recursive=True) if p.name() == "raylet")
        if far_node:
            _start_far(num_cpus, store_nbytes, addresses)
        yield [os.getpid(), raylet]
    finally:
        started = set(psutil.Process().children(recursive=True)) - before
        ray.shutdown()
        _end(list(started))
        shutil.rmtree(Path(folder), ignore_errors=True)


def await_iterators() -> None:
    """Waits for threads of Ray Data. One that asks Ray after its end would end the process before its figures are
    written."""
    deadline = time.monotonic() + _END_TIMEOUT_S
    while any(t.name == "iter_threaded" for t in threading.enumerate()) and time.monotonic() < deadline:
        time.sleep(0.05)


def _start_far(num_cpus: int, store_nbytes: int, addresses: tuple[str, str, str] | None) -> None:
    """Starts a second raylet on this machine, and returns once it has joined the cluster."""
    import ray

    address = ray.get_runtime_context().gcs_address
    command = [
        sys.executable, "-m", "ray.scripts.scripts", "start", f"--address={address}", "--block",
        f"--num-cpus={num_cpus}", f"--object-store-memory={store_nbytes}", '--resources={"far": 1}',
    ]  # fmt: skip
    if addresses is not None:
        _, far, namespace = addresses
        command = ["ip", "netns", "exec", namespace, *command, f"--node-ip-address={far}"]
    subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + _FAR_TIMEOUT_S
    while "far" not in ray.cluster_resources():
        if time.monotonic() > deadline:
            raise RuntimeError(f"the second raylet did not join within {_FAR_TIMEOUT_S:.0f} s")
        time.sleep(0.1)


def _end(processes: list[psutil.Process]) -> None:
    """Ends the processes that outlived `ray.shutdown`. Ray's own processes usually do."""
    for signum in (signal.SIGTERM, signal.SIGKILL):
        _, alive = psutil.wait_procs(processes, timeout=_GRACE_S if signum == signal.SIGKILL else 0.5)
        for process in alive:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(signum)
    deadline = time.monotonic() + _GRACE_S
    while any(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in processes):
        if time.monotonic() > deadline:
            raise RuntimeError(f"processes of Ray live on: {[p for p in processes if p.is_running()]}")
        time.sleep(0.02)
