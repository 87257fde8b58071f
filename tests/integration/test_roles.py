"""Code in a feeder holds the feeders' key, and nothing else of the job: what it can and cannot do with it."""

from __future__ import annotations

import hashlib
import os
import socket
import stat
from collections.abc import Iterator

import pytest
from live_job import LiveJob
from patience import PATIENCE_S
from rig import until
from strangers import call, heard

from dataloaderjob.core import handshake, keys, sockets
from dataloaderjob.core.errors import AuthError
from dataloaderjob.core.keys import Holder
from dataloaderjob.local.status import live_runs


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveJob]:
    with LiveJob(tmp_path_factory.mktemp("k")) as made:
        yield made


def held_by_feeders(job: LiveJob) -> bytes:
    """The key in the only file that a feeder is told to read."""
    return (job.home / "key-feeder").read_bytes()


def greet(job: LiveJob, part: str, key: keys.Key, role: str, name: str = "intruder") -> socket.socket:
    versions = handshake.BY_ROLE if part == "supervisor" else handshake.DATA
    sock = call(job.ports[part])
    try:
        handshake.greet(sock, key, role=role, name=name, job=job.name, versions=versions)
    except BaseException:
        sock.close()
        raise
    sock.settimeout(PATIENCE_S)
    return sock


@pytest.mark.thorough
@pytest.mark.parametrize("role", ["control", "sidecar", "upload", "feeder"])
def test_feeders_key_is_refused_for_roles_of_others(job: LiveJob, role: str) -> None:
    with job.unimpressed():
        before = job.service.status()["desired"]
        with pytest.raises(AuthError, match=f"does not hold this job's key for role '{role}'"):
            greet(job, "supervisor", held_by_feeders(job), role)
        assert job.service.status()["desired"] == before


@pytest.mark.parametrize("holder", Holder)
@pytest.mark.parametrize("role", [*keys.HOLDERS, "feeder", "receiver", "nobody"])
def test_each_key_is_accepted_for_the_roles_of_its_holder_only(
    job: LiveJob, holder: Holder, role: str
) -> None:
    key = keys.derive(job.key, holder)
    with job.unimpressed():
        if keys.HOLDERS.get(role) is holder:
            greet(job, "supervisor", key, role).close()
            return
        with pytest.raises(AuthError, match=r"does not hold this job's key|is not served here"):
            greet(job, "supervisor", key, role)


def test_feeder_reports_nothing_on_behalf_of_another(job: LiveJob) -> None:
    """It has the key of its name and the feeders' key. Nobody else is listed, ended or led elsewhere."""
    own = keys.of_feeder(job.key, "feeder-1")

    def others() -> list[object]:
        listed = job.service.status()["feeders"]
        return [(f["name"], f["state"], f["instance"], f["port"]) for f in listed if f["name"] != "feeder-1"]

    with job.unimpressed():
        before = others()
        for key in (own, held_by_feeders(job)):
            with pytest.raises(AuthError, match="does not hold this job's key for role 'feeder'"):
                greet(job, "supervisor", key, "feeder", "feeder-0")
        (honest,) = (f for f in job.service.status()["feeders"] if f["name"] == "feeder-0")
        link = keys.wrap(own, os.urandom(32), honest["instance"])
        report = {**honest, "type": "ready", "session": "", "link": link}
        for message in (report, {**report, "session": "another"}):
            with greet(job, "supervisor", own, "feeder", "feeder-1") as sock:
                sockets.send_message(sock, message)
                assert heard(sock) == b"", "it is closed"
        assert others() == before


def test_earlier_version_of_the_protocol_needs_the_jobs_own_key(job: LiveJob) -> None:
    earlier = handshake.Versions(keys.SINCE - 1, keys.SINCE - 1, "use another")
    with job.unimpressed():
        for key in (held_by_feeders(job), keys.derive(job.key, Holder.CONTROL)):
            with call(job.ports["supervisor"]) as sock, pytest.raises(AuthError, match="does not hold"):
                handshake.greet(sock, key, role="control", name="n", job=job.name, versions=earlier)
        with call(job.ports["supervisor"]) as sock:
            handshake.greet(sock, job.key, role="control", name="n", job=job.name, versions=earlier)
            sockets.send_message(sock, {"type": "status"})
            assert sockets.recv_message(sock)["type"] == "status"


