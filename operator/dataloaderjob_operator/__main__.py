"""`python -m dataloaderjob_operator`: the operator's process."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import importlib.metadata
import json
import logging
import signal
import sys
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import kopf

from dataloaderjob_operator import election, keys, names
from dataloaderjob_operator.client import Client
from dataloaderjob_operator.monitoring import (
    Health,
    LogFormat,
    Metrics,
    PortTaken,
    configure_logging,
    pulse,
    serve,
)
from dataloaderjob_operator.objects import OperatorConfig, OwnPod
from dataloaderjob_operator.objects.settings import USER, cluster_domain
from dataloaderjob_operator.observe import watch
from dataloaderjob_operator.observe.cache import Cache, JobKey
from dataloaderjob_operator.observe.requests import Requests
from dataloaderjob_operator.observe.supervisor_poller import SupervisorPoller
from dataloaderjob_operator.observe.watch import EventLookup
from dataloaderjob_operator.reconcile import Reconciler
from dataloaderjob_operator.workqueue import RESYNC_S, Workers

log = logging.getLogger("dataloaderjob_operator")

METRICS_PORT = 9440
RESOLV_CONF = Path("/etc/resolv.conf")
CHILD_S = 0.3
"""Seconds from a change of a job's child, or of what its supervisor reports, until the reconcile: for all that happens
meanwhile."""
MAX_CALLS = 25_000
"""Calls within calls: a job may have 10,000 levels, and a copy makes two calls for each. One that kopf cannot read or
copy ends the watch of all jobs. JSON of 60,000 levels fits the stack of a thread."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Options of the command line."""

    namespaces: tuple[str, ...]
    """Namespaces to watch; empty: all of the cluster."""
    config: OperatorConfig
    """What concerns jobs, still without a root key."""
    root_key: Path | None = None
    """File with the root key; None: it is in `root_key_secret`."""
    root_key_secret: tuple[str, str] = ("", "")
    """Namespace and name of that Secret."""
    candidate: election.Candidate | None = None
    """None: it works without a Lease."""
    workers: int
    resync_s: float
    """Interval between reconciles of a job to which nothing happens."""
    metrics_port: int
    """0: neither metrics nor probes are served."""
    log_format: LogFormat


def make_parser() -> argparse.ArgumentParser:
    """The command line; docs/reference/cli.md is made of it."""
    parser = argparse.ArgumentParser(prog="dataloaderjob_operator", description="Reconciles DataLoaderJobs.")
    parser.add_argument(
        "--namespace", action="append", default=[], help="watch only this namespace; may be repeated"
    )
    parser.add_argument(
        "--own-namespace",
        help="namespace of the operator's pod: NetworkPolicies of jobs let it connect to supervisors",
    )
    parser.add_argument(
        "--own-label",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="label of the operator's pod, for the same; may be repeated",
    )
    root = parser.add_mutually_exclusive_group(required=True)
    root.add_argument(
        "--root-key-secret",
        metavar="NAME",
        help="Secret of --own-namespace with the key from which jobs' keys are derived, made if it is not there; "
        "this or --root-key is needed",
    )
    root.add_argument(
        "--root-key",
        type=Path,
        help=f"file with that key in place of a Secret, at least {names.ROOT_NBYTES} bytes",
    )
    parser.add_argument(
        "--lease",
        metavar="NAME",
        help="Lease of --own-namespace: of several operators only the one that holds it works",
    )
    parser.add_argument(
        "--identity",
        metavar="NAME",
        help="name of this operator in the Lease, that of its pod; without it, one that no other has",
    )
    default = election.Timing()
    parser.add_argument(
        "--lease-seconds", type=int, default=default.lease_s,
        help="time without a renewal of the Lease after which another operator takes it",
    )  # fmt: skip
    parser.add_argument(
        "--lease-renew-seconds", type=float, default=default.renew_s,
        help="time after which an operator that cannot renew the Lease writes nothing until it can",
    )  # fmt: skip
    parser.add_argument(
        "--lease-retry-seconds", type=float, default=default.retry_s,
        help="interval between two attempts to get or renew the Lease",
    )  # fmt: skip
    parser.add_argument("--sidecar-image", required=True, help="sidecar image for manifests that name none")
    parser.add_argument(
        "--sidecar-pull-secret",
        action="append",
        default=[],
        metavar="NAME",
        help="Secret of a job's own namespace with which that image is pulled; may be repeated",
    )
    parser.add_argument(
        "--metrics-from",
        type=_peers,
        default=(),
        metavar="JSON",
        help="list of a NetworkPolicy's peers that may collect metrics of jobs' sidecars (default: nobody)",
    )
    parser.add_argument(
        "--fs-group",
        type=_group,
        default=USER,
        metavar="NUMBER",
        help="fsGroup of pods whose template gives none; none leaves it to the namespace, as on OpenShift",
    )
    parser.add_argument(
        "--managed-by", metavar="NAME", default="",
        help="run only jobs whose spec.managedBy is this, such as example.com/canary, beside another operator "
        "(default: jobs that name none)",
    )  # fmt: skip
    parser.add_argument(
        "--cluster-domain",
        help="domain of the cluster's names, such as cluster.local (default: what /etc/resolv.conf says)",
    )
    parser.add_argument(
        "--workers", type=int, default=32, help="number of jobs that are reconciled at the same time"
    )
    parser.add_argument(
        "--resync-seconds",
        type=_seconds,
        default=RESYNC_S,
        help="interval between reconciles of a job to which nothing happens",
    )
    parser.add_argument(
        "--metrics-port",
        type=int,
        default=METRICS_PORT,
        help="port of /metrics, /healthz and /readyz; 0 serves none of them",
    )
    parser.add_argument(
        "--log-format", type=LogFormat, choices=list(LogFormat), default=LogFormat.TEXT,
        help="form of log lines",
    )  # fmt: skip
    return parser


