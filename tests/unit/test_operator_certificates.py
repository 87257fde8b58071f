"""The Secrets with certificates of jobs with spec.loader.tls, and what each pod gets of them."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from attached_jobs import job as attached_job
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from hypothesis import given, settings
from hypothesis import strategies as st
from kubelet import write_volume
from manifests import manifest
from observed_jobs import SETUP, T0, job, serving

from dataloaderjob.api import DataLoaderJob, ManifestError, parse_object
from dataloaderjob.api.injection import injection
from dataloaderjob.api.sidecar import KEY_VOLUME
from dataloaderjob.core.certificates import SKEW
from dataloaderjob.core.credentials import FILES
from dataloaderjob.core.generations import GENERATIONS, PERIOD
from dataloaderjob_operator import names, objects
from dataloaderjob_operator.decide.decision import Decision, decide
from dataloaderjob_operator.kinds import Manifest
from dataloaderjob_operator.objects import pods
from dataloaderjob_operator.objects.settings import JOB_KEY, RAY_TOKEN

CREATED = "2026-01-01T00:00:00Z"


def under_tls(found: DataLoaderJob) -> DataLoaderJob:
    metadata = found.metadata.model_copy(update={"creation_timestamp": CREATED})
    loader = found.spec.loader.model_copy(update={"tls": True})
    spec = found.spec.model_copy(update={"loader": loader})
    return found.model_copy(update={"metadata": metadata, "spec": spec})


JOB = under_tls(job())
ATTACHED = under_tls(attached_job())


def decided_at(age: timedelta, found: DataLoaderJob = JOB) -> Decision:
    made = decide(replace(serving(), job=found), SETUP, T0 + age)
    assert made is not None
    return made


def secrets_of(decision: Decision) -> dict[str, Manifest]:
    return {child["metadata"]["name"]: child for child in decision.apply if child["kind"] == "Secret"}


def pods_of(found: DataLoaderJob) -> dict[names.Role, dict[str, Any]]:
    children = [*objects.feeding(found, SETUP), *objects.training(found, SETUP, 0)]
    return {
        names.Role(child["metadata"]["labels"][names.LABEL_ROLE]): child["spec"]["template"]["spec"]
        for child in children
        if child["kind"] in ("Deployment", "Job")
    }


def volume(pod: dict[str, Any]) -> dict[str, Any]:
    return next(found for found in pod["volumes"] if found["name"] == KEY_VOLUME)


def files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


@given(st.timedeltas(timedelta(days=-2), GENERATIONS * PERIOD + timedelta(days=99)))
@settings(max_examples=60, deadline=None)
def test_pods_that_start_and_pods_that_run_have_their_generation(age: timedelta) -> None:
    decision, stem = decided_at(age), names.certificate_secret("mnist", "u", SETUP.root_key, 0)[:-1]
    current = min(max(age // PERIOD, 0), GENERATIONS - 1)
    found = {name for name in secrets_of(decision) if "-tls-" in name}
    assert found == {f"{stem}0", f"{stem}{current}"}
    if current < GENERATIONS - 1:
        due_s = ((current + 1) * PERIOD - age).total_seconds()
        assert decision.requeue_after_s is not None
        assert 0.0 < decision.requeue_after_s <= due_s


@pytest.mark.parametrize(
    ("role", "part"),
    [(names.Role.HEAD, "supervisor"), (names.Role.FEEDER, "feeder"), (names.Role.TRAINER, "sidecar")],
)
def test_pod_of_a_role_gets_the_certificates_of_its_part_only(
    tmp_path: Path, role: names.Role, part: str
) -> None:
    pod = pods_of(JOB)[role]
    write_volume(volume(pod), secrets_of(decided_at(timedelta())), tmp_path)
    own = {JOB_KEY, *({RAY_TOKEN} if role is names.Role.FEEDER else ())}
    assert files(tmp_path) == {*own, *(f"tls/0/{name}" for name in FILES)}
    certificate = x509.load_pem_x509_certificate((tmp_path / "tls/0/tls.crt").read_bytes())
    alternatives = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert alternatives.get_values_for_type(x509.DNSName) == [f"{part}.dataloaderjob.internal"]


def test_kubelet_adds_a_later_generation_to_pods_that_run(tmp_path: Path) -> None:
    secrets = secrets_of(decided_at(timedelta())) | secrets_of(decided_at(3 * PERIOD))
    write_volume(volume(pods_of(JOB)[names.Role.FEEDER]), secrets, tmp_path)
    assert {path.split("/")[1] for path in files(tmp_path) if path.startswith("tls/")} == {"0", "3"}


def test_pods_do_not_change_when_certificates_are_renewed() -> None:
    def workloads(age: timedelta) -> list[Manifest]:
        return [child for child in decided_at(age).apply if child["kind"] in ("Deployment", "Job")]

    assert workloads(timedelta()) == workloads(5 * PERIOD)


def test_attached_pods_get_certificates_of_sidecars_only(tmp_path: Path) -> None:
    found = {"name": KEY_VOLUME, **injection(ATTACHED, image="s").volumes[0]}
    write_volume(found, secrets_of(decided_at(timedelta(), ATTACHED)), tmp_path)
    assert files(tmp_path) == {JOB_KEY, *(f"tls/0/{name}" for name in FILES)}
    attached = secrets_of(decided_at(timedelta(), ATTACHED))["mnist-attach-tls-0"]
    assert set(attached["data"]) == {"ca.crt", "sidecar.crt", "sidecar.key"}


def test_no_secret_has_the_key_of_an_authority(tmp_path: Path) -> None:
    authorities, keys = set(), set()
    for secret in secrets_of(decided_at(timedelta())).values():
        path = tmp_path / secret["metadata"]["name"]
        write_volume({"secret": {"secretName": path.name}}, {path.name: secret}, path)
        for file in path.glob("*.crt"):
            for found in x509.load_pem_x509_certificates(file.read_bytes()):
                if found.extensions.get_extension_for_class(x509.BasicConstraints).value.ca:
                    authorities.add(found.public_key().public_bytes_raw())  # type: ignore[union-attr]
        for file in path.glob("*.key"):
            key = serialization.load_pem_private_key(file.read_bytes(), password=None)
            keys.add(key.public_key().public_bytes_raw())  # type: ignore[union-attr]
    assert len(authorities) == 2, "that of this generation and that of the next one"
    assert len(keys) == 3
    assert not authorities & keys


def test_secret_is_built_from_the_same_bytes_again() -> None:
    assert secrets_of(decided_at(timedelta())) == secrets_of(decided_at(timedelta(minutes=5)))


def test_jobs_and_root_keys_share_no_certificate() -> None:
    seeds = {names.certificate_seed(root * 32, uid) for root in (b"a", b"b") for uid in ("u", "v")}
    assert len(seeds) == 4


def test_job_without_tls_has_no_certificates() -> None:
    assert "secret" in volume(pods_of(job())[names.Role.FEEDER])
    made = decide(serving(), SETUP, T0)
    assert made is not None
    assert made.certificates is None
    assert not any("-tls-" in name for name in secrets_of(made))


def test_keys_of_live_pods_are_found_beside_certificates() -> None:
    found = pods_of(JOB)[names.Role.HEAD]
    assert pods.secret_of({"spec": found}) == names.key_secret("mnist", "u", SETUP.root_key)


def test_tls_on_an_existing_ray_cluster_is_refused() -> None:
    changes = {"spec.ray": {"external": {"address": "ray:6379"}}, "spec.loader.tls": True}
    with pytest.raises(ManifestError, match=r"spec.loader.tls: found true; use false with spec.ray.external"):
        parse_object(manifest(changes))


def test_certificates_begin_with_the_job() -> None:
    made = decided_at(timedelta()).certificates
    assert made is not None
    assert made.start(0) == T0
    assert timedelta() < SKEW
    assert isinstance(made.began, datetime)
