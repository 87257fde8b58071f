"""Heads of many jobs in one process: one that is honest, the others as hostile as a tenant's image can be.

    python hostile_heads.py PORT KIND

Each head has an address of its own in 127.0.0.0/8, and answers at PORT. The job's name in the handshake says which one
it is. `polled` runs the operator's poller against them, in a process of its own, and measures it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from manifests import manifest
from ports import reserve_port

from dataloaderjob.api import KIND
from dataloaderjob.core import keys, sockets
from dataloaderjob.core.handshake import TRANSPORT, accept_answer, new_challenge, seals_after
from dataloaderjob.core.seals import Seals
from dataloaderjob.core.supervision import READ
from dataloaderjob_operator import names
from dataloaderjob_operator.observe import supervisor_poller
from dataloaderjob_operator.observe.cache import Cache
from dataloaderjob_operator.observe.supervisor_poller import MAX_STATUS_NBYTES, SupervisorPoller

ROOT = b"r" * 32
HONEST = "honest"
READY = 3
FEEDERS = 4


def filled(before: str, item: str, after: str, nbytes: int) -> bytes:
    """A JSON text of almost so many bytes, full of `item`s."""
    count = (nbytes - len(before) - len(after) - len(item)) // (len(item) + 1)
    return (before + ",".join([item] * max(1, count)) + after).encode()


def sidecars(nbytes: int) -> bytes:
    """As many counters as an operator keeps, under names as long as it keeps them."""
    metrics = dict.fromkeys(READ, (1 << 63) - 1)
    reports, size = {}, 0
    while size < nbytes - 2000:
        report = {"metrics": metrics}
        reports[f"{len(reports):0253d}"] = report
        size += 253 + 6 + len(json.dumps(report, separators=(",", ":")))
    message = {"type": "status", "desired": FEEDERS, "ready": 0, "feeders": [], "sidecars": reports}
    return json.dumps(message, separators=(",", ":")).encode()


_BEGIN = '{"type":"status","desired":0,"ready":0,"feeders":['
MiB = 1 << 20


def answer(kind: str) -> bytes:
    match kind:
        case "objects":
            return filled(_BEGIN, "{}", "]}", MiB)
        case "lists":
            return filled('{"type":"status","desired":4,"ready":0,"feeders":[],"x":[', "[]", "]}", MiB)
        case "keys":
            return (
                '{"type":"status","desired":4,"ready":0,'
                + ",".join(f'"{n:x}":{n}' for n in range(MiB // 16))
                + "}"
            ).encode()
        case "sidecars":
            return sidecars(MiB)
        case "long-texts":
            text = "\U0001f4a5" + "x" * (MiB // 4)
            feeder = {"name": text, "why": text, "cause": "FeederFails", "host": text}
            message = {"type": "status", "desired": 4, "ready": 0, "feeders": [feeder]}
            return json.dumps(message, ensure_ascii=False).encode()
        case "eight-megabytes":
            return filled(_BEGIN, "{}", "]}", 8 * MiB)
    return filled(_BEGIN, "{}", "]}", MiB)  # for heads that trickle or stall


async def serve(port: int, kind: str) -> None:
    data = answer(kind)
    honest = json.dumps(
        {"type": "status", "desired": FEEDERS, "ready": READY, "feeders": [], "ray": {"version": "2.60.0"}}
    ).encode()

    async def serve_one(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, EOFError):
            first = new_challenge()
            writer.write(sockets.pack_message(first))
            hello = await receive(reader, None)
            job = str(hello["job"])
            key = keys.of_job(names.job_key(ROOT, job.rpartition("/")[2]))
            writer.write(
                sockets.pack_message(
                    accept_answer(key, first, hello, job=job, facts={TRANSPORT: sockets.TCP})
                )
            )
            seals = seals_after(key, first, hello, accepted=True)
            assert seals is not None
            while True:
                asked = await receive(reader, seals)
                if job.split("/")[1] == HONEST:
                    reply = honest if asked["type"] == "status" else b'{"type":"ok"}'
                elif asked["type"] != "status":
                    await asyncio.sleep(60)  # it never answers to a number of feeders
                    return
                else:
                    reply = data
                said = seals.out.seal(sockets.LENGTH.pack(len(reply)), reply)
                if kind == "trickle" and reply is data:
                    for at in range(0, len(said), 50_000):
                        writer.write(said[at : at + 50_000])
                        await asyncio.sleep(0.2)
                writer.write(said)

    async def receive(reader: asyncio.StreamReader, seals: Seals | None) -> dict[str, Any]:
        head = await reader.readexactly(sockets.head_nbytes(seals))
        nbytes = sockets.open_head(head, sockets.MAX_MESSAGE_NBYTES, seals)
        return sockets.parse_message(sockets.open_rest(await reader.readexactly(nbytes), seals))

    async with await asyncio.start_server(serve_one, "0.0.0.0", port, backlog=1024):
        sys.stdout.write("serves\n")
        sys.stdout.flush()
        await asyncio.Event().wait()


def with_heads(heads: int) -> Cache:
    """A cache with the jobs and the pods of their heads. The first is honest."""
    cache = Cache()
    for number in range(heads + 1):
        name = HONEST if number == 0 else f"hostile-{number}"
        changes = {"metadata.uid": f"u{number}", "metadata.namespace": "team", "metadata.name": name}
        cache.put({**manifest(changes), "kind": KIND})
        metadata = {
            "name": f"{name}-head-0", "namespace": "team", "labels": names.labels(name, names.Role.HEAD),
            "ownerReferences": [{"kind": "ReplicaSet", "name": f"{name}-head-7c", "controller": True}],
        }  # fmt: skip
        status = {
            "podIP": f"127.1.{number // 200}.{1 + number % 200}",
            "conditions": [{"type": "Ready", "status": "True"}],
        }
        cache.put({"kind": "Pod", "metadata": metadata, "status": status})
    return cache


async def poll(port: int, heads: int, seconds: float) -> dict[str, Any]:
    cache = with_heads(heads)
    poller = SupervisorPoller(cache, ROOT, lambda key: None, port=port)
    polling = asyncio.create_task(poller.run())
    poller.want(("team", HONEST), FEEDERS)
    for number in range(1, heads + 1):
        poller.want(("team", f"hostile-{number}"), FEEDERS)
    late, wrong, began = 0.0, 0, time.monotonic()
    seen = False
    while time.monotonic() < began + seconds:
        before = time.monotonic()
        await asyncio.sleep(0.02)
        late = max(late, time.monotonic() - before - 0.02)
        status = poller.status(("team", HONEST))
        seen |= status is not None
        wrong += seen and (status is None or (status.ready, status.silent) != (READY, ""))
    texts = max((len(repr(poller.status(("team", f"hostile-{n}")))) for n in range(1, heads + 1)), default=0)
    polling.cancel()
    return {"late_s": late, "wrong": wrong, "seen": seen, "status_nbytes": texts, "peak_mb": peak_mb()}


def peak_mb() -> float:
    """The most memory that this process has had."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1000 for line in lines if line.startswith("VmHWM"))


def polled(kind: str, heads: int, seconds: float) -> dict[str, Any]:
    """What the operator's poller needed for `heads` hostile heads and one that is honest."""
    port = reserve_port()
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}
    serving = subprocess.Popen([sys.executable, __file__, str(port), kind], stdout=subprocess.PIPE, env=env)
    try:
        assert serving.stdout is not None
        assert serving.stdout.readline()
        command = [sys.executable, __file__, str(port), "poll", str(heads), str(seconds)]
        done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=120, check=True)
        found: dict[str, Any] = json.loads(done.stdout)
        return {**found, "log_nbytes": len(done.stderr)}
    finally:
        serving.kill()
        serving.wait()


def main(port: int, kind: str, *rest: str) -> None:
    if kind != "poll":
        asyncio.run(serve(port, kind))
        return
    import logging

    logging.basicConfig(level=logging.INFO)
    for name in ("PERIOD_S", "UNSETTLED_PERIOD_S", "MIN_INTERVAL_S"):  # more polls in the time of a test
        setattr(supervisor_poller, name, getattr(supervisor_poller, name) / 4)
    assert MAX_STATUS_NBYTES
    sys.stdout.write(json.dumps(asyncio.run(poll(port, int(rest[0]), float(rest[1])))))


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:])
