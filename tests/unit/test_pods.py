"""Decisions and small parts of the pods' main processes, without Ray."""

from __future__ import annotations

import importlib.metadata
import json
import logging
import os
import signal
import socket
from pathlib import Path
from typing import Any

import pytest
from manifests import manifest
from rig import until

from dataloaderjob.api import parse_object
from dataloaderjob.core.errors import InputError, ServiceError
from dataloaderjob.core.settings import FeederSettings, RayTasks, RayTuning, SupervisorSettings, load
from dataloaderjob.pod import entry, feeder, reaping
from dataloaderjob.pod.entry import (
    CRASH_WINDOW_S,
    MAX_CRASHES,
    MAX_RAY_EXITS,
    FeederPodSettings,
    HeadSettings,
    Restarts,
    fresh_folder,
    read_token,
    split_address,
)
from dataloaderjob.pod.feeder import Backlog
from dataloaderjob.pod.head import Head, agent_settings
from dataloaderjob.pod.supervisor import feeders_wanted, supervisor_settings
from dataloaderjob.providers.provider import feeder_settings
from dataloaderjob.providers.ray import actor
from dataloaderjob_operator.objects import OperatorConfig
from dataloaderjob_operator.objects import settings as built
from processes import alive, go_on, line, script

JOB = parse_object(
    manifest(
        {
            "metadata.uid": "u-1",
            "metadata.namespace": "team",
            "spec.feeders.processesPerPod": 3,
            "spec.ray.managed.tuning.workerRegisterTimeoutSeconds": 77,
            "spec.ray.managed.tuning.healthCheck.periodMs": 1500,
        }
    )
)

SETUP = OperatorConfig(version="1.0", sidecar_image="i:1", root_key=b"r" * 32)


def written(folder: Path, content: Any) -> Path:
    path = folder / "settings.json"
    path.write_text(json.dumps(content))
    return path


def test_settings_written_by_the_operator_are_read_by_the_pods(tmp_path: Path):
    head = load(HeadSettings, written(tmp_path, built.head(JOB, SETUP)))
    feeder = load(FeederPodSettings, written(tmp_path, built.feeder(JOB, SETUP)))
    assert head.tuning == feeder.tuning == JOB.spec.ray.managed.tuning.settings()
    assert isinstance(head.tuning, RayTuning)
    assert (head.tuning.worker_register_timeout_s, head.tuning.health_check_period_s) == (77, 1.5)
    assert feeder.processes == 3
    assert split_address(feeder.head) == (head.host, head.gcs_port)
    assert head.job == feeder.job == "team/mnist/u-1"


def test_room_for_tasks_is_in_the_settings_only_if_configured(tmp_path: Path):
    assert "tasks" not in built.feeder(JOB, SETUP), "the ConfigMaps of jobs without it stay as they are"
    made = parse_object(
        manifest({"metadata.uid": "u-1", "spec.ray.managed.tasks": {"cpus": 2, "objectStore": "1Gi"}})
    )
    found = load(FeederPodSettings, written(tmp_path, built.feeder(made, SETUP)))
    assert found.tasks == RayTasks(cpus=2, object_store_nbytes=1 << 30)


def test_unknown_settings_of_a_later_operator_are_ignored_with_one_line(tmp_path: Path, capsys):
    later = {
        **built.head(JOB, SETUP),
        "speed": 7,
        "tuning": {"health_check_period_s": 2.0, "grace": {"a": 1}},
    }
    found = load(HeadSettings, path := written(tmp_path, later))
    assert found.tuning == RayTuning(health_check_period_s=2.0)
    assert capsys.readouterr().err == (
        f"settings for HeadSettings in {path} have fields that this version does not know, and that it "
        "ignores: speed, tuning.grace\n"
    )


def test_settings_missing_from_an_earlier_operator_get_defaults(tmp_path: Path, capsys):
    earlier = {
        name: value
        for name, value in built.head(JOB, SETUP).items()
        if name not in ("ray_version", "count_path")
    }
    found = load(HeadSettings, written(tmp_path, earlier))
    assert (found.ray_version, feeders_wanted(found)) == (None, 1)
    assert capsys.readouterr().err == ""


def test_required_key_is_named(tmp_path: Path):
    content = {name: value for name, value in built.head(JOB, SETUP).items() if name != "host"}
    with pytest.raises(InputError, match=r"HeadSettings in .* lack host: add"):
        load(HeadSettings, written(tmp_path, content))


def test_head_starts_with_the_current_number_of_feeders(tmp_path: Path):
    count = tmp_path / "feeders"
    head = load(HeadSettings, written(tmp_path, {**built.head(JOB, SETUP), "count_path": str(count)}))
    with pytest.raises(InputError, match=r"cannot read the number of feeders from .*feeders"):
        feeders_wanted(head)
    count.write_text("12")
    assert feeders_wanted(head) == 12


