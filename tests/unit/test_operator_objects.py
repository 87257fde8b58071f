"""The children of a job, as the operator builds them."""

from __future__ import annotations

import base64
import copy
import json
from typing import Any

import pytest
from manifests import manifest

from dataloaderjob.api import DataLoaderJob, parse_object
from dataloaderjob.api.job import MAX_NAME_LENGTH
from dataloaderjob.core import keys
from dataloaderjob.core.keys import Holder
from dataloaderjob.core.settings import RayTuning, SidecarSettings
from dataloaderjob_operator import names, objects
from dataloaderjob_operator.kinds import keep_template, manifest_to_send, sealed
from dataloaderjob_operator.objects import pods, settings, supervisor, workloads

SETUP = objects.OperatorConfig(version="1.0", sidecar_image="example/sidecar:1", root_key=b"r" * 32)
SECRET = f"Secret/{names.key_secret('mnist', 'u-1', SETUP.root_key)}"
FEEDER = "spec.feeders.template.spec"
TRAINER = "spec.trainers.job.template.spec"


def job(changes: dict[str, Any] | None = None) -> DataLoaderJob:
    on_cluster = {"metadata.uid": "u-1", "metadata.namespace": "team"}
    return parse_object(manifest({**on_cluster, **(changes or {})}))


def children(changes: dict[str, Any] | None = None, attempt: int = 0) -> dict[str, dict[str, Any]]:
    made = job(changes)
    found = [
        *objects.base(made, SETUP),
        *objects.feeding(made, SETUP),
        *objects.training(made, SETUP, attempt),
    ]
    return {called(child): child for child in found}


def called(child: dict[str, Any]) -> str:
    """Kind and name; of settings their role, since their content is in their name."""
    metadata = child["metadata"]
    role = child["kind"] == "ConfigMap" and metadata["labels"]["dataloading.dev/role"]
    return f"{child['kind']}/{role or metadata['name']}"


def pod(child: dict[str, Any]) -> dict[str, Any]:
    return dict(child["spec"]["template"]["spec"])


def env(container: dict[str, Any]) -> dict[str, Any]:
    return {item["name"]: item.get("value", item.get("valueFrom")) for item in container["env"]}


def template_hash(child: dict[str, Any]) -> str:
    return str(child["spec"]["template"]["metadata"]["annotations"][names.ANNOTATION_TEMPLATE])


def test_children_of_a_job_and_their_names_are_deterministic():
    assert children() == children()
    assert set(children()) == {
        SECRET,
        "ConfigMap/head",
        "ConfigMap/feeder",
        "ConfigMap/trainer",
        "Service/mnist-head",
        "Service/mnist-trainers",
        "NetworkPolicy/mnist-head",
        "NetworkPolicy/mnist-feeder",
        "NetworkPolicy/mnist-trainer",
        "Deployment/mnist-head",
        "Deployment/mnist-feeders",
        "Job/mnist-trainers-0",
    }


def test_every_child_is_owned_by_the_job():
    for child in children().values():
        (owner,) = child["metadata"]["ownerReferences"]
        assert (owner["kind"], owner["uid"], owner["controller"]) == ("DataLoaderJob", "u-1", True)
        assert child["metadata"]["namespace"] == "team"
        assert child["metadata"]["labels"][names.LABEL_JOB] == "mnist"


def test_longest_job_name_leaves_room_for_its_childrens_names():
    longest = "j" * MAX_NAME_LENGTH
    for child in children({"metadata.name": longest}, attempt=9999).values():
        index = "-1023" if child["kind"] == "Job" else ""
        most = 253 if child["kind"] in {"ConfigMap", "Secret"} else 63
        assert len(child["metadata"]["name"]) <= most - len(index), (
            "a trainer pod's host name ends in its index"
        )


PIPELINES = "0e2b1f1c-8f0a-4d5e-9a57-3f1f3c0e7d11"


