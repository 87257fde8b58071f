"""The command line of the operator's process."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from dataloaderjob.core.generations import PERIOD
from dataloaderjob_operator import election, names
from dataloaderjob_operator.monitoring import LogFormat
from dataloaderjob_operator.objects import OperatorConfig, OwnPod
from dataloaderjob_operator.objects.settings import USER, cluster_domain
from dataloaderjob_operator.workqueue import RESYNC_S

LEAST_TLS_S = 120.0
"""Minimum number of seconds between two generations of certificates. A kubelet needs up to 90 s to deliver a generation
to its pods."""

METRICS_PORT = 9440
RESOLV_CONF = Path("/etc/resolv.conf")


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Command-line options."""

    namespaces: tuple[str, ...]
    """Namespaces to watch; if empty, all namespaces of the cluster."""
    config: OperatorConfig
    """Settings for all jobs, without the root key, which is read later."""
    root_key: Path | None = None
    """File with the root key; None if `root_key_secret` holds it."""
    previous_root: Path | None = None
    """File with the previous root key."""
    root_key_secret: tuple[str, str] = ("", "")
    """Namespace and name of the Secret with the root key."""
    candidate: election.Candidate | None = None
    """The operator as a candidate for the Lease; None if it runs without a Lease."""
    workers: int
    resync_s: float
    """Seconds between reconciles of an idle job."""
    metrics_port: int
    """Port for metrics and probes; 0 for neither."""
    log_format: LogFormat


def make_parser() -> argparse.ArgumentParser:
    """Builds the command-line parser, from which docs/reference/cli.md is generated."""
    parser = argparse.ArgumentParser(prog="dataloaderjob_operator", description="Reconciles DataLoaderJobs.")
    _add_own_pod(parser)
    _add_root_key(parser)
    _add_lease(parser)
    _add_jobs(parser)
    _add_process(parser)
    return parser


def _add_own_pod(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--namespace", action="append", default=[], help="watch only this namespace; may be repeated"
    )
    parser.add_argument(
        "--own-namespace",
        help=(
            "namespace of the operator's pod; jobs' NetworkPolicies allow that pod to connect to supervisors"
        ),
    )
    parser.add_argument(
        "--own-label",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="label of the operator's pod, for the selectors of jobs' NetworkPolicies; may be repeated",
    )


def _add_root_key(parser: argparse.ArgumentParser) -> None:
    root = parser.add_mutually_exclusive_group(required=True)
    root.add_argument(
        "--root-key-secret",
        metavar="NAME",
        help=(
            "Secret in --own-namespace with the key from which jobs' keys are derived; the operator creates the "
            "Secret if it does not exist; either this or --root-key is required"
        ),
    )
    root.add_argument(
        "--root-key",
        type=Path,
        help=(
            f"file with the key from which jobs' keys are derived, at least {names.ROOT_NBYTES} bytes; replaces "
            "--root-key-secret"
        ),
    )
    parser.add_argument(
        "--previous-root-key",
        type=Path,
        help=(
            "file with the key that --root-key had before, for jobs that started with it; a Secret holds it in the "
            "field `previous`"
        ),
    )


def _add_lease(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--lease",
        metavar="NAME",
        help="Lease in --own-namespace; if several operators share it, only the holder is active",
    )
    parser.add_argument(
        "--identity",
        metavar="NAME",
        help="this operator's name in the Lease, such as its pod's name (default: a unique name)",
    )
    default = election.Timing()
    parser.add_argument(
        "--lease-seconds", type=int, default=default.lease_s,
        help="time without a renewal after which another operator may take the Lease",
    )  # fmt: skip
    parser.add_argument(
        "--lease-renew-seconds", type=float, default=default.renew_s,
        help="time without a renewal after which this operator stops writing until it renews the Lease",
    )  # fmt: skip
    parser.add_argument(
        "--lease-retry-seconds", type=float, default=default.retry_s,
        help="interval between attempts to acquire or renew the Lease",
    )  # fmt: skip


def _add_jobs(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--sidecar-image", required=True, help="sidecar image for manifests that do not name one"
    )
    parser.add_argument(
        "--sidecar-pull-secret",
        action="append",
        default=[],
        metavar="NAME",
        help="pull secret for the sidecar image in each job's namespace; may be repeated",
    )
    parser.add_argument(
        "--metrics-from",
        type=_peers,
        default=(),
        metavar="JSON",
        help="JSON list of NetworkPolicy peers that may scrape the metrics of jobs' sidecars (default: none)",
    )
    parser.add_argument(
        "--fs-group",
        type=_group,
        default=USER,
        metavar="NUMBER",
        help=(
            'fsGroup for pods whose template does not set one; "none" leaves it to the namespace, as on '
            "OpenShift"
        ),
    )
    parser.add_argument(
        "--managed-by", metavar="NAME", default="",
        help=(
            "run only jobs with this spec.managedBy, such as example.com/canary, alongside another "
            "operator (default: jobs without one)"
        ),
    )  # fmt: skip
    parser.add_argument(
        "--cluster-domain",
        help="DNS domain of the cluster, such as cluster.local (default: the one in /etc/resolv.conf)",
    )


