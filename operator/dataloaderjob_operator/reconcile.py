"""One look at a job and what follows from it: status, then deletions, then what is to be there.

Level-triggered and idempotent: whatever it is interrupted by, the next call decides from what is there then. The
status goes first, so that an attempt is counted before its pods are deleted.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime

from dataloaderjob.api import KIND, ManifestError
from dataloaderjob_operator.cache import Cache, JobKey
from dataloaderjob_operator.client import Api, ApiError
from dataloaderjob_operator.decide import Decision, decide
from dataloaderjob_operator.objects import Manifest, Setup
from dataloaderjob_operator.same import covers, needed
from dataloaderjob_operator.seen import Key

log = logging.getLogger(__name__)

FOR_GOOD = frozenset({400, 403, 409, 422})
"""Answers that repeating alone does not change: the user has to know."""


def _now() -> datetime:
    return datetime.now(UTC)


@dataclass(slots=True)
class Reconciler:
    """Brings jobs to where their specs ask them to be."""

    api: Api
    cache: Cache
    setup: Setup
    now: Callable[[], datetime] = _now
    refused: dict[JobKey, str] = field(default_factory=dict)
    """What the API server will not take as it is, for the next look to tell."""

    async def reconcile(self, key: JobKey) -> float | None:
        """Returns after how many seconds the job wants to be looked at again, None for the next event.

        Raises ApiError, after which the call is to be repeated.
        """
        try:
            seen = self.cache.seen(key)
        except ManifestError as exc:  # the CRD of another version lets it pass
            log.error("%s/%s cannot be read: %s", *key, exc)
            return None
        if seen is None:
            self.refused.pop(key, None)
            return None
        decision = decide(replace(seen, refused=self.refused.get(key, "")), self.setup, self.now())
        if decision is None:
            return None
        try:
            await self._carry_out(key, decision)
        except ApiError as exc:
            if exc.code in FOR_GOOD:
                self.refused[key] = exc.message
            raise
        return (
            0.0 if self.refused.pop(key, None) else decision.look_again_s
        )  # once more: it is told no longer

    async def _carry_out(self, key: JobKey, decision: Decision) -> None:
        namespace, name = key
        if decision.delete_job:
            await self.api.delete(namespace, (KIND, name))
            return
        status = decision.status.model_dump(mode="json", by_alias=True, exclude_none=True)
        live = self.cache.live_status(key)
        cleared = any(live.get(field) and field not in status for field in ("startTime", "completionTime"))
        if cleared or not covers(live, status):
            await self.api.apply_status(namespace, name, status)
        for child in decision.delete:
            await self.api.delete(namespace, child)
        for manifest in decision.apply:
            child = manifest["kind"], manifest["metadata"]["name"]
            found = self.cache.child(key, child) or await self._unlabelled(namespace, child, manifest)
            if found is not None and found["metadata"].get("deletionTimestamp"):
                continue  # made anew when it is gone
            if (wanted := needed(manifest, found)) is not None:
                await self.api.apply(wanted)

    async def _unlabelled(self, namespace: str, child: Key, wanted: Manifest) -> Manifest | None:
        """A child that the watches do not know, which may be new. Raises ApiError for one that is somebody else's:
        an apply would take it over."""
        found = await self.api.read(namespace, child)
        if found is None:
            return None
        uid = wanted["metadata"]["ownerReferences"][0]["uid"]
        if any(owner.get("uid") == uid for owner in found["metadata"].get("ownerReferences") or ()):
            return {**found, "kind": child[0]}
        raise ApiError(
            409,
            f"{child[0]} {child[1]} is there and is not this job's: delete it, or give the job another name",
        )
