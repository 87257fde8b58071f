"""`python -m dataloaderjob_operator`: the operator's process."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import importlib.metadata
import logging
import signal
import sys
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path

import kopf

from dataloaderjob_operator import election, keys, names
from dataloaderjob_operator.autoscaler import Autoscalers
from dataloaderjob_operator.client import ApiClient
from dataloaderjob_operator.monitoring import (
    Metrics,
    PortTaken,
    ProcessHealth,
    configure_logging,
    pulse,
    serve,
)
from dataloaderjob_operator.objects import OperatorConfig
from dataloaderjob_operator.observe import watch
from dataloaderjob_operator.observe.attached_pods import AttachedPods
from dataloaderjob_operator.observe.cache import Cache, JobKey
from dataloaderjob_operator.observe.followed_objects import FollowedObjects
from dataloaderjob_operator.observe.ray_clusters import RayClusters
from dataloaderjob_operator.observe.refused_pods import RefusedPods
from dataloaderjob_operator.observe.requests import Requests
from dataloaderjob_operator.observe.supervisor_poller import SupervisorPoller
from dataloaderjob_operator.observe.watch import EventLookup
from dataloaderjob_operator.options import Options, parse
from dataloaderjob_operator.reconcile import Reconciler
from dataloaderjob_operator.workqueue import Workers

log = logging.getLogger("dataloaderjob_operator")

CHILD_S = 0.3
"""Seconds from a change to a child, or to the supervisor's report, until the reconcile. The same reconcile covers all
changes in that time."""
MAX_CALLS = 25_000
"""Recursion limit. A job may be nested 10,000 levels deep, and copying it takes two calls per level. If kopf failed to
read or copy one job, it would stop watching all jobs. A thread's stack has room for JSON of 60,000 levels."""
CLOSING_S = 2.0
"""Maximum time in seconds to wait for kopf's generators to close. Closing a generator ends its request to the API
server."""
_CLOSING = "async_generator_athrow"
"""CPython's name for the type that an asynchronous generator's `aclose()` returns."""
_QUIET_TURNS = 5
"""Number of consecutive event-loop iterations without a closing task after which all generators count as closed. A
generator inside another one closes two iterations after the outer one."""


def read_root(path: Path) -> bytes:
    """Reads the root key from a file. Raises NoRootKey."""
    try:
        root = path.read_bytes()
        names.check_root(root)
    except (OSError, ValueError) as exc:
        raise keys.NoRootKey(f"cannot read the root key from {path}: {exc}") from exc
    return root


def read_roots(options: Options) -> keys.Roots | None:
    """Reads the root keys from files. Returns None if a Secret holds them. Raises NoRootKey."""
    if options.root_key is None:
        return None
    previous = None if options.previous_root is None else read_root(options.previous_root)
    return keys.Roots(read_root(options.root_key), previous)


async def run(options: Options, roots: keys.Roots | None) -> None:
    """Runs the operator until a signal arrives. Raises NoRootKey. Raises CancelledError if the signal arrives before
    the initial list is complete."""
    metrics = Metrics()
    requests = Requests(Cache(), watch.list_paths(options.namespaces))
    health = ProcessHealth(watches=requests.open, expected=requests.expected)
    client = await ApiClient.connect(metrics)
    if (this := asyncio.current_task()) is not None:
        for number in (signal.SIGTERM, signal.SIGINT):  # kopf sets its own handlers later
            asyncio.get_running_loop().add_signal_handler(number, this.cancel)
    try:
        async with serve(options.metrics_port, metrics, health):
            if roots is None:
                roots = await keys.root_key(client, *options.root_key_secret)
            async with _turn(options.candidate, client, metrics, health):
                setup = replace(options.config, root_key=roots.current, previous_root=roots.previous)
                await reconcile_all(options, setup, client, metrics, health, requests)
    finally:
        await client.close()
        await close_generators()


async def close_generators() -> None:
    """Waits until the generators that kopf abandoned are closed. asyncio closes each generator in its own task.
    `asyncio.run` would cancel these tasks and log a traceback for each."""
    gc.collect()
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(CLOSING_S):
            quiet = 0
            while quiet < _QUIET_TURNS:
                await asyncio.sleep(0)
                closing = [t for t in asyncio.all_tasks() if type(t.get_coro()).__name__ == _CLOSING]
                quiet = 0 if closing else quiet + 1
                if closing:
                    await asyncio.wait(closing)


