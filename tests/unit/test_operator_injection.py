"""The operator's part in injections: the status for the admission policy, reviews, and renewals of certificates."""

from __future__ import annotations

import base64
import json
from datetime import UTC, datetime, timedelta
from typing import Any

import jsonpatch
import pytest
import yaml
from attached_jobs import attached_pod, decided, following, job, serving
from injecting import IMAGE, JOB_FILE, bert, container, pod
from observed_jobs import SETUP

from dataloaderjob.api.injection import for_policy, inject, injection
from dataloaderjob.api.status import Phase
from dataloaderjob_operator.decide.followed import Followed, FollowedState
from dataloaderjob_operator.injector.admission import (
    BadReview,
    ReviewResult,
    Setup,
    answer,
    patch,
    read_review,
    response,
    unreadable,
)
from dataloaderjob_operator.injector.certificates import (
    BadCertificates,
    Certificates,
    Renewal,
    end,
    from_stored,
    renewal,
    renewed,
)
from dataloaderjob_operator.objects import settings

HERE = Setup(sidecar_image=IMAGE)
JOB: dict[str, Any] = yaml.safe_load(JOB_FILE.read_text())
NOW = datetime(2026, 1, 1, tzinfo=UTC)
NAMES = ("r-injector.ops.svc", "127.0.0.1")