def parse(arguments: Sequence[str] | None = None) -> Options:
    parser = make_parser()
    found = parser.parse_args(arguments)
    if (found.root_key_secret or found.lease) and not found.own_namespace:
        parser.error("--root-key-secret and --lease need --own-namespace NAME, where Secret and Lease are")
    try:
        timing = election.Timing(found.lease_seconds, found.lease_renew_seconds, found.lease_retry_seconds)
    except ValueError as exc:
        parser.error(str(exc))
    config = OperatorConfig(
        version=importlib.metadata.version("dataloaderjob"), sidecar_image=found.sidecar_image, root_key=b"",
        operator=_own_pod(parser, found.own_namespace, found.own_label),
        sidecar_pull_secrets=tuple(found.sidecar_pull_secret), metrics_from=found.metrics_from,
        fs_group=found.fs_group, managed_by=found.managed_by,
        cluster_domain=_own_domain() if found.cluster_domain is None else found.cluster_domain,
    )  # fmt: skip
    return Options(
        namespaces=tuple(found.namespace), config=config, root_key=found.root_key,
        root_key_secret=(found.own_namespace or "", found.root_key_secret or ""),
        candidate=election.candidate(found.own_namespace, found.lease, found.identity, timing),
        workers=found.workers, resync_s=found.resync_seconds, metrics_port=found.metrics_port,
        log_format=found.log_format,
    )  # fmt: skip


def _own_domain() -> str:
    """The cluster's domain as the operator's own resolv.conf has it."""
    try:
        return cluster_domain(RESOLV_CONF.read_text())
    except OSError:
        return ""


def _seconds(text: str) -> float:
    """Raises ArgumentTypeError for what is no time."""
    found = float(text)
    if not 1.0 <= found <= 86_400.0:
        raise argparse.ArgumentTypeError(f"{text} is no time from 1 second to a day")
    return found


def _peers(text: str) -> tuple[dict[str, Any], ...]:
    """Raises ArgumentTypeError for what is no list of peers: an empty one would mean everybody."""
    try:
        found = json.loads(text)
    except ValueError as exc:
        raise argparse.ArgumentTypeError(f"a list of peers is needed as JSON, found {text}: {exc}") from exc
    known = {"podSelector", "namespaceSelector", "ipBlock"}
    if not isinstance(found, list) or not all(isinstance(p, dict) and p and p.keys() <= known for p in found):
        raise argparse.ArgumentTypeError(f"a list of peers with {sorted(known)} is needed, found {text}")
    return tuple(found)


def _group(text: str) -> int | None:
    """Raises ArgumentTypeError for what is neither a number nor "none"."""
    if text == "none":
        return None
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text} is neither a group's number nor none")
    return int(text)


