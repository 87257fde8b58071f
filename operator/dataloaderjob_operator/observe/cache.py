"""The cache of the last reported state of jobs and their children, updated with the operator's own writes. Pure except
for the clock.

The cache keeps only the parts of an object that are read (`kinds.transform`), because a cluster's jobs may have ten
thousand pods.
"""

from __future__ import annotations

import copy
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from pydantic import ValidationError

from dataloaderjob.api import KIND, DataLoaderJob, ManifestError, parse_live
from dataloaderjob.api.base import Path, spell
from dataloaderjob.api.job import Metadata
from dataloaderjob.api.problems import Problem
from dataloaderjob.api.status import DataLoaderJobStatus, Phase
from dataloaderjob_operator.decide.observed import Key, Observed, role_of
from dataloaderjob_operator.kinds import Manifest, Packed, transform
from dataloaderjob_operator.names import LABEL_JOB, Role, feeders, head, trainers_stem

WRITE_WINS_S = 120.0
"""Seconds for which the operator's write takes precedence over an older version from a watch. kopf notices a dead
connection after 70 s, and the next connection resumes at the same version."""
GONE = 4096
"""Number of uids of removed or replaced objects that are remembered."""
MAX_UNREADABLE = 64
"""Maximum number of parts of a status that are omitted because they are unreadable."""
MAX_LEVELS = 200
"""Maximum nesting depth of a spec. pydantic serializes at most 255 levels, but the API server accepts 10,000."""
RECENT = 128
"""Number of jobs that are kept in parsed form. A job that changes is reconciled several times within seconds."""
NAMED_PARTS = 7
"""Maximum number of parts in the path of a value that is nested too deeply. Seven are enough for a field of the head's
pod."""
JobKey = tuple[str, str]
"""(namespace, name) of a job."""
K = TypeVar("K")
V = TypeVar("V")
_Parsed = tuple[DataLoaderJob, tuple[Problem, ...]]


