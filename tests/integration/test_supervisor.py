"""Supervisor and feeders on a real Ray head."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Self

import grpc
import psutil
import pytest
import torch
from feeder_client import Receiver, Squares, bundle_of, wait_until
from supervised import KEY, Supervised, head

from dataloaderjob.core import handshake, keys, sockets
from dataloaderjob.core.blobs import BlobStore
from dataloaderjob.core.errors import InputError, ServiceError
from dataloaderjob.core.frames import FrameKind
from dataloaderjob.core.keys import Holder
from dataloaderjob.core.settings import RayTasks, RayTuning
from dataloaderjob.core.supervision import EXIT_RAY_LATE, EXIT_RAY_LOST
from dataloaderjob.local.head import RayHead
from dataloaderjob.sidecar.supervisor_client import upload

Start = Callable[..., Supervised]


@pytest.fixture(scope="module")
def ray_head() -> Iterator[RayHead]:
    with head() as made:
        yield made


@pytest.fixture
def start(ray_head: RayHead, tmp_path: Path) -> Iterator[Start]:
    made: list[Supervised] = []

    def start(**options: Any) -> Supervised:
        made.append(Supervised(tmp_path, ray_head, job=tmp_path.name, **options))
        made[-1].start()
        return made[-1]

    yield start
    for supervised in made:
        supervised.end()


def alive(pid: int) -> bool:
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1][:3]
    except OSError:
        return False


class Sidecar:
    """A sidecar's connection to the supervisor."""

    def __init__(self, supervised: Supervised, role: str = "sidecar") -> None:
        self.sock = sockets.dial(("127.0.0.1", supervised.settings.port), 10)
        handshake.greet(self.sock, keys.of_job(KEY), role=role, name="pod-0", job=supervised.job)
        self.sock.settimeout(40)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.sock.close()

    def say(self, **message: Any) -> None:
        sockets.send_message(self.sock, message)

    def hear(self) -> dict[str, Any]:
        return sockets.recv_message(self.sock)

    def hear_of(self, *names: str) -> dict[str, Any]:
        """The first list of exactly these feeders."""
        while True:
            message = self.hear()
            if message["type"] == "feeders" and [f["name"] for f in message["feeders"]] == list(names):
                return message


class Shouting(Squares):
    """Prints what it makes."""

    def __getitem__(self, i: int) -> torch.Tensor:
        sys.stdout.write(f"making {i}\n")
        sys.stdout.flush()
        os.write(2, f"native {i}\n".encode())
        return super().__getitem__(i)


@pytest.mark.thorough
def test_a_placed_feeder_serves_and_returns_after_kill_9(start: Start):
    supervised = start()
    with Sidecar(supervised) if supervised.wait(lambda s: True) else None as sidecar:
        (endpoint,) = sidecar.hear_of("feeder-0")["feeders"]
        with Receiver(
            endpoint["port"], supervised.link_key(endpoint["name"]), job=supervised.job
        ) as receiver:
            assert receiver.facts["instance"] == endpoint["instance"]
            bundle = receiver.know(bundle_of(Squares(), Path(supervised.settings.blob_folder)))
            receiver.ticket(0, [3], bundle)
            assert receiver.next().batch().tolist() == [9]
            os.kill(receiver.facts["pid"], signal.SIGKILL)
            killed = time.monotonic()
            with pytest.raises(ConnectionError):
                receiver.read()
        sidecar.hear_of()
        assert time.monotonic() - killed < 2, "receivers are told at once"
        (again,) = sidecar.hear_of("feeder-0")["feeders"]
        assert again["instance"] != endpoint["instance"]


def test_the_number_of_feeders_follows_1_3_0_2(start: Start):
    supervised = start()
    supervised.ready(1)
    gone = {}
    for feeders in (3, 0, 2):
        supervised.scale(feeders)
        found = supervised.ready(feeders)
        assert [f["name"] for f in found] == [f"feeder-{i}" for i in range(feeders)]
        wait_until(lambda: not any(map(alive, gone)), 10, "feeders that are not wanted have ended")
        gone = {f["pid"] for f in found}


def test_restarted_supervisor_adopts_feeders_number_and_output(start: Start, tmp_path: Path):
    supervised = start()
    supervised.ready(1)
    supervised.scale(2)
    before = supervised.ready(2)
    bundle = bundle_of(Shouting(), Path(supervised.settings.blob_folder))
    with Receiver(before[1]["port"], supervised.link_key(before[1]["name"]), job=supervised.job) as receiver:
        receiver.know(bundle)
        receiver.ticket(0, [3], bundle.id)
        assert receiver.next().kind is FrameKind.BODY
        wait_until(lambda: "[feeder-1] making 3" in supervised.output, 10, "output is shown")
        wait_until(lambda: "[feeder-1] native 3" in supervised.output, 10, "output of native code, too")
        supervised.kill()
        receiver.ticket(1, [4], bundle.id)
        assert receiver.next().kind is FrameKind.BODY, "feeders go on without a supervisor"
        supervised.start()
        after = supervised.ready(2)
        assert [f["instance"] for f in after] == [f["instance"] for f in before]
        wait_until(lambda: supervised.output.count("INFO feeder-1") >= 2, 5)
        receiver.ticket(2, [5], bundle.id)
        assert receiver.next().kind is FrameKind.BODY
        wait_until(
            lambda: "[feeder-1] making 5" in supervised.output, 10, "the adopted one's output is shown"
        )


