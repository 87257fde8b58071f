"""The chart's injector, its certificates, and the guard, by mode of injection."""

from __future__ import annotations

import pytest
from injecting import LABELED, bert

from chart import notes, render
from dataloaderjob.api.injection import inject
from dataloaderjob.api.pod_templates import pod_templates
from dataloaderjob_operator.injector.__main__ import parse

INJECTOR = "r-injector"
GUARD = "ops.r-injector-guard"


def kinds(*options: str) -> set[str]:
    return {kind for (kind, name) in render(*options) if "injector" in name}


WEBHOOK = {
    "Deployment", "Service", "ServiceAccount", "PodDisruptionBudget", "NetworkPolicy", "Role", "RoleBinding",
    "ClusterRole", "ClusterRoleBinding", "MutatingWebhookConfiguration",
}  # fmt: skip
POLICY = {"MutatingAdmissionPolicy", "MutatingAdmissionPolicyBinding"}
V1, V1BETA1 = (
    f"admissionregistration.k8s.io/{version}/MutatingAdmissionPolicy" for version in ("v1", "v1beta1")
)
GUARDED = {"ValidatingAdmissionPolicy", "ValidatingAdmissionPolicyBinding"}
MODES = {
    "auto": ((), WEBHOOK | GUARDED),
    "webhook": (("--set", "injection.mode=webhook"), WEBHOOK | GUARDED),
    "off": (("--set", "injection.mode=off"), set()),
    "auto with namespaces": (("--set", "namespaces={a}"), set()),
    "policy": (("--set", "injection.mode=policy"), POLICY | GUARDED),
    "auto with policies": (("--api-versions", V1), POLICY | GUARDED),
    "auto with the feature gate": (("--api-versions", V1BETA1), POLICY | GUARDED),
    "one replica": (("--set", "injection.replicas=1"), (WEBHOOK | GUARDED) - {"PodDisruptionBudget"}),
    "Kubernetes 1.29, which has no such policies": (("--kube-version", "1.29.0"), WEBHOOK),
    "cert-manager": (
        ("--set", "injection.certManager.enabled=true"),
        ((WEBHOOK | GUARDED) - {"Role", "RoleBinding"}) | {"Certificate", "Issuer"},
    ),
    "cert-manager in namespaces": (
        ("--set", "injection.certManager.enabled=true,namespaces={a},injection.mode=webhook"),
        ((WEBHOOK | GUARDED) - {"ClusterRole", "ClusterRoleBinding"}) | {"Certificate", "Issuer"},
    ),
    "cert-manager with an issuer": (
        ("--set", "injection.certManager.enabled=true,injection.certManager.issuerRef.name=ca"),
        ((WEBHOOK | GUARDED) - {"Role", "RoleBinding"}) | {"Certificate"},
    ),
}  # fmt: skip


@pytest.mark.parametrize(("options", "wanted"), MODES.values(), ids=MODES)
def test_mode_decides_what_is_installed(options: tuple[str, ...], wanted: set[str]) -> None:
    assert kinds(*options) == wanted


def test_webhook_fails_closed_for_labeled_pods_of_other_namespaces_alone() -> None:
    found = render()["MutatingWebhookConfiguration", "ops.r-injector"]
    (webhook,) = found["webhooks"]
    assert webhook["objectSelector"] == {
        "matchExpressions": [{"key": "dataloading.dev/inject", "operator": "Exists"}]
    }
    own = {"key": "kubernetes.io/metadata.name", "operator": "NotIn", "values": ["ops"]}
    assert webhook["namespaceSelector"] == {"matchExpressions": [own]}
    policy = (webhook["failurePolicy"], webhook["reinvocationPolicy"], webhook["timeoutSeconds"])
    assert policy == ("Fail", "IfNeeded", 5)
    assert (webhook["sideEffects"], webhook["matchPolicy"]) == ("None", "Equivalent")
    assert "caBundle" not in webhook["clientConfig"], "an upgrade of the chart must not take it away"


@pytest.mark.parametrize(
    ("offered", "version"),
    [((V1BETA1,), "v1beta1"), ((V1,), "v1"), ((V1BETA1, V1), "v1"), ((), "v1")],
    ids=["beta", "v1", "both", "neither"],
)
def test_policy_has_the_newest_version_that_is_offered(offered: tuple[str, ...], version: str) -> None:
    more = [word for name in offered for word in ("--api-versions", name)]
    found = render("--set", "injection.mode=policy", *more)
    policy = found["MutatingAdmissionPolicy", "ops.r-injector"]
    binding = found["MutatingAdmissionPolicyBinding", "ops.r-injector"]
    assert {policy["apiVersion"], binding["apiVersion"]} == {f"admissionregistration.k8s.io/{version}"}