def test_services_of_a_job_named_by_a_uuid_start_with_a_letter():
    made = children({"metadata.name": PIPELINES})
    services = [child for child in made.values() if child["kind"] == "Service"]
    assert [s["metadata"]["name"] for s in services] == [f"h-{PIPELINES}-svc", f"t-{PIPELINES}-svc"]
    pod = made[f"Job/{PIPELINES}-trainers-0"]["spec"]["template"]["spec"]
    assert pod["subdomain"] == f"t-{PIPELINES}-svc"
    feeder = json.loads(made["ConfigMap/feeder"]["data"]["feeder.json"])
    assert feeder["head"].startswith(f"h-{PIPELINES}-svc.team.svc")
    others = {
        child["metadata"]["name"]
        for name in ("h-", "t-")
        for child in children({"metadata.name": f"{name}1"}).values()
    }
    assert not others & {s["metadata"]["name"] for s in children({"metadata.name": "1"}).values()}, (
        "no other job's"
    )


def test_job_without_a_cluster_identity_has_no_children():
    with pytest.raises(ValueError, match="not on a cluster"):
        objects.base(parse_object(manifest()), SETUP)


def test_settings_files_match_the_processes_settings_classes():
    made = children({"spec.loader.poolSize": "64Mi", "spec.trainers.job.processesPerPod": 2})
    sidecar = SidecarSettings(**json.loads(made["ConfigMap/trainer"]["data"]["sidecar.json"]))
    assert sidecar.job == "team/mnist/u-1"
    assert (sidecar.processes, sidecar.pool_nbytes, sidecar.shared_memory_nbytes) == (2, 64 << 20, 2 << 30)
    assert (sidecar.supervisor_host, sidecar.supervisor_port) == (
        "mnist-head.team.svc",
        settings.SUPERVISOR_PORT,
    )
    for role in ("head", "feeder"):
        data = json.loads(made[f"ConfigMap/{role}"]["data"][f"{role}.json"])
        assert RayTuning(**data["tuning"]).worker_register_timeout_s == 120


def test_recreated_secret_has_the_same_bytes_and_differs_between_jobs():
    first, again = children()[SECRET], children()[SECRET]
    other = children({"metadata.uid": "u-2"})[f"Secret/{names.key_secret('mnist', 'u-2', SETUP.root_key)}"]
    assert first == again
    assert not set(first["data"].values()) & set(other["data"].values())
    assert len(set(first["data"].values())) == 4


def test_pods_of_a_role_get_that_roles_keys_only():
    made = children()
    data = {name: base64.b64decode(value) for name, value in made[SECRET]["data"].items()}
    job_key, token = data["links"], data["ray"]
    found = {}
    for workload in ("Deployment/mnist-head", "Deployment/mnist-feeders", "Job/mnist-trainers-0"):
        made_pod = pod(made[workload])
        secrets = {v["name"]: v["secret"] for v in made_pod["volumes"] if "secret" in v}
        assert {secret["secretName"] for secret in secrets.values()} == {SECRET.removeprefix("Secret/")}
        for container in (*made_pod.get("initContainers", ()), *made_pod["containers"]):
            found[container["name"]] = {
                item["path"]: data[item["key"]]
                for mount in container["volumeMounts"]
                for item in secrets.get(mount["name"], {"items": []})["items"]
            }
    assert found == {
        "head": {"ray": token},
        "supervisor": {"links": job_key},
        "feeder": {"links": keys.derive(job_key, Holder.FEEDER), "ray": token},
        "dataloaderjob-sidecar": {"links": keys.derive(job_key, Holder.SIDECAR)},
        "trainer": {},
    }


