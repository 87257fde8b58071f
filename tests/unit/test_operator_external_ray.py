"""Jobs on an existing Ray cluster: what the operator builds, awaits and rejects."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from observed_jobs import SETUP, SUPERVISOR, after, condition, decided, job, keys, live, pod

from dataloaderjob.api import DataLoaderJob, parse_object
from dataloaderjob.api.status import ConditionType, Phase
from dataloaderjob.core.settings import load
from dataloaderjob.core.supervision import EXIT_RAY_REFUSED
from dataloaderjob.pod.entry import HeadSettings
from dataloaderjob.pod.supervisor import agent_settings
from dataloaderjob_operator import objects
from dataloaderjob_operator.client import ApiError
from dataloaderjob_operator.decide.decision import Decision
from dataloaderjob_operator.decide.events import Reason, events_of
from dataloaderjob_operator.decide.external import DIFFERS, ENDS_S, LOOKS, WAITS
from dataloaderjob_operator.decide.observed import Observed
from dataloaderjob_operator.decide.ray_clusters import RayCluster, service_name
from dataloaderjob_operator.observe.ray_clusters import PERIOD_S, RayClusters

ROOT = Path(__file__).resolve().parents[2]
ADDRESS = "shared-head-svc.team.svc:6379"
FOUND = RayCluster("shared", address=ADDRESS)
MISSING = RayCluster("shared", missing="neither RayCluster shared nor its head's Service exists")
HEAD = ("Deployment", "mnist-head")
VERSIONS = "the Ray cluster of spec.ray.external runs Ray 2.44.1 on Python 3.9.1, this job has Ray 2.60.0"


def on(ray: dict[str, Any] | None = None, **spec: Any) -> DataLoaderJob:
    return job(ray={"external": ray or {"rayCluster": "shared"}}, **spec)


def starting(ray_cluster: RayCluster | None = FOUND, **more: Any) -> Observed:
    return Observed(job=on(), ray_cluster=ray_cluster, **more)


def serving(**more: Any) -> Observed:
    """Whose supervisor answers, and whose trainers run."""
    children = live(HEAD, readyReplicas=1) | live(("Job", "mnist-trainers-0"), active=1)
    found = {"pods": (pod("head"), pod("trainer")), "supervisor": SUPERVISOR, "children": children}
    return replace(starting(), **{**found, **more})


def refused_pod() -> dict[str, Any]:
    ended = {"terminated": {"exitCode": EXIT_RAY_REFUSED, "message": f"{VERSIONS}\n"}}
    container = {"name": "head", "state": {"waiting": {"reason": "CrashLoopBackOff"}}, "lastState": ended}
    return pod("head", containerStatuses=[{**container, "ready": False, "restartCount": 1}])


def built(found: Decision, kind: str, name: str) -> dict[str, Any]:
    return next(c for c in found.apply if (c["kind"], c["metadata"]["name"]) == (kind, name))


@pytest.mark.parametrize(
    ("found", "reason", "text"),
    [
        pytest.param(None, LOOKS, "the operator looks for RayCluster shared", id="not-looked-up"),
        pytest.param(MISSING, WAITS, MISSING.missing, id="missing"),
        pytest.param(RayCluster("other", address=ADDRESS), LOOKS, "looks for RayCluster shared", id="other"),
    ],
)
def test_job_waits_for_its_ray_cluster_and_says_so(found: RayCluster | None, reason: str, text: str):
    decision = decided(starting(found))
    assert (decision.status.phase, decision.ray_cluster) == (Phase.QUEUED, "shared")
    ready = condition(decision, ConditionType.READY)
    assert (ready.status, ready.reason) == ("False", reason)
    assert text in ready.message
    assert not any(kind == "Deployment" for kind, _ in keys(decision))
    told = [e for e in events_of(starting().status, decision.status) if e.reason is Reason.NOT_READY]
    assert [e.message for e in told] == ([f"{WAITS}: {text}"] if reason == WAITS else [])
    late = decided(after(starting(found), decision), 10_000)
    assert late.status.phase is Phase.QUEUED, "the startup deadline does not run"


def test_address_is_kept_when_the_ray_cluster_is_gone():
    first = decided(starting())
    assert (first.status.ray.address, first.status.ray.ray_cluster) == (ADDRESS, "shared")
    assert (first.ray_cluster, HEAD in keys(first)) == (None, True)
    later = decided(after(starting(), first, ray_cluster=None))
    assert later.status.ray.address == ADDRESS
    assert HEAD in keys(later)
    other = replace(after(starting(), first), job=on({"rayCluster": "second"}), ray_cluster=None)
    assert decided(other).ray_cluster == "second"


def test_job_on_an_existing_ray_has_a_supervisor_and_no_feeder_pods():
    found = decided(starting())
    assert {name for kind, name in keys(found) if kind in ("Deployment", "NetworkPolicy")} == {
        "mnist-head", "mnist-trainer",
    }  # fmt: skip
    ports = built(found, "Service", "mnist-head")["spec"]["ports"]
    assert [port["name"] for port in ports] == ["supervisor"]
    pod_spec = built(found, "Deployment", "mnist-head")["spec"]["template"]["spec"]
    modules = [
        next(w for w in c["command"] if w.startswith("dataloaderjob.")) for c in pod_spec["containers"]
    ]
    assert modules == ["dataloaderjob.pod.driver", "dataloaderjob.pod.supervisor"]
    assert (pod_spec["hostPID"], pod_spec["shareProcessNamespace"]) == (False, False)


def test_settings_are_those_of_the_drivers_pod(tmp_path, capsys):
    ray = {"address": "10.0.0.5:6379", "tokenSecretRef": {"name": "shared"}}
    env = [{"name": "ROOT", "value": "/data"}, {"name": "A", "value": "$(ROOT)/a"}]
    made = decided(Observed(job=on(ray, data={"env": env})))
    (config,) = [c for c in made.apply if c["kind"] == "ConfigMap"]
    (tmp_path / "head.json").write_text(config["data"]["head.json"])
    found = load(HeadSettings, tmp_path / "head.json")
    assert capsys.readouterr().err == ""
    assert (found.external.address, found.token_path) == ("10.0.0.5:6379", "/etc/dataloaderjob/ray/ray")
    agent = agent_settings(found, "10.0.0.5:6379")
    assert agent.feeder_env == {"ROOT": "/data", "A": "/data/a"}
    assert agent.feeder_resources == {"CPU": 1.0, "memory": 2.0 * (1 << 30)}
    assert (agent.ray_external, agent.ray_tag) == (True, "dataloaderjob-team-mnist-u")
    pod_spec = built(made, "Deployment", "mnist-head")["spec"]["template"]["spec"]
    volumes = {volume["name"]: volume for volume in pod_spec["volumes"]}
    token = volumes["dataloaderjob-ray-token"]["secret"]
    assert (token["secretName"], token["items"]) == ("shared", [{"key": "auth_token", "path": "ray"}])
    head, supervisor = (
        {m["name"]: m["mountPath"] for m in c["volumeMounts"]} for c in pod_spec["containers"]
    )
    assert head["dataloaderjob-ray-token"] == "/etc/dataloaderjob/ray"
    assert "dataloaderjob-ray-token" not in supervisor


@pytest.mark.parametrize(
    ("ray", "path"),
    [
        pytest.param({"external": {"rayCluster": "shared"}}, "feeder", id="existing"),
        pytest.param({}, "ray", id="own"),
    ],
)
def test_ray_container_has_its_part_of_the_secret_and_no_job_key(ray: dict[str, Any], path: str):
    made = decided(Observed(job=job(ray=ray), ray_cluster=FOUND))
    pod_spec = built(made, "Deployment", "mnist-head")["spec"]["template"]["spec"]
    secrets = {v["name"]: v["secret"] for v in pod_spec["volumes"] if "secret" in v}

    def given(container: dict[str, Any]) -> list[str]:
        """The files with parts of the job's Secret, in this container."""
        mounted = [secrets[m["name"]] for m in container["volumeMounts"] if m["name"] in secrets]
        return [i["path"] for s in mounted if s["secretName"].startswith("mnist-keys") for i in s["items"]]

    assert [given(container) for container in pod_spec["containers"]] == [[path], ["links"]]