def body(thing: Any = None, **request: Any) -> dict[str, Any]:
    found = {"uid": "u", "namespace": "team", "object": pod() if thing is None else thing, **request}
    return {"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "request": found}


def test_pod_that_ends_a_jobs_idleness_gets_what_any_other_pod_gets() -> None:
    spec = job(idleSeconds=0).spec
    feeders = spec.feeders.model_copy(update={"replicas": 8})
    made = job(idleSeconds=0).model_copy(update={"spec": spec.model_copy(update={"feeders": feeders})})
    idle, at_work = decided(serving(job=made)).status, decided(serving(attached_pod(), job=made)).status
    assert (idle.phase, at_work.phase) == (Phase.IDLE, Phase.SERVING)
    assert idle.injection == at_work.injection
    assert {"name": "DATALOADERJOB_FEEDERS", "value": "8"} in idle.injection["env"]


def test_status_has_the_injection_until_the_job_ends() -> None:
    found = decided(serving(attached_pod())).status.injection
    assert found is not None
    wanted = injection(job(), image=SETUP.sidecar_image)
    assert found == for_policy(wanted)
    assert found["sidecar"] == inject(pod(), wanted)["spec"]["initContainers"][0]
    over = Followed(FollowedState.COMPLETE, "", "t")
    ended = decided(serving(attached_pod(), job=following(), followed=over)).status
    assert (ended.phase, ended.injection) == (Phase.COMPLETE, None)


def test_sidecars_of_attached_pods_admit_any_user() -> None:
    found = json.loads(settings.attach_map(job(), SETUP, "")["data"]["sidecar.json"])
    assert found["anyone"] is True


@pytest.mark.parametrize(
    "thing",
    [pod(), pod(container("train", env=[{"name": "A", "value": "é"}]), volumes=[]), {**pod(), "extra": {"a": [1]}}],
    ids=["plain", "with lists", "with a field of a later version"],
)  # fmt: skip
def test_patch_turns_the_pod_into_the_renderers(thing: dict[str, Any]) -> None:
    review = read_review(body(thing))
    found = answer(review, JOB, HERE)
    sent = json.loads(json.dumps(response(review, found)))["response"]
    assert (sent["uid"], sent["allowed"], sent["patchType"]) == ("u", True, "JSONPatch")
    operations = json.loads(base64.b64decode(sent["patch"]))
    assert jsonpatch.apply_patch(thing, operations) == inject(thing, bert())
    assert {op["path"].count("/") for op in operations} == {2}, "whole fields, never a place in a list"


def test_current_pod_is_allowed_without_a_patch() -> None:
    review = read_review(body(inject(pod(), bert())))
    found = answer(review, JOB, HERE)
    assert found.result is ReviewResult.UNCHANGED
    assert response(review, found)["response"] == {"uid": "u", "allowed": True}
    assert patch(review.pod, review.pod) == []


DELETED = {**JOB, "metadata": {**JOB["metadata"], "deletionTimestamp": "2026-01-01T00:00:00Z"}}
BROKEN = {**JOB, "spec": {**JOB["spec"], "loader": {"prefetch": "many"}}}
REFUSED = {
    "no job": (None, "names DataLoaderJob team/bert, which does not exist: create it, or remove the label"),
    "a job that is being deleted": (DELETED, "DataLoaderJob team/bert is being deleted: create a new job"),
    "a job that cannot be read": (BROKEN, "DataLoaderJob team/bert cannot be used: "),
}


@pytest.mark.parametrize(("live", "message"), REFUSED.values(), ids=REFUSED)
def test_refusal_states_the_reason(live: Any, message: str) -> None:
    review = read_review(body())
    found = answer(review, live, HERE)
    assert found.result is ReviewResult.REFUSED
    sent = response(review, found)["response"]
    assert (sent["allowed"], sent["status"]["code"], "patch" in sent) == (False, 403, False)
    assert message in sent["status"]["message"]


def test_api_server_that_does_not_answer_is_an_error_of_the_server() -> None:
    review = read_review(body())
    sent = response(review, unreadable(review, "503: no"))["response"]
    assert (sent["allowed"], sent["status"]["code"]) == (False, 500)
    assert sent["status"]["message"].endswith("which the label dataloading.dev/inject names: 503: no")


def test_job_of_a_later_release_with_unknown_fields_is_used() -> None:
    newer = {**JOB, "spec": {**JOB["spec"], "later": {"a": 1}}}
    assert answer(read_review(body()), newer, HERE).result is ReviewResult.INJECTED


@pytest.mark.parametrize(
    "bad",
    [
        None, [], "x", {}, {**body(), "apiVersion": "admission.k8s.io/v1beta1"}, body(uid=""), body(namespace=""),
        body({"kind": "Job"}), {**body(), "request": None}, body("x"),
    ],
)  # fmt: skip
def test_anything_but_a_review_of_a_pod_is_a_bad_request(bad: Any) -> None:
    with pytest.raises(BadReview):
        read_review(bad)


# Certificates


def made(when: datetime = NOW) -> Certificates:
    return renewed(None, Renewal.AUTHORITY, NAMES, when)


DUE = {
    "new": (0, Renewal.NONE),
    "after 59 days": (59, Renewal.NONE),
    "after 61 days": (61, Renewal.CERTIFICATE),
    "after its end": (100, Renewal.CERTIFICATE),
    "when the authority has less than 120 days left": (611, Renewal.AUTHORITY),
    "after the authority's end": (800, Renewal.AUTHORITY),
}


@pytest.mark.parametrize(("days", "wanted"), DUE.values(), ids=DUE)
def test_certificates_are_renewed_in_time(days: int, wanted: Renewal) -> None:
    assert renewal(made(), NAMES, NOW + timedelta(days=days)) is wanted


def test_nothing_other_names_or_another_authority_need_a_renewal() -> None:
    found, other = made(), made()
    assert renewal(None, NAMES, NOW) is Renewal.AUTHORITY
    assert renewal(found, ("other.ops.svc",), NOW) is Renewal.CERTIFICATE
    stolen = Certificates(
        authority=found.authority,
        authority_key=found.authority_key,
        certificate=other.certificate,
        key=other.key,
    )
    assert renewal(stolen, NAMES, NOW) is Renewal.CERTIFICATE


def test_a_new_authority_keeps_the_previous_one_in_the_bundle() -> None:
    first = made()
    second = renewed(first, Renewal.CERTIFICATE, NAMES, NOW + timedelta(days=61))
    assert (second.authority, second.bundle) == (first.authority, first.bundle)
    assert end(second.certificate) == NOW + timedelta(days=151)
    third = renewed(second, Renewal.AUTHORITY, NAMES, NOW + timedelta(days=620))
    assert third.bundle == third.authority + first.authority
    assert renewed(third, Renewal.CERTIFICATE, NAMES, NOW + timedelta(days=690)).previous == first.authority
    assert renewed(third, Renewal.CERTIFICATE, NAMES, NOW + timedelta(days=740)).previous == b""


def test_every_day_of_ten_years_has_a_valid_certificate() -> None:
    found, served = made(), 0
    for day in range(3650):
        now = NOW + timedelta(days=day)
        if (what := renewal(found, NAMES, now)) is not Renewal.NONE:
            before, found, served = found, renewed(found, what, NAMES, now), served + 1
            assert before.authority in found.bundle, "replicas that serve the previous one are trusted"
        assert end(found.certificate) > now
        assert end(found.authority) >= end(found.certificate)
    assert served < 70


def test_stored_certificates_are_read_back_and_damage_is_named() -> None:
    found = made()
    assert from_stored(found.stored()) == found
    with pytest.raises(BadCertificates, match=r"it lacks tls\.key"):
        from_stored({**found.stored(), "tls.key": b""})
    with pytest.raises(BadCertificates):
        from_stored({**found.stored(), "ca.crt": b"no certificate"})
