"""The chart, rendered: no cluster is needed for these."""

from __future__ import annotations

import itertools
import json
import re
from typing import Any

import pytest
import yaml

from chart import CHART, helm, render
from dataloaderjob_operator.election import Timing
from dataloaderjob_operator.monitoring import LogFormat
from dataloaderjob_operator.options import parse

CRD = CHART.parents[1] / "crds" / "dataloaderjobs.yaml"
NAMED = "CustomResourceDefinition", "dataloaderjobs.dataloading.dev"
OPERATOR = "Deployment", "r-operator"
KUBERNETES = {
    "requests", "limits", "runAsNonRoot", "seccompProfile", "allowPrivilegeEscalation", "readOnlyRootFilesystem",
    "capabilities", "grafana_dashboard",
}  # fmt: skip
"""Fields whose meaning its own documents have."""
DIGEST = "sha256:" + "a" * 64


def container(found: dict[Any, Any]) -> dict[str, Any]:
    (only,) = found[OPERATOR]["spec"]["template"]["spec"]["containers"]
    return dict(only)


def test_chart_lints_without_a_warning() -> None:
    done = helm("lint", "--strict", str(CHART))
    assert done.returncode == 0, done.stdout


def test_crd_is_the_models_and_is_kept_on_uninstall_by_default() -> None:
    assert CRD.resolve() == CHART / "files" / "dataloaderjobs.yaml", "crds/ links to the chart's file"
    kept, let_go = render()[NAMED], render("--set", "crds.keep=false")[NAMED]
    assert kept["metadata"]["annotations"]["helm.sh/resource-policy"] == "keep"
    assert "helm.sh/resource-policy" not in let_go["metadata"].get("annotations", {})
    assert kept["spec"] == let_go["spec"] == yaml.safe_load(CRD.read_text())["spec"]
    assert NAMED not in render("--set", "crds.enabled=false")


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (["--set", "image.tagg=1"], "tagg"),
        (["--set", "replicas=0"], "replicas"),
        (["--set", "replica=2"], "replica"),
        (["--set", "workers=0"], "workers"),
        (["--set-json", 'namespaces="team"'], "namespaces"),
        (["--set", "image.digest=abc"], "digest"),
        (["--set", "feederImage.name=x"], "name"),
        (["--set", "logFormat=xml"], "logFormat"),
        (["--set", "podMonitor.every=1m"], "every"),
        (["--set", "podMonitor.interval=often"], "interval"),
        (["--set", "test.timeoutSeconds=0"], "timeoutSeconds"),
    ],
)
def test_unknown_or_invalid_value_is_refused_by_name(options: list[str], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        render(*options)


def test_every_value_is_in_the_schema() -> None:
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    schema = yaml.safe_load((CHART / "values.schema.json").read_text())
    assert set(values) == set(schema["properties"]) - {"global", "enabled"}


def test_every_value_is_explained_and_has_a_default() -> None:
    lines = (CHART / "values.yaml").read_text().splitlines()
    bare = [
        line.strip()
        for before, line in itertools.pairwise(["", *lines])
        if re.match(r"( {2})?[a-zA-Z]+:", line) and not before.strip().startswith("#")
    ]
    assert [name for name in bare if name.partition(":")[0] not in KUBERNETES] == []


@pytest.mark.parametrize("name", [OPERATOR, ("Pod", "r-operator-test")], ids=["operator", "test"])
def test_chart_pods_are_restricted(name: tuple[str, str]) -> None:
    thing = render()[name]
    pod = thing["spec"]["template"]["spec"] if name is OPERATOR else thing["spec"]
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    (only,) = pod["containers"]
    assert only["securityContext"]["readOnlyRootFilesystem"] is True
    assert only["securityContext"]["allowPrivilegeEscalation"] is False
    assert only["securityContext"]["capabilities"] == {"drop": ["ALL"]}


def test_single_operator_is_upgraded_by_a_surge_of_one() -> None:
    found = render()
    spec = found[OPERATOR]["spec"]
    rolling = {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}}
    assert (spec["replicas"], spec["strategy"]) == (1, rolling)
    assert ("PodDisruptionBudget", "r-operator") not in found, "it would keep its node from being drained"
    assert "affinity" not in spec["template"]["spec"]


def test_several_operators_have_a_lease_a_budget_and_separate_nodes() -> None:
    found = render("--set", "replicas=2")
    spec = found[OPERATOR]["spec"]
    assert spec["replicas"] == 2
    candidate = parse(container(found)["args"]).candidate
    assert candidate is not None
    assert (candidate.namespace, candidate.lease, candidate.identity) == ("ops", "r-operator", "$(POD_NAME)")
    assert candidate.timing == Timing(15, 10.0, 2.0)
    of_a_chart_before = render("--set", "replicas=2", "--set", "leaderElection=null")
    assert parse(container(of_a_chart_before)["args"]).candidate == candidate
    assert "POD_NAME" in [variable["name"] for variable in container(found)["env"]]
    (rule,) = [rule for rule in found["Role", "r-operator-own"]["rules"] if "update" in rule["verbs"]]
    assert (rule["resources"], rule["resourceNames"]) == (["leases"], [candidate.lease])
    budget = found["PodDisruptionBudget", "r-operator"]["spec"]
    labels = spec["template"]["metadata"]["labels"]
    assert (budget["maxUnavailable"], budget["selector"]["matchLabels"].items() <= labels.items()) == (
        1,
        True,
    )
    (apart,) = spec["template"]["spec"]["affinity"]["podAntiAffinity"].values()
    assert apart[0]["podAffinityTerm"]["labelSelector"]["matchLabels"].items() <= labels.items()
    theirs = render("--set", "replicas=2", "--set-json", 'affinity={"nodeAffinity":{}}')[OPERATOR]["spec"]
    assert theirs["template"]["spec"]["affinity"] == {"nodeAffinity": {}}


