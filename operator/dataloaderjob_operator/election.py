"""Leader election. If several operators run in a namespace, only the one that holds the Lease is active.

The client library implements the protocol: who holds the Lease, and for how long without a renewal. This module adds
the rest. A request that hangs or fails counts as a failed attempt. An operator that exits releases the Lease, so its
successor need not wait. An operator that finds another holder exits immediately.

An operator that cannot renew the Lease in time writes nothing until it holds the Lease again. It then resumes, unless
another operator held the Lease in the meantime. A stalled control plane therefore does not end an operator that works
alone.
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

from dataloaderjob_operator.write_gate import WriteGate

log = logging.getLogger(__name__)

LOST = 3
"""Exit code of an operator that lost its Lease. The kubelet restarts the container, and the operator goes on
standby."""


@dataclass(frozen=True, slots=True)
class Timing:
    """The timing of the election, in seconds. The defaults are those of Kubernetes' own components (client-go)."""

    lease_s: int = 15
    """Time without a renewal after which another operator takes the Lease. The Lease holds it in whole seconds."""
    renew_s: float = 10.0
    """Time without a renewal after which an operator stops writing. It is shorter than `lease_s`, so that the operator
    stops before another one starts."""
    retry_s: float = 2.0
    """Interval between two attempts. A killed operator has a successor after at most `lease_s` plus this interval."""

    def __post_init__(self) -> None:
        """Raises ValueError for a timing with which two operators could work at the same time, or none at all."""
        if not self.lease_s > self.renew_s > 2 * self.retry_s >= 2:
            raise ValueError(
                "the lease must be longer than the renew deadline, the renew deadline must be longer than twice the "
                "retry interval, and the retry interval must be at least 1 s, but the lease is "
                f"{self.lease_s} s, the renew deadline {self.renew_s:g} s, and the retry interval {self.retry_s:g} s"
            )


@dataclass(frozen=True, slots=True)
class Candidate:
    """An operator, and the Lease that it wants to hold."""

    namespace: str
    lease: str
    identity: str
    """Name of the operator in the Lease, usually the pod's name. A restarted container thus keeps the Lease of its
    predecessor."""
    timing: Timing = Timing()


class Lock(LeaseLock):
    """The library's lock, with a replacement for one request that version 37 of the library cannot send."""

    async def create(self, name: str, namespace: str, election_record: LeaderElectionRecord) -> bool:
        lease = V1Lease(metadata=V1ObjectMeta(name=name), spec=self.update_lease(election_record))
        try:
            await self.api_instance.create_namespaced_lease(namespace, lease)
        except ApiException as exc:
            log.warning("cannot create the Lease %s/%s: %s", namespace, name, exc.reason)
            return False
        return True


def candidate(
    namespace: str | None, lease: str | None, identity: str | None, timing: Timing
) -> Candidate | None:
    """Returns the candidate that the command line describes; None if it names no Lease."""
    if not lease or not namespace:
        return None
    return Candidate(namespace, lease, identity or f"{socket.gethostname()}_{secrets.token_hex(4)}", timing)


@contextlib.asynccontextmanager
async def leading(
    api: ApiClient,
    candidate: Candidate,
    gate: WriteGate,
    leads: Callable[[bool], None],
    lost: Callable[[], None] = lambda: os._exit(LOST),
) -> AsyncIterator[None]:
    """Waits for the Lease, and renews it while the context lasts. Calls `leads` with True while this operator holds the
    Lease, and with False while this is uncertain. Calls `lost` when another operator holds the Lease. By default,
    `lost` exits the process immediately, because further writes may conflict with the other operator's."""
    # Otherwise the library logs a traceback for each lost race.
    logging.getLogger(LeaseLock.__module__).setLevel(logging.CRITICAL)
    lock, timing = Lock(candidate.lease, candidate.namespace, candidate.identity, api), candidate.timing
    config = Config(lock, timing.lease_s, timing.renew_s, timing.retry_s, _nothing, _nothing)
    election = LeaderElection(config)
    log.info("%s is waiting for the Lease %s/%s", candidate.identity, candidate.namespace, candidate.lease)
    while not await _attempt(election, timing):
        await asyncio.sleep(timing.retry_s)
    log.info("%s acquired the Lease and starts work", candidate.identity)
    leads(True)
    renewing = asyncio.create_task(_Term(election, candidate, gate, leads).keep(lost), name="lease")
    try:
        yield
    finally:
        renewing.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await renewing
        await _give_back(lock, timing)


