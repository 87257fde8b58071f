"""Values that do not fit where they are put, and some that do."""

from __future__ import annotations

import json
from typing import Any

WRONG = (
    7,
    -1,
    1.5,
    True,
    "text",
    [],
    ["text"],
    [7],
    {},
    {"a": 1},
    {"name": 7},
    [None],
    [[]],
)
NUMBERS = (
    -1,
    0,
    1,
    2**31,
    2**63 - 1,
    2**63,
    1e300,
    1.5,
    "3",
    "",
)
STRINGS = (
    "", " ", "-", "x" * 64, "x" * 254, "x" * 5_000, "x" * 140_000, "é日本語", "\N{GRINNING FACE}", "a\0b", "\x07",
    "\x85", "\u2028", "a\nb", " a", "A_b", "../..", "/", "$(NONE)", "{{x}}", "null", "1", "a.b", "a=b", "\ud800",
)  # fmt: skip
QUANTITIES = (
    "abc", "-1", "0", "", "10E", "1e99", "9e18", ".5Gi", "1.5.5", "1 Gi", "1GB", "100m", "1n", 1.5, -1, 0, 2**63,
    "x" * 40, "9Ei", True, "12e6", "+1",
)  # fmt: skip
LABELS = (
    {"": "x"}, {"a b": "x"}, {"a": "x" * 64}, {"a": "é"}, {"a": " "}, {"x" * 64: "y"}, {"a/b/c": "d"}, {"-a": "b"},
    {"dataloading.dev/job": "x"}, {"a": 1}, {"a": None}, {"A.example.com/x": "y"}, {f"n{i}": "v" for i in range(80)},
    {"app.kubernetes.io/managed-by": "me"}, {"a": "x\ny"}, {"batch.kubernetes.io/job-name": "x"},
)  # fmt: skip


def deep(levels: int) -> dict[str, Any]:
    return dict(json.loads('{"a":' * levels + "1" + "}" * levels))