def test_containers_of_the_head_share_only_a_socket_that_ray_serves():
    user = {
        "shareProcessNamespace": True,
        "hostPID": True,
        "containers": [
            {"name": "head", "env": [{"name": "RAY_x", "value": "1"}, {"name": "TZ", "value": "UTC"}]}
        ],
    }
    made = pod(children({"spec.ray.managed.head.template.spec": user})["Deployment/mnist-head"])
    ray, other = made["containers"]
    assert (made["shareProcessNamespace"], made["hostPID"]) == (False, False)
    mounts = [{m["name"]: m for m in container["volumeMounts"]} for container in (ray, other)]
    both = set(mounts[0]) & set(mounts[1])
    assert both == {"dataloaderjob-settings", "dataloaderjob-link"}
    assert all(mounts[1][name]["readOnly"] for name in both), "what Ray's container writes is only read"
    assert ("RAY_x" in env(ray), "RAY_x" in env(other), env(other)["TZ"]) == (True, False, "UTC")
    assert "secretKeyRef" not in str((ray["env"], ray.get("envFrom")))
    for field in ("image", "securityContext"):
        assert ray[field] == other[field]


@pytest.mark.parametrize(
    ("asked", "of_ray", "of_supervisor"),
    [
        ({"cpu": "500m", "memory": "2Gi"}, {"cpu": "400m", "memory": "1792Mi"}, {"cpu": "100m", "memory": "256Mi"}),
        ({"cpu": 1, "memory": "512Mi"}, {"cpu": "800m", "memory": "448Mi"}, {"cpu": "200m", "memory": "128Mi"}),
        ({"memory": "1000001"}, {"memory": "875001"}, {"memory": "128Mi"}),
        ({"example.com/x": "3"}, {"example.com/x": "3"}, {}),
    ],
    ids=["default", "least-memory", "odd-bytes", "other-resource"],
)  # fmt: skip
def test_resources_of_the_head_are_split_between_its_containers(asked, of_ray, of_supervisor):
    found = supervisor.split({"requests": asked, "limits": asked})
    assert found[0] == {"requests": of_ray, "limits": of_ray}
    assert found[1] == ({"requests": of_supervisor, "limits": of_supervisor} if of_supervisor else {})


def test_the_sidecar_is_a_native_sidecar_before_the_users_init_containers():
    init = [{"name": "fetch", "image": "example/fetch:1"}]
    made = pod(children({f"{TRAINER}.initContainers": init})["Job/mnist-trainers-0"])
    sidecar, fetch = made["initContainers"]
    assert (sidecar["restartPolicy"], sidecar["image"]) == ("Always", "example/sidecar:1")
    assert fetch == init[0]
    assert sidecar["startupProbe"]["httpGet"] == {"path": "/healthz", "port": "metrics"}
    assert made["containers"][0]["image"] == "example/mnist:1"
    assert (
        pod(children({"spec.sidecar.image": "mine:2"})["Job/mnist-trainers-0"])["initContainers"][0]["image"]
        == "mine:2"
    )


@pytest.mark.parametrize(
    ("changes", "request_", "limit"),
    [
        ({}, 1088 << 20, 1088 << 20),
        ({"spec.trainers.job.processesPerPod": 4}, 4208 << 20, 4208 << 20),
        ({"spec.sidecar.resources": {"limits": {"memory": "4Gi"}}}, "4Gi", "4Gi"),
        ({"spec.sidecar.resources": {"requests": {"memory": "1Gi"}}}, "1Gi", 1088 << 20),
    ],
)
def test_sidecar_memory_covers_its_pools_unless_given_explicitly(changes, request_, limit):
    sidecar = pod(children(changes)["Job/mnist-trainers-0"])["initContainers"][0]
    assert sidecar["resources"]["requests"]["memory"] == str(request_)
    assert sidecar["resources"]["limits"]["memory"] == str(limit)


