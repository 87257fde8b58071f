"""spec.data: volumes and environment variables that give trainers and feeders access to the data. Pure."""

from __future__ import annotations

from typing import ClassVar

from dataloaderjob.api.base import Model, Rule, in_quotes
from dataloaderjob.api.pods import Env, EnvFrom, VolumeMounts, Volumes, reserved_env_rule
from dataloaderjob.api.trainer import SET_FOR_TRAINERS


class DataSpec(Model):
    """Volumes and environment variables for the trainers' first container and for the feeders, so that a Dataset finds
    the same data in both.

    They are added to the volumes and variables of the templates. If a template has a variable of the same name, the
    template's variable takes precedence.
    """

    volumes: Volumes = ()
    """Volumes of the trainer and feeder pods. Ignored on one machine, where the files are available anyway."""
    volume_mounts: VolumeMounts = ()
    """Mounts of the volumes in both containers. Ignored on one machine."""
    env: Env = ()
    """Environment variables of both containers."""
    env_from: EnvFrom = ()
    """Secrets and ConfigMaps whose entries become environment variables of both containers. Ignored on one machine."""

    RULES: ClassVar[tuple[Rule, ...]] = (
        Rule(
            field="volumeMounts[].name",
            use="the name of a volume in spec.data.volumes",
            cel="has(self.volumes) && self.volumes.exists(v, v.name == item.name)",
            found=in_quotes("item.name"),
        ),
        reserved_env_rule(
            names=(*SET_FOR_TRAINERS, "RAY_ADDRESS", "POD_IP", "RAY_worker_register_timeout_seconds"),
            prefixes=("DATALOADERJOB_", "RAY_AUTH_", "RAY_health_check_"),
        ),
    )
