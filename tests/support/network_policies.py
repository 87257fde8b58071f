"""Whether a connection is allowed by a cluster's NetworkPolicies, and by which. Pure.

What Kubernetes says of them (networking.k8s.io/v1) and no more: where it leaves something open, a pod of the host's
network is an address like any outside the cluster, and an ipBlock also matches the addresses of pods.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

Manifest = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pod:
    """What a policy knows a pod by."""

    name: str
    namespace: str = "default"
    labels: Mapping[str, str] = field(default_factory=dict)
    ips: tuple[str, ...] = ()
    ports: Mapping[tuple[str, str], int] = field(default_factory=dict)
    """Numbers by name and protocol."""
    host_network: bool = False
    node: str = ""
    """Address of the node on which it is."""

    @classmethod
    def of(cls, thing: Manifest) -> Pod:
        """From an object of the API."""
        spec, status, metadata = thing["spec"], thing.get("status", {}), thing["metadata"]
        ports = [port for container in spec["containers"] for port in container.get("ports") or ()]
        return cls(
            name=metadata["name"], namespace=metadata["namespace"], labels=metadata.get("labels") or {},
            ips=tuple(entry["ip"] for entry in status.get("podIPs") or ()),
            ports={(p["name"], p.get("protocol", "TCP")): p["containerPort"] for p in ports if p.get("name")},
            host_network=bool(spec.get("hostNetwork")), node=status.get("hostIP", ""),
        )  # fmt: skip

    def __str__(self) -> str:
        return f"pod {self.namespace}/{self.name}"


End = Pod | str
"""A pod, or an address of whatever is none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """All that a verdict depends on. Raises ValueError where two pods have one address."""

    policies: tuple[Manifest, ...] = ()
    pods: tuple[Pod, ...] = ()
    namespaces: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """Labels by name; each is labeled with its name besides."""
    nodes: tuple[frozenset[str], ...] = ()
    """Addresses of one node each, where it has more than pods know it by."""

    def __post_init__(self) -> None:
        owners: dict[str, Pod] = {}
        for pod in self.pods:
            for ip in () if pod.host_network else pod.ips:
                if owners.setdefault(ip, pod) is not pod:
                    raise ValueError(f"one address of one pod is needed, {owners[ip]} and {pod} have {ip}")

    @classmethod
    def of(
        cls,
        policies: Iterable[Manifest],
        pods: Iterable[Manifest],
        namespaces: Iterable[Manifest],
        nodes: Iterable[Iterable[str]] = (),
    ) -> Cluster:
        """From objects of the API, and the addresses of nodes."""
        return cls(
            policies=tuple(policies),
            pods=tuple(map(Pod.of, pods)),
            namespaces={n["metadata"]["name"]: n["metadata"].get("labels") or {} for n in namespaces},
            nodes=tuple(map(frozenset, nodes)),
        )

    def at(self, end: End) -> End:
        """The pod of an address, if it is one's; a pod of the host's network is its node's address."""
        if isinstance(end, Pod):
            return (end.ips or (end.node,))[0] if end.host_network else end
        return next((pod for pod in self.pods if not pod.host_network and end in pod.ips), end)

    def on_own_node(self, source: End, destination: End) -> bool:
        """Whether a pod and its node talk: that is never shut, and probes come this way."""
        for pod, end in ((source, destination), (destination, source)):
            if isinstance(pod, Pod) and pod.node and isinstance(end, str):
                same = {pod.node}.union(*(node for node in self.nodes if pod.node in node))
                if end in same:
                    return True
        return False

    def labels_of(self, namespace: str) -> Mapping[str, str]:
        return {"kubernetes.io/metadata.name": namespace, **self.namespaces.get(namespace, {})}


@dataclass(frozen=True, slots=True)
class Side:
    """What one end's policies say. Policies as namespace/name."""

    selecting: tuple[str, ...] = ()
    """None: everything is allowed there."""
    allowing: tuple[str, ...] = ()

    @property
    def allowed(self) -> bool:
        return not self.selecting or bool(self.allowing)


@dataclass(frozen=True, slots=True)
class Verdict:
    """On one connection; answers on it need no rule of their own."""

    egress: Side
    """At its source."""
    ingress: Side
    """At its destination."""

    @property
    def allowed(self) -> bool:
        return self.egress.allowed and self.ingress.allowed

    def __str__(self) -> str:
        text = []
        for name, side in (("out", self.egress), ("in", self.ingress)):
            if not side.selecting:
                text.append(f"{name}: no policy")
            elif side.allowing:
                text.append(f"{name}: allowed by {', '.join(side.allowing)}")
            else:
                text.append(f"{name}: shut by {', '.join(side.selecting)}")
        return "; ".join(text)


