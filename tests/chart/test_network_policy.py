"""The operator's own NetworkPolicy, as helm renders it, judged beside those that the operator makes of a job."""

from __future__ import annotations

import dataclasses

import pytest
from manifests import manifest
from network_policies import Cluster, End, Pod, judge

from chart import render
from dataloaderjob.api import parse_object
from dataloaderjob_operator import objects
from dataloaderjob_operator.objects import settings
from dataloaderjob_operator.options import parse

NAMED = "NetworkPolicy", "r-operator"
METRICS = 9440
POD = "Deployment", "r-operator"


def world(*options: str) -> tuple[Cluster, dict[str, End]]:
    """The chart and a job in the namespace team whose operator has the chart's options."""
    found = render(*options)
    template = found[POD]["spec"]["template"]
    config = parse(template["spec"]["containers"][0]["args"]).config
    setup = dataclasses.replace(config, root_key=b"r" * 32)
    job = parse_object(manifest({"metadata.uid": "u", "metadata.namespace": "team"}))
    heads = {
        child["metadata"]["name"]: child["spec"]["template"]["metadata"]["labels"]
        for child in objects.feeding(job, setup)
        if child["kind"] == "Deployment"
    }
    pods = [
        Pod(
            name="operator", namespace="ops", labels=template["metadata"]["labels"], ips=("10.0.0.1",),
            ports={("metrics", "TCP"): METRICS},
        ),
        Pod(name="head", namespace="team", labels=heads["mnist-head"], ips=("10.0.0.2",)),
        Pod(name="feeder", namespace="team", labels=heads["mnist-feeders"], ips=("10.0.0.3",)),
        Pod(name="bystander", namespace="team", ips=("10.0.0.4",)),
        Pod(name="neighbour", namespace="ops", ips=("10.0.0.5",)),
        Pod(name="prometheus", namespace="monitoring", labels={"app": "prometheus"}, ips=("10.0.0.6",)),
        Pod(name="dns", namespace="kube-system", ips=("10.0.0.7",)),
    ]  # fmt: skip
    policies = [found[NAMED]] if NAMED in found else []
    policies += [child for child in objects.base(job, setup) if child["kind"] == "NetworkPolicy"]
    ends: dict[str, End] = {pod.name: pod for pod in pods}
    return Cluster(policies=tuple(policies), pods=tuple(pods)), ends | {"outside": "52.216.0.1"}


NEEDED = [
    *(("operator", "outside", port) for port in (443, 6443)),  # the API server, wherever it is
    ("operator", "head", settings.SUPERVISOR_PORT),
    ("operator", "dns", 53),
    ("prometheus", "operator", METRICS),
]
FORBIDDEN = [
    ("bystander", "operator", 8080),
    ("neighbour", "operator", METRICS + 1),
    ("outside", "operator", 22),
    ("operator", "outside", 80),
    ("operator", "head", settings.GCS_PORT),
    ("operator", "feeder", 41217),
    ("operator", "feeder", settings.SUPERVISOR_PORT),
    ("operator", "bystander", 8080),
    ("operator", "dns", 9153),
    ("bystander", "head", settings.SUPERVISOR_PORT),
]


def test_operator_and_its_jobs_reach_each_other_as_needed() -> None:
    for options in ([], ["--set", "namespaces={team,b}"]):
        cluster, ends = world(*options)
        for source, to, port in NEEDED:
            verdict = judge(cluster, ends[source], ends[to], port)
            assert verdict.allowed, f"{source} to {to} {port}: {verdict}"
        assert judge(cluster, ends["operator"], ends["dns"], 53, "UDP").allowed


@pytest.mark.parametrize(("source", "to", "port"), FORBIDDEN)
def test_all_other_traffic_of_the_operator_is_denied(source: str, to: str, port: int) -> None:
    cluster, ends = world()
    assert not judge(cluster, ends[source], ends[to], port).allowed


def test_namespaced_operator_reaches_supervisors_there_only() -> None:
    cluster, ends = world("--set", "namespaces={b}")
    assert not judge(cluster, ends["operator"], ends["head"], settings.SUPERVISOR_PORT).egress.allowed


def test_policy_selects_only_the_operators_pods() -> None:
    cluster, ends = world()
    assert judge(cluster, ends["bystander"], ends["neighbour"], 80).allowed


def test_metrics_from_value_limits_who_collects_metrics() -> None:
    cluster, ends = world(
        "--set-json",
        'networkPolicy.metricsFrom=[{"namespaceSelector":{},"podSelector":{"matchLabels":{"app":"prometheus"}}}]',
    )  # fmt: skip
    assert judge(cluster, ends["prometheus"], ends["operator"], METRICS).allowed
    assert not judge(cluster, ends["bystander"], ends["operator"], METRICS).allowed


def test_policy_can_be_extended_or_disabled() -> None:
    more = 'networkPolicy.extraEgress=[{"to":[{"ipBlock":{"cidr":"52.0.0.0/8"}}],"ports":[{"port":5353}]}]'
    cluster, ends = world("--set-json", more)
    assert judge(cluster, ends["operator"], ends["outside"], 5353).allowed
    assert not judge(cluster, ends["operator"], ends["outside"], 80).allowed
    cluster, ends = world("--set", "networkPolicy.enabled=false")
    assert judge(cluster, ends["bystander"], ends["operator"], 8080).allowed
    assert judge(cluster, ends["operator"], ends["head"], settings.SUPERVISOR_PORT).allowed


@pytest.mark.parametrize(
    "value",
    ["networkPolicy.apiServerPorts={}", "networkPolicy.apiServerPorts={http}", "networkPolicy.egress=true"],
)
def test_value_that_would_break_the_policy_is_refused(value: str) -> None:
    with pytest.raises(ValueError, match="networkPolicy"):
        render("--set", value)
