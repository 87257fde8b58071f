"""Jobs whose connections are under TLS: real feeders, sidecars and supervisors. Batches are the same as without, nobody
on the path can read them, and a peer with other settings or certificates learns what to change."""

from __future__ import annotations

import itertools
import json
import select
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from batches import Numbers
from generations import TWO_PERIODS, Generations
from local_runs import LocalRun, Project, digest
from ports import reserve_port
from rig import Rig, until
from sniffer import Sniffer
from supervisor_alone import SupervisorAlone

from dataloaderjob import DataLoader
from dataloaderjob.core import handshake, keys, sockets, supervision
from dataloaderjob.core.acceptor import Acceptor
from dataloaderjob.core.blobs import BlobStore
from dataloaderjob.core.credentials import Credentials
from dataloaderjob.core.errors import AuthError, ServiceError
from dataloaderjob.core.generations import PERIOD, Schedule
from dataloaderjob.core.keys import Holder, Part
from dataloaderjob.core.settings import FeederSettings
from dataloaderjob.feeder.blobs import BlobFetcher
from dataloaderjob.feeder.connections import Registration
from dataloaderjob.local.certificates import tls_folder
from dataloaderjob.local.status import LiveRun, live_runs
from dataloaderjob.sidecar.supervisor_client import SupervisorClient, upload

KEY, JOB = bytes(range(32)), "team/mnist/u-1"
SECRET = b"a sample that nobody on the path may read"


class Samples(torch.utils.data.Dataset[torch.Tensor]):
    """Each sample begins with SECRET, and differs from all others behind it."""

    def __len__(self) -> int:
        return 200

    def __getitem__(self, index: int) -> torch.Tensor:
        text = torch.frombuffer(bytearray(SECRET), dtype=torch.uint8)
        return torch.cat([text, torch.full((40_000,), index % 251, dtype=torch.uint8)])


class SniffedRig(Rig):
    """Its sidecar reaches its one feeder over TCP, through a relay that keeps what it sees."""

    sniffer: Sniffer

    def __init__(self, **options: Any) -> None:
        super().__init__(1, shares_memory=False, **options)

    def __exit__(self, *exc: object) -> None:
        super().__exit__(*exc)
        self.sniffer.close()

    def endpoints(self) -> list[tuple[Any, ...]]:
        ((name, instance, host, port),) = super().endpoints()
        if not hasattr(self, "sniffer"):
            self.sniffer = Sniffer((host, port))
        return [(name, instance, *self.sniffer.address)]


@pytest.fixture(scope="module")
def rig() -> Iterator[SniffedRig]:
    with SniffedRig(tls=True) as made:
        yield made


def digest_of_an_epoch(dataset: Any, *, at_batch: Any = lambda number: None) -> str:
    loader = DataLoader(dataset, batch_size=4)
    for number, _ in enumerate(loader):
        at_batch(number)
    return str(loader.digest)


def test_batches_under_tls_are_the_same_and_unreadable_on_the_path(rig: SniffedRig) -> None:
    before = len(rig.sniffer.seen)
    under_tls = digest_of_an_epoch(Samples())
    assert len(rig.sniffer.seen) - before > 200 * 40_000
    assert SECRET not in rig.sniffer.seen
    with SniffedRig() as plain:
        assert digest_of_an_epoch(Samples()) == under_tls
        assert SECRET in plain.sniffer.seen


def test_certificates_are_renewed_during_a_stream(rig: SniffedRig) -> None:
    expected = digest_of_an_epoch(Numbers(400))
    assert rig.certificates is not None
    rig.certificates.schedule = Schedule(rig.certificates.schedule.began - PERIOD)
    connections = rig.sniffer.connections

    def renew(number: int) -> None:
        if number == 20:
            rig.certificates.add(1)
            rig.certificates.remove(0)
            time.sleep(1.1)  # processes look at the folder once a second
        if number == 30:
            rig.sniffer.cut()

    assert digest_of_an_epoch(Numbers(400), at_batch=renew) == expected
    assert rig.sniffer.connections > connections


@pytest.fixture
def plain() -> Iterator[SniffedRig]:
    with SniffedRig() as made:
        yield made


def no_tls(_: Path) -> str:
    return ""


def another_jobs(folder: Path) -> str:
    return str(tls_folder(Generations(folder, seed=b"o" * 32).home, Part.SIDECAR))


def expired(folder: Path) -> str:
    return str(tls_folder(Generations(folder, age=TWO_PERIODS + timedelta(days=1)).home, Part.SIDECAR))


