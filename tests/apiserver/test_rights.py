"""The rights that the chart gives are what the operator uses: enough for it, and not one more."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from manifests import ATTACHED, manifest
from operated import Operated
from other_kinds import JOBSETS
from processes_of_operator import ALL, Operator, kubeconfig, until
from rights import granted, refused, used

from apiserver import ApiServer, Refused
from chart import render
from dataloaderjob.api import KIND
from dataloaderjob_operator.kinds import Manifest

OPS = "ops-of-the-chart"
RBAC = "/apis/rbac.authorization.k8s.io/v1/namespaces"
ADMISSION = "/apis/admissionregistration.k8s.io/v1"
PROBE = "?dryRun=All&fieldManager=probe"
"""Marks the requests of these tests that ask whether the policy is in force."""
PODLESS = {
    ("Secret", "mnist-key"), ("Service", "mnist-head"), ("Service", "mnist-trainers"),
    ("NetworkPolicy", "mnist-head"), ("NetworkPolicy", "mnist-feeder"), ("NetworkPolicy", "mnist-trainer"),
}  # fmt: skip
BY_ADMISSION = {("dataloading.dev", "dataloaderjobs/finalizers", "update")}
"""No request: what `blockOwnerDeletion` in an owner reference needs where the API server checks it."""


@pytest.fixture(scope="module")
def ops(server: ApiServer) -> str:
    server.request("POST", "/api/v1/namespaces", {"metadata": {"name": OPS}})
    return OPS


@pytest.fixture
def job(server: ApiServer) -> Operated:
    scaled = {"mode": "Auto", "maxReplicas": 2}
    return Operated(server, manifest({"spec.ttlSecondsAfterFinished": 0, "spec.feeders.autoscaling": scaled}))


def rendered(job: Operated, ops: str, release: str = "r") -> dict[Any, Manifest]:
    only = f"namespaces={{{job.namespace}}},ownObjectsPolicy.mode=on"
    return render("--set", only, release=release, namespace=ops)


def install(server: ApiServer, job: Operated, ops: str, release: str) -> dict[Any, Manifest]:
    """Accounts and rights of the chart, which may work in the job's namespace only, and the policy for the operator."""
    found = rendered(job, ops, release)
    for (kind, _), thing in found.items():
        assert kind != "ClusterRoleBinding", "the operator's rights are Roles"
        if kind in INSTALLED:
            server.request("POST", folder(thing), thing)
    return found


INSTALLED = {
    "ServiceAccount": "/api/v1/namespaces/{}/serviceaccounts",
    "Role": f"{RBAC}/{{}}/roles",
    "RoleBinding": f"{RBAC}/{{}}/rolebindings",
    "ValidatingAdmissionPolicy": f"{ADMISSION}/validatingadmissionpolicies",
    "ValidatingAdmissionPolicyBinding": f"{ADMISSION}/validatingadmissionpolicybindings",
}
"""Kinds of the chart, each with the path of all objects of that kind in a namespace."""


def folder(thing: Manifest) -> str:
    return INSTALLED[thing["kind"]].format(thing["metadata"].get("namespace"))


def as_account(server: ApiServer, ops: str, name: str) -> ApiServer:
    path = f"/api/v1/namespaces/{ops}/serviceaccounts/{name}/token"
    answer = server.request(
        "POST", path, {"kind": "TokenRequest", "apiVersion": "authentication.k8s.io/v1", "spec": {}}
    )
    return replace(server, token=str(answer["status"]["token"]))


@pytest.fixture
def limited(server: ApiServer, job: Operated, ops: str, tmp_path: Path) -> Iterator[Operator]:
    """An operator that has no other rights than the chart's."""
    rights = install(server, job, ops, "r")
    account = as_account(server, ops, "r-operator")
    in_force(account, job)
    made = Operator(account, tmp_path)
    start(made, rights)
    yield made
    if made.process is not None and made.process.poll() is None:
        made.end(kill=True)
    for (kind, name), thing in rights.items():
        if kind in INSTALLED:
            server.request("DELETE", f"{folder(thing)}/{name}")


