"""Pod templates of the trainers, the feeders and the head. Pure.

The fields that this package reads are typed. All other fields that Kubernetes defines are passed on.
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
"""Prefix of the names of everything that the operator adds to a pod."""
Name = Annotated[
    str,
    Field(min_length=1, max_length=63, pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$"),
    Use("lower-case letters, digits and hyphens, at most 63"),
]
Image = Annotated[
    str, Field(min_length=1, max_length=512, pattern=r"^\S+$"), Use("an image name without spaces")
]
Port = Annotated[Whole, Field(ge=1, le=65_535)]
Words = Annotated[
    tuple[Annotated[str, Field(max_length=131072)], ...],
    Field(max_length=1024),
    Use('a list of strings such as ["python", "train.py"]'),
]


class EnvVar(Model):
    """An environment variable of a container."""

    name: Annotated[
        str, Field(min_length=1, max_length=256, pattern=r"^[^=\s]+$"), Use("a name without = or spaces")
    ]
    """Name of the variable."""
    value: Annotated[
        str | None, Field(max_length=131072), Use("a string (numbers and true or false in quotes)")
    ] = None
    """Value of the variable. Kubernetes expands `$(OTHER)`."""
    value_from: Free | None = None
    """Source of the value in a cluster (Secret, ConfigMap or field of the pod). Ignored on one machine."""

    RULES: ClassVar[tuple[Rule, ...]] = (
        Rule(
            field="valueFrom",
            use="either value or valueFrom",
            cel="!has(self.value) || size(self.value) == 0 || !has(self.valueFrom)",
            found="'both value and valueFrom'",
        ),
    )


Env = Annotated[
    tuple[EnvVar, ...], Field(max_length=256, json_schema_extra=BY_NAME), AfterValidator(unique_names)
]


LEFT_OUT: JsonDict = {"x-left-out": True}
"""Omits a field from the CRD, which is already large. Only the models check the field, and the job's status reports the
result."""


class VolumeMount(OpenModel):
    """A mount of a volume from `volumes`. All other fields of Kubernetes' VolumeMount pass through."""

    name: Name
    """Name of the volume."""
    mount_path: Annotated[str, Field(min_length=1, max_length=4096)]
    """Folder at which the volume is mounted."""


VolumeMounts = Annotated[tuple[VolumeMount, ...], Field(max_length=64)]
EnvFrom = Annotated[tuple[Free, ...], Field(max_length=64)]


def _left_to_kubernetes(schema: JsonDict) -> None:
    """Omits a field's type from the CRD, which is already large. The API server checks the field as part of a pod."""
    schema.pop("$ref", None)
    schema.update(type="object", additionalProperties=True)


class Container(OpenModel):
    """A container of a pod template. All other fields of Kubernetes' Container pass through."""

    name: Name
    """Name of the container."""
    image: Image | None = None
    """Image of the container. Ignored on one machine."""
    command: Words = ()
    """Program and first arguments; replaces the image's entrypoint. Required on one machine, which has no image."""
    args: Words = ()
    """Further arguments, appended to `command`."""
    env: Env = ()
    """Environment of the container. User code in feeders sees it too, except for variables that concern one process or
    machine."""
    resources: ContainerResources | None = Field(default=None, json_schema_extra=_left_to_kubernetes)
    """Resources that the container requests. Ignored on one machine."""
    env_from: EnvFrom = Field(default=(), json_schema_extra=LEFT_OUT)
    """Secrets and ConfigMaps that provide further variables. Ignored on one machine."""
    ports: Annotated[tuple[Free, ...], Field(max_length=64)] = Field(default=(), json_schema_extra=LEFT_OUT)
    """Ports on which the container listens. Ignored on one machine."""
    volume_mounts: VolumeMounts = Field(default=(), json_schema_extra=LEFT_OUT)
    """Mounts of the container's volumes. Ignored on one machine."""
    security_context: Free | None = Field(default=None, json_schema_extra=LEFT_OUT)
    """User and privileges of the container. Ignored on one machine."""
    working_dir: Annotated[str | None, Field(max_length=4096)] = None
    """Folder in which the command runs. On one machine, relative to the manifest's folder."""


class Volume(OpenModel):
    """A volume of a pod template. Everything except its name passes through."""

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
"""Prefix of the labels with which the operator marks its own objects."""


NO_LABELS_OF_OURS = Rule(
    field="labels[]",
    use=f"names that do not begin with {OURS}, which the operator sets itself",
    cel=f"!item.startsWith('{OURS}')",
    found=in_quotes("item"),
)


