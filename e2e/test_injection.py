"""Pods of other controllers with one label: they are injected, train on feeders, and are refused with a sentence."""

from __future__ import annotations

import json
import os
import shutil
import time
from datetime import datetime
from pathlib import Path

import controllers
import pytest
from cluster import FEEDER, RELEASE, SYSTEM, Cluster, CommandFailed, run, until
from controllers import CHART_RUNTIME, LABEL, OPTIONS
from injected import SAMPLES, attached, bare_pod, digests, events, plain_job, printed
from jobs import FEEDERS, RESTRICTED, RESTRICTED_POD, Job
from main_job import run_here
from pytorch_job import made_of, pytorch_job
from readme import ATTACHED_JOB
from sharing import Shared
from streams import stream, stream_here

from dataloaderjob import __version__

FIRST_BATCH_S = 60.0
"""Longest time from the start of an idle job's next pod to its first batch."""
INJECTOR = f"{RELEASE}-injector"
INSTALL = os.environ.get("E2E_ADDONS") or "e2e/support/addons.sh"


def test_labeled_pods_of_three_kinds_print_the_digest_of_own_trainers(
    operator: Cluster, namespace: str, start
) -> None:
    """A plain Job, a bare Pod, and the two pods of a PyTorchJob share the feeders of one job."""
    own: Job = start(stream("own", samples=SAMPLES, pace_s=0.0))
    bert: Job = start(attached("bert"))
    pods = made_of(pytorch_job("torch", of="bert"))
    operator.apply(namespace, plain_job("job", of="bert"), bare_pod("pod", of="bert"), *pods)

    def all_printed() -> dict[str, str] | None:
        found = digests(operator, namespace, "bert")
        return found if len(found) == 4 else None

    found = until(all_printed, timeout_s=300, what="four digests", also=bert.why)
    own.await_phase("Complete", timeout_s=240)
    assert {name.rpartition("-")[0] if name.startswith("job-") else name for name in found} == {
        "job", "pod", "torch-master-0", "torch-worker-0",
    }  # fmt: skip
    assert set(found.values()) == {own.digest()} == {stream_here(SAMPLES)}
    for name in ("torch-master-0", "torch-worker-0"):
        made = operator.get("pod", name, namespace)
        assert made is not None
        assert made["spec"]["initContainers"][0]["restartPolicy"] == "Always", "ours is the first"


@pytest.mark.parametrize("tls", [False, True], ids=["plain", "tls"])
def test_pod_of_any_user_and_without_a_group_trains_on_feeders(
    tls: bool, operator: Cluster, namespace: str
) -> None:
    """The usual image: no fsGroup, and another user than the sidecar's."""
    made = attached("bert")
    made["spec"].setdefault("loader", {})["tls"] = tls
    operator.apply(namespace, made)
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
    del made["spec"]["sidecar"]  # its default has the limits that the quota asks for
    operator.apply(namespace, made)
    found = plain_job("bert")
    (trainer,) = found["spec"]["template"]["spec"]["containers"]
    trainer["resources"] = small
    operator.apply(namespace, found)
    assert printed(operator, namespace, "bert") == stream_here(SAMPLES)


@pytest.mark.slow
@pytest.mark.alone
def test_webhook_that_is_down_holds_up_labeled_pods_alone(operator: Cluster, namespace: str) -> None:
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
        told = until(
            lambda: events(operator, namespace, "PodRefused"), timeout_s=60, what="the refusal on the job"
        )
        assert told[0]["involvedObject"]["name"] == "bert"
        assert told[0]["message"].startswith("Job bert cannot create its pods: the injector does not respond")
    finally:
        operator.kubectl("scale", "deployment", INJECTOR, "-n", SYSTEM, "--replicas=2")
    operator.kubectl("rollout", "status", f"deployment/{INJECTOR}", "-n", SYSTEM, "--timeout=120s")
    assert printed(operator, namespace, "bert") == stream_here(SAMPLES)


@pytest.mark.nightly
@pytest.mark.alone
def test_certificates_that_are_replaced_refuse_no_pod(operator: Cluster, namespace: str) -> None:
    operator.apply(namespace, attached("bert"))
    operator.kubectl("delete", "secret", f"{INJECTOR}-certificates", "-n", SYSTEM)
    pod = json.dumps({**bare_pod("bert"), "metadata": {"generateName": "p-", "labels": {LABEL: "bert"}}})
    end = time.monotonic() + 90  # a replica looks every minute
    while time.monotonic() < end:
        time.sleep(0.5)
        operator.kubectl("create", "--dry-run=server", "-n", namespace, "-f", "-", stdin=pod)


@pytest.fixture(scope="session")
def addons(shared: Shared, operator: Cluster) -> Cluster:
    """The cluster with JobSet, Kubeflow Trainer, and the chart's runtime for it."""

    def install() -> str:
        env = {"KUBECONFIG": str(operator.kubeconfig)}
        run([INSTALL, "--name", operator.name, "jobset", "trainer"], timeout_s=600, env=env)
        words = ["upgrade", RELEASE, "charts/dataloaderjob", "-n", SYSTEM, "--reuse-values", "--wait"]
        operator.helm(*words, "--set", "injection.trainingRuntime.enabled=true")
        return CHART_RUNTIME

    shared.once("addons", install)
    return operator


