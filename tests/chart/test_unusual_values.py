"""Values and names that teams use and the defaults lack: names, words that YAML reads otherwise, and removals."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from kubernetes_validate import validate

from chart import CHART, helm, notes, render

WEBHOOK = ("--set", "injection.mode=webhook")
MONITORING = (
    "--set", "podMonitor.enabled=true,prometheusRule.enabled=true,dashboard.enabled=true,serviceMonitor.enabled=true",
)  # fmt: skip
LONG = "data-platform-training-production-eu-west"
SERVICE = re.compile(r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?")
OBJECT = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?([.][a-z0-9]([-a-z0-9]*[a-z0-9])?)*")


@pytest.mark.parametrize(
    "release",
    ["my.op", "1st", "2026", "1e3", "null", f"{'a' * 39}.bbbbbbbbbbbb", f"{'a' * 33}--bb", "a" * 53],
)
def test_any_name_that_helm_accepts_gives_valid_names(release: str) -> None:
    found = render(*WEBHOOK, *MONITORING, release=release)
    for (kind, name), thing in found.items():
        assert (SERVICE if kind == "Service" else OBJECT).fullmatch(name), (kind, name)
        labels = thing["metadata"].get("labels", {})
        assert all(isinstance(value, str) for value in labels.values()), (kind, labels)
    for made in (found, render(release=release)):
        (job,) = [
            thing for (kind, name), thing in made.items() if kind == "ConfigMap" and name.endswith("-test")
        ]
        assert SERVICE.fullmatch(yaml.safe_load(job["data"]["job.yaml"])["metadata"]["name"])


def test_two_releases_never_share_a_name() -> None:
    first = set(render(*WEBHOOK, release="b-c", namespace="a"))
    second = set(render(*WEBHOOK, release="c", namespace="a-b"))
    shared = {name for kind, name in first & second if not kind.startswith("CustomResource")}
    assert not shared
    one, other = (set(render(release=f"{LONG}-{side}")) for side in "ab")
    assert {kind for kind, _ in one & other} == {"CustomResourceDefinition"}


UMBRELLA = """\
apiVersion: v2
name: platform
version: 1.0.0
dependencies:
  - {{name: dataloaderjob, version: "*", repository: "file://{chart}", alias: stable, condition: stable.enabled}}
  - {{name: dataloaderjob, version: "*", repository: "file://{chart}", alias: canary}}
