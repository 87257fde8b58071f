"""The watches: kopf keeps them open; what they tell goes into the cache, and its job onto the schedule.

Only `on.event` of kopf is used: no handler state, no finalizer, no annotation is written by it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import kopf

from dataloaderjob.api import GROUP, KIND, PLURAL, VERSION
from dataloaderjob_operator.names import LABEL_JOB
from dataloaderjob_operator.observe.cache import Cache, JobKey

log = logging.getLogger(__name__)

CHILDREN: dict[str, tuple[str, str, str]] = {
    "Deployment": ("apps", "v1", "deployments"),
    "Job": ("batch", "v1", "jobs"),
    "Pod": ("", "v1", "pods"),
    "Service": ("", "v1", "services"),
    "ConfigMap": ("", "v1", "configmaps"),
    "NetworkPolicy": ("networking.k8s.io", "v1", "networkpolicies"),
}
"""Kinds that are watched; for Secrets, which nobody should have to list, see `secret_poller`."""
JOBS = (GROUP, VERSION, PLURAL)
CHUNK = 100
"""Objects in a page of a list: with 500, pages of pods in the hands of kopf were 40 MB."""
IDLE_S = 0.5
"""kopf keeps a task for each object that something happened to, for so long after it."""
TASK = "watcher for "
"""How kopf's names of its tasks begin, of which each keeps one watch open."""


class _NoDiffs(kopf.DiffBaseStorage):
    """Without kopf's own bookkeeping of what changed, which the handlers here do not use: it took a fifth of the CPU
    of a cold start."""

    def build(
        self,
        *,
        body: kopf.Body,  # noqa: ARG002
        extra_fields: Iterable[kopf.FieldSpec] | None = None,  # noqa: ARG002
    ) -> kopf.BodyEssence:
        return kopf.BodyEssence()

    def fetch(self, *, body: kopf.Body) -> None:  # noqa: ARG002
        return None

    def store(self, *, body: kopf.Body, patch: kopf.Patch, essence: kopf.BodyEssence) -> None:  # noqa: ARG002
        return None


def list_paths(namespaces: Sequence[str]) -> dict[str, list[str]]:
    """Where all objects of a kind are listed; in all namespaces if none is named."""
    found = {}
    for kind, (group, version, plural) in {KIND: JOBS, **CHILDREN}.items():
        root = f"/apis/{group}/{version}" if group else f"/api/{version}"
        found[kind] = [f"{root}/namespaces/{name}/{plural}" for name in namespaces] or [f"{root}/{plural}"]
    return found


def expected(namespaces: Sequence[str]) -> int:
    """How many watches there shall be."""
    return (1 + len(CHILDREN)) * max(1, len(set(namespaces)))


def alive() -> int:
    """How many watches kopf keeps open now, in the loop that runs."""
    return sum(task.get_name().startswith(TASK) for task in asyncio.all_tasks() if not task.done())


def configure(settings: kopf.OperatorSettings) -> None:
    """Reconnects that notice a dead connection, filters on the server, nothing posted."""
    settings.posting.enabled = False
    settings.scanning.disabled = True
    settings.watching.server_timeout = 300
    settings.watching.client_timeout = 330
    settings.watching.chunk_size = CHUNK
    settings.queueing.idle_timeout = IDLE_S
    settings.persistence.diffbase_storage = _NoDiffs()
    for resource in CHILDREN.values():
        settings.watching.label_selectors[resource] = LABEL_JOB


def registry(
    cache: Cache, changed: Callable[[JobKey, bool], None], gone: Callable[[JobKey], None],
    told: Callable[[str], None],
) -> kopf.OperatorRegistry:  # fmt: skip
    """Handlers that only take notes. `changed`: a job, or if the flag is False, a child of it; `told`: of which kind
    something came."""
    made = kopf.OperatorRegistry()

    async def note(event: Any, resource: Any, **_: Any) -> None:
        thing = {**event["object"], "kind": event["object"].get("kind") or resource.kind}
        told(thing["kind"])
        if event["type"] == "DELETED":
            key = cache.remove(thing)
            if key is not None and thing["kind"] == KIND and cache.uid(key) is None:
                gone(key)
                return
        else:
            key = cache.put(thing)
        if key is not None:
            changed(key, thing["kind"] == KIND)

    async def login(**known: Any) -> kopf.ConnectionInfo | None:
        return kopf.login_with_service_account(**known) or kopf.login_with_kubeconfig(**known)

    kopf.on.login(registry=made, id="login")(login)
    kopf.on.event(*JOBS, registry=made, id="job")(note)
    for kind, resource in CHILDREN.items():
        kopf.on.event(*resource, registry=made, id=kind.lower(), labels={LABEL_JOB: kopf.PRESENT})(note)
    return made