def _own_pod(parser: argparse.ArgumentParser, namespace: str | None, labels: Sequence[str]) -> OwnPod | None:
    """Ends the process where only one of the two is there: without labels, a whole namespace would be let in."""
    if bool(namespace) != bool(labels) or not all("=" in label for label in labels):
        parser.error("--own-namespace NAME and --own-label NAME=VALUE are needed together, or neither")
    pairs = dict(label.split("=", 1) for label in labels)
    return OwnPod(namespace=namespace, labels=pairs) if namespace else None


def read_root(path: Path) -> bytes:
    """Raises NoRootKey."""
    try:
        root = path.read_bytes()
        names.check_root(root)
    except (OSError, ValueError) as exc:
        raise keys.NoRootKey(f"cannot read the root key from {path}: {exc}") from exc
    return root


async def run(options: Options, root: bytes | None) -> None:
    """Runs until a signal comes. Raises CancelledError if that is before the first list is done, NoRootKey."""
    metrics = Metrics()
    requests = Requests(Cache(), watch.list_paths(options.namespaces))
    health = Health(watches=requests.open, expected=requests.expected)
    client = await Client.connect(metrics)
    if (this := asyncio.current_task()) is not None:
        for number in (signal.SIGTERM, signal.SIGINT):  # kopf sets its own later
            asyncio.get_running_loop().add_signal_handler(number, this.cancel)
    try:
        async with serve(options.metrics_port, metrics, health):
            if root is None:
                root = await keys.root_key(client, *options.root_key_secret)
            async with _turn(options.candidate, client, metrics, health):
                setup = replace(options.config, root_key=root)
                await reconcile_all(options, setup, client, metrics, health, requests)
    finally:
        await client.close()


@contextlib.asynccontextmanager
async def _turn(
    candidate: election.Candidate | None, client: Client, metrics: Metrics, health: Health
) -> AsyncIterator[None]:
    """Waits until this operator is the one that works."""
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
    client: Client,
    metrics: Metrics,
    health: Health,
    requests: Requests,
) -> None:
    """Does the operator's work until a signal comes."""
    cache = requests.cache
    poller = SupervisorPoller(cache, setup.root_key, lambda key: work.add(key, CHILD_S))
    reconciler = Reconciler(client, cache, setup, poller, metrics=metrics)
    work = Workers(reconciler.reconcile, workers=options.workers, metrics=metrics, resync_s=options.resync_s)
    lookup = reconciler.lookup = EventLookup(client, work.add)
    health.remark = reconciler.cannot_write
    metrics.watches.set_function(requests.open)
    metrics.describe(version=setup.version, kopf=importlib.metadata.version("kopf"), phases=cache.phases)

    def changed(key: JobKey, itself: bool) -> None:
        work.add(key, 0.0 if itself else CHILD_S, first=itself)
        poller.wake(key)

    def received(kind: str, uid: str) -> None:
        metrics.received(kind)
        requests.reported(kind, uid)

    def gone(key: JobKey) -> None:
        work.forget(key)
        reconciler.forget(key)

    await watch.prime(client, cache, work.add, options.namespaces)
    health.listed = True
    gc.collect()
    gc.freeze()  # a collection that looks at the objects of 1,000 jobs stops the loop for 0.2 s
    settings = kopf.OperatorSettings()
    watch.configure(settings)
    watching = kopf.operator(
        registry=watch.registry(cache, changed, gone, received, requests), settings=settings, standalone=True,
        clusterwide=not options.namespaces, namespaces=options.namespaces,
    )  # fmt: skip
    health.tasks += [
        asyncio.create_task(work.run(), name="work"),
        asyncio.create_task(poller.run(), name="supervisors"),
        asyncio.create_task(lookup.run(), name="event lookups"),
        asyncio.create_task(pulse(metrics), name="pulse"),
        asyncio.create_task(
            watch.keep_sweeping(client, cache, work.add, options.namespaces, requests), name="sweeps"
        ),
    ]
    await asyncio.sleep(0)  # tasks that kopf finds are not its own: it waits for others at its end
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
        asyncio.run(run(options, None if options.root_key is None else read_root(options.root_key)))
    except asyncio.CancelledError:
        log.info("stopped before the first list was complete")
    except keys.NoRootKey as exc:
        log.error("%s", exc)
        return 2
    except PortTaken as exc:
        log.error("%s; choose another port with --metrics-port", exc)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