@pytest.mark.parametrize(
    ("trainer", "guaranteed"),
    [
        ({"limits": {"cpu": "4", "memory": "8Gi"}}, True),
        ({"limits": {"cpu": "4", "memory": "8Gi"}, "requests": {"cpu": "4000m", "memory": "8192Mi"}}, True),
        ({"limits": {"cpu": "4", "memory": "8Gi"}, "requests": {"cpu": "2"}}, False),
        ({"limits": {"cpu": "4"}}, False),
        ({}, False),
    ],
)
def test_sidecar_keeps_a_guaranteed_pod_guaranteed(trainer, guaranteed):
    changes = {
        f"{TRAINER}.containers.0.resources": trainer,
        "spec.sidecar.resources": {"limits": {"cpu": "2"}},
    }
    asked = pod(children(changes)["Job/mnist-trainers-0"])["initContainers"][0]["resources"]
    assert (asked["requests"] == asked["limits"] and "cpu" in asked["limits"]) == guaranteed


def test_the_manifest_alone_decides_whether_trainers_unpickle():
    for allowed, reported in ((True, "1"), (False, None)):
        (trainer,) = pod(children({"spec.loader.allowPickle": allowed})["Job/mnist-trainers-0"])["containers"]
        assert env(trainer).get("DATALOADERJOB_ALLOW_PICKLE") == reported


def test_trainers_get_ranks_from_their_index_and_the_masters_dns_name():
    made = children({"spec.trainers.job.replicas": 3}, attempt=2)["Job/mnist-trainers-2"]
    assert (made["spec"]["completions"], made["spec"]["parallelism"]) == (3, 3)
    assert made["spec"]["backoffLimit"] == 0, "one that fails ends them all"
    found = env(pod(made)["containers"][0])
    index = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
    assert found["RANK"] == found["PET_NODE_RANK"] == {"fieldRef": {"fieldPath": index}}
    assert found["WORLD_SIZE"] == found["PET_NNODES"] == "3"
    assert found["MASTER_ADDR"] == "mnist-trainers-2-0.mnist-trainers.team.svc"
    assert pod(made)["subdomain"] == "mnist-trainers"


def test_a_replica_of_several_processes_leaves_the_ranks_to_its_launcher():
    made = children({"spec.trainers.job.processesPerPod": 2})["Job/mnist-trainers-0"]
    found = env(pod(made)["containers"][0])
    assert found["PET_NPROC_PER_NODE"] == "2"
    assert "RANK" not in found


def test_user_variables_follow_ours_and_may_refer_to_them():
    theirs = [{"name": "RUN_NAME", "value": "rank-$(PET_NODE_RANK)"}]
    container = {"name": "trainer", "image": "a:1", "command": ["python"], "env": theirs}
    made = pod(children({f"{TRAINER}.containers": [container]})["Job/mnist-trainers-0"])
    order = [item["name"] for item in made["containers"][0]["env"]]
    assert order[-1] == "RUN_NAME"


def test_head_and_feeders_run_the_trainers_image_by_default():
    for changes, image in (({}, "example/mnist:1"), ({"spec.feeders.image": "feeder:2"}, "feeder:2")):
        made = children(changes)
        for name in ("head", "feeders"):
            assert pod(made[f"Deployment/mnist-{name}"])["containers"][0]["image"] == image


def test_volumes_environment_and_placement_of_feeders_pass_through():
    extra = {
        "containers": [
            {
                "name": "feeder",
                "env": [{"name": "TOKEN", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}}],
                "volumeMounts": [{"name": "data", "mountPath": "/data"}],
            },
            {"name": "helper", "image": "helper:1"},
        ],
        "volumes": [{"name": "data", "persistentVolumeClaim": {"claimName": "data"}}],
        "tolerations": [{"key": "cpu-only", "operator": "Exists"}],
        "serviceAccountName": "reader",
    }
    made = pod(children({FEEDER: extra})["Deployment/mnist-feeders"])
    feeder, helper = made["containers"]
    assert env(feeder)["TOKEN"] == {"secretKeyRef": {"name": "s", "key": "k"}}
    assert {"name": "data", "mountPath": "/data"} in feeder["volumeMounts"]
    assert helper == {"name": "helper", "image": "helper:1"}
    assert extra["volumes"][0] in made["volumes"]
    assert (made["tolerations"][-1], made["serviceAccountName"]) == (extra["tolerations"][0], "reader")