def in_force(account: ApiServer, job: Operated) -> None:
    """Waits until the API server applies the policy."""
    body, path = {"metadata": {"generateName": "nobodys-"}}, f"{job.path('ConfigMap')}{PROBE}"
    until(lambda: "names no such owner" in refusal(account, "POST", path, body), 30, "the policy is in force")


def refusal(account: ApiServer, *request: Any, **options: Any) -> str:
    """Returns the message with which the API server refuses a request; empty if it does not."""
    try:
        account.request(*request, **options)
        return ""
    except Refused as exc:
        return exc.message


def start(operator: Operator, rendered: dict[Any, Manifest]) -> None:
    """Starts it with the chart's arguments, but for the port: others of these tests are there."""
    (container,) = rendered["Deployment", "r-operator"]["spec"]["template"]["spec"]["containers"]
    given = [arg for arg in container["args"] if not arg.startswith("--metrics-port=")]
    operator.start(*given)


def stray(job: Operated, kind: str) -> None:
    """A child that an operator of another version made, and this one does not want."""
    uid = job.get(KIND, job.name)["metadata"]["uid"]
    owner = {"apiVersion": "dataloading.dev/v1alpha1", "kind": KIND, "name": job.name, "uid": uid}
    metadata = {"name": "mnist-old", "labels": {"dataloading.dev/job": job.name}, "ownerReferences": [owner]}
    spec = {"spec": {"ports": [{"port": 80}]}} if kind == "Service" else {}
    job.server.request("POST", job.path(kind), {"metadata": metadata, **spec})


def there(job: Operated, kind: str, name: str) -> bool:
    try:
        return not job.get(kind, name)["metadata"].get("deletionTimestamp")
    except Refused:
        return False


def kept(job: Operated) -> set[tuple[str, str]]:
    """Children, after those that are being deleted have gone."""
    job.collect_garbage()
    return job.named()


def live_a_whole_life(job: Operated, operator: Operator) -> None:
    """All that can become of a job: children, causes, strays, held, again, ended, gone."""
    until(lambda: len(job.children()) == ALL, 30, f"children; its log: {operator.log}")
    for kind in ("Service", "ConfigMap", "NetworkPolicy"):
        stray(job, kind)
        until(lambda kind=kind: not there(job, kind, "mnist-old"), 20, f"no stray {kind}")
    until(lambda: "lookups_total 0.0" not in operator.ask("/metrics")[1], 20, "a lookup of events")
    job.edit(suspend=True)
    until(lambda: kept(job) == PODLESS, 20, "pods released")
    job.edit(suspend=False, feeders={"replicas": 3})
    until(lambda: len(job.children()) == ALL, 30, f"children again; its log: {operator.log}")
    until(lambda: job.get(KIND, job.name)["spec"]["feeders"]["replicas"] == 2, 30, "scaled to its maximum")
    job.ends("mnist-trainers-0", "Complete")
    until(lambda: not there(job, KIND, job.name), 20, "the job deleted after its time")


def test_operator_uses_exactly_the_rights_granted_by_the_chart(
    server: ApiServer, job: Operated, ops: str, limited: Operator
) -> None:
    until(lambda: len(job.children()) == ALL, 30, f"children; its log: {limited.log}")
    limited.end(kill=True)
    start(limited, rendered(job, ops))  # which finds the root key that it made before
    live_a_whole_life(job, limited)
    limited.end()
    account = f"{ops}:r-operator"
    assert {uri for uri in refused(server.audit_log, account) if not uri.endswith(PROBE)} == set()
    for namespace, name, unseen in (
        (job.namespace, "r-operator", BY_ADMISSION),
        (ops, "r-operator-own", set()),
    ):
        role = server.request("GET", f"{RBAC}/{namespace}/roles/{name}")
        did, may = used(server.audit_log, account, namespace), granted(role["rules"])
        assert did - may == set(), f"more than is granted in {namespace}"
        assert may - did == unseen, "granted, and never used: take it out, or use it in this test"