class Cache:
    """The live objects, by the job to which each belongs."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._jobs: dict[JobKey, Manifest] = {}
        self._children: defaultdict[JobKey, dict[Key, Manifest]] = defaultdict(dict)
        self._written: dict[str, tuple[int, float]] = {}
        """The version of each object just written, by uid, and the time until which older versions are dropped."""
        self._gone = _Last[str, None](GONE)
        """Uids of objects that were removed."""
        self._replaced = _Last[str, None](GONE)
        """Uids of objects that another object of the same name has replaced. kopf may report an old object after its
        successor."""
        self._parsed = _Last[JobKey, tuple[Manifest, _Parsed]](RECENT)
        """Parsed jobs, each with the manifest from which it was parsed."""

    def __len__(self) -> int:
        return len(self._jobs)

    def put(self, thing: Manifest) -> JobKey | None:
        """Stores a new or changed object. Returns the job that it concerns; None if nothing is new."""
        owner = owner_of(thing)
        if owner is None or self._outdated(thing) or self._known(owner, thing):
            return None
        uid, live = thing["metadata"].get("uid", ""), self._live(owner, thing)
        if uid in self._replaced:
            return None
        if live is not None and (old := live["metadata"].get("uid", "")) != uid:
            self._replaced.add(old, None)
        if thing["kind"] == KIND:
            self._jobs[owner] = transform(thing)
        else:
            self._children[owner][thing["kind"], thing["metadata"]["name"]] = transform(thing)
        return owner

    def put_written(self, thing: Manifest) -> None:
        """Stores the API server's response to a write by the operator, before any watch reports the object."""
        uid, version = thing["metadata"].get("uid", ""), _version(thing)
        owner = owner_of(thing)
        if owner is None or version is None or uid in self._gone:
            return
        live = self._live(owner, thing)
        if live is not None and live["metadata"].get("uid") == uid and (_version(live) or 0) > version:
            return  # a watch was faster
        if self.put(thing) is not None and uid:
            self._written[uid] = version, self._clock() + WRITE_WINS_S

    def remove(self, thing: Manifest) -> JobKey | None:
        """Drops an object that is gone. Returns the job that it concerned."""
        owner, uid = owner_of(thing), thing["metadata"].get("uid")
        if owner is None:
            return None
        if uid is not None:
            self._written.pop(uid, None)
            self._gone.add(uid, None)
        live = self._live(owner, thing)
        if live is None or live["metadata"].get("uid") != uid:
            return owner
        if thing["kind"] == KIND:
            del self._jobs[owner]
        else:
            del self._children[owner][thing["kind"], thing["metadata"]["name"]]
        if owner not in self._jobs and not self._children.get(owner):
            self._children.pop(owner, None)
        return owner

    def _outdated(self, thing: Manifest) -> bool:
        """Checks whether the operator has written a newer version. A restore of etcd from a backup lowers the versions,
        so a write counts only for WRITE_WINS_S."""
        uid = thing["metadata"].get("uid", "")
        version, until = self._written.get(uid, (None, 0.0))
        received = _version(thing)
        if version is not None and received is not None and received < version and self._clock() < until:
            return True
        if version is not None and received is not None and received > version:
            del self._written[uid]
        return False

    def _known(self, owner: JobKey, thing: Manifest) -> bool:
        """Checks whether the cache has exactly this version of an object."""
        live, new = self._live(owner, thing), thing["metadata"]
        if live is None or new.get("resourceVersion") is None:
            return False
        return all(live["metadata"].get(field) == new.get(field) for field in ("uid", "resourceVersion"))

    def _live(self, owner: JobKey, thing: Manifest) -> Manifest | None:
        """Returns the cached object of the same kind and name."""
        if thing["kind"] == KIND:
            return self._jobs.get(owner)
        return self.child(owner, (thing["kind"], thing["metadata"]["name"]))

    def all_of(self, kind: str) -> list[Manifest]:
        """Returns all objects of a kind."""
        if kind == KIND:
            return list(self._jobs.values())
        return [c for mine in self._children.values() for (k, _), c in mine.items() if k == kind]

    def has_name(self, thing: Manifest) -> bool:
        """Checks whether the cache has an object of this kind and name."""
        owner = owner_of(thing)
        return owner is not None and self._live(owner, thing) is not None

    def has(self, thing: Manifest) -> bool:
        """Checks whether the cache has this exact object, not another one of the same name."""
        owner = owner_of(thing)
        live = None if owner is None else self._live(owner, thing)
        return live is not None and live["metadata"].get("uid") == thing["metadata"].get("uid")

    def phases(self) -> Counter[str]:
        """Counts the jobs in each phase."""
        return Counter(
            str((job.get("status") or {}).get("phase") or Phase.PENDING) for job in self._jobs.values()
        )

    def loaders(self) -> Iterator[tuple[JobKey, Mapping[str, Any]]]:
        """Yields the loader's part of each job's last written status."""
        for key, job in self._jobs.items():
            loader = (job.get("status") or {}).get("loader")
            if isinstance(loader, Mapping):
                yield key, loader

    def job(self, owner: JobKey) -> Manifest | None:
        return self._jobs.get(owner)

    def version(self, owner: JobKey) -> str:
        """Returns the job's resourceVersion; empty if it is unknown."""
        return str(self._jobs.get(owner, {}).get("metadata", {}).get("resourceVersion", ""))

    def child(self, owner: JobKey, key: Key) -> Manifest | None:
        return self._children.get(owner, {}).get(key)

    def uid(self, owner: JobKey) -> str | None:
        """Returns the job's uid; None if it is gone or being deleted."""
        metadata = self._jobs.get(owner, {}).get("metadata", {})
        return None if metadata.get("deletionTimestamp") else metadata.get("uid")

    def of_role(self, owner: JobKey, role: Role) -> list[Manifest]:
        """Returns this job's pods of a role, including those being deleted."""
        return [
            child
            for (kind, _), child in self._children.get(owner, {}).items()
            if kind == "Pod" and role_of(child) == role and self._is_child(owner, child)
        ]

    def live_status(self, owner: JobKey) -> Mapping[str, Any]:
        return dict(self._jobs.get(owner, {}).get("status") or {})

    def status(self, owner: JobKey) -> DataLoaderJobStatus:
        return _status(self.live_status(owner))

    def managed_by(self, owner: JobKey) -> str | None:
        """Returns the controller that the job names, even if the rest of the job is invalid."""
        named = (self._jobs.get(owner, {}).get("spec") or {}).get("managedBy")
        return None if named is None else str(named)

    def about(self, owner: JobKey) -> Metadata:
        """Returns the name, namespace and uid of a job, even if the job cannot be parsed."""
        return Metadata.model_construct(name=owner[1], namespace=owner[0], uid=self.uid(owner))

    def generation(self, owner: JobKey) -> int:
        """Returns the job's generation; 0 if it is unknown."""
        return int(self._jobs.get(owner, {}).get("metadata", {}).get("generation") or 0)

    def observed(self, owner: JobKey) -> Observed | None:
        """Returns the observed state of a job for a reconcile; None if the job is gone or being deleted. Raises
        ManifestError if the models refuse the job."""
        thing = self._jobs.get(owner)
        if thing is None or thing["metadata"].get("deletionTimestamp"):
            return None
        mine = {k: c for k, c in self._children.get(owner, {}).items() if self._is_child(owner, c)}
        job, doubts = self._read(owner, thing)
        return Observed(
            job=job,
            doubts=tuple(str(doubt) for doubt in doubts),
            status=_status(thing.get("status")),
            children={k: c for k, c in mine.items() if k[0] != "Pod"},
            pods=tuple(c for k, c in sorted(mine.items()) if k[0] == "Pod"),
        )

    def _read(self, owner: JobKey, thing: Manifest) -> _Parsed:
        """Parses a job. Returns the same object until more than the job's status changes. Raises ManifestError."""
        metadata = {name: value for name, value in thing["metadata"].items() if name != "resourceVersion"}
        asked = {name: value for name, value in thing.items() if name != "status"} | {"metadata": metadata}
        known, parsed = self._parsed.get(owner, (None, None))
        if parsed is None or known != asked:
            spec = thing.get("spec")
            content = asked | ({"spec": spec.read()} if isinstance(spec, Packed) else {})
            _check_levels(content.get("spec"))
            parsed = parse_live(content)
        self._parsed.add(owner, (asked, parsed))
        return parsed

    def _is_child(self, owner: JobKey, child: Manifest) -> bool:
        """Checks whether an object with the job's label belongs to this job. The label is no proof: anyone may copy a
        pod with its label, and an earlier job of the same name had the same label."""
        uid = self._jobs.get(owner, {}).get("metadata", {}).get("uid")
        if child["kind"] != "Pod":
            return _owned_by(child, uid)
        if _made(child) < _made(self._jobs.get(owner, {"metadata": {}})):
            return False
        owners = child["metadata"].get("ownerReferences") or ()
        by: Mapping[str, Any] = next((reference for reference in owners if reference.get("controller")), {})
        kind, (stem, _, _) = by.get("kind"), str(by.get("name")).rpartition("-")
        if kind == "ReplicaSet":
            return stem in (head(owner[1]), feeders(owner[1]))
        if kind != "Job" or stem != trainers_stem(owner[1]):
            return False
        job = self.child(owner, ("Job", by["name"]))
        return job is None or (job["metadata"].get("uid") == by.get("uid") and _owned_by(job, uid))