DATA = {
    "spec.data.volumes": [{"name": "images", "nfs": {"server": "s", "path": "/p"}}],
    "spec.data.volumeMounts": [{"name": "images", "mountPath": "/data", "readOnly": True}],
    "spec.data.env": [{"name": "ROOT", "value": "/data"}, {"name": "HOME", "value": "/data/home"}],
    "spec.data.envFrom": [{"secretRef": {"name": "bucket"}}],
}


def test_data_volumes_are_in_trainers_and_feeders_and_nowhere_else():
    own = [{"name": "TRAIN", "value": "$(ROOT)/train"}]
    made = children({**DATA, f"{TRAINER}.containers.0.env": own})
    for name in ("Job/mnist-trainers-0", "Deployment/mnist-feeders"):
        found, container = pod(made[name]), pod(made[name])["containers"][0]
        assert DATA["spec.data.volumes"][0] in found["volumes"]
        assert DATA["spec.data.volumeMounts"][0] in container["volumeMounts"]
        assert container["envFrom"] == DATA["spec.data.envFrom"]
        assert (env(container)["ROOT"], env(container)["HOME"]) == ("/data", "/data/home")
        assert len(env(container)) == len(container["env"]), "each variable once"
    order = [item["name"] for item in pod(made["Job/mnist-trainers-0"])["containers"][0]["env"]]
    assert order.index("ROOT") < order.index("TRAIN"), "which refers to it"
    assert pod(made["Deployment/mnist-head"]) == pod(children()["Deployment/mnist-head"])
    (sidecar,) = pod(made["Job/mnist-trainers-0"])["initContainers"]
    assert "envFrom" not in sidecar


def test_changed_data_replaces_feeders_and_empty_data_does_not():
    without, one = children(), children(DATA)
    other = children({**DATA, "spec.data.env": []})
    hashes = {template_hash(made["Deployment/mnist-feeders"]) for made in (without, one, other)}
    assert len(hashes) == 3
    assert template_hash(children({"spec.data": {}})["Deployment/mnist-feeders"]) in hashes


def test_data_volume_at_tmp_replaces_the_operators():
    mount = [{"name": "images", "mountPath": "/tmp"}]
    made = pod(children({**DATA, "spec.data.volumeMounts": mount})["Deployment/mnist-feeders"])
    assert [m["name"] for m in made["containers"][0]["volumeMounts"] if m["mountPath"] == "/tmp"] == [
        "images"
    ]
    assert "dataloaderjob-tmp" not in {volume["name"] for volume in made["volumes"]}


def test_sidecar_has_the_users_variables_and_rights():
    changes = {
        "spec.sidecar.env": [{"name": "A", "value": "1"}],
        "spec.sidecar.securityContext": {"runAsUser": 7},
    }
    made = pod(children(changes)["Job/mnist-trainers-0"])
    (sidecar,) = made["initContainers"]
    assert env(sidecar) == {"A": "1"}
    assert sidecar["securityContext"] == {**pods.RESTRICTED, "runAsNonRoot": True, "runAsUser": 7}
    assert "A" not in env(made["containers"][0])


def test_pull_secrets_and_user_of_trainers_apply_to_head_and_feeders():
    template = {
        f"{TRAINER}.imagePullSecrets": [{"name": "pull"}],
        f"{TRAINER}.securityContext": {"runAsUser": 1000},
    }
    made = children(template)
    for name in ("head", "feeders"):
        found = pod(made[f"Deployment/mnist-{name}"])
        assert found["imagePullSecrets"] == [{"name": "pull"}]
        assert found["securityContext"] == {"runAsUser": 1000, "fsGroup": 65532}


