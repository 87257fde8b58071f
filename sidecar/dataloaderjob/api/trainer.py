"""spec.trainer: the user's training command, and how often it runs. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from pydantic import Field

from dataloaderjob.api.base import Immutable, Model, Path, Rule, Whole
from dataloaderjob.api.pods import (
    RESERVED_PREFIX,
    Container,
    Containers,
    PodSpec,
    PodTemplate,
    reserved_env_rule,
)

_FIRST: Path = ("template", "spec", "containers", 0)
_CEL_FIRST = "self.template.spec.containers[0]"


class TrainerPodSpec(PodSpec):
    """The trainer pods' spec. The first container is the trainer."""

    containers: Containers = Field(min_length=1)
    """The trainer, then any others."""


class TrainerPodTemplate(PodTemplate):
    """Labels, annotations and spec of the trainer pods."""

    spec: TrainerPodSpec
    """The pods' spec."""


def _no_command(trainer: TrainerSpec) -> Iterator[tuple[Path, str]]:
    command = trainer.container.command
    if not command:
        yield (*_FIRST, "command"), "an empty command"
    elif not command[0]:
        yield (*_FIRST, "command"), 'an empty program ""'


def _no_image(trainer: TrainerSpec) -> Iterator[tuple[Path, str]]:
    if trainer.container.image is None:
        yield (*_FIRST, "image"), "no image"


def _reserved_names(trainer: TrainerSpec) -> Iterator[tuple[Path, str]]:
    for i, container in enumerate(trainer.template.spec.containers):
        if container.name.startswith(RESERVED_PREFIX):
            yield ("template", "spec", "containers", i, "name"), f'"{container.name}"'


class TrainerSpec(Model):
    """The trainers: `replicas` pods, in each of which the command runs once."""

    replicas: Whole = Field(default=1, ge=1, le=1_024)
    """Trainer pods. On one machine: how often the command is started."""
    processes_per_replica: Whole = Field(default=1, ge=1, le=64)
    """Trainer processes (ranks) that one command starts, as torchrun does. Each gets a ring."""
    template: TrainerPodTemplate
    """Template of the trainer pods. Its first container is the trainer."""

    RULES: ClassVar[tuple[Rule, ...]] = (
        Rule(
            field="template.spec.containers[0].command",
            use='the training command, such as ["python", "train.py"]',
            cel=f"has({_CEL_FIRST}.command) && size({_CEL_FIRST}.command) > 0"
            f" && {_CEL_FIRST}.command[0] != ''",
            found="'an empty command'",
            check=_no_command,
        ),
        Rule(
            field="template.spec.containers[0].image",
            use="the image with your training code (one machine ignores it, the cluster needs it)",
            cel=f"has({_CEL_FIRST}.image)",
            found="'no image'",
            check=_no_image,
        ),
        Rule(
            field="template.spec.containers",
            use=f"a name that does not begin with {RESERVED_PREFIX}, which the operator uses",
            cel=f"self.template.spec.containers.all(c, !c.name.startsWith('{RESERVED_PREFIX}'))",
            found="'a reserved name of a container'",
            check=_reserved_names,
        ),
        reserved_env_rule(
            names=("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
            prefixes=("PET_", "DATALOADERJOB_"),
            use="another name: this one is set from spec.trainer.replicas and processesPerReplica",
        ),
    )
    IMMUTABLE: ClassVar[tuple[Immutable, ...]] = (
        Immutable(field="replicas", use="a new job: the ranks are fixed when trainers start"),
        Immutable(field="processesPerReplica", use="a new job: the ranks are fixed when trainers start"),
    )

    @property
    def container(self) -> Container:
        """The trainer's own container."""
        return self.template.spec.containers[0]

    def launch_environment(self, *, replica: int, master_addr: str, master_port: int) -> dict[str, str]:
        """Variables of one replica's command: torchrun's, and a rank's own where a replica is one process."""
        env = {
            "PET_NNODES": str(self.replicas),
            "PET_NODE_RANK": str(replica),
            "PET_NPROC_PER_NODE": str(self.processes_per_replica),
            "PET_MASTER_ADDR": master_addr,
            "PET_MASTER_PORT": str(master_port),
        }
        if self.processes_per_replica == 1:
            env |= {
                "RANK": str(replica),
                "WORLD_SIZE": str(self.replicas),
                "LOCAL_RANK": "0",
                "LOCAL_WORLD_SIZE": "1",
                "MASTER_ADDR": master_addr,
                "MASTER_PORT": str(master_port),
            }
        return env
