"""The Services through which a job's pods find each other, and a NetworkPolicy for each role. Pure.

A policy admits only the connections that its role needs, and no other job or pod of the namespace. The rules for both
ends of a connection are derived from one table, `WAYS`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from dataloaderjob.api import DataLoaderJob
from dataloaderjob_operator import names
from dataloaderjob_operator.kinds import Manifest
from dataloaderjob_operator.names import Role
from dataloaderjob_operator.objects import settings
from dataloaderjob_operator.objects.pods import AMBIENT


def head_service(job: DataLoaderJob) -> Manifest:
    """Builds the Service that gives the head its name. The name resolves even before the head is ready. Otherwise, DNS
    on a fresh cluster would answer late."""
    gcs = {"gcs": settings.GCS_PORT} if job.spec.ray.external is None else {}
    return _headless(
        job,
        names.head_service(job.name),
        names.Role.HEAD,
        {**gcs, "supervisor": settings.SUPERVISOR_PORT},
    )


def trainers_service(job: DataLoaderJob) -> Manifest:
    """Builds the Service that makes the trainer pods' host names resolvable. The Indexed Job sets these names."""
    return _headless(
        job, names.trainers_service(job.name), names.Role.TRAINER, {"metrics": settings.ports(job).metrics}
    )


def _headless(job: DataLoaderJob, name: str, role: names.Role, ports: dict[str, int]) -> Manifest:
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": names.metadata(job, name),
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": names.labels(job.name, role),
            "ports": [
                {"name": port, "port": number, "protocol": "TCP", "appProtocol": "tcp"}
                for port, number in ports.items()
            ],
        },
    }


RAY_CLUSTER_LABEL = "ray.io/cluster"
"""Label with which KubeRay marks the pods of a RayCluster."""
NAMESPACE_NAME = "kubernetes.io/metadata.name"
"""Label that the API server gives each namespace."""


@dataclass(frozen=True, slots=True)
class Way:
    """Allowed connections from pods of some roles to pods of another role of the same job."""

    sources: tuple[Role, ...]
    to: Role
    ports: tuple[Manifest, ...]
    """Ports as in a NetworkPolicy; if empty, all ports of all protocols."""


def _port(number: int, protocol: str = "TCP") -> Manifest:
    return {"protocol": protocol, "port": number}


ANY_TCP: tuple[Manifest, ...] = ({"protocol": "TCP"},)
WAYS = (
    Way((Role.TRAINER,), Role.HEAD, (_port(settings.SUPERVISOR_PORT),)),
    # Ray's GCS, raylets, object managers and workers connect to each other on random ports. Feeders also
    # fetch user code and data from other feeders.
    Way((Role.FEEDER,), Role.HEAD, ANY_TCP),
    Way((Role.HEAD, Role.FEEDER), Role.FEEDER, ANY_TCP),
    # each feeder listens on any free port
    Way((Role.TRAINER,), Role.FEEDER, ANY_TCP),
    # torchrun, gloo and NCCL; NCCL also uses UDP
    Way((Role.TRAINER,), Role.TRAINER, ()),
)
DNS = {
    # link-local, for nodes that answer DNS queries themselves (NodeLocal DNSCache, clouds)
    "to": [
        {"namespaceSelector": {"matchLabels": {NAMESPACE_NAME: "kube-system"}}},
        {"ipBlock": {"cidr": "169.254.0.0/16"}},
    ],
    "ports": [_port(53, "UDP"), _port(53)],
}


HBONE = 15008
"""Port of an ambient mesh's tunnels. Connections within the mesh arrive on it."""
AMBIENT_PROBES = [
    {"ipBlock": {"cidr": "169.254.7.127/32"}},
    {"ipBlock": {"cidr": "fd16:9254:7127:1337:ffff:ffff:ffff:ffff/128"}},
]
"""Source addresses of probes in an ambient mesh, as rewritten by Istio."""


def policies(job: DataLoaderJob, setup: settings.OperatorConfig) -> list[Manifest]:
    """Builds the policies of all roles. Mode `None` has no policies, and only mode `Strict` has egress rules. Attached
    pods get no policy, because it would also block peers that a pod's owner expects. The pods of an existing Ray
    cluster get none either, because they do not belong to the job."""
    mode = job.spec.network_policy.mode
    without = {Role.TRAINER} if job.spec.trainers.attached else set()
    without |= set() if job.spec.ray.external is None else {Role.FEEDER}
    roles = [role for role in Role if role not in without]
    return [] if mode == "None" else [_policy(job, role, setup, strict=mode == "Strict") for role in roles]


