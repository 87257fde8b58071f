"""B21, the admission of labeled pods: `python -m bench.admission [--rounds N] [--smoke]`.

An API server without a cluster admits pods that a client creates at a fixed rate, whether or not earlier ones have been
admitted. Latency counts from the time at which the client should have sent a pod. The pods are dry runs, which pass
every admission and store nothing. API server, etcd, injector and client share the machine's cores.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import importlib.metadata
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import yaml

from bench import machine
from bench.operator_scale.api import Api, connected
from bench.outcome import load_of, write
from bench.plan import Claim
from bench.rows import OURS, collect, row
from bench.run import ROOT, say
from bench.stats import median, percentile

SUPPORT = str(ROOT / "tests" / "support")
if SUPPORT not in sys.path:
    sys.path.append(SUPPORT)

from injecting import LABELED, pod  # noqa: E402
from injector import GATE, POLICY, Installed  # noqa: E402
from processes_of_operator import until  # noqa: E402

from apiserver import ApiServer, api_server, assets  # noqa: E402

BENCHMARK, TITLE, FILE = "B21", "Admission of labeled pods, 100 a second", "b21-admission"
RATE = 100.0
"""Pods a second."""
FLOOR_MS = 50.0
ROUNDS, SECONDS, SMOKE_SECONDS = 5, 10.0, 1.0
WARM_PODS = 50
CRD = ROOT / "crds" / "dataloaderjobs.yaml"
WEBHOOK_CASE, POLICY_CASE, BARE_CASE = "the webhook", "the admission policy", "pods without the label"


@dataclass(frozen=True, slots=True)
class Case:
    """Pods of one kind in one namespace. `pid`: the injector that admits them."""

    name: str
    installed: Installed
    labeled: bool
    pid: int | None = None

    def pod(self) -> dict[str, Any]:
        marks = {**(LABELED["metadata"] if self.labeled else {}), "generateName": "p-"}
        return {**pod(), "metadata": {**marks, "namespace": self.installed.namespace}}

    @property
    def path(self) -> str:
        return f"/api/v1/namespaces/{self.installed.namespace}/pods?dryRun=All"


def claims() -> list[Claim]:
    """Returns the claims in the table's order."""
    made = []
    for case in (WEBHOOK_CASE, POLICY_CASE, BARE_CASE):
        floor = None if case == BARE_CASE else FLOOR_MS
        made += [
            Claim(benchmark=BENCHMARK, case=case, figure="p50_ms", unit="ms", says="p50 of a pod's creation"),
            Claim(benchmark=BENCHMARK, case=case, figure="p99_ms", unit="ms", says="p99", floor=floor),
        ]
    made.append(
        Claim(
            benchmark=BENCHMARK,
            case=WEBHOOK_CASE,
            figure="cpu_ms",
            unit="CPU-ms/pod",
            says="the injector's CPU",
        )
    )
    return made


@contextlib.contextmanager
def cases(server: ApiServer, folder: Path) -> Iterator[list[Case]]:
    """Installs the chart twice, with the webhook and with the policy, and waits until both inject pods."""
    (folder / "webhook").mkdir()
    (folder / "policy").mkdir()
    webhook = Installed(server, folder / "webhook")
    policy = Installed(server, folder / "policy", *POLICY)
    try:
        webhook.job()
        webhook.started()
        policy.publish(policy.job())
        for installed in (webhook, policy):
            until(installed.injects, 30, "the first pod is injected")
        yield [
            Case(WEBHOOK_CASE, webhook, True, webhook.processes[0].pid), Case(POLICY_CASE, policy, True),
            Case(BARE_CASE, webhook, False),
        ]  # fmt: skip
    finally:
        webhook.close()
        policy.close()


async def cell(api: Api, case: Case, seconds: float) -> dict[str, float]:
    """Creates pods at the rate and returns figures of their latencies."""
    await asyncio.gather(*(api.request("POST", case.path, case.pod()) for _ in range(WARM_PODS)))
    number = round(RATE * seconds)
    cpu_ns = machine.cpu_ns([case.pid]) if case.pid is not None else 0
    began = time.monotonic()

    async def create(due: float) -> float:
        await asyncio.sleep(max(0.0, due - time.monotonic()))
        made = await api.request("POST", case.path, case.pod())
        late = time.monotonic() - due
        if ("initContainers" in made["spec"]) is not case.labeled:
            raise RuntimeError(f"a pod was admitted wrongly, case {case.name}")
        return late * 1e3

    found = await asyncio.gather(*(create(began + n / RATE) for n in range(number)))
    figures = {"p50_ms": median(found), "p99_ms": percentile(found, 0.99)}
    if case.pid is not None:
        figures["cpu_ms"] = (machine.cpu_ns([case.pid]) - cpu_ns) / 1e6 / number
    return figures


async def measure(server: ApiServer, chosen: list[Case], rounds: int, seconds: float) -> list[dict[str, Any]]:
    """Runs the cases in turn, in each round in the opposite order. Returns a record of each cell."""
    records = []
    async with connected(server.url, server.token) as api:
        for number in range(rounds):
            for case in chosen if number % 2 == 0 else reversed(chosen):
                before = machine.snapshot()
                figures = await cell(api, case, seconds)
                load = machine.between(before, machine.snapshot())
                records.append(
                    {
                        "party": OURS,
                        "round": number,
                        "figures": {case.name: figures},
                        "load": {**load.as_json(), "disturbed": load.disturbed},
                    }
                )
                say(f"round {number + 1}, {case.name}: p99 {figures['p99_ms']:.1f} ms")
    return records


def rows(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the table's rows."""
    figures = collect(records)
    return [row(claim, figures) for claim in claims()]


def as_json(records: list[dict[str, Any]], commit: str) -> dict[str, Any]:
    """Returns results in the format of the other benchmarks."""
    packages = {name: importlib.metadata.version(name) for name in ("dataloaderjob", "aiohttp", "pydantic")}
    return {
        "benchmark": BENCHMARK,
        "title": TITLE,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit,
        "machine": machine.facts()["machine"],
        "versions": {"python": sys.version.split()[0], **packages},
        "load": load_of([record["load"] for record in records]),
        "missing": {},
        "failed_cells": 0,
        "rows": rows(records),
        "cells": records,
    }


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.admission", description=__doc__)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument(
        "--smoke", action="store_true", help="one round of a second, results to build/bench-smoke"
    )
    options = parser.parse_args(arguments)
    rounds, seconds = (1, SMOKE_SECONDS) if options.smoke else (options.rounds, SECONDS)
    assets()
    machine.unwind_on_signals()
    machine.adopt_orphans()
    commit = machine.commit()
    with tempfile.TemporaryDirectory(prefix="dataloaderjob-bench-") as scratch:
        folder = Path(scratch)
        (folder / "server").mkdir()
        try:
            with api_server(folder / "server", *GATE) as server:
                server.define(yaml.safe_load(CRD.read_text()))
                with cases(server, folder) as chosen:
                    found = as_json(asyncio.run(measure(server, chosen, rounds, seconds)), commit)
        finally:
            machine.end_children(0.0)
    write(found, FILE, smoke=options.smoke or rounds < ROUNDS)
    return 0


if __name__ == "__main__":
    sys.exit(main())
