"""Jobs with attached trainers, with the operator's process and pods of other controllers on a real API server."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path
from typing import Any

from injecting import JOB_FILE, container, pod
from injector import ADMISSION, Installed
from manifests import ATTACHED, FOLLOW, manifest
from operated import Operated
from other_kinds import TRAINJOBS
from processes_of_operator import ROOT, Operator, until
from supervisor_alone import SupervisorAlone, says

from apiserver import ApiServer, Refused
from dataloaderjob.api import KIND
from dataloaderjob.api.injection import inject, injection
from dataloaderjob.api.load import parse_manifest
from dataloaderjob_operator import names
from dataloaderjob_operator.decide.health import SIDECAR
from dataloaderjob_operator.objects.settings import SUPERVISOR_PORT

PODLESS = {
    ("Secret", "mnist-key"), ("Secret", "mnist-attach"), ("ConfigMap", "mnist-attach"), ("Service", "mnist-head"),
    ("NetworkPolicy", "mnist-head"), ("NetworkPolicy", "mnist-feeder"),
}  # fmt: skip
FEEDING = {
    ("ConfigMap", "mnist-settings-head"), ("ConfigMap", "mnist-settings-feeder"), ("Deployment", "mnist-head"),
    ("Deployment", "mnist-feeders"),
}  # fmt: skip
MERGE = "application/merge-patch+json"


class Attached(Operated):
    """A job with attached trainers, and pods of other controllers as their kubelets would report them."""

    def __init__(self, server: ApiServer, **attach: Any) -> None:
        changes = {f"spec.trainers.attach.{name}": value for name, value in attach.items()}
        super().__init__(server, manifest({**ATTACHED, "spec.feeders.minAvailable": 1, **changes}))

    def attach(self, name: str, *, label: str = "mnist", sidecar: bool = True, listens: bool = True) -> None:
        init = {"name": SIDECAR, "image": "s", "restartPolicy": "Always"}
        spec = {
            "containers": [{"name": "node", "image": "i"}], "initContainers": [init] if sidecar else [],
            "restartPolicy": "Never",
        }  # fmt: skip
        metadata = {"name": name, "labels": {names.LABEL_INJECT: label}}
        self.server.request("POST", self.path("Pod"), {"metadata": metadata, "spec": spec})
        if listens:
            self.listens(name)

    def listens(self, name: str) -> None:
        started = {"running": {"startedAt": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())}}
        common = {
            "image": "i",
            "imageID": "",
            "ready": True,
            "restartCount": 0,
            "started": True,
            "state": started,
        }
        scheduled = {"type": "PodScheduled", "status": "True", "lastTransitionTime": "2026-01-01T00:00:00Z"}
        status = {
            "phase": "Running", "conditions": [scheduled], "initContainerStatuses": [{"name": SIDECAR, **common}],
            "containerStatuses": [{"name": "node", **common}],
        }  # fmt: skip
        path = f"{self.path('Pod')}/{name}/status"
        self.server.request("PATCH", path, {"status": status}, content_type=MERGE)

    def detach(self, name: str) -> None:
        self.server.request("DELETE", f"{self.path('Pod')}/{name}?gracePeriodSeconds=0")

    @property
    def status(self) -> dict[str, Any]:
        return dict(self.get(KIND, "mnist").get("status") or {})

    def is_in(self, phase: str, summary: str) -> bool:
        status = self.status
        return (status.get("phase"), status.get("trainers", {}).get("summary")) == (phase, summary)

    def feeders(self) -> int:
        return int(self.get("Deployment", "mnist-feeders")["spec"]["replicas"])

    def told(self, pod: str, reason: str) -> list[str]:
        """The messages of a pod's events with this reason."""
        query = f"fieldSelector=involvedObject.name={pod},involvedObject.kind=Pod,reason={reason}"
        return [
            event["message"] for event in self.server.request("GET", f"{self.path('Event')}?{query}")["items"]
        ]

    def reasons(self) -> set[str]:
        items = self.server.request("GET", self.path("Event"))["items"]
        return {item["reason"] for item in items}

    def supervisor_at(self, address: str, folder: Path) -> SupervisorAlone:
        """A head and a feeder that serve, as the operator sees them."""
        uid = self.get(KIND, "mnist")["metadata"]["uid"]
        job, key = names.unique(*self.key, uid), names.job_key(ROOT, uid)
        made = SupervisorAlone(folder, job=job, key=key, host=address, port=SUPERVISOR_PORT, feeders=1)
        made.has_ray()
        made.ready(0)
        self.serves()
        self.ready_head(address)
        return made


