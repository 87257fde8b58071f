"""Two releases side by side: what a release wrote and said is understood, and what it needs is still written and said.

`skew/VERSION/` has the settings that the operator of a release writes, and the messages of its supervisor and sidecars.
Once a release is made its folder is never edited. A key that is added goes into the folder of the release to come.
"""

from __future__ import annotations

import dataclasses
import json
import pickle
import re
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import next_release
import pytest
from manifests import manifest

import dataloaderjob
from dataloaderjob.api import parse_object
from dataloaderjob.api.status import DataLoaderJobStatus
from dataloaderjob.core import handshake, sockets, supervision
from dataloaderjob.core.settings import FeederSettings, SidecarSettings, load
from dataloaderjob.pod.entry import FeederPodSettings, HeadSettings
from dataloaderjob.sidecar.dispatch.streams import Endpoint
from dataloaderjob.sidecar.supervisor_client import SupervisorClient
from dataloaderjob.supervisor.feeder_set import Endpoint as supervisor_endpoint
from dataloaderjob.supervisor.feeder_set import FeederSet
from dataloaderjob.supervisor.main import Supervisor
from dataloaderjob.supervisor.reports import Reports
from dataloaderjob_operator import objects
from dataloaderjob_operator.decide import supervisor_status
from dataloaderjob_operator.names import Role
from dataloaderjob_operator.objects import settings

ROOT = Path(__file__).parent
RELEASES = sorted((ROOT / "skew").iterdir())
SETUP = objects.OperatorConfig(version="1.0", sidecar_image="example/sidecar:1", root_key=b"r" * 32)
KINDS = {Role.HEAD: HeadSettings, Role.FEEDER: FeederPodSettings, Role.TRAINER: SidecarSettings}
JOB = {"metadata.uid": "u-1", "metadata.namespace": "team"}
KEY = b"k" * handshake.KEY_NBYTES


def written(role: Role) -> dict[str, Any]:
    """The settings that the operator writes now."""
    made = settings.config_map(parse_object(manifest(JOB)), SETUP, role)
    return dict(json.loads(made["data"][settings.FILES[role]]))


def known(release: Path, name: str) -> Any:
    return json.loads((release / name).read_text())