def test_followed_object_is_read_by_the_rights_that_the_chart_adds(
    server: ApiServer, job: Operated, limited: Operator
) -> None:
    follow = {"apiVersion": "jobset.x-k8s.io/v1alpha2", "kind": "JobSet", "name": "train"}
    server.define(JOBSETS)
    sets = f"/apis/{follow['apiVersion']}/namespaces/{job.namespace}/jobsets"
    made = {"apiVersion": follow["apiVersion"], "kind": "JobSet", "metadata": {"name": "train"}, "spec": {}}
    server.request("POST", sets, made)
    binding = f"{RBAC}/{job.namespace}/rolebindings/r-operator-follow"
    bound = server.request("GET", binding)
    server.request("DELETE", binding)
    changes = {**ATTACHED, "metadata.name": "attached", "spec.trainers.attach.follow": follow}
    server.request("POST", job.path(KIND), manifest(changes))

    def progress() -> dict[str, str]:
        status = job.get(KIND, "attached").get("status") or {}
        return {c["type"]: c for c in status.get("conditions", ())}.get("Progressing") or {}

    until(lambda: progress().get("reason") == "FollowedNotRead", 30, f"it is told; its log: {limited.log}")
    told = "has no permission to read JobSet train: add jobsets.jobset.x-k8s.io to the chart's value follow.resources"
    assert told in progress()["message"]
    del bound["metadata"]["resourceVersion"], bound["metadata"]["uid"]
    server.request("POST", binding.rpartition("/")[0], bound)
    until(lambda: progress()["reason"] != "FollowedNotRead", 40, f"it is read; its log: {limited.log}")
    assert job.get(KIND, "attached")["status"]["trainers"]["followedUid"]
    server.request("DELETE", f"{job.path(KIND)}/attached")


def test_without_finalizer_rights_no_child_can_name_its_owner(
    server: ApiServer, job: Operated, ops: str, limited: Operator
) -> None:
    limited.end(kill=True)
    role = server.request("GET", f"{RBAC}/{job.namespace}/roles/r-operator")
    role["rules"] = [rule for rule in role["rules"] if "dataloaderjobs/finalizers" not in rule["resources"]]
    server.request("PUT", f"{RBAC}/{job.namespace}/roles/r-operator", role)
    owner = {
        "apiVersion": "dataloading.dev/v1alpha1", "kind": KIND, "name": job.name, "uid": "u",
        "blockOwnerDeletion": True,
    }  # fmt: skip
    child = {"metadata": {"name": "child", "ownerReferences": [owner]}}
    account = as_account(server, ops, "r-operator")
    with pytest.raises(Refused, match="finalizers"):
        until(lambda: account.request("POST", job.path("ConfigMap"), child) and None, 5, "a refusal")


def test_namespaced_role_sees_no_other_namespace_and_no_other_secrets(
    server: ApiServer, job: Operated, ops: str, limited: Operator
) -> None:
    account = as_account(server, ops, "r-operator")
    until(lambda: len(job.children()) == ALL, 30, f"children; its log: {limited.log}")
    secrets = f"/api/v1/namespaces/{job.namespace}/secrets"
    for forbidden in (
        secrets, f"{secrets}/{job.key_secret}", f"/api/v1/namespaces/{ops}/secrets", "/api/v1/namespaces",
        "/api/v1/pods",
    ):  # fmt: skip
        with pytest.raises(Refused, match="forbidden"):
            account.request("GET", forbidden)


def owned(job: Operated, **more: Any) -> Manifest:
    uid = job.get(KIND, job.name)["metadata"]["uid"]
    owner = {"apiVersion": "dataloading.dev/v1alpha1", "kind": KIND, "name": job.name, "uid": uid}
    return {"metadata": {"name": "made", "ownerReferences": [{**owner, "controller": True}]}, **more}


NOT_THEIRS = "may change only objects of DataLoaderJobs, and configmaps theirs belongs to none"
NO_OWNER = "may write only objects that a DataLoaderJob controls, and configmaps made names no such owner"
MERGE = {"content_type": "application/merge-patch+json"}


