"""The configuration of a service on this machine, and the settings of its sidecar and its supervisor."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dataloaderjob.core.keys import Holder, Part
from dataloaderjob.core.settings import (
    LoaderSettings,
    RayTasks,
    RayTuning,
    SidecarSettings,
    SupervisorSettings,
)
from dataloaderjob.local.certificates import tls_folder
from dataloaderjob.local.external import ExternalRay
from dataloaderjob.providers.provider import RAY

REGISTER_MARGIN_S = 30.0
KEY = "key"
"""File with the job's key, for the supervisor and for commands."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServicePlan:
    """Configuration of the service."""

    job: str
    num_feeders: int
    env: Mapping[str, str]
    """Environment of the supervisor, and of the sidecar unless `sidecar_env` is set."""
    sidecar_env: Mapping[str, str] | None = None
    feeder_env: Mapping[str, str]
    """Environment of Ray's processes or the feeder host, and therefore of user code in feeders."""
    feeder_cwd: Path
    provider: str = RAY
    """Name of the provider that starts feeders (`providers.provider`)."""
    tuning: RayTuning = field(default_factory=RayTuning)
    tasks: RayTasks = field(default_factory=RayTasks)
    external: ExternalRay | None = None
    """The existing Ray cluster to use; None if the run starts its own."""
    loader: LoaderSettings = field(default_factory=LoaderSettings)
    metrics_port: int | None = None
    tls: bool = False
    """True if all of the job's TCP connections use TLS."""


def key_file(home: Path, holder: Holder) -> Path:
    """Returns the path of the file with the holder's key, which is derived from the job's key."""
    return home / f"{KEY}-{holder}"


def sidecar_settings(plan: ServicePlan, home: Path, socket: str, port: int) -> SidecarSettings:
    """Returns the sidecar's settings. `port`: the supervisor's port."""
    return SidecarSettings(
        job=plan.job, socket=socket, key_path=str(key_file(home, Holder.SIDECAR)), blobs=str(home / "blobs"),
        supervisor_host="127.0.0.1", supervisor_port=port, metrics_port=plan.metrics_port,
        private=True, tls_folder=_certificates(plan, home, Part.SIDECAR), **dataclasses.asdict(plan.loader),
    )  # fmt: skip


def supervisor_settings(
    plan: ServicePlan, home: Path, port: int, feeders: Mapping[str, Any]
) -> SupervisorSettings:
    """Returns the supervisor's settings. `feeders`: settings for the part that starts feeders, such as the address of a
    Ray cluster."""
    return SupervisorSettings(
        job=plan.job, key_path=str(home / KEY), blob_folder=str(home / "blobs"),
        feeder_key_path=str(key_file(home, Holder.FEEDER)), feeder_blob_folder=str(home / "blobs"),
        provider=plan.provider, num_feeders=plan.num_feeders, state_path=str(home / "feeders.json"), port=port,
        ready_timeout_s=plan.tuning.worker_register_timeout_s + REGISTER_MARGIN_S,
        worker_register_timeout_s=plan.tuning.worker_register_timeout_s,
        tls_folder=_certificates(plan, home, Part.SUPERVISOR), feeder_tls_folder=_certificates(plan, home, Part.FEEDER),
        **feeders,
    )  # fmt: skip


def _certificates(plan: ServicePlan, home: Path, part: Part) -> str:
    return str(tls_folder(home, part)) if plan.tls else ""


def external_ray(plan: ServicePlan, ray: ExternalRay, run_id: str) -> dict[str, Any]:
    """Returns the supervisor's settings for a cluster that other jobs also use."""
    return {
        "ray_address": ray.address, "ray_external": True, "ray_tag": f"dataloaderjob-{plan.job}-{run_id}",
        "feeder_resources": dict(ray.feeder_resources), "feeder_env": dict(ray.feeder_env),
        "feeder_supervisor_host": ray.host, "bind_host": ray.bind_host,
    }  # fmt: skip
