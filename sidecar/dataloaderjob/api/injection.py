"""Injection of the parts that another controller's pod needs to get batches from a job with `spec.trainers.attach`.

`inject` is the only renderer. The webhook, `dataloaderjob inject` and the chart's runtime use it, and tests check that
the chart's admission policy produces the same result. `inject` adds the sidecar, its volumes, and the mount and
environment variables of the container that trains. Ranks, commands and security contexts remain those of the pod. Pure.
"""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dataloaderjob.api.base import Quantity
from dataloaderjob.api.job import GROUP, DataLoaderJob
from dataloaderjob.api.plain import Object, same_amounts
from dataloaderjob.api.sidecar import (
    KEY_VOLUME,
    METRICS_PORT,
    RUN,
    RUN_FOLDER,
    RUN_VOLUME,
    SETTINGS_VOLUME,
    SIDECAR,
    SOCKET,
    USER,
    SidecarPlan,
    key_volume,
    scratch_volume,
    sidecar_container,
    sidecar_plan,
)
from dataloaderjob.core.errors import InputError
from dataloaderjob.core.generations import GENERATIONS
from dataloaderjob.core.keys import Part
from dataloaderjob.core.places import (
    ALLOW_PICKLE_VARIABLE,
    FEEDERS_VARIABLE,
    PREFETCH_VARIABLE,
    SOCKET_VARIABLE,
)

LABEL = f"{GROUP}/inject"
"""Label whose value is a job's name. A pod of any controller that carries it in the job's namespace gets a sidecar and
the job's batches. The label is part of the contract with users and with admission policies."""
ANNOTATION = f"{GROUP}/injected"
"""Annotation with the digest of a pod's injection. The digest reveals an injection that is out of date."""
VOLUMES = (KEY_VOLUME, SETTINGS_VOLUME, RUN_VOLUME)
VARIABLES = (FEEDERS_VARIABLE, PREFETCH_VARIABLE, ALLOW_PICKLE_VARIABLE, SOCKET_VARIABLE)
"""Environment variables of the container that trains. The last one marks the end of the injected variables. It
distinguishes them from variables of the same names that the user has set."""
KEY_MODE = 0o444
"""Mode of the key file. Only the sidecar mounts the file. All users may read it, because without an fsGroup in the pod,
the file has no group that the sidecar shares."""
DEVICE_FREE = ("kubernetes.io", "k8s.io")
"""Domains of resources that are not accelerators, such as attachable volumes."""
NAMED_DEVICES = (
    "amd.com/gpu",
    "aws.amazon.com/neuron",
    "google.com/tpu",
    "habana.ai/gaudi",
    "nvidia.com/gpu",
)
"""Examples of accelerators, for messages. Any resource with a vendor's domain counts as one."""


class CannotInject(InputError):
    """A pod cannot get its batches from the job; the message states what to change in the pod."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Injection:
    """The parts to inject into the pods of one job, except those that depend on the pod."""

    job: str
    container: str | None
    """Name of the container that trains; None to find it in each pod (`trainer_of`)."""
    sidecar: SidecarPlan
    volumes: Sequence[Object]
    env: Mapping[str, str]
    pull_secrets: Sequence[str] = ()
    """Pull secrets of the sidecar's image."""

    @property
    def digest(self) -> str:
        text = json.dumps(dataclasses.asdict(self), sort_keys=True, separators=(",", ":"))
        return f"v1-{hashlib.sha256(text.encode()).hexdigest()[:12]}"  # no YAML reader takes it for a number


def attachment(job: str) -> str:
    """Returns the name of two objects for sidecars in attached pods: the Secret with their key, and the ConfigMap with
    their settings.

    The name depends only on the job's name, because `dataloaderjob inject` works without a cluster, and an admission
    policy cannot compute digests. The name must not change, because everything that injects a sidecar relies on it. An
    earlier job of the same name had a Secret of this name. Kubernetes deletes that Secret with its job, and the
    operator then creates the new one. A sidecar rereads its key when the supervisor rejects it.
    """
    return f"{job}-attach"


def attached_certificates(job: DataLoaderJob) -> list[str]:
    """Returns the names of the Secrets with the certificates of sidecars in attached pods, one for each generation.
    Returns none unless the job uses TLS."""
    count = GENERATIONS if job.spec.loader.tls else 0
    return [f"{attachment(job.name)}-tls-{generation}" for generation in range(count)]