def test_job_lives_by_its_pods_and_ends_with_the_object_it_follows(
    server: ApiServer, operator: Operator, tmp_path: Path
) -> None:
    job = Attached(server, idleSeconds=3, follow=FOLLOW)

    def reaches(phase: str, summary: str) -> None:
        until(
            lambda: job.is_in(phase, summary),
            40,
            f"{phase}, {summary}; {job.status}; its log: {operator.log}",
        )

    until(lambda: job.named() == PODLESS | FEEDING, 30, f"children; its log: {operator.log}")
    reaches("Idle", "0 pods")
    until(lambda: job.feeders() == 0, 10, "no feeders")
    job.attach("a", listens=False)
    until(lambda: job.feeders() == 1, 10, f"feeders for the pod; its log: {operator.log}")
    assert job.get(KIND, "mnist")["spec"]["feeders"]["replicas"] == 1
    supervisor = job.supervisor_at("127.0.0.43", tmp_path / "s")
    with supervisor.sidecar() as sidecar:
        says(sidecar)
        job.listens("a")
        reaches("Serving", "1 pod, 1 rank")
        assert job.conditions()["Ready"]["status"] == "True"
        until(lambda: "FollowedNotRead" in job.status["reason"], 30, "the missing kind is told")
        assert "CustomResourceDefinition" in job.conditions()["Progressing"]["message"]
        server.define(TRAINJOBS)
        until(lambda: job.status["reason"] == "FollowedMissing", 60, "the missing object is told")
        train = {
            "metadata": {"name": "bert"},
            "spec": {},
            "apiVersion": FOLLOW["apiVersion"],
            "kind": "TrainJob",
        }
        trains = f"/apis/{FOLLOW['apiVersion']}/namespaces/{job.namespace}/trainjobs"
        server.request("POST", trains, train)
        until(lambda: not job.status["reason"], 30, "it is followed")
        job.detach("a")
        reaches("Waiting", "0 pods")
    reaches("Idle", "0 pods")
    until(lambda: supervisor.desired == 0, 15, "the supervisor keeps no feeder")
    done = {"type": "Complete", "status": "True", "reason": "JobsCompleted", "message": "all done"}
    server.request("PATCH", f"{trains}/bert/status", {"status": {"conditions": [done]}}, content_type=MERGE)
    until(lambda: job.status["phase"] == "Complete", 30, f"the end; its log: {operator.log}")
    assert "TrainJob bert completed: JobsCompleted: all done" in job.conditions()["Complete"]["message"]

    def released() -> bool:
        job.collect_garbage()
        return not any(kind == "Deployment" for kind, _ in job.children())

    until(released, 15, "head and feeders are gone")
    assert {"Attached", "Detached", "Idle", "FollowedNotRead", "Completed"} <= job.reasons()
    assert operator.end() == 0
    assert "Traceback" not in operator.log


