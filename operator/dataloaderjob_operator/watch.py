"""The watches: kopf keeps them open; what they tell goes into the cache, and its job onto the schedule.

Only `on.event` of kopf is used: no handler state, no finalizer, no annotation is written by it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import kopf

from dataloaderjob.api import GROUP, KIND, PLURAL, VERSION
from dataloaderjob_operator.cache import Cache, JobKey
from dataloaderjob_operator.names import LABEL_JOB

log = logging.getLogger(__name__)

CHILDREN: dict[str, tuple[str, str, str]] = {
    "Deployment": ("apps", "v1", "deployments"),
    "Job": ("batch", "v1", "jobs"),
    "Pod": ("", "v1", "pods"),
    "Service": ("", "v1", "services"),
    "ConfigMap": ("", "v1", "configmaps"),
}
"""Kinds that are watched, but Secrets, which nobody should have to list: one that is gone is missed at a resync."""
JOBS = (GROUP, VERSION, PLURAL)
CHUNK = 500


def list_paths(namespaces: Sequence[str]) -> dict[str, list[str]]:
    """Where all objects of a kind are listed; in all namespaces if none is named."""
    found = {}
    for kind, (group, version, plural) in {KIND: JOBS, **CHILDREN}.items():
        root = f"/apis/{group}/{version}" if group else f"/api/{version}"
        found[kind] = [f"{root}/namespaces/{name}/{plural}" for name in namespaces] or [f"{root}/{plural}"]
    return found


def configure(settings: kopf.OperatorSettings) -> None:
    """Reconnects that notice a dead connection, filters on the server, nothing posted."""
    settings.posting.enabled = False
    settings.scanning.disabled = True
    settings.watching.server_timeout = 300
    settings.watching.client_timeout = 330
    settings.watching.chunk_size = CHUNK
    for resource in CHILDREN.values():
        settings.watching.label_selectors[resource] = LABEL_JOB


def registry(
    cache: Cache, add: Callable[[JobKey], None], gone: Callable[[JobKey], None]
) -> kopf.OperatorRegistry:
    """Handlers that only take notes."""
    made = kopf.OperatorRegistry()

    async def note(event: Any, resource: Any, **_: Any) -> None:
        thing = {**event["object"], "kind": event["object"].get("kind") or resource.kind}
        if event["type"] == "DELETED":
            key = cache.remove(thing)
            if key is not None and thing["kind"] == KIND:
                gone(key)
                return
        else:
            key = cache.put(thing)
        if key is not None:
            add(key)

    async def login(**known: Any) -> kopf.ConnectionInfo | None:
        return kopf.login_with_service_account(**known) or kopf.login_with_kubeconfig(**known)

    kopf.on.login(registry=made, id="login")(login)
    kopf.on.event(*JOBS, registry=made, id="job")(note)
    for kind, resource in CHILDREN.items():
        kopf.on.event(*resource, registry=made, id=kind.lower(), labels={LABEL_JOB: kopf.PRESENT})(note)
    return made
