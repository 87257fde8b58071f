"""`python -m dataloaderjob_operator`: the operator's process."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import importlib.metadata
import logging
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import kopf

from dataloaderjob.api import KIND
from dataloaderjob_operator import keys, watch
from dataloaderjob_operator.cache import Cache
from dataloaderjob_operator.client import ApiError, Client
from dataloaderjob_operator.names import LABEL_JOB
from dataloaderjob_operator.objects import Setup
from dataloaderjob_operator.reconcile import Reconciler
from dataloaderjob_operator.work import Work

log = logging.getLogger("dataloaderjob_operator")

RETRY_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Of the command line."""

    namespaces: tuple[str, ...]
    """Empty: all of the cluster."""
    root_key: Path
    sidecar_image: str
    workers: int


def parse(arguments: Sequence[str] | None = None) -> Options:
    parser = argparse.ArgumentParser(prog="dataloaderjob_operator", description="Reconciles DataLoaderJobs.")
    parser.add_argument("--namespace", action="append", default=[], help="only this one; may be repeated")
    parser.add_argument(
        "--root-key", type=Path, required=True, help=f"file of {keys.ROOT_NBYTES} bytes at least"
    )
    parser.add_argument("--sidecar-image", required=True, help="where a manifest names none")
    parser.add_argument("--workers", type=int, default=8, help="jobs that are reconciled at a time")
    found = parser.parse_args(arguments)
    return Options(
        namespaces=tuple(found.namespace), root_key=found.root_key, sidecar_image=found.sidecar_image,
        workers=found.workers,
    )  # fmt: skip


def make_setup(options: Options) -> Setup:
    """Raises OSError without the key, ValueError if it is too short."""
    root = options.root_key.read_bytes()
    keys.job_key(root, "try")
    version = importlib.metadata.version("dataloaderjob")
    return Setup(version=version, sidecar_image=options.sidecar_image, root_key=root)


async def run(options: Options, setup: Setup) -> None:
    """Until it is told to stop."""
    cache, client = Cache(), await Client.connect()
    work = Work(Reconciler(client, cache, setup).reconcile, workers=options.workers)
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    try:
        await _prime(client, cache, work, options.namespaces)
        settings = kopf.OperatorSettings()
        watch.configure(settings)
        watching = kopf.operator(
            registry=watch.registry(cache, work.add, work.forget), settings=settings, standalone=True,
            clusterwide=not options.namespaces, namespaces=options.namespaces, stop_flag=stop,
        )  # fmt: skip
        worker = asyncio.create_task(work.run())
        try:
            await watching
        finally:
            worker.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await worker
    finally:
        await client.close()


async def _prime(client: Client, cache: Cache, work: Work, namespaces: Sequence[str]) -> None:
    """Everything that is there, before anything is decided: else what a watch has not told yet would look gone."""
    for kind, paths in watch.list_paths(namespaces).items():
        query = {"limit": str(watch.CHUNK)} | ({} if kind == KIND else {"labelSelector": LABEL_JOB})
        for path in paths:
            while True:
                try:
                    async for thing in client.list(path, **query):
                        if (key := cache.put({**thing, "kind": kind})) is not None and kind == KIND:
                            work.add(key)
                    break
                except ApiError as exc:
                    log.warning("%s cannot be listed, again in %.0f s: %s", path, RETRY_S, exc)
                    await asyncio.sleep(RETRY_S)


def main() -> int:
    logging.basicConfig(format="%(levelname)s %(name)s: %(message)s", level=logging.INFO)
    options = parse()
    try:
        setup = make_setup(options)
    except (OSError, ValueError) as exc:
        log.error("the root key is needed in %s: %s", options.root_key, exc)
        return 2
    asyncio.run(run(options, setup))
    return 0


if __name__ == "__main__":
    sys.exit(main())
