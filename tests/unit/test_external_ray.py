"""What a job asks of a Ray cluster that it did not start, and the answers. Nothing is started."""

from __future__ import annotations

import itertools
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from dataloaderjob.api.load import parse_manifest
from dataloaderjob.api.ray import RaySpec
from dataloaderjob.core.errors import InputError, ServiceError
from dataloaderjob.core.settings import SupervisorSettings
from dataloaderjob.core.supervision import Cause
from dataloaderjob.local.external import ExternalRay, checked, ray_env
from dataloaderjob.local.plan import RunPlan, plan
from dataloaderjob.local.restarts import MAX_CRASHES, GiveUp, RestartPolicy, ServicePart, Start
from dataloaderjob.providers.ray import placement
from dataloaderjob.providers.ray.external import Node, compare_versions, here
from dataloaderjob.providers.ray.placement import Explainer, Life, Room, resource_options, room

GIB = 1 << 30
ADDRESS = "10.0.0.5:6379"


def planned(provider: str = "ray", ray: dict[str, Any] | None = None, **feeders: Any) -> RunPlan:
    container = {"name": "trainer", "command": ["python", "train.py"]}
    found = {
        "apiVersion": "dataloading.dev/v1alpha1",
        "kind": "DataLoaderJob",
        "metadata": {"name": "small"},
        "spec": {
            "trainers": {"job": {"template": {"spec": {"containers": [container]}}}},
            "ray": ray or {"external": {"address": ADDRESS}},
            "feeders": feeders,
            "data": {"env": [{"name": "ROOT", "value": "/data"}, {"name": "A", "value": "$(ROOT)/a"}]},
        },
    }
    job = parse_manifest(yaml.safe_dump(found), one_machine=True)
    return plan(job, folder=Path("/job"), env={}, master_port=1, provider=provider)


def test_cluster_is_named_in_the_plan_with_variables_and_resources():
    made = planned(
        processesPerPod=2,
        resources={
            "requests": {"cpu": "3", "memory": "2Gi", "nvidia.com/gpu": 1, "ephemeral-storage": "1Gi"}
        },
    )
    assert made.service.external == ExternalRay(
        address=ADDRESS, feeder_resources={"CPU": 1.5, "memory": GIB, "GPU": 0.5},
        feeder_env={"ROOT": "/data", "A": "/data/a"},
    )  # fmt: skip
    assert "spec.feeders.resources" not in made.ignored


def test_local_provider_ignores_the_cluster_and_says_so():
    made = planned("local", resources={"requests": {"cpu": "3"}})
    assert made.service.external is None
    assert {"spec.ray", "spec.feeders.resources"} <= set(made.ignored)


@pytest.mark.parametrize(
    "address", ["auto", "ray://10.0.0.5:10001", "10.0.0.5", "10.0.0.5:0", "http://10.0.0.5:6379", "::1:6379"]
)
def test_other_addresses_are_rejected_by_the_api(address: str):
    with pytest.raises(InputError, match=r"host:port of the head's GCS"):
        planned(ray={"external": {"address": address}})


def test_managed_and_external_exclude_each_other():
    with pytest.raises(InputError, match="found both managed and external"):
        planned(ray={"external": {"address": ADDRESS}, "managed": {}})
    assert RaySpec().own.tuning.worker_register_timeout_seconds == 120


@pytest.mark.parametrize(
    ("cluster", "accepted"),
    [
        pytest.param({"ray_version": "2.60.0", "python_version": "3.11.2"}, True, id="equal"),
        pytest.param({"ray_version": "2.60.0", "python_version": "3.11.9"}, True, id="patch of Python"),
        pytest.param({"ray_version": "2.60.0", "python_version": "3.12.2"}, False, id="minor of Python"),
        pytest.param({"ray_version": "2.60.1", "python_version": "3.11.2"}, False, id="patch of Ray"),
        pytest.param({}, False, id="no description"),
    ],
)
def test_versions_of_ray_and_python_must_match(cluster: dict[str, str], accepted: bool):
    if accepted:
        compare_versions(cluster, ray="2.60.0", python="3.11.2")
        return
    with pytest.raises(ServiceError, match=r"this job has Ray 2\.60\.0 on Python 3\.11\.2"):
        compare_versions(cluster, ray="2.60.0", python="3.11.2")


def test_machine_must_be_a_live_node_of_the_cluster(tmp_path: Path):
    path = str(tmp_path)
    live = [Node("192.0.2.9", path, True), Node("127.0.0.1", path, True)]
    assert here(ADDRESS, live) == "127.0.0.1"
    for nodes in (
        live[:1],  # elsewhere
        [Node("127.0.0.1", path, False)],
        [Node("127.0.0.1", f"{path}/none", True)],  # another machine's loopback
    ):
        with pytest.raises(
            ServiceError, match=f"run `ray start --address={ADDRESS} --num-cpus=0` here first"
        ):
            here(ADDRESS, nodes)


def test_unreachable_address_is_refused_before_ray_is_asked():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with pytest.raises(InputError, match=f"cannot reach the Ray cluster of .* at 127.0.0.1:{port}"):
        checked(ExternalRay(address=f"127.0.0.1:{port}", feeder_resources={}, feeder_env={}))


