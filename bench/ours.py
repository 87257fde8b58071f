"""Our side of each benchmark. A part that does not exist yet raises NotImplementedError with its name; the harness then
reports `missing`, never a number."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench import (
    dispatcher,
    endtoend,
    handoff,
    iterables,
    links,
    machine,
    pictures,
    ranks,
    raydata,
    raydata_trainers,
    samplers,
    tables,
    tls_proxy,
    transport,
)
from bench.raybox import SCRATCH
from bench.service import directly, need, service
from bench.work import KINDS, Contents, Proof, sums

_SPARE_NBYTES = 256_000_000
TICKET_CASE = "a ticket of 256 indices"
_TICKET_KEYS = 256
RAYS_NICENESS = "15"
"""Niceness of the processes that Ray's workers start. Feeders of a job have it."""


def handoff_service(case: handoff.Case) -> Any:
    """Starts one feeder, with a window of batches ahead, as the peers have."""
    room = 3 * (case.window + case.burst) * case.nbytes + _SPARE_NBYTES
    return service(feeders=1, shared_memory_nbytes=room, prefetch=case.window)


def b1_handoff(case: handoff.Case) -> dict[str, Any]:
    with handoff_service(case):
        from dataloaderjob import DataLoader

        loader = DataLoader(handoff.ReadyBatches(case), batch_size=None)
        stream = iter(loader)
        found = handoff.measure(stream, case)
        _no_copies(loader)
        return found


def _no_copies(loader: Any) -> None:
    copies = loader._client.pool.copies
    if copies:
        raise RuntimeError(
            f"{copies} batches were served as copies: the pool is too small for what is measured"
        )


class _Indices(torch.utils.data.Dataset[Any]):
    """Batches that consist of their own indices, int64."""

    def __init__(self, length: int) -> None:
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __getitems__(self, keys: list[int]) -> list[int]:
        return keys

    def __getitem__(self, key: int) -> int:
        return key


