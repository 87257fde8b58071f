"""The injector and its guard, with the chart's rights, between a real API server and pods, over TLS."""

from __future__ import annotations

import copy
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import yaml
from injecting import FOLDER, JOB_FILE, container, pod, requesting
from injector import IMAGE, Installed
from processes_of_operator import until
from rights import refused, used

from apiserver import ApiServer, Refused
from dataloaderjob.api.injection import inject, injection
from dataloaderjob.api.load import parse_manifest
from dataloaderjob_operator.injector.certificates import Certificates, Renewal, renewed

QUICK = ("--check-seconds=0.2", "--settle-seconds=1")


@pytest.fixture(scope="module")
def installed(server: ApiServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Installed]:
    """An injector that is up, and the job bert."""
    made = Installed(server, tmp_path_factory.mktemp("injector"))
    made.job()
    made.started(*QUICK)
    settled(made)
    yield made
    made.close()


def settled(made: Installed) -> None:
    """Waits until the API server uses webhook and guard."""
    until(made.injects, 30, "the first pod is injected")
    bare = {**pod(), "metadata": {"labels": {"dataloading.dev/inject": "nobody"}}}
    until(lambda: "nobody" in made.refusal(bare), 30, "the webhook refuses")
    made.job("left-alone", managedBy="example.com/canary")
    left = {**pod(), "metadata": {"labels": {"dataloading.dev/inject": "left-alone"}}}
    until(lambda: not made.accepts(left), 30, "the guard refuses")


def rendered(thing: dict[str, Any]) -> dict[str, Any]:
    """What the renderer makes of a pod; the webhook must give the same."""
    return inject(thing, injection(parse_manifest(JOB_FILE.read_text()), image=IMAGE))


PODS = {
    "plain": pod(),
    "with a GPU and a helper": pod(container("log"), container("train", **requesting(nvidia_com__gpu="1"))),
    "guaranteed": pod(container("train", **requesting(cpu="1", memory="1Gi"))),
    "root": pod(securityContext={"runAsUser": 0}),
    "with its own volumes": pod(
        container("train", volumeMounts=[{"name": "d", "mountPath": "/d"}], env=[{"name": "A", "value": "1"}]),
        volumes=[{"name": "d", "emptyDir": {}}], initContainers=[container("wait")],
    ),
    "as a file of a user": yaml.safe_load((FOLDER / "restricted.yaml").read_text()),
}  # fmt: skip


@pytest.mark.parametrize("thing", PODS.values(), ids=PODS)
def test_webhook_and_file_give_the_same_pod(thing: dict[str, Any], installed: Installed) -> None:
    by_webhook = installed.create(thing)
    by_file = installed.create(rendered(thing))
    for made in (by_webhook, by_file):
        for name in ("name", "uid", "creationTimestamp", "managedFields"):
            made["metadata"].pop(name)
    assert by_webhook == by_file
    assert by_webhook["metadata"]["annotations"] == rendered(thing)["metadata"]["annotations"]


def test_quality_of_service_is_kept(installed: Installed) -> None:
    assert installed.create(PODS["guaranteed"], dry=False)["status"]["qosClass"] == "Guaranteed"
    assert installed.create(PODS["plain"], dry=False)["status"]["qosClass"] == "Burstable"


def test_pod_without_the_label_never_meets_the_webhook(installed: Installed) -> None:
    before = sum(
        installed.metric(f'dataloaderjob_injector_admissions_total{{result="{result}"}}')
        for result in ("injected", "unchanged", "refused", "failed")
    )
    made = installed.create({**pod(), "metadata": {}})
    assert "initContainers" not in made["spec"]
    after = sum(
        installed.metric(f'dataloaderjob_injector_admissions_total{{result="{result}"}}')
        for result in ("injected", "unchanged", "refused", "failed")
    )
    assert after == before


