"""Templates of pods, of trainers, feeders and head alike. Pure.

What this package reads of them is typed; the rest is Kubernetes' and is handed on.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar

from pydantic import AfterValidator, Field
from pydantic.config import JsonDict

from dataloaderjob.api.base import (
    BY_NAME,
    Bytes,
    ContainerResources,
    Flag,
    Free,
    Model,
    OpenModel,
    Rule,
    Use,
    Whole,
    in_quotes,
    nested,
    unique_names,
)

RESERVED_PREFIX = "dataloaderjob-"
"""Beginning of the names that belong to what the operator adds to a pod."""
Name = Annotated[
    str,
    Field(min_length=1, max_length=63, pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$"),
    Use("lower-case letters, digits and hyphens, at most 63"),
]
Image = Annotated[
    str, Field(min_length=1, max_length=512, pattern=r"^\S+$"), Use("an image's name, no spaces")
]
Port = Annotated[Whole, Field(ge=1, le=65_535)]
Words = Annotated[
    tuple[Annotated[str, Field(max_length=131072)], ...],
    Field(max_length=1024),
    Use('a list of strings such as ["python", "train.py"]'),
]


class EnvVar(Model):
    """A variable of a container's environment."""

    name: Annotated[
        str, Field(min_length=1, max_length=256, pattern=r"^[^=\s]+$"), Use("a name without = or spaces")
    ]
    """Name of the variable."""
    value: Annotated[
        str | None, Field(max_length=131072), Use("a string (numbers and true or false in quotes)")
    ] = None
    """Its value. Kubernetes expands `$(OTHER)`."""
    value_from: Free | None = None
    """Where the cluster finds the value (Secret, ConfigMap, field of the pod). Ignored on one machine."""

    RULES: ClassVar[tuple[Rule, ...]] = (
        Rule(
            field="valueFrom",
            use="one of the two",
            cel="!has(self.value) || size(self.value) == 0 || !has(self.valueFrom)",
            found="'both value and valueFrom'",
        ),
    )


Env = Annotated[
    tuple[EnvVar, ...], Field(max_length=256, json_schema_extra=BY_NAME), AfterValidator(unique_names)
]


LEFT_OUT: JsonDict = {"x-left-out": True}
"""Takes a field out of the CRD, which is large: the models alone check it, and the job's status says what they find."""


class VolumeMount(OpenModel):
    """Where a volume of `volumes` is. All other fields of Kubernetes' VolumeMount pass through."""

    name: Name
    """Name of the volume."""
    mount_path: Annotated[str, Field(min_length=1, max_length=4096)]
    """Folder that it is."""


VolumeMounts = Annotated[tuple[VolumeMount, ...], Field(max_length=64)]
EnvFrom = Annotated[tuple[Free, ...], Field(max_length=64)]


def _left_to_kubernetes(schema: JsonDict) -> None:
    """Takes a field's type out of the CRD, which is large: the API server checks it as part of a pod."""
    schema.pop("$ref", None)
    schema.update(type="object", additionalProperties=True)


class Container(OpenModel):
    """A container of a pod template. All other fields of Kubernetes' Container pass through."""

    name: Name
    """Name of the container."""
    image: Image | None = None
    """Its image. Ignored on one machine."""
    command: Words = ()
    """Program and first arguments; replaces the image's entrypoint. One machine has no image, and needs it."""
    args: Words = ()
    """Further arguments, behind `command`."""
    env: Env = ()
    """Its environment. User code in feeders sees it too, less what belongs to one process or machine."""
    resources: ContainerResources | None = Field(default=None, json_schema_extra=_left_to_kubernetes)
    """What it asks of its node. Ignored on one machine."""
    env_from: EnvFrom = Field(default=(), json_schema_extra=LEFT_OUT)
    """Secrets and ConfigMaps with more of it. Ignored on one machine."""
    ports: Annotated[tuple[Free, ...], Field(max_length=64)] = Field(default=(), json_schema_extra=LEFT_OUT)
    """Ports that it listens at. Ignored on one machine."""
    volume_mounts: VolumeMounts = Field(default=(), json_schema_extra=LEFT_OUT)
    """Where its volumes are. Ignored on one machine."""
    security_context: Free | None = Field(default=None, json_schema_extra=LEFT_OUT)
    """Its user and rights. Ignored on one machine."""
    working_dir: Annotated[str | None, Field(max_length=4096)] = None
    """Folder in which the command runs. On one machine: relative to the manifest's folder."""


class Volume(OpenModel):
    """A volume of a pod template. Everything but its name passes through."""

    name: Name
    """Name of the volume."""

    RULES: ClassVar[tuple[Rule, ...]] = (
        Rule(
            field="name",
            use=f"a name that does not begin with {RESERVED_PREFIX}, which the operator uses",
            cel=f"!self.name.startsWith('{RESERVED_PREFIX}')",
            found=in_quotes("self.name"),
        ),
    )


Containers = Annotated[
    tuple[Container, ...], Field(max_length=8, json_schema_extra=BY_NAME), AfterValidator(unique_names)
]
Volumes = Annotated[
    tuple[Volume, ...], Field(max_length=64, json_schema_extra=BY_NAME), AfterValidator(unique_names)
]


OURS = "dataloading.dev/"
"""Beginning of labels by which the operator knows its own."""


NO_LABELS_OF_OURS = Rule(
    field="labels[]",
    use=f"names that do not begin with {OURS}, which the operator sets itself",
    cel=f"!item.startsWith('{OURS}')",
    found=in_quotes("item"),
)


