"""The writer that creates, changes and deletes the children of jobs on the API server. It uses server-side apply. It
remembers a refusal until the API server accepts the child.

Before a job has any pods, the children built from the user's templates are applied as a dry run. A pod from each
template is also created as a dry run, because LimitRanges and Pod Security check only pods. If the API server refuses
any of them, nothing is created. Otherwise, the head and the feeders might wait for trainers that cannot exist.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field

from dataloaderjob.api import DataLoaderJob
from dataloaderjob_operator.client import ApiClient, ApiError
from dataloaderjob_operator.decide import refusals
from dataloaderjob_operator.decide.decision import WORKLOADS
from dataloaderjob_operator.decide.observed import Key, Observed, key_of
from dataloaderjob_operator.keys import JobSecrets
from dataloaderjob_operator.kinds import KINDS, Manifest, Source, digest, manifest_to_send, sealed
from dataloaderjob_operator.objects.pods import pod_of
from dataloaderjob_operator.observe.cache import Cache, JobKey

log = logging.getLogger(__name__)

FOR_GOOD = frozenset({400, 403, 422})
"""Status codes of errors that a retry cannot fix. These errors are reported to the user at once."""
NOT_OURS = "NotOurs"
"""The operator's own error reason if another object already has the child's name. Other conflicts are temporary."""
NOT_TYPED = (
    "field not declared in schema",
    "failed to create typed patch object",
    "failed to convert new object",
)
"""Parts of the API server's messages about a template with an unknown field, or a field of the wrong type. These
messages come with status code 500."""
NOT_NOW = frozenset({0, 429})
"""Error codes that mean that the API server accepts no requests at the moment."""
REPETITIONS = 3
"""Number of consecutive errors for one child after which even a temporary error is reported to the user. A failing
webhook may recover before then."""


@dataclass(slots=True)
class Refusal:
    """The API server's refusal of a child."""

    text: str
    reported: bool
    times: int = 1


def _version(thing: Manifest) -> str:
    return str(thing["metadata"].get("resourceVersion", ""))


