"""The election: of several operators one works, the one that holds a Lease of their namespace.

The client library has the protocol: who holds the Lease, and for how long without a renewal. Here is what it leaves
open: a request that hangs or fails is an attempt that failed, and who ends gives it back, so that the next one need not
wait. Who cannot renew the Lease in time writes nothing until it has it again, and goes on if nobody had it meanwhile.
Who finds it another's ends at once. So a control plane that stalls ends no operator that works alone.
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
"""Exit code of an operator that lost its Lease; its container is started again, and stands by."""


@dataclass(frozen=True, slots=True)
class Timing:
    """Times of the election in seconds, by default those of Kubernetes' own components (client-go)."""

    lease_s: int = 15
    """Time without a renewal after which another operator takes the Lease: whole seconds, as the Lease has them."""
    renew_s: float = 10.0
    """An operator that could not renew it for so long stops to write: before another one begins."""
    retry_s: float = 2.0
    """Interval between two attempts. An operator that was killed has a successor after lease_s and this at most."""

    def __post_init__(self) -> None:
        """Raises ValueError for times with which two operators might work, or none."""
        if not self.lease_s > self.renew_s > 2 * self.retry_s >= 2:
            raise ValueError(
                f"a lease of more seconds than the deadline of its renewal is needed, and that of more than twice the "
                f"retry, which is 1 or more, found lease {self.lease_s}, renew {self.renew_s:g}, retry {self.retry_s:g}"
            )


@dataclass(frozen=True, slots=True)
class Candidate:
    """An operator, and the Lease that it wants."""

    namespace: str
    lease: str
    identity: str
    """The pod's name: a container that is started anew goes on with the Lease of the last."""
    timing: Timing = Timing()


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


def candidate(
    namespace: str | None, lease: str | None, identity: str | None, timing: Timing
) -> Candidate | None:
    """The candidate that options of the command line describe, None without a Lease."""
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
    """Waits for the Lease and renews it as long as the context lasts. `leads` is told whether it is this operator's, as
    far as that is known. `lost` is called when it is another's: by default the process ends there and then, since each
    further write may be one too many."""
    logging.getLogger(LeaseLock.__module__).setLevel(logging.CRITICAL)  # a traceback for each lost race
    lock, timing = Lock(candidate.lease, candidate.namespace, candidate.identity, api), candidate.timing
    config = Config(lock, timing.lease_s, timing.renew_s, timing.retry_s, _nothing, _nothing)
    election = LeaderElection(config)
    log.info("%s waits for the Lease %s/%s", candidate.identity, candidate.namespace, candidate.lease)
    while not await _attempt(election, timing):
        await asyncio.sleep(timing.retry_s)
    log.info("%s has the Lease and works", candidate.identity)
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
    """The time in which an operator has the Lease."""

    election: LeaderElection
    candidate: Candidate
    gate: WriteGate
    leads: Callable[[bool], None]

    async def keep(self, lost: Callable[[], None]) -> None:
        """Renews the Lease until it is another's."""
        began, timing = self._acquired_at(), self.candidate.timing
        renewed_at: float | None = asyncio.get_running_loop().time() - timing.retry_s
        try:
            while renewed_at is not None and self._acquired_at() == began:
                await asyncio.sleep(timing.retry_s)
                renewed_at = await self._renewed(renewed_at + timing.renew_s) or await self._regained()
            holder = _holder(self.election)
            whose = (
                "has been another's, or was made anew"
                if renewed_at is not None
                else f"is held by {holder} now"
            )
            log.error("the Lease %s %s; this operator ends", self.candidate.lease, whose)
        except Exception:
            log.exception("failed at renewing the Lease %s; this operator ends", self.candidate.lease)
        lost()

    async def _renewed(self, deadline: float) -> float | None:
        """Renews it once until `deadline`, of the loop's clock. Returns when the attempt that did began; None if none
        did."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout_at(deadline):
                return await self._got()
        return None

    async def _got(self) -> float | None:
        """Tries until the Lease is this operator's. Returns when that attempt began; None once it is another's."""
        timing = self.candidate.timing
        while True:
            began = asyncio.get_running_loop().time()
            if await _attempt(self.election, timing):
                return began
            if self._is_anothers():
                return None
            await asyncio.sleep(timing.retry_s)

    async def _regained(self) -> float | None:
        """Waits for the Lease without writing anything. Returns when the attempt that got it began; None once it is
        another's."""
        if self._is_anothers():
            return None
        log.warning(
            "could not renew the Lease %s for %g s; nothing is written until it is renewed",
            self.candidate.lease, self.candidate.timing.renew_s,
        )  # fmt: skip
        self.leads(False)
        self.gate.shut()
        before = self._acquired_at()
        began = await self._got()
        if began is not None and self._acquired_at() == before:  # else somebody had it, and gave it back
            log.info("the Lease %s is renewed; this operator works on", self.candidate.lease)
            self.gate.open()
            self.leads(True)
        return began

    def _is_anothers(self) -> bool:
        return _holder(self.election) not in (None, self.candidate.identity)

    def _acquired_at(self) -> str | None:
        """When this term began, as the Lease has it: a renewal leaves it as it is."""
        record = self.election.observed_record
        return None if record is None else str(record.acquire_time)


async def _attempt(election: LeaderElection, timing: Timing) -> bool:
    """Tries once to get or renew the Lease. Returns whether it is ours."""
    try:
        async with asyncio.timeout(timing.renew_s / 2):
            return bool(await election.try_acquire_or_renew())
    except (ApiException, aiohttp.ClientError, TimeoutError, OSError) as exc:
        log.warning("cannot get at the Lease %s: %r", election.election_config.lock.name, exc)
        return False


def _holder(election: LeaderElection) -> str | None:
    record = election.observed_record
    return None if record is None else record.holder_identity


async def _give_back(lock: LeaseLock, timing: Timing) -> None:
    """Lets the next operator have the Lease at once; where that fails, it waits until the Lease has run out."""
    with contextlib.suppress(ApiException, aiohttp.ClientError, TimeoutError, OSError):
        async with asyncio.timeout(timing.retry_s):
            await lock.get(lock.name, lock.namespace)
            lease = lock.lease_reference
            if lease is not None and lease.spec is not None and lease.spec.holder_identity == lock.identity:
                lease.spec.holder_identity = None
                await lock.api_instance.replace_namespaced_lease(lock.name, lock.namespace, lease)


async def _nothing() -> None:
    """Stands for what the library is to call when it leads, were it to run by itself."""
