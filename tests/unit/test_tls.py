"""Connections under TLS over a pair of real sockets: refusals with their reasons, and bytes that arrive unchanged."""

from __future__ import annotations

import random
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from generations import TWO_PERIODS, Generations
from hypothesis import given, settings
from hypothesis import strategies as st
from patience import PATIENCE_S

from dataloaderjob.core import certificates
from dataloaderjob.core.certificates import SKEW
from dataloaderjob.core.credentials import LOOK_EVERY_S, Credentials, newest
from dataloaderjob.core.errors import AuthError, InputError, ProtocolError
from dataloaderjob.core.generations import GENERATIONS, PERIOD, Schedule
from dataloaderjob.core.handshake import new_challenge
from dataloaderjob.core.keys import Part
from dataloaderjob.core.sockets import pack_message
from dataloaderjob.core.tls import PREAMBLE, TlsConnection
from dataloaderjob.local.certificates import RunCertificates, tls_folder

START = datetime(2026, 1, 1, tzinfo=UTC)


@contextmanager
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    """The side that connected, and the one that accepted."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        near = socket.create_connection(listener.getsockname()[:2])
        far, _ = listener.accept()
    for sock in (near, far):
        sock.settimeout(PATIENCE_S)
    yield near, far
    near.close()
    far.close()


@dataclass
class Ends:
    """Both sides of a connection, and why each was refused."""

    near: TlsConnection
    far: TlsConnection
    errors: list[str] = field(default_factory=list)


def _attempt(call: Callable[[], object], errors: list[str]) -> None:
    try:
        call()
    except (OSError, ProtocolError) as exc:
        errors.append(str(exc))


@contextmanager
def opened(connects: Credentials, accepts: Credentials, to: Part = Part.FEEDER) -> Iterator[Ends]:
    with pair() as (near, far):
        far.sendall(PREAMBLE)
        ends = Ends(connects.connected(near, to), accepts.accepted(far))

        def accept() -> None:
            ends.far.establish()
            ends.far.send(b"!")

        def connect() -> None:
            ends.near.establish()
            assert ends.near.recv(1) == b"!"

        server = threading.Thread(target=_attempt, args=(accept, ends.errors))
        server.start()
        _attempt(connect, ends.errors)
        server.join()
        yield ends
        ends.near.close()
        ends.far.close()


@pytest.fixture
def job(tmp_path: Path) -> Generations:
    return Generations(tmp_path / "job")


def refusals(connects: Credentials, accepts: Credentials, to: Part = Part.FEEDER) -> str:
    with opened(connects, accepts, to) as ends:
        return "; ".join(ends.errors)


def test_parts_of_a_job_verify_each_other(job: Generations) -> None:
    assert refusals(job.of(Part.SIDECAR), job.of(Part.FEEDER)) == ""


def test_connection_uses_tls_1_3(job: Generations) -> None:
    with opened(job.of(Part.SIDECAR), job.of(Part.FEEDER)) as ends:
        assert ends.near._object.version() == "TLSv1.3"


@pytest.mark.parametrize("foreign", ["the one that connects", "the one that accepts"])
def test_certificate_of_another_job_is_refused(job: Generations, tmp_path: Path, foreign: str) -> None:
    other = Generations(tmp_path / "other", seed=b"o" * 32)
    connects, accepts = (other, job) if foreign == "the one that connects" else (job, other)
    told = refusals(connects.of(Part.SIDECAR), accepts.of(Part.FEEDER))
    assert "it is not from this job's authority" in told


def test_expired_certificate_is_refused_with_the_remedy(tmp_path: Path) -> None:
    old = Generations(tmp_path / "old", age=TWO_PERIODS + timedelta(days=1))
    told = refusals(old.of(Part.SIDECAR), old.of(Part.FEEDER))
    assert "certificate has expired; the operator renews a job's certificates" in told


def test_part_of_a_job_cannot_pass_for_another(job: Generations) -> None:
    told = refusals(job.of(Part.SIDECAR), job.of(Part.FEEDER), to=Part.SUPERVISOR)
    assert "another part of the job, or another process, answers there" in told


def test_generations_that_follow_each_other_trust_each_other(tmp_path: Path) -> None:
    early, late = (Generations(tmp_path / name, age=PERIOD) for name in ("early", "late"))
    late.schedule = early.schedule
    late.add(1)
    for connects, accepts in ((early, late), (late, early), (late, late)):
        assert refusals(connects.of(Part.SIDECAR), accepts.of(Part.FEEDER)) == ""


def test_new_generation_is_used_by_the_next_connection(
    job: Generations, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dataloaderjob.core.credentials.LOOK_EVERY_S", 0.0)
    sidecar, feeder = job.of(Part.SIDECAR), job.of(Part.FEEDER)
    with opened(sidecar, feeder) as ends:
        job.schedule = Schedule(job.schedule.began - PERIOD)
        job.add(1)
        assert (sidecar.generation, feeder.generation) == (1, 1)
        ends.far.sendall(b"goes on")
        assert ends.near.recv(100) == b"goes on"
    assert refusals(sidecar, feeder) == ""
    assert LOOK_EVERY_S > 0


def test_unreadable_new_generation_changes_nothing(job: Generations, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dataloaderjob.core.credentials.LOOK_EVERY_S", 0.0)
    sidecar = job.of(Part.SIDECAR)
    job.add(1)
    for path in job.home.glob("tls/*/1/tls.key"):
        path.write_text("no key")
    assert sidecar.generation == 0
    assert refusals(sidecar, job_of_first(job)) == ""


def job_of_first(job: Generations) -> Credentials:
    job.remove(1)
    return job.of(Part.FEEDER)


def test_folder_without_certificates_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="has no certificates"):
        Credentials(tmp_path)


def test_port_without_tls_is_refused_at_once(job: Generations) -> None:
    with pair() as (near, far):
        far.sendall(pack_message(new_challenge()))
        with pytest.raises(AuthError, match="the peer does not use TLS"):
            job.of(Part.SIDECAR).connected(near, Part.FEEDER).establish()


def test_stranger_may_not_send_much_before_it_is_verified(job: Generations) -> None:
    with pair() as (near, far):
        near.sendall(b"\x16\x03\x01\x40\x00\x01\x00\x3f\xfc\x03\x03" + bytes(1 << 16))
        with pytest.raises(AuthError, match=r"more than \d+ bytes before it was verified|TLS failed"):
            job.of(Part.FEEDER).accepted(far).establish()


@pytest.mark.parametrize("flags", [0, socket.MSG_WAITALL], ids=["as-it-comes", "all"])
def test_bytes_of_any_sizes_arrive_as_they_were_sent(job: Generations, flags: int) -> None:
    dice = random.Random(7)
    sizes = [1, 5, 16_384, 16_385, 100_000, 1_000_000, *(dice.randrange(1, 70_000) for _ in range(40))]
    data = dice.randbytes(sum(sizes))
    with opened(job.of(Part.SIDECAR), job.of(Part.FEEDER)) as ends:

        def send() -> None:
            at = 0
            for size in sizes:
                ends.far.sendall(memoryview(data)[at : at + size])
                at += size

        sender = threading.Thread(target=send)
        sender.start()
        found, buffer = bytearray(), memoryview(bytearray(200_000))
        while len(found) < len(data):
            asked = min(dice.randrange(1, 200_000), len(data) - len(found))
            got = ends.near.recv_into(buffer[:asked], 0, flags)
            assert got == asked or not flags
            found += buffer[:got]
        sender.join()
    assert found == data


def test_socket_that_does_not_block_sends_what_it_has_kept(job: Generations) -> None:
    data = random.Random(3).randbytes(20_000_000)
    with opened(job.of(Part.SIDECAR), job.of(Part.FEEDER)) as ends:
        ends.far.setblocking(False)
        left, refused, found = memoryview(data), 0, bytearray()
        while left or len(found) < len(data):
            try:
                left = left[ends.far.sendmsg([left[:100], left[100:]]) :] if left else left
            except BlockingIOError:
                refused += 1
            if not left or refused:
                found += ends.near.recv(1 << 20)
    assert found == data
    assert refused


def test_one_thread_sends_while_another_waits_for_bytes(job: Generations) -> None:
    with opened(job.of(Part.SIDECAR), job.of(Part.FEEDER)) as ends:
        waits = threading.Thread(target=lambda: ends.near.recv(1))
        waits.start()
        for number in range(200):
            ends.near.sendall(b"%4d" % number)
        assert ends.far.recv_into(bytearray(800), 0, socket.MSG_WAITALL) == 800
        ends.far.sendall(b".")
        waits.join(PATIENCE_S)
        assert not waits.is_alive()


def test_bytes_read_ahead_are_reported(job: Generations) -> None:
    with opened(job.of(Part.SIDECAR), job.of(Part.FEEDER)) as ends:
        ends.far.sendall(b"12345")
        assert not ends.near.buffered
        assert ends.near.recv_into(bytearray(3)) == 3
        assert ends.near.buffered
        assert ends.near.recv(100) == b"45"
        assert not ends.near.buffered


# The schedule


@given(st.timedeltas(timedelta(days=-400), timedelta(days=4000)), st.timedeltas(timedelta(minutes=1), PERIOD))
@settings(max_examples=300)
def test_a_certificate_in_use_is_valid_until_the_next_one(age: timedelta, period: timedelta) -> None:
    schedule, now = Schedule(START, period), START + age
    current, following = schedule.current(now), schedule.next_start(now)
    assert 0 <= current < GENERATIONS
    if current < GENERATIONS - 1:
        assert following is not None
        assert following > now
        assert schedule.current(following) == current + 1
        assert schedule.end(current) >= following + period
    else:
        assert following is None
    if timedelta() <= age < GENERATIONS * period:
        assert schedule.start(current) <= now < schedule.end(current)


def test_same_seed_gives_the_same_bytes() -> None:
    schedule = Schedule(START)
    made = [certificates.files(b"seed", Part.FEEDER, 3, schedule) for _ in range(2)]
    assert made[0] == made[1]


def test_no_two_parts_seeds_or_generations_share_a_key() -> None:
    schedule = Schedule(START)
    made = {
        certificates.files(seed, part, generation, schedule).key
        for seed in (b"a", b"b")
        for part in Part
        for generation in range(3)
    }
    assert len(made) == 2 * len(Part) * 3


def test_certificate_is_valid_before_its_generation_for_late_clocks() -> None:
    assert timedelta() < SKEW


@given(st.lists(st.text(max_size=4)), st.sets(st.integers(0, 99)))
def test_newest_generation_is_found_among_any_names(names: list[str], numbers: set[int]) -> None:
    other = [name for name in names if not name.isdecimal()]
    assert newest([*other, *map(str, numbers)]) == max(numbers, default=None)


# A run on this machine


def test_run_adds_the_next_generation_when_it_is_due(tmp_path: Path) -> None:
    now = datetime.now(UTC)
    moments = iter([now, now, now + PERIOD / 2, now + PERIOD])
    run = RunCertificates(tmp_path, lambda: next(moments))
    for generations in ({"0"}, {"0"}, {"0", "1"}):
        run.write()
        for part in (Part.SUPERVISOR, Part.FEEDER, Part.SIDECAR):
            assert {path.name for path in tls_folder(tmp_path, part).iterdir()} == generations
    assert Credentials(tls_folder(tmp_path, Part.FEEDER)).generation == 1


def test_files_of_a_run_are_its_users_alone(tmp_path: Path) -> None:
    RunCertificates(tmp_path).write()
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(files) == 9
    assert {path.stat().st_mode & 0o077 for path in files} == {0}


def test_run_without_the_library_is_refused_with_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "dataloaderjob.core.certificates", None)
    monkeypatch.delattr("dataloaderjob.core.certificates")
    with pytest.raises(InputError, match=r"install dataloaderjob\[tls\]"):
        RunCertificates(tmp_path)