def test_failed_job_of_kubernetes_fails_the_job_that_follows_it(
    server: ApiServer, operator: Operator
) -> None:
    job = Attached(server, follow={"apiVersion": "batch/v1", "kind": "Job", "name": "train"})
    pod = {"containers": [{"name": "a", "image": "i"}], "restartPolicy": "Never"}
    made = {"metadata": {"name": "train"}, "spec": {"template": {"spec": pod}}}
    server.request("POST", job.path("Job"), made)
    until(
        lambda: job.status.get("trainers", {}).get("followedUid"), 30, f"it is read; its log: {operator.log}"
    )
    failed = {"type": "Failed", "status": "True", "reason": "BackoffLimitExceeded", "message": "too often",
              "lastTransitionTime": "2026-01-01T00:00:00Z"}  # fmt: skip
    target = {**failed, "type": "FailureTarget"}
    status = {"startTime": "2026-01-01T00:00:00Z", "conditions": [target, failed]}
    server.request("PATCH", f"{job.path('Job')}/train/status", {"status": status}, content_type=MERGE)
    until(lambda: job.status["phase"] == "Failed", 30, f"the end; its log: {operator.log}")
    assert "BackoffLimitExceeded: too often" in job.conditions()["Failed"]["message"]


def test_attached_pods_keep_their_feeders_across_a_restart_of_the_operator(
    server: ApiServer, operator: Operator, tmp_path: Path
) -> None:
    job = Attached(server, idleSeconds=0)
    job.attach("a")
    job.attach("other", label="another-job")
    until(lambda: job.named() == PODLESS | FEEDING, 30, f"children; its log: {operator.log}")
    supervisor = job.supervisor_at("127.0.0.44", tmp_path / "s")
    with supervisor.sidecar() as sidecar:
        says(sidecar)
        until(lambda: job.is_in("Serving", "1 pod, 1 rank"), 40, f"{job.status}; its log: {operator.log}")
        before = job.get("Deployment", "mnist-feeders")["metadata"]["generation"]
        operator.end(kill=True)
        job.attach("b")
        operator.start()
        until(lambda: job.is_in("Serving", "2 pods, 1 rank"), 40, f"{job.status}; its log: {operator.log}")
        after = job.get("Deployment", "mnist-feeders")
    assert (after["metadata"]["generation"], after["spec"]["replicas"]) == (before, 1), "never scaled to 0"


def test_labeled_pod_without_a_sidecar_is_named(
    server: ApiServer, operator: Operator, tmp_path: Path
) -> None:
    job = Attached(server)
    until(lambda: job.named() == PODLESS | FEEDING, 30, f"children; its log: {operator.log}")
    job.supervisor_at("127.0.0.45", tmp_path / "s")
    until(
        lambda: job.is_in("Waiting", "0 pods") and job.conditions()["Ready"]["status"] == "True",
        40,
        "serving",
    )
    job.attach("bare", sidecar=False, listens=False)
    until(lambda: job.conditions()["Ready"]["reason"] == "NotInjected", 20, f"its log: {operator.log}")
    assert "pod bare: it has the label" in job.conditions()["SidecarsReady"]["message"]


def test_pods_that_no_job_serves_have_an_event_with_the_remedy(server: ApiServer, operator: Operator) -> None:
    """No webhook and no guard is here, as with injected files."""
    job = Attached(server)
    own = manifest({"metadata.name": "own", "metadata.namespace": job.namespace})
    server.request("POST", job.path(KIND), own)
    for name, label in {"lost": "nobody", "strange": "own", "fine": "mnist"}.items():
        job.attach(name, label=label)
    for name, cause in {"lost": "which does not exist", "strange": "which creates its own trainers"}.items():
        until(lambda name=name: job.told(name, "NotAttached"), 30, f"an event; its log: {operator.log}")
        (text,) = job.told(name, "NotAttached")
        assert cause in text
        assert text.endswith("or remove the label")
    assert not job.told("fine", "NotAttached")
    assert operator.end() == 0
    assert "Traceback" not in operator.log