DEEP = deep(90)
RESOURCES = (
    "CPU", "gpu", "nvidia.com/GPU/x", "ephemeral-storage", "hugepages-2Mi", "", "é", "x" * 70, "pods",
)  # fmt: skip
VARIABLES = (
    "RANK", "WORLD_SIZE", "MASTER_ADDR", "PET_NNODES", "DATALOADERJOB_X", "RAY_ADDRESS", "POD_IP", "HOME",
    "RAY_AUTH_TOKEN", "RAY_health_check_period_ms", "PATH", "1A", "a-b", "é", "A B", "A\0",
)  # fmt: skip
FOLDERS = (
    "/etc/dataloaderjob/key", "/etc/dataloaderjob", "/run/dataloaderjob", "/tmp", "/dev/shm", "/",
    "relative", "", "/a:b", "/data", "/x" * 3_000,
)  # fmt: skip
POD_FIELDS: tuple[tuple[str, Any], ...] = (
    ("affinity", {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": []}}}),
    ("affinity", {"podAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [{"topologyKey": ""}]}}),
    ("affinity", {"podAntiAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": [{"weight": 0}]}}),
    ("affinity", {"nodeaffinity": {}}), ("affinity", DEEP), ("affinity", "zone"),
    ("tolerations", [{"key": "a", "operator": "Exists", "value": "b"}]), ("tolerations", [{"operator": "Equal"}]),
    ("tolerations", [{"key": "a", "effect": "NoRun"}]), ("tolerations", {"key": "a"}), ("tolerations", ["a"]),
    ("tolerations", [{"key": "a b"}]),
    ("tolerations", [{"key": "a", "effect": "NoSchedule", "tolerationSeconds": 5}]),
    ("tolerations", [{"key": ["a"]}]), ("tolerations", [{"key": {"a": 1}}]), ("tolerations", [{"key": 7}]),
    ("securityContext", {"runAsUser": -1}), ("securityContext", {"runAsUser": "root"}), ("securityContext", "none"),
    ("securityContext", {"runAsUser": 2**63 - 1}), ("securityContext", {"runAsuser": 1}), ("securityContext", []),
    ("securityContext", {"fsGroup": -5}), ("securityContext", {"sysctls": [{"name": "!", "value": "x"}]}),
    ("securityContext", {"seccompProfile": {"type": "Localhost"}}),
    ("securityContext", {"runAsUser": 0, "runAsNonRoot": True}), ("terminationGracePeriodSeconds", -1),
    ("terminationGracePeriodSeconds", "5"), ("activeDeadlineSeconds", 0), ("dnsPolicy", "None"),
    ("dnsPolicy", "Sometimes"), ("priority", "high"), ("priorityClassName", "No Such"), ("serviceAccountName", "A B"),
    ("serviceAccount", "other"), ("schedulerName", ""), ("nodeName", "A B"), ("hostname", "A.b"), ("subdomain", "x"),
    ("subdomain", "A B"), ("hostUsers", False), ("hostPID", True), ("shareProcessNamespace", "yes"),
    ("hostNetwork", True), ("hostnetwork", True), ("restartPolicy", "OnFailure"), ("restartPolicy", "never"),
    ("os", {"name": "plan9"}), ("overhead", {"cpu": "1"}), ("runtimeClassName", "A B"), ("preemptionPolicy", "Maybe"),
    ("enableServiceLinks", "no"), ("readinessGates", [{"conditionType": ""}]), ("schedulingGates", [{"name": ""}]),
    ("schedulingGates", [{"name": "a/b"}]), ("imagePullSecrets", [{}]), ("imagePullSecrets", ["pull"]),
    ("imagePullSecrets", "pull"), ("imagePullSecrets", [{"name": 7}]), ("initContainers", 7), ("initContainers", {}),
    ("initContainers", [7]), ("initContainers", [{}]), ("initContainers", [{"name": "a"}]),
    ("initContainers", [{"name": "a", "image": "i"}, {"name": "a", "image": "i"}]),
    ("initContainers", [{"name": 7, "image": "i"}]),
    ("initContainers", [{"name": "a", "image": "i", "resources": {"requests": {"cpu": "abc"}}}]),
    ("initContainers", [{"name": "a", "image": "i", "resources": {"limits": "abc"}}]),
    ("initContainers", [{"name": "a", "image": "i", "resources": {"requests": {"cpu": "2"}, "limits": {"cpu": "1"}}}]),
    ("ephemeralContainers", [{"name": "a"}]), ("hostAliases", [{"ip": "x"}]), ("resourceClaims", [{"name": "gpu"}]),
    ("topologySpreadConstraints", [{"maxSkew": 0}]), ("dnsConfig", {"nameservers": ["x"]}),
    ("resources", {"limits": {"gpu": 1}}),
    ("volumes", [{"name": "a", "emptyDir": {}}, {"name": "a", "emptyDir": {}}]), ("volumes", {"name": "a"}),
    ("containers", []), ("containers", [{"name": "trainer", "image": "i"}] * 2),
    ("containers", [{"name": f"c{i}", "image": "i"} for i in range(9)]),
)  # fmt: skip
CONTAINER_FIELDS: tuple[tuple[str, Any], ...] = (
    ("resources", {"requests": {"cpu": "2"}, "limits": {"cpu": "1"}}),
    ("resources", {"limits": {"nvidia.com/gpu": "500m"}}),
    ("resources", {"requests": {"nvidia.com/gpu": 1}, "limits": {"nvidia.com/gpu": 2}}),
    ("resources", {"limits": {"memory": "1.5"}}), ("resources", {"requests": {"nvidia.com/gpu": 1}}),
    ("resources", {"limits": {"cpu": "1e30"}}), ("resources", {"limit": {"cpu": 1}}),
    ("resources", {"claims": [{"name": "gpu"}]}), ("resources", {"claims": [{}]}), ("resources", "big"),
    ("securityContext", {"privileged": True, "allowPrivilegeEscalation": False}),
    ("securityContext", {"runAsUser": -1}), ("securityContext", {"privileged": "yes"}),
    ("securityContext", {"capabilities": ["ALL"]}), ("securityContext", "root"),
    ("securityContext", {"procMount": "Unmasked"}), ("securityContext", {"runasuser": 1}), ("securityContext", []),
    ("securityContext", {"privileged": True}), ("securityContext", {"seccompProfile": {"type": "Nope"}}),
    ("env", [{"name": "A", "valueFrom": {}}]),
    ("env", [{"name": "A", "valueFrom": {"fieldRef": {"fieldPath": "x"}}}]),
    ("env", [{"name": "A", "value": "1", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}}]),
    ("env", [{"name": "A", "valueFrom": {"secretKeyRef": {"name": "s"}}}]),
    ("env", [{"name": "A", "valueFrom": {"secretkeyref": {}}}]),
    ("env", [{"name": f"V{i}", "value": "x"} for i in range(300)]), ("env", {"A": "1"}), ("env", [{"value": "1"}]),
    ("envFrom", [{}]), ("envFrom", ["s"]), ("envFrom", "s"), ("envFrom", [{"secretRef": {"name": "A B"}}]),
    ("envFrom", {}), ("envFrom", [{"prefix": "1", "secretRef": {}}]), ("ports", [{}]), ("ports", ["80"]),
    ("ports", 80), ("ports", {"containerPort": 80}), ("ports", [{"name": "a" * 16, "containerPort": 1}]),
    ("ports", [{"containerPort": 1, "protocol": "ICMP"}]), ("ports", [{"name": 7}]),
    ("ports", [{"containerPort": 1, "hostPort": 2, "hostIP": "x"}]), ("ports", [{"containerPort": 80}] * 2),
    ("ports", [{"hostPort": 80}]), ("livenessProbe", {}), ("livenessProbe", {"httpGet": {"port": "no such"}}),
    ("livenessProbe", {"exec": {}, "tcpSocket": {"port": 1}}),
    ("livenessProbe", {"exec": {"command": ["a"]}, "periodSeconds": -1}),
    ("startupProbe", {"successThreshold": 2, "exec": {"command": ["a"]}}), ("lifecycle", {"preStop": {}}),
    ("lifecycle", {"preStop": {"exec": {}}}), ("imagePullPolicy", "Sometimes"), ("image", "a b"), ("image", ""),
    ("image", " "), ("image", "i" * 600), ("workingDir", "x" * 5_000), ("workingDir", 7), ("stdin", "yes"),
    ("tty", 1), ("terminationMessagePath", ""), ("terminationMessagePolicy", "Never"), ("restartPolicy", "Always"),
    ("restartPolicy", "Never"), ("command", "python train.py"), ("command", ["python", None]), ("command", [""]),
    ("command", ["a\0b"]), ("args", [7]), ("command", ["x" * 140_000]), ("args", ["x"] * 1_100),
    ("args", ["x" * 100_000] * 12), ("resizePolicy", [{}]), ("volumeMounts", [{"name": "code"}]),
    ("volumeMounts", ["code"]), ("volumeMounts", "code"), ("volumeMounts", {}), ("volumeMounts", [7]),
    ("volumeMounts", [{"mountPath": "/x"}]), ("volumeMounts", [{"name": "cache", "mountPath": 7}]),
    ("volumeMounts", [{}]), ("volumeMounts", [{"name": "cache", "mountPath": "/x", "subPath": "/y"}]),
    ("volumeMounts", [{"name": "cache", "mountPath": "/x", "subPath": "../y"}]),
    ("volumeMounts", [{"name": "claim", "mountPath": "/x", "mountPropagation": "All"}]),
    ("volumeDevices", [{"name": "code", "devicePath": "/x"}]),
)  # fmt: skip
VOLUMES: tuple[dict[str, Any], ...] = (
    {}, {"emptyDir": {}, "hostPath": {"path": "/"}}, {"emptyDir": {"sizeLimit": "abc"}},
    {"emptyDir": {"sizeLimit": "-1"}}, {"emptyDir": {"medium": "Tape"}}, {"hostPath": {"path": "../x"}},
    {"hostPath": {}}, {"nfs": {"server": "s", "path": "p"}}, {"configMap": {}},
    {"configMap": {"name": "c", "defaultMode": 9999}}, {"secret": {"secretname": "s"}}, {"secret": "s"},
    {"configMap": {"name": "c", "items": [{"key": "k", "path": "../k"}]}}, {"persistentVolumeClaim": {}},
    {"nosuch": {}}, {"persistentVolumeClaim": {"claimName": "A B"}}, {"ephemeral": {}},
    {"ephemeral": {"volumeClaimTemplate": {"spec": {}}}}, {"csi": {}}, {"projected": {"sources": [{}]}},
    {"downwardAPI": {"items": [{"path": "x"}]}}, {"image": {}}, {"emptyDir": None}, {"emptydir": {}},
    {"name": "dataloaderjob-x", "emptyDir": {}}, {"emptyDir": {"sizeLimit": True}}, {"iscsi": {"lun": "x"}},
)  # fmt: skip