class WorkloadMetadata(Model):
    """Labels and annotations of the Deployment or Job that creates the pods, such as Kueue's queue name. The pods
    themselves do not get them. Ignored on one machine."""

    labels: Annotated[dict[str, str], Field(max_length=64)] = Field(default_factory=dict)
    """Labels, such as `kueue.x-k8s.io/queue-name`."""
    annotations: Annotated[dict[str, str], Field(max_length=64)] = Field(default_factory=dict)
    """Annotations."""

    RULES: ClassVar[tuple[Rule, ...]] = (NO_LABELS_OF_OURS,)


class PodMetadata(OpenModel):
    """Labels and annotations of the pods."""

    labels: Annotated[dict[str, str], Field(max_length=64)] = Field(default_factory=dict)
    """Labels, in addition to the operator's."""
    annotations: Annotated[dict[str, str], Field(max_length=64)] = Field(default_factory=dict)
    """Annotations, in addition to the operator's."""

    RULES: ClassVar[tuple[Rule, ...]] = (NO_LABELS_OF_OURS,)


def restart_rule(policy: str, use: str) -> Rule:
    """Returns a rule that rejects any restart policy except `policy`."""
    return Rule(
        field="restartPolicy",
        use=f"{policy}, or omit it, because {use}",
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
    """Containers that must finish before the others start. Ignored on one machine."""
    security_context: Free | None = Field(default=None, json_schema_extra=LEFT_OUT)
    """User and privileges of the containers. The head and the feeders inherit the trainers' settings. Ignored on one
    machine."""
    image_pull_secrets: Annotated[tuple[Free, ...], Field(max_length=64)] = Field(
        default=(), json_schema_extra=LEFT_OUT
    )
    """Secrets for pulling the images. The head and the feeders inherit the trainers' Secrets. Ignored on one
    machine."""
    restart_policy: Annotated[str | None, Field(max_length=16)] = None
    """`Always` for the head and feeders, `Never` for trainers. May be omitted."""
    host_network: Flag | None = None
    """Use the node's network. Requires networkPolicy.mode None. Ignored on one machine."""

    RULES: ClassVar[tuple[Rule, ...]] = (restart_rule("Always", "head and feeders are Deployments"),)


class PodTemplate(Model):
    """Labels, annotations and spec of pods."""

    metadata: PodMetadata = nested(PodMetadata)
    """Labels and annotations."""
    spec: PodSpec = nested(PodSpec)
    """The pod's spec."""


CONTAINERS = "template.spec.containers[]"
"""The start of a rule's `field` that stands for each container of a model's template."""


def reserved_env_rule(
    *,
    env: str = "env",
    names: tuple[str, ...] = (),
    prefixes: tuple[str, ...],
    use: str = "another name, because the job sets this one itself",
) -> Rule:
    """Returns a rule that rejects variables in the list `env` that this package sets itself."""
    reserved = [f"item.name.startsWith('{prefix}')" for prefix in prefixes]
    if names:
        reserved.append(f"item.name in [{', '.join(repr(name) for name in names)}]")
    return Rule(
        field=f"{env}[].name", use=use, cel=f"!({' || '.join(reserved)})", found=in_quotes("item.name")
    )


class ScratchSpec(Model):
    """Disk space for files that a pod may lose: the user's code and data in transit, and Ray's files."""

    size: Bytes | None = None
    """Maximum space on the node's disk. If omitted: 10Gi."""
    volume: Free | None = None
    """A volume to use instead, written as in a pod's `volumes` but without a name, such as
    `{ephemeral: {volumeClaimTemplate: ...}}`. Every pod must be able to mount it."""

    RULES: ClassVar[tuple[Rule, ...]] = (
        Rule(
            field="size",
            use="either size or volume, because a volume has its own size",
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
    """Returns rules that reject those fields in `template` that the operator sets in its own container `name`. `owned`
    maps each field to the alternative that a message suggests."""
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
        use="another name, because dataloaderjob sets this one itself",
    ),
    reserved_env_rule(
        env=f"{CONTAINERS}.env",
        names=("RAY_worker_register_timeout_seconds",),
        prefixes=("RAY_health_check_",),
        use="spec.ray.managed.tuning, which sets it for the head and all feeders alike",
    ),
)
"""Rules for the environment of pods that are nodes of the job's Ray cluster."""
