"""The election: of several operators one works, the one that holds a Lease of their namespace.

The client library has the protocol: who holds the Lease, and for how long without a renewal. Here is what it leaves
open: a request that hangs or fails is an attempt that failed, who loses the Lease ends at once, and who ends gives it
back, so that the next one need not wait.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import socket
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

import aiohttp
from kubernetes.aio.client import ApiClient, ApiException, V1Lease, V1ObjectMeta
from kubernetes.aio.leaderelection.electionconfig import Config
from kubernetes.aio.leaderelection.leaderelection import LeaderElection
from kubernetes.aio.leaderelection.leaderelectionrecord import LeaderElectionRecord
from kubernetes.aio.leaderelection.resourcelock.leaselock import LeaseLock

log = logging.getLogger(__name__)

LEASE_S = 9
"""Time without a renewal after which another operator takes the Lease: whole seconds, as the Lease has them."""
RENEW_S = 6.0
"""An operator that could not renew it for so long ends: before another one begins."""
RETRY_S = 2.0
"""Interval between two attempts. An operator that was killed has a successor after LEASE_S and this, 11 s, at most."""
LOST = 3
"""Exit code of an operator that lost its Lease; its container is started again, and stands by."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """An operator, and the Lease that it wants."""

    namespace: str
    lease: str
    identity: str
    """The pod's name: a container that is started anew goes on with the Lease of the last."""


class Lock(LeaseLock):
    """The library's, but for one request that its own models refuse in version 37."""

    async def create(self, name: str, namespace: str, election_record: LeaderElectionRecord) -> bool:
        lease = V1Lease(metadata=V1ObjectMeta(name=name), spec=self.update_lease(election_record))
        try:
            await self.api_instance.create_namespaced_lease(namespace, lease)
        except ApiException as exc:
            log.warning("cannot create the Lease %s/%s: %s", namespace, name, exc.reason)
            return False
        return True


def candidate(namespace: str | None, lease: str | None, identity: str | None) -> Candidate | None:
    """The candidate that options of the command line describe, None without a Lease."""
    if not lease or not namespace:
        return None
    return Candidate(namespace, lease, identity or f"{socket.gethostname()}_{secrets.token_hex(4)}")


@contextlib.asynccontextmanager
async def leading(
    api: ApiClient, candidate: Candidate, lost: Callable[[], None] = lambda: os._exit(LOST)
) -> AsyncIterator[None]:
    """Waits for the Lease and renews it as long as the context lasts. `lost` is called when it is another's: by default
    the process ends there and then, since each further write may be one too many."""
    logging.getLogger(LeaseLock.__module__).setLevel(logging.CRITICAL)  # a traceback for each lost race
    lock = Lock(candidate.lease, candidate.namespace, candidate.identity, api)
    election = LeaderElection(Config(lock, LEASE_S, RENEW_S, RETRY_S, _nothing, _nothing))
    log.info("%s waits for the Lease %s/%s", candidate.identity, candidate.namespace, candidate.lease)
    while not await _attempt(election):
        await asyncio.sleep(RETRY_S)
    log.info("%s has the Lease and works", candidate.identity)
    renewing = asyncio.create_task(_renew(election, candidate, lost), name="lease")
    try:
        yield
    finally:
        renewing.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await renewing
        await _give_back(lock)


async def _renew(election: LeaderElection, candidate: Candidate, lost: Callable[[], None]) -> None:
    """Renews the Lease until it is lost."""
    try:
        while await _renewed(election, candidate):
            await asyncio.sleep(RETRY_S)
        log.error("the Lease %s is held by %s now; this operator ends", candidate.lease, _holder(election))
    except TimeoutError:
        log.error("could not renew the Lease %s for %.0f s; this operator ends", candidate.lease, RENEW_S)
    except Exception:
        log.exception("failed at renewing the Lease %s; this operator ends", candidate.lease)
    lost()


async def _renewed(election: LeaderElection, candidate: Candidate) -> bool:
    """Renews it once. Returns False if it is another's. Raises TimeoutError."""
    async with asyncio.timeout(RENEW_S):
        while not await _attempt(election):
            if _holder(election) != candidate.identity:
                return False
            await asyncio.sleep(RETRY_S)
    return True


async def _attempt(election: LeaderElection) -> bool:
    """Tries once to get or renew the Lease. Returns whether it is ours."""
    try:
        async with asyncio.timeout(RENEW_S / 2):
            return bool(await election.try_acquire_or_renew())
    except (ApiException, aiohttp.ClientError, TimeoutError, OSError) as exc:
        log.warning("cannot get at the Lease %s: %r", election.election_config.lock.name, exc)
        return False


def _holder(election: LeaderElection) -> str | None:
    record = election.observed_record
    return None if record is None else record.holder_identity


async def _give_back(lock: LeaseLock) -> None:
    """Lets the next operator have the Lease at once; where that fails, it waits for LEASE_S."""
    with contextlib.suppress(ApiException, aiohttp.ClientError, TimeoutError, OSError):
        async with asyncio.timeout(RETRY_S):
            await lock.get(lock.name, lock.namespace)
            lease = lock.lease_reference
            if lease is not None and lease.spec is not None and lease.spec.holder_identity == lock.identity:
                lease.spec.holder_identity = None
                await lock.api_instance.replace_namespaced_lease(lock.name, lock.namespace, lease)


async def _nothing() -> None:
    """Stands for what the library is to call when it leads, were it to run by itself."""