def test_missing_job_is_named_and_the_pod_starts_once_it_exists(installed: Installed) -> None:
    thing = {**pod(), "metadata": {"labels": {"dataloading.dev/inject": "later"}}}
    wanted = f"names DataLoaderJob {installed.namespace}/later, which does not exist: create it, or remove the label"
    assert wanted in installed.refusal(thing)
    installed.job("later")
    assert installed.create(thing)["spec"]["initContainers"]


def test_job_with_trainers_of_its_own_is_named(installed: Installed) -> None:
    own = {"trainers": {"job": {"template": {"spec": {"containers": [container("t")]}}}}}
    installed.job("own", **own)
    thing = {**pod(), "metadata": {"labels": {"dataloading.dev/inject": "own"}}}
    assert "DataLoaderJob own creates its own trainers (spec.trainers.job)" in installed.refusal(thing)


def test_job_of_another_operator_is_left_to_it(installed: Installed) -> None:
    installed.job("other", managedBy="example.com/canary")
    thing = {**pod(), "metadata": {"labels": {"dataloading.dev/inject": "other"}}}
    assert "and the pod has 0 sidecars" in installed.refusal(thing), "by the guard, not by the webhook"


@pytest.mark.parametrize("condition", ["Complete", "Failed"])
def test_job_that_is_over_takes_no_more_pods(condition: str, installed: Installed, server: ApiServer) -> None:
    job = installed.job(f"over-{condition.lower()}")
    now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    job["status"] = {"conditions": [
        {"type": condition, "status": "True", "reason": "R", "message": "", "lastTransitionTime": now},
    ]}  # fmt: skip
    server.request("PUT", f"{job_path(installed, job)}/status", job)
    thing = {**pod(), "metadata": {"labels": {"dataloading.dev/inject": job["metadata"]["name"]}}}
    assert f"is {condition}: create a new job" in installed.refusal(thing)


def job_path(installed: Installed, job: dict[str, Any]) -> str:
    return (
        f"/apis/{job['apiVersion']}/namespaces/{installed.namespace}/dataloaderjobs/{job['metadata']['name']}"
    )


def test_ambiguous_pod_is_refused_with_the_field_to_set(installed: Installed) -> None:
    message = installed.refusal(pod(container("a"), container("b")))
    assert "set spec.trainers.attach.container to the name of the one that trains" in message


def test_pod_injected_from_an_older_file_is_renewed(installed: Installed) -> None:
    old = inject(pod(), injection(parse_manifest(JOB_FILE.read_text()), image="old:1"))
    made = installed.create(old)["spec"]["initContainers"]
    assert [(c["name"], c["image"]) for c in made] == [("dataloaderjob-sidecar", IMAGE)]


DAMAGE: dict[str, tuple[str, Any, str]] = {
    "restartPolicy": (
        "initContainers",
        lambda c: c.pop("restartPolicy"),
        "startupProbe: Forbidden: may not be set for init containers without restartPolicy=Always",
    ),
    "restartPolicy and the probe": (
        "initContainers",
        lambda c: (c.pop("restartPolicy"), c.pop("startupProbe")),
        "has lost its restartPolicy Always",
    ),
    "limits": (
        "initContainers",
        lambda c: c["resources"].pop("limits"),
        "has lost its memory request or limit",
    ),
    "requests": ("initContainers", lambda c: c.pop("resources"), "has lost its memory request or limit"),
    "a mount of the sidecar": (
        "initContainers",
        lambda c: c["volumeMounts"].pop(),
        "has lost a volume or its mount",
    ),
    "the trainer's mount": ("containers", lambda c: c.pop("volumeMounts"), "no container has the mount"),
    "the trainer's variables": ("containers", lambda c: c.pop("env"), "no container has the mount"),
}  # fmt: skip
"""The API server itself refuses the first of these, because the sidecar has a startup probe."""


