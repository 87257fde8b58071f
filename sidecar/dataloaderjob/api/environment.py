"""Environment variables of containers as a process sees them, with references expanded as in Kubernetes. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping

from dataloaderjob.api.feeders import CONTAINER as FEEDER_CONTAINER
from dataloaderjob.api.job import DataLoaderJobSpec
from dataloaderjob.api.pods import EnvVar

_REFERENCE = re.compile(r"\$(?:\$|\(([A-Za-z_][A-Za-z0-9_.-]*)\))")


def add_env(base: Mapping[str, str], variables: tuple[EnvVar, ...]) -> dict[str, str]:
    """Returns `base` plus a container's variables, in order. Expands `$(OTHER)` as Kubernetes does."""
    env = dict(base)
    for variable in variables:
        if variable.value_from is None:
            env[variable.name] = expand(variable.value or "", env)
    return env


def expand(text: str, env: Mapping[str, str]) -> str:
    """Replaces `$(NAME)` with its value and `$$` with `$`. A reference to an unknown name is kept as is."""
    return _REFERENCE.sub(lambda m: "$" if m[1] is None else env.get(m[1], m[0]), text)


def feeder_env(spec: DataLoaderJobSpec, base: Mapping[str, str]) -> dict[str, str]:
    """Returns `base` plus the manifest's environment variables for user code in feeders."""
    env = add_env(base, spec.data.env)
    for container in spec.feeders.template.spec.containers:
        if container.name == FEEDER_CONTAINER:
            env = add_env(env, container.env)
    return env