def test_policy_keeps_the_operator_to_objects_of_jobs(
    server: ApiServer, job: Operated, ops: str, limited: Operator
) -> None:
    until(lambda: len(job.children()) == ALL, 30, f"children; its log: {limited.log}")
    account, maps = as_account(server, ops, "r-operator"), job.path("ConfigMap")
    server.request("POST", maps, {"metadata": {"name": "theirs"}, "data": {"a": "1"}})
    theirs, owner = f"{maps}/theirs", owned(job)["metadata"]["ownerReferences"]
    labeled = {"labels": {"dataloading.dev/job": job.name}, "ownerReferences": owner}
    assert NOT_THEIRS in refusal(account, "PATCH", theirs, {"data": {"a": "2"}}, **MERGE)
    assert NOT_THEIRS in refusal(account, "PATCH", theirs, {"metadata": labeled}, **MERGE)
    assert NOT_THEIRS in refusal(account, "DELETE", theirs)
    assert NO_OWNER in refusal(account, "POST", maps, {"metadata": {"name": "made"}})
    head, loose = f"{job.path('Service')}/mnist-head", {"metadata": {"ownerReferences": None}}
    assert "names no such owner" in refusal(account, "PATCH", head, loose, **MERGE)
    pod = owned(job, spec={"containers": [{"name": "a", "image": "a:1"}]})
    assert "may create pods only in dry runs" in refusal(account, "POST", job.path("Pod"), pod)
    assert refusal(account, "POST", f"{job.path('Pod')}?dryRun=All", pod) == ""
    assert refusal(account, "POST", maps, owned(job)) == ""
    assert refusal(account, "DELETE", f"{maps}/made") == ""
    assert refusal(server, "DELETE", theirs) == "", "others are not limited"


def replaced(job: Operated, name: str, uid: str) -> bool:
    """Whether another job of that name is there; the garbage collector, which is not, lets go of the old one."""
    with contextlib.suppress(Refused):
        found = job.get(KIND, name)["metadata"]
        if found.get("deletionTimestamp"):
            job.patch(KIND, name, {"metadata": {"finalizers": None}})
        return bool(found["uid"] != uid)
    return False


@pytest.mark.parametrize("ends", ["Complete", "Failed"])
def test_charts_test_applies_its_job_and_prints_the_outcome(
    server: ApiServer, job: Operated, ops: str, tmp_path: Path, ends: str
) -> None:
    release = f"t-{ends.lower()}"
    found = install(server, job, ops, release)
    name = f"{release}-operator-test"
    text = found["ConfigMap", name]["data"]["job.yaml"]
    (tmp_path / "job.yaml").write_text(text)
    tried = yaml.safe_load(text)["metadata"]["name"]
    env = {**os.environ, "KUBECONFIG": str(kubeconfig(as_account(server, ops, name), tmp_path))}
    command = [sys.executable, *found["Pod", name]["spec"]["containers"][0]["command"][1:]]
    command += ["--job", str(tmp_path / "job.yaml"), "--timeout-seconds", "60"]
    server.request("POST", job.path(KIND), yaml.safe_load(text))  # of an earlier test
    old = job.get(KIND, tried)["metadata"]["uid"]
    process = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    until(lambda: replaced(job, tried, old), 30, "a new job")
    condition = {
        "type": ends, "status": "True", "reason": "TrainerSaid", "message": "pod a: exit code 3",
        "lastTransitionTime": "2026-01-01T00:00:00Z",
    }  # fmt: skip
    job.patch(KIND, tried, {"status": {"phase": ends, "conditions": [condition]}}, "status")
    output, _ = process.communicate(timeout=60)
    assert process.returncode == (0 if ends == "Complete" else 1), output
    assert f"{ends}=True TrainerSaid: pod a: exit code 3" in output
    assert not there(job, KIND, tried), "it is deleted"
    account = f"{ops}:{name}"
    assert refused(server.audit_log, account) == []
    assert used(server.audit_log, account, job.namespace) == granted(found["Role", name]["rules"])
