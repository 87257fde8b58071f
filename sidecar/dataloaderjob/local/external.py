"""An existing Ray cluster for a run: its description, and the check before anything is started."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from ipaddress import ip_address
from typing import Any

from dataloaderjob.core.errors import InputError
from dataloaderjob.core.sockets import EVERYWHERE, parse_address
from dataloaderjob.providers.ray.node import without_ray

CHECK_S = 30.0
"""Deadline in seconds for the check, which imports Ray, possibly from a cold disk."""
CONNECT_S = 5.0
AUTH_VARIABLES = ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")
FIELD = "spec.ray.external.address"
_CHECK = "dataloaderjob.providers.ray.external"


@dataclass(frozen=True, slots=True, kw_only=True)
class ExternalRay:
    """An existing Ray cluster."""

    address: str
    """host:port of the cluster's GCS."""
    feeder_resources: Mapping[str, float]
    """Resources of one feeder, under Ray's names for them."""
    feeder_env: Mapping[str, str]
    """Environment variables of the manifest for user code."""
    host: str = ""
    """Address of this machine's node, at which other nodes reach the supervisor; empty before the check."""

    @property
    def bind_host(self) -> str:
        """The address on which the supervisor listens. This machine's own processes use the loopback address."""
        return "127.0.0.1" if ip_address(self.host).is_loopback else EVERYWHERE


def ray_env(env: Mapping[str, str], inherited: Mapping[str, str]) -> dict[str, str]:
    """Returns the environment for a driver on an existing cluster. `env`: contains the user's variables for Ray's
    authentication. `inherited`: all other variables, without Ray's."""
    auth = {name: env[name] for name in AUTH_VARIABLES if name in env}
    # By default, Ray requires the same patch version of Python.
    return {
        **inherited,
        **auth,
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_DEFAULT_PYTHON_VERSION_MATCH_LEVEL": "minor",
    }


def checked(ray: ExternalRay, env: Mapping[str, str] = os.environ) -> ExternalRay:
    """Returns the same cluster with this machine's address. `env`: as for `ray_env`.

    Raises InputError if the cluster does not answer or cannot take the job's feeders.
    """
    try:
        socket.create_connection(parse_address(ray.address), timeout=CONNECT_S).close()
    except (OSError, ValueError) as exc:
        raise InputError(
            f"cannot reach the Ray cluster of {FIELD} at {ray.address} ({exc}): start it, or change the "
            "address"
        ) from exc
    answer = _ask(ray.address, ray_env(env, without_ray(env)))
    if "error" in answer:
        raise InputError(str(answer["error"]))
    return replace(ray, host=str(answer["host"]))


def _ask(address: str, env: Mapping[str, str]) -> dict[str, Any]:
    command = [sys.executable, "-P", "-m", _CHECK, address]
    try:
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=CHECK_S, check=False)
        answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    except subprocess.TimeoutExpired as exc:
        raise InputError(
            f"{address}, the Ray cluster of {FIELD}, did not respond as a GCS within {CHECK_S:.0f} s: set "
            "the host:port of its GCS"
        ) from exc
    except (IndexError, ValueError) as exc:
        words = (done.stderr.strip().splitlines() or ["it printed nothing"])[-1]
        raise InputError(f"could not query Ray about {address}: {words}") from exc
    return answer