def _policy(job: DataLoaderJob, role: Role, setup: settings.OperatorConfig, *, strict: bool) -> Manifest:
    spec: Manifest = {
        "podSelector": {"matchLabels": names.labels(job.name, role)},
        "policyTypes": ["Ingress"],
        "ingress": [
            *(
                _rule("from", peers, _ports(job, role, way.ports))
                for way in WAYS
                if way.to is role and (peers := _peers(job, way.sources))
            ),
            *_from_outside(job, role, setup),
        ],
    }
    if strict:
        spec["policyTypes"] = ["Ingress", "Egress"]
        spec["egress"] = [
            *(
                _rule("to", peers, _ports(job, way.to, way.ports))
                for way in WAYS
                if role in way.sources and (peers := _peers(job, [way.to]))
            ),
            DNS,
        ]
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": names.metadata(job, names.policy(job.name, role), role),
        "spec": spec,
    }


def _from_outside(job: DataLoaderJob, role: Role, setup: settings.OperatorConfig) -> list[Manifest]:
    """Builds the rules for peers outside the job. Probes come from the pod's own node, which no policy blocks."""
    rules = [{"from": AMBIENT_PROBES}] if _in_ambient(job, role) else []
    if role is Role.TRAINER and setup.metrics_from:
        metrics = _ports(job, role, [_port(settings.ports(job).metrics)])
        rules.append(_rule("from", list(setup.metrics_from), metrics))
    if role is Role.HEAD and setup.operator is not None:
        own = {
            "namespaceSelector": {"matchLabels": {NAMESPACE_NAME: setup.operator.namespace}},
            "podSelector": {"matchLabels": dict(setup.operator.labels)},
        }
        rules.append(_rule("from", [own], _ports(job, role, [_port(settings.SUPERVISOR_PORT)])))
    return rules


def _in_ambient(job: DataLoaderJob, role: Role) -> bool:
    """Returns True if the user put pods of this role into an ambient mesh."""
    template = {
        Role.HEAD: job.spec.ray.head.template, Role.FEEDER: job.spec.feeders.template,
        Role.TRAINER: job.spec.trainers.template,
    }[role]  # fmt: skip
    return template.metadata.labels.get(AMBIENT) == "ambient"


def _ports(job: DataLoaderJob, to: Role, ports: Iterable[Manifest]) -> list[Manifest]:
    """Returns a rule's ports, plus the mesh's port if pods of `to` are in an ambient mesh. An empty list allows all
    ports."""
    found = list(ports)
    numbered = any("port" in port for port in found)
    return [*found, _port(HBONE)] if numbered and _in_ambient(job, to) else found


def _peers(job: DataLoaderJob, roles: Iterable[Role]) -> list[Manifest]:
    """Returns the peers in these roles. Feeders on an existing Ray cluster run in the pods of the RayCluster. If the
    manifest gives only an address, the operator does not know these pods. The user must then admit them with a separate
    policy."""
    ray = job.spec.ray.external
    if ray is None:
        return [_pods(job, roles)]
    own = [role for role in roles if role is not Role.FEEDER]
    peers = [_pods(job, own)] if own else []
    if Role.FEEDER in roles and ray.ray_cluster is not None:
        peers.append({"podSelector": {"matchLabels": {RAY_CLUSTER_LABEL: ray.ray_cluster}}})
    return peers


def _pods(job: DataLoaderJob, roles: Iterable[Role]) -> Manifest:
    """Builds the peer that selects the job's pods. Without a namespaceSelector, a peer selects pods in the policy's own
    namespace."""
    if job.spec.trainers.attached and set(roles) == {Role.TRAINER}:
        return {"podSelector": {"matchLabels": {names.LABEL_INJECT: job.name}}}
    in_roles = {"key": names.LABEL_ROLE, "operator": "In", "values": [role.value for role in roles]}
    return {"podSelector": {"matchLabels": names.labels(job.name), "matchExpressions": [in_roles]}}


def _rule(end: str, peers: list[Manifest], ports: Iterable[Manifest]) -> Manifest:
    listed = [dict(port) for port in ports]
    return {end: peers, "ports": listed} if listed else {end: peers}
