"""B15: bytes over links that are slower than memory. Same sockets, same batches, another bottleneck.

A link is a pair of virtual Ethernet devices between this network namespace and another one, shaped by tbf at the
senders' end. Frames have 9,000 bytes, as between nodes of a cluster. Paced senders need no namespace, because the
kernel limits each of their connections. The clock never stops, because a link keeps transferring while a receiver
checks a batch.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from bench import machine
from bench.work import KINDS, Contents, Proof, size_name

NEAR, FAR = "10.213.77.1", "10.213.77.2"
MTU = 9000
BURST_S = 0.002
"""Time at the link's rate that tbf lets through at once: two of a small machine's timer ticks."""
_CLONE_NEWNET = 0x40000000


@dataclass(frozen=True, slots=True)
class Case:
    senders: int
    nbytes: int
    seconds: float
    gbit: float = 0.0
    """Rate of the link that all senders share; 0: loopback."""
    paced_mb: float = 0.0
    """MB a second of each sender; 0: unlimited."""
    smoke: bool = False

    @property
    def name(self) -> str:
        senders = f"{self.senders} sender{'s' if self.senders > 1 else ''}"
        if self.paced_mb:
            return f"{senders} of {self.paced_mb:g} MB/s, {size_name(self.nbytes)}"
        return f"{self.gbit:g} Gbit/s, {senders}, {size_name(self.nbytes)}"

    @property
    def nbytes_per_s(self) -> float:
        """Capacity of the network, headers included."""
        return self.gbit * 1e9 / 8 or self.senders * self.paced_mb * 1e6

    @property
    def depth(self) -> int:
        """Number of batches requested ahead, for peers that pull."""
        return max(2 * self.senders, 4 if self.nbytes > 4e6 else 32)


@contextlib.contextmanager
def link(gbit: float) -> Iterator[str]:
    """Yields the name of a namespace with the address `FAR`, linked at `gbit` Gbit/s to `NEAR` in this one.

    Raises NotImplementedError if this process may not make a namespace.
    """
    name = f"dlj-bench-{os.getpid()}"
    near, far = f"dljn{os.getpid()}", f"dljf{os.getpid()}"
    try:
        _run("ip", "netns", "add", name)
    except (OSError, subprocess.CalledProcessError) as exc:
        raise NotImplementedError(f"a network namespace needs root and iproute2: {exc}") from exc
    try:
        _run("ip", "link", "add", near, "type", "veth", "peer", "name", far, "netns", name)
        inside = ("ip", "netns", "exec", name)
        for prefix, device, address in (((), near, NEAR), (inside, far, FAR)):
            _run(*prefix, "ip", "address", "add", f"{address}/24", "dev", device)
            _run(*prefix, "ip", "link", "set", device, "mtu", str(MTU), "up")
        _run(*inside, "ip", "link", "set", "lo", "up")
        burst = int(gbit * 1e9 / 8 * BURST_S)
        shape = ("rate", f"{gbit:g}gbit", "burst", str(burst), "latency", "50ms")
        _run(*inside, "tc", "qdisc", "add", "dev", far, "root", "tbf", *shape)
        yield name
    finally:
        subprocess.run(["ip", "link", "delete", near], check=False, capture_output=True)
        subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)


def enter(namespace: str) -> None:
    """Moves this thread, and everything it starts, into a namespace. Raises OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    fd = os.open(f"/var/run/netns/{namespace}", os.O_RDONLY | os.O_CLOEXEC)
    try:
        if libc.setns(fd, _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"setns {namespace}")
    finally:
        os.close(fd)


def measure(
    take: Callable[[], np.ndarray], case: Case, receivers: Callable[[], Sequence[int]]
) -> dict[str, Any]:
    """Measures `take`, which returns a batch. `receivers` returns the pids of the receiving processes."""
    contents, proof = Contents(case.nbytes, 1), Proof()
    kinds = {int(parts[0][-8:].view(np.uint64)[0]): kind for kind, parts in enumerate(contents.parts)}

    def kind_of(batch: np.ndarray) -> int:
        return kinds[int(batch[-8:].view(np.uint64)[0])]

    for _ in range(case.depth if case.smoke else 2 * case.depth):
        take()
    pids, count = receivers(), 0
    before, cpu, began = machine.snapshot(), machine.cpu_ns(pids), time.perf_counter()
    while (wall_s := time.perf_counter() - began) < case.seconds:
        kind_of(take())
        count += 1
    cpu_s = (machine.cpu_ns(pids) - cpu) / 1e9
    load = machine.between(before, machine.snapshot())
    for kind in range(KINDS):
        batch = take()
        while kind_of(batch) != kind:
            batch = take()
        proof.add(kind, [batch], contents.expected(kind, stamped=False))
    nbytes = count * case.nbytes
    figures = {
        "share": nbytes / wall_s / case.nbytes_per_s,
        "gb_per_s": nbytes / wall_s / 1e9,
        "rx_cpu_s_per_gb": cpu_s / max(1, nbytes) * 1e9,
        "machine_busy_share": load.busy_share,
    }
    return {"figures": {case.name: figures}, "proof": proof.as_json()}
