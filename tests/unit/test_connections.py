"""What a node's kernel tracked, read as connections of pods."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from connections import SCRIPT, Connection, Recorder, parse, parse_line, shut
from network_policies import Cluster, Pod

BATCHES = (
    "ipv4     2 tcp      6 86399 ESTABLISHED src=10.244.1.17 dst=10.244.1.16 sport=54218 dport=43367"
    " src=10.244.1.16 dst=10.244.1.17 sport=43367 dport=54218 [ASSURED] mark=0 zone=0 use=2"
)
LOOKUP = (
    "ipv4     2 udp      17 18 src=10.244.1.17 dst=10.96.0.10 sport=35313 dport=53"
    " src=10.244.0.3 dst=10.244.1.17 sport=53 dport=35313 mark=0 zone=0 use=2"
)
UNANSWERED = (
    "ipv4     2 tcp      6 110 SYN_SENT src=10.244.1.18 dst=10.244.2.12 sport=40100 dport=6400 [UNREPLIED]"
    " src=10.244.2.12 dst=10.244.1.18 sport=6400 dport=40100 mark=0 zone=0 use=2"
)
MASQUERADED = (
    "ipv4     2 tcp      6 59 TIME_WAIT src=10.244.1.18 dst=52.216.0.1 sport=40200 dport=443"
    " src=52.216.0.1 dst=172.18.0.3 sport=443 dport=61000 [ASSURED] mark=0 zone=0 use=2"
)
BY_CONNTRACK = (
    "tcp      6 431999 ESTABLISHED src=10.244.2.10 dst=10.96.0.1 sport=53378 dport=443"
    " src=172.18.0.2 dst=10.244.2.10 sport=6443 dport=53378 [ASSURED] mark=0 use=1"
)
BY_IPV6 = (
    "ipv6     10 tcp      6 98 TIME_WAIT src=fd00:0010:0000:0000:0000:0000:0000:0002 dst=fd00:10::3 sport=40300"
    " dport=6400 src=fd00:10::3 dst=fd00:10::2 sport=6400 dport=40300 [ASSURED] mark=0 zone=0 use=2"
)
PING = (
    "ipv4     2 icmp     1 29 src=10.244.1.18 dst=10.244.2.12 type=8 code=0 id=5"
    " src=10.244.2.12 dst=10.244.1.18 type=0 code=0 id=5 mark=0 zone=0 use=2"
)
AT_HOME = (
    "ipv4     2 udp      17 0 src=127.0.0.1 dst=127.0.0.11 sport=52648 dport=53"
    " src=127.0.0.11 dst=127.0.0.1 sport=39179 dport=52648 mark=0 zone=0 use=2"
)
ROUTES = """Main:
  +-- 10.244.1.0/24 3 0 4
     |-- 10.244.1.0
        /24 link UNICAST
     |-- 10.244.1.1
        /32 host LOCAL
     |-- 172.18.0.3
        /32 host LOCAL
     |-- 172.18.255.255
        /32 link BROADCAST
"""


@pytest.mark.parametrize(
    ("line", "connection"),
    [
        pytest.param(BATCHES, Connection("10.244.1.17", "10.244.1.16", 43367, "TCP"), id="tcp"),
        pytest.param(LOOKUP, Connection("10.244.1.17", "10.244.0.3", 53, "UDP"), id="through-a-service"),
        pytest.param(UNANSWERED, Connection("10.244.1.18", "10.244.2.12", 6400, "TCP"), id="unanswered"),
        pytest.param(MASQUERADED, Connection("10.244.1.18", "52.216.0.1", 443, "TCP"), id="to-the-outside"),
        pytest.param(BY_CONNTRACK, Connection("10.244.2.10", "172.18.0.2", 6443, "TCP"), id="by-conntrack"),
        pytest.param(BY_IPV6, Connection("fd00:10::2", "fd00:10::3", 6400, "TCP"), id="ipv6"),
        pytest.param(PING, None, id="no-ports"),
        pytest.param(AT_HOME, None, id="within-the-node"),
        pytest.param("local 10.244.1.1", None, id="an-address"),
        pytest.param("", None, id="empty"),
    ],
)
def test_entry_gives_the_originator_and_the_real_destination(
    line: str, connection: Connection | None
) -> None:
    assert parse_line(line) == connection


def test_connections_seen_by_several_nodes_are_reported_once() -> None:
    recording = parse([f"local 10.244.1.1\n{BATCHES}\n{LOOKUP}\n", f"local 10.244.2.1\n{BATCHES}\n"])
    assert len(recording.connections) == 2
    assert recording.nodes == (frozenset({"10.244.1.1"}), frozenset({"10.244.2.1"}))


class Node:
    """A folder with a kernel's tables, as the script reads them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()
        (folder / "fib_trie").write_text(ROUTES)
        self.track()

    def track(self, *lines: str) -> None:
        new = self.folder / "new"
        filling = "x" * 8192  # some awks read a pipe only once so much is in it
        new.write_text("".join(f"{line}\n" for line in [*lines, filling]))
        os.replace(new, self.folder / "nf_conntrack")

    def recorder(self, out: Path) -> Recorder:
        return Recorder(["n"], out, enter=lambda node: [], arguments=[str(self.folder), "0.05"])