def test_policy_leaves_jobs_of_other_operators_alone() -> None:
    def condition(*options: str) -> str:
        policy = render("--set", "injection.mode=policy", *options)[
            "MutatingAdmissionPolicy", "ops.r-injector"
        ]
        (found,) = [c for c in policy["spec"]["matchConditions"] if c["name"] == "of-this-operator"]
        return str(found["expression"])

    assert condition() == "params.spec.?managedBy.orValue('') in ['', 'dataloading.dev/operator']"
    own = condition("--set", "managedBy=example.com/canary")
    assert own == "params.spec.?managedBy.orValue('') == 'example.com/canary'"


def test_guard_covers_the_pods_of_the_webhook() -> None:
    found = render("--set", "namespaces={a},injection.mode=webhook")
    guard = found["ValidatingAdmissionPolicy", GUARD]["spec"]
    (webhook,) = found["MutatingWebhookConfiguration", "ops.r-injector"]["webhooks"]
    for field in ("objectSelector", "namespaceSelector"):
        assert guard["matchConstraints"][field] == webhook[field]
    assert guard["failurePolicy"] == "Fail"
    assert found["ValidatingAdmissionPolicyBinding", GUARD]["spec"]["validationActions"] == ["Deny"]


def test_injectors_options_parse_and_agree_with_its_objects() -> None:
    found = render(
        "--set", "managedBy=example.com/canary,sidecarImage.pullSecrets={mirror},imageRegistry=own"
    )
    spec = found["Deployment", INJECTOR]["spec"]
    (only,) = spec["template"]["spec"]["containers"]
    options = parse(only["args"])
    service = found["Service", INJECTOR]
    assert options.names == (f"{INJECTOR}.ops.svc",)
    assert options.configuration == "ops.r-injector"
    assert options.setup.sidecar_image == "own/dataloaderjob/sidecar:0.1.0"
    assert options.setup.pull_secrets == ("mirror",)
    assert options.setup.manages("example.com/canary")
    assert not options.setup.manages(None)
    assert {port["name"]: port["containerPort"] for port in only["ports"]} == {
        "webhook": options.port, "metrics": options.metrics_port,
    }  # fmt: skip
    assert service["spec"]["selector"].items() <= spec["template"]["metadata"]["labels"].items()
    assert spec["replicas"] == 2
    (rule,) = [r for r in found["Role", INJECTOR]["rules"] if "resourceNames" in r]
    assert (rule["resourceNames"], rule["verbs"]) == ([options.secret], ["get", "update"])


def test_injector_may_read_jobs_and_write_its_own_configuration_alone() -> None:
    rules = render()["ClusterRole", "ops.r-injector"]["rules"]
    assert rules == [
        {"apiGroups": ["dataloading.dev"], "resources": ["dataloaderjobs"], "verbs": ["get"]},
        {
            "apiGroups": ["admissionregistration.k8s.io"],
            "resources": ["mutatingwebhookconfigurations"],
            "resourceNames": ["ops.r-injector"],
            "verbs": ["get", "patch"],
        },
    ]


def test_injectors_pods_are_restricted_and_outside_of_meshes() -> None:
    template = render()["Deployment", INJECTOR]["spec"]["template"]
    (only,) = template["spec"]["containers"]
    assert only["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    assert only["securityContext"]["readOnlyRootFilesystem"] is True
    assert template["spec"]["securityContext"]["runAsNonRoot"] is True
    assert template["metadata"]["annotations"]["sidecar.istio.io/inject"] == "false"


def test_training_runtime_has_the_renderers_pod() -> None:
    values = "injection.trainingRuntime.enabled=true,injection.trainingRuntime.job=bert"
    assert not [kind for kind, _ in render() if kind == "ClusterTrainingRuntime"]
    found = render("--set", values, "--set-string", "sidecarImage.tag=9")[
        "ClusterTrainingRuntime", "torch-distributed-dataloader"
    ]
    (template,) = pod_templates(found).templates
    wanted = bert(loader={}, feeders={"image": "any"}, trainers={"attach": {}})
    node = {"containers": [{"name": "node", "image": "ghcr.io/dataloaderjob/feeder:0.1.0"}]}
    made = inject({**LABELED, "spec": node}, wanted)
    del made["metadata"]["annotations"]
    assert template.template == made


@pytest.mark.parametrize(
    ("mode", "text"),
    [
        ("policy", "from a policy."),
        ("webhook", "from a webhook."),
        ("off", "only through files: dataloaderjob inject"),
    ],
)
def test_notes_tell_how_pods_are_injected(mode: str, text: str) -> None:
    assert text in notes("--set", f"injection.mode={mode}")