def test_tuning_that_is_not_an_object_is_refused(tmp_path: Path):
    with pytest.raises(InputError, match=r"RayTuning in .* must be a JSON object"):
        load(HeadSettings, written(tmp_path, {**built.head(JOB, SETUP), "tuning": 5}))


def test_the_supervisor_of_a_pod_serves_other_pods(tmp_path: Path):
    head = load(HeadSettings, written(tmp_path, {**built.head(JOB, SETUP), "count_path": None}))
    made = supervisor_settings(head, num_feeders=2)
    assert isinstance(made, SupervisorSettings)
    assert (made.bind_host, made.feeder_bind_host) == ("::", "::")
    assert (made.feeder_supervisor_host, made.port) == (head.host, head.supervisor_port)
    assert made.feeder_key_path == made.key_path == head.key_path
    assert made.feeder_resources == {"feeder": 1.0}
    assert (made.provider, made.ray_address) == ("remote", ""), "it knows no Ray"
    agent = agent_settings(head, "10.0.0.7:6379")
    assert (agent.provider, agent.ray_address) == ("ray", "10.0.0.7:6379")
    assert agent.provider_socket == made.provider_socket
    for index in range(2):
        assert feeder_settings(agent, index, 2, "s", "k") == feeder_settings(made, index, 2, "s", "k")
    assert made.ready_timeout_s > head.tuning.worker_register_timeout_s
    assert all(Path(head.temp_dir) in Path(p).parents for p in (made.blob_folder, made.feeder_blob_folder))


@pytest.mark.parametrize("address", ["head", "head:", ":6379", "head:0", "head:65536", "head:gcs"])
def test_invalid_address_is_refused(address: str):
    with pytest.raises(InputError, match="must be host:port"):
        split_address(address)


def test_address_is_split_into_host_and_port():
    assert split_address("mnist-head:6379") == ("mnist-head", 6379)
    assert split_address("[fd00::7]:6379") == ("fd00::7", 6379)


def test_missing_token_is_reported_by_path(tmp_path: Path):
    with pytest.raises(InputError, match=r"token of the job's Ray cluster from .*/ray: .*No such file"):
        read_token(str(tmp_path / "ray"))
    (tmp_path / "ray").write_text("\n")
    with pytest.raises(InputError, match="the file is empty"):
        read_token(str(tmp_path / "ray"))


def test_supervisor_is_restarted_at_once_then_slower_then_given_up():
    restarts = Restarts("the supervisor")
    delays = [restarts.ended(-9, now=float(i)) for i in range(MAX_CRASHES)]
    assert delays == [0.0, 0.5, 1.0, 2.0, 4.0, 8.0]
    with pytest.raises(ServiceError, match="7 times within 120 s"):
        restarts.ended(-9, now=float(MAX_CRASHES))


def test_deaths_long_ago_are_forgotten():
    restarts = Restarts("the supervisor")
    assert [restarts.ended(1, now=i * CRASH_WINDOW_S) for i in range(20)] == [0.0] * 20


def test_process_apart_from_ray_is_restarted_as_often_as_ray_is():
    restarts = Restarts("the supervisor", max_ray_exits=None)
    assert [restarts.ended(4, now=200.0 * i) for i in range(20)] == [0.0] * 20


def test_supervisor_that_keeps_failing_with_ray_needs_another_ray():
    restarts = Restarts("the supervisor")
    assert [restarts.ended(3, now=200.0 * i) for i in range(MAX_RAY_EXITS - 1)] == [0.0] * (MAX_RAY_EXITS - 1)
    with pytest.raises(ServiceError, match="3 times because it cannot work with Ray"):
        restarts.ended(3, now=200.0 * MAX_RAY_EXITS)
    restarts = Restarts("the supervisor")
    assert [restarts.ended(code, now=200.0 * i) for i, code in enumerate([3, 3, 1, 4, 4, 1])] == [0.0] * 6