def until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline, f"not within 20 s: {what}"
        time.sleep(0.02)


def test_connections_during_recording_are_kept_and_reported_once(tmp_path: Path) -> None:
    node = Node(tmp_path / "net")
    with node.recorder(tmp_path) as recorder:
        out = tmp_path / "connections-n.out"
        until(lambda: "local 10.244.1.1" in out.read_text(), "addresses")
        node.track(BATCHES)
        until(lambda: "dport=43367" in out.read_text(), "a connection")
        node.track(BATCHES.replace("54218", "54999"), LOOKUP, PING)
        until(lambda: "dport=53" in out.read_text(), "another")
        node.track(BATCHES)
    seen = recorder.recording()
    assert {c.port for c in seen.connections} == {43367, 53}
    assert seen.nodes == (frozenset({"10.244.1.1", "172.18.0.3"}),)
    assert out.read_text().count("dport=43367") == 1, "the ports that each connection draws are no difference"


def words(process: psutil.Process) -> list[str]:
    """Its command line; none once it has ended."""
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def test_connections_open_at_the_end_are_recorded_too(tmp_path: Path) -> None:
    node = Node(tmp_path / "net")
    mine = psutil.Process()
    recorder = Recorder(["n"], tmp_path, enter=lambda _: [], arguments=[str(node.folder), "600"])
    with recorder:
        until(lambda: any("timeout" in words(p) for p in mine.children(recursive=True)), "waiting")
        node.track(UNANSWERED)
    assert recorder.recording().connections == {Connection("10.244.1.18", "10.244.2.12", 6400, "TCP")}


def test_the_script_ends_with_its_input(tmp_path: Path) -> None:
    """So nothing is left on a node when the recording process is killed."""
    node = Node(tmp_path / "net")
    command = ["sh", "-c", SCRIPT.read_text(), "connections", str(node.folder), "600"]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=30)
    assert (done.returncode, done.stderr) == (0, b"")


@pytest.mark.parametrize(
    ("programs", "why"),
    [
        (["sh"], "awk is needed on the node"),
        (["sh", "awk"], "timeout is needed on the node"),
        (["sh", "awk", "timeout"], "or the program conntrack: found neither"),
    ],
)
def test_node_that_cannot_record_is_an_error(tmp_path: Path, programs: list[str], why: str) -> None:
    for program in programs:
        (tmp_path / program).symlink_to(str(shutil.which(program)))
    env = ["env", f"PATH={tmp_path}"]
    with Recorder(["n"], tmp_path, enter=lambda _: env, arguments=[str(tmp_path)]) as recorder:
        pass
    with pytest.raises(RuntimeError, match=f"a recording of n is needed, it ended with 1: .*{why}"):
        recorder.recording()


def test_local_connections_are_recorded_if_the_kernel_tracks_them(tmp_path: Path) -> None:
    if not os.access("/proc/net/nf_conntrack", os.R_OK) or not Path("/proc/net/nf_conntrack").read_text():
        pytest.skip("the kernel tracks no connections here")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
        except OSError:
            pytest.skip("this machine has no address but the loopback's")
        address = probe.getsockname()[0]
    recorder = Recorder(["n"], tmp_path, enter=lambda _: [], arguments=["/proc/net", "0.2"])
    with recorder, socket.create_server((address, 0)) as server:
        port = server.getsockname()[1]
        socket.create_connection((address, port)).close()
    assert Connection(address, address, port, "TCP") in recorder.recording().connections
    assert any(address in node for node in recorder.recording().nodes)


def test_recorded_connections_are_judged_by_the_pods_that_made_them() -> None:
    trainer = Pod(
        name="trainer", namespace="team", labels={"role": "trainer"}, ips=("10.244.1.18",), node="172.18.0.3"
    )
    head = Pod(name="head", namespace="team", ips=("10.244.2.12",), node="172.18.0.4")
    rule = {"from": [{"podSelector": {"matchLabels": {"role": "trainer"}}}], "ports": [{"port": 6400}]}
    policy = {"metadata": {"name": "p", "namespace": "team"}, "spec": {"podSelector": {}, "ingress": [rule]}}
    other = UNANSWERED.replace("6400", "6379")
    probe = UNANSWERED.replace("10.244.1.18", "10.244.2.1").replace("6400", "9400")
    recording = parse([f"{UNANSWERED}\n{other}\n", f"local 10.244.2.1\nlocal 172.18.0.4\n{probe}\n"])
    cluster = Cluster(policies=(policy,), pods=(trainer, head), nodes=recording.nodes)
    assert shut(recording, cluster) == [
        "pod team/trainer to pod team/head TCP 6379: out: no policy; in: shut by team/p"
    ]
