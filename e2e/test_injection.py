"""Pods of other controllers with one label: they are injected, train on feeders, and are refused with a sentence."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from cluster import FEEDER, RELEASE, ROOT, SYSTEM, Cluster, CommandFailed, Manifest, run, until
from jobs import DIGEST, RESTRICTED, RESTRICTED_POD, Job
from streams import stream, stream_here

SAMPLES = 80
LABEL = "dataloading.dev/inject"
INJECTOR = f"{RELEASE}-injector"
STEP = {"labels": {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}}
INSTALL = os.environ.get("E2E_ADDONS") or "e2e/support/addons.sh"


def attached(name: str, **attach: object) -> Manifest:
    """A job for pods of other controllers."""
    spec = {"feeders": {"replicas": 1, "image": FEEDER}, "trainers": {"attach": attach}}
    return {
        "apiVersion": "dataloading.dev/v1alpha1", "kind": "DataLoaderJob", "metadata": {"name": name}, "spec": spec,
    }  # fmt: skip


def template(
    name: str, *, label: bool = True, samples: int = SAMPLES, pace_s: float = 0.0, **spec: object
) -> Manifest:
    """A pod template whose container prints a digest of all batches, as `stream_here` does."""
    user = stream(name, samples=samples, pace_s=pace_s)["spec"]["trainers"]["job"]["template"]["spec"]
    (trainer,) = user["containers"]
    trainer = {**trainer, "name": "node", "securityContext": RESTRICTED}
    pod = {"restartPolicy": "Never", "securityContext": RESTRICTED_POD, "containers": [trainer], **spec}
    return {"metadata": {"labels": {LABEL: name}} if label else {}, "spec": pod}


def plain_job(name: str, **more: object) -> Manifest:
    spec = {"backoffLimit": 0, "template": template(name, **more)}
    return {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": name}, "spec": spec}


def bare_pod(name: str) -> Manifest:
    found = template(name)
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, **found["metadata"]},
        "spec": found["spec"],
    }


def job_set(name: str) -> Manifest:
    one = {"spec": {"backoffLimit": 0, "template": template(name)}}
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2", "kind": "JobSet", "metadata": {"name": name},
        "spec": {"replicatedJobs": [{"name": "one", "replicas": 1, "template": one}]},
    }  # fmt: skip


def runtime(name: str) -> Manifest:
    node = {"name": "node", "template": {"metadata": STEP, "spec": {"template": template(name)}}}
    return {
        "apiVersion": "trainer.kubeflow.org/v1alpha1", "kind": "TrainingRuntime", "metadata": {"name": name},
        "spec": {"mlPolicy": {"numNodes": 1}, "template": {"spec": {"replicatedJobs": [node]}}},
    }  # fmt: skip


def train_job(name: str) -> Manifest:
    return {
        "apiVersion": "trainer.kubeflow.org/v1alpha1", "kind": "TrainJob", "metadata": {"name": name},
        "spec": {"runtimeRef": {"kind": "TrainingRuntime", "name": name}},
    }  # fmt: skip


def printed(cluster: Cluster, namespace: str, name: str) -> str:
    """Waits for the digest that the pod with this job's label prints."""

    def look() -> str | None:
        for pod in cluster.list("pods", namespace, f"{LABEL}={name}"):
            log = cluster.logs(pod["metadata"]["name"], namespace, "node")
            if found := DIGEST.findall(log):
                return str(found[-1])
        return None

    return str(until(look, timeout_s=240, what=f"the digest of {name}"))


@pytest.mark.parametrize("make", [plain_job, bare_pod])
def test_labelled_pod_trains_on_feeders(make, operator: Cluster, namespace: str) -> None:
    operator.apply(namespace, attached("bert"))
    until(lambda: operator.get("dlj", "bert", namespace), timeout_s=30, what="the job")
    operator.apply(namespace, make("bert"))
    assert printed(operator, namespace, "bert") == stream_here(SAMPLES)


def test_pod_of_any_user_and_without_a_group_trains_on_feeders(operator: Cluster, namespace: str) -> None:
    """The usual image: no fsGroup, and another user than the sidecar's."""
    operator.apply(namespace, attached("bert"))
    pod = {**RESTRICTED_POD}
    pod.pop("runAsUser", None)
    found = plain_job("bert", securityContext=pod)
    (trainer,) = found["spec"]["template"]["spec"]["containers"]
    trainer["securityContext"] = {**RESTRICTED, "runAsUser": 1234, "runAsGroup": 1234}
    operator.apply(namespace, found)
    assert printed(operator, namespace, "bert") == stream_here(SAMPLES)


def test_injected_file_trains_without_the_webhooks_help(
    operator: Cluster, namespace: str, tmp_path: Path
) -> None:
    """The file has everything: the webhook leaves it alone."""
    operator.apply(namespace, attached("bert"))
    job_file, pod_file = tmp_path / "job.yaml", tmp_path / "pods.yaml"
    job_file.write_text(json.dumps(attached("bert")))
    pod_file.write_text(json.dumps(plain_job("bert", label=False)))
    image = operator.get("deployment", INJECTOR, SYSTEM)
    assert image is not None
    (container,) = image["spec"]["template"]["spec"]["containers"]
    (sidecar,) = [word for word in container["args"] if word.startswith("--sidecar-image=")]
    words = ["dataloaderjob", "inject", "-f", str(pod_file), "-j", str(job_file), "--job", "bert", sidecar]
    made = run(words)
    operator.kubectl("apply", "-n", namespace, "-f", "-", stdin=made)
    assert printed(operator, namespace, "bert") == stream_here(SAMPLES)
    (pod,) = operator.list("pods", namespace, f"{LABEL}=bert")
    theirs = json.loads(made)["spec"]["template"]["metadata"]["annotations"]
    assert theirs.items() <= pod["metadata"]["annotations"].items()


