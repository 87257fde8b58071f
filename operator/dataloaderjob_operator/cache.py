"""What the watches told last of jobs and their children. Pure: events come in, `Seen` goes out."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from typing import Any

from dataloaderjob.api import KIND, parse_object
from dataloaderjob.api.status import DataLoaderJobStatus, Phase
from dataloaderjob_operator.names import LABEL_JOB, LABEL_ROLE, Role
from dataloaderjob_operator.objects import Manifest
from dataloaderjob_operator.seen import Key, Seen

JobKey = tuple[str, str]
"""(namespace, name) of a job."""


class Cache:
    """Live objects by the job that they belong to."""

    def __init__(self) -> None:
        self._jobs: dict[JobKey, Manifest] = {}
        self._children: defaultdict[JobKey, dict[Key, Manifest]] = defaultdict(dict)

    def __len__(self) -> int:
        return len(self._jobs)

    def put(self, thing: Manifest) -> JobKey | None:
        """An object is there, or has changed. Returns the job that it concerns, if any."""
        owner = owner_of(thing)
        if owner is None:
            return None
        slim = {**thing, "metadata": {k: v for k, v in thing["metadata"].items() if k != "managedFields"}}
        if thing["kind"] == KIND:
            self._jobs[owner] = slim
        else:
            self._children[owner][thing["kind"], thing["metadata"]["name"]] = slim
        return owner

    def remove(self, thing: Manifest) -> JobKey | None:
        """An object is gone. Returns the job that it concerned."""
        owner = owner_of(thing)
        if owner is None:
            return None
        if thing["kind"] == KIND:
            self._jobs.pop(owner, None)
        else:
            self._children[owner].pop((thing["kind"], thing["metadata"]["name"]), None)
        if owner not in self._jobs and not self._children[owner]:
            del self._children[owner]
        return owner

    def all_of(self, kind: str) -> list[Manifest]:
        """All objects of a kind."""
        if kind == KIND:
            return list(self._jobs.values())
        return [c for mine in self._children.values() for (k, _), c in mine.items() if k == kind]

    def has(self, thing: Manifest) -> bool:
        """Whether this very object is there, and not another one of its name."""
        owner = owner_of(thing)
        if owner is None:
            return False
        key = (thing["kind"], thing["metadata"]["name"])
        live = self._jobs.get(owner) if thing["kind"] == KIND else self.child(owner, key)
        return live is not None and live["metadata"].get("uid") == thing["metadata"].get("uid")

    def phases(self) -> Counter[str]:
        """How many jobs are in which phase."""
        return Counter(
            str((job.get("status") or {}).get("phase") or Phase.PENDING) for job in self._jobs.values()
        )

    def child(self, owner: JobKey, key: Key) -> Manifest | None:
        return self._children[owner].get(key) if owner in self._children else None

    def uid(self, owner: JobKey) -> str | None:
        """Of the job, None if it is gone or going."""
        metadata = self._jobs.get(owner, {}).get("metadata", {})
        return None if metadata.get("deletionTimestamp") else metadata.get("uid")

    def of_role(self, owner: JobKey, role: Role) -> list[Manifest]:
        """Pods of this job's name, those that are being deleted among them."""
        children = self._children[owner].items() if owner in self._children else ()
        return [
            child
            for (kind, _), child in children
            if kind == "Pod" and child["metadata"].get("labels", {}).get(LABEL_ROLE) == role.value
        ]

    def live_status(self, owner: JobKey) -> Mapping[str, Any]:
        return dict(self._jobs.get(owner, {}).get("status") or {})

    def seen(self, owner: JobKey) -> Seen | None:
        """None if the job is gone or going. Raises ManifestError for one that the models refuse."""
        thing = self._jobs.get(owner)
        if thing is None or thing["metadata"].get("deletionTimestamp"):
            return None
        uid = thing["metadata"].get("uid")
        mine = {k: c for k, c in self._children.get(owner, {}).items() if _owned_by(c, uid)}
        return Seen(
            job=parse_object({k: v for k, v in thing.items() if k != "status"}),
            status=_status(thing.get("status")),
            children={k: c for k, c in mine.items() if k[0] != "Pod"},
            pods=tuple(c for k, c in sorted(mine.items()) if k[0] == "Pod"),
        )


def owner_of(thing: Manifest) -> JobKey | None:
    """The job that an object is, or carries the label of."""
    metadata = thing["metadata"]
    name = metadata["name"] if thing["kind"] == KIND else metadata.get("labels", {}).get(LABEL_JOB)
    return None if name is None else (metadata.get("namespace", ""), name)


def _owned_by(child: Manifest, uid: str | None) -> bool:
    """Pods are owned by what the job owns; another object of an earlier job of the same name is not ours."""
    owners = child["metadata"].get("ownerReferences") or ()
    return child["kind"] == "Pod" or any(owner.get("uid") == uid for owner in owners)


def _status(found: Any) -> DataLoaderJobStatus:
    """As it was written last. One that cannot be read, such as a newer operator's, is begun anew."""
    try:
        return DataLoaderJobStatus.model_validate(found or {})
    except ValueError:
        return DataLoaderJobStatus()