def test_a_sigterm_leaves_the_feeders_and_a_stop_request_ends_them(start: Start):
    supervised = start()
    (feeder,) = supervised.ready(1)
    assert supervised.process is not None
    supervised.process.terminate()
    assert supervised.process.wait(10) == 0
    assert alive(feeder["pid"])
    supervised.start()
    supervised.wait(lambda s: s["ready"] == 1 and s["feeders"][0]["pid"] == feeder["pid"])
    supervised.ask("stop")
    assert supervised.process.wait(20) == 0
    wait_until(lambda: not alive(feeder["pid"]), 10, "the feeder has ended")


@pytest.mark.thorough
def test_frozen_feeder_is_replaced_when_a_receiver_reports_it(start: Start):
    supervised = start()
    (feeder,) = supervised.ready(1)
    os.kill(feeder["pid"], signal.SIGSTOP)
    with Sidecar(supervised) as sidecar:
        sidecar.hear_of("feeder-0")
        sidecar.say(type="replace", name="feeder-0", instance=feeder["instance"], reason="silent for 20 s")
        sidecar.hear_of()
        (again,) = sidecar.hear_of("feeder-0")["feeders"]
        assert again["instance"] != feeder["instance"]
    wait_until(lambda: not alive(feeder["pid"]), 15, "the frozen process has ended")


@pytest.mark.thorough
def test_feeder_without_room_is_reported_and_retried(start: Start):
    supervised = start(num_feeders=2, ready_timeout_s=8.0, feeder_resources={"feeder": 40.0})
    status = supervised.wait(lambda s: s["ready"] == 1 and any("no node has room" in n for n in s["notes"]))
    (waiting,) = [f for f in status["feeders"] if f["state"] != "ready"]
    assert re.search(r"feeder: 40 needed, \d+ of 64 free", waiting["why"])
    supervised.wait(lambda s: any("restarting it" in n for n in s["notes"]))
    supervised.wait(lambda s: s["feeders"][int(waiting["name"][-1])]["state"] == "placing")
    supervised.scale(1)
    supervised.ready(1)


def test_missing_blobs_reach_a_node_through_the_supervisor(start: Start, tmp_path: Path):
    supervised = start(feeder_blob_folder=str(tmp_path / "node"))
    (feeder,) = supervised.ready(1)
    trainer = BlobStore(tmp_path / "trainer")
    dataset = Squares()
    dataset.weights = torch.arange(12_000_000)  # type: ignore[attr-defined]
    bundle = bundle_of(dataset, trainer.folder)
    link_key = supervised.link_key(feeder["name"])
    with (
        Sidecar(supervised) as sidecar,
        Receiver(feeder["port"], link_key, job=supervised.job) as receiver,
    ):
        for digest, nbytes in bundle.blobs:
            sidecar.say(type="have", digest=digest, nbytes=nbytes)
        receiver.know(bundle)
        receiver.ticket(0, [3], bundle.id)
        assert receiver.read().kind is FrameKind.NEED_BUNDLE
        receiver.send_bundle(bundle.id)
        wanted = set()
        while len(wanted) < len(bundle.blobs):
            message = sidecar.hear()
            if message["type"] == "want":
                wanted.add(message["digest"])
                digest, nbytes = next(blob for blob in bundle.blobs if blob[0] == message["digest"])
                address = ("127.0.0.1", supervised.settings.port)
                upload(
                    address,
                    keys.derive(KEY, Holder.SIDECAR),
                    trainer,
                    digest,
                    nbytes,
                    name="pod-0",
                    job=supervised.job,
                )
        assert receiver.next().batch().tolist() == [9]
    assert wanted == {digest for digest, _ in bundle.blobs}


def test_supervisor_keeps_metrics_and_refuses_bad_requests(start: Start):
    supervised = start(num_feeders=0)
    supervised.ready(0)
    with Sidecar(supervised) as sidecar:
        sidecar.say(type="metrics", batches=7)
        supervised.wait(lambda s: s["sidecars"] == {"pod-0": {"batches": 7}})
    supervised.wait(lambda s: s["sidecars"] == {})
    for message, text in [
        ({"kind": "dance"}, "expected scale, status, stop or end, got 'dance'"),
        ({"kind": "scale", "feeders": -1}, "'feeders' must be from 0 to 4096, but is -1"),
        ({"kind": "scale", "feeders": "3"}, "but is '3'"),
    ]:
        with pytest.raises(ServiceError, match=text):
            supervised.ask(**message)