@pytest.mark.parametrize(("part", "damage", "message"), DAMAGE.values(), ids=DAMAGE)
def test_guard_refuses_what_another_webhook_has_damaged(
    part: str, damage: Any, message: str, guarded: Installed
) -> None:
    thing = copy.deepcopy(rendered(pod()))
    damage(thing["spec"][part][0])
    assert message in guarded.refusal(thing)


def test_guard_refuses_a_second_sidecar_and_another_jobs(guarded: Installed) -> None:
    thing = rendered(pod())
    assert guarded.create(thing)["spec"]["initContainers"]
    assert "asks for the sidecar of DataLoaderJob bert, and the pod has 0 sidecars" in guarded.refusal(pod())
    other = {**thing, "metadata": {"labels": {"dataloading.dev/inject": "gpt"}}}
    assert "the sidecar is not that of DataLoaderJob gpt" in guarded.refusal(other)


@pytest.fixture(scope="module")
def guarded(server: ApiServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Installed]:
    """A namespace with the guard and without the webhook, as after webhooks that damage what ours has added."""
    made = Installed(server, tmp_path_factory.mktemp("guarded"))
    path = "/apis/admissionregistration.k8s.io/v1/mutatingwebhookconfigurations"
    server.request("DELETE", f"{path}/{made.cluster}")
    made.objects.pop(("MutatingWebhookConfiguration", made.cluster))
    until(lambda: not made.accepts(pod()), 30, "the guard is in force")
    yield made
    made.close()


def test_restricted_namespace_with_a_quota_accepts_injected_pods(server: ApiServer, tmp_path: Path) -> None:
    made = Installed(server, tmp_path, labels={"pod-security.kubernetes.io/enforce": "restricted"})
    made.job()
    hard = {"limits.cpu": "9", "limits.memory": "9Gi", "requests.cpu": "9", "requests.memory": "9Gi"}
    quota = {"metadata": {"name": "q"}, "spec": {"hard": hard}}
    path = f"/api/v1/namespaces/{made.namespace}/resourcequotas"
    live = server.request("POST", path, quota)
    live["status"] = {"hard": hard, "used": dict.fromkeys(hard, "0")}  # as its controller does
    server.request("PUT", f"{path}/q/status", live)
    thing = copy.deepcopy(PODS["as a file of a user"])
    thing["spec"]["containers"][0] |= requesting(cpu="1", memory="1Gi")
    try:
        made.started(*QUICK)
        until(lambda: made.accepts(thing), 30, "the pod is accepted")
        found = made.create(thing, dry=False)
        assert found["spec"]["initContainers"][0]["name"] == "dataloaderjob-sidecar"
        assert found["status"]["qosClass"] == "Guaranteed"
    finally:
        made.close()


NAMES = ("127.0.0.1",)
SERVES_FILES = "serving the certificate in"


class Down:
    """An injector that goes out of service, and returns."""

    def __init__(self, made: Installed) -> None:
        self.made = made
        self.process = made.start(*QUICK)

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()

    def recover(self) -> None:
        self.made.start(*QUICK)


class Silent(Down):
    """It accepts connections and never answers, as an endpoint behind a firewall that drops packets."""

    def stop(self) -> None:
        self.process.send_signal(signal.SIGSTOP)

    def recover(self) -> None:
        self.process.send_signal(signal.SIGCONT)


class Expired(Down):
    """Its certificate has expired, and cert-manager renews it late."""

    def __init__(self, made: Installed) -> None:
        self.made, self.folder = made, made.folder / "certificate"
        self.folder.mkdir()
        self.now = datetime.now(UTC)
        self.first = renewed(None, Renewal.AUTHORITY, NAMES, self.now)
        self._keep(self.now)
        self.process = made.start(f"--certificate-folder={self.folder}", "--check-seconds=0.2")

    def _keep(self, since: datetime) -> None:
        certificates = renewed(self.first, Renewal.CERTIFICATE, NAMES, since)
        (self.folder / "tls.crt").write_bytes(certificates.certificate)
        (self.folder / "tls.key").write_bytes(certificates.key)
        other = renewed(
            None, Renewal.AUTHORITY, NAMES, since
        )  # a new bundle ends the API server's connections
        self.made.trust(self.first.authority + other.authority)

    def stop(self) -> None:
        known = self.made.log.count(SERVES_FILES)
        self._keep(self.now - timedelta(days=10_000))
        until(lambda: self.made.log.count(SERVES_FILES) > known, 30, "the expired certificate is served")
        until(lambda: not self.made.injects(), 30, "no pod is injected")

    def recover(self) -> None:
        self._keep(self.now)