def injection(job: DataLoaderJob, *, image: str, pull_secrets: Sequence[str] = ()) -> Injection:
    """Builds the injection for a job's pods. The sidecar uses `image` and `pull_secrets` if the manifest names no
    image.

    Raises CannotInject if the job creates its own trainers.
    """
    attach = job.spec.trainers.attach
    if attach is None:
        raise CannotInject(
            f"DataLoaderJob {job.name} creates its own trainers (spec.trainers.job): use spec.trainers.attach for pods "
            "of other controllers"
        )
    name = attachment(job.name)
    return Injection(
        job=job.name,
        container=attach.container,
        sidecar=sidecar_plan(
            job.spec, image=image, metrics_port=job.spec.sidecar.metrics_port or METRICS_PORT,
            processes=attach.processes_per_pod,
        ),
        volumes=(
            key_volume(name, KEY_MODE, Part.SIDECAR, certificates=attached_certificates(job)),
            {"name": SETTINGS_VOLUME, "configMap": {"name": name}},
            scratch_volume(RUN_VOLUME, job.spec.sidecar.scratch),
        ),
        env={**job.spec.loader_environment(), SOCKET_VARIABLE: SOCKET},
        pull_secrets=() if job.spec.sidecar.image else tuple(pull_secrets),
    )  # fmt: skip


def inject(pod: Mapping[str, Any], wanted: Injection) -> dict[str, Any]:
    """Returns a copy of a pod or pod template, with everything that attaches it to the job. An older injection is
    replaced. A pod that already has everything stays the same. Raises CannotInject."""
    made = copy.deepcopy(dict(pod))
    if is_current(made, wanted):
        return made
    if was_injected(made):
        remove(made)
    spec = _spec(made)
    trainer = trainer_of(spec, wanted.container)
    _check(spec, trainer, wanted.sidecar.metrics_port)
    sidecar = sidecar_container(wanted.sidecar, spec)
    metadata = made.get("metadata") or {}
    annotations = {**(metadata.get("annotations") or {}), ANNOTATION: wanted.digest}
    made["metadata"] = {**metadata, "annotations": annotations}
    spec["initContainers"] = [sidecar, *(spec.get("initContainers") or ())]
    spec["volumes"] = [*(spec.get("volumes") or ()), *(copy.deepcopy(dict(v)) for v in wanted.volumes)]
    trainer["volumeMounts"] = [*(trainer.get("volumeMounts") or ()), dict(RUN)]
    theirs = [v for v in trainer.get("env") or () if v.get("name") != SOCKET_VARIABLE]
    named = {variable.get("name") for variable in theirs}
    ours = [variable for variable in _environment(wanted.env) if variable["name"] not in named]
    trainer["env"] = [*ours, *theirs]
    if missing := [name for name in wanted.pull_secrets if {"name": name} not in _pull_secrets(spec)]:
        spec["imagePullSecrets"] = [*_pull_secrets(spec), *({"name": name} for name in missing)]
    return made


def for_policy(wanted: Injection) -> dict[str, Any]:
    """Returns the injection in the form that the chart's admission policy reads from `status.injection`. The policy
    chooses the container, and applies the two fields that depend on the pod."""
    amounts = {"limits": {"cpu": "1", "memory": "1"}}
    guaranteed = sidecar_container(wanted.sidecar, {"containers": [{"resources": amounts}]})
    return {
        "digest": wanted.digest,
        **({} if wanted.container is None else {"container": wanted.container}),
        "sidecar": sidecar_container(wanted.sidecar, {"containers": [{}]}),
        "guaranteed": guaranteed["resources"],
        "user": USER,
        "volumes": [dict(volume) for volume in wanted.volumes],
        "env": _environment(wanted.env),
        "pullSecrets": [{"name": name} for name in wanted.pull_secrets],
    }


def _environment(variables: Mapping[str, str]) -> list[dict[str, str]]:
    return [{"name": name, "value": value} for name, value in variables.items()]


def is_current(pod: Object, wanted: Injection) -> bool:
    """Checks whether a pod has this injection in full. Accepts additions to the injected parts, and a different
    image."""
    spec, annotations = _spec(pod), (pod.get("metadata") or {}).get("annotations") or {}
    found = [c for c in spec.get("initContainers") or () if c.get("name") == SIDECAR]
    if annotations.get(ANNOTATION) != wanted.digest or len(found) != 1:
        return False
    volumes = {volume.get("name") for volume in spec.get("volumes") or ()}
    mounting = [c for c in spec["containers"] if _mounts(c) & {RUN_VOLUME}]
    without = copy.deepcopy(dict(pod))
    remove(without)
    try:
        trainer = trainer_of(_spec(without), wanted.container)
    except CannotInject:
        return False
    asked = sidecar_container(wanted.sidecar, _spec(without))["resources"]
    held = found[0].get("resources") or {}
    return (
        found[0].get("restartPolicy") == "Always"
        and all(same_amounts(held.get(kind) or {}, amounts) for kind, amounts in asked.items())
        and volumes >= set(VOLUMES)
        and _mounts(found[0]) >= set(VOLUMES)
        and [c.get("name") for c in mounting] == [trainer.get("name")]
        and _variables(mounting[0]) >= set(wanted.env)
    )