POD_OF_HEAD = "spec.ray.managed.head.template.spec"
CONTEXTS = {
    "nothing": ({}, {}, True),
    "a-user": ({"runAsUser": 1000}, {}, True),
    "root-in-the-pod": ({"runAsUser": 0}, {}, None),
    "root-in-the-container": ({}, {"runAsUser": 0}, None),
    "root-in-the-pod-alone": ({"runAsUser": 0}, {"runAsUser": 7}, True),
    "allowed-in-the-pod": ({"runAsNonRoot": False}, {}, None),
    "allowed-in-the-container": ({}, {"runAsNonRoot": False}, False),
}


@pytest.mark.parametrize(("in_pod", "in_container", "wanted"), CONTEXTS.values(), ids=CONTEXTS)
@pytest.mark.parametrize("role", ["head", "feeder"])
def test_head_and_feeders_run_as_root_only_if_a_template_allows_it(role, in_pod, in_container, wanted):
    place = POD_OF_HEAD if role == "head" else "spec.feeders.template.spec"
    changes: dict[str, Any] = {f"{TRAINER}.securityContext": in_pod}
    if in_container:
        changes[f"{place}.containers"] = [{"name": role, "securityContext": in_container}]
    made = pod(children(changes)[f"Deployment/mnist-{role}{'s' * (role == 'feeder')}"])
    found = next(c for c in made["containers"] if c["name"] == role)["securityContext"]
    assert found.get("runAsNonRoot") is wanted
    assert found["allowPrivilegeEscalation"] is False


def test_no_pod_has_a_service_account_token():
    for child in children().values():
        if "template" in child["spec"] if "spec" in child else False:
            assert pod(child)["automountServiceAccountToken"] is False


def test_pods_are_replaced_for_a_changed_spec_and_not_for_a_new_operator():
    before = children()
    newer = objects.OperatorConfig(version="2.0", sidecar_image="example/sidecar:2", root_key=b"r" * 32)
    made = job()
    for child in objects.feeding(made, newer):
        if child["kind"] == "Deployment":
            assert template_hash(child) == template_hash(before[called(child)])
    image = children({"spec.feeders.image": "feeder:2"})
    assert template_hash(image["Deployment/mnist-feeders"]) != template_hash(
        before["Deployment/mnist-feeders"]
    )
    assert template_hash(image["Deployment/mnist-head"]) == template_hash(before["Deployment/mnist-head"])
    for changes in (
        {"spec.ray.managed.tuning.workerRegisterTimeoutSeconds": 300},
        {"spec.ray.managed.tuning.healthCheck.periodMs": 500},
    ):
        after = children(changes)
        for name in ("Deployment/mnist-head", "Deployment/mnist-feeders"):
            assert template_hash(after[name]) != template_hash(before[name]), changes


def test_pod_changes_of_a_later_operator_replace_no_pod(monkeypatch):
    before = children()
    monkeypatch.setattr(pods, "LAST_WORDS", {"terminationMessagePolicy": "File"})
    monkeypatch.setattr(workloads, "STARTS", 90)
    newer = objects.OperatorConfig(version="2.0", sidecar_image="example/sidecar:2", root_key=b"r" * 32)
    for child in objects.feeding(job(), newer):
        if child["kind"] == "Deployment":
            old = before[called(child)]
            assert pod(child)["containers"] != pod(old)["containers"]
            kept = keep_template(child, sealed(old))
            assert manifest_to_send(kept, sealed(old)) is None, "the pods that there are stay"


