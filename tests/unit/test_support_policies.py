"""The judge of NetworkPolicies, by what Kubernetes' documentation says of them."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from network_policies import Cluster, End, Pod, judge, matches

DB = Pod(
    name="db",
    labels={"role": "db"},
    ips=("10.0.0.1", "fd00::1"),
    ports={("sql", "TCP"): 6379},
    node="192.168.0.1",
)
WEB = Pod(name="web", labels={"role": "frontend"}, ips=("10.0.0.2",), node="192.168.0.2")
PLAIN = Pod(name="plain", ips=("10.0.0.3",), node="192.168.0.2")
ALICE = Pod(name="alice", namespace="a", labels={"role": "client"}, ips=("10.0.1.1",), node="192.168.0.1")
ALICES_OTHER = Pod(name="other", namespace="a", labels={"role": "other"}, ips=("10.0.1.2",))
BOB = Pod(name="bob", namespace="b", labels={"role": "client"}, ips=("10.0.2.1",))
HOST = Pod(
    name="host", labels={"role": "frontend"}, ips=("192.168.0.2",), host_network=True, node="192.168.0.2"
)
PODS = (DB, WEB, PLAIN, ALICE, ALICES_OTHER, BOB, HOST)
NAMESPACES = {"default": {}, "a": {"user": "alice"}, "b": {"user": "bob"}}
OUTSIDE = "172.17.2.9"


def policy(spec: dict[str, Any], namespace: str = "default", name: str = "p") -> dict[str, Any]:
    return {"metadata": {"name": name, "namespace": namespace}, "spec": {"podSelector": {}, **spec}}


def cluster(*specs: dict[str, Any]) -> Cluster:
    """With these policies in the namespace default."""
    policies = tuple(policy(spec, name=f"p{number}") for number, spec in enumerate(specs))
    return Cluster(policies=policies, pods=PODS, namespaces=NAMESPACES)


def lets_in(*peers: dict[str, Any], ports: Any = None) -> dict[str, Any]:
    return {"ingress": [{"from": list(peers), **({"ports": ports} if ports else {})}]}


def lets_out(*peers: dict[str, Any], ports: Any = None) -> dict[str, Any]:
    return {
        "policyTypes": ["Egress"],
        "egress": [{"to": list(peers), **({"ports": ports} if ports else {})}],
    }


def select(**labels: str) -> dict[str, Any]:
    return {"matchLabels": labels}


def expect(operator: str, *values: str) -> dict[str, Any]:
    found = {"key": "role", "operator": operator}
    return {"matchExpressions": [found | ({"values": list(values)} if values else {})]}


DOCUMENTED = {
    "podSelector": select(role="db"),
    "policyTypes": ["Ingress", "Egress"],
    "ingress": [
        {
            "from": [
                {"ipBlock": {"cidr": "172.17.0.0/16", "except": ["172.17.1.0/24"]}},
                {"namespaceSelector": select(user="alice")},
                {"podSelector": select(role="frontend")},
            ],
            "ports": [{"protocol": "TCP", "port": 6379}],
        }
    ],
    "egress": [{"to": [{"ipBlock": {"cidr": "10.0.0.0/24"}}], "ports": [{"protocol": "TCP", "port": 5978}]}],
}
"""The example of the documentation."""
TO_DB = (DB, 6379, "TCP")
RANGE = [{"protocol": "TCP", "port": 6000, "endPort": 6400}]


@pytest.mark.parametrize(
    ("specs", "source", "to", "allowed"),
    [
        # isolation
        pytest.param([], OUTSIDE, TO_DB, True, id="no-policy-no-isolation"),
        pytest.param([{"podSelector": select(role="other")}], OUTSIDE, TO_DB, True, id="not-selected"),
        pytest.param([{}], WEB, TO_DB, False, id="an-empty-selector-selects-all-and-no-rule-lets-none-in"),
        pytest.param([{"ingress": []}], WEB, TO_DB, False, id="an-empty-list-of-rules-lets-none-in"),
        pytest.param([{"ingress": [{}]}], OUTSIDE, TO_DB, True, id="an-empty-rule-lets-all-in"),
        pytest.param([{}], WEB, (ALICE, 80, "TCP"), True, id="without-egress-rules-only-ingress-is-isolated"),
        pytest.param([{"egress": []}], WEB, (ALICE, 80, "TCP"), True, id="an-empty-list-is-no-egress-rule"),
        pytest.param([lets_out()], DB, (OUTSIDE, 80, "TCP"), True, id="an-empty-to-is-anywhere"),
        pytest.param(
            [{"policyTypes": ["Egress"]}], DB, (OUTSIDE, 80, "TCP"), False, id="policyTypes-isolate-for-egress"
        ),
        pytest.param([{"policyTypes": ["Egress"]}], OUTSIDE, TO_DB, True, id="and-for-egress-alone"),
        pytest.param(
            [{"egress": [{"ports": [{"port": 53}]}]}], WEB, (ALICE, 80, "TCP"), False, id="rules-isolate-by-default"
        ),
        pytest.param(
            [{"policyTypes": ["Ingress"], "egress": [{"ports": [{"port": 53}]}]}],
            WEB, (ALICE, 80, "TCP"), True, id="rules-of-a-type-that-is-not-named-say-nothing",
        ),
        # the union of all policies, at both ends
        pytest.param([{}, lets_in({"podSelector": {}})], WEB, TO_DB, True, id="policies-add-up"),
        pytest.param([{"ingress": [{}]}, {}], WEB, TO_DB, True, id="in-any-order"),
        pytest.param(
            [lets_in({"podSelector": {}}), {"policyTypes": ["Egress"]}],
            WEB, TO_DB, False, id="both-ends-have-to-allow",
        ),
        # peers
        pytest.param([lets_in({"podSelector": {}})], PLAIN, TO_DB, True, id="an-empty-peer-is-the-own-namespace"),
        pytest.param([lets_in({"podSelector": {}})], ALICE, TO_DB, False, id="and-no-other"),
        pytest.param([lets_in({"podSelector": {}})], OUTSIDE, TO_DB, False, id="and-not-the-outside"),
        pytest.param([lets_in({"namespaceSelector": {}})], BOB, TO_DB, True, id="all-namespaces"),
        pytest.param([lets_in({"namespaceSelector": {}})], OUTSIDE, TO_DB, False, id="are-not-the-outside"),
        pytest.param(
            [lets_in({"namespaceSelector": select(user="alice")})], ALICES_OTHER, TO_DB, True, id="all-of-hers"
        ),
        pytest.param(
            [lets_in({"namespaceSelector": select(**{"kubernetes.io/metadata.name": "b"})})],
            BOB, TO_DB, True, id="a-namespace-by-its-name",
        ),
        *(
            pytest.param(
                [lets_in({"namespaceSelector": select(user="alice"), "podSelector": select(role="client")})],
                source, TO_DB, allowed, id=f"both-in-one-peer-{source.name}",
            )
            for source, allowed in ((ALICE, True), (ALICES_OTHER, False), (BOB, False), (WEB, False))
        ),
        *(
            pytest.param(
                [lets_in({"namespaceSelector": select(user="alice")}, {"podSelector": select(role="client")})],
                source, TO_DB, allowed, id=f"two-peers-{source.name}",
            )
            for source, allowed in ((ALICE, True), (ALICES_OTHER, True), (BOB, False), (WEB, False))
        ),
        *(
            pytest.param([lets_in({"ipBlock": {"cidr": "172.17.0.0/16", "except": ["172.17.1.0/24"]}})],
                         ip, TO_DB, allowed, id=f"block-{ip}")
            for ip, allowed in (("172.17.0.1", True), ("172.17.1.1", False), ("172.18.0.1", False), ("fd00::9", False))
        ),
        pytest.param([lets_in({"ipBlock": {"cidr": "fd00::/8"}})], "fd00::9", TO_DB, True, id="block-of-IPv6"),
        pytest.param([lets_in({"ipBlock": {"cidr": "10.0.2.0/24"}})], BOB, TO_DB, True, id="a-pods-address-too"),
        *(
            pytest.param([lets_in({"podSelector": expect(*test)})], source, TO_DB, allowed,
                         id=f"{'-'.join(test)}-{source.name}")
            for test, source, allowed in (
                (("In", "frontend", "x"), WEB, True), (("In", "frontend"), PLAIN, False),
                (("NotIn", "frontend"), WEB, False), (("NotIn", "frontend"), PLAIN, True),
                (("Exists",), WEB, True), (("Exists",), PLAIN, False),
                (("DoesNotExist",), WEB, False), (("DoesNotExist",), PLAIN, True),
            )
        ),
        # ports
        *(
            pytest.param([lets_in(ports=ports)], WEB, (DB, number, protocol), allowed, id=f"port-{name}")
            for name, ports, number, protocol, allowed in (
                ("same", [{"port": 80}], 80, "TCP", True), ("other", [{"port": 80}], 81, "TCP", False),
                ("tcp-by-default", [{"port": 80}], 80, "UDP", False),
                ("all-of-a-protocol", [{"protocol": "UDP"}], 5000, "UDP", True),
                ("not-of-another", [{"protocol": "UDP"}], 5000, "TCP", False),
                ("first-of-range", RANGE, 6000, "TCP", True), ("last-of-range", RANGE, 6400, "TCP", True),
                ("beyond-range", RANGE, 6401, "TCP", False), ("before-range", RANGE, 5999, "TCP", False),
                ("named", [{"port": "sql"}], 6379, "TCP", True), ("named-other", [{"port": "sql"}], 6380, "TCP", False),
                ("name-of-nobody", [{"port": "web"}], 6379, "TCP", False),
                ("any-of-several", [{"port": 1}, {"port": 2}], 2, "TCP", True),
                ("no-list-is-any", None, 9, "SCTP", True),
            )
        ),
        pytest.param(
            [lets_out(ports=[{"port": "sql"}])], WEB, TO_DB, True, id="a-name-is-the-destinations-at-the-source-too"
        ),
        pytest.param(
            [lets_in({"podSelector": select(role="x")}, ports=[{"port": 6379}])],
            WEB, TO_DB, False, id="a-rule-needs-peer-and-port",
        ),
        # what is never shut, and what policies do not know
        pytest.param([{"policyTypes": ["Ingress", "Egress"]}], DB, TO_DB, True, id="itself"),
        pytest.param([{}], "192.168.0.1", TO_DB, True, id="from-its-node"),
        pytest.param(
            [{"policyTypes": ["Egress"]}], DB, ("192.168.0.1", 10250, "TCP"), True, id="to-its-node"
        ),
        pytest.param([{}], "192.168.0.2", TO_DB, False, id="another-node-is-outside"),
        pytest.param([{}], WEB, (HOST, 80, "TCP"), True, id="a-pod-of-the-hosts-network-is-not-selected"),
        pytest.param(
            [lets_in({"podSelector": select(role="frontend")})], HOST, TO_DB, False, id="nor-is-it-a-peer"
        ),
        pytest.param([{}], HOST, (WEB, 80, "TCP"), True, id="but-its-node-where-that-is-the-others"),
        # the documentation's example
        *(
            pytest.param([DOCUMENTED], source, to, allowed, id=f"example-{name}")
            for name, source, to, allowed in (
                ("frontend", WEB, TO_DB, True), ("hers", ALICES_OTHER, TO_DB, True), ("his", BOB, TO_DB, False),
                ("same-namespace", PLAIN, TO_DB, False), ("block", "172.17.255.255", TO_DB, True),
                ("excepted", "172.17.1.255", TO_DB, False), ("port", WEB, (DB, 6380, "TCP"), False),
                ("out", DB, (PLAIN, 5978, "TCP"), True), ("out-elsewhere", DB, (OUTSIDE, 5978, "TCP"), False),
                ("out-port", DB, (PLAIN, 80, "TCP"), False), ("unselected", DB, (WEB, 5978, "TCP"), True),
            )
        ),
    ],
)  # fmt: skip
def test_a_connection_is_judged_as_documented(
    specs: list[dict[str, Any]], source: End, to: tuple[End, int, str], allowed: bool
) -> None:
    verdict = judge(cluster(*specs), source, *to)
    assert verdict.allowed is allowed, verdict


def test_policy_of_another_namespace_has_no_effect() -> None:
    elsewhere = Cluster(policies=(policy({}, namespace="a"),), pods=PODS)
    assert judge(elsewhere, WEB, DB, 6379).allowed
    assert not judge(elsewhere, WEB, ALICE, 6379).allowed


def test_addresses_stand_for_the_pods_that_have_them() -> None:
    made = cluster(lets_in({"podSelector": select(role="frontend")}))
    assert judge(made, "10.0.0.2", "fd00::1", 6379) == judge(made, WEB, DB, 6379)
    assert judge(made, "10.0.0.2", "10.0.0.1", 6379).allowed
    assert not judge(made, "10.0.0.3", "10.0.0.1", 6379).allowed


def test_node_is_recognised_by_all_of_its_addresses() -> None:
    """Probes come from the end of the pod's own link that is the node's."""
    shut = (policy({}),)
    gateway = "10.0.0.254"
    assert not judge(Cluster(policies=shut, pods=PODS), gateway, DB, 80).allowed
    nodes = (frozenset({"192.168.0.1", gateway}), frozenset({"192.168.0.2", "10.9.9.9"}))
    assert judge(Cluster(policies=shut, pods=PODS, nodes=nodes), gateway, DB, 80).allowed
    assert not judge(Cluster(policies=shut, pods=PODS, nodes=nodes), "10.9.9.9", DB, 80).allowed


def test_a_verdict_names_the_policies_that_made_it() -> None:
    made = cluster({}, lets_in({"podSelector": select(role="frontend")}), {"policyTypes": ["Egress"]})
    assert str(judge(made, PLAIN, DB, 1)) == "out: shut by default/p2; in: shut by default/p0, default/p1"
    assert str(judge(made, ALICE, DB, 1)) == "out: no policy; in: shut by default/p0, default/p1"
    assert str(judge(made, WEB, DB, 1)).endswith("in: allowed by default/p1")


@pytest.mark.parametrize("peer", [{}, {"ipBlock": {"cidr": "10.0.0.0/8"}, "podSelector": {}}])
def test_a_peer_that_the_api_server_refuses_is_an_error(peer: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="a peer needs an ipBlock, or a podSelector"):
        judge(cluster(lets_in(peer)), WEB, DB, 1)


def test_two_pods_with_one_address_are_an_error_and_not_a_guess() -> None:
    with pytest.raises(ValueError, match=r"pod default/db and pod a/late have 10\.0\.0\.1"):
        Cluster(pods=(*PODS, Pod(name="late", namespace="a", ips=("10.0.0.1",))))


def test_pods_are_read_from_objects_of_the_api() -> None:
    container = {"name": "c", "ports": [{"name": "sql", "containerPort": 1}, {"containerPort": 2}]}
    thing = {
        "metadata": {"name": "p", "namespace": "n", "labels": {"a": "b"}},
        "spec": {"containers": [container], "hostNetwork": False},
        "status": {"podIPs": [{"ip": "10.0.0.1"}, {"ip": "fd00::1"}], "hostIP": "192.168.0.1"},
    }
    made = Cluster.of([], [thing], [{"metadata": {"name": "n", "labels": {"x": "y"}}}], [["192.168.0.1"]])
    assert made.pods == (
        Pod(
            name="p", namespace="n", labels={"a": "b"}, ips=("10.0.0.1", "fd00::1"), ports={("sql", "TCP"): 1},
            node="192.168.0.1",
        ),
    )  # fmt: skip
    assert made.labels_of("n") == {"kubernetes.io/metadata.name": "n", "x": "y"}
    pending = {**thing, "status": {}}
    assert Cluster.of([], [pending], []).pods[0].ips == ()


LABELS = st.dictionaries(st.sampled_from("ab"), st.sampled_from("xyz"), max_size=2)
VALUES = st.lists(st.sampled_from("xyz"), min_size=1, max_size=2)
SELECTORS = LABELS.map(lambda labels: {"matchLabels": labels})
PEERS = st.one_of(
    st.fixed_dictionaries({"podSelector": SELECTORS}, optional={"namespaceSelector": SELECTORS}),
    st.fixed_dictionaries({"namespaceSelector": SELECTORS}),
    st.fixed_dictionaries({"ipBlock": st.sampled_from([{"cidr": "10.0.0.0/31"}, {"cidr": "0.0.0.0/0"}])}),
)
PORTS = st.sampled_from([{"port": 1}, {"port": 2, "endPort": 3}, {"protocol": "UDP"}, {"protocol": "TCP"}])
INGRESS = st.fixed_dictionaries(
    {}, optional={"from": st.lists(PEERS, max_size=2), "ports": st.lists(PORTS, max_size=2)}
)
EGRESS = INGRESS.map(lambda rule: {{"from": "to"}.get(name, name): value for name, value in rule.items()})
SPECS = st.fixed_dictionaries(
    {"podSelector": SELECTORS},
    optional={
        "ingress": st.lists(INGRESS, max_size=2),
        "egress": st.lists(EGRESS, max_size=2),
        "policyTypes": st.sampled_from([["Ingress"], ["Egress"], ["Ingress", "Egress"]]),
    },
)
POLICIES = st.lists(st.builds(policy, SPECS, st.sampled_from("nm")), max_size=3)
ENDS = st.builds(
    lambda name, space, labels: Pod(name=name, namespace=space, labels=labels, ips=(f"10.0.0.{ord(name) - 97}",)),
    st.sampled_from("cdef"), st.sampled_from("nm"), LABELS,
)  # fmt: skip


@given(POLICIES, SPECS, ENDS, ENDS, st.integers(1, 3), st.sampled_from(["TCP", "UDP"]))
def test_additional_policy_blocks_only_ends_it_is_first_to_select(
    policies: list[Any], spec: Any, source: Pod, to: Pod, port: int, protocol: str
) -> None:
    """Policies add up: what is open at an end that is isolated already stays open, and what is new only opens."""
    before = judge(Cluster(policies=tuple(policies)), source, to, port, protocol)
    more = policy(spec, "n", "more")
    after = judge(Cluster(policies=(*policies, more)), source, to, port, protocol)
    for old, new in ((before.egress, after.egress), (before.ingress, after.ingress)):
        assert set(old.allowing) <= set(new.allowing)
        assert set(new.allowing) <= set(new.selecting)
        if old.selecting:
            assert new.allowed >= old.allowed
        elif "n/more" not in new.selecting:
            assert new == old


@given(POLICIES, ENDS, ENDS, st.integers(1, 3))
def test_unselected_end_is_open_and_one_under_a_bare_policy_is_closed(
    policies: list[Any], source: Pod, to: Pod, port: int
) -> None:
    if source == to:
        return
    rest = tuple(p for p in policies if p["metadata"]["namespace"] not in (source.namespace, to.namespace))
    assert judge(Cluster(policies=rest), source, to, port).allowed
    bare = policy({"policyTypes": ["Ingress", "Egress"]}, to.namespace)
    verdict = judge(Cluster(policies=(*rest, bare)), source, to, port)
    assert not verdict.ingress.allowed
    assert verdict.egress.allowed is (source.namespace != to.namespace)


@given(LABELS, st.sampled_from("ab"), VALUES)
def test_selector_operators_are_pairwise_opposites(labels: Any, key: str, values: Any) -> None:
    def test(operator: str, *more: Any) -> bool:
        return matches({"matchExpressions": [{"key": key, "operator": operator, **dict(more)}]}, labels)

    assert test("In", ("values", values)) is not test("NotIn", ("values", values))
    assert test("Exists") is not test("DoesNotExist")
    assert test("In", ("values", values)) is any(
        matches({"matchLabels": {key: value}}, labels) for value in values
    )
