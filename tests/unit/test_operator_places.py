"""Children of jobs on other than plain clusters: the node's network, meshes, namespaces that give uids."""

from __future__ import annotations

import json
from typing import Any

import pytest
from manifests import manifest

from dataloaderjob.api import DataLoaderJob, parse_object
from dataloaderjob_operator import objects
from dataloaderjob_operator.objects import settings
from dataloaderjob_operator.options import parse

FEEDER = "spec.feeders.template.spec"
TRAINER = "spec.trainers.job.template.spec"
ON_NODE = {
    "spec.networkPolicy.mode": "None",
    f"{FEEDER}.hostNetwork": True,
    f"{TRAINER}.hostNetwork": True,
}


def operator(**more: Any) -> objects.OperatorConfig:
    found = {"version": "1.0", "sidecar_image": "example/sidecar:1", "root_key": b"r" * 32, **more}
    return objects.OperatorConfig(**found)


def job(changes: dict[str, Any] | None = None, uid: str = "u-1") -> DataLoaderJob:
    on_cluster = {"metadata.uid": uid, "metadata.namespace": "team"}
    return parse_object(manifest({**on_cluster, **(changes or {})}))


def children(
    changes: dict[str, Any] | None = None, uid: str = "u-1", **setup: Any
) -> dict[str, dict[str, Any]]:
    made, config = job(changes, uid), operator(**setup)
    found = [
        *objects.base(made, config),
        *objects.feeding(made, config),
        *objects.training(made, config, 0),
    ]
    return {f"{child['kind']}/{child['metadata']['name']}": child for child in found}