def _add_process(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--workers", type=int, default=32, help="number of jobs to reconcile concurrently")
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
        help="port of /metrics, /healthz and /readyz; 0 disables them",
    )
    parser.add_argument(
        "--tls-days", type=_days, default=PERIOD, metavar="DAYS",
        help="days after which the certificates of jobs with spec.loader.tls are replaced, at most seven times; each "
        "certificate is valid for twice as long (default: 90)",
    )  # fmt: skip
    parser.add_argument(
        "--log-format", type=LogFormat, choices=list(LogFormat), default=LogFormat.TEXT,
        help="format of log lines",
    )  # fmt: skip


def parse(arguments: Sequence[str] | None = None) -> Options:
    parser = make_parser()
    found = parser.parse_args(arguments)
    if (found.root_key_secret or found.lease) and not found.own_namespace:
        parser.error(
            "--root-key-secret and --lease require --own-namespace NAME, the namespace of the Secret and "
            "the Lease"
        )
    try:
        timing = election.Timing(found.lease_seconds, found.lease_renew_seconds, found.lease_retry_seconds)
    except ValueError as exc:
        parser.error(str(exc))
    config = OperatorConfig(
        version=importlib.metadata.version("dataloaderjob"), sidecar_image=found.sidecar_image, root_key=b"",
        operator=_own_pod(parser, found.own_namespace, found.own_label),
        sidecar_pull_secrets=tuple(found.sidecar_pull_secret), metrics_from=found.metrics_from,
        tls_period=found.tls_days, fs_group=found.fs_group, managed_by=found.managed_by,
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
    """Returns the cluster's domain from the operator's own resolv.conf; empty if there is none."""
    try:
        return cluster_domain(RESOLV_CONF.read_text())
    except OSError:
        return ""


def _seconds(text: str) -> float:
    """Parses an interval. Raises ArgumentTypeError if it is not between 1 second and a day."""
    found = float(text)
    if not 1.0 <= found <= 86_400.0:
        raise argparse.ArgumentTypeError(f"expected 1 to 86400 seconds (a day), got {text}")
    return found


def _days(text: str) -> timedelta:
    """Parses a number of days. Raises ArgumentTypeError if it is not between two minutes and ten years."""
    found = timedelta(days=float(text))
    if not timedelta(seconds=LEAST_TLS_S) <= found <= timedelta(days=3650):
        raise argparse.ArgumentTypeError(f"expected 0.0014 (two minutes) to 3650 days, got {text}")
    return found


def _peers(text: str) -> tuple[dict[str, Any], ...]:
    """Parses a list of peers. Raises ArgumentTypeError if the text is not such a list, or contains an empty peer, which
    would admit everybody."""
    try:
        found = json.loads(text)
    except ValueError as exc:
        raise argparse.ArgumentTypeError(f"expected a JSON list of peers, got {text}: {exc}") from exc
    known = {"podSelector", "namespaceSelector", "ipBlock"}
    if not isinstance(found, list) or not all(isinstance(p, dict) and p and p.keys() <= known for p in found):
        raise argparse.ArgumentTypeError(
            f"expected a list of peers with only the fields {sorted(known)}, got {text}"
        )
    return tuple(found)


def _group(text: str) -> int | None:
    """Parses a group. Raises ArgumentTypeError if the text is neither a number nor "none"."""
    if text == "none":
        return None
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f'expected a group ID or "none", got {text}')
    return int(text)


def _own_pod(parser: argparse.ArgumentParser, namespace: str | None, labels: Sequence[str]) -> OwnPod | None:
    """Returns the operator's own pod; None if neither a namespace nor labels are given. Exits with an error if only one
    of the two is given: without labels, policies would admit a whole namespace."""
    if bool(namespace) != bool(labels) or not all("=" in label for label in labels):
        parser.error("--own-namespace NAME and --own-label NAME=VALUE must be given together")
    pairs = dict(label.split("=", 1) for label in labels)
    return OwnPod(namespace=namespace, labels=pairs) if namespace else None
