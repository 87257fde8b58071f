"""The parts of a job that pods keep from their start, even if the spec or the operator changes: the pods' settings, a
template built by another version of the operator, the sidecar image of a job's trainers, and the image of a serving
head. Pure.

Settings are stored in ConfigMaps that never change (`objects.settings`). A ConfigMap is created when a workload needs
it, and deleted when no workload needs it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

from dataloaderjob.api import DataLoaderJob
from dataloaderjob.api.ray import OF_HEAD
from dataloaderjob_operator import names
from dataloaderjob_operator.decide.observed import Key, Observed, key_of, role_of
from dataloaderjob_operator.kinds import Manifest, keep_template
from dataloaderjob_operator.objects import OperatorConfig
from dataloaderjob_operator.objects.pods import image, map_of, secret_of
from dataloaderjob_operator.objects.settings import COUNT_FILE, count, with_root_of

MAP = "ConfigMap"


def first_setup(observed: Observed, setup: OperatorConfig) -> OperatorConfig:
    """Returns the operator's settings with the sidecar image of the trainers' first attempt. That image matches the
    library in the trainers' image, so it is kept until the trainers' image changes. Live pods also keep their root
    key."""
    job = observed.job
    live = with_keys(job.name, lambda key: observed.children.get(key))
    setup = with_root_of(setup, job.name, job.metadata.uid or "", live)
    known = observed.status.trainers
    if known.sidecar_image and known.image == trainer_image(observed.job):
        return replace(setup, sidecar_image=known.sidecar_image)
    return setup


def with_keys(job: str, child: Callable[[Key], Manifest | None]) -> str | None:
    """Returns the name of the Secret with the keys of a job's live pods; None if it has no such pods. If the head
    exists, its Secret is returned, because the other pods authenticate to it."""
    workload = child(("Deployment", names.head(job))) or child(("Deployment", names.feeders(job))) or {}
    return secret_of(workload.get("spec", {}).get("template") or {})


def trainer_image(job: DataLoaderJob) -> str:
    """Returns the image that the sidecar's image must match: the trainers' own, or the feeders' if trainers are
    attached."""
    return image(job) if job.spec.trainers.attached else job.spec.trainers.own.container.image or ""


def settled(observed: Observed, built: Iterable[Manifest]) -> list[Manifest]:
    """Adjusts built children. Pods that stay keep their templates, and settings that no pod reads are omitted."""
    kept = [_kept(observed, child) for child in built]
    read = {_map_name(observed.children.get(key, child)) if key[0] == "Job" else _map_name(child)
            for child in kept if (key := key_of(child))[0] in ("Deployment", "Job")}  # fmt: skip
    read.add(names.attachment(observed.job.name))  # read by pods of other controllers
    made = [child for child in kept if child["kind"] != MAP or child["metadata"]["name"] in read]
    return [*made, *_recounted(observed, made)]


def in_use(observed: Observed) -> set[Key]:
    """Returns the settings that are still read, by live workloads or by pods that a rollout has not replaced yet."""
    found = set()
    for (kind, _), child in observed.children.items():
        if (name := _map_name(child)) is not None:
            found.add((MAP, name))
        if kind == "Deployment" and _rolls(child):
            found |= {
                key
                for key, other in observed.children.items()
                if key[0] == MAP and role_of(other) == role_of(child)
            }
    return found


def _kept(observed: Observed, child: Manifest) -> Manifest:
    """Returns a workload with its live template if its pods stay. If someone deleted that template's settings, the
    workload gets the new template: otherwise, new pods would wait for settings that cannot be recreated."""
    live = observed.children.get(key_of(child))
    if live is None or child["kind"] != "Deployment":
        return child
    kept = _with_own_image(keep_template(child, live), live)
    name = _map_name(kept)
    return kept if name is None or (MAP, name) in observed.children else child


def _with_own_image(child: Manifest, live: Manifest) -> Manifest:
    """Keeps the image of a serving head, because feeders do not survive a replacement of their head. At first, only new
    feeders use a new image. Any other change by the user replaces the head, which then gets the new image."""
    wanted, theirs = (thing.get("spec", {}).get("template") or {} for thing in (child, live))
    if role_of(child) != names.Role.HEAD or not live.get("status", {}).get("readyReplicas"):
        return child
    if not theirs or _asked(wanted) != _asked(theirs):
        return child
    image = next((c["image"] for c in theirs["spec"]["containers"] if c["name"] == names.Role.HEAD), None)
    if image is None:
        return child
    containers = [
        {**container, "image": image} if container["name"] in OF_HEAD else container
        for container in wanted["spec"]["containers"]
    ]
    template = {**wanted, "spec": {**wanted["spec"], "containers": containers}}
    return {**child, "spec": {**child["spec"], "template": template}}


def _asked(template: Manifest) -> object:
    """Returns the hash of the user's part of a template."""
    return (template["metadata"].get("annotations") or {}).get(names.ANNOTATION_TEMPLATE)


def _recounted(observed: Observed, made: Iterable[Manifest]) -> list[Manifest]:
    """Returns the settings of a head that stays, with the current number of feeders."""
    known = {key_of(child) for child in made}
    for child in made:
        if key_of(child) != ("Deployment", names.head(observed.job.name)):
            continue
        name = _map_name(child) or ""
        live = observed.children.get((MAP, name), {})
        if (MAP, name) in known or COUNT_FILE not in live.get("data", {}):
            continue
        metadata = names.metadata(observed.job, name, names.Role.HEAD)
        data = {**live["data"], COUNT_FILE: count(observed.job)}
        return [{"apiVersion": "v1", "kind": MAP, "metadata": metadata, "data": data}]
    return []


def _rolls(deployment: Manifest) -> bool:
    """Returns True if a Deployment may still have pods of an earlier template."""
    status = deployment.get("status", {})
    seen = int(status.get("observedGeneration") or 0) >= int(deployment["metadata"].get("generation") or 0)
    return not seen or int(status.get("updatedReplicas") or 0) < int(status.get("replicas") or 0)


def _map_name(workload: Manifest) -> str | None:
    return map_of(workload.get("spec", {}).get("template") or {})