def b1_ticket(case: handoff.Case) -> dict[str, Any]:
    """Measures the CPU that `next()` takes to pack and send one list of 256 ints, while batches arrive."""
    batches = 60 if case.smoke else 800
    with service(feeders=1, shared_memory_nbytes=_SPARE_NBYTES, prefetch=16):
        from dataloaderjob import DataLoader
        from dataloaderjob.trainer.epochs import sampled_iterator

        dataset = _Indices(batches * _TICKET_KEYS)
        iterator: Any = iter(DataLoader(dataset, batch_size=_TICKET_KEYS, collate_fn=torch.tensor))
        submit, spent, proof = sampled_iterator.submit, [], Proof()

        def timed(*args: Any, **options: Any) -> None:
            began = time.thread_time_ns()
            submit(*args, **options)
            spent.append(time.thread_time_ns() - began)

        sampled_iterator.submit = timed
        for number, batch in enumerate(iterator):
            expected = np.arange(number * _TICKET_KEYS, (number + 1) * _TICKET_KEYS)
            proof.add(number, [batch.numpy().view(np.uint8)], [sums(expected.view(np.uint8))])
        warm = spent[len(spent) // 4 :]
        figures = {TICKET_CASE: {"cpu_us": sum(warm) / len(warm) / 1e3}}
        return {"figures": figures, "proof": proof.as_json()}


def b1_state(case: handoff.Case) -> dict[str, Any]:
    """Measures the CPU of `state_dict()` in the middle of an epoch whose order came from torch's default generator."""
    calls = 20 if case.smoke else 2000
    with service(feeders=1, shared_memory_nbytes=_SPARE_NBYTES, prefetch=16):
        from dataloaderjob import DataLoader

        dataset = _Indices(64 * _TICKET_KEYS)
        torch.manual_seed(8)
        reference = iter(
            torch.utils.data.DataLoader(dataset, _TICKET_KEYS, shuffle=True, collate_fn=torch.tensor)
        )
        expected = [next(reference).numpy().view(np.uint8) for _ in range(8)]
        torch.manual_seed(8)
        loader = DataLoader(dataset, _TICKET_KEYS, shuffle=True, collate_fn=torch.tensor)
        iterator, proof = iter(loader), Proof()
        for number, bytes_ in enumerate(expected):
            proof.add(number, [next(iterator).numpy().view(np.uint8)], [sums(bytes_)])
        if loader.state_dict()["batches"] != 8:
            raise RuntimeError("the state does not belong to the eighth batch")
        began = time.thread_time_ns()
        for _ in range(calls):
            loader.state_dict()
        cpu_us = (time.thread_time_ns() - began) / calls / 1e3
        return {"figures": {"a loader's state": {"cpu_us": cpu_us}}, "proof": proof.as_json()}


class _Bodies(torch.utils.data.Dataset[Any]):
    """Bodies that lie ready in the feeder, as in the peers' senders."""

    def __init__(self, nbytes: int) -> None:
        self._nbytes = nbytes
        self._made: list[torch.Tensor] | None = None

    def __len__(self) -> int:
        return 1 << 30

    def __getitem__(self, number: int) -> torch.Tensor:
        if self._made is None:
            self._made = [torch.from_numpy(body) for body in transport.bodies(self._nbytes)]
        return self._made[number % KINDS]


def b2_transport(case: transport.Case) -> dict[str, Any]:
    """Reads the CPU of the receiver, a process of its own, from outside. This process takes and checks batches."""
    window = 2 * case.depth
    room = 4 * window * case.nbytes + _SPARE_NBYTES
    with service(feeders=1, shared_memory_nbytes=room, prefetch=window) as running:
        from dataloaderjob import DataLoader

        loader = DataLoader(_Bodies(case.nbytes), batch_size=None)
        stream = iter(loader)
        contents, proof = Contents(case.nbytes, 1), Proof()
        first = (1 if case.smoke else 2) * case.slots
        for _ in range(first):
            next(stream)
        receivers = running.receivers()
        before, cpu = machine.snapshot(), machine.cpu_ns(receivers)
        began, checking, number = time.perf_counter(), 0.0, first
        while time.perf_counter() - began - checking < case.seconds or (number - first) % case.slots:
            batch = next(stream)
            if case.nbytes > 4e6 or (number - first) // case.slots % 8 == 0:
                paused = time.perf_counter()
                proof.add(number, [batch.numpy()], contents.expected(number, stamped=False))
                checking += time.perf_counter() - paused
            number += 1
        wall_s = time.perf_counter() - began - checking
        cpu_s = (machine.cpu_ns(receivers) - cpu) / 1e9
        _no_copies(loader)
        load = machine.between(before, machine.snapshot())
        return transport.result(case, number - first, cpu_s, wall_s, load, proof)


def b15_links(case: links.Case, *, tls: bool = False, proxies: bool = False) -> dict[str, Any]:
    """Reads the CPU of the receiver, as in B2. There is no checksum, because no peer has one.

    With `proxies`, batches pass through stunnel. Its process on the receiver's side counts as a receiver.
    """
    window = min(case.depth + 2, 200)
    room = 4 * window * case.nbytes + _SPARE_NBYTES
    with contextlib.ExitStack() as stack:
        command, host = [sys.executable, "-m", "dataloaderjob.feeder.host"], tls_proxy.LOOPBACK
        through: tls_proxy.TlsProxies | None = None
        if case.paced_mb:
            command = [sys.executable, "-m", "bench.paced_feeder", str(int(case.paced_mb * 1e6))]
        if case.gbit:
            namespace, host = stack.enter_context(links.link(case.gbit)), links.FAR
            if proxies:
                through, host = tls_proxy.TlsProxies(namespace, stack), tls_proxy.LOOPBACK
            command = ["ip", "netns", "exec", namespace, *command]
        running = stack.enter_context(
            service(
                feeders=case.senders,
                shared_memory_nbytes=room,
                prefetch=window,
                host=host,
                feeder_command=command,
                tls=tls,
                relay=through.relay if through else directly,
            )
        )
        from dataloaderjob import DataLoader

        loader = DataLoader(_Bodies(case.nbytes), batch_size=None)
        stream = iter(loader)

        def receivers() -> list[int]:
            return [*running.receivers(), *(through.near_pids if through else ())]

        found = links.measure(lambda: next(stream).numpy(), case, receivers)
        _no_copies(loader)
        return found


def b16_ranks(case: ranks.Case) -> dict[str, Any]:
    """Uses two feeders, which would be elsewhere. The trainers, the sidecar and its receivers are on the node."""
    with service(feeders=2, shared_memory_nbytes=2_000_000_000, prefetch=4, processes=case.ranks) as running:
        return ranks.measure("ours", case, lambda: running.on_trainer_node()[1:])


def b3_end_to_end(case: endtoend.Case) -> dict[str, Any]:
    """Uses `producers` feeders. Trainer, sidecar and receiver are the node's processes."""
    with service(feeders=case.producers, shared_memory_nbytes=1_000_000_000, prefetch=16) as running:
        from dataloaderjob import DataLoader

        stream = iter(DataLoader(endtoend.Images(case), batch_size=case.batch))
        return endtoend.measure(stream, case, node_pids=running.on_trainer_node)


def b17_streams(case: iterables.Case) -> dict[str, Any]:
    """Uses `producers` feeders. Feeders of a stream have its slots or run its stage."""
    with (
        iterables.dataset(case) as data,
        service(feeders=case.producers, shared_memory_nbytes=1_000_000_000, prefetch=16) as running,
    ):
        from dataloaderjob import DataLoader

        loader = DataLoader(
            data, batch_size=case.batch, num_workers=iterables.readers(case), stage=iterables.stage(case)
        )
        return endtoend.measure(iterables.pairs(iter(loader)), case, node_pids=running.on_trainer_node)


def b19_pictures(case: pictures.Case) -> dict[str, Any]:
    """Uses `producers` feeders. They decode, or they only read and the trainer's stage decodes."""
    with service(feeders=case.producers, shared_memory_nbytes=1_000_000_000, prefetch=16) as running:
        from dataloaderjob import DataLoader
        from dataloaderjob.collate import keep_bytes

        if case.kind == pictures.FEEDERS:
            loader = DataLoader(pictures.Decoded(case), batch_size=case.batch)
        else:
            loader = DataLoader(
                pictures.Files(case), batch_size=case.batch, collate_fn=keep_bytes, device="cpu",
                device_stage=pictures.stage,
            )  # fmt: skip
        found = endtoend.measure(iter(loader), case, node_pids=running.on_trainer_node)
        return pictures.with_link(found, case, running.receiver())


def b20_tables(case: tables.Case) -> dict[str, Any]:
    """Uses `producers` slots and feeders. Trainer, sidecar and receiver are the node's processes."""
    with service(feeders=case.producers, shared_memory_nbytes=1_000_000_000, prefetch=16) as running:
        from dataloaderjob import DataLoader

        loader = DataLoader(tables.Tables(case), batch_size=None, num_workers=case.producers)
        return tables.measure(iter(loader), case, node_pids=running.on_trainer_node)


def b18_ray_data(case: raydata.Case) -> dict[str, Any]:
    """Starts a Ray, and a slot that reads from it. Trainers, sidecar and receivers are the node's processes."""
    need("dataloaderjob.ray_data")
    from dataloaderjob.core.settings import RayTasks
    from dataloaderjob.local.head import RayHead

    tasks = RayTasks(cpus=raydata.cpus(case), object_store_nbytes=raydata.STORE_NBYTES)
    head = RayHead(Path(tempfile.mkdtemp(prefix="r", dir=os.environ.get(SCRATCH, "/tmp"))), tasks=tasks)
    head.start()
    try:
        while head.poll_up() is None:
            time.sleep(0.05)
        env = {**head.env(), "RAY_ADDRESS": head.address}
        with service(
            feeders=1, shared_memory_nbytes=1_000_000_000, prefetch=16, processes=case.trainers,
            feeder_command=("nice", "-n", RAYS_NICENESS, sys.executable, "-m", "dataloaderjob.feeder.host"),
            feeder_env=env, same_machine=not case.elsewhere,
        ) as running:  # fmt: skip
            return raydata_trainers.measure(case, running.sidecar, running.on_trainer_node)
    finally:
        head.stop()


def b10_samplers(case: samplers.Case) -> dict[str, Any]:
    """Measures one rank's sampler, as with the peers."""
    need("dataloaderjob.samplers.distributed")
    from dataloaderjob import ElasticDistributedSampler

    def new_sampler(count: int) -> Any:
        return ElasticDistributedSampler(range(count), num_replicas=1, rank=0)

    def resume(sampler: Any, position: int) -> Iterator[int]:
        sampler.load_state_dict({**sampler.state_dict(), "position": position})
        return iter(sampler)

    return samplers.measure(new_sampler, resume, case)


OURS = {
    "B1": b1_handoff,
    "B1 ticket": b1_ticket,
    "B1 state": b1_state,
    "B2": b2_transport,
    "B3": b3_end_to_end,
    "B8": b17_streams,
    "B10": b10_samplers,
    "B14": dispatcher.measure,
    "B15": b15_links,
    "B16": b16_ranks,
    "B17": b17_streams,
    "B18": b18_ray_data,
    "B19": b19_pictures,
    "B20": b20_tables,
}