@pytest.fixture(scope="session")
def short_digest(shared: Shared, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Of the main job in a short form, run on this machine with trainers of its own."""
    return shared.once("short digest", lambda: run_here(tmp_path_factory.mktemp("short"), **OPTIONS))


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.timeout(900)
def test_own_trainers_print_the_digest_that_other_controllers_must(
    operator: Cluster, start, short_digest: str
) -> None:
    job = start(controllers.own_trainers())
    job.await_phase("Complete", timeout_s=600)
    assert job.digest() == short_digest


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("job", "objects"),
    [
        pytest.param("by-jobset", controllers.job_set, id="jobset-by-label"),
        pytest.param("by-trainer", controllers.train_job_by_label, id="trainjob-by-label"),
        pytest.param("dataloader", controllers.train_job_by_runtime, id="trainjob-by-runtime"),
    ],
)
def test_unchanged_object_trains_on_two_pods_with_the_same_digest(
    job: str, objects, addons: Cluster, namespace: str, short_digest: str
) -> None:
    level = "pod-security.kubernetes.io/enforce=baseline"  # a TrainJob cannot set its container's security context
    addons.kubectl("label", "namespace", namespace, level, "--overwrite")
    addons.apply(namespace, controllers.attached(job))
    addons.apply(namespace, *objects(job))
    assert printed(addons, namespace, job, timeout_s=600) == short_digest
    pods = addons.list("pods", namespace, f"{LABEL}={job}")
    assert len(pods) == controllers.PODS
    assert {by["kind"] for pod in pods for by in pod["metadata"]["ownerReferences"]} == {"Job"}
    told = [e["involvedObject"]["kind"] for e in events(addons, namespace, "Injected")]
    assert told == ["Job"], "one for both pods"


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.timeout(600)
def test_killed_sidecar_of_an_attached_pod_changes_no_batch(operator: Cluster, namespace: str) -> None:
    operator.apply(namespace, attached("bert"))
    operator.apply(namespace, plain_job("bert", pace_s=0.5))

    def taken() -> str | None:
        for pod in operator.list("pods", namespace, f"{LABEL}=bert"):
            if "batch 3\n" in operator.logs(pod["metadata"]["name"], namespace, "node"):
                return str(pod["spec"]["nodeName"])
        return None

    node = until(taken, timeout_s=240, what="some batches", also=Job(operator, namespace, "bert").why)
    run(["docker", "exec", str(node), "pkill", "-9", "-f", "dataloaderjob.sidecar"])

    def restarts() -> int:
        (pod,) = operator.list("pods", namespace, f"{LABEL}=bert")
        return int(pod["status"]["initContainerStatuses"][0]["restartCount"])

    until(lambda: restarts() == 1, timeout_s=60, what="a new sidecar")
    assert printed(operator, namespace, "bert") == stream_here(SAMPLES)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_idle_job_has_no_feeders_until_the_next_pod_trains(
    operator: Cluster, namespace: str, record_property
) -> None:
    job = Job(operator, namespace, "bert")
    operator.apply(namespace, attached("bert", idleSeconds=5))
    for number in range(2):
        job.await_phase("Idle", timeout_s=240)
        until(lambda: not job.pods(FEEDERS), timeout_s=60, what="no feeders", also=job.why)
        operator.apply(namespace, plain_job("bert"))
        job.await_phase("Serving", timeout_s=240)
        assert printed(operator, namespace, "bert") == stream_here(SAMPLES), number
        seconds = first_batch_s(operator, namespace)
        record_property(f"seconds_to_the_first_batch_{number}", seconds)
        assert seconds < FIRST_BATCH_S
        operator.kubectl("delete", "job", "bert", "-n", namespace, "--wait=true")


def first_batch_s(cluster: Cluster, namespace: str) -> float:
    """The seconds from the start of the pod's trainer to its first batch. Kubernetes reports whole seconds."""
    (pod,) = cluster.list("pods", namespace, f"{LABEL}=bert")
    (status,) = pod["status"]["containerStatuses"]
    (state,) = status["state"].values()
    log = cluster.logs(pod["metadata"]["name"], namespace, "node", "--timestamps")
    first = next(line.split()[0] for line in log.splitlines() if line.endswith("batch 1"))
    return (datetime.fromisoformat(first) - datetime.fromisoformat(state["startedAt"])).total_seconds()


def test_lines_of_the_readme_run_as_printed(operator: Cluster, namespace: str, tmp_path: Path) -> None:
    level = "pod-security.kubernetes.io/enforce=baseline"  # as in most namespaces
    operator.kubectl("label", "namespace", namespace, level, "--overwrite")
    here = Cluster(operator.name, tmp_path / "kubeconfig")
    shutil.copy(operator.kubeconfig, here.kubeconfig)
    here.kubectl("config", "set-context", "--current", f"--namespace={namespace}")
    lines = ATTACHED_JOB.replace(f"ghcr.io/dataloaderjob/feeder:{__version__}", FEEDER)
    env = {"KUBECONFIG": str(here.kubeconfig)}
    assert run(["bash", "-euc", lines], timeout_s=300, env=env).splitlines()[-1] == "523776"