def test_driver_gets_the_users_token_and_nothing_else_of_rays():
    env = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": "/t", "RAY_ADDRESS": "auto", "HOME": "/h"}
    found = ray_env(env, {"PATH": "/bin"})
    assert found["RAY_AUTH_TOKEN_PATH"] == "/t"
    assert found["PATH"] == "/bin"
    assert not {"RAY_ADDRESS", "HOME"} & set(found)


@pytest.mark.parametrize(
    ("host", "bound"),
    [("127.0.0.1", "127.0.0.1"), ("::1", "127.0.0.1"), ("10.0.0.4", "::"), ("fd00::4", "::")],
)
def test_supervisor_listens_for_other_nodes_only_if_there_are_any(host: str, bound: str):
    made = ExternalRay(address=ADDRESS, feeder_resources={}, feeder_env={}, host=host)
    assert made.bind_host == bound


def test_actors_ask_for_rays_own_and_custom_resources():
    needed = {"CPU": 1.0, "memory": 1e9, "GPU": 0.5, "feeder": 1.0}
    assert resource_options(needed) == {
        "num_cpus": 1.0, "memory": 1e9, "num_gpus": 0.5, "resources": {"feeder": 1.0},
    }  # fmt: skip
    assert resource_options({"feeder": 1.0}) == {"num_cpus": 0, "resources": {"feeder": 1.0}}


class _Made:
    """A handle to an actor, in the place of Ray's."""

    def __init__(self, number: int) -> None:
        self._actor_id = SimpleNamespace(hex=lambda: f"{number:032x}")


def test_replacement_of_a_feeder_is_judged_by_its_own_actor(monkeypatch: pytest.MonkeyPatch):
    """Ray keeps the records of dead actors, so the ID of the earlier actor would still be found."""
    asked: list[str] = []
    provider = placement.RayProvider(
        SupervisorSettings(
            job="small", key_path="", blob_folder="", provider="ray", host_socket="", state_path="", port=0,
            num_feeders=1, feeder_blob_folder="",
        )
    )  # fmt: skip
    numbers = itertools.count(1)
    remote = SimpleNamespace(remote=lambda *_: _Made(next(numbers)))
    provider._remote = SimpleNamespace(options=lambda **_: remote)
    monkeypatch.setattr(placement, "feeder_settings", lambda *_: None)
    monkeypatch.setattr(
        placement.ray_state, "state", SimpleNamespace(get_actor_info=lambda actor: asked.append(actor.hex()))
    )
    for _ in range(2):
        provider.place(0, 1, "")
    assert provider._lives([0]) == {}
    assert asked == [f"{2:032x}"]


NODE = {"CPU": 4.0, "memory": 8.0 * GIB}


@pytest.mark.parametrize(
    ("needed", "free", "places", "lacking"),
    [
        pytest.param({"CPU": 1.0}, {"CPU": 8.0}, 8, "", id="room"),
        pytest.param({"CPU": 3.0}, {"CPU": 8.0}, 2, "", id="one for each node"),
        pytest.param({"CPU": 1.0}, {}, 8, "CPU: 1 needed, 0 of 8 free", id="full"),
        pytest.param({"CPU": 5.0}, {"CPU": 8.0}, 0, "CPU: 5 needed, the largest node has 4", id="small nodes"),
        pytest.param(
            {"memory": 9.0 * GIB}, {"memory": 3.0 * GIB}, 0, "memory: 9.0 GiB needed, 3.0 GiB of 16.0 GiB free",
            id="memory",
        ),
        pytest.param({"CPU": 0.0}, {}, 4096, "", id="nothing needed"),
    ],
)  # fmt: skip
def test_room_is_counted_node_by_node(
    needed: dict[str, float], free: dict[str, float], places: int, lacking: str
):
    assert room(needed, [NODE, NODE], free) == Room(places, lacking)


def test_missing_package_on_a_node_is_reported_as_such():
    life = Life("RESTARTING", registered=False, restarts=2, death="No module named 'dataloaderjob'")
    (why,) = Explainer(30).explain([0], {0: life}, Room(1, ""), taken=0, now=0)
    assert (why.cause, why.dead) == (Cause.FAILS, False)
    assert "install dataloaderjob[feeder]" in why.text


def test_external_ray_has_no_part_that_the_run_starts_or_replaces():
    policy = RestartPolicy(None)
    assert policy.start() == [Start(ServicePart.SIDECAR, 0), Start(ServicePart.SUPERVISOR, 0)]
    policy.serves(ServicePart.SUPERVISOR)
    now, instructions = 0.0, policy.ended(ServicePart.SUPERVISOR, 4, "Ray is gone", 0.0)
    for now in range(1, 200, 10):
        policy.serves(ServicePart.SUPERVISOR)
        instructions = policy.ended(ServicePart.SUPERVISOR, 4, "Ray is gone", float(now))
        if any(isinstance(instruction, GiveUp) for instruction in instructions):
            break
        policy.due(now + 9.0)
    assert instructions == [GiveUp(f"the supervisor ended {MAX_CRASHES + 1} times within 120 s: Ray is gone")]