@pytest.mark.slow
def test_client_without_the_clusters_token_is_rejected(ray_head: RayHead, tmp_path: Path):
    wrong = tmp_path / "wrong"
    wrong.write_text("0" * 64)
    plain = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")}
    for env in (plain, {**plain, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(wrong)}):
        supervised = Supervised(tmp_path, ray_head)
        supervised.start(env)
        assert supervised.process is not None
        assert supervised.process.wait(60) == EXIT_RAY_LOST
        assert "RAY_AUTH_TOKEN_PATH" in supervised.output
    assert ray_head.token_path.stat().st_mode & 0o077 == 0
    home = ray_head.folder.parent / "home"
    assert not [p for p in home.rglob("*") if "ray" in p.name.lower()]


CALLS = [
    "/ray.rpc.NodeInfoGcsService/GetAllNodeInfo",
    "/ray.rpc.JobInfoGcsService/GetAllJobInfo",
    "/ray.rpc.InternalKVGcsService/InternalKVKeys",
    "/ray.rpc.NodeManagerService/GetNodeStats",
    "/ray.rpc.ObjectManagerService/Pull",
    "/ray.rpc.CoreWorkerService/GetCoreWorkerStats",
    "/ray.rpc.ReporterService/GetTraceback",
]


def called(port: int, method: str, metadata: list[tuple[str, str]]) -> str:
    """How a call of this method ends at a port, which need not be one for calls."""
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        try:
            channel.unary_unary(method)(b"", timeout=2, metadata=metadata)
        except grpc.RpcError as exc:
            return str(exc.code().name)
    return "OK"


def test_ray_ports_answer_no_call_without_the_clusters_token(start: Start, ray_head: RayHead):
    supervised = start()
    supervised.ready(1)
    ports = {
        connection.laddr.port
        for connection in psutil.net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN and connection.pid in ray_head.pids()
    }
    ended = {
        (port, method, bearer): called(port, method, [("authorization", f"Bearer {bearer}")] * bool(bearer))
        for port in ports
        for method in CALLS
        for bearer in ("", "0" * 64)
    }
    assert "OK" not in ended.values(), ended
    refusing = {method for (_, method, _), how in ended.items() if how == "UNAUTHENTICATED"}
    assert refusing == set(CALLS), ended
    token = ray_head.token_path.read_text()
    assert "OK" in {called(port, CALLS[0], [("authorization", f"Bearer {token}")]) for port in ports}


def test_key_and_token_appear_in_no_command_line_or_environment(start: Start, ray_head: RayHead):
    supervised = start()
    supervised.ready(1)
    assert supervised.process is not None
    pids = [*ray_head.pids(), supervised.process.pid]
    assert len(pids) >= 6
    secrets = [KEY, KEY.hex().encode(), ray_head.token_path.read_bytes().strip()]
    for path in (Path(f"/proc/{pid}/{name}") for pid in pids for name in ("cmdline", "environ")):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # a worker that has ended
            assert not any(secret in path.read_bytes() for secret in secrets), path


def test_unresponsive_head_ends_the_supervisor_with_the_likely_cause(tmp_path: Path, ray_head: RayHead):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        supervised = Supervised(tmp_path, ray_head, ray_address=address, init_timeout_s=3.0)
        supervised.start()
        assert supervised.process is not None
        assert supervised.process.wait(30) == EXIT_RAY_LATE
    assert "takes longer than 120 s to start" in supervised.output
    assert "spec.ray.managed.tuning" in supervised.output


@pytest.mark.slow
def test_killed_raylet_ends_supervisor_and_head_leaving_nothing(tmp_path: Path):
    with head() as made:
        supervised = Supervised(tmp_path, made)
        supervised.start()
        (feeder,) = supervised.ready(1)
        (raylet,) = [pid for pid, name in made.pids().items() if name == "raylet"]
        pids = made.pids()
        assert feeder["pid"] in pids
        assert made.alive()
        os.kill(raylet, signal.SIGKILL)
        assert supervised.process is not None
        assert supervised.process.wait(30) == EXIT_RAY_LOST
        wait_until(lambda: not made.alive(), 10, "the head knows that it is dead")
    assert not any(map(alive, pids))


@pytest.mark.slow
def test_head_ends_all_its_processes_even_those_that_ignore_signals(tmp_path: Path):
    with head() as made:
        supervised = Supervised(tmp_path, made, num_feeders=2)
        supervised.start()
        frozen, _ = supervised.ready(2)
        os.kill(frozen["pid"], signal.SIGSTOP)
        pids = made.pids()
        supervised.kill()
        made.stop(1.0)
        assert not any(map(alive, pids))
        assert made.pids() == {}


