"""The cluster without machines: etcd, API server, controllers, and kwok for nodes and pods.

Pods get addresses in 127.64.0.0/10, all on this machine. So a supervisor that listens on all addresses answers for each
head.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]
SUPPORT = str(ROOT / "tests" / "support")
if SUPPORT not in sys.path:
    sys.path.append(SUPPORT)

from processes_of_operator import ROOT as ROOT_KEY  # noqa: E402
from processes_of_operator import kubeconfig  # noqa: E402

from apiserver import ApiServer, api_server, assets  # noqa: E402
from dataloaderjob_operator.objects.settings import SUPERVISOR_PORT  # noqa: E402

CIDR = "127.64.0.0/10"
NODES = [f"node-{number}" for number in range(10)]
CONTROLLERS = (
    "deployment-controller", "replicaset-controller", "job-controller", "garbage-collector-controller",
    "namespace-controller",
)  # fmt: skip
QPS, BURST, SYNCS = 500, 1000, 20
"""Limits of the controllers, high enough that nothing waits for them."""
STAGES = Path(__file__).parent / "kwok.yaml"
END_S = 10.0


@dataclass(frozen=True, slots=True)
class Programs:
    """Paths of the programs."""

    etcd: Path
    server: Path
    controllers: Path
    kwok: Path

    def versions(self) -> dict[str, str]:
        """Returns the versions that the programs report."""
        found = {
            "etcd": _said(self.etcd), "kube-apiserver": _said(self.server),
            "kube-controller-manager": _said(self.controllers), "kwok": _said(self.kwok),
        }  # fmt: skip
        return {
            name: next((w for w in text.split() if w.lstrip("v")[:1].isdigit()), text)
            for name, text in found.items()
        }


def programs() -> Programs:
    """Finds the programs. Raises FileNotFoundError with instructions."""
    folder = assets()
    found = {name: _program(folder, name) for name in ("kube-controller-manager", "kwok")}
    if lacking := [name for name, path in found.items() if path is None]:
        raise FileNotFoundError(
            f"{' and '.join(lacking)} are needed in {folder} or on PATH: run `make bench-operator`"
        )
    return Programs(
        folder / "etcd",
        folder / "kube-apiserver",
        Path(found["kube-controller-manager"] or ""),
        Path(found["kwok"] or ""),
    )


def port_is_free(port: int = SUPERVISOR_PORT) -> None:
    """Raises OSError with instructions unless the supervisors' port is free on all addresses."""
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind(("0.0.0.0", port))
            sock.listen()
        except OSError as exc:
            raise OSError(
                f"port {port} is needed on all addresses for the jobs' supervisors; end what listens there"
            ) from exc


@dataclass(frozen=True, slots=True)
class Cluster:
    """A running cluster."""

    server: ApiServer
    folder: Path
    programs: Programs
    stand_ins: subprocess.Popen[str]
    others: dict[str, subprocess.Popen[Any]]

    def figures(self, mode: str) -> None:
        """Sets the mode in which the sidecars' figures change from now on."""
        assert self.stand_ins.stdin is not None
        self.stand_ins.stdin.write(f"{mode}\n")
        self.stand_ins.stdin.flush()

    def check(self) -> None:
        """Raises RuntimeError if a part of the cluster has ended."""
        for name, process in self.others.items():
            if process.poll() is not None:
                log = (self.folder / f"{name}.log").read_text().splitlines()[-10:]
                raise RuntimeError(f"{name} ended with {process.returncode}:\n" + "\n".join(log))


@contextlib.contextmanager
def cluster(folder: Path, *, feeders: int) -> Iterator[Cluster]:
    """Runs a cluster. `feeders` is each supervisor's number of feeders until it receives another."""
    port_is_free()
    found = programs()
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(api_server(folder))
        server.define(yaml.safe_load((ROOT / "crds" / "dataloaderjobs.yaml").read_text()))
        for name in NODES:
            server.request("POST", "/api/v1/nodes", {"metadata": {"name": name}})
        config = kubeconfig(server, folder)
        others: dict[str, subprocess.Popen[Any]] = {
            name: stack.enter_context(_process(folder, name, command))
            for name, command in {
                "kube-controller-manager": _controllers(found, config, folder),
                "kwok": _kwok(found, config),
            }.items()
        }
        stand_ins = stack.enter_context(_stand_ins(folder, server, feeders))
        yield Cluster(server, folder, found, stand_ins, {**others, "stand-ins": stand_ins})


def _controllers(found: Programs, config: Path, folder: Path) -> list[str | Path]:
    syncs = [f"--concurrent-{kind}-syncs={SYNCS}" for kind in ("deployment", "replicaset", "job")]
    return [
        found.controllers, f"--kubeconfig={config}", f"--controllers={','.join(CONTROLLERS)}",
        "--leader-elect=false", f"--kube-api-qps={QPS}", f"--kube-api-burst={BURST}", "--secure-port=0",
        f"--cert-dir={folder / 'certs'}", *syncs,
    ]  # fmt: skip


def _kwok(found: Programs, config: Path) -> list[str | Path]:
    return [
        found.kwok, f"--kubeconfig={config}", f"--config={STAGES}", "--manage-all-nodes", f"--cidr={CIDR}",
        "--node-lease-duration-seconds=0",
    ]  # fmt: skip


@contextlib.contextmanager
def _process(folder: Path, name: str, command: list[str | Path]) -> Iterator[subprocess.Popen[bytes]]:
    with (folder / f"{name}.log").open("wb") as log:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=folder)
    try:
        yield process
    finally:
        _end(process)


@contextlib.contextmanager
def _stand_ins(folder: Path, server: ApiServer, feeders: int) -> Iterator[subprocess.Popen[str]]:
    settings = {
        "url": server.url, "token": server.token, "root_key": ROOT_KEY.hex(), "feeders": feeders,
        "port": SUPERVISOR_PORT, "nodes": NODES,
    }  # fmt: skip
    with (folder / "stand-ins.log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "bench.operator_scale.stand_ins"],
            cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True,
        )  # fmt: skip
    try:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(json.dumps(settings) + "\n")
        process.stdin.flush()
        if process.stdout.readline().strip() != "ready":
            raise RuntimeError(
                f"the stand-ins did not come up: {(folder / 'stand-ins.log').read_text()[-2000:]}"
            )
        yield process
    finally:
        _end(process)


def _end(process: subprocess.Popen[Any]) -> None:
    process.terminate()
    try:
        process.wait(END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _program(folder: Path, name: str) -> str | None:
    return str(folder / name) if os.access(folder / name, os.X_OK) else shutil.which(name)


def _said(program: Path) -> str:
    return subprocess.run([program, "--version"], capture_output=True, text=True, check=False).stdout.strip()