def test_refused_pods_and_injected_ones_are_reported_where_users_look(
    server: ApiServer, operator: Operator, tmp_path: Path
) -> None:
    """The guard's own refusal of a pod of a Job, as the Job's controller reports it, which is not there."""
    guarded = Installed(server, tmp_path)
    webhook = ("MutatingWebhookConfiguration", guarded.cluster)
    server.request("DELETE", f"{ADMISSION}/mutatingwebhookconfigurations/{guarded.cluster}")
    guarded.objects.pop(webhook)
    try:
        until(lambda: not guarded.accepts(pod()), 30, "the guard is in force")
        uid = guarded.job()["metadata"]["uid"]
        folder = f"/api/v1/namespaces/{guarded.namespace}"
        two = pod(container("a"), container("b"))
        made = job_of(guarded, "train", two)
        owner = {name: made[name] for name in ("apiVersion", "kind")}
        owner |= {name: made["metadata"][name] for name in ("name", "uid")}
        failed = {
            "metadata": {"name": "train.1", "namespace": guarded.namespace}, "type": "Warning",
            "reason": "FailedCreate", "message": f"Error creating: {guarded.refusal(two)}",
            "involvedObject": {**owner, "namespace": guarded.namespace},
            "lastTimestamp": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), "count": 1,
        }  # fmt: skip
        server.request("POST", f"{folder}/events", failed)

        def told(about: str, reason: str) -> list[str]:
            query = f"fieldSelector=involvedObject.uid={about},reason={reason}"
            return [event["message"] for event in server.request("GET", f"{folder}/events?{query}")["items"]]

        until(lambda: told(uid, "PodRefused"), 40, f"the refusal; its log: {operator.log}")
        (text,) = told(uid, "PodRefused")
        assert text.startswith(
            "Job train cannot create its pods: cannot add the sidecar of DataLoaderJob bert: "
        )
        assert text.endswith("set spec.trainers.attach.container to the name of the one that trains")
        thing = inject(pod(), injection(parse_manifest(JOB_FILE.read_text()), image="example/sidecar:1"))
        thing["metadata"]["ownerReferences"] = [{**owner, "controller": True}]
        for _ in range(2):
            guarded.create(thing, dry=False)
        until(lambda: len(told(uid, "Attached")) == 2, 30, f"the pods; its log: {operator.log}")
        until(lambda: told(owner["uid"], "Injected"), 10, f"the Job's event; its log: {operator.log}")
        (text,) = told(owner["uid"], "Injected")
        assert text == (
            "the pods have the sidecar of DataLoaderJob bert, and receive their batches from that job's feeders"
        )
        assert len(told(uid, "PodRefused")) == 1
    finally:
        guarded.close()
    assert operator.end() == 0
    assert "Traceback" not in operator.log


def job_of(guarded: Installed, name: str, thing: dict[str, Any]) -> dict[str, Any]:
    """A Job whose pods would be like this one."""
    template = {"metadata": thing["metadata"], "spec": {**thing["spec"], "restartPolicy": "Never"}}
    made = {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": name},
        "spec": {"template": template},
    }
    return guarded.server.request("POST", f"/apis/batch/v1/namespaces/{guarded.namespace}/jobs", made)


def test_secret_left_by_an_earlier_job_is_replaced_once_collected(
    server: ApiServer, operator: Operator
) -> None:
    job = Attached(server)
    until(lambda: job.named() == PODLESS | FEEDING, 30, f"children; its log: {operator.log}")
    key = job.get("Secret", "mnist-attach")["data"]["links"]
    owner = job.get("Secret", "mnist-attach")["metadata"]["ownerReferences"]
    operator.end(kill=True)
    job.delete("Secret", "mnist-attach")
    stale = {"metadata": {"name": "mnist-attach"}, "data": {"links": "b2xk"}}
    server.request("POST", job.path("Secret"), stale)
    operator.start()
    time.sleep(3.0)
    assert job.get("Secret", "mnist-attach")["data"] == {"links": "b2xk"}, "somebody else's is left alone"
    job.delete("Secret", "mnist-attach")
    job.attach("a")  # a reason to look

    def again() -> bool:
        with contextlib.suppress(Refused):
            return bool(job.get("Secret", "mnist-attach")["data"]["links"] == key)
        return False

    until(again, 30, f"the job's own Secret; its log: {operator.log}")
    found = job.get("Secret", "mnist-attach")
    assert found["metadata"]["ownerReferences"] == owner
    assert set(found["data"]) == {"links"}, "attached pods do not get Ray's token"