class WorkloadMetadata(Model):
    """Labels and annotations of what makes the pods (a Deployment, the trainers' Job), not of the pods: Kueue's queue,
    for one. Ignored on one machine."""

    labels: Annotated[dict[str, str], Field(max_length=64)] = Field(default_factory=dict)
    """Labels, such as `kueue.x-k8s.io/queue-name`."""
    annotations: Annotated[dict[str, str], Field(max_length=64)] = Field(default_factory=dict)
    """Annotations."""

    RULES: ClassVar[tuple[Rule, ...]] = (NO_LABELS_OF_OURS,)


class PodMetadata(OpenModel):
    """Labels and annotations of the pods."""

    labels: Annotated[dict[str, str], Field(max_length=64)] = Field(default_factory=dict)
    """Labels, added to those of the operator."""
    annotations: Annotated[dict[str, str], Field(max_length=64)] = Field(default_factory=dict)
    """Annotations, added to those of the operator."""

    RULES: ClassVar[tuple[Rule, ...]] = (NO_LABELS_OF_OURS,)


def restart_rule(policy: str, use: str) -> Rule:
    """Refuses another policy of restarts than the one that pods of this kind have."""
    return Rule(
        field="restartPolicy",
        use=f"{policy}, or leave it out: {use}",
        cel=f"!has(self.restartPolicy) || self.restartPolicy == '{policy}'",
        found=in_quotes("self.restartPolicy"),
    )


class PodSpec(OpenModel):
    """The pods' spec. All other fields of Kubernetes' PodSpec pass through (tolerations, affinity, ...)."""

    containers: Containers = ()
    """Containers of the pod."""
    volumes: Volumes = ()
    """Volumes of the pod. Ignored on one machine."""
    init_containers: Containers = Field(default=(), json_schema_extra=LEFT_OUT)
    """Containers that end before those begin. Ignored on one machine."""
    security_context: Free | None = Field(default=None, json_schema_extra=LEFT_OUT)
    """User and rights of its containers; head and feeders take it over. Ignored on one machine."""
    image_pull_secrets: Annotated[tuple[Free, ...], Field(max_length=64)] = Field(
        default=(), json_schema_extra=LEFT_OUT
    )
    """Secrets for its images; head and feeders take them over. Ignored on one machine."""
    restart_policy: Annotated[str | None, Field(max_length=16)] = None
    """`Always` for head and feeders, `Never` for trainers, or left out."""
    host_network: Flag | None = None
    """Whether the pods use the network of their node; needs networkPolicy.mode None. Ignored on one machine."""

    RULES: ClassVar[tuple[Rule, ...]] = (
        restart_rule("Always", "head and feeders are Deployments, whose pods have no other"),
    )


class PodTemplate(Model):
    """Labels, annotations and spec of pods."""

    metadata: PodMetadata = nested(PodMetadata)
    """Labels and annotations."""
    spec: PodSpec = nested(PodSpec)
    """The pod's spec."""


CONTAINERS = "template.spec.containers[]"
"""Each container of a model's template, in the field of a rule."""


def reserved_env_rule(
    *,
    env: str = "env",
    names: tuple[str, ...] = (),
    prefixes: tuple[str, ...],
    use: str = "another name: the job sets this one itself",
) -> Rule:
    """Refuses, in the list `env`, variables that this package sets itself."""
    reserved = [f"item.name.startsWith('{prefix}')" for prefix in prefixes]
    if names:
        reserved.append(f"item.name in [{', '.join(repr(name) for name in names)}]")
    return Rule(
        field=f"{env}[].name", use=use, cel=f"!({' || '.join(reserved)})", found=in_quotes("item.name")
    )


class ScratchSpec(Model):
    """Disk for what a pod may lose: the user's code and data as they travel, and what Ray writes."""

    size: Bytes | None = None
    """Most that it may hold, of its node's disk. Left out: 10Gi."""
    volume: Free | None = None
    """Another place for it: a volume as in `volumes` of a pod, without a name, such as
    `{ephemeral: {volumeClaimTemplate: ...}}`. Each pod must be able to have it."""

    RULES: ClassVar[tuple[Rule, ...]] = (
        Rule(
            field="size",
            use="one of the two: a volume has its own size",
            cel="!has(self.size) || !has(self.volume)",
            found="'both size and volume'",
        ),
        Rule(
            field="size",
            use="at least 64Mi, such as 100Gi",
            cel="!has(self.size) || !quantity(string(self.size)).isLessThan(quantity('64Mi'))",
            found="string(self.size)",
        ),
    )


def owned_field_rules(name: str, owned: Mapping[str, str]) -> tuple[Rule, ...]:
    """Refuses fields of the operator's own container `name` in `template`; `owned`: what to use, by field."""
    return tuple(
        Rule(
            field=f"{CONTAINERS}.{field}",
            use=use,
            cel=f"item.name != '{name}' || !has(item.{field})",
            found=f"'{field} of the container {name}'",
        )
        for field, use in owned.items()
    )


RAY_NODE_ENV = (
    reserved_env_rule(
        env=f"{CONTAINERS}.env",
        names=("RAY_ADDRESS", "POD_IP"),
        prefixes=("DATALOADERJOB_", "RAY_AUTH_"),
        use="another name: dataloaderjob sets this one itself",
    ),
    reserved_env_rule(
        env=f"{CONTAINERS}.env",
        names=("RAY_worker_register_timeout_seconds",),
        prefixes=("RAY_health_check_",),
        use="spec.ray.managed.tuning, which sets it for the head and all feeders alike",
    ),
)
"""Rules on the environment of pods that are nodes of the job's Ray."""