def shape(found: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """Each key of JSON, with the type of its value. A key with a dot in it is a value, and not counted."""
    if isinstance(found, Mapping):
        for name, value in found.items():
            if "." not in name:
                yield f"{path}.{name}", "object" if isinstance(value, Mapping) else type(value).__name__
                yield from shape(value, f"{path}.{name}")
    if isinstance(found, list) and found:
        yield from shape(found[0], f"{path}[]")


@pytest.mark.parametrize("release", RELEASES, ids=lambda path: path.name)
@pytest.mark.parametrize("role", Role, ids=lambda role: role.value)
def test_settings_of_each_release_are_read_without_a_warning(release: Path, role: Role, capsys):
    load(KINDS[role], release / settings.FILES[role])
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("release", RELEASES, ids=lambda path: path.name)
@pytest.mark.parametrize("role", Role, ids=lambda role: role.value)
def test_settings_read_by_images_of_each_release_are_still_written(release: Path, role: Role):
    before, now = dict(shape(known(release, settings.FILES[role]))), dict(shape(written(role)))
    for key, kind in before.items():
        assert key in now, f"{key}: images of {release.name} read it. Go on writing it"
        assert "NoneType" in (kind, now[key]) or {kind, now[key]} <= {"int", "float"} or now[key] == kind, key


@pytest.mark.parametrize("role", Role, ids=lambda role: role.value)
def test_new_settings_keys_are_recorded_for_this_release(role: Role):
    release = ROOT / "skew" / dataloaderjob.__version__
    added = set(dict(shape(written(role)))) - set(dict(shape(known(release, settings.FILES[role]))))
    assert not added, f"give them a default in {KINDS[role].__name__}, and put them into {release.name}/"


@pytest.mark.parametrize("release", RELEASES, ids=lambda path: path.name)
def test_the_operator_understands_the_supervisor_of_each_release(release: Path):
    message = known(release, "status.json")
    found, readings = supervisor_status.parse(message), supervisor_status.readings(message)
    assert (found.desired, found.ready, found.ray.version) == (2, 1, "2.60.0")
    assert found.ray.worker_register_timeout_seconds == 120
    assert found.cause is not None
    assert (found.cause.reason, found.cause.host) == ("FeederFails", "10.0.0.2")
    assert found.failure is not None
    assert found.failure.reason == "ModuleMissing"
    assert set(supervision.COUNTERS) <= set(readings["mnist-trainers-0-0"])
    assert readings["mnist-trainers-0-0"]["next_calls"] == 40


@pytest.mark.parametrize("release", RELEASES, ids=lambda path: path.name)
def test_supervisor_reports_all_keys_that_each_release_reads(release: Path):
    feeders = FeederSet(2, ready_timeout_s=60.0, drain_timeout_s=10.0)
    feeders.opened("s0", 0.0)
    feeders.step(0.0)
    feeders.report(supervisor_endpoint("feeder-0", "i0", "10.0.0.1", 7001, 40, "n0", "s0"), 1.0)
    feeders.failed(1, "no torch", 2.0, supervision.Cause.FAILS)
    reports = Reports()
    reports.add("mnist-trainers-0-0", known(release, "metrics.json"))
    provider = SimpleNamespace(in_force=known(release, "status.json")["ray"])
    alone: Any = SimpleNamespace(
        _provider=provider,
        _lock=threading.Lock(),
        _feeders=feeders,
        _reports=reports,
        _started=0.0,
        _ended=False,
    )
    for file, message in (
        ("status.json", Supervisor._status(alone)),
        ("feeders.json", Supervisor.listing(alone)),
    ):
        said = dict(shape(message))
        for key, kind in shape(known(release, file)):
            assert said.get(key) == kind, f"{key}: {release.name} reads it. Go on saying it"


@pytest.mark.parametrize("release", RELEASES, ids=lambda path: path.name)
def test_a_sidecar_understands_the_supervisor_of_each_release(release: Path):
    client = SupervisorClient(("", 0), key=KEY, job="j", name="s", store=None)  # type: ignore[arg-type]
    assert client._message(known(release, "feeders.json"))
    assert client.feeders == [Endpoint("feeder-0", "i0", "10.0.0.1", 7001, (b"l" * 32).hex())]
    assert client.desired == 2


@pytest.mark.parametrize("release", RELEASES, ids=lambda path: path.name)
def test_a_supervisor_understands_the_sidecars_of_each_release(release: Path):
    reports = Reports()
    reports.add("mnist-trainers-0-0", known(release, "metrics.json"))
    assert reports.failures()[0]["reason"] == "ModuleMissing"
    assert reports.sidecars["mnist-trainers-0-0"]["metrics"]["next_calls"] == 40


def test_control_protocol_supports_its_newest_and_previous_version():
    versions = {known(release, "protocol.json")["control"] for release in RELEASES}
    assert max(versions) == handshake.CONTROL.newest, "put it into the folder of this release"
    assert handshake.CONTROL.oldest <= max(min(versions), handshake.CONTROL.newest - 1)


@pytest.mark.parametrize("release", RELEASES, ids=lambda path: path.name)
def test_bytes_of_the_handshake_of_each_release_are_answered(release: Path):
    """A supervisor of that release greets an operator of this one, and is taken for what it is."""
    if known(release, "protocol.json")["control"] < handshake.CONTROL.oldest:
        pytest.skip("out of the window")
    client = handshake.ClientHandshake(KEY, role="control", name="operator", job="team/mnist/u-1")
    hello = client.receive(sockets.pack_message({"nonce": "00" * 16, **known(release, "challenge.json")}))
    (length,) = sockets.LENGTH.unpack_from(hello)
    reply = sockets.parse_message(hello[sockets.LENGTH.size : sockets.LENGTH.size + length])
    assert sorted(reply) == ["facts", "job", "mac", "name", "nonce", "protocol", "role"]
    spoken, oldest = reply["protocol"], known(release, "challenge.json")["oldest"]
    facts = {handshake.TRANSPORT: sockets.TCP} if spoken >= handshake.BOUND else {}
    about = "00" * 16, reply["nonce"], "control", "operator", "team/mnist/u-1", reply["facts"]
    expected = handshake._mac(KEY, "acceptor", *about, spoken, oldest, spoken, facts).hex()
    client.receive(sockets.pack_message({"mac": expected, "facts": facts}))
    assert client.done
    assert client.seals is not None


@pytest.mark.parametrize("release", RELEASES, ids=lambda path: path.name)
def test_a_status_of_each_release_is_read(release: Path):
    """An operator that takes over finds what the one before it wrote."""
    found = DataLoaderJobStatus.model_validate(known(release, "job-status.json"))
    assert found.trainers.restarts == 1
    assert {condition.type for condition in found.conditions} >= {"Ready", "Progressing", "Failed"}


ACTORS = (
    "job", "name", "session", "index", "num_feeders", "key_path", "blob_folder", "supervisor_host", "supervisor_port",
    "bind_host", "advertise_host", "port", "node", "sweeps_blobs", "shares_memory", "max_ungranted", "max_idle_nbytes",
    "memory_field",
)  # fmt: skip
"""Fields in the order in which Ray has them in the pickle of an actor's argument."""


def test_feeder_settings_are_read_from_heads_of_other_releases():
    names = [field.name for field in dataclasses.fields(FeederSettings)]
    assert tuple(names[: len(ACTORS)]) == ACTORS, "add fields at the end, and here"
    made = FeederSettings(job="j", key_path="k", blob_folder="b", max_ungranted=5, memory_field="f")
    assert pickle.loads(pickle.dumps(made)) == made
    state = [getattr(made, name) for name in names]
    older, later = (object.__new__(FeederSettings) for _ in range(2))
    older.__setstate__(state[: len(ACTORS) - 1])
    assert older == dataclasses.replace(made, memory_field="")
    later.__setstate__([*state, "of a later release"])
    assert later == made


def test_the_next_release_of_cluster_tests_meets_what_it_changes() -> None:
    for file, found, _ in next_release.CHANGES:
        assert re.search(found, (next_release.ROOT / file).read_text()), file
    assert len(next_release.CONTROL.findall((next_release.ROOT / next_release.HANDSHAKE).read_text())) == 1
