"""The real connections of a job's pods, judged by the policies of the cluster."""

from __future__ import annotations

import ipaddress
import json
from dataclasses import dataclass, replace

import network_policies
from cluster import SYSTEM, Cluster, Manifest
from connections import Recording, shut

_ROLE = "dataloading.dev/role"


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Policies, pods and namespaces at one moment: that of a job with all its pods."""

    policies: network_policies.Cluster
    ranges: tuple[ipaddress.IPv4Network | ipaddress.IPv6Network, ...]
    """Addresses of pods."""

    @classmethod
    def take(cls, cluster: Cluster) -> Snapshot:
        def everything(kind: str) -> list[Manifest]:
            return list(json.loads(cluster.kubectl("get", kind, "-A", "-o", "json"))["items"])

        live = [pod for pod in everything("pods") if pod["status"].get("phase") == "Running"]
        ranges = [cidr for node in everything("nodes") for cidr in node["spec"].get("podCIDRs", ())]
        return cls(
            network_policies.Cluster.of(everything("networkpolicies"), live, everything("namespaces")),
            tuple(map(ipaddress.ip_network, ranges)),
        )

    def shut(self, recording: Recording) -> list[str]:
        """Connections that a cluster which enforces the policies would not have let through.

        Those of pods that had gone by then, of an earlier test, cannot be judged.
        """
        judged = frozenset(
            found
            for found in recording.connections
            if all(self._known(end, recording) for end in (found.source, found.destination))
        )
        return shut(replace(recording, connections=judged), replace(self.policies, nodes=recording.nodes))

    def _known(self, address: str, recording: Recording) -> bool:
        if self.policies.at(address) != address or any(address in node for node in recording.nodes):
            return True
        return not any(ipaddress.ip_address(address) in found for found in self.ranges)

    def ways(self, recording: Recording) -> set[tuple[str, str, int]]:
        """(who, to whom, port): pods by their role, of the job or as operator or DNS; else `outside`."""
        return {
            (self._who(found.source), self._who(found.destination), found.port) for found in recording.connections
        }  # fmt: skip

    def _who(self, address: str) -> str:
        end = self.policies.at(address)
        if not isinstance(end, network_policies.Pod):
            return "outside"
        if end.namespace == SYSTEM:
            return "operator"
        return end.labels.get(_ROLE) or end.labels.get("k8s-app", end.name)
