"""`python -m dataloaderjob_operator.injector`: the injector's process."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dataloaderjob.api.job import MANAGED_BY
from dataloaderjob_operator.client import ApiClient
from dataloaderjob_operator.injector.admission import Setup
from dataloaderjob_operator.injector.keeper import CHECK_S, SETTLE_S, CertificateKeeper, Files, keep
from dataloaderjob_operator.injector.server import Injector, probes, serving, webhook
from dataloaderjob_operator.monitoring import LogFormat, PortTaken, configure_logging

log = logging.getLogger("dataloaderjob_operator.injector")

PORT = 9443
METRICS_PORT = 9440
LEAVE_S = 5.0
"""Seconds for which the injector still answers after SIGTERM. The API server may send requests until the Service drops
the terminating pod."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InjectorOptions:
    """Command-line options."""

    setup: Setup
    namespace: str
    secret: str | None
    """Name of the Secret with the certificates that the injector creates. None if another tool maintains certificates
    in `folder`."""
    configuration: str
    names: tuple[str, ...]
    folder: Path | None
    port: int
    metrics_port: int
    check_s: float
    settle_s: float
    log_format: LogFormat


def make_parser() -> argparse.ArgumentParser:
    """Builds the command-line parser, from which docs/reference/cli.md is generated."""
    parser = argparse.ArgumentParser(
        prog="dataloaderjob_operator.injector",
        description="Adds the sidecars of DataLoaderJobs to labeled pods.",
    )
    parser.add_argument(
        "--sidecar-image", required=True, help="sidecar image for manifests that do not name one"
    )
    parser.add_argument(
        "--sidecar-pull-secret", action="append", default=[], metavar="NAME",
        help="pull secret for the sidecar image in each job's namespace; may be repeated",
    )  # fmt: skip
    parser.add_argument(
        "--managed-by", metavar="NAME", default="",
        help="add sidecars only for jobs with this spec.managedBy (default: for jobs without one)",
    )  # fmt: skip
    parser.add_argument(
        "--own-namespace", default="", help="namespace of the injector's pod and of its Secret"
    )
    kept = parser.add_mutually_exclusive_group(required=True)
    kept.add_argument(
        "--certificate-secret", metavar="NAME",
        help=(
            "Secret in --own-namespace for certificates that the injector creates and renews; either this or "
            "--certificate-folder is required"
        ),
    )  # fmt: skip
    kept.add_argument(
        "--certificate-folder", type=Path, metavar="FOLDER",
        help="folder with tls.crt and tls.key, which another tool, such as cert-manager, renews",
    )  # fmt: skip
    parser.add_argument(
        "--webhook-configuration", metavar="NAME", default="",
        help="MutatingWebhookConfiguration whose CA bundle the injector maintains",
    )  # fmt: skip
    parser.add_argument(
        "--dns-name", action="append", default=[], metavar="NAME",
        help="DNS name at which the API server reaches the injector; may be repeated",
    )  # fmt: skip
    parser.add_argument("--port", type=int, default=PORT, help="port of the webhook (TLS)")
    parser.add_argument(
        "--metrics-port", type=int, default=METRICS_PORT, help="port of /metrics, /healthz and /readyz"
    )
    parser.add_argument(
        "--check-seconds", type=float, default=CHECK_S, help="interval between checks of the certificates"
    )
    parser.add_argument(
        "--settle-seconds", type=float, default=SETTLE_S,
        help=(
            "time between adding a new certificate authority to the webhook's configuration and serving a certificate "
            "from it"
        ),
    )  # fmt: skip
    parser.add_argument(
        "--log-format",
        type=LogFormat,
        choices=list(LogFormat),
        default=LogFormat.TEXT,
        help="format of log lines",
    )
    return parser


def parse(arguments: Sequence[str] | None = None) -> InjectorOptions:
    parser = make_parser()
    found = parser.parse_args(arguments)
    if found.certificate_secret and not (
        found.own_namespace and found.webhook_configuration and found.dns_name
    ):
        parser.error("--certificate-secret requires --own-namespace, --webhook-configuration and --dns-name")
    managed_by: str = found.managed_by

    def manages(named: str | None) -> bool:
        return named == managed_by if managed_by else named in (None, MANAGED_BY)

    return InjectorOptions(
        setup=Setup(
            sidecar_image=found.sidecar_image, pull_secrets=tuple(found.sidecar_pull_secret), manages=manages
        ),
        namespace=found.own_namespace, secret=found.certificate_secret, folder=found.certificate_folder,
        configuration=found.webhook_configuration, names=tuple(found.dns_name), port=found.port,
        metrics_port=found.metrics_port, check_s=found.check_seconds, settle_s=found.settle_seconds,
        log_format=found.log_format,
    )  # fmt: skip


async def run(options: InjectorOptions) -> None:
    """Runs until SIGTERM or SIGINT. Raises PortTaken."""
    stopped, served = asyncio.Event(), asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    client = await ApiClient.connect()
    keeper: CertificateKeeper | Files
    if options.folder is not None:
        keeper = Files(options.folder, options.check_s)
    else:
        keeper = CertificateKeeper(
            client, options.namespace, options.secret or "", options.configuration, options.names,
            settle_s=options.settle_s, check_s=options.check_s,
        )  # fmt: skip
    injector = Injector(client, options.setup)
    app = probes(injector.metrics, lambda: served.is_set() and not stopped.is_set(), lambda: keeper.ends)
    async with contextlib.AsyncExitStack() as stack:
        stack.push_async_callback(client.close)
        await stack.enter_async_context(serving(app, options.metrics_port))
        keeping = asyncio.create_task(keep(keeper, served.set))
        stack.callback(keeping.cancel)
        until_stopped = asyncio.create_task(stopped.wait())
        await asyncio.wait(
            {until_stopped, asyncio.create_task(served.wait())}, return_when=asyncio.FIRST_COMPLETED
        )
        if stopped.is_set():
            return
        port = await stack.enter_async_context(serving(webhook(injector), options.port, keeper.context))
        log.info("serving admission reviews on port %d", port)
        await asyncio.wait({until_stopped, keeping}, return_when=asyncio.FIRST_COMPLETED)
        if keeping.done():
            keeping.result()
        await asyncio.sleep(LEAVE_S)


def main() -> int:
    options = parse()
    configure_logging(options.log_format)
    try:
        asyncio.run(run(options))
    except PortTaken as exc:
        log.error("%s; choose another port with --port or --metrics-port", exc)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