def judge(cluster: Cluster, source: End, destination: End, port: int, protocol: str = "TCP") -> Verdict:
    """Raises ValueError for a policy that the API server would have refused."""
    source, destination = cluster.at(source), cluster.at(destination)
    if source == destination or cluster.on_own_node(source, destination):
        return Verdict(Side(), Side())
    to = _Port(port, protocol, destination)
    return Verdict(
        _side(cluster, source, destination, to, direction="egress", peers="to"),
        _side(cluster, destination, source, to, direction="ingress", peers="from"),
    )


@dataclass(frozen=True, slots=True)
class _Port:
    """Where a connection goes, as `ports` of a rule see it."""

    number: int
    protocol: str
    owner: End
    """Whose names of ports count: always the destination's."""

    def matches(self, entry: Manifest) -> bool:
        wanted = entry.get("port")
        if entry.get("protocol", "TCP") != self.protocol:
            return False
        if wanted is None:
            return True
        if isinstance(wanted, str):
            return (
                isinstance(self.owner, Pod) and self.owner.ports.get((wanted, self.protocol)) == self.number
            )
        return bool(wanted <= self.number <= entry.get("endPort", wanted))


def _side(cluster: Cluster, pod: End, other: End, port: _Port, *, direction: str, peers: str) -> Side:
    """What policies of `pod` say in one direction; there are none of what is no pod."""
    if not isinstance(pod, Pod):
        return Side()
    selecting = [p for p in cluster.policies if _selects(p, pod) and direction in directions(p)]
    allowing = [
        policy
        for policy in selecting
        for rule in policy["spec"].get(direction) or ()
        if _rule_matches(cluster, policy, rule.get(peers), rule.get("ports"), other, port)
    ]
    return Side(tuple(map(_name, selecting)), tuple(dict.fromkeys(map(_name, allowing))))


def directions(policy: Manifest) -> set[str]:
    """In which it isolates its pods: as it says, else for ingress always, and for egress where it has rules."""
    spec = policy["spec"]
    types = spec.get("policyTypes") or ["Ingress", *(["Egress"] if spec.get("egress") else [])]
    return {kind.lower() for kind in types}


def _selects(policy: Manifest, pod: Pod) -> bool:
    same = policy["metadata"]["namespace"] == pod.namespace
    return same and matches(policy["spec"].get("podSelector") or {}, pod.labels)


def _rule_matches(
    cluster: Cluster, policy: Manifest, peers: Any, ports: Any, other: End, port: _Port
) -> bool:
    """No peers: anyone. No ports: any. Both have to match."""
    namespace = policy["metadata"]["namespace"]
    if peers and not any(_peer_matches(cluster, peer, namespace, other) for peer in peers):
        return False
    return not ports or any(port.matches(entry) for entry in ports)


def _peer_matches(cluster: Cluster, peer: Manifest, namespace: str, other: End) -> bool:
    """Raises ValueError for a peer that says nothing, or too much."""
    block, pods, spaces = (peer.get(name) for name in ("ipBlock", "podSelector", "namespaceSelector"))
    if (block is None) == (pods is None and spaces is None):
        raise ValueError(
            f"a peer needs an ipBlock, or a podSelector, a namespaceSelector or both; found {sorted(peer) or 'none'}"
        )
    if block is not None:
        addresses = other.ips if isinstance(other, Pod) else (other,)
        return any(_in_block(block, address) for address in addresses)
    if not isinstance(other, Pod):
        return False
    if spaces is None:
        inside = other.namespace == namespace
    else:
        inside = matches(spaces, cluster.labels_of(other.namespace))
    return inside and (pods is None or matches(pods, other.labels))


def _in_block(block: Manifest, address: str) -> bool:
    ip = ipaddress.ip_address(address)
    excepted = any(ip in ipaddress.ip_network(part) for part in block.get("except") or ())
    return ip in ipaddress.ip_network(block["cidr"]) and not excepted


_OPERATORS: dict[str, Callable[[str | None, list[str]], bool]] = {
    "In": lambda value, values: value is not None and value in values,
    "NotIn": lambda value, values: value is None or value not in values,
    "Exists": lambda value, _: value is not None,
    "DoesNotExist": lambda value, _: value is None,
}


def matches(selector: Manifest, labels: Mapping[str, str]) -> bool:
    """An empty selector matches all. Raises ValueError for an operator that is none."""
    for name, value in (selector.get("matchLabels") or {}).items():
        if labels.get(name) != value:
            return False
    for expression in selector.get("matchExpressions") or ():
        if expression["operator"] not in _OPERATORS:
            raise ValueError(f"one of {', '.join(_OPERATORS)} is needed, found {expression['operator']}")
        test = _OPERATORS[expression["operator"]]
        if not test(labels.get(expression["key"]), expression.get("values") or []):
            return False
    return True


def _name(policy: Manifest) -> str:
    return f"{policy['metadata']['namespace']}/{policy['metadata']['name']}"