def was_injected(pod: Object) -> bool:
    """Checks whether a pod has the parts of an injection. Otherwise, parts of the same names are the user's. Some
    controllers drop the annotation."""
    spec, annotations = _spec(pod), (pod.get("metadata") or {}).get("annotations") or {}
    sidecars = [c for c in spec.get("initContainers") or () if c.get("name") == SIDECAR]
    return ANNOTATION in annotations or any(RUN_VOLUME in _mounts(container) for container in sidecars)


def remove(pod: dict[str, Any]) -> None:
    """Removes an injection and keeps everything else."""
    spec = _spec(pod)
    has_sidecar = any(c.get("name") == SIDECAR for c in spec.get("initContainers") or ())
    spec_lists = {
        "initContainers": lambda c: c.get("name") != SIDECAR,
        "volumes": lambda v: v.get("name") not in VOLUMES,
    }
    for field, keep in spec_lists.items():
        _filter(spec, field, keep)
    annotations = (pod.get("metadata") or {}).get("annotations") or {}
    if annotations.pop(ANNOTATION, None) is not None and not annotations:
        del pod["metadata"]["annotations"]
    for container in spec["containers"]:
        _filter(container, "volumeMounts", lambda mount: mount.get("name") not in VOLUMES)
        if names := [variable.get("name") for variable in container.get("env") or ()]:
            ours = _injected_variables(names) if has_sidecar else 0
            kept = [v for v in container["env"][ours:] if v.get("name") != SOCKET_VARIABLE]
            _replace(container, "env", kept)


def _injected_variables(names: Sequence[Any]) -> int:
    """Counts the injected variables, which come first in the list."""
    if SOCKET_VARIABLE not in names:
        return 0
    end = names.index(SOCKET_VARIABLE) + 1
    return end if set(names[:end]) <= set(VARIABLES) else 0


def _filter(owner: dict[str, Any], field: str, keep: Any) -> None:
    if owner.get(field):
        _replace(owner, field, [item for item in owner[field] if keep(item)])


def _replace(owner: dict[str, Any], field: str, items: list[Any]) -> None:
    """Sets a field to a list, or drops the field if the list is empty."""
    if items:
        owner[field] = items
    elif owner[field]:
        del owner[field]


def trainer_of(spec: Object, name: str | None) -> dict[str, Any]:
    """Returns the container that trains: the named one, else the only one, else the only one that requests an
    accelerator. Raises CannotInject."""
    containers: list[dict[str, Any]] = spec["containers"]
    if any(container.get("name") == SIDECAR for container in containers):
        raise CannotInject(
            f"the pod has a container named {SIDECAR}, but the sidecar is an init container: remove it "
            "from spec.containers"
        )
    if name is not None:
        for container in containers:
            if container.get("name") == name:
                return container
        raise CannotInject(
            f"spec.trainers.attach.container is {name}, but the pod's containers are {_names(containers)}: "
            "name one of them"
        )
    if len(containers) == 1:
        return containers[0]
    with_device = [container for container in containers if list(_devices(container))]
    if len(with_device) == 1:
        return with_device[0]
    some = f"{_names(with_device)} request an accelerator" if with_device else (
        f"none requests an accelerator such as {NAMED_DEVICES[-1]}"
    )  # fmt: skip
    raise CannotInject(
        f"the pod has the containers {_names(containers)}, and {some}: set spec.trainers.attach.container to the name "
        "of the one that trains"
    )


def _devices(container: Object) -> Iterator[str]:
    """Yields the accelerators that a container requests."""
    asked = container.get("resources") or {}
    amounts = [*(asked.get("requests") or {}).items(), *(asked.get("limits") or {}).items()]
    for name in {name: None for name, amount in amounts if not _is_zero(amount)}:
        domain, slash, _ = str(name).rpartition("/")
        if slash and not any(domain == free or domain.endswith(f".{free}") for free in DEVICE_FREE):
            yield name


def _is_zero(amount: Any) -> bool:
    try:
        return Quantity(str(amount or 0)) == Quantity("0")
    except ValueError:  # a placeholder of a template
        return False