@dataclass(slots=True)
class ChildWriter:
    """A writer that creates, changes and deletes children."""

    api: ApiClient
    cache: Cache
    secrets: JobSecrets = field(init=False)
    refusals: dict[JobKey, dict[Key, Refusal]] = field(default_factory=dict)
    fitting: dict[JobKey, dict[Key, tuple[str, str]]] = field(default_factory=dict)
    """Children that already match their manifests, each with its resourceVersion and the manifest's hash."""

    def __post_init__(self) -> None:
        self.secrets = JobSecrets(self.api)

    def forget(self, key: JobKey) -> None:
        """Drops all state of a job that is gone."""
        self.refusals.pop(key, None)
        self.fitting.pop(key, None)
        self.secrets.forget(key)

    def refused(self, key: JobKey) -> str:
        """Returns the message for the user about the first refused child; empty if no child is refused."""
        found = self.refusals.get(key, {}).values()
        return next((refusal.text for refusal in found if refusal.reported), "")

    async def delete(self, what: Key, thing: Manifest | None) -> None:
        """Deletes exactly this object, not a later one of the same name, and updates the cache immediately."""
        if thing is None:
            return
        metadata = thing["metadata"]
        left = await self.api.delete(metadata["namespace"], what, metadata["uid"])
        if left is not None:
            self.cache.put_written(left)
        else:
            self.cache.remove({**thing, "kind": what[0]})

    async def apply(
        self, key: JobKey, observed: Observed, wanted: Sequence[Manifest], *, later: Sequence[Manifest] = (),
        begun: bool,
    ) -> bool:  # fmt: skip
        """Applies the children that are missing or differ from their manifests. `later`: children to include only in
        the dry run. `begun`: True if the job already has a child with pods. Returns True if anything was written.

        Raises the first ApiError, after applying all other children. If the API server refuses a dry run, nothing is
        applied.
        """
        job, asked = observed.job, wanted if begun else (*wanted, *later)
        there = {key_of(manifest) for manifest in asked}  # old refusals of other children no longer count
        known = self.refusals.get(key, {})
        self.refusals[key] = {child: refusal for child, refusal in known.items() if child in there}
        if not begun:
            await self._try(key, job, [child for child in asked if child["kind"] in WORKLOADS])
        wrote, first = False, None
        for manifest in wanted:
            try:
                if KINDS[manifest["kind"]].source is Source.NONE:
                    wrote = await self.secrets.keep(key, sealed(manifest), observed) or wrote
                else:
                    wrote = await self._apply(key, manifest) or wrote
                self.refusals[key].pop(key_of(manifest), None)
            except ApiError as exc:
                self._note(key, job, manifest, exc)
                first = first or exc
        if first is not None:
            raise first
        return wrote

    async def _try(self, key: JobKey, job: DataLoaderJob, wanted: Sequence[Manifest]) -> None:
        first = None
        for manifest in wanted:
            try:
                await self.api.try_apply(sealed(manifest))
                await self._try_pod(manifest)
                self.refusals[key].pop(key_of(manifest), None)
            except ApiError as exc:
                if refusals.NO_DRY_RUN in exc.message:
                    continue
                if await self.api.read(key[0], key_of(manifest)) is not None:
                    continue  # the real apply will show who owns it
                self._note(key, job, manifest, exc)
                first = first or exc
        if first is not None:
            raise first

    async def _try_pod(self, workload: Manifest) -> None:
        try:
            await self.api.try_create(pod_of(workload))
        except ApiError as exc:
            if refusals.is_of_the_trial(exc.message):
                return
            raise ApiError(
                exc.code, refusals.of_a_pod(exc.message, workload), exc.retry_after_s, exc.reason
            ) from exc

    def _note(self, key: JobKey, job: DataLoaderJob, manifest: Manifest, error: ApiError) -> None:
        """Remembers a refusal. Raises the error again if the API server accepts no requests at the moment."""
        if error.code in NOT_NOW:
            raise error
        known = self.refusals[key].get(key_of(manifest))
        times = 1 if known is None else known.times + 1
        for_good = error.code in FOR_GOOD or error.reason == NOT_OURS
        for_good = for_good or any(words in error.message for words in NOT_TYPED)
        if known is not None and known.reported and not for_good:  # more informative than a temporary error
            known.times = times
            return
        text = refusals.explain(error.message, manifest, job)
        reported = for_good or times >= REPETITIONS
        if reported and (known is None or not known.reported):
            log.warning("the API server rejected %s %s: %s", *key_of(manifest), error)
        self.refusals[key][key_of(manifest)] = Refusal(text, reported, times)

    async def _apply(self, key: JobKey, manifest: Manifest) -> bool:
        child = key_of(manifest)
        found = self.cache.child(key, child)
        if found is None and await self._unobserved(key[0], child, manifest) is not None:
            return True  # the next reconcile decides, with the child in the cache
        if found is not None and found["metadata"].get("deletionTimestamp"):
            return False  # recreated once it is gone
        if found is not None and child[0] == "Job" and not found["metadata"].get("ownerReferences"):
            # It belongs to an earlier job, and its pods have that job's key. The pod template of a Job cannot be
            # changed.
            raise _not_ours(child)
        fits = self.fitting.setdefault(key, {})
        now = "" if found is None else _version(found), digest(manifest)
        if now[0] and fits.get(child) == now:
            return False
        wanted = manifest_to_send(manifest, found)
        if wanted is None:
            fits[child] = now
            return False
        made = {**await self.api.apply(wanted), "kind": child[0]}
        self.cache.put_written(made)
        if found is None or _version(made) != _version(found):
            return True
        fits[child] = now  # the API server alters what was applied, so the child never equals its manifest
        return False

    async def _unobserved(self, namespace: str, child: Key, wanted: Manifest) -> Manifest | None:
        """Reads a child that no watch has reported, perhaps because it is new. Raises ApiError if the child belongs to
        someone else: applying the manifest would take it over."""
        found = await self.api.read(namespace, child)
        if found is None:
            return None
        uid, found = wanted["metadata"]["ownerReferences"][0]["uid"], {**found, "kind": child[0]}
        if any(owner.get("uid") == uid for owner in found["metadata"].get("ownerReferences") or ()):
            self.cache.put(found)
            return found
        raise _not_ours(child)


def _not_ours(child: Key) -> ApiError:
    text = (
        f"{child[0]} {child[1]} already exists but does not belong to this job: delete it, or rename the job"
    )
    return ApiError(409, text, reason=NOT_OURS)
