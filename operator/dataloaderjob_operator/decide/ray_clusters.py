"""The address of a RayCluster, from the objects that KubeRay creates. Pure.

KubeRay reports the Service of the head in the RayCluster's status. If the operator cannot read RayClusters, it derives
the Service's name by KubeRay's rule. Tests cover KubeRay's names, labels and fields, but not KubeRay itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

RESOURCE = "rayclusters.ray.io"
ROOT = "/apis/ray.io/v1"
GCS_PORT = 6379
PORT_NAMES = ("gcs-server", "redis")
"""Names of the GCS's port in the head's Service. Earlier versions of KubeRay named it redis."""
MAX_NAME = 50
"""Maximum length of a Service's name. KubeRay shortens longer names."""


@dataclass(frozen=True, slots=True)
class RayCluster:
    """The result of the last lookup of a RayCluster."""

    name: str
    address: str = ""
    """host:port of the cluster's GCS; empty while the address is unknown."""
    missing: str = ""
    """The missing object and the remedy; empty once the address is known."""


def service_name(cluster: str) -> str:
    """Returns the name of the head's Service by KubeRay's rule. The rule keeps the last 50 characters, and replaces
    the first one if it is not a letter."""
    name = f"{cluster}-head-svc"[-MAX_NAME:]
    return name if name[0].isalpha() else f"r{name[1:]}"


def reported_service(cluster: Mapping[str, Any]) -> str:
    """Returns the name of the head's Service from the RayCluster's status; empty until KubeRay has written it."""
    head = _mapping(_mapping(cluster.get("status")).get("head"))
    return str(head.get("serviceName") or "")


def address(service: Mapping[str, Any], namespace: str, domain: str) -> str:
    """Returns the GCS's address from the head's Service. `domain`: the DNS domain of the Kubernetes cluster; if empty,
    pods add it themselves."""
    ports = _mapping(service.get("spec")).get("ports")
    by_name = {str(port.get("name")): port.get("port") for port in ports or () if isinstance(port, Mapping)}
    port = next((by_name[name] for name in PORT_NAMES if type(by_name.get(name)) is int), GCS_PORT)
    suffix = f".{domain}" if domain else ""
    return f"{_mapping(service.get('metadata')).get('name')}.{namespace}.svc{suffix}:{port}"


def no_service(cluster: str, service: str, *, readable: bool, exists: bool) -> str:
    """Describes the object for which the job waits while the head's Service is missing. `readable`: True if the
    operator may read RayClusters. `exists`: True if the RayCluster exists."""
    if exists:
        return f"RayCluster {cluster} exists, but its head's Service {service} does not yet: KubeRay will create it"
    text = f"neither RayCluster {cluster} nor its head's Service {service} exists in the job's namespace"
    if not readable:
        text = (
            f"Service {service} does not exist in the job's namespace, and the operator has no permission to read "
            f"{RESOURCE} (the chart's value follow.resources grants it)"
        )
    return f"{text}: create the RayCluster, or correct spec.ray.external.rayCluster"


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}
