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
from dataloaderjob_operator.autoscaler import Autoscalers
from dataloaderjob_operator.client import ApiClient
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
from dataloaderjob_operator.observe.attached_pods import AttachedPods
from dataloaderjob_operator.observe.cache import Cache, JobKey
from dataloaderjob_operator.observe.followed_objects import FollowedObjects
from dataloaderjob_operator.observe.refused_pods import RefusedPods
from dataloaderjob_operator.observe.requests import Requests
from dataloaderjob_operator.observe.supervisor_poller import SupervisorPoller
from dataloaderjob_operator.observe.watch import EventLookup
from dataloaderjob_operator.reconcile import Reconciler
from dataloaderjob_operator.workqueue import RESYNC_S, Workers

log = logging.getLogger("dataloaderjob_operator")

METRICS_PORT = 9440
RESOLV_CONF = Path("/etc/resolv.conf")
CHILD_S = 0.3
"""Delay in seconds between a change to a child or to the supervisor's report and the reconcile. Further changes within
the delay are batched."""
MAX_CALLS = 25_000
"""Recursion limit. A job may have 10,000 levels, and copying it takes two calls for each. A job that kopf cannot read
or copy would end the watch of all jobs. JSON of 60,000 levels fits a thread's stack."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Command-line options."""

    namespaces: tuple[str, ...]
    """Namespaces to watch; empty: all namespaces of the cluster."""
    config: OperatorConfig
    """Settings for jobs, still without a root key."""
    root_key: Path | None = None
    """File with the root key; None: `root_key_secret` holds it."""
    previous_root: Path | None = None
    """File with the root key before that one."""
    root_key_secret: tuple[str, str] = ("", "")
    """Namespace and name of the Secret with the root key."""
    candidate: election.Candidate | None = None
    """None: the operator works without a Lease."""
    workers: int
    resync_s: float
    """Interval between reconciles of an idle job."""
    metrics_port: int
    """0: the operator serves neither metrics nor probes."""
    log_format: LogFormat


def make_parser() -> argparse.ArgumentParser:
    """Makes the command-line parser, from which docs/reference/cli.md is generated."""
    parser = argparse.ArgumentParser(prog="dataloaderjob_operator", description="Reconciles DataLoaderJobs.")
    parser.add_argument(
        "--namespace", action="append", default=[], help="watch only this namespace; may be repeated"
    )
    parser.add_argument(
        "--own-namespace",
        help="namespace of the operator's pod; jobs' NetworkPolicies let that pod connect to supervisors",
    )
    parser.add_argument(
        "--own-label",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="label of the operator's pod, for the same NetworkPolicies; may be repeated",
    )
    root = parser.add_mutually_exclusive_group(required=True)
    root.add_argument(
        "--root-key-secret",
        metavar="NAME",
        help="Secret in --own-namespace with the key from which jobs' keys are derived, created if it is missing; "
        "this or --root-key is required",
    )
    root.add_argument(
        "--root-key",
        type=Path,
        help=f"file with that key instead of a Secret, at least {names.ROOT_NBYTES} bytes",
    )
    parser.add_argument(
        "--previous-root-key",
        type=Path,
        help="file with the key before the one in --root-key, for jobs that started with it; a Secret has it in its "
        "field `previous`",
    )
    parser.add_argument(
        "--lease",
        metavar="NAME",
        help="Lease in --own-namespace; of several operators, only the one that holds it works",
    )
    parser.add_argument(
        "--identity",
        metavar="NAME",
        help="name of this operator in the Lease, such as its pod's name (default: a unique name)",
    )
    default = election.Timing()
    parser.add_argument(
        "--lease-seconds", type=int, default=default.lease_s,
        help="time without a renewal after which another operator takes the Lease",
    )  # fmt: skip
    parser.add_argument(
        "--lease-renew-seconds", type=float, default=default.renew_s,
        help="time after which an operator that cannot renew the Lease writes nothing until it can",
    )  # fmt: skip
    parser.add_argument(
        "--lease-retry-seconds", type=float, default=default.retry_s,
        help="interval between attempts to acquire or renew the Lease",
    )  # fmt: skip
    parser.add_argument("--sidecar-image", required=True, help="sidecar image for manifests that name none")
    parser.add_argument(
        "--sidecar-pull-secret",
        action="append",
        default=[],
        metavar="NAME",
        help="pull secret for that image in the namespace of each job; may be repeated",
    )
    parser.add_argument(
        "--metrics-from",
        type=_peers,
        default=(),
        metavar="JSON",
        help="list of NetworkPolicy peers that may collect the metrics of jobs' sidecars (default: nobody)",
    )
    parser.add_argument(
        "--fs-group",
        type=_group,
        default=USER,
        metavar="NUMBER",
        help="fsGroup of pods whose template sets none; none leaves it to the namespace, as on OpenShift",
    )
    parser.add_argument(
        "--managed-by", metavar="NAME", default="",
        help="run only jobs with this spec.managedBy, such as example.com/canary, next to another operator "
        "(default: jobs that name none)",
    )  # fmt: skip
    parser.add_argument(
        "--cluster-domain",
        help="DNS domain of the cluster, such as cluster.local (default: the one in /etc/resolv.conf)",
    )
    parser.add_argument(
        "--workers", type=int, default=32, help="number of jobs to reconcile at the same time"
    )
    parser.add_argument(
        "--resync-seconds",
        type=_seconds,
        default=RESYNC_S,
        help="interval between reconciles of an idle job",
    )
    parser.add_argument(
        "--metrics-port",
        type=int,
        default=METRICS_PORT,
        help="port of /metrics, /healthz and /readyz; 0 serves none of them",
    )
    parser.add_argument(
        "--log-format", type=LogFormat, choices=list(LogFormat), default=LogFormat.TEXT,
        help="format of log lines",
    )  # fmt: skip
    return parser