"""


def test_two_aliases_in_an_umbrella_chart_share_no_object(tmp_path: Path) -> None:
    (tmp_path / "Chart.yaml").write_text(UMBRELLA.format(chart=CHART))
    (tmp_path / "values.yaml").write_text(
        "stable: {enabled: true}\ncanary: {crds: {enabled: false}, managedBy: example.com/canary}\n"
    )
    assert helm("dependency", "build", str(tmp_path)).returncode == 0
    made = helm("template", "r", str(tmp_path), "--namespace", "ops")
    assert not made.returncode, made.stderr
    things = [thing for thing in yaml.safe_load_all(made.stdout) if thing]
    names = [
        (thing["kind"], thing["metadata"]["name"], thing["metadata"].get("namespace")) for thing in things
    ]
    assert len(names) == len(set(names))
    deployments = {
        thing["metadata"]["name"]: thing["spec"] for thing in things if thing["kind"] == "Deployment"
    }
    assert {"r-stable-operator", "r-canary-operator"} <= set(deployments)
    selectors = [str(spec["selector"]) for spec in deployments.values()]
    assert len(selectors) == len(set(selectors))


def test_namespaces_that_look_like_numbers_stay_strings() -> None:
    found = render(*WEBHOOK, "--set-string", "namespaces={0123},priorityClassName=123", namespace="4711")
    for (kind, name), thing in found.items():
        assert thing["metadata"].get("namespace", "") in ("", "4711", "0123"), (kind, name)
        if thing["apiVersion"].partition("/")[0] in ("v1", "apps", "rbac.authorization.k8s.io"):
            validate(thing, "1.34", strict=True)


@pytest.mark.parametrize(("json", "kinds"), [("false", set()), ('"off"', set()), ('"webhook"', {"Service"})])
def test_off_without_quotes_is_the_word_off(json: str, kinds: set[str]) -> None:
    found = render("--set-json", f"injection.mode={json}")
    assert {kind for kind, _ in found if kind == "Service"} == kinds


@pytest.mark.parametrize(
    ("json", "is_there"), [("true", True), ('"on"', True), ("false", False), ('"off"', False)]
)
def test_on_and_off_of_the_operators_policy_may_lack_quotes(json: str, is_there: bool) -> None:
    found = render("--set", "namespaces={a}", "--set-json", f"ownObjectsPolicy.mode={json}")
    assert (("ValidatingAdmissionPolicy", "ops.r-operator-own-objects") in found) is is_there


def test_condition_of_an_umbrella_chart_is_accepted() -> None:
    assert render("--set", "enabled=true") == render()


KEPT = (
    "resources.limits.cpu=null", "injection.resources.limits.cpu=null", "nodeSelector.a=null", "podAnnotations=null",
    "imageRegistry=reg.local/Proj", "imageRegistry=my_reg.local:5000/foo", "feederImage.pullPolicy=Always",
    "networkPolicy.enabled=false,networkPolicy.apiServerPorts=null", "leaderElection=null",
)  # fmt: skip


@pytest.mark.parametrize("option", KEPT)
def test_unset_and_older_values_still_render(option: str) -> None:
    assert render(*WEBHOOK, "--set", option)


@pytest.mark.parametrize("option", ["fsGroup=none", "fsGroup=null"])
def test_group_of_jobs_can_be_left_to_the_namespace(option: str) -> None:
    (container,) = render("--set", option)["Deployment", "r-operator"]["spec"]["template"]["spec"][
        "containers"
    ]
    assert "--fs-group=none" in container["args"]


def test_sample_and_test_are_jobs_of_a_release_with_its_own_jobs() -> None:
    canary = ("--set", "managedBy=example.com/canary")
    job = yaml.safe_load(render(*canary)["ConfigMap", "r-operator-test"]["data"]["job.yaml"])
    assert job["spec"]["managedBy"] == "example.com/canary"
    text = notes(*canary)
    assert "reconciles DataLoaderJobs with spec.managedBy: example.com/canary in all namespaces" in text
    assert "managedBy: example.com/canary" in text.partition("<<'JOB'\n")[2]


def pairs_once(loader: yaml.SafeLoader, node: yaml.MappingNode) -> dict[Any, Any]:
    keys = [key.value for key, _ in node.value]
    assert len(keys) == len(set(keys)), sorted(keys)
    return loader.construct_mapping(node, deep=True)


class OnceLoader(yaml.SafeLoader):
    """Refuses a key that occurs twice."""


OnceLoader.add_constructor("tag:yaml.org,2002:map", pairs_once)


def test_users_metadata_never_repeats_a_key_of_the_chart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(yaml, "safe_load_all", lambda text: yaml.load_all(text, OnceLoader))
    name = r"app\.kubernetes\.io/name=x"
    found = render(
        *WEBHOOK, *MONITORING, "--set-string", r"podAnnotations.linkerd\.io/inject=enabled",
        *(word for what in ("podMonitor", "serviceMonitor", "prometheusRule", "dashboard")
          for word in ("--set-string", f"{what}.labels.{name}")),
    )  # fmt: skip
    injector = found["Deployment", "r-injector"]["spec"]["template"]["metadata"]
    assert injector["annotations"]["linkerd.io/inject"] == "disabled", "a mesh would mistake its TLS"
    monitors = [thing for (kind, _), thing in found.items() if kind in ("PodMonitor", "ServiceMonitor")]
    assert {m["metadata"]["labels"]["app.kubernetes.io/name"] for m in monitors} == {"dataloaderjob-operator"}


def test_training_runtime_takes_any_names_and_the_pull_secrets() -> None:
    names = {"name": "my-job-name", "job": "123", "image": "reg.x/my-sidecar-image:1"}
    options = [f"injection.trainingRuntime.{key}={value}" for key, value in names.items()]
    found = render(
        "--set", "injection.trainingRuntime.enabled=true", "--set", "sidecarImage.pullSecrets={one,two}",
        *(word for option in options for word in ("--set-string", option)),
    )  # fmt: skip
    (job,) = found["ClusterTrainingRuntime", "my-job-name"]["spec"]["template"]["spec"]["replicatedJobs"]
    pod = job["template"]["spec"]["template"]
    assert pod["metadata"]["labels"] == {"dataloading.dev/inject": "123"}
    assert pod["spec"]["containers"][0]["image"] == "reg.x/my-sidecar-image:1"
    assert pod["spec"]["initContainers"][0]["image"] == "ghcr.io/dataloaderjob/sidecar:0.1.0"
    assert pod["spec"]["imagePullSecrets"] == [{"name": "one"}, {"name": "two"}]
    assert pod["spec"]["volumes"][0]["secret"]["secretName"] == "123-attach"


REFUSED = {
    "a lease shorter than its renewal": ("leaderElection.leaseDurationSeconds=5", "must be less than leaseDuration"),
    "a slow retry": ("leaderElection.retryPeriodSeconds=6", "must be less than half of renewDeadlineSeconds"),
    "a removed number": ("workers=null", "missing property 'workers'"),
    "a removed section": ("injection=null", "missing property 'injection'"),
    "a selector that is a boolean": ("nodeSelector.gpu=true", "got boolean, want null or string"),
    "a misspelled effect": ("tolerations[0].effect=NoSchedul", "value must be one of"),
    "a misspelled pull secret": ("imagePullSecrets[0].nmae=x", "additional properties 'nmae' not allowed"),
    "misspelled limits": ("resources.limit.cpu=1", "additional properties 'limit' not allowed"),
    "a repository with a tag": ("image.repository=ghcr.io/x/op:v1", "does not match pattern"),
    "a registry with a scheme": ("imageRegistry=https://reg.x/", "does not match pattern"),
    "a namespace that cannot exist": ("namespaces={Team_A}", "does not match pattern"),
    "a group that is a word": ("fsGroup=nobody", "does not match pattern"),
}  # fmt: skip


@pytest.mark.parametrize(("option", "message"), REFUSED.values(), ids=REFUSED)
def test_mistake_is_refused_before_anything_is_installed(option: str, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        render("--set", option)
