"""Where keys are kept: the operator's root key, in a Secret of its own namespace that it makes itself, and the Secrets
of jobs, which are only ever created and never read.

A job's Secret has the job's uid in its name, so a create that conflicts has found the job's own. It is needed when a
pod starts, and at no other time: a Secret that somebody deleted is back before a pod that starts can miss it.
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

from dataloaderjob_operator import names
from dataloaderjob_operator.client import ApiError, Client
from dataloaderjob_operator.decide.observed import Observed, has_condition
from dataloaderjob_operator.kinds import Manifest
from dataloaderjob_operator.observe.cache import JobKey

log = logging.getLogger(__name__)

ROOT_FIELD = "root"
"""Key of the root key in its Secret."""
NEW_ROOT_NBYTES = 48
RETRY_S = 5.0
AGAIN_S = 10.0
"""Least interval between two attempts to create a job's Secret while the same pods start."""


class NoRootKey(Exception):
    """What is there is no root key."""


async def root_key(client: Client, namespace: str, name: str) -> bytes:
    """Returns the root key in a Secret, which is made if it is not there. Operators that start at the same time get the
    same one. Waits for an API server that does not answer. Raises NoRootKey."""
    key = base64.b64encode(secrets.token_bytes(NEW_ROOT_NBYTES)).decode()
    made = {
        "apiVersion": "v1", "kind": "Secret", "type": "Opaque", "immutable": True, "data": {ROOT_FIELD: key},
        "metadata": {"name": name, "namespace": namespace, "labels": {"app.kubernetes.io/managed-by": names.MANAGER}},
    }  # fmt: skip
    while True:
        try:
            if await client.create(made):
                log.info("made the root key of all jobs' keys: Secret %s/%s", namespace, name)
                return _decoded(made, namespace, name)
            found = await client.read(namespace, ("Secret", name))
            if found is not None:  # else it was deleted in between
                return _decoded(found, namespace, name)
        except ApiError as exc:
            log.warning(
                "cannot get the root key, Secret %s/%s, try again in %.0f s: %s",
                namespace,
                name,
                RETRY_S,
                exc,
            )
            await asyncio.sleep(RETRY_S)


def _decoded(secret: Manifest, namespace: str, name: str) -> bytes:
    try:
        root = base64.b64decode((secret.get("data") or {})[ROOT_FIELD], validate=True)
        names.check_root(root)
    except (KeyError, binascii.Error, ValueError) as exc:
        why = f"it has no {ROOT_FIELD}" if isinstance(exc, KeyError) else str(exc)
        raise NoRootKey(
            f"Secret {namespace}/{name} is no root key: {why}; delete it to have one made, or write at least "
            f"{names.ROOT_NBYTES} random bytes to {ROOT_FIELD}"
        ) from exc
    return root


@dataclass(frozen=True, slots=True)
class Attempt:
    """An attempt to create a job's Secret."""

    at: float
    """Moment, in seconds of a monotonic clock."""
    placed: frozenset[str]
    """Pods that had a node by then, by uid: what they mount was made before this moment or by this attempt."""


@dataclass(slots=True)
class JobSecrets:
    """Creates the Secrets of jobs, each once, and again where it may have been deleted and a pod needs it."""

    api: Client
    clock: Callable[[], float] = time.monotonic
    attempts: dict[JobKey, Attempt] = field(default_factory=dict)
    """The last one for each job."""

    async def keep(self, key: JobKey, secret: Manifest, observed: Observed) -> bool:
        """Creates the Secret unless it is sure to be there or nothing needs it now. Returns whether it was made."""
        placed = {
            str(pod["metadata"].get("uid")): pod
            for pod in observed.pods
            if has_condition(pod, "PodScheduled")
        }
        last = self.attempts.get(key)
        if last is not None and placed.keys() <= last.placed:
            starts = any(pod.get("status", {}).get("phase") == "Pending" for pod in placed.values())
            if not starts or self.clock() - last.at < AGAIN_S:
                return False
        made = await self.api.create(secret)
        self.attempts[key] = Attempt(self.clock(), frozenset(placed))
        return made

    def forget(self, key: JobKey) -> None:
        """The job is gone."""
        self.attempts.pop(key, None)