def _check(spec: Object, trainer: Object, metrics_port: int) -> None:
    """Raises CannotInject if the pod's own settings conflict with an injected part."""
    own = [v["name"] for v in spec.get("volumes") or () if v.get("name") in VOLUMES]
    own += [c["name"] for c in spec.get("initContainers") or () if c.get("name") == SIDECAR]
    if own:
        raise CannotInject(
            f"the pod already has its own {own[0]}, a name that is reserved for the sidecar: rename it in the pod"
        )
    for mount in trainer.get("volumeMounts") or ():
        if str(mount.get("mountPath")).rstrip("/") == RUN_FOLDER:
            raise CannotInject(
                f"the container {trainer.get('name')} mounts {mount.get('name')} at {RUN_FOLDER}, which is "
                "reserved for the sidecar: mount it elsewhere"
            )
    dns = spec.get("dnsPolicy") or "ClusterFirst"
    if spec.get("hostNetwork") and dns == "ClusterFirst":
        raise CannotInject(
            "the pod has hostNetwork and therefore uses the node's DNS, which does not know the job's "
            "Services: set dnsPolicy to ClusterFirstWithHostNet"
        )
    if dns == "Default":
        raise CannotInject(
            "the pod has dnsPolicy Default and therefore uses the node's DNS, which does not know the job's "
            "Services: set dnsPolicy to ClusterFirst, or to ClusterFirstWithHostNet with hostNetwork"
        )
    if (spec.get("os") or {}).get("name") == "windows":
        raise CannotInject("the pod runs on Windows, but the sidecar runs on Linux: use Linux nodes")
    beside = (c for c in spec.get("initContainers") or () if c.get("restartPolicy") == "Always")
    for container in (*spec["containers"], *beside):
        ports = [port for port in container.get("ports") or () if port.get("protocol") in (None, "TCP")]
        if any(port.get("containerPort") == metrics_port for port in ports):
            raise CannotInject(
                f"the container {container.get('name')} has the port {metrics_port}, where the sidecar serves its "
                "metrics: set spec.sidecar.metricsPort of the DataLoaderJob to another port"
            )


def _spec(pod: Object) -> dict[str, Any]:
    """Returns the pod's spec. Raises CannotInject if one of the parts used here has the wrong type."""
    spec = pod.get("spec")
    if not isinstance(spec, dict) or not spec.get("containers"):
        raise CannotInject("the pod has no spec.containers: give it the container that trains")
    _check_mappings("the pod", pod, ("metadata",))
    _check_mappings("the pod's metadata", pod.get("metadata") or {}, ("annotations", "labels"))
    _check_mappings("spec", spec, ("securityContext", "os"))
    _check_lists("spec", spec, ("containers", "initContainers", "volumes", "imagePullSecrets"))
    for container in (*spec["containers"], *(spec.get("initContainers") or ())):
        owner = f"the container {container.get('name')}"
        _check_lists(owner, container, ("env", "volumeMounts", "ports"))
        _check_mappings(owner, container, ("resources",))
        _check_amounts(owner, container.get("resources") or {})
    return spec


def _check_mappings(owner: str, thing: Object, fields: Sequence[str]) -> None:
    for field in fields:
        if thing.get(field) is not None and not isinstance(thing[field], dict):
            raise CannotInject(f"{field} of {owner} must be a mapping: write it as Kubernetes expects it")


def _check_amounts(owner: str, resources: Object) -> None:
    """Checks the amounts on which the sidecar's own amounts depend. A template may have placeholders in others."""
    _check_mappings(f"the resources of {owner}", resources, ("requests", "limits"))
    limits = resources.get("limits") or {}
    for field, amounts in (("limits", limits), ("requests", resources.get("requests") or {})):
        for name in ("cpu", "memory"):
            if limits.get(name) is None or amounts.get(name) is None:
                continue
            try:
                Quantity(str(amounts[name]))
            except ValueError as exc:
                raise CannotInject(f"{field}.{name} of {owner}: {exc}") from exc


def _check_lists(owner: str, thing: Object, fields: Sequence[str]) -> None:
    for field in fields:
        found = thing.get(field)
        if found is not None and not (
            isinstance(found, list) and all(isinstance(item, dict) for item in found)
        ):
            raise CannotInject(
                f"{field} of {owner} must be a list of mappings: write it as Kubernetes expects it"
            )
        if any(not isinstance(item.get("name") or "", str) for item in found or ()):
            raise CannotInject(f"each name in {field} of {owner} must be a string: put it in quotes")


def _mounts(container: Object) -> set[Any]:
    return {mount.get("name") for mount in container.get("volumeMounts") or ()}


def _variables(container: Object) -> set[Any]:
    return {variable.get("name") for variable in container.get("env") or ()}


def _pull_secrets(spec: Object) -> list[Any]:
    return list(spec.get("imagePullSecrets") or ())


def _names(containers: Sequence[Object]) -> str:
    return ", ".join(str(container.get("name")) for container in containers)