def test_a_folder_too_deep_for_sockets_is_refused(tmp_path: Path):
    with pytest.raises(InputError, match="at most 40 bytes"):
        RayHead(tmp_path / ("x" * 60))


SLOW_START = """
import os, sys, time
if any(os.path.basename(a) == "default_worker.py" for a in sys.orig_argv[1:3]):
    time.sleep(40)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "timeout_s", [pytest.param(10, id="dies-at-10-s"), pytest.param(120, id="lives-at-120-s")]
)
def test_worker_that_takes_40_s_to_start_depends_on_the_timeout(tmp_path: Path, timeout_s: int):
    (tmp_path / "slow").mkdir()
    (tmp_path / "slow" / "sitecustomize.py").write_text(SLOW_START)
    tuning = RayTuning(worker_register_timeout_s=timeout_s)
    with head(tuning=tuning, env={"PYTHONPATH": str(tmp_path / "slow")}) as made:
        supervised = Supervised(
            tmp_path, made, ready_timeout_s=100.0, worker_register_timeout_s=float(timeout_s)
        )  # fmt: skip
        supervised.start()
        before = set(made.pids())
        supervised.wait(lambda s: s["feeders"])
        workers = wait_until(lambda: set(made.pids()) - before, 20, "a worker process is started")
        worker, started = min(workers), time.monotonic()
        if timeout_s == 10:
            wait_until(lambda: not alive(worker), 25, "the raylet kills the worker")
            assert time.monotonic() - started > 5
            status = supervised.wait(lambda s: "workerRegisterTimeoutSeconds" in s["notes"][0])
            assert status["ready"] == 0
            wait_until(lambda: set(made.pids()) - before - workers, 20, "it tries again, in vain")
        else:
            (feeder,) = supervised.ready(1, 90)
            assert time.monotonic() - started > 35
            assert os.getsid(feeder["pid"]) == os.getsid(worker), "the host that this worker started"
            assert alive(worker)
        supervised.kill()


@pytest.mark.slow
def test_health_checks_use_the_tuned_values(tmp_path: Path):
    """A frozen raylet is declared dead after about threshold x period, not after Ray's 25 s."""
    tuning = RayTuning(
        health_check_initial_delay_s=0.5, health_check_period_s=0.5, health_check_timeout_s=0.5,
        health_check_failure_threshold=2,
    )  # fmt: skip
    code = (
        "import ray, sys, time, os, signal\n"
        "ray.init(address=sys.argv[1], configure_logging=False, log_to_driver=False)\n"
        "os.kill(int(sys.argv[2]), signal.SIGSTOP)\n"
        "t = time.time()\n"
        "while any(n['Alive'] for n in ray.nodes()) and time.time() - t < 40: time.sleep(0.1)\n"
        "print(f'dead after {time.time() - t:.1f}', flush=True)\n"
        "os._exit(0)\n"
    )
    with head(tuning=tuning) as made:
        (raylet,) = [pid for pid, name in made.pids().items() if name == "raylet"]
        time.sleep(1)
        done = subprocess.run(
            [sys.executable, "-c", code, made.address, str(raylet)],
            env={**os.environ, **made.env()}, capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip
    seconds = float(done.stdout.rsplit("dead after", 1)[1])
    assert seconds < 8, done.stderr


@pytest.mark.slow
def test_feeder_killed_by_rays_memory_monitor_is_reported_out_of_memory(tmp_path: Path):
    """More than a hundredth of this machine's memory is always in use: each feeder is killed as soon as it is up."""
    monitor = {"RAY_memory_monitor_refresh_ms": "200", "RAY_memory_usage_threshold": "0.01"}
    with head(**monitor) as made:
        field = "spec.feeders.resources.limits.memory"
        supervised = Supervised(tmp_path, made, num_feeders=1, memory_field=field)
        supervised.start()
        began = time.monotonic()
        status = supervised.wait(lambda s: s["feeders"] and s["feeders"][0]["cause"] == "OutOfMemory")
        assert time.monotonic() - began < 60
        why = status["feeders"][0]["why"]
        assert why.startswith("Ray's memory monitor killed its process because its node ran out of memory")
        assert why.endswith(f": raise {field}, or make batches smaller")
        assert re.search(r"with [0-9.]+GB of [0-9.]+GB in use", why), why
        assert status["notes"] == [f"feeder-0: {why}"]
        supervised.kill()


def test_rays_memory_monitor_runs_only_if_there_is_room_for_tasks():
    assert RayHead(Path("/tmp/a")).defaults() == {"RAY_memory_monitor_refresh_ms": "0"}
    assert RayHead(Path("/tmp/b"), tasks=RayTasks(cpus=1)).defaults() == {}