def test_feeder_cannot_pass_for_a_sidecar_at_another_feeder(job: LiveJob) -> None:
    with job.unimpressed():
        other = job.link_key("feeder-1")
        for key in (held_by_feeders(job), other, job.key):
            with pytest.raises(AuthError, match="does not hold this job's key for role 'receiver'"):
                greet(job, "feeder-0", key, "receiver")
        greet(job, "feeder-0", job.link_key("feeder-0"), "receiver").close()


def test_feeders_key_fetches_a_blob_only_by_its_digest(job: LiveJob) -> None:
    digest, content = next(
        (path.name, path.read_bytes()) for path in (job.home / "blobs").iterdir() if len(path.name) == 64
    )
    with job.unimpressed():
        for wanted in ("../../key", "0" * 64, digest[:63], "*"):
            with greet(job, "feeder-0", held_by_feeders(job), "blob") as sock:
                sockets.send_message(sock, {"type": "get", "digest": wanted, "nbytes": 32})
                assert heard(sock) == b"", wanted
        with greet(job, "feeder-0", held_by_feeders(job), "blob") as sock:
            sockets.send_message(sock, {"type": "get", "digest": digest, "nbytes": len(content)})
            assert sockets.recv_message(sock)["digest"] == digest
            assert hashlib.sha256(sockets.recv_exactly(sock, len(content))).hexdigest() == digest
        stranger = keys.derive(os.urandom(32), Holder.FEEDER)
        with pytest.raises(AuthError, match="does not hold this job's key"):
            greet(job, "feeder-0", stranger, "blob")


@pytest.mark.parametrize("host", ["metadata.internal", "0.0.0.0", "169.254.169.254", "::"])
def test_feeder_sends_no_other_feeder_to_a_host_that_is_not_its_own(job: LiveJob, host: str) -> None:
    with job.unimpressed():
        with greet(job, "supervisor", held_by_feeders(job), "blob") as sock:
            wanted = {"type": "get", "digest": "0" * 64, "nbytes": 1, "host": host, "port": 80}
            sockets.send_message(sock, wanted)
            assert heard(sock) == b""
        until(lambda: f"{host!r}" in job.said() or f"reports {host}" in job.said(), what="a line about it")


def test_blob_that_nobody_asked_for_is_not_stored(job: LiveJob) -> None:
    digest = hashlib.sha256(b"x").hexdigest()
    with job.unimpressed():
        with greet(job, "supervisor", keys.derive(job.key, Holder.SIDECAR), "upload") as sock:
            sockets.send_message(sock, {"type": "blob", "digest": digest, "nbytes": 1})
            sock.sendall(b"x")
            assert heard(sock) == b""
        with greet(job, "supervisor", held_by_feeders(job), "blob") as sock:
            sockets.send_message(sock, {"type": "blob", "digest": digest, "nbytes": 1})
            assert heard(sock) == b""
        assert not (job.home / "blobs" / digest).exists()
        until(lambda: "a feeder may not send 'blob'" in job.said(), what="a line about it")
        until(lambda: "nobody requested it" in job.said(), what="a line about it")


def test_each_command_is_logged_with_role_peer_and_result(job: LiveJob) -> None:
    with job.unimpressed():
        desired = job.service.status()["desired"]
        with greet(job, "supervisor", keys.derive(job.key, Holder.CONTROL), "control") as sock:
            port = sock.getsockname()[1]
            for message in (
                {"type": "scale", "feeders": desired},
                {"type": "scale", "feeders": -1},
                {"type": "x\ny"},
            ):
                sockets.send_message(sock, message)
                sockets.recv_message(sock)
        who = f"from role control, intruder at 127.0.0.1:{port}"
        until(lambda: f"command scale {desired} {who}: ok" in job.said(), what="the scale")
        until(lambda: f"command scale -1 {who}: in a 'scale' message" in job.said(), what="the bad scale")
        with greet(job, "supervisor", keys.derive(job.key, Holder.SIDECAR), "sidecar") as sock:
            replace = {"type": "replace", "name": "feeder-0", "instance": "none", "reason": "test"}
            sockets.send_message(sock, replace)
            until(lambda: "command replace feeder-0 (none) from role sidecar, intruder" in job.said())


def test_files_with_keys_are_private_and_differ(job: LiveJob) -> None:
    files = [job.home / name for name in ("key", "key-feeder", "key-sidecar")]
    assert {stat.S_IMODE(path.stat().st_mode) for path in files} == {0o600}
    assert len({path.read_bytes() for path in files}) == 3
    assert [run for run in live_runs() if run.home == job.home]