@pytest.mark.parametrize(
    ("how", "reason", "options"),
    [
        pytest.param(Down, "connection refused", (), id="killed"),
        pytest.param(Silent, "deadline exceeded", (), id="silent"),
        pytest.param(
            Expired, "certificate has expired", ("--set", "injection.certManager.enabled=true"), id="expired"
        ),
    ],
)
def test_only_labeled_pods_are_refused_while_the_webhook_is_down(
    how: type[Down], reason: str, options: tuple[str, ...], server: ApiServer, tmp_path: Path
) -> None:
    made = Installed(server, tmp_path, *options)
    made.job()
    try:
        webhook = how(made)
        until(made.injects, 30, "the first pod is injected")
        webhook.stop()
        refusal = made.refusal(pod())
        assert 'failed calling webhook "inject.dataloading.dev"' in refusal
        assert reason in refusal
        started = time.monotonic()
        made.create({**pod(), "metadata": {}})
        assert time.monotonic() - started < 1
        webhook.recover()
        until(made.injects, 30, "pods are injected again")
    finally:
        made.close()


SERVES = "serving a certificate that expires at"
EXPIRY = "dataloaderjob_injector_certificate_expiry_timestamp_seconds"


@pytest.mark.parametrize("what", [Renewal.CERTIFICATE, Renewal.AUTHORITY], ids=["certificate", "authority"])
def test_certificates_are_renewed_under_requests_without_a_refusal(
    what: Renewal, server: ApiServer, installed: Installed
) -> None:
    """The stored ones are replaced by some that are about to end, as after two months or two years."""
    before, failures, count, stop = installed.certificates(), list[str](), [0], threading.Event()
    expiry, known = installed.metric(EXPIRY), installed.log.count(SERVES)
    own = replace(server)

    def load() -> None:
        while not stop.is_set():
            try:
                installed.create(pod(), server=own)
                count[0] += 1
            except Refused as exc:
                failures.append(exc.message)

    thread = threading.Thread(target=load)
    thread.start()
    try:
        late = timedelta(days=61) if what is Renewal.CERTIFICATE else timedelta(days=700)
        installed.store(renewed(before, what, NAMES, datetime.now(UTC) - late))
        stored = installed.certificates()
        until(lambda: installed.certificates() != stored, 30, "it is renewed")
        after = installed.certificates()
        assert (after.authority == before.authority) == (what is Renewal.CERTIFICATE)
        if what is Renewal.AUTHORITY:
            until(lambda: after.authority in installed.bundle(), 30, "the bundle has the new authority")
            assert installed.bundle().startswith(after.authority + stored.authority), "and the previous one"
        until(lambda: installed.log.count(SERVES) > known, 30, "the new certificate is served")
        assert installed.metric(EXPIRY) >= expiry
        served = count[0]
        until(lambda: count[0] > served + 10, 30, "pods are injected")
    finally:
        stop.set()
        thread.join()
    assert failures == []


def test_replicas_share_the_certificates(server: ApiServer, tmp_path: Path) -> None:
    made = Installed(server, tmp_path)
    made.job()
    try:
        first, second = made.start(*QUICK), made.start(*QUICK, "--port=0", "--metrics-port=0")
        until(made.injects, 30, "the first pod is injected")
        until(lambda: made.log.count("serving admission reviews") == 2, 30, "both serve")
        assert made.log.count("renewed the authority") == 1
        assert (first.poll(), second.poll()) == (None, None)
    finally:
        made.close()