def settings_files(made: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """The files of all settings, by name."""
    files = (child["data"].items() for child in made.values() if child["kind"] == "ConfigMap")
    return {name: json.loads(text) for found in files for name, text in found}


def pod(child: dict[str, Any]) -> dict[str, Any]:
    return dict(child["spec"]["template"]["spec"])


def trainer_pod(changes: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    return pod(children(changes, **more)["Job/mnist-trainers-0"])


def env(container: dict[str, Any]) -> dict[str, Any]:
    return {item["name"]: item.get("value", item.get("valueFrom")) for item in container["env"]}


# The node's network


def test_pods_on_the_host_network_use_cluster_dns_unless_overridden():
    made = children(ON_NODE)
    for name in ("Deployment/mnist-feeders", "Job/mnist-trainers-0"):
        assert pod(made[name])["dnsPolicy"] == "ClusterFirstWithHostNet"
    assert "dnsPolicy" not in trainer_pod()
    assert trainer_pod({**ON_NODE, f"{TRAINER}.dnsPolicy": "None"})["dnsPolicy"] == "None"


@pytest.mark.parametrize("domain", ["cluster.local", "prod.example", ""])
def test_pods_find_each_other_by_full_names(domain: str):
    end = f".team.svc.{domain}".rstrip(".")
    made = children(cluster_domain=domain)
    files = settings_files(made)
    assert files["sidecar.json"]["supervisor_host"] == files["head.json"]["host"] == f"mnist-head{end}"
    assert files["feeder.json"]["head"] == f"mnist-head{end}:6379"
    trainer = pod(made["Job/mnist-trainers-0"])["containers"][0]
    assert env(trainer)["MASTER_ADDR"] == f"mnist-trainers-0-0.mnist-trainers{end}"


@pytest.mark.parametrize(
    ("text", "domain"),
    [
        (
            "search ops.svc.cluster.local svc.cluster.local cluster.local\nnameserver 10.96.0.10",
            "cluster.local",
        ),
        ("nameserver 10.0.0.1\nsearch ops.svc.prod.example svc.prod.example. prod.example", "prod.example"),
        ("search fritz.box\nnameserver 192.168.0.1", ""),
        ("search\n", ""),
        ("", ""),
    ],
)
def test_operator_reads_the_cluster_domain_from_its_search_list(text: str, domain: str):
    assert settings.cluster_domain(text) == domain


def test_domain_on_the_command_line_overrides_the_operators_own(tmp_path):
    key = tmp_path / "root"
    key.write_bytes(b"r" * 32)
    options = parse(["--root-key", str(key), "--sidecar-image", "i:1", "--cluster-domain", "prod.example"])
    assert options.config.cluster_domain == "prod.example"


def test_operators_resolv_conf_is_used_if_no_domain_is_given(tmp_path, monkeypatch):
    own = tmp_path / "resolv.conf"
    monkeypatch.setattr("dataloaderjob_operator.options.RESOLV_CONF", own)
    options = ["--root-key", "root", "--sidecar-image", "i:1"]
    assert parse(options).config.cluster_domain == "", "there is none"
    own.write_text("search ops.svc.prod.example svc.prod.example prod.example\nnameserver 10.96.0.10\n")
    assert parse(options).config.cluster_domain == "prod.example"


def ports(changes: dict[str, Any] | None = None, uid: str = "u-1") -> tuple[int, int]:
    """Those of the sidecar and of the first rank; all that know the sidecar's say the same."""
    made = children(changes, uid)
    sidecar = pod(made["Job/mnist-trainers-0"])["initContainers"][0]
    (port,) = sidecar["ports"]
    assert port["name"] == sidecar["startupProbe"]["httpGet"]["port"] == "metrics"
    told = settings_files(made)["sidecar.json"]["metrics_port"]
    (service,) = made["Service/mnist-trainers"]["spec"]["ports"]
    assert port["containerPort"] == told == service["port"]
    found = env(pod(made["Job/mnist-trainers-0"])["containers"][0])
    assert found["MASTER_PORT"] == found["PET_MASTER_PORT"]
    return port["containerPort"], int(found["MASTER_PORT"])


def test_trainers_of_several_jobs_can_share_a_nodes_network():
    assert ports() == (9400, 29500)
    pairs = [ports(ON_NODE, uid=f"u-{number}") for number in range(5)]
    assert len({port for pair in pairs for port in pair}) == 10, "no port is of two jobs"
    assert all(20_000 <= port < 28_000 for pair in pairs for port in pair), (
        "none that the node's own may draw"
    )
    assert ports(ON_NODE) == ports(ON_NODE), "they stay"


@pytest.mark.parametrize("where", [{}, ON_NODE], ids=["pod", "node"])
def test_the_manifest_may_choose_the_ports_of_trainers(where: dict[str, Any]):
    assert ports({**where, "spec.sidecar.metricsPort": 9500, "spec.trainers.job.masterPort": 9501}) == (
        9500,
        9501,
    )


def test_sidecar_on_the_host_network_declares_its_port():
    """A container's port is its node's there, and the scheduler names it: it must be declared."""
    sidecar = trainer_pod(ON_NODE)["initContainers"][0]
    assert sidecar["ports"] == [{"name": "metrics", "containerPort": ports(ON_NODE)[0]}]


# Users and groups


@pytest.mark.parametrize(
    ("security", "user"),
    [({"runAsUser": 0}, 65532), ({"runAsUser": 1000}, None), ({}, None), (None, None)],
    ids=["root", "user", "empty", "none"],
)
def test_sidecar_runs_unprivileged_even_in_a_root_trainer_pod(
    security: dict[str, Any] | None, user: int | None
):
    (sidecar,) = trainer_pod({f"{TRAINER}.securityContext": security})["initContainers"]
    assert sidecar["securityContext"].get("runAsUser") == user
    assert sidecar["securityContext"]["runAsNonRoot"] is True


@pytest.mark.parametrize("given", [{}, {"fsGroup": 7}], ids=["no-group", "own-group"])
def test_without_fs_group_pods_have_only_the_templates_users_and_groups(
    given: dict[str, int],
):
    changes = {f"{TRAINER}.securityContext": given}
    made = children(changes, fs_group=None)
    for name in ("Deployment/mnist-head", "Deployment/mnist-feeders", "Job/mnist-trainers-0"):
        found = pod(made[name])
        assert found["securityContext"] == given
        for container in (*found["containers"], *found.get("initContainers", [])):
            assert not {"runAsUser", "runAsGroup"} & set(container.get("securityContext", {}))
    assert trainer_pod(changes)["securityContext"] == {"fsGroup": 65532, **given}


@pytest.mark.parametrize(("text", "group"), [("none", None), ("0", 0), ("1234", 1234)])
def test_fs_group_is_an_operator_option(text: str, group: int | None):
    assert parse(["--root-key", "k", "--sidecar-image", "i:1", "--fs-group", text]).config.fs_group == group
    assert parse(["--root-key", "k", "--sidecar-image", "i:1"]).config.fs_group == 65532


def test_invalid_fs_group_is_refused(capsys):
    with pytest.raises(SystemExit):
        parse(["--root-key", "k", "--sidecar-image", "i:1", "--fs-group", "users"])
    assert 'expected a group ID or "none"' in capsys.readouterr().err


# The head


def head_pod(changes: dict[str, Any]) -> dict[str, Any]:
    return pod(children(changes)["Deployment/mnist-head"])


OF_FEEDERS = {
    "nodeSelector": {"pool": "spot"}, "priorityClassName": "low", "runtimeClassName": "kata", "hostPID": True,
    "resourceClaims": [{"name": "nic"}], "tolerations": [{"key": "spot", "operator": "Exists"}],
    "dnsConfig": {"searches": ["x"]}, "serviceAccountName": "reader",
    "volumes": [{"name": "data", "emptyDir": {}}], "initContainers": [{"name": "fetch", "image": "f:1"}],
}  # fmt: skip


def test_head_takes_nothing_from_the_feeders_template():
    made = children({FEEDER: OF_FEEDERS, "spec.feeders.template.metadata": {"labels": {"of": "feeders"}}})
    head = made["Deployment/mnist-head"]
    assert head == children()["Deployment/mnist-head"]
    assert pod(made["Deployment/mnist-feeders"])["nodeSelector"] == {"pool": "spot"}


def test_head_has_its_own_template_and_resources():
    container = {
        "name": "head", "env": [{"name": "A", "value": "1"}], "volumeMounts": [{"name": "logs", "mountPath": "/logs"}],
    }  # fmt: skip
    spec = {
        "nodeSelector": {"pool": "stable"}, "priorityClassName": "high", "volumes": [{"name": "logs", "emptyDir": {}}],
        "containers": [{"name": "shipper", "image": "s:1"}, container],
    }  # fmt: skip
    metadata = {"labels": {"team": "vision"}, "annotations": {"note": "x"}}
    resources = {"requests": {"cpu": "1"}, "limits": {"memory": "3Gi"}}
    made = children(
        {"spec.ray.managed.head": {"template": {"metadata": metadata, "spec": spec}, "resources": resources}}
    )
    deployment = made["Deployment/mnist-head"]
    found = pod(deployment)
    assert (found["nodeSelector"], found["priorityClassName"]) == ({"pool": "stable"}, "high")
    head, supervisor, shipper = found["containers"]
    assert (head["name"], env(head)["A"], env(supervisor)["A"]) == ("head", "1", "1")
    assert head["resources"] == {"requests": {"cpu": "800m"}, "limits": {"memory": "2688Mi"}}
    assert supervisor["resources"] == {"requests": {"cpu": "200m"}, "limits": {"memory": "384Mi"}}
    assert shipper == {"name": "shipper", "image": "s:1"}
    assert {"name": "logs", "mountPath": "/logs"} in head["volumeMounts"]
    assert "logs" not in mounted(supervisor).values()
    assert {"name": "logs", "emptyDir": {}} in found["volumes"]
    assert deployment["spec"]["template"]["metadata"]["labels"]["team"] == "vision"
    assert "nodeSelector" not in pod(made["Deployment/mnist-feeders"])


@pytest.mark.parametrize(
    ("given", "secret"),
    [
        (("trainers.job",), "trainers.job"),
        (("trainers.job", "feeders"), "feeders"),
        (("trainers.job", "feeders", "ray.managed.head"), "ray.managed.head"),
    ],
)
def test_head_uses_the_feeders_pull_secrets_unless_it_has_its_own(given: tuple[str, ...], secret: str):
    changes = {f"spec.{part}.template.spec.imagePullSecrets": [{"name": part}] for part in given}
    assert head_pod(changes)["imagePullSecrets"] == [{"name": secret}]


@pytest.mark.parametrize(
    "changes",
    [
        {"spec.ray.managed.head.resources": {"limits": {"cpu": "9"}}},
        {"spec.ray.managed.head.template.spec.hostIPC": True},
    ],
)
def test_changed_head_spec_replaces_only_the_head(changes: dict[str, Any]):
    before, after = children(), children(changes)
    assert after["Deployment/mnist-head"] != before["Deployment/mnist-head"]
    assert after["Deployment/mnist-feeders"] == before["Deployment/mnist-feeders"]


# Scratch and shared memory

CLAIM = {"ephemeral": {"volumeClaimTemplate": {"spec": {"resources": {"requests": {"storage": "1Ti"}}}}}}


def volume(made: dict[str, Any], name: str) -> dict[str, Any] | None:
    return next((v for v in made["volumes"] if v["name"] == name), None)


@pytest.mark.parametrize(
    ("given", "source"),
    [
        ({}, {"emptyDir": {"sizeLimit": "10Gi"}}),
        ({"size": "100Gi"}, {"emptyDir": {"sizeLimit": "100Gi"}}),
        ({"volume": CLAIM}, CLAIM),
        ({"volume": {"hostPath": {"path": "/nvme"}}}, {"hostPath": {"path": "/nvme"}}),
    ],
    ids=["default", "size", "claim", "host-path"],
)
def test_scratch_has_the_size_or_volume_of_the_manifest(given: Any, source: Any):
    made = children({"spec.feeders.scratch": given})
    rows = (("mnist-feeders", "dataloaderjob-tmp"), ("mnist-head", "dataloaderjob-supervisor"))
    for name, of_data in rows:
        assert volume(pod(made[f"Deployment/{name}"]), of_data) == {"name": of_data, **source}
    of_ray = volume(pod(made["Deployment/mnist-head"]), "dataloaderjob-tmp")
    assert of_ray == {"name": "dataloaderjob-tmp", "emptyDir": {"sizeLimit": "10Gi"}}
    of_trainers = trainer_pod({"spec.sidecar.scratch": given})
    assert volume(of_trainers, "dataloaderjob-run") == {"name": "dataloaderjob-run", **source}


def mounted(container: dict[str, Any]) -> dict[str, str]:
    paths = [mount["mountPath"].rstrip("/") for mount in container["volumeMounts"]]
    assert len(paths) == len(set(paths)), "the API server refuses two at one path"
    return {mount["mountPath"].rstrip("/"): mount["name"] for mount in container["volumeMounts"]}


@pytest.mark.parametrize("path", ["/tmp", "/tmp/", "/dev/shm"])
@pytest.mark.parametrize(("part", "name"), [("feeders", "feeder"), ("ray.managed.head", "head")])
def test_users_mount_at_a_scratch_path_takes_precedence(part: str, name: str, path: str):
    mine = {"name": "mine", "mountPath": path}
    spec = {
        "volumes": [{"name": "mine", "emptyDir": {}}], "containers": [{"name": name, "volumeMounts": [mine]}],
    }  # fmt: skip
    child = {"feeder": "Deployment/mnist-feeders", "head": "Deployment/mnist-head"}[name]
    made = pod(children({f"spec.{part}.template.spec": spec})[child])
    found = mounted(made["containers"][0])
    assert found[path.rstrip("/")] == "mine"
    used = {mount for container in made["containers"] for mount in mounted(container).values()}
    assert {mount for mount in used if mount.startswith("dataloaderjob")} == {
        v["name"] for v in made["volumes"] if v["name"].startswith("dataloaderjob")
    }, "no volume without a mount"


def scratch(changes: dict[str, Any]) -> dict[str, int]:
    return dict(settings_files(children(changes))["sidecar.json"]["scratch"])


def test_trainers_know_the_size_of_every_scratch_their_data_passes():
    size = "spec.sidecar.scratch.size", "spec.feeders.scratch.size"
    assert scratch({}) == dict.fromkeys(size, 10 << 30)
    given = {"spec.sidecar.scratch.size": "1Gi", "spec.feeders.scratch.volume": CLAIM}
    assert scratch(given) == {size[0]: 1 << 30, "spec.feeders.scratch.volume": 1 << 40}
    unknown = {"hostPath": {"path": "/nvme"}}
    assert scratch({"spec.sidecar.scratch.volume": unknown}) == {size[1]: 10 << 30}


def test_scratch_of_the_supervisor_limits_all_data_whatever_is_mounted():
    def own(name: str) -> list[dict[str, Any]]:
        return [{"name": name, "volumeMounts": [{"name": "v", "mountPath": "/tmp"}]}]

    both = {
        f"{FEEDER}.containers": own("feeder"),
        "spec.ray.managed.head.template.spec.containers": own("head"),
    }
    assert scratch(both)["spec.feeders.scratch.size"] == 10 << 30, "all data passes the supervisor"


def test_changed_scratch_replaces_the_pods_that_use_it():
    before, after = children(), children({"spec.feeders.scratch.size": "20Gi"})
    for name in ("Deployment/mnist-head", "Deployment/mnist-feeders"):
        key = "dataloading.dev/template"
        hashes = [made[name]["spec"]["template"]["metadata"]["annotations"][key] for made in (before, after)]
        assert hashes[0] != hashes[1]


def test_feeders_with_room_for_tasks_have_shared_memory_for_the_store():
    plain = children()
    for given, size in (({"cpus": 2}, "336Mi"), ({"cpus": 2, "objectStore": "1Gi"}, "1280Mi")):
        made = children({"spec.ray.managed.tasks": given})
        found = volume(pod(made["Deployment/mnist-feeders"]), "dataloaderjob-shm")
        assert found == {"name": "dataloaderjob-shm", "emptyDir": {"medium": "Memory", "sizeLimit": size}}
        key = "dataloading.dev/template"
        hashes = [
            each["Deployment/mnist-feeders"]["spec"]["template"]["metadata"]["annotations"][key]
            for each in (plain, made)
        ]
        assert hashes[0] != hashes[1], "their pods are replaced"
        assert made["Deployment/mnist-head"] == plain["Deployment/mnist-head"]


def test_trainers_have_shared_memory_unless_they_bring_their_own():
    made = trainer_pod()
    assert mounted(made["containers"][0])["/dev/shm"] == "dataloaderjob-shm"
    assert volume(made, "dataloaderjob-shm") == {
        "name": "dataloaderjob-shm",
        "emptyDir": {"medium": "Memory"},
    }
    mine = [{"name": "mine", "mountPath": "/dev/shm"}]
    own = trainer_pod({f"{TRAINER}.containers.0.volumeMounts": mine})
    assert mounted(own["containers"][0])["/dev/shm"] == "mine"
    assert volume(own, "dataloaderjob-shm") is None


# Meshes

INJECT, MODE = "sidecar.istio.io/inject", "istio.io/dataplane-mode"
PODS = {
    "spec.ray.managed.head": "Deployment/mnist-head", "spec.feeders": "Deployment/mnist-feeders",
    "spec.trainers.job": "Job/mnist-trainers-0",
}  # fmt: skip


def pod_metadata(child: dict[str, Any]) -> tuple[dict[str, str], dict[str, str]]:
    metadata = child["spec"]["template"]["metadata"]
    return metadata["labels"], metadata["annotations"]


@pytest.mark.parametrize("part", PODS)
def test_pods_stay_out_of_a_mesh_unless_their_template_opts_in(part: str):
    labels, annotations = pod_metadata(children()[PODS[part]])
    assert (labels[INJECT], labels[MODE], annotations["linkerd.io/inject"]) == ("false", "none", "disabled")
    asked = {
        f"{part}.template.metadata.labels": {MODE: "ambient"},
        f"{part}.template.metadata.annotations": {"linkerd.io/inject": "enabled"},
    }
    labels, annotations = pod_metadata(children(asked)[PODS[part]])
    assert (labels[MODE], annotations["linkerd.io/inject"]) == ("ambient", "enabled")


@pytest.mark.parametrize("where", ["labels", "annotations"])
def test_injected_proxy_leaves_the_jobs_own_connections_alone(where: str):
    made = children({f"spec.trainers.job.template.metadata.{where}": {INJECT: "true"}})
    labels, annotations = pod_metadata(made["Job/mnist-trainers-0"])
    assert "false" not in (labels.get(INJECT), annotations.get(INJECT))
    assert annotations["traffic.sidecar.istio.io/includeInboundPorts"] == ""
    assert annotations["traffic.sidecar.istio.io/excludeOutboundPorts"] == "6379,6400"
    mine = {"traffic.sidecar.istio.io/includeInboundPorts": "8080"}
    own = {f"{TRAINER[:-5]}.metadata": {"labels": {INJECT: "true"}, "annotations": mine}}
    assert mine.items() <= pod_metadata(children(own)["Job/mnist-trainers-0"])[1].items()


def ingress(made: dict[str, dict[str, Any]], role: str) -> list[dict[str, Any]]:
    return list(made[f"NetworkPolicy/mnist-{role}"]["spec"]["ingress"])


def test_ambient_mesh_tunnels_and_probes_are_allowed_only_for_its_pods():
    own = objects.OwnPod(namespace="ops", labels={"app": "operator"})
    ambient = {
        "spec.ray.managed.head.template.metadata.labels": {MODE: "ambient"},
        "spec.networkPolicy.mode": "Strict",
    }
    made, plain = (
        children(ambient, operator=own),
        children({"spec.networkPolicy.mode": "Strict"}, operator=own),
    )
    tunnel = {"protocol": "TCP", "port": 15008}
    rules = ingress(made, "head")
    assert {"from": [{"ipBlock": {"cidr": "169.254.7.127/32"}}, {"ipBlock": {"cidr": IPV6_PROBES}}]} in rules
    numbered = [rule["ports"] for rule in rules if any("port" in port for port in rule.get("ports", []))]
    assert len(numbered) == 2, "trainers and the operator"
    assert all(tunnel in found for found in numbered)
    to_head = made["NetworkPolicy/mnist-trainer"]["spec"]["egress"][0]
    assert tunnel in to_head["ports"], "a trainer connects by the tunnel"
    assert "15008" not in json.dumps([child for name, child in plain.items() if name.startswith("Network")])
    assert "169.254.7.127" not in json.dumps(ingress(made, "trainer"))


IPV6_PROBES = "fd16:9254:7127:1337:ffff:ffff:ffff:ffff/128"


# Metrics, images, queues


def test_sidecar_metrics_are_open_only_to_the_peers_of_the_operator():
    assert "9400" not in json.dumps(ingress(children(), "trainer"))
    peer = {"namespaceSelector": {"matchLabels": {"team": "monitoring"}}}
    rules = ingress(children(metrics_from=(peer,)), "trainer")
    assert {"from": [peer], "ports": [{"protocol": "TCP", "port": 9400}]} in rules


ARGUMENTS = ["--root-key", "k", "--sidecar-image", "i:1"]


@pytest.mark.parametrize("text", ["", "{}", "[{}]", "[1]", '[{"pods": {}}]'])
def test_invalid_metrics_peers_are_refused(text: str, capsys):
    with pytest.raises(SystemExit):
        parse([*ARGUMENTS, "--metrics-from", text])
    assert "--metrics-from" in capsys.readouterr().err


def test_metrics_peers_are_an_operator_option():
    peers = [{"podSelector": {}}, {"ipBlock": {"cidr": "10.0.0.0/8"}}]
    assert parse([*ARGUMENTS, "--metrics-from", json.dumps(peers)]).config.metrics_from == tuple(peers)
    for arguments in ([*ARGUMENTS, "--metrics-from", "[]"], ARGUMENTS):
        assert parse(arguments).config.metrics_from == ()


@pytest.mark.parametrize(
    ("changes", "secrets"),
    [
        ({}, ["mirror"]),
        ({f"{TRAINER}.imagePullSecrets": [{"name": "mine"}]}, ["mine", "mirror"]),
        ({f"{TRAINER}.imagePullSecrets": [{"name": "mirror"}]}, ["mirror"]),
        ({"spec.sidecar.image": "mine:1"}, []),
    ],
    ids=["none", "own", "same", "own-sidecar"],
)
def test_sidecar_image_is_pulled_with_the_operators_secrets(changes: Any, secrets: list[str]):
    found = trainer_pod(changes, sidecar_pull_secrets=("mirror",)).get("imagePullSecrets", [])
    assert [secret["name"] for secret in found] == secrets
    assert parse([*ARGUMENTS, "--sidecar-pull-secret", "mirror"]).config.sidecar_pull_secrets == ("mirror",)


@pytest.mark.parametrize("part", PODS)
def test_role_metadata_reaches_the_workload_and_not_its_pods(part: str):
    queue = {"kueue.x-k8s.io/queue-name": "gpu"}
    made = children({f"{part}.metadata": {"labels": queue, "annotations": {"note": "x"}}})
    metadata = made[PODS[part]]["metadata"]
    assert queue.items() <= metadata["labels"].items()
    assert metadata["annotations"] == {"note": "x"}
    assert metadata["labels"]["dataloading.dev/job"] == "mnist"
    labels, annotations = pod_metadata(made[PODS[part]])
    assert not {*queue, "note"} & {*labels, *annotations}
    for other in set(PODS.values()) - {PODS[part]}:
        assert made[other] == children()[other]


def test_other_metadata_of_a_template_is_passed_on():
    made = children(
        {"spec.trainers.job.template.metadata": {"finalizers": ["a/b"], "creationTimestamp": None}}
    )
    metadata = made["Job/mnist-trainers-0"]["spec"]["template"]["metadata"]
    assert metadata["finalizers"] == ["a/b"]
    assert "creationTimestamp" not in metadata