class _Last(dict[K, V]):
    """A dict that keeps the last `most` added items."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self._most = most

    def add(self, key: K, value: V) -> None:
        self.pop(key, None)
        self[key] = value
        if len(self) > self._most:
            del self[next(iter(self))]


def owner_of(thing: Manifest) -> JobKey | None:
    """Returns the key of a job, or of the job that an object's label names; None if the object has no such label."""
    metadata = thing["metadata"]
    name = metadata["name"] if thing["kind"] == KIND else metadata.get("labels", {}).get(LABEL_JOB)
    return None if name is None else (metadata.get("namespace", ""), name)


def _version(thing: Manifest) -> int | None:
    """Returns an object's version; None if it has none. The versions of an object increase (documented since Kubernetes
    1.35)."""
    try:
        return int(thing["metadata"]["resourceVersion"])
    except (KeyError, ValueError):
        return None


def _owned_by(child: Manifest, uid: str | None) -> bool:
    owners = child["metadata"].get("ownerReferences") or ()
    return any(owner.get("uid") == uid for owner in owners)


def _made(thing: Manifest) -> str:
    """Returns the creation time as Kubernetes formats it. Sorting these texts sorts the times."""
    return str(thing["metadata"].get("creationTimestamp") or "")


def _check_levels(spec: Any) -> None:
    """Raises ManifestError if a spec has more than MAX_LEVELS levels."""
    level: list[tuple[Path, Any]] = [((), {"spec": spec})]
    for _ in range(MAX_LEVELS):
        level = [
            (path if len(path) == NAMED_PARTS else (*path, key), inner)
            for path, value in level
            for key, inner in (value.items() if isinstance(value, dict) else enumerate(value))
            if isinstance(inner, dict | list)
        ]
        if not level:
            return
    problem = Problem(path=spell(level[0][0]), found=f"more than {MAX_LEVELS} levels", use="fewer")
    raise ManifestError("object", [problem])


def _status(found: Any) -> DataLoaderJobStatus:
    """Parses a status. Omits unreadable parts, such as fields written by a newer operator. The number of attempts and
    the end of a job are thus kept."""
    left = copy.deepcopy(found or {})
    for _ in range(MAX_UNREADABLE):
        try:
            return DataLoaderJobStatus.model_validate(left)
        except ValidationError as exc:
            _leave_out(left, exc.errors(include_url=False)[0]["loc"])
    return DataLoaderJobStatus()


def _leave_out(thing: Any, place: Sequence[str | int]) -> None:
    """Removes the value at a path. If there is no such value, removes the value that should contain it."""
    inside = thing
    for depth, step in enumerate(place[:-1]):
        try:
            inside = inside[step]
        except (KeyError, IndexError, TypeError):
            return _leave_out(thing, place[:depth])
    try:
        del inside[place[-1]]
    except (KeyError, IndexError, TypeError):
        if len(place) > 1:
            _leave_out(thing, place[:-1])
    return None