def test_replica_that_looks_late_is_trusted_after_the_secret_is_deleted(
    server: ApiServer, tmp_path: Path
) -> None:
    """The API server reaches the late one; the other one makes the new authority and soon serves it."""
    made = Installed(server, tmp_path)
    made.job()
    try:
        made.started("--check-seconds=6", "--settle-seconds=1")
        until(made.injects, 30, "the first pod is injected")
        before = made.certificates()
        made.start(*QUICK, "--port=0", "--metrics-port=0")
        until(lambda: made.log.count("serving admission reviews") == 2, 30, "both serve")
        server.request("DELETE", made.secret)
        until(lambda: made.log.count("renewed the authority") == 2, 30, "there is a new authority")
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline:
            assert made.create(pod())["spec"]["initContainers"]
        assert made.bundle() == made.certificates().authority + before.authority
    finally:
        made.close()


def test_certificates_of_cert_manager_are_served_and_reloaded(server: ApiServer, tmp_path: Path) -> None:
    made = Installed(server, tmp_path, "--set", "injection.certManager.enabled=true")
    made.job()
    folder = tmp_path / "certificate"
    folder.mkdir()
    now = datetime.now(UTC)
    first = renewed(None, Renewal.AUTHORITY, NAMES, now)
    second = renewed(first, Renewal.AUTHORITY, NAMES, now + timedelta(seconds=5))

    def keep(certificates: Certificates) -> None:
        """Writes them as the kubelet and cert-manager do."""
        (folder / "tls.crt").write_bytes(certificates.certificate)
        (folder / "tls.key").write_bytes(certificates.key)
        made.trust(certificates.bundle)

    try:
        keep(first)
        made.started(f"--certificate-folder={folder}", "--check-seconds=0.2")
        until(made.injects, 30, "the first pod is injected")
        keep(second)
        until(lambda: made.log.count("serving the certificate in") == 2, 30, "the new certificate is served")
        made.trust(second.authority)
        time.sleep(1)
        assert made.injects(), "the previous authority is not needed any more"
    finally:
        made.close()


def test_deleted_secret_is_replaced_and_no_pod_is_refused(installed: Installed, server: ApiServer) -> None:
    before = installed.certificates()
    server.request("DELETE", installed.secret)
    until(
        lambda: before.authority in installed.bundle() and len(installed.bundle()) > len(before.authority),
        30,
        "new",
    )
    deadline = time.monotonic() + 4
    while time.monotonic() < deadline:
        assert installed.create(pod())["spec"]["initContainers"]


def test_injector_uses_its_rights_and_asks_for_no_others(installed: Installed, server: ApiServer) -> None:
    account = f"{installed.ops}:r-injector"
    assert refused(server.audit_log, account) == []
    assert used(server.audit_log, account, installed.namespace) == {
        ("dataloading.dev", "dataloaderjobs", "get")
    }
    in_ops = used(server.audit_log, account, installed.ops)
    always = {("", "secrets", "create"), ("", "secrets", "get")}
    assert always <= in_ops <= always | {("", "secrets", "update")}  # a renewal updates, in another test


def test_hundred_pods_a_second_are_answered_in_time(installed: Installed, server: ApiServer) -> None:
    def burst() -> None:
        own = replace(server)
        for _ in range(25):
            assert installed.create(pod(), server=own)["spec"]["initContainers"]

    threads = [threading.Thread(target=burst) for _ in range(4)]
    started = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    took_s = time.monotonic() - started
    name = 'dataloaderjob_injector_admission_duration_seconds_bucket{le="0.5"}'
    total = installed.metric('dataloaderjob_injector_admission_duration_seconds_bucket{le="+Inf"}')
    assert installed.metric(name) >= 0.99 * total
    assert took_s < 20
