"""The storage of keys. The operator keeps its root key in a Secret in its own namespace. It creates the Secrets of
jobs, but never reads them.

The name of a job's Secret contains the job's uid. A name conflict therefore means that the job's own Secret already
exists. Pods need this Secret only when they start, and a deleted Secret is recreated in time for them.

The Secret of attached pods, however, is named after the job alone. A name conflict may therefore be with someone else's
Secret, or with the Secret of an earlier job that has not been garbage-collected yet. So the operator retries while the
job is new, and while sidecars run without reaching the supervisor.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import logging
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from dataloaderjob.api.status import ConditionType
from dataloaderjob_operator import names
from dataloaderjob_operator.client import ApiClient, ApiError
from dataloaderjob_operator.decide.attached import NOT_CONNECTED
from dataloaderjob_operator.decide.observed import Observed, has_condition, parse_time
from dataloaderjob_operator.kinds import Manifest
from dataloaderjob_operator.observe.cache import JobKey

log = logging.getLogger(__name__)

ROOT_FIELD = "root"
"""Field of the operator's Secret that holds the root key."""
PREVIOUS_FIELD = "previous"
"""Field of the operator's Secret that holds the previous root key. Running jobs use this key during a rotation."""
NEW_ROOT_NBYTES = 48
RETRY_S = 5.0
AGAIN_S = 10.0
"""Minimum number of seconds between two attempts to create a job's Secret while the same pods start."""
NEW_S = 300.0
"""Seconds after a job's creation during which the Secret of an earlier job of the same name may still exist."""


class NoRootKey(Exception):
    """The Secret or file holds no valid root key."""


@dataclass(frozen=True, slots=True)
class Roots:
    """The operator's root keys."""

    current: bytes
    """The root key for jobs that start now."""
    previous: bytes | None = None
    """The root key of jobs that started before the current one existed; None if there is none."""


async def root_key(client: ApiClient, namespace: str, name: str) -> Roots:
    """Returns the root keys in a Secret. Creates the Secret if it is missing. Operators that start at the same time get
    the same key. Retries until the API server answers. Raises NoRootKey."""
    key = base64.b64encode(secrets.token_bytes(NEW_ROOT_NBYTES)).decode()
    made = {
        "apiVersion": "v1", "kind": "Secret", "type": "Opaque", "immutable": True, "data": {ROOT_FIELD: key},
        "metadata": {"name": name, "namespace": namespace, "labels": {"app.kubernetes.io/managed-by": names.MANAGER}},
    }  # fmt: skip
    while True:
        try:
            if await client.create(made):
                log.info(
                    "created the root key, from which all jobs' keys are derived: Secret %s/%s",
                    namespace,
                    name,
                )
                return _decoded(made, namespace, name)
            found = await client.read(namespace, ("Secret", name))
            if found is not None:  # otherwise, it was deleted in between
                return _decoded(found, namespace, name)
        except ApiError as exc:
            log.warning(
                "cannot get the root key from Secret %s/%s, retry in %.0f s: %s",
                namespace,
                name,
                RETRY_S,
                exc,
            )
            await asyncio.sleep(RETRY_S)


def _decoded(secret: Manifest, namespace: str, name: str) -> Roots:
    data = secret.get("data") or {}
    try:
        roots = [
            base64.b64decode(data[field], validate=True)
            for field in (ROOT_FIELD, PREVIOUS_FIELD)
            if field == ROOT_FIELD or field in data
        ]
        for root in roots:
            names.check_root(root)
    except (KeyError, binascii.Error, ValueError) as exc:
        why = f"it has no field {ROOT_FIELD}" if isinstance(exc, KeyError) else str(exc)
        raise NoRootKey(
            f"Secret {namespace}/{name} holds no valid root key: {why}; delete it so that the operator "
            f"creates one, or write at least {names.ROOT_NBYTES} random bytes to {ROOT_FIELD}"
        ) from exc
    return Roots(*roots)


@dataclass(frozen=True, slots=True)
class SecretAttempt:
    """An attempt to create a job's Secret."""

    at: float
    """Time of the attempt in seconds, by a monotonic clock."""
    placed: frozenset[str]
    """Uids of the pods that had a node at that time. The Secret that they mount was created by then, or by this
    attempt."""
    made: bool = True
    """True if this operator created the Secret, in this attempt or an earlier one."""


@dataclass(slots=True)
class JobSecrets:
    """The writer of jobs' Secrets. It creates each Secret once. It creates a Secret again if the Secret may have been
    deleted and a pod needs it."""

    api: ApiClient
    clock: Callable[[], float] = time.monotonic
    now: Callable[[], float] = time.time
    attempts: dict[JobKey, dict[str, SecretAttempt]] = field(default_factory=dict)
    """The last attempt to create each of a job's Secrets, by the Secret's name."""

    async def keep(self, key: JobKey, secret: Manifest, observed: Observed) -> bool:
        """Creates the Secret, unless it certainly exists or nothing needs it now. Returns True if the Secret was
        created."""
        name = str(secret["metadata"]["name"])
        attaches = names.is_attached_secret(key[1], name)
        placed = {
            str(pod["metadata"].get("uid")): pod
            for pod in (observed.attached if attaches else observed.pods)
            if has_condition(pod, "PodScheduled")
        }
        known = self.attempts.setdefault(key, {})
        last = known.get(name)
        if last is not None and placed.keys() <= last.placed:
            starts = any(pod.get("status", {}).get("phase") == "Pending" for pod in placed.values())
            doubted = attaches and self._doubted(observed, made=last.made)
            if not (starts or doubted) or self.clock() - last.at < AGAIN_S:
                return False
        made = await self.api.create(secret)
        known[name] = SecretAttempt(self.clock(), frozenset(placed), made or (last is not None and last.made))
        return made

    def _doubted(self, observed: Observed, *, made: bool) -> bool:
        """Returns True if the Secret of attached pods might not belong to this job. `made`: True if this operator
        created the Secret."""
        sidecars = observed.status.condition(ConditionType.SIDECARS_READY)
        if sidecars is not None and sidecars.reason == NOT_CONNECTED:
            return True
        created = observed.job.metadata.creation_timestamp
        return not made and created is not None and self.now() - parse_time(created).timestamp() < NEW_S

    def forget(self, key: JobKey) -> None:
        """Drops all state of a job that is gone."""
        self.attempts.pop(key, None)