COMPLETE = [{"type": "Complete", "status": "True"}]
ENDED: dict[str, Any] = {
    "pods": (pod("head"),),
    "children": live(HEAD, readyReplicas=1)
    | live(("Job", "mnist-trainers-0"), conditions=COMPLETE, succeeded=1),
}


def test_supervisor_ends_the_actors_before_its_pod_goes():
    ended = decided(serving(**ENDED))
    assert ended.status.phase is Phase.COMPLETE
    assert (ended.feeders, ended.ends_feeders, HEAD in ended.delete) == (0, True, False)
    assert ended.requeue_after_s == ENDS_S
    again = decided(after(serving(**ENDED), ended, supervisor=replace(SUPERVISOR, desired=0, ready=0)), 5)
    assert (again.ends_feeders, HEAD in again.delete) == (True, False)
    assert again.status == ended.status, "nothing more to write"
    gone = replace(SUPERVISOR, desired=0, ready=0, ended=True)
    over = decided(after(serving(**ENDED), ended, supervisor=gone), 5)
    assert (over.feeders, over.ends_feeders, HEAD in over.delete) == (None, False, True)


@pytest.mark.parametrize(
    ("supervisor", "seconds"),
    [
        pytest.param(SUPERVISOR, ENDS_S, id="late"),
        pytest.param(replace(SUPERVISOR, silent="no answer"), 0, id="silent"),
        pytest.param(None, 0, id="unknown"),
    ],
)
def test_lease_ends_the_actors_of_a_supervisor_that_cannot(supervisor: Any, seconds: float):
    ended = decided(serving(**ENDED))
    found = decided(after(serving(**ENDED), ended, supervisor=supervisor), seconds)
    assert (found.ends_feeders, HEAD in found.delete) == (False, True)


