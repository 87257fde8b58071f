"""What the NetworkPolicies of jobs let through: all that the data path needs, and nothing else."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from manifests import ATTACHED, manifest
from network_policies import Cluster, Pod, judge

from dataloaderjob.api import parse_object
from dataloaderjob_operator import objects
from dataloaderjob_operator.objects import settings
from dataloaderjob_operator.options import parse

ROOT = Path(__file__).resolve().parents[2]
PROMETHEUS = {
    "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}},
    "podSelector": {"matchLabels": {"app": "prometheus"}},
}
OWN = objects.OwnPod(namespace="ops", labels={"app.kubernetes.io/name": "dataloaderjob-operator"})
SETUP = objects.OperatorConfig(
    version="1.0", sidecar_image="i:1", root_key=b"r" * 32, operator=OWN, metrics_from=(PROMETHEUS,)
)
GCS, SUPERVISOR, METRICS = settings.GCS_PORT, settings.SUPERVISOR_PORT, settings.METRICS_PORT
SOME_PORT, RENDEZVOUS, ROCE = 41217, 29500, 4791
JOBS = {"": ("team", "mnist"), "other-": ("team", "other"), "namesake-": ("elsewhere", "mnist")}
"""The job in question, another of its namespace, and one of its name in another namespace."""
MODES = ("Ingress", "Strict")


def children(
    mode: str, namespace: str, name: str, setup: objects.OperatorConfig = SETUP
) -> list[dict[str, Any]]:
    changes = {
        "metadata.namespace": namespace, "metadata.name": name, "metadata.uid": f"u-{namespace}-{name}",
        "spec.networkPolicy.mode": mode, "spec.trainers.job.replicas": 2, "spec.feeders.replicas": 2,
    }  # fmt: skip
    job = parse_object(manifest(changes))
    return [*objects.base(job, setup), *objects.feeding(job, setup), *objects.training(job, setup, 0)]


def pods(prefix: str, made: list[dict[str, Any]]) -> Iterator[tuple[str, dict[str, Any], str]]:
    """Short names, labels and namespaces of the pods that children lead to."""
    for child in made:
        if "template" in child.get("spec", {}):
            labels = child["spec"]["template"]["metadata"]["labels"]
            role = labels["dataloading.dev/role"]
            for number in (1, 2) if role != "head" else (1,):
                short = f"{prefix}{role}" + ("" if number == 1 else str(number))
                yield short, labels, child["metadata"]["namespace"]


def world(mode: str, setup: objects.OperatorConfig = SETUP) -> tuple[Cluster, dict[str, Any]]:
    """Three jobs of that mode and what else is in a cluster; ends of connections by short names."""
    jobs = {prefix: children(mode, *where, setup) for prefix, where in JOBS.items()}
    found: list[tuple[str, Any, str]] = [
        ("operator", {**OWN.labels, "more": "labels"}, "ops"),
        ("operators-neighbour", {"app": "x"}, "ops"),
        ("operators-double", OWN.labels, "team"),
        ("bystander", {}, "team"),
        ("impostor", {"dataloading.dev/job": "mnist", "dataloading.dev/role": "trainer"}, "elsewhere-too"),
        ("roleless", {"dataloading.dev/job": "mnist"}, "team"),
        ("prometheus", {"app": "prometheus"}, "monitoring"),
        ("dns", {"k8s-app": "kube-dns"}, "kube-system"),
        *(pod for prefix, made in jobs.items() for pod in pods(prefix, made)),
    ]
    ends: dict[str, Any] = {
        short: Pod(name=short, labels=labels, namespace=namespace, ips=(f"10.0.0.{number}",), node="192.168.0.1")
        for number, (short, labels, namespace) in enumerate(found, start=1)
    }  # fmt: skip
    policies = [child for made in jobs.values() for child in made if child["kind"] == "NetworkPolicy"]
    cluster = Cluster(policies=tuple(policies), pods=tuple(ends.values()))
    outside = {
        "storage": "52.216.0.1",
        "node": "192.168.0.1",
        "node-dns": "169.254.20.10",
        "api": "10.96.0.1",
    }
    return cluster, ends | outside


WORLDS = {mode: world(mode) for mode in ("Ingress", "Strict", "None")}
NEEDED = [
    ("trainer", "head", SUPERVISOR, "TCP"),  # the sidecar: who the feeders are, metrics, blobs
    ("trainer2", "head", SUPERVISOR, "TCP"),
    ("feeder", "head", SUPERVISOR, "TCP"),  # its registration, blobs
    ("feeder", "head", GCS, "TCP"),
    ("feeder", "head", SOME_PORT, "TCP"),  # raylet, driver
    ("head", "feeder", SOME_PORT, "TCP"),  # GCS and driver to raylets and actors
    ("feeder", "feeder2", SOME_PORT, "TCP"),  # Ray asks all of its nodes for that
    ("trainer", "feeder", SOME_PORT, "TCP"),  # the sidecar: tickets and batches
    ("trainer2", "feeder2", SOME_PORT, "TCP"),
    ("trainer", "trainer2", RENDEZVOUS, "TCP"),
    ("trainer2", "trainer", SOME_PORT, "TCP"),  # gloo, NCCL
    ("trainer", "trainer2", ROCE, "UDP"),
    ("prometheus", "trainer", METRICS, "TCP"),
    ("node", "head", SUPERVISOR, "TCP"),  # probes
    ("node", "trainer", METRICS, "TCP"),
    ("operator", "head", SUPERVISOR, "TCP"),  # the job's metrics
    *((role, "dns", 53, protocol) for role in ("head", "feeder", "trainer") for protocol in ("UDP", "TCP")),
    *((role, "node-dns", 53, "UDP") for role in ("head", "feeder", "trainer")),
]
STRANGERS = (
    "other-trainer", "other-feeder", "other-head", "namesake-trainer", "namesake-feeder", "bystander", "impostor",
    "roleless", "operators-neighbour", "operators-double", "prometheus", "storage",
)  # fmt: skip
FORBIDDEN = [
    *((stranger, "head", port, "TCP") for stranger in STRANGERS for port in (SUPERVISOR, GCS, SOME_PORT)),
    *((stranger, "feeder", SOME_PORT, "TCP") for stranger in STRANGERS),
    *((stranger, "trainer", RENDEZVOUS, "TCP") for stranger in STRANGERS),
    *((stranger, "trainer", METRICS, "TCP") for stranger in STRANGERS if stranger != "prometheus"),
    ("trainer", "head", GCS, "TCP"),  # no trainer, nor its sidecar, knows Ray
    ("trainer", "head", SOME_PORT, "TCP"),
    ("trainer", "head", SUPERVISOR, "UDP"),
    ("trainer", "feeder", SOME_PORT, "UDP"),
    ("operator", "head", GCS, "TCP"),
    ("operator", "feeder", SOME_PORT, "TCP"),
    ("operator", "trainer", RENDEZVOUS, "TCP"),
    ("feeder", "trainer", RENDEZVOUS, "TCP"),  # trainers dial feeders, never the other way
    ("head", "trainer", RENDEZVOUS, "TCP"),
    ("trainer", "other-head", SUPERVISOR, "TCP"),
    ("trainer", "other-feeder", SOME_PORT, "TCP"),
    ("trainer", "namesake-trainer", RENDEZVOUS, "TCP"),
]
OUTSIDE = [
    (role, *to)
    for role in ("head", "feeder", "trainer")
    for to in (
        ("storage", 443, "TCP"), ("storage", 53, "UDP"), ("api", 443, "TCP"), ("bystander", 80, "TCP"),
        ("dns", 9153, "TCP"), ("operator", 9440, "TCP"), ("node-dns", 80, "TCP"),
    )
]  # fmt: skip
"""Where pods of a job may go as long as nobody restricts what they connect to."""


def ids(rows: list[tuple[str, str, int, str]]) -> list[Any]:
    return [pytest.param(*row, id=f"{row[0]}-to-{row[1]}-{row[2]}-{row[3]}") for row in rows]


def allowed(mode: str, source: str, to: str, port: int, protocol: str) -> bool:
    cluster, ends = WORLDS[mode]
    return judge(cluster, ends[source], ends[to], port, protocol).allowed


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("source", "to", "port", "protocol"), ids(NEEDED))
def test_traffic_of_the_data_path_is_allowed(mode, source, to, port, protocol) -> None:
    cluster, ends = WORLDS[mode]
    verdict = judge(cluster, ends[source], ends[to], port, protocol)
    assert verdict.allowed, verdict


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("source", "to", "port", "protocol"), ids(FORBIDDEN))
def test_unneeded_traffic_is_blocked_by_the_policies(mode, source, to, port, protocol) -> None:
    assert not allowed(mode, source, to, port, protocol)
    assert allowed("None", source, to, port, protocol), "it is the policies that shut it out"


@pytest.mark.parametrize(("source", "to", "port", "protocol"), ids(OUTSIDE))
def test_pods_reach_the_outside_unless_the_job_is_strict(source, to, port, protocol) -> None:
    assert allowed("Ingress", source, to, port, protocol)
    assert not allowed("Strict", source, to, port, protocol)


@pytest.mark.parametrize("mode", MODES)
def test_every_rule_of_every_policy_is_needed(mode: str) -> None:
    cluster, ends = WORLDS[mode]
    mine = [
        p
        for p in cluster.policies
        if (p["metadata"]["namespace"], p["metadata"]["labels"]["dataloading.dev/job"]) == JOBS[""]
    ]
    assert len(mine) == 3
    for policy in mine:
        for direction in ("ingress", "egress"):
            for number in range(len(policy["spec"].get(direction, []))):
                less = copy.deepcopy(policy)
                del less["spec"][direction][number]
                without = Cluster(
                    policies=(*(p for p in cluster.policies if p is not policy), less), pods=cluster.pods
                )
                lost = [
                    row for row in NEEDED if not judge(without, ends[row[0]], ends[row[1]], *row[2:]).allowed
                ]
                assert lost, f"{policy['metadata']['name']} is as well without {direction} {number}"


def test_every_policy_blocks_something_by_itself() -> None:
    cluster, ends = WORLDS["Ingress"]
    shut = {
        policy
        for source, to, port, protocol in FORBIDDEN
        for policy in judge(cluster, ends[source], ends[to], port, protocol).ingress.selecting
    }
    assert {"team/mnist-head", "team/mnist-feeder", "team/mnist-trainer"} <= shut


def test_operator_outside_any_pod_is_let_in_nowhere() -> None:
    cluster, ends = world(
        "Ingress", objects.OperatorConfig(version="1.0", sidecar_image="i:1", root_key=b"r" * 32)
    )
    assert not judge(cluster, ends["operator"], ends["head"], SUPERVISOR).allowed
    assert judge(cluster, ends["trainer"], ends["head"], SUPERVISOR).allowed


def test_network_policy_mode_none_creates_no_policies() -> None:
    assert "NetworkPolicy" not in {child["kind"] for child in children("None", "team", "mnist")}


def test_documented_policies_open_exactly_the_described_traffic() -> None:
    blocks = re.findall(r"```yaml\n(.*?)```", (ROOT / "docs/kubernetes/networking.md").read_text(), re.DOTALL)
    storage, tensorboard = (one for one in map(yaml.safe_load, blocks) if one.get("kind") == "NetworkPolicy")
    cluster, ends = WORLDS["Strict"]
    opened = Cluster(policies=(*cluster.policies, storage, tensorboard), pods=cluster.pods)

    def newly(source: str, to: str, port: int) -> bool:
        assert not judge(cluster, ends[source], ends[to], port).allowed
        return judge(opened, ends[source], ends[to], port).allowed

    for role in ("feeder", "trainer", "other-feeder"):
        assert newly(role, "storage", 443)
    assert newly("bystander", "trainer", 6006)
    for source, to, port in (
        ("head", "storage", 443), ("feeder", "storage", 80), ("feeder", "api", 443), ("bystander", "feeder", 6006),
        ("bystander", "other-trainer", 6006), ("bystander", "trainer", 6007),
    ):  # fmt: skip
        assert not newly(source, to, port)


REQUIRED = ["--root-key", "k", "--sidecar-image", "i"]


def test_operator_gets_its_own_pods_identity_from_its_options() -> None:
    labels = ["--own-label", "a.b/c=d=e", "--own-label", "f="]
    assert parse([*REQUIRED, "--own-namespace", "ops", *labels]).config.operator == objects.OwnPod(
        namespace="ops", labels={"a.b/c": "d=e", "f": ""}
    )
    assert parse(REQUIRED).config.operator is None


@pytest.mark.parametrize(
    "options",
    [["--own-namespace", "ops"], ["--own-label", "a=b"], ["--own-namespace", "ops", "--own-label", "a"]],
)
def test_own_namespace_and_own_label_must_be_given_together(options: list[str], capsys: Any) -> None:
    with pytest.raises(SystemExit):
        parse([*REQUIRED, *options])
    assert "must be given together" in capsys.readouterr().err


# Attached trainers: the label of injection stands for the role


def attached_world(mode: str) -> tuple[Cluster, dict[str, Pod]]:
    """A job with attached trainers, whose pods have their own labels and that of injection alone."""
    changes = {
        **ATTACHED, "metadata.namespace": "team", "metadata.name": "mnist", "metadata.uid": "u",
        "spec.networkPolicy.mode": mode,
    }  # fmt: skip
    job = parse_object(manifest(changes))
    made = [*objects.base(job, SETUP), *objects.feeding(job, SETUP)]
    inject = {"app": "theirs", "dataloading.dev/inject": "mnist"}
    found = [
        *pods("", made), ("attached", inject, "team"), ("attached2", inject, "team"), ("bystander", {}, "team"),
        ("elsewhere", inject, "other"), ("others", {**inject, "dataloading.dev/inject": "another"}, "team"),
    ]  # fmt: skip
    ends = {
        short: Pod(
            name=short, labels=labels, namespace=namespace, ips=(f"10.0.1.{number}",), node="192.168.0.1"
        )
        for number, (short, labels, namespace) in enumerate(found, start=1)
    }
    policies = tuple(child for child in made if child["kind"] == "NetworkPolicy")
    return Cluster(policies=policies, pods=tuple(ends.values())), ends


@pytest.mark.parametrize("mode", MODES)
def test_attached_pods_reach_the_supervisor_and_feeders_and_nothing_else(mode: str) -> None:
    cluster, ends = attached_world(mode)

    def passes(one: str, other: str, port: int) -> bool:
        return bool(judge(cluster, ends[one], ends[other], port, "TCP").allowed)

    assert passes("attached", "head", SUPERVISOR)
    assert passes("attached2", "feeder", SOME_PORT)
    assert not passes("attached", "head", GCS), "Ray is none of their business"
    for stranger in ("bystander", "elsewhere", "others"):
        assert not passes(stranger, "head", SUPERVISOR)
        assert not passes(stranger, "feeder", SOME_PORT)


@pytest.mark.parametrize("mode", [*MODES, "None"])
def test_no_policy_restricts_the_pods_of_other_controllers(mode: str) -> None:
    cluster, ends = attached_world(mode)
    for one, other in (("attached", "attached2"), ("bystander", "attached"), ("attached", "elsewhere")):
        assert judge(cluster, ends[one], ends[other], SOME_PORT, "TCP").allowed
    names = {policy["metadata"]["name"] for policy in cluster.policies}
    assert names == ({"mnist-head", "mnist-feeder"} if mode != "None" else set())