def test_leftovers_of_an_earlier_container_are_removed_and_nothing_else(tmp_path: Path):
    for name in ("session_1/logs", "node/blobs"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "old").write_text("x")
    (tmp_path / "session_latest").symlink_to(tmp_path / "session_1")
    (tmp_path / "ray_current_cluster").write_text("10.0.0.7:6379")
    (tmp_path / "others").mkdir()
    folder = fresh_folder(tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["node", "others"]
    assert list(folder.iterdir()) == []
    assert fresh_folder(tmp_path / "new") == tmp_path / "new" / "node"


def test_backlog_drops_excess_lines_and_reports_how_many():
    backlog = Backlog(max_nbytes=10)
    for text in (b"12345", b"67890", b"lost", b"lost"):
        backlog.put(1, text)
    assert backlog.take() == [(1, b"12345"), (1, b"67890")]
    backlog.put(2, b"more")
    (fd, note), more = backlog.take() or []
    assert fd == 2
    assert note.startswith(b"[pod] omitted 2 lines")
    assert more == (2, b"more")
    for _ in range(4):
        backlog.put(1, b"12345")
    backlog.end()
    assert len(backlog.take() or []) == 3
    assert backlog.take() is None


def test_feeder_in_a_pod_keeps_its_blobs_in_its_own_nodes_folder():
    settings = FeederSettings(job="j", key_path="k", blob_folder="/the/heads")
    assert actor.at_home(settings, Path("/here")).blob_folder == "/here/blobs"


POD = """
import sys
from pathlib import Path
from dataloaderjob.pod.feeder import Output
from dataloaderjob.pod.readiness import Feeders
output = Output(Path(sys.argv[1]) / "feeders", Feeders())
print("up", flush=True)
input()
output.close()
"""
FEEDER = """
import os, subprocess, sys
from pathlib import Path
from dataloaderjob.providers.provider import feeder_settings
from dataloaderjob.providers.ray import actor
from dataloaderjob.core.acceptor import Acceptor
actor.hand_over("feeder-3", Path(sys.argv[1]))
"""
SAYS = """
print(":actor_name:feeder-3")
print("from Python", flush=True)
os.write(2, b"native\\n")
subprocess.run(["sh", "-c", "echo child > /dev/stderr"])
os.write(1, b"no end of line")
"""


def test_output_of_a_feeder_appears_in_its_pod_under_its_name(tmp_path: Path):
    with script(POD, tmp_path) as pod:
        assert line(pod) == "up"
        with script(FEEDER + SAYS, tmp_path) as feeder:
            assert feeder.wait(20) == 0, feeder.stderr.read()
            assert (feeder.stdout.read(), feeder.stderr.read()) == ("", "")
        go_on(pod)
        out, err = pod.communicate(timeout=20)
    assert out.splitlines() == ["[feeder-3] from Python", "[feeder-3] no end of line"]
    assert sorted(err.splitlines()) == ["[feeder-3] child", "[feeder-3] native"]


def test_a_feeder_does_not_wait_for_readers_of_its_pod(tmp_path: Path):
    much = "for _ in range(400): os.write(1, (b'x' * 999 + b'\\n') * 64)\n"  # 25 MB
    with script(POD, tmp_path) as pod:
        assert line(pod) == "up"
        with script(FEEDER + much, tmp_path) as feeder:
            assert feeder.wait(30) == 0, "it ended, though nobody has read a line"
        pod.stdin.write("\n")
        pod.stdin.flush()
        out, err = pod.communicate(timeout=20)
    assert 0 < len(out.splitlines()) < 400 * 64
    assert "lines" in err


def test_output_without_a_pod_stays_in_place(tmp_path: Path):
    with script(FEEDER + "print('here')", tmp_path) as feeder:
        out, err = feeder.communicate(timeout=20)
    assert out == "here\n"
    assert "stays in Ray's files" in err


INIT = """
import ctypes, os, subprocess, sys, time
from dataloaderjob.pod import entry
ctypes.CDLL(None).prctl(36, 1)  # PR_SET_CHILD_SUBREAPER: what PID 1 is to its container

def main():
    import signal
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))
    orphan = subprocess.run(["sh", "-c", "sleep 0.1 >/dev/null & echo $!"], capture_output=True, text=True)
    own = subprocess.run(["sh", "-c", "exit 5"])
    print(orphan.stdout.strip(), own.returncode, flush=True)
    for _ in range(6000):
        time.sleep(0.01)  # a signal just before a long sleep is handled only after it

sys.exit(entry.reap(main))
"""


def test_pid_1_reaps_orphans_forwards_signals_and_exits_like_its_main():
    with script(INIT) as process:
        orphan, code = map(int, line(process).split())
        assert code == 5, "exit codes of its own children reach the main process"
        until(lambda: not Path(f"/proc/{orphan}").exists(), 10, "the orphan is no zombie")
        assert alive(process.pid)
        process.send_signal(signal.SIGTERM)
        assert process.wait(10) == 7


HEARS = """
import ctypes, os, signal, subprocess, sys, time
from dataloaderjob.pod import entry, reaping
ctypes.CDLL(None).prctl(36, 1)  # PR_SET_CHILD_SUBREAPER, as above

def orphan(script):
    made = subprocess.run(["sh", "-c", f"({script}) >/dev/null 2>&1 & echo $!"], capture_output=True, text=True)
    return int(made.stdout)

def main():
    many = int(sys.argv[1])
    for _ in range(many):
        subprocess.run(["sh", "-c", "true & true"])
    sleeper, failing = orphan("sleep 60"), orphan("sleep 0.1; exit 3")
    os.kill(sleeper, signal.SIGKILL)
    print(reaping.how_ended(sleeper), "/", reaping.how_ended(failing), "/", reaping.how_ended(None), flush=True)

sys.exit(entry.reap(main))
"""


def test_main_process_learns_the_exits_of_processes_it_did_not_start():
    with script(HEARS.replace("sys.argv[1]", "'3'")) as process:
        assert line(process) == "was killed by SIGKILL / ended with exit code 3 / ended"


MERGED = """
import os, subprocess
from dataloaderjob.pod import reaping

children = [subprocess.Popen(["sh", "-c", f"exit {code}"]) for code in (1, 2, 3)]
main = subprocess.Popen(["sh", "-c", "exit 7"])
for child in (*children, main):
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
reader, writer = os.pipe2(os.O_NONBLOCK)
code = reaping._reap_all(main.pid, reader, writer)
ends = reaping.Ends()
ends.listen(reader)
print(code, [ends.code(child.pid) for child in children], flush=True)
"""


def test_processes_that_end_at_once_are_all_reaped_after_one_signal():
    with script(MERGED) as process:
        assert line(process) == "7 [1, 2, 3]"


def test_unread_exits_of_months_leave_room_for_the_newest():
    reader, writer = os.pipe2(os.O_NONBLOCK)
    for pid in range(1, 20_000):
        reaping._tell(reader, writer, reaping._END.pack(pid, 0))
    reaping._tell(reader, writer, reaping._END.pack(20_000, -9))
    ends = reaping.Ends()
    ends.listen(reader)
    assert ends.code(20_000) == -9


def test_killed_main_process_gives_a_shells_exit_code():
    text = INIT.replace("print(orphan", "print(os.getpid()); print(orphan")
    with script(text) as process:
        os.kill(int(line(process)), signal.SIGKILL)
        assert process.wait(10) == 128 + signal.SIGKILL


def test_node_joining_a_lost_head_exits_instead_of_waiting(monkeypatch):
    moments = iter(range(0, 1000, 10))
    monkeypatch.setattr(feeder.time, "monotonic", lambda: float(next(moments)))
    with socket.create_server(("127.0.0.1", 0)) as head:
        address = head.getsockname()
        there = feeder.StillThere(address)
        for _ in range(20):
            there()
    for _ in range(feeder.GONE_AFTER - 1):
        there()
    with pytest.raises(ServiceError, match=f"127.0.0.1:{address[1]} disappeared"):
        there()


def test_head_refuses_an_image_with_a_ray_version_not_requested(monkeypatch):
    monkeypatch.setattr(entry.importlib.metadata, "version", lambda _: "2.56.1")
    for fits in (None, "2.56", "2.56.1"):
        entry.check_ray(fits)
    for other in ("2.5", "2.57", "2.56.0", "2.56.10"):
        with pytest.raises(
            InputError, match=f"spec.ray.managed.version is {other}, but this image has Ray 2.56.1"
        ):
            entry.check_ray(other)


def test_a_head_in_an_image_with_another_ray_does_not_start(tmp_path: Path):
    key = tmp_path / "key"
    key.write_bytes(b"k" * 32)
    fields = {**built.head(JOB, SETUP), "key_path": str(key), "ray_version": "9.9"}
    settings, installed = load(HeadSettings, written(tmp_path, fields)), importlib.metadata.version("ray")
    with pytest.raises(
        InputError,
        match=f"^spec.ray.managed.version is 9.9, but this image has Ray {installed}: use an image",
    ):
        Head(settings, watch=None)


def test_head_settings_include_the_requested_ray_version(tmp_path: Path):
    asked = parse_object(
        manifest({"metadata.uid": "u-1", "metadata.namespace": "team", "spec.ray.managed.version": "2.60.0"})
    )
    assert load(HeadSettings, written(tmp_path, built.head(asked, SETUP))).ray_version == "2.60.0"
    assert load(HeadSettings, written(tmp_path, built.head(JOB, SETUP))).ray_version is None


def test_ray_flags_are_passed_on_and_conflicting_variables_reported(caplog):
    given = {"RAY_memory_usage_threshold": "0.9", "RAY_ADDRESS": "x:1", "HOME": "/tmp"}
    with caplog.at_level(logging.WARNING):
        assert entry.node_environment(given) == {"RAY_memory_usage_threshold": "0.9", "HOME": "/tmp"}
    assert "not passed on to Ray, because dataloaderjob sets it up: RAY_ADDRESS" in caplog.text
