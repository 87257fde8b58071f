"""`python -m dataloaderjob_operator.selftest`: applies a job and waits until it is Complete, for `helm test`.

The exit code is 0 if the job completed, 1 if it failed or took too long, and 2 if it could not be run. At the end, the
test prints the job's conditions and deletes the job.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from dataloaderjob.api import KIND, ManifestError, parse_object
from dataloaderjob_operator.client import ApiClient, ApiError
from dataloaderjob_operator.decide.observed import has_condition
from dataloaderjob_operator.kinds import Manifest

EVERY_S = 1.0
GONE_S = 60.0
"""Seconds to wait until the job of an earlier test is deleted."""


def verdict(job: Mapping[str, Any]) -> bool | None:
    """Returns True if the job is Complete, False if it failed, and None while it runs."""
    if has_condition(job, "Complete"):
        return True
    return False if has_condition(job, "Failed") else None


def lines(job: Mapping[str, Any]) -> list[str]:
    """Formats the job's phase and conditions as lines of text."""
    status = job.get("status") or {}
    found = [f"phase {status.get('phase', 'none: no operator has reconciled it')}"]
    for condition in status.get("conditions") or ():
        why = ": ".join(filter(None, (condition.get("reason"), condition.get("message"))))
        found.append(f"  {condition['type']}={condition['status']} {why}")
    return found


async def test(client: ApiClient, job: Manifest, timeout_s: float) -> bool:
    """Applies the job and waits for its end. Returns True if it completed. Raises ApiError, for instance if an earlier
    job of that name is not deleted in time."""
    namespace, name = job["metadata"]["namespace"], job["metadata"]["name"]
    await _delete(client, namespace, name)
    await client.apply(job)
    _say(f"applied DataLoaderJob {namespace}/{name}; it must be Complete within {timeout_s:.0f} s")
    try:
        return await _watch(client, namespace, name, timeout_s)
    finally:
        await client.delete(namespace, (KIND, name))


async def _watch(client: ApiClient, namespace: str, name: str, timeout_s: float) -> bool:
    loop, phase = asyncio.get_running_loop(), ""
    found: Manifest = {}
    deadline = loop.time() + timeout_s
    while loop.time() < deadline:
        found = await _read(client, namespace, name) or found
        if (now := (found.get("status") or {}).get("phase", "")) != phase:
            phase = now
            _say(f"phase {phase}")
        if (done := verdict(found)) is not None:
            break
        await asyncio.sleep(EVERY_S)
    else:
        done = False
        _say(f"not Complete within {timeout_s:.0f} s")
    _say(*lines(found))
    return done


async def _read(client: ApiClient, namespace: str, name: str) -> Manifest | None:
    """Reads the job. Also returns None while the API server does not answer, because the test has its own timeout."""
    try:
        return await client.read(namespace, (KIND, name))
    except ApiError as exc:
        if exc.code and exc.code < 500:
            raise
        return None


async def _delete(client: ApiClient, namespace: str, name: str) -> None:
    """Deletes a job that an earlier test left behind."""
    if await client.read(namespace, (KIND, name)) is None:
        return
    await client.delete(namespace, (KIND, name))
    deadline = asyncio.get_running_loop().time() + GONE_S
    while await client.read(namespace, (KIND, name)) is not None:
        if asyncio.get_running_loop().time() > deadline:
            raise ApiError(0, f"{namespace}/{name} of an earlier test still exists after {GONE_S:.0f} s")
        await asyncio.sleep(EVERY_S)


def _say(*texts: str) -> None:
    for text in texts:
        sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


async def _run(job: Manifest, timeout_s: float) -> bool:
    client = await ApiClient.connect()
    try:
        return await test(client, job, timeout_s)
    finally:
        await client.close()


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="dataloaderjob_operator.selftest",
        description="Applies one test job and waits until it is Complete.",
    )
    parser.add_argument("--job", type=Path, required=True, help="file with the job's manifest")
    parser.add_argument("--timeout-seconds", type=float, default=280.0)
    options = parser.parse_args()
    try:
        job = yaml.safe_load(options.job.read_text())
        if not parse_object(job).metadata.namespace:
            _say("metadata.namespace: found nothing; use the namespace in which to run the test job")
            return 2
        return 0 if asyncio.run(_run(job, options.timeout_seconds)) else 1
    except (OSError, yaml.YAMLError, ManifestError, ApiError) as exc:
        _say(f"cannot run the test job: {exc}")
        return 2


if __name__ == "__main__":
    sys.exit(main())
