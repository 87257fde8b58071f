"""Feeders, supervisor, raylet and GCS, or the feeder host, die or freeze at random moments; the digest does not change.

One service lives through all of it, so every fault also proves that the service came back from the last.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
import time
from collections.abc import Iterator

import psutil
import pytest
import torch
from covering import seeds
from fault_data import Slow, digest_of
from local_runs import started_as
from rig import until
from services import Service, serving

from dataloaderjob import DataLoader
from dataloaderjob.local.status import LiveRun

FEEDERS = 3
MAX_WAIT_S = 3.5
"""3 s, one batch, and the noise of a machine whose two cores run everything."""
FAULTS = {
    "ray": ("kill feeder", "stop feeder", "kill supervisor", "kill raylet", "kill gcs", "kill two feeders"),
    "local": ("kill feeder", "stop feeder", "kill supervisor", "kill host", "kill two feeders"),
}


def vital(run: LiveRun, name: str) -> list[int]:
    """Pids of Ray's processes of this run: they have its folder in their arguments."""
    found = []
    for process in psutil.process_iter(["pid", "cmdline"]):
        args = process.info["cmdline"] or [""]
        if args[0].endswith(f"/{name}") and any(str(run.home) in a for a in args):
            found.append(process.info["pid"])
    return found


@pytest.fixture(scope="module", params=list(FAULTS))
def service(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[Service]:
    with serving(tmp_path_factory.mktemp("f"), request.param, FEEDERS) as made:
        yield made


def loader(seed: int, **options) -> DataLoader:
    generator = torch.Generator().manual_seed(seed)
    return DataLoader(Slow(), batch_size=8, shuffle=True, generator=generator, **options)


@pytest.fixture(scope="module")
def reference() -> dict[int, str]:
    """Digests of the loader in the process itself, by seed."""
    return {}


def expected(reference: dict[int, str], seed: int) -> str:
    if seed not in reference:
        fast = DataLoader(
            Slow(pause_s=0),
            batch_size=8,
            shuffle=True,
            num_workers=0,
            generator=torch.Generator().manual_seed(seed),
        )
        reference[seed] = digest_of(fast)
    return reference[seed]


def strike(service: Service, fault: str, rng: random.Random) -> list[int]:
    """Commits the fault; returns pids to let go on later."""
    pids = service.feeder_pids() if "feeder" in fault else []
    if fault == "kill feeder":
        os.kill(rng.choice(pids), signal.SIGKILL)
    elif fault == "kill two feeders":
        for pid in rng.sample(pids, 2):
            os.kill(pid, signal.SIGKILL)
    elif fault == "stop feeder":
        pid = rng.choice(pids)
        os.kill(pid, signal.SIGSTOP)
        return [pid]
    elif fault == "kill supervisor":
        os.kill(service.status()["pid"], signal.SIGKILL)
    elif fault == "kill host":
        os.kill(started_as(service.run.about["run"], "dataloaderjob.feeder.host"), signal.SIGKILL)
    else:
        name = {"kill raylet": "raylet", "kill gcs": "gcs_server"}[fault]
        for pid in vital(service.run, name):
            os.kill(pid, signal.SIGKILL)
    return []


def thaw(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):  # replaced meanwhile
        os.kill(pid, signal.SIGCONT)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", seeds("FAULT_SEEDS", 6))
@pytest.mark.quick("0")
def test_the_digest_survives_a_fault_at_a_random_moment(
    service: Service, reference: dict[int, str], seed: int
):
    rng = random.Random(seed)
    faults = FAULTS[service.provider]
    fault = faults[seed % len(faults)]
    waits: list[float] = []
    stopped: list[int] = []
    thread = threading.Timer(rng.uniform(0.0, 0.8), lambda: stopped.extend(strike(service, fault, rng)))
    made = loader(seed)
    thread.start()
    try:
        found = digest_of(made, waits.append)
    finally:
        thread.join()
        for pid in stopped:
            thaw(pid)
    assert found == expected(reference, seed), f"after {fault}"
    assert len(waits) == 300
    if fault not in ("kill raylet", "kill host"):  # which take all feeders of this machine along
        assert max(waits[1:]) < MAX_WAIT_S, f"longest wait after {fault}"
    service.settled()


@pytest.mark.thorough
@pytest.mark.timeout(600)
@pytest.mark.quick("local")
def test_digest_survives_scaling_feeders_within_an_epoch(service, reference):
    plan = {30: 1, 80: 4, 130: 2, 180: 0}
    back: list[threading.Timer] = []

    def before(number: int) -> None:
        if number not in plan:
            return
        service.scale(plan[number])
        if plan[number]:
            until(lambda: service.status()["ready"] == plan[number], 60, f"{plan[number]} feeders")
        else:  # the trainer will wait until somebody comes back
            back.append(threading.Timer(2.0, lambda: service.scale(3)))
            back[0].start()

    try:
        assert digest_of(loader(99), before=before) == expected(reference, 99)
        assert back
    finally:
        service.scale(FEEDERS)
    service.settled()


@pytest.mark.thorough
@pytest.mark.quick("local")
def test_frozen_feeder_is_replaced_and_thawing_it_changes_nothing(service, reference):
    pid = service.feeder_pids()[0]
    os.kill(pid, signal.SIGSTOP)
    try:
        assert digest_of(loader(7)) == expected(reference, 7)
        slow = DataLoader(Slow(pause_s=0.01), batch_size=8)
        began = time.monotonic()
        for _ in slow:  # long enough for the supervisor to be told
            if pid not in service.feeder_pids() or time.monotonic() - began > 60:
                break
        until(lambda: pid not in service.feeder_pids(), 60, "the replacement")
    finally:
        thaw(pid)
    assert digest_of(loader(8)) == expected(reference, 8)
    service.settled()
