"""The chart, rendered: no cluster is needed for what these say."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from chart import CHART, helm, render

CRD = CHART.parents[1] / "crds" / "dataloaderjobs.yaml"
NAMED = "CustomResourceDefinition", "dataloaderjobs.dataloading.dev"
OPERATOR = "Deployment", "r-operator"
DIGEST = "sha256:" + "a" * 64


def container(found: dict[Any, Any]) -> dict[str, Any]:
    (only,) = found[OPERATOR]["spec"]["template"]["spec"]["containers"]
    return dict(only)


def test_it_lints_without_a_warning() -> None:
    done = helm("lint", "--strict", str(CHART))
    assert done.returncode == 0, done.stdout


def test_its_crd_is_the_one_of_the_models_and_stays_unless_it_is_said() -> None:
    assert (CHART / "files" / "dataloaderjobs.yaml").read_text() == CRD.read_text(), (
        "copy crds/ to the chart's files/"
    )
    kept, let_go = render()[NAMED], render("--set", "crds.keep=false")[NAMED]
    assert kept["metadata"]["annotations"]["helm.sh/resource-policy"] == "keep"
    assert "helm.sh/resource-policy" not in let_go["metadata"].get("annotations", {})
    assert kept["spec"] == let_go["spec"] == yaml.safe_load(CRD.read_text())["spec"]
    assert NAMED not in render("--set", "crds.enabled=false")


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (["--set", "image.tagg=1"], "tagg"),
        (["--set", "replicas=2"], "replicas"),
        (["--set", "workers=0"], "workers"),
        (["--set-json", 'namespaces="team"'], "namespaces"),
        (["--set", "image.digest=abc"], "digest"),
    ],
)
def test_a_value_that_it_does_not_know_or_take_is_refused_by_name(options: list[str], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        render(*options)


def test_every_value_is_in_the_schema() -> None:
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    schema = yaml.safe_load((CHART / "values.schema.json").read_text())
    assert set(values) == set(schema["properties"]) - {"global"}


def test_the_operators_pod_is_restricted() -> None:
    found = render()
    pod = found[OPERATOR]["spec"]["template"]["spec"]
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    security = container(found)["securityContext"]
    assert security["readOnlyRootFilesystem"] is True
    assert security["allowPrivilegeEscalation"] is False
    assert security["capabilities"] == {"drop": ["ALL"]}
    assert found[OPERATOR]["spec"]["strategy"] == {"type": "Recreate"}


@pytest.mark.parametrize(
    ("options", "image"),
    [
        ([], "ghcr.io/dataloaderjob/operator:0.1.0"),
        (["--set", "image.tag=v2"], "ghcr.io/dataloaderjob/operator:v2"),
        (["--set", f"image.digest={DIGEST}"], f"ghcr.io/dataloaderjob/operator@{DIGEST}"),
        (["--set", "imageRegistry=own:5000/x"], "own:5000/x/dataloaderjob/operator:0.1.0"),
        (["--set", "imageRegistry=own,image.repository=operator"], "own/operator:0.1.0"),
    ],
)
def test_images_come_by_tag_or_digest_and_from_another_registry(options: list[str], image: str) -> None:
    assert container(render(*options))["image"] == image


def test_one_registry_serves_the_sidecar_too() -> None:
    args = container(render("--set", "imageRegistry=own"))["args"]
    assert "--sidecar-image=own/dataloaderjob/sidecar:0.1.0" in args


def test_with_namespaces_there_are_roles_in_these_and_nothing_of_the_cluster() -> None:
    found = render("--set", "namespaces={a,b}")
    roles = [thing for (kind, _), thing in found.items() if kind in ("Role", "RoleBinding")]
    assert len(roles) == 2, "of the same names in two namespaces: the last of each"
    assert not any(kind.startswith("Cluster") for kind, _ in found)
    assert {"--namespace=a", "--namespace=b"} <= set(container(found)["args"])


def test_rights_are_few_and_none_lists_secrets() -> None:
    (role,) = [thing for (kind, _), thing in render().items() if kind == "ClusterRole"]
    for rule in role["rules"]:
        assert "*" not in rule["verbs"] + rule["resources"] + rule["apiGroups"]
        if "secrets" in rule["resources"]:
            assert set(rule["verbs"]) == {"get", "create", "patch"}


def test_the_root_key_is_long_and_stays_when_the_chart_goes() -> None:
    made = render()["Secret", "r-operator-root-key"]
    assert len(made["data"]["root"]) >= 64
    assert made["metadata"]["annotations"]["helm.sh/resource-policy"] == "keep"
    assert made["data"] != render()["Secret", "r-operator-root-key"]["data"]
