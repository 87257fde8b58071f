"""Strangers at every socket of a job that runs: each is refused, and they change no batch and end no process."""

from __future__ import annotations

import base64
import contextlib
import os
import random
import resource
import select
import signal
import socket
import stat
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from batches import Numbers, ids
from live_job import IN_EPOCH, LiveJob
from other_user import as_other, needs_root
from rig import until
from strangers import all_end, answer, call, heard, hello, messages, refusal, visit

from dataloaderjob import DataLoader
from dataloaderjob.core import ipc, keys, sockets
from dataloaderjob.core.frames import PROTOCOL
from dataloaderjob.core.handshake import (
    CONTROL,
    DATA,
    MAX_HELLO_NBYTES,
    ClientHandshake,
    Key,
    Versions,
    answer_challenge,
)
from dataloaderjob.core.sockets import LENGTH
from dataloaderjob.sidecar.admission import EXTRA_PROCESSES
from dataloaderjob.sidecar.listeners import MAX_CLIENTS, MAX_GUESTS
from processes import alive

PARTS = ["feeder-0", "supervisor"]


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveJob]:
    with LiveJob(tmp_path_factory.mktemp("j")) as made:
        yield made


def descriptors(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def threads(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/task"))


# The sidecar's socket


JUNK = [b"", b"{", b"[]", b"null", b"7", b'{"rank": "0"}', b"\xff" * 100, b"[" * 90_000, bytes(90_000)]


def test_malformed_message_ends_its_connection(job: LiveJob) -> None:
    chance = random.Random(1)
    pidfd = os.pidfd_open(os.getpid())
    with job.unimpressed():
        for kind in (*range(13), 99, 255):
            for junk in JUNK:
                sock = visit(job.socket, ipc.pack(kind, junk), [pidfd])
                if kind == ipc.Type.HELLO:
                    assert refusal(sock)
                    continue
                with sock:
                    packet = answer(sock)
                    assert packet is None or kind == packet.type == ipc.Type.STATUS
        os.close(pidfd)
        for _ in range(100):
            data = bytearray(chance.randbytes(chance.randrange(1, 2000)))
            data[1:2] = b"\0"  # not the beginning of a longer one
            with visit(job.socket, [bytes(data)]) as sock:
                packet = answer(sock)
                assert packet is None or packet.type in (ipc.Type.REFUSED, ipc.Type.STATUS)


def wrong(kind: str, folder: Path) -> int:
    """A descriptor that is no process's."""
    match kind:
        case "file":
            return os.open(folder / "file", os.O_RDWR | os.O_CREAT)
        case "folder":
            return os.open(folder, os.O_RDONLY)
        case "path":
            return os.open(folder, os.O_PATH)
        case "device":
            return os.open("/dev/zero", os.O_RDONLY)
        case "memfd":
            return os.memfd_create("none")
        case "eventfd":
            return os.eventfd(1)
        case "pipe":
            fd, other = os.pipe()
            os.close(other)
            return fd
        case "socket":
            return socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET).detach()
    with select.epoll() as poll:
        return os.dup(poll.fileno())


UNWAITABLE = ("file", "folder", "path", "device", "memfd")
WAITABLE = ("eventfd", "pipe", "socket", "epoll")


def test_invalid_pidfd_is_served_only_as_long_as_its_connection(job: LiveJob, tmp_path: Path) -> None:
    with job.unimpressed():
        for kind in UNWAITABLE + WAITABLE:
            rank, fd = f"with-{kind}", wrong(kind, tmp_path)
            with visit(job.socket, hello(rank=rank), [fd]) as sock:
                os.close(fd)
                packet = answer(sock)
                assert packet is not None
                assert packet.type == ipc.Type.WELCOME
            until(lambda: len(job.sidecar()["receivers"]) == 2, what=f"the end of rank {rank}")
    said = job.said()
    assert all(f"the receiver of rank with-{kind} ended with status 1" in said for kind in UNWAITABLE)


def test_hello_without_exactly_one_descriptor_is_refused(job: LiveJob) -> None:
    with job.unimpressed():
        before = descriptors(job.pids["sidecar"])
        for count in (0, 2, 3, 4, 5, 64, 200, 249, 250, 251, 252, 253):
            fd = os.pidfd_open(os.getpid())
            sock = visit(job.socket, hello(), [fd] * count)
            os.close(fd)
            assert "descriptors" in refusal(sock)
        until(lambda: descriptors(job.pids["sidecar"]) <= before + 2, what="the end of all that came")


def test_rank_in_use_or_malformed_is_refused(job: LiveJob) -> None:
    forms = [
        "",
        "-" * 65,
        "a b",
        "0\n",
        "0\0",
        "\n0",
        "0/1",
        "é",
        "\u0660",
        '0"} 1\nfoo{rank="1',
        "[0]",
        "{}",
        "None,",
    ]
    with job.unimpressed():
        for owner in (os.getpid(), job.trainers[0].process.pid):
            for rank in (0, "1"):
                fd = os.pidfd_open(owner)
                sock = visit(job.socket, hello(rank=rank, pid=owner), [fd])
                os.close(fd)
                assert f"rank {rank} is taken by the live process" in refusal(sock)
        for form in forms:
            fd = os.pidfd_open(os.getpid())
            sock = visit(job.socket, hello(rank=form), [fd])
            os.close(fd)
            assert "a rank must be a short word of letters, digits" in refusal(sock)


def test_sixty_unannounced_ranks_get_only_the_reserved_memory(job: LiveJob) -> None:
    with job.unimpressed(), contextlib.ExitStack() as stack:
        said = []
        for number in range(60):
            fd = os.pidfd_open(os.getpid())
            sock = stack.enter_context(visit(job.socket, hello(rank=f"foreign-{number}"), [fd]))
            os.close(fd)
            packet = answer(sock)
            assert packet is not None
            said.append(packet)
        welcome = sum(packet.type == ipc.Type.WELCOME for packet in said)
        assert welcome == EXTRA_PROCESSES - 1, "the two trainers are the first of them"
        assert b"processes use the service of this launch, which was started for 1" in said[-1].payload
    until(lambda: len(job.sidecar()["receivers"]) == 2, what="the end of the others")


# Feeders and supervisor, without the key


def versions(challenge: dict[str, Any]) -> Versions:
    """Of the protocol that is spoken at this port."""
    return DATA if challenge["protocol"] == PROTOCOL else CONTROL


def forged(challenge: dict[str, Any], name: str) -> list[dict[str, Any]]:
    """Answers of somebody who has another key, or none."""
    fields: dict[str, Any] = {"role": "receiver", "name": "r", "job": name, "facts": {}}
    good = answer_challenge(os.urandom(32), challenge, **fields, versions=versions(challenge))
    without = [{k: v for k, v in good.items() if k != gone} for gone in ("mac", "nonce", "job")]
    return [
        good, challenge, {}, *without, {**good, "mac": None}, {**good, "mac": "é" * 64}, {**good, "mac": [1]},
        {**good, "mac": {"mac": good["mac"]}}, {**good, "protocol": 10**30}, {**good, "protocol": True},
    ]  # fmt: skip


@pytest.mark.parametrize("part", PARTS)
def test_peer_without_the_key_gets_only_the_first_message(job: LiveJob, part: str) -> None:
    chance = random.Random(2)
    port = job.ports[part]
    junk = [chance.randbytes(chance.randrange(64, 5000)) for _ in range(20)]
    junk += [LENGTH.pack(n) + b"x" * 8 for n in (0, MAX_HELLO_NBYTES + 1, 2**31, 2**32 - 1)]
    junk += [LENGTH.pack(MAX_HELLO_NBYTES) + b"[" * MAX_HELLO_NBYTES, LENGTH.pack(2) + b"[]"]
    with job.unimpressed():
        for data in junk:
            with call(port) as sock:
                sock.sendall(data)
                assert len(messages(heard(sock))) <= 1, "the challenge"
        for at in range(12):
            with call(port) as sock:
                challenge = sockets.recv_message(sock)
                sockets.send_message(sock, forged(challenge, job.name)[at])
                (told,) = messages(heard(sock))
                assert any(reason in told["error"] for reason in REFUSED), told
        until(
            lambda: "connections were refused since the last such message" in job.said(), what="a line of it"
        )


REFUSED = ("does not hold this job's key", "protocol version", "is not served here")


def recorded(port: int, key: Key, role: str, job: str) -> tuple[bytes, bytes]:
    """What both sides say in a handshake that succeeds, after the challenge."""
    with call(port) as sock:
        challenge = sockets.recv_message(sock)
        handshake = ClientHandshake(key, role=role, name="n", job=job, versions=versions(challenge))
        said = handshake.receive(sockets.pack_message(challenge))
        sock.sendall(said)
        last = sockets.recv_message(sock)
        assert "mac" in last
        return said, sockets.pack_message(last)


def test_recorded_handshake_opens_no_port_again(job: LiveJob) -> None:
    ports = job.ports
    with job.unimpressed():
        for source in ("feeder-0", "feeder-1", "supervisor"):
            is_feeder = source != "supervisor"
            key = job.link_key(source) if is_feeder else keys.of_job(job.key)
            for said in recorded(ports[source], key, "receiver" if is_feeder else "control", job.name):
                for target in ("feeder-0", "feeder-1", "supervisor"):
                    with call(ports[target]) as sock:
                        sockets.recv_message(sock)
                        sock.sendall(said)
                        (told,) = messages(heard(sock))
                        assert any(reason in told["error"] for reason in REFUSED), told


def test_flood_of_connections_to_all_ports_blocks_no_trainer(
    job: LiveJob,
) -> None:
    stop = threading.Event()
    ports = [job.ports[part] for part in ("feeder-0", "feeder-1", "supervisor")]
    filled = 0

    def fill() -> None:
        nonlocal filled
        held: list[socket.socket] = []
        while not stop.wait(0.002):
            for port in ports:
                with contextlib.suppress(OSError):
                    held.append(call(port))
                    filled += 1
            while len(held) > 400:
                held.pop(0).close()
        for sock in held:
            sock.close()

    with job.unimpressed():
        thread = threading.Thread(target=fill)
        thread.start()
        try:
            until(lambda: filled > 600, 20, "more than there are places")
            os.environ["DATALOADERJOB_SOCKET"] = job.socket
            assert ids(DataLoader(Numbers(40), batch_size=5)) == list(range(40))
        finally:
            os.environ.pop("DATALOADERJOB_SOCKET", None)
            stop.set()
            thread.join()


# All of them


@pytest.mark.thorough
def test_slow_clients_are_cut_off_at_every_socket_and_leave_nothing(job: LiveJob) -> None:
    """Half a message, a byte at a time, and nothing at all."""
    pids, ports = job.pids, job.ports
    begin, more = (ipc.HEAD.pack(ipc.Type.HELLO, 1, PROTOCOL, 0, 0, 0) + data for data in (b'{"rank"', b""))
    fd = os.pidfd_open(os.getpid())
    held: dict[socket.socket, bytes] = {}
    with job.unimpressed():
        before = {part: (descriptors(pids[part]), threads(pids[part])) for part in ("sidecar", *PARTS)}
        for at in range(MAX_GUESTS + 50):
            held[visit(job.socket)] = more * (at % 2)
        for _ in range(4):
            held[visit(job.socket, [begin], [fd] * 100)] = more
        until(lambda: descriptors(pids["sidecar"]) > before["sidecar"][0] + MAX_GUESTS + 300)
        for port in (*(ports[part] for part in PARTS), *[ports["metrics"]] * 2):
            for at in range(100):
                held[call(port)] = b"G" * (at % 2)
        all_end(held, within_s=8.0)
        for part, (fds, tasks) in before.items():
            until(lambda p=part, n=fds: descriptors(pids[p]) <= n + 10, what=f"the end of what {part} held")
            until(lambda p=part, n=tasks: threads(pids[p]) <= n + 2, what=f"the end of threads of {part}")
    os.close(fd)
    for sock in held:
        sock.close()


def busy_s(pid: int) -> float:
    """Processor time that it has used so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@pytest.mark.parametrize("part", ["sidecar", "supervisor"])
def test_exhausted_descriptors_cause_no_spinning_and_stop_no_batch(job: LiveJob, part: str) -> None:
    pid, port = job.pids[part], job.ports["supervisor"]
    limits = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    with job.unimpressed(), contextlib.ExitStack() as stack:
        try:
            resource.prlimit(pid, resource.RLIMIT_NOFILE, (descriptors(pid) + 12, limits[1]))
            for _ in range(40):
                stack.enter_context(visit(job.socket) if part == "sidecar" else call(port))
            busy, began = busy_s(pid), time.monotonic()
            for trainer in job.trainers:
                trainer.reach(len(trainer.told) + 3)
            assert busy_s(pid) - busy < 0.4 * (time.monotonic() - began)
        finally:
            resource.prlimit(pid, resource.RLIMIT_NOFILE, limits)
        with visit(job.socket) if part == "sidecar" else call(port):
            pass


REQUESTS = [
    b"\r\n\r\n", b"\0\r\n\r\n", b"\xff" * 9000, b"GET\r\n\r\n", b"GET  \r\n\r\n", b"GET /metrics\r\n\r\n",
    b"POST /metrics HTTP/1.0\r\n\r\n", b"get /metrics HTTP/1.0\r\n\r\n", b"GET /\xff HTTP/1.0\r\n\r\n",
    b"GET http://\0 HTTP/1.0\r\n\r\n", b"GET /../../etc/passwd HTTP/1.0\r\n\r\n", b"GET /metrics HTTP/1.0 x\r\n\r\n",
    b"GET /metrics HTTP/1.0\r\nX: " + b"x" * 100_000 + b"\r\n\r\n",
]  # fmt: skip


def test_malformed_requests_are_refused_and_health_answers_despite_idlers(job: LiveJob) -> None:
    port = job.ports["metrics"]
    with job.unimpressed(), contextlib.ExitStack() as stack:
        for request in REQUESTS:
            with call(port) as sock:
                with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                    sock.sendall(request)
                status = heard(sock)[:12]
            assert status in (b"HTTP/1.0 400", b"HTTP/1.0 404") or len(request) > 8192
        idle = [stack.enter_context(call(port)) for _ in range(2 * MAX_CLIENTS)]
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/healthz", timeout=5) as told:
            assert told.read() == b"ok\n"
        assert heard(idle[0]) == b"", "the oldest made room"


# Others on this machine


def test_files_of_a_job_are_private_and_no_process_exposes_its_key(job: LiveJob) -> None:
    def mode(path: Path) -> int:
        return stat.S_IMODE(path.stat().st_mode)

    with job.unimpressed():
        assert mode(job.home) == 0o700
        settings = [job.home / "key", *job.home.glob("*.json")]
        assert len(settings) >= 4
        assert {mode(path) for path in settings} == {0o600}
        assert mode(Path(job.socket)) == 0o660
        blobs = [path for path in (job.home / "blobs").iterdir() if not path.name.startswith(".")]
        assert blobs
        assert {mode(path) for path in blobs} <= {0o600, 0o640}
        secrets = [job.key, job.key.hex().encode(), base64.b64encode(job.key)]
        pids = job.all_pids()
        assert len(pids) >= 9
        shown = [Path(f"/proc/{pid}/{name}") for pid in pids for name in ("cmdline", "environ")]
        shown += [job.service.log, *job.home.glob("*.log"), *job.home.glob("*.json")]
        for path in shown:
            with contextlib.suppress(
                FileNotFoundError, ProcessLookupError
            ):  # a builder whose session has ended
                assert not any(secret in path.read_bytes() for secret in secrets), path


@needs_root
def test_other_users_can_read_nothing_of_a_job(job: LiveJob) -> None:
    home, pids = job.home, job.pids

    def look() -> None:
        paths = [home / "key", home / "sidecar.json", home / "blobs", home / "run.json"]
        paths += [
            Path(f"/proc/{pid}/{name}")
            for pid in pids.values()
            for name in ("environ", "fd/0", "mem", "maps")
        ]
        for path in paths:
            with pytest.raises(PermissionError):
                os.close(os.open(path, os.O_RDONLY))
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock, pytest.raises(PermissionError):
            sock.connect(job.socket)

    with job.unimpressed():
        as_other(look)


# Stopped


def test_batches_continue_while_the_sidecars_parent_is_stopped(job: LiveJob) -> None:
    pid = job.pids["sidecar"]
    with job.unimpressed(longest_wait_s=1.5):
        os.kill(pid, signal.SIGSTOP)
        try:
            for trainer in job.trainers:
                trainer.reach(len(trainer.told) + IN_EPOCH)
            assert alive(pid)
        finally:
            os.kill(pid, signal.SIGCONT)