def test_old_feeders_stay_until_a_new_one_is_ready():
    made = children({"spec.feeders.replicas": 2})["Deployment/mnist-feeders"]
    assert made["spec"]["strategy"] == {
        "type": "RollingUpdate", "rollingUpdate": {"maxUnavailable": 0, "maxSurge": "10%"},
    }  # fmt: skip
    (container,) = pod(made)["containers"]
    probe = container["readinessProbe"]
    _, _, path, *_ = probe["exec"]["command"]
    assert path == "/tmp/ray/node/ready"
    assert any(path.startswith(mount["mountPath"] + "/") for mount in container["volumeMounts"]), (
        "it may be written"
    )
    assert probe["failureThreshold"] * probe["periodSeconds"] <= 2
    assert made["spec"]["progressDeadlineSeconds"] == 900


def test_changed_number_of_feeders_replaces_no_pod():
    before, after = children(), children({"spec.feeders.replicas": 7})
    assert after["Deployment/mnist-feeders"]["spec"]["replicas"] == 7
    for name in ("Deployment/mnist-head", "Deployment/mnist-feeders"):
        assert after[name]["spec"]["template"] == before[name]["spec"]["template"]


def test_users_manifest_is_not_modified():
    given = manifest(
        {"metadata.uid": "u-1", "metadata.namespace": "team", f"{TRAINER}.volumes": [{"name": "v"}]}
    )
    before = copy.deepcopy(given)
    made = parse_object(given)
    objects.training(made, SETUP, 0)
    objects.feeding(made, SETUP)
    assert given == before


def test_containers_report_their_last_output_unless_the_user_differs():
    policy = "terminationMessagePolicy"
    for child in children().values():
        if child["kind"] in {"Deployment", "Job"}:
            spec = child["spec"]["template"]["spec"]
            for container in (*spec["containers"], *spec.get("initContainers", [])):
                assert container[policy] == "FallbackToLogsOnError", container["name"]
    theirs = children({f"spec.trainers.job.template.spec.containers.0.{policy}": "File"})
    assert theirs["Job/mnist-trainers-0"]["spec"]["template"]["spec"]["containers"][0][policy] == "File"


def test_trainer_pods_are_labeled_with_their_attempt():
    made = children(attempt=3)["Job/mnist-trainers-3"]
    for labels in (made["metadata"]["labels"], made["spec"]["template"]["metadata"]["labels"]):
        assert labels["dataloading.dev/attempt"] == "3"


@pytest.mark.parametrize(
    "field", ["initContainers", "volumes", "securityContext", "imagePullSecrets", "affinity"]
)
def test_null_field_of_a_template_counts_as_omitted(field: str):
    nothing = {f"{TRAINER}.{field}": None, f"{FEEDER}.{field}": None}
    for name, child in children(nothing).items():
        if "template" in child.get("spec", {}):
            assert pod(child) == pod(children()[name])


def test_image_entrypoint_is_left_to_the_image():
    trainer = {"name": "trainer", "image": "a:1", "args": ["--lr", "1"]}
    (made,) = pod(children({f"{TRAINER}.containers": [trainer]})["Job/mnist-trainers-0"])["containers"]
    assert "command" not in made
    assert made["args"] == ["--lr", "1"]


@pytest.mark.parametrize(("part", "name"), [("feeders", "feeder"), ("ray.managed.head", "head")])
def test_users_settings_for_our_containers_are_kept(part: str, name: str):
    mine = {
        "name": name, "env": [{"name": "HOME", "value": "/data"}], "terminationMessagePolicy": "File",
        "livenessProbe": {"tcpSocket": {"port": 1}}, "ports": [{"name": "debug", "containerPort": 5678}],
    }  # fmt: skip
    made = children({f"spec.{part}.template.spec.containers": [mine]})
    child = {"feeder": "Deployment/mnist-feeders", "head": "Deployment/mnist-head"}[name]
    container = pod(made[child])["containers"][0]
    assert env(container)["HOME"] == "/data"
    assert len(env(container)) == len(container["env"]), "each variable once"
    assert (container["terminationMessagePolicy"], container["livenessProbe"]) == (
        "File",
        mine["livenessProbe"],
    )
    assert mine["ports"][0] in container["ports"]