def test_operator_options_parse_and_probes_use_its_port() -> None:
    only = container(render())
    options = parse(only["args"])
    assert [(p["name"], p["containerPort"]) for p in only["ports"]] == [("metrics", options.metrics_port)]
    assert options.log_format is LogFormat.JSON
    for probe, path in (
        ("startupProbe", "/healthz"),
        ("livenessProbe", "/healthz"),
        ("readinessProbe", "/readyz"),
    ):
        assert only[probe]["httpGet"] == {"path": path, "port": "metrics"}
    patience = only["livenessProbe"]["periodSeconds"] * only["livenessProbe"]["failureThreshold"]
    assert patience >= 60, "a node that is busy for a while is no reason to start anew"


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
def test_image_tag_digest_and_registry_come_from_values(options: list[str], image: str) -> None:
    assert container(render(*options))["image"] == image


def test_registry_value_applies_to_the_sidecar_too() -> None:
    args = container(render("--set", "imageRegistry=own"))["args"]
    assert "--sidecar-image=own/dataloaderjob/sidecar:0.1.0" in args


def test_chart_with_namespaces_has_roles_there_and_no_cluster_rights() -> None:
    found = render("--set", "namespaces={a,b}")
    roles = [name for kind, name in found if kind in ("Role", "RoleBinding")]
    assert sorted(roles) == [
        name
        for name in ("r-operator", "r-operator-follow", "r-operator-own", "r-operator-test")
        for _ in "ab"
    ], "of two namespaces: the last of each"
    assert not any(kind == "ClusterRoleBinding" for kind, _ in found), (
        "nobody is given anything of the cluster"
    )
    assert {"--namespace=a", "--namespace=b"} <= set(container(found)["args"])


def test_rights_have_no_wildcards_and_cannot_list_secrets() -> None:
    role = render()["ClusterRole", "ops.r-operator"]
    for rule in role["rules"]:
        assert "*" not in rule["verbs"] + rule["resources"] + rule["apiGroups"]
        if "secrets" in rule["resources"]:
            assert rule["verbs"] == ["create"]


def test_rendering_is_deterministic_and_contains_no_secret() -> None:
    """So that helm, Argo CD and `helm template | kubectl apply` make one and the same installation."""
    found = render()
    assert found == render()
    assert not [name for kind, name in found if kind == "Secret"]
    for template in (CHART / "templates").rglob("*.*"):
        assert not re.search(r"\b(lookup|rand[A-Z]\w*|gen[A-Z]\w*|now)\b", template.read_text()), (
            template.name
        )


def test_administrator_values_shape_the_pods_of_jobs() -> None:
    args = container(render())["args"]
    default = parse(args).config
    assert (default.fs_group, default.metrics_from) == (65532, ())
    assert "--cluster-domain" not in " ".join(args)
    peer = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}
    found = render(
        "--set", "fsGroup=null", "--set", "clusterDomain=prod.example", "--set", "sidecarImage.pullSecrets={mirror}",
        "--set-json", f"networkPolicy.metricsFrom={json.dumps([peer])}",
    )  # fmt: skip
    options = parse(container(found)["args"]).config
    assert (options.fs_group, options.cluster_domain) == (None, "prod.example")
    beside = parse(container(render("--set", "managedBy=example.com/canary"))["args"]).config
    assert (default.managed_by, beside.managed_by) == ("", "example.com/canary")
    assert (options.sidecar_pull_secrets, options.metrics_from) == (("mirror",), (peer,))
    deployments = [child for (kind, _), child in found.items() if kind == "Deployment"]
    assert len(deployments) == 2
    for deployment in deployments:
        assert "fsGroup" not in deployment["spec"]["template"]["spec"]["securityContext"]


@pytest.mark.parametrize(
    ("options", "name"), [([], "dataloaderjob-root-key"), (["--set", "rootKey.secretName=ours"], "ours")]
)
def test_operator_may_read_only_its_own_root_key_secret(options: list[str], name: str) -> None:
    found = render(*options)
    assert parse(container(found)["args"]).root_key_secret == ("ops", name)
    role = found["Role", "r-operator-own"]
    reads = [rule for rule in role["rules"] if "get" in rule["verbs"] and rule["resources"] == ["secrets"]]
    assert [rule["resourceNames"] for rule in reads] == [[name]]
    assert role["metadata"]["namespace"] == "ops"