def test_job_with_a_ray_of_its_own_ends_its_head_at_once():
    found = decided(replace(serving(**ENDED), job=job()))
    assert (found.ends_feeders, HEAD in found.delete) == (False, True)


@pytest.mark.parametrize(
    ("ray", "peers"),
    [
        pytest.param({"rayCluster": "shared"}, [{"ray.io/cluster": "shared"}], id="ray-cluster"),
        pytest.param({"address": "10.0.0.5:6379"}, [], id="address"),
    ],
)
def test_policies_admit_the_pods_of_the_ray_cluster(ray: dict[str, Any], peers: list[dict[str, str]]):
    found = decided(Observed(job=on(ray, networkPolicy={"mode": "Strict"}), ray_cluster=FOUND))

    def labels(policy: str, way: str, end: str) -> list[Any]:
        rules = built(found, "NetworkPolicy", policy)["spec"][way]
        pods = [peer["podSelector"] for rule in rules for peer in rule.get(end, []) if "podSelector" in peer]
        return [p["matchLabels"] for p in pods if "ray.io/cluster" in p["matchLabels"]]

    assert labels("mnist-head", "ingress", "from") == peers
    assert labels("mnist-head", "egress", "to") == peers
    assert labels("mnist-trainer", "egress", "to") == peers
    assert "feeder" not in json.dumps([c for c in found.apply if c["kind"] == "NetworkPolicy"])


def test_job_serves_by_its_supervisors_report_alone():
    found = decided(serving())
    assert found.status.phase is Phase.RUNNING
    assert (found.status.feeders.ready, found.status.feeders.replicas) == (1, 1)
    silent = replace(SUPERVISOR, silent="no answer", desired=0, ready=0)
    lost = decided(after(serving(), found, supervisor=silent), 10)
    assert (lost.status.phase, lost.status.feeders.ready) == (Phase.DEGRADED, 1)


def test_other_versions_fail_a_job_that_has_not_served():
    found = decided(serving(pods=(refused_pod(), pod("trainer")), supervisor=None))
    failed = condition(found, ConditionType.FAILED)
    assert (found.status.phase, failed.reason, failed.message) == (Phase.FAILED, DIFFERS, VERSIONS)
    assert condition(found, ConditionType.STALLED).reason == DIFFERS
    (told,) = [e for e in events_of(starting().status, found.status) if e.reason is Reason.FAILED]
    assert VERSIONS in told.message


def test_other_versions_degrade_a_job_that_has_served():
    ran = decided(serving())
    children = live(HEAD, readyReplicas=0) | live(("Job", "mnist-trainers-0"), active=1)
    pods = (refused_pod(), pod("trainer"))
    found = decided(after(serving(), ran, pods=pods, supervisor=None, children=children), 60)
    ready = condition(found, ConditionType.HEAD_READY)
    assert (found.status.phase, ready.reason, ready.message) == (Phase.DEGRADED, DIFFERS, VERSIONS)


def test_messages_name_the_resources_of_the_supervisors_pod():
    killed = {"terminated": {"exitCode": 137, "reason": "OOMKilled", "finishedAt": "2026-01-01T00:00:00Z"}}
    status = {"name": "head", "state": {"waiting": {"reason": "CrashLoopBackOff"}}, "lastState": killed}
    dead = pod("head", containerStatuses=[{**status, "ready": False, "restartCount": 2}])
    found = decided(starting(pods=(dead,), children=live(HEAD, readyReplicas=0)))
    assert "spec.ray.external.resources.limits.memory" in condition(found, ConditionType.READY).message