def no_batch(rig: SniffedRig, name: str, certificates: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """Returns what is logged by both sides, of which one has these certificates."""
    path = rig.another_sidecar(name, tls_folder=certificates, batch_deadline_s=2.0)
    monkeypatch.setenv("DATALOADERJOB_SOCKET", path)
    with pytest.raises(ServiceError):
        next(iter(DataLoader(Numbers(8), batch_size=4)))
    return rig.logs()


@pytest.mark.parametrize(
    ("certificates", "text"),
    [
        (another_jobs, "it is not from this job's authority: it belongs to another job"),
        (expired, "certificate expired; the operator renews a job's certificates"),
        (no_tls, "this job has spec.loader.tls: true, but the connection does not use TLS: update this pod's image"),
    ],
    ids=["another-job", "expired", "without-tls"],
)  # fmt: skip
def test_sidecar_with_other_certificates_gets_no_batch(
    rig: SniffedRig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, certificates: Any, text: str
) -> None:
    seen = len(rig.sniffer.seen)
    assert text in no_batch(rig, certificates.__name__, certificates(tmp_path), monkeypatch)
    assert len(rig.sniffer.seen) - seen < 1 << 20


def test_feeder_without_tls_is_refused_with_the_remedy(
    plain: SniffedRig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tls_folder(Generations(tmp_path).home, Part.SIDECAR)
    logs = no_batch(plain, "under-tls", str(folder), monkeypatch)
    assert "the peer does not use TLS, but this process does" in logs
    assert "start the job with spec.loader.tls: false" in logs


# The supervisor


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Generations:
    return Generations(tmp_path_factory.mktemp("tls"))


@pytest.fixture(scope="module")
def supervisor(tmp_path_factory: pytest.TempPathFactory, certificates: Generations) -> SupervisorAlone:
    folder = tmp_path_factory.mktemp("supervisor")
    return SupervisorAlone(
        folder, job=JOB, key=KEY, host="127.0.0.1", port=reserve_port(), feeders=100,
        tls_folder=str(tls_folder(certificates.home, Part.SUPERVISOR)),
    )  # fmt: skip


@pytest.fixture
def sniffer(supervisor: SupervisorAlone) -> Iterator[Sniffer]:
    made = Sniffer(supervisor.address)
    yield made
    made.close()


def ask(address: tuple[str, int], tls: Credentials | None) -> dict[str, Any]:
    return supervision.ask(*address, KEY, job=JOB, message={"type": "status"}, tls=tls)


def test_supervisor_answers_under_tls_and_nobody_can_read_it(
    supervisor: SupervisorAlone, sniffer: Sniffer, certificates: Generations
) -> None:
    assert ask(sniffer.address, certificates.of(Part.OPERATOR))["type"] == "status"
    assert b"feeders" not in sniffer.seen
    assert JOB.encode() not in sniffer.seen


def test_request_without_tls_is_refused_with_the_remedy(supervisor: SupervisorAlone) -> None:
    with pytest.raises(AuthError, match="but the connection does not use TLS: update this"):
        ask(supervisor.address, None)


def test_request_under_tls_to_a_job_without_it_is_refused_with_the_remedy(
    tmp_path: Path, certificates: Generations
) -> None:
    other = SupervisorAlone(tmp_path, job=JOB, key=KEY, host="127.0.0.1", port=reserve_port())
    with pytest.raises(AuthError, match="the peer does not use TLS, but this process does"):
        ask(other.address, certificates.of(Part.OPERATOR))


def test_request_with_certificates_of_another_job_is_refused(
    supervisor: SupervisorAlone, tmp_path: Path
) -> None:
    other = Generations(tmp_path, seed=b"o" * 32)
    with pytest.raises(AuthError, match="it belongs to another job"):
        ask(supervisor.address, other.of(Part.OPERATOR))


def test_sidecar_gets_lists_of_feeders_under_tls(
    supervisor: SupervisorAlone, sniffer: Sniffer, certificates: Generations, tmp_path: Path
) -> None:
    own, store = keys.derive(KEY, Holder.SIDECAR), BlobStore(tmp_path / "blobs")
    tls = certificates.of(Part.SIDECAR)
    client = SupervisorClient(sniffer.address, key=own, job=JOB, name="sidecar-0", store=store, tls=tls)
    numbers = itertools.count()

    def knows(feeder: int) -> bool:
        client.try_connect(time.monotonic())
        client.send(
            {"type": "metrics", "metrics": {"next_calls": next(numbers)}, "receivers": 1, "failures": []}
        )
        if client.fileno is not None:
            client.on_readable(time.monotonic())
        time.sleep(0.01)
        return f"i{feeder}" in {endpoint.instance for endpoint in client.feeders}

    for feeder in (20, 21, 22):
        supervisor.ready(feeder)
        until(lambda feeder=feeder: knows(feeder), what="a list of feeders")  # type: ignore[misc]
    assert b"feeder-20" not in sniffer.seen


def test_feeder_reports_itself_under_tls(
    supervisor: SupervisorAlone, certificates: Generations, tmp_path: Path
) -> None:
    (tmp_path / "key").write_bytes(keys.derive(KEY, Holder.FEEDER))
    settings = FeederSettings(
        job=JOB, key_path=str(tmp_path / "key"), blob_folder=str(tmp_path), name="feeder-7",
        own_key=keys.of_feeder(KEY, "feeder-7").hex(),
        supervisor_host=supervisor.address[0], supervisor_port=supervisor.address[1],
    )  # fmt: skip
    registration = Registration(
        settings, host="127.0.0.1", port=7, instance="i7", link_key=handshake.new_key(), idle=lambda: True,
        tls=certificates.of(Part.FEEDER),
    )  # fmt: skip
    registration.start()

    def feeders() -> list[str]:
        status = ask(supervisor.address, certificates.of(Part.OPERATOR))
        return [feeder["name"] for feeder in status["feeders"] if feeder.get("instance") == "i7"]

    assert until(feeders, what="the feeder's report") == ["feeder-7"]


def test_user_code_travels_between_nodes_under_tls(
    supervisor: SupervisorAlone, sniffer: Sniffer, certificates: Generations, tmp_path: Path
) -> None:
    """A sidecar uploads it, a feeder fetches it from the supervisor, and another one from that feeder."""
    code = SECRET * 100_000
    store = BlobStore(tmp_path / "trainer")
    digest, nbytes = store.put(code)
    own, tls_of_sidecar = keys.derive(KEY, Holder.SIDECAR), certificates.of(Part.SIDECAR)

    def sidecar() -> None:
        about = {"role": "sidecar", "name": "sidecar-9", "job": JOB, "versions": handshake.BY_ROLE}
        with handshake.connect(sniffer.address, own, **about, tls=tls_of_sidecar) as sock:  # type: ignore[arg-type]
            sockets.send_message(sock, {"type": "have", "digest": digest, "nbytes": nbytes})
            while sockets.recv_message(sock)["type"] != "want":
                pass
            upload(sniffer.address, own, store, digest, nbytes, name="sidecar-9", job=JOB, tls=tls_of_sidecar)

    threading.Thread(target=sidecar, daemon=True).start()
    nodes, tls = list[BlobStore](), certificates.of(Part.FEEDER)
    for number in range(2):
        nodes.append(BlobStore(tmp_path / f"node-{number}"))
        settings = FeederSettings(
            job=JOB, name=f"feeder-{number}", key_path="", blob_folder="", supervisor_host=sniffer.address[0],
            supervisor_port=sniffer.address[1],
        )  # fmt: skip
        key = keys.derive(KEY, Holder.FEEDER)
        listener = Acceptor(
            "127.0.0.1", 0, key=key, job=JOB, facts={}, versions=handshake.DATA, tls=tls,
            welcomed=lambda sock, _: fetcher.serve(sock),
        )  # fmt: skip
        fetcher = BlobFetcher(settings, key, nodes[-1], lambda at=listener: ("127.0.0.1", at.port), tls)  # type: ignore[misc]
        if number == 0:
            serving = fetcher
            listener._welcomed = lambda sock, _: serving.serve(sock)
            threading.Thread(target=_serve, args=(listener,), daemon=True).start()
        assert fetcher.fetch(digest, nbytes, wanted=lambda: True)
    assert [(node.folder / digest).read_bytes() == code for node in nodes] == [True, True]
    assert 2 * nbytes < len(sniffer.seen) < 3 * nbytes, "the second feeder got it from the first"
    assert SECRET not in sniffer.seen


def _serve(listener: Acceptor) -> None:
    poll = select.poll()
    poll.register(listener, select.POLLIN)
    while True:
        poll.poll()
        listener.serve()


# A run on this machine


def status_for_a_report(live: LiveRun) -> dict[str, Any]:
    """What `dataloaderjob report` on a cluster reads in the head's pod."""
    settings = live.home / "head.json"
    settings.write_text(
        json.dumps(
            {
                "job": live.job, "key_path": str(live.home / "key"), "supervisor_port": live.about["port"],
                "tls_folder": str(tls_folder(live.home, Part.SUPERVISOR)),
            }
        )
    )  # fmt: skip
    words = ["-P", "-m", "dataloaderjob.pod.status", "--settings", str(settings), "--looks", "1"]
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, check=True, timeout=60)
    return dict(json.loads(done.stdout))


@pytest.mark.parametrize("provider", ["local", "ray"])
def test_run_with_tls_trains_on_the_same_batches(tmp_path: Path, provider: str) -> None:
    loader = {"memoryPerProcess": "64Mi", "tls": True}
    project = Project(tmp_path, 2000, 0.001, loader=loader)
    with LocalRun(project.path, "--provider", provider) as run:
        run.until("ready after")
        run.find()
        (live,) = live_runs(str(run.home))
        assert live.ask({"type": "status"})["type"] == "status"
        with pytest.raises(AuthError, match="but the connection does not use TLS"):
            key = (live.home / "key").read_bytes()
            supervision.ask("127.0.0.1", live.about["port"], key, job=live.job, message={"type": "status"})
        assert status_for_a_report(live)["type"] == "status"
        assert run.end() == 0, run.text
    assert digest(run.lines) == project.reference(), run.text
    assert run.left() == []