@dataclass(frozen=True, slots=True)
class _Term:
    """The time during which this operator holds the Lease."""

    election: LeaderElection
    candidate: Candidate
    gate: WriteGate
    leads: Callable[[bool], None]

    async def keep(self, lost: Callable[[], None]) -> None:
        """Renews the Lease until another operator holds it. Then calls `lost`."""
        began, timing = self._acquired_at(), self.candidate.timing
        renewed_at: float | None = asyncio.get_running_loop().time() - timing.retry_s
        try:
            while renewed_at is not None and self._acquired_at() == began:
                await asyncio.sleep(timing.retry_s)
                renewed_at = await self._renewed(renewed_at + timing.renew_s) or await self._regained()
            holder = _holder(self.election)
            whose = (
                "was held by another operator in the meantime, or was recreated"
                if renewed_at is not None
                else f"is now held by {holder}"
            )
            log.error("the Lease %s %s; this operator exits", self.candidate.lease, whose)
        except Exception:
            log.exception("failed to renew the Lease %s; this operator exits", self.candidate.lease)
        lost()

    async def _renewed(self, deadline: float) -> float | None:
        """Renews the Lease once. `deadline`: the time, by the loop's clock, at which to give up. Returns the start of
        the successful attempt; None if there was none."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout_at(deadline):
                return await self._got()
        return None

    async def _got(self) -> float | None:
        """Tries until this operator holds the Lease. Returns the start of the successful attempt; None once another
        operator holds the Lease."""
        timing = self.candidate.timing
        while True:
            began = asyncio.get_running_loop().time()
            if await _attempt(self.election, timing):
                return began
            if self._is_anothers():
                return None
            await asyncio.sleep(timing.retry_s)

    async def _regained(self) -> float | None:
        """Waits for the Lease, and keeps the gate for writes shut. Returns the start of the successful attempt; None
        once another operator holds the Lease."""
        if self._is_anothers():
            return None
        log.warning(
            "could not renew the Lease %s for %g s; this operator writes nothing until it is renewed",
            self.candidate.lease, self.candidate.timing.renew_s,
        )  # fmt: skip
        self.leads(False)
        self.gate.shut()
        before = self._acquired_at()
        began = await self._got()
        if began is not None and self._acquired_at() == before:  # else another operator held and released it
            log.info("the Lease %s was renewed; this operator resumes its work", self.candidate.lease)
            self.gate.open()
            self.leads(True)
        return began

    def _is_anothers(self) -> bool:
        return _holder(self.election) not in (None, self.candidate.identity)

    def _acquired_at(self) -> str | None:
        """Returns the start of this term, from the Lease. A renewal does not change it."""
        record = self.election.observed_record
        return None if record is None else str(record.acquire_time)


async def _attempt(election: LeaderElection, timing: Timing) -> bool:
    """Tries once to acquire or renew the Lease. Returns True if this operator holds it."""
    try:
        async with asyncio.timeout(timing.renew_s / 2):
            return bool(await election.try_acquire_or_renew())
    except (ApiException, aiohttp.ClientError, TimeoutError, OSError) as exc:
        log.warning("cannot acquire or renew the Lease %s: %r", election.election_config.lock.name, exc)
        return False


def _holder(election: LeaderElection) -> str | None:
    record = election.observed_record
    return None if record is None else record.holder_identity


async def _give_back(lock: LeaseLock, timing: Timing) -> None:
    """Releases the Lease for the next operator. If that fails, the next one waits until the Lease expires."""
    with contextlib.suppress(ApiException, aiohttp.ClientError, TimeoutError, OSError):
        async with asyncio.timeout(timing.retry_s):
            await lock.get(lock.name, lock.namespace)
            lease = lock.lease_reference
            if lease is not None and lease.spec is not None and lease.spec.holder_identity == lock.identity:
                lease.spec.holder_identity = None
                await lock.api_instance.replace_namespaced_lease(lock.name, lock.namespace, lease)


async def _nothing() -> None:
    """Does nothing. The library requires callbacks, but only its own loop would call them."""