def test_missing_job_is_named_and_the_pods_controller_tries_again(operator: Cluster, namespace: str) -> None:
    operator.apply(namespace, plain_job("late"))

    def told() -> bool:
        events = operator.kubectl("get", "events", "-n", namespace, "-o", "json")
        return f"DataLoaderJob {namespace}/late, which does not exist" in events

    until(told, timeout_s=60, what="an event of the Job that names the missing DataLoaderJob")
    operator.apply(namespace, attached("late"))
    assert printed(operator, namespace, "late") == stream_here(SAMPLES)


def test_namespace_with_a_quota_accepts_injected_pods(operator: Cluster, namespace: str) -> None:
    hard = {"limits.cpu": "64", "limits.memory": "64Gi", "requests.cpu": "32", "requests.memory": "64Gi"}
    quota = {"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "all"}, "spec": {"hard": hard}}
    operator.apply(namespace, quota)
    small = {"requests": {"cpu": "100m", "memory": "1Gi"}, "limits": {"cpu": "2", "memory": "2Gi"}}
    made = attached("bert")
    made["spec"]["feeders"]["resources"] = small
    made["spec"]["ray"] = {"managed": {"head": {"resources": small}}}
    operator.apply(namespace, made)
    found = plain_job("bert")
    (trainer,) = found["spec"]["template"]["spec"]["containers"]
    trainer["resources"] = small
    operator.apply(namespace, found)
    assert printed(operator, namespace, "bert") == stream_here(SAMPLES)


@pytest.mark.slow
@pytest.mark.alone
def test_webhook_that_is_down_holds_up_labelled_pods_alone(operator: Cluster, namespace: str) -> None:
    operator.apply(namespace, attached("bert"))
    operator.kubectl("scale", "deployment", INJECTOR, "-n", SYSTEM, "--replicas=0")
    try:
        until(
            lambda: not operator.list("pods", SYSTEM, "app.kubernetes.io/name=dataloaderjob-injector"),
            timeout_s=60, what="the injector's pods are gone",
        )  # fmt: skip
        with pytest.raises(CommandFailed, match=r'failed calling webhook "inject\.dataloading\.dev"'):
            operator.apply(namespace, bare_pod("bert"))
        other = bare_pod("other")
        other["metadata"]["labels"] = {}
        operator.apply(namespace, other)
        operator.apply(namespace, plain_job("bert"))
    finally:
        operator.kubectl("scale", "deployment", INJECTOR, "-n", SYSTEM, "--replicas=2")
    operator.kubectl("rollout", "status", f"deployment/{INJECTOR}", "-n", SYSTEM, "--timeout=120s")
    assert printed(operator, namespace, "bert") == stream_here(SAMPLES)


@pytest.mark.slow
@pytest.mark.alone
def test_certificates_that_are_replaced_refuse_no_pod(operator: Cluster, namespace: str) -> None:
    operator.apply(namespace, attached("bert"))
    operator.kubectl("delete", "secret", f"{INJECTOR}-certificates", "-n", SYSTEM)
    pod = json.dumps({**bare_pod("bert"), "metadata": {"generateName": "p-", "labels": {LABEL: "bert"}}})
    for _ in range(90):  # a replica looks every minute
        operator.kubectl("create", "--dry-run=server", "-n", namespace, "-f", "-", stdin=pod)


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.timeout(900)
def test_jobset_and_trainjob_train_on_feeders_by_one_label(operator: Cluster, namespace: str) -> None:
    env = {"KUBECONFIG": str(operator.kubeconfig)}
    run([INSTALL, "--name", operator.name, "jobset", "trainer"], timeout_s=600, env=env)
    for name, objects in (("by-jobset", [job_set("by-jobset")]), ("by-trainer", [runtime("by-trainer")])):
        operator.apply(namespace, attached(name))
        operator.apply(namespace, *objects)
    operator.apply(namespace, train_job("by-trainer"))
    for name in ("by-jobset", "by-trainer"):
        assert printed(operator, namespace, name) == stream_here(SAMPLES)


def test_documented_lines_run_as_printed(operator: Cluster, namespace: str) -> None:
    page = (ROOT / "docs/kubernetes/bring-your-own-controller.md").read_text()
    level = "pod-security.kubernetes.io/enforce=baseline"  # as in most namespaces
    operator.kubectl("label", "namespace", namespace, level, "--overwrite")
    manifests = page.partition("<<'END'\n")[2].partition("END\n")[0]
    operator.kubectl(
        "apply",
        "-n",
        namespace,
        "-f",
        "-",
        stdin=manifests.replace("ghcr.io/dataloaderjob/feeder:0.1.0", FEEDER),
    )
    job = Job(operator, namespace, "sum")
    job.await_phase("Waiting", "Starting", "Serving", timeout_s=120)

    def done() -> bool:
        return "523776" in operator.kubectl("logs", "-n", namespace, "job/sum", "-c", "train")

    def looked() -> bool:
        try:
            return done()
        except CommandFailed:
            return False

    until(looked, timeout_s=240, what="the sum of all samples", also=job.why)
