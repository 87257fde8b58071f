"""The watch of attached pods that have not ended: pods of other controllers whose label names a job.

kopf has one selector for each kind of object, and these pods lack the label of the operator's own pods. This module
therefore lists and watches them itself. After every error, it lists them again, and then reports each job whose pods
have changed.
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

from dataloaderjob_operator.client import ApiClient, ApiError
from dataloaderjob_operator.decide.attached import ENDED
from dataloaderjob_operator.kinds import KINDS, Manifest, transform
from dataloaderjob_operator.names import LABEL_INJECT
from dataloaderjob_operator.observe.cache import JobKey
from dataloaderjob_operator.observe.requests import WATCH_S

log = logging.getLogger(__name__)

POD = "Pod"
RETRY_S = 5.0
"""Pause in seconds after a failed list or watch."""
GONE = 410
"""Status code of the response if a watch starts from a version that is too old. A new list solves this at once."""


class AttachedPods:
    """The attached pods, by the job that their label names. `prime` lists them. `run` watches them until it is
    cancelled."""

    def __init__(
        self, api: ApiClient, changed: Callable[[JobKey], None], namespaces: Sequence[str] = ()
    ) -> None:
        kind = KINDS[POD]
        self._api, self._changed = api, changed
        self._versions: dict[str, str] = dict.fromkeys(
            [kind.path(name) for name in namespaces] or [kind.path(None)], ""
        )
        """The resourceVersion up to which the pods at each path are known; empty if they must be listed."""
        self._pods: defaultdict[JobKey, dict[str, Manifest]] = defaultdict(dict)
        """The pods of each job, by uid."""
        self._jobs: dict[str, JobKey] = {}
        """The job of each known pod, by the pod's uid. The pod's label may change."""

    def of(self, key: JobKey) -> tuple[Manifest, ...]:
        """Returns a job's pods, sorted by name."""
        found = self._pods.get(key, {}).values()
        return tuple(sorted(found, key=lambda pod: str(pod["metadata"]["name"])))

    async def prime(self) -> None:
        """Lists all attached pods. Without this list, a job would seem to have none, and would lose its feeders."""
        for path in self._versions:
            while not self._versions[path]:
                await self._try(self._list, path)

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            for path in self._versions:
                group.create_task(self._follow(path))

    async def _follow(self, path: str) -> None:
        while True:
            await self._try(self._watch if self._versions[path] else self._list, path)

    async def _try(self, step: Callable[[str], Any], path: str) -> None:
        try:
            await step(path)
        except ApiError as exc:
            self._versions[path] = ""
            if exc.code != GONE:
                log.warning(
                    "cannot list or watch attached pods at %s, retry in %.0f s: %s", path, RETRY_S, exc
                )
                await asyncio.sleep(RETRY_S)

    async def _list(self, path: str) -> None:
        pods, version = await self._api.snapshot(path, labelSelector=LABEL_INJECT)
        there = {self.put(pod) for pod in pods}
        for uid in [uid for uid, key in self._jobs.items() if self._is_at(key, path) and uid not in there]:
            self.remove(uid)
        self._versions[path] = version

    async def _watch(self, path: str) -> None:
        events = self._api.watch(
            path, WATCH_S, labelSelector=LABEL_INJECT, resourceVersion=self._versions[path]
        )
        async for event in events:
            pod = event["object"]
            if event["type"] == "DELETED":
                self.remove(str(pod["metadata"].get("uid", "")))
            elif event["type"] in ("ADDED", "MODIFIED"):
                self.put(pod)
            self._versions[path] = str(pod["metadata"]["resourceVersion"])

    def put(self, pod: Manifest) -> str:
        """Stores a new or changed pod. Returns its uid. Drops the pod if it has ended, because a namespace may keep
        thousands of such pods."""
        metadata = pod["metadata"]
        uid, key = str(metadata.get("uid", "")), (metadata["namespace"], metadata["labels"][LABEL_INJECT])
        if self._jobs.get(uid, key) != key:
            self.remove(uid)
        if (pod.get("status") or {}).get("phase") in ENDED:
            self.remove(uid)
            return uid
        known = self._pods[key].get(uid)
        kept = self._pods[key][uid] = transform({**pod, "kind": POD})
        self._jobs[uid] = key
        if known is None or known != kept:
            self._changed(key)
        return uid

    def remove(self, uid: str) -> None:
        """Drops a pod that is gone, or has lost its label."""
        key = self._jobs.pop(uid, None)
        if key is None:
            return
        del self._pods[key][uid]
        if not self._pods[key]:
            del self._pods[key]
        self._changed(key)

    def _is_at(self, key: JobKey, path: str) -> bool:
        """Checks whether a job's pods are listed at this path."""
        return path in (KINDS[POD].path(None), KINDS[POD].path(key[0]))