@pytest.mark.parametrize(
    ("cluster", "service"),
    [
        ("shared", "shared-head-svc"),
        ("1st", "rst-head-svc"),
        ("a" * 44, "a" * 41 + "-head-svc"),
        ("x" * 3 + "-" + "b" * 40, "r" + "b" * 40 + "-head-svc"),
    ],
)
def test_heads_service_is_named_as_kuberay_names_it(cluster: str, service: str):
    assert service_name(cluster) == service


class Api:
    """An API server with the objects of one RayCluster, as a test sets them."""

    def __init__(self) -> None:
        self.cluster: dict[str, Any] | int = 404
        self.services: dict[str, list[dict[str, Any]]] = {}
        self.asked: list[str] = []

    async def get(self, path: str) -> dict[str, Any]:
        self.asked.append(path)
        if isinstance(self.cluster, int):
            raise ApiError(self.cluster, "no")
        return self.cluster

    async def read(self, namespace: str, key: tuple[str, str]) -> dict[str, Any] | None:
        ports = self.services.get(key[1])
        return None if ports is None else {"metadata": {"name": key[1]}, "spec": {"ports": ports}}


class Lookups:
    """The lookups of one operator, at moments of the test's choice."""

    def __init__(self) -> None:
        self.api, self.now, self.changes = Api(), 0.0, 0
        self.clusters = RayClusters(self.api, self._change, clock=lambda: self.now)  # type: ignore[arg-type]
        self.clusters.want(("team", "mnist"), "shared")

    def _change(self, key: Any) -> None:
        self.changes += 1

    def at(self, now: float) -> RayCluster | None:
        self.now = now
        while asyncio.run(self.clusters.turn()):
            pass
        return self.clusters.found(("team", "mnist"))


@pytest.mark.parametrize(
    ("cluster", "text"),
    [
        pytest.param(
            404, "neither RayCluster shared nor its head's Service shared-head-svc exists", id="none"
        ),
        pytest.param(403, "and the operator has no permission to read rayclusters.ray.io", id="no-rights"),
        pytest.param(
            {"status": {}}, "RayCluster shared exists, but its head's Service shared-head-svc", id="new"
        ),
    ],
)
def test_what_is_missing_of_a_ray_cluster_is_told(cluster: Any, text: str):
    lookups = Lookups()
    lookups.api.cluster = cluster
    found = lookups.at(0.0)
    assert found is not None
    assert text in found.missing
    lookups.at(PERIOD_S)
    assert (len(lookups.api.asked), lookups.changes) == (2, 1), "the same again changes nothing"
    lookups.api.services["shared-head-svc"] = [{"name": "gcs-server", "port": 6379}]
    assert lookups.at(2 * PERIOD_S) == FOUND


def test_service_and_port_are_those_that_kuberay_reports():
    lookups = Lookups()
    lookups.api.cluster = {"status": {"head": {"serviceName": "own-name", "serviceIP": "10.96.0.9"}}}
    lookups.api.services["own-name"] = [
        {"name": "client", "port": 10001},
        {"name": "gcs-server", "port": 6380},
    ]
    assert lookups.at(0.0) == RayCluster("shared", address="own-name.team.svc:6380")
    lookups.clusters.want(("team", "mnist"), None)
    assert lookups.at(PERIOD_S) is None


def test_server_that_fails_changes_nothing():
    lookups = Lookups()
    lookups.api.cluster = 503
    assert lookups.at(0.0) is None
    assert lookups.changes == 0


def test_example_is_the_main_job_on_another_ray():
    example = ROOT / "examples" / "fashion-mnist"
    main, other = (
        yaml.safe_load((example / name).read_text()) for name in ("dataloaderjob.yaml", "existing-ray.yaml")
    )
    ray = other["spec"].pop("ray")
    main["spec"]["loader"]["batchTimeoutSeconds"] = other["spec"]["loader"]["batchTimeoutSeconds"]
    assert main == other
    made = parse_object({**other, "spec": {**other["spec"], "ray": ray}})
    metadata = made.metadata.model_copy(update={"uid": "u", "namespace": "team"})
    assert objects.feeding(made.model_copy(update={"metadata": metadata}), SETUP) == (), (
        "the address is unknown"
    )
