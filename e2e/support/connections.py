"""The connections that the pods of a cluster really make, as the kernels of its nodes track them.

Nothing runs in a pod, and nothing is needed in its image: `connections.sh` runs on each node and says what is new.
What the kernel has not let through is not among it. A connection that is older than the kernel's tracking, of which
there is none where pods are made by the test, may seem to go the other way.
"""

from __future__ import annotations

import ipaddress
import re
import subprocess
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from network_policies import Cluster, judge

SCRIPT = Path(__file__).with_name("connections.sh")
END_S = 15.0
_PROTOCOLS = re.compile(r"\b(tcp|udp|sctp)\b")
_TUPLE = re.compile(r"\b(src|dst|sport|dport)=(\S+)")
_NAMES = ("src", "dst", "sport", "dport") * 2


@dataclass(frozen=True, slots=True, order=True)
class Connection:
    """Who began it, and where it went."""

    source: str
    destination: str
    """Where a Service sends it, not the Service's own address."""
    port: int
    protocol: str
    """TCP, UDP or SCTP."""

    def __str__(self) -> str:
        return f"{self.source} to {self.destination} {self.protocol} {self.port}"


@dataclass(frozen=True, slots=True)
class Recording:
    """What was seen on all nodes together."""

    connections: frozenset[Connection]
    nodes: tuple[frozenset[str], ...]
    """Addresses of each node, its ends of its pods' links among them."""


def parse(texts: Iterable[str]) -> Recording:
    """From what `connections.sh` said on each node."""
    connections: set[Connection] = set()
    nodes = []
    for text in texts:
        lines = text.splitlines()
        nodes.append(frozenset(_address(line.split()[1]) for line in lines if line.startswith("local ")))
        connections.update(found for line in lines if (found := parse_line(line)) is not None)
    return Recording(frozenset(connections), tuple(nodes))


def parse_line(line: str) -> Connection | None:
    """One entry of the kernel's table: the first four values are as its beginner sent it, the others as it is
    answered, which tells where it really went. None for one that has no ports or stays within its machine."""
    protocol, pairs = _PROTOCOLS.search(line), _TUPLE.findall(line)
    if protocol is None or tuple(name for name, _ in pairs) != _NAMES:
        return None
    source, _, _, _, destination, _, port, _ = (value for _, value in pairs)
    if ipaddress.ip_address(source).is_loopback:
        return None
    return Connection(_address(source), _address(destination), int(port), protocol[1].upper())


def shut(recording: Recording, cluster: Cluster) -> list[str]:
    """Connections that the cluster's policies do not allow, in words."""
    found = []
    for connection in sorted(recording.connections):
        source, to = (cluster.at(end) for end in (connection.source, connection.destination))
        verdict = judge(cluster, source, to, connection.port, connection.protocol)
        if not verdict.allowed:
            found.append(f"{source} to {to} {connection.protocol} {connection.port}: {verdict}")
    return found


def docker_exec(node: str) -> Sequence[str]:
    """How a command begins that is to run on a node of kind."""
    return ["docker", "exec", "-i", node]


class Recorder:
    """`with`: records from here to the end of the block, and what was tracked already before."""

    def __init__(
        self,
        nodes: Iterable[str],
        folder: Path,
        *,
        enter: Callable[[str], Sequence[str]] = docker_exec,
        arguments: Sequence[str] = (),
    ) -> None:
        """`folder` gets the output of each node; `arguments` are the script's."""
        self._commands = {
            node: [*enter(node), "sh", "-c", SCRIPT.read_text(), "connections", *arguments] for node in nodes
        }
        self._folder = folder
        self._running: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> Self:
        for node, command in self._commands.items():
            with ExitStack() as files:
                out, err = (files.enter_context(self._file(node, end).open("wb")) for end in ("out", "err"))
                self._running[node] = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=out, stderr=err)
        return self

    def __exit__(self, *_: object) -> None:
        """The end of its input ends the script, also where this process is killed."""
        for process in self._running.values():
            if process.stdin is not None:
                process.stdin.close()
        for process in self._running.values():
            try:
                process.wait(END_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def recording(self) -> Recording:
        """After the block. Raises RuntimeError with what a node said where it recorded nothing."""
        for node, process in self._running.items():
            if process.returncode != 0:
                said = self._file(node, "err").read_text(errors="replace").strip()
                raise RuntimeError(
                    f"a recording of {node} is needed, it ended with {process.returncode}: {said}"
                )
        return parse(self._file(node, "out").read_text() for node in self._running)

    def _file(self, node: str, end: str) -> Path:
        return self._folder / f"connections-{node}.{end}"


def _address(text: str) -> str:
    return str(ipaddress.ip_address(text))
