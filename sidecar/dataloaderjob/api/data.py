"""spec.data: volumes and variables with the data, for trainers and feeders alike. Pure."""

from __future__ import annotations

from typing import ClassVar

from dataloaderjob.api.base import Model, Rule, in_quotes
from dataloaderjob.api.pods import Env, EnvFrom, VolumeMounts, Volumes, reserved_env_rule
from dataloaderjob.api.trainer import SET_FOR_TRAINERS


class DataSpec(Model):
    """Volumes and variables for the trainers' first container and for the feeders: a Dataset finds the same in both.

    They are added to those of a template. A template's variable takes precedence over one of the same name here.
    """

    volumes: Volumes = ()
    """Volumes of both kinds of pods. Ignored on one machine, which has its files anyway."""
    volume_mounts: VolumeMounts = ()
    """Mount points of the volumes in both containers. Ignored on one machine."""
    env: Env = ()
    """Variables of both containers."""
    env_from: EnvFrom = ()
    """Secrets and ConfigMaps whose entries become variables of both containers. Ignored on one machine."""

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