@contextlib.asynccontextmanager
async def _turn(
    candidate: election.Candidate | None, client: ApiClient, metrics: Metrics, health: ProcessHealth
) -> AsyncIterator[None]:
    """Waits until this operator holds the Lease. Does not wait if there is no candidate."""
    if candidate is None:
        metrics.leader.set(1)
        yield
        return
    health.stands_by = True
    async with election.leading(
        client.api, candidate, client.gate, lambda leads: metrics.leader.set(int(leads))
    ):
        health.stands_by = False
        yield


async def reconcile_all(
    options: Options,
    setup: OperatorConfig,
    client: ApiClient,
    metrics: Metrics,
    health: ProcessHealth,
    requests: Requests,
) -> None:
    """Watches and reconciles jobs until a signal arrives."""
    cache = requests.cache
    poller = SupervisorPoller(
        cache, setup.root_key, lambda key: work.add(key, CHILD_S), previous_root=setup.previous_root
    )
    reconciler = Reconciler(client, cache, setup, poller, metrics=metrics)
    work = Workers(reconciler.reconcile, workers=options.workers, metrics=metrics, resync_s=options.resync_s)
    scalers = reconciler.autoscalers = Autoscalers(
        client, poller.status, cache.version, lambda key: work.add(key, CHILD_S)
    )
    lookup = reconciler.lookup = EventLookup(client, work.add)
    followed = reconciler.followed = FollowedObjects(client, work.add)
    clusters = RayClusters(client, work.add, domain=setup.cluster_domain)
    reconciler.ray_clusters = clusters
    refused = reconciler.refused_pods = RefusedPods(client, cache, setup, reconciler.recorder.send)
    attached = reconciler.attached = AttachedPods(client, lambda key: pods(key), options.namespaces)
    health.remark = reconciler.cannot_write
    metrics.watches.set_function(requests.open)
    metrics.describe(
        version=setup.version,
        kopf=importlib.metadata.version("kopf"),
        phases=cache.phases,
        loaders=cache.loaders,
    )

    def changed(key: JobKey, itself: bool) -> None:
        work.add(key, 0.0 if itself else CHILD_S, first=itself)
        poller.wake(key)

    def pods(key: JobKey) -> None:
        changed(key, False)
        followed.wake(key)

    def received(kind: str, uid: str) -> None:
        metrics.received(kind)
        requests.reported(kind, uid)

    def gone(key: JobKey) -> None:
        work.forget(key)
        reconciler.forget(key)

    await watch.prime(client, cache, work.add, options.namespaces)
    await attached.prime()
    health.listed = True
    gc.collect()
    gc.freeze()  # a garbage collection that visits the objects of 1,000 jobs blocks the loop for 0.2 s
    settings = kopf.OperatorSettings()
    watch.configure(settings)
    watching = kopf.operator(
        registry=watch.registry(cache, changed, gone, received, requests), settings=settings, standalone=True,
        clusterwide=not options.namespaces, namespaces=options.namespaces,
    )  # fmt: skip
    loops = {
        "work": work.run(), "supervisors": poller.run(), "event lookups": lookup.run(),
        "attached pods": attached.run(), "followed objects": followed.run(), "refused pods": refused.run(),
        "Ray clusters": clusters.run(), "autoscalers": scalers.run(), "pulse": pulse(metrics),
        "sweeps": watch.keep_sweeping(client, cache, work.add, options.namespaces, requests),
    }  # fmt: skip
    health.tasks += [asyncio.create_task(loop, name=name) for name, loop in loops.items()]
    await asyncio.sleep(0)  # kopf ignores tasks that run before it starts, and awaits the others when it ends
    try:
        await watching
    finally:
        await _end(health.tasks)


async def _end(tasks: Sequence[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    for task in tasks:
        with contextlib.suppress(asyncio.CancelledError):
            await task


def main() -> int:
    options = parse()
    sys.setrecursionlimit(MAX_CALLS)
    configure_logging(options.log_format)
    try:
        asyncio.run(run(options, read_roots(options)))
    except asyncio.CancelledError:
        log.info("the operator stopped before its initial list was complete")
    except keys.NoRootKey as exc:
        log.error("%s", exc)
        return 2
    except PortTaken as exc:
        log.error("%s; choose another port with --metrics-port", exc)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