def parse(arguments: Sequence[str] | None = None) -> Options:
    parser = make_parser()
    found = parser.parse_args(arguments)
    if (found.root_key_secret or found.lease) and not found.own_namespace:
        parser.error(
            "--root-key-secret and --lease require --own-namespace NAME, which holds Secret and Lease"
        )
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
        previous_root=found.previous_root_key,
        root_key_secret=(found.own_namespace or "", found.root_key_secret or ""),
        candidate=election.candidate(found.own_namespace, found.lease, found.identity, timing),
        workers=found.workers, resync_s=found.resync_seconds, metrics_port=found.metrics_port,
        log_format=found.log_format,
    )  # fmt: skip


def _own_domain() -> str:
    """The cluster's domain from the operator's own resolv.conf; empty if there is none."""
    try:
        return cluster_domain(RESOLV_CONF.read_text())
    except OSError:
        return ""


def _seconds(text: str) -> float:
    """Parses an interval. Raises ArgumentTypeError if it is not from 1 second to a day."""
    found = float(text)
    if not 1.0 <= found <= 86_400.0:
        raise argparse.ArgumentTypeError(f"{text} is not between 1 second and a day (86400)")
    return found


def _peers(text: str) -> tuple[dict[str, Any], ...]:
    """Parses a list of peers. Raises ArgumentTypeError if the text is not such a list or contains an empty peer, which
    would admit everybody."""
    try:
        found = json.loads(text)
    except ValueError as exc:
        raise argparse.ArgumentTypeError(f"expected a JSON list of peers, found {text}: {exc}") from exc
    known = {"podSelector", "namespaceSelector", "ipBlock"}
    if not isinstance(found, list) or not all(isinstance(p, dict) and p and p.keys() <= known for p in found):
        raise argparse.ArgumentTypeError(f"expected a list of peers with {sorted(known)}, found {text}")
    return tuple(found)


def _group(text: str) -> int | None:
    """Parses a group. Raises ArgumentTypeError if the text is neither a number nor "none"."""
    if text == "none":
        return None
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text} is neither a group ID nor none")
    return int(text)


def _own_pod(parser: argparse.ArgumentParser, namespace: str | None, labels: Sequence[str]) -> OwnPod | None:
    """Exits with an error if only one of the two is given: without labels, policies would admit a whole namespace."""
    if bool(namespace) != bool(labels) or not all("=" in label for label in labels):
        parser.error("--own-namespace NAME and --own-label NAME=VALUE must be given together")
    pairs = dict(label.split("=", 1) for label in labels)
    return OwnPod(namespace=namespace, labels=pairs) if namespace else None


def read_root(path: Path) -> bytes:
    """Reads the root key from a file. Raises NoRootKey."""
    try:
        root = path.read_bytes()
        names.check_root(root)
    except (OSError, ValueError) as exc:
        raise keys.NoRootKey(f"cannot read the root key from {path}: {exc}") from exc
    return root


def read_roots(options: Options) -> keys.Roots | None:
    """Reads the root keys from files; None: a Secret holds them. Raises NoRootKey."""
    if options.root_key is None:
        return None
    previous = None if options.previous_root is None else read_root(options.previous_root)
    return keys.Roots(read_root(options.root_key), previous)


async def run(options: Options, roots: keys.Roots | None) -> None:
    """Runs until a signal arrives. Raises CancelledError if the signal arrives before the initial list is complete.
    Raises NoRootKey."""
    metrics = Metrics()
    requests = Requests(Cache(), watch.list_paths(options.namespaces))
    health = Health(watches=requests.open, expected=requests.expected)
    client = await ApiClient.connect(metrics)
    if (this := asyncio.current_task()) is not None:
        for number in (signal.SIGTERM, signal.SIGINT):  # kopf sets its own later
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


@contextlib.asynccontextmanager
async def _turn(
    candidate: election.Candidate | None, client: ApiClient, metrics: Metrics, health: Health
) -> AsyncIterator[None]:
    """Waits until it is this operator's turn to work."""
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
    health: Health,
    requests: Requests,
) -> None:
    """Does the operator's work until a signal arrives."""
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
    gc.freeze()  # a collection that visits the objects of 1,000 jobs blocks the loop for 0.2 s
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
        asyncio.create_task(attached.run(), name="attached pods"),
        asyncio.create_task(followed.run(), name="followed objects"),
        asyncio.create_task(refused.run(), name="refused pods"),
        asyncio.create_task(scalers.run(), name="autoscalers"),
        asyncio.create_task(pulse(metrics), name="pulse"),
        asyncio.create_task(
            watch.keep_sweeping(client, cache, work.add, options.namespaces, requests), name="sweeps"
        ),
    ]
    await asyncio.sleep(0)  # kopf ignores tasks that run before it starts; it waits for others when it ends
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
        log.info("stopped before the initial list was complete")
    except keys.NoRootKey as exc:
        log.error("%s", exc)
        return 2
    except PortTaken as exc:
        log.error("%s; choose another port with --metrics-port", exc)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
