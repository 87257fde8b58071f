"""What is rendered for a version of Kubernetes has no field that this version does not know."""

from __future__ import annotations

import re

import kubernetes_validate
import pytest

from chart import CHART, render

ALL = (
    "--set", "podMonitor.enabled=true,serviceMonitor.enabled=true,prometheusRule.enabled=true,dashboard.enabled=true",
    "--set", "replicas=2", "--set", "podAnnotations.a=b", "--set", "priorityClassName=high",
    "--set-json", 'tolerations=[{"operator":"Exists"}]', "--set-json", 'imagePullSecrets=[{"name":"pull"}]',
    "--set-json", 'nodeSelector={"disk":"ssd"}', "--set-json", 'affinity={"nodeAffinity":{}}',
)  # fmt: skip
OPTIONS = {
    "plain": (), "all": (*ALL, "--set", "injection.certManager.enabled=true,injection.trainingRuntime.enabled=true"),
    "policy": ("--set", "injection.mode=policy"),
    "namespaced": (*ALL, "--set", "namespaces={a},injection.mode=webhook"),
}  # fmt: skip
FIRST_POLICIES, FIRST_GATED = 36, 34
"""Versions of Kubernetes from which MutatingAdmissionPolicies have the version v1, and exist behind a feature gate."""
OF_OTHERS = {
    "Certificate",
    "ClusterTrainingRuntime",
    "Issuer",
    "PodMonitor",
    "PrometheusRule",
    "ServiceMonitor",
}
"""Kinds that other projects define: no version of Kubernetes has a schema of them."""


@pytest.mark.cover(1)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("minor", range(29, 38))
def test_each_object_validates_against_that_version(minor: int, options: tuple[str, ...]) -> None:
    if minor < FIRST_GATED and "injection.mode=policy" in options:
        with pytest.raises(ValueError, match="needs MutatingAdmissionPolicies"):
            render("--kube-version", f"1.{minor}.0", *options)
        return
    found = render("--kube-version", f"1.{minor}.0", *options)
    assert len(found) >= 10
    for (kind, name), thing in found.items():
        if kind not in OF_OTHERS:
            try:
                if not (kind.startswith("MutatingAdmissionPolicy") and minor < FIRST_POLICIES):
                    kubernetes_validate.validate(thing, f"1.{minor}", strict=True)
            except kubernetes_validate.ValidationError as exc:
                raise AssertionError(f"{kind} {name} for 1.{minor}: {exc.message}") from None


def test_checked_renderings_cover_every_kind_of_the_chart() -> None:
    files = [*(CHART / "templates").rglob("*.yaml"), CHART / "files" / "training-runtime.yaml"]
    templates = [path.read_text() for path in files]
    kinds = {kind for text in templates for kind in re.findall(r"^kind: (\w+)$", text, re.MULTILINE)}
    assert kinds > OF_OTHERS
    assert kinds <= {kind for options in OPTIONS.values() for kind, _ in render(*options)}


def test_older_kubernetes_version_is_refused() -> None:
    with pytest.raises(ValueError, match=r">=1\.29"):
        render("--kube-version", "1.28.9")


def test_unknown_field_is_detected() -> None:
    thing = render()["Deployment", "r-operator"]
    thing["spec"]["template"]["spec"]["containers"][0]["livenessProbe"]["patience"] = 1
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(thing, "1.34", strict=True)
