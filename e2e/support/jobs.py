"""A DataLoaderJob on the cluster: manifests of jobs, and what the tests ask of a job."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import Any

import yaml
from cluster import EXAMPLE, FEEDER, Cluster, Manifest, until

DIGEST = re.compile(r"\bdigest ([0-9a-f]{16})\b")
TRAINER = "dataloading.dev/role=trainer"
HEAD = "dataloading.dev/role=head"
FEEDERS = "dataloading.dev/role=feeder"
RESTRICTED_POD = {"runAsNonRoot": True, "runAsUser": 65532, "seccompProfile": {"type": "RuntimeDefault"}}
RESTRICTED = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
SMALL = {"requests": {"cpu": "50m", "memory": "256Mi"}, "limits": {"memory": "2Gi"}}
CLAIM = {
    "apiVersion": "v1",
    "kind": "PersistentVolumeClaim",
    "metadata": {"name": "state"},
    "spec": {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "10Mi"}}},
}
IDLE = "import signal; signal.sigwait([signal.SIGTERM])"
"""A trainer that waits to be told to end, and costs nothing."""


def example() -> Manifest:
    """The main job as it is printed."""
    return dict(yaml.safe_load((EXAMPLE / "dataloaderjob.yaml").read_text()))


def job(
    name: str, *, program: str = IDLE, image: str = FEEDER, trainers: int = 1, feeders: int = 1
) -> Manifest:
    """A small job whose trainers run a line of Python."""
    container = {
        "name": "trainer", "image": image, "command": ["python", "-c", program], "securityContext": RESTRICTED,
        "resources": SMALL,
    }  # fmt: skip
    return {
        "apiVersion": "dataloading.dev/v1alpha1",
        "kind": "DataLoaderJob",
        "metadata": {"name": name},
        "spec": {
            "feeders": {"replicas": feeders, "resources": SMALL},
            "ray": {
                "managed": {
                    "head": {
                        "resources": {
                            "requests": {"cpu": "50m", "memory": "512Mi"},
                            "limits": {"memory": "2Gi"},
                        }
                    }
                }
            },
            "loader": {"memoryPerProcess": "64Mi"},
            "sidecar": {"resources": {"requests": {"cpu": "20m"}}},
            "trainers": {
                "job": {
                    "replicas": trainers,
                    "template": {"spec": {"securityContext": RESTRICTED_POD, "containers": [container]}},
                }
            },
        },
    }


def changed(manifest: Manifest, **paths: Any) -> Manifest:
    """A copy with values put at paths such as spec__feeders__replicas; numbers are places in lists."""
    found = copy.deepcopy(manifest)
    for path, value in paths.items():
        at, *rest = (int(word) if word.isdecimal() else word for word in path.split("__"))
        thing: Any = found
        for word in rest:
            thing = thing[at] if isinstance(at, int) else thing.setdefault(at, {})
            at = word
        thing[at] = value
    return found


def with_state(cluster: Cluster, namespace: str, manifest: Manifest) -> Manifest:
    """The job with a volume at /state, named by the variable STATE, that its trainers may write on and find again."""
    # The volumes of this cluster belong to root; only a container of root's may give them away.
    cluster.kubectl(
        "label", "namespace", namespace, "pod-security.kubernetes.io/enforce=baseline", "--overwrite"
    )
    cluster.apply(namespace, CLAIM)
    made = copy.deepcopy(manifest)
    pod = made["spec"]["trainers"]["job"]["template"]["spec"]
    # Some provisioners of a kind cluster keep a volume on the node of the pod, and let the next pod run on another.
    worker = cluster.kubectl(
        "get", "nodes", "--selector=!node-role.kubernetes.io/control-plane",
        "--output=jsonpath={.items[0].metadata.name}",
    )  # fmt: skip
    pod["nodeSelector"] = {"kubernetes.io/hostname": worker.strip()}
    pod["volumes"] = [{"name": "state", "persistentVolumeClaim": {"claimName": "state"}}]
    container = pod["containers"][0]
    container["env"] = [{"name": "STATE", "value": "/state"}]
    container["volumeMounts"] = [{"name": "state", "mountPath": "/state"}]
    give_away = {"runAsUser": 0, "runAsNonRoot": False}
    pod["initContainers"] = [
        {
            "name": "owner", "image": FEEDER, "command": ["chmod", "777", "/state"], "securityContext": give_away,
            "volumeMounts": container["volumeMounts"],
        }
    ]  # fmt: skip
    return made


class Job:
    """One job by its name."""

    def __init__(self, cluster: Cluster, namespace: str, name: str) -> None:
        self.cluster, self.namespace, self.name = cluster, namespace, name

    def live(self) -> Manifest:
        found = self.cluster.get("dlj", self.name, self.namespace)
        assert found is not None, f"job {self.name} is gone"
        return found

    def status(self) -> Manifest:
        return dict(self.live().get("status") or {})

    def condition(self, kind: str) -> Manifest:
        """Empty if it is not there."""
        return next((c for c in self.status().get("conditions", ()) if c["type"] == kind), {})

    def phase(self) -> str:
        return str(self.status().get("phase", ""))

    def await_phase(self, *phases: str, timeout_s: float = 120.0) -> str:
        """Raises AssertionError early when the job ended otherwise."""

        def look() -> str | None:
            phase = self.phase()
            if phase in {"Failed", "Complete"} and phase not in phases:
                raise AssertionError(f"{self.name} is {phase}, waited for {phases}: {self.why()}")
            return phase if phase in phases else None

        return until(look, timeout_s=timeout_s, what=f"{self.name} {' or '.join(phases)}", also=self.why)

    def await_condition(
        self, kind: str, holds: Callable[[Manifest], bool], timeout_s: float = 60.0
    ) -> Manifest:
        def look() -> Manifest | None:
            found = self.condition(kind)
            return found if found and holds(found) else None

        return until(look, timeout_s=timeout_s, what=f"{kind} of {self.name}", also=self.why)

    def why(self) -> str:
        """All conditions, a line each."""
        return "\n".join(
            f"{c['type']}={c['status']} {c['reason']}: {c.get('message', '')}"
            for c in self.status().get("conditions", ())
        )

    def pods(self, role: str) -> list[Manifest]:
        """Those that are not being deleted."""
        selector = f"dataloading.dev/job={self.name},{role}"
        found = self.cluster.list("pods", self.namespace, selector)
        return [pod for pod in found if not pod["metadata"].get("deletionTimestamp")]

    def uids(self, *roles: str) -> dict[str, int]:
        """Pods by uid, with the restarts of their containers."""
        return {
            pod["metadata"]["uid"]: sum(c["restartCount"] for c in pod["status"].get("containerStatuses", ()))
            for role in roles
            for pod in self.pods(role)
        }

    def logs(self, role: str, container: str | None = None) -> str:
        names = sorted(pod["metadata"]["name"] for pod in self.pods(role))
        return "".join(self.cluster.logs(name, self.namespace, container) for name in names)

    def digest(self) -> str:
        """That rank 0 printed last."""
        found = DIGEST.findall(self.logs(TRAINER, "trainer"))
        assert found, "rank 0 printed no digest"
        return str(found[-1])

    def children(self) -> list[str]:
        """Names of all that carries the job's label, with the kind before it."""
        kinds = "pods,services,secrets,configmaps,deployments,jobs,replicasets,networkpolicies"
        words = ["get", kinds, "-n", self.namespace, "-l", f"dataloading.dev/job={self.name}", "-o", "name"]
        return sorted(self.cluster.kubectl(*words).split())

    def delete(self) -> None:
        self.cluster.kubectl(
            "delete", "dlj", self.name, "-n", self.namespace, "--ignore-not-found", "--timeout=60s"
        )

    def await_nothing(self, timeout_s: float = 60.0) -> None:
        """Until no child is left."""
        until(
            lambda: not self.children(),
            timeout_s=timeout_s,
            what=f"nothing of {self.name}",
            also=lambda: str(self.children()),
        )
