"""The operator asks real supervisors over real sockets. Ray is not needed for that."""

from __future__ import annotations

import asyncio
import itertools
import socket
import threading
import tracemalloc
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from generations import Generations
from manifests import manifest
from ports import reserve_port
from supervisor_alone import SupervisorAlone, says

from dataloaderjob.api import KIND
from dataloaderjob.core import keys, opening, sockets
from dataloaderjob.core.errors import RemoteProtocolError
from dataloaderjob.core.generations import PERIOD, Schedule
from dataloaderjob.core.handshake import CONTROL, ServerHandshake
from dataloaderjob.core.keys import Part
from dataloaderjob.core.settings import RayTuning
from dataloaderjob.core.supervision import MAX_FEEDERS
from dataloaderjob.local.certificates import tls_folder
from dataloaderjob_operator import names
from dataloaderjob_operator.decide.observed import SupervisorStatus
from dataloaderjob_operator.observe import supervisor_poller
from dataloaderjob_operator.observe.cache import Cache, JobKey
from dataloaderjob_operator.observe.supervisor_poller import SupervisorPoller

ROOT = b"r" * 32
KEY: JobKey = ("team", "mnist")
_UIDS = itertools.count()


@pytest.fixture(autouse=True)
def _fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same in a fiftieth of the time."""
    for name in ("PERIOD_S", "UNSETTLED_PERIOD_S", "MIN_INTERVAL_S", "TICK_S", "RATES_SPAN_S"):
        monkeypatch.setattr(supervisor_poller, name, getattr(supervisor_poller, name) / 50)
    monkeypatch.setattr(supervisor_poller, "TIMEOUT_S", 0.5)


class Job:
    """In the operator's cache, with a head at an address of this machine."""

    def __init__(self, folder: Path) -> None:
        self.uid, self.port, self.folder = f"u{next(_UIDS)}", reserve_port(), folder
        self.cache, self.reported = Cache(), 0
        changes = {"metadata.uid": self.uid, "metadata.namespace": KEY[0]}
        self.itself = {**manifest(changes), "kind": KIND}
        self.cache.put(self.itself)
        self.poller = SupervisorPoller(self.cache, ROOT, self._changed, port=self.port)

    def has_written(self, **metrics: str) -> None:
        """The job's status has these metrics of the loader."""
        self.cache.put({**self.itself, "status": {"loader": metrics}})

    def _changed(self, key: JobKey) -> None:
        assert key == KEY
        self.reported += 1

    def pod(self, address: str = "127.0.0.1", *, ready: bool = True) -> dict[str, Any]:
        labels = names.labels("mnist", names.Role.HEAD)
        conditions = [{"type": "Ready", "status": str(ready)}]
        metadata = {"name": f"mnist-head-{address}", "namespace": KEY[0], "labels": labels}
        metadata["ownerReferences"] = [{"kind": "ReplicaSet", "name": "mnist-head-7c", "controller": True}]
        return {
            "kind": "Pod", "metadata": metadata, "status": {"podIP": address, "conditions": conditions},
        }  # fmt: skip

    def supervisor(
        self, host: str = "127.0.0.1", *, key: bytes | None = None, feeders: int = 1
    ) -> SupervisorAlone:
        made = SupervisorAlone(
            self.folder / host, job=names.unique(*KEY, self.uid), key=key or names.job_key(ROOT, self.uid),
            host=host, port=self.port, feeders=feeders,
        )  # fmt: skip
        made.has_ray()
        return made

    def run(self, scenario: Callable[[], Awaitable[None]]) -> None:
        """Runs a scenario while the poller runs."""

        async def both() -> None:
            polling = asyncio.create_task(self.poller.run())
            try:
                await scenario()
            finally:
                polling.cancel()

        asyncio.run(both())

    async def until(self, condition: Callable[[Any], Any]) -> Any:
        """Waits for the first status that fulfils it."""
        async with asyncio.timeout(20):
            while True:
                status = self.poller.status(KEY)
                if status is not None and condition(status):
                    return status
                await asyncio.sleep(0.01)

    async def gone(self) -> None:
        async with asyncio.timeout(20):
            while self.poller.status(KEY) is not None:
                await asyncio.sleep(0.01)


@pytest.fixture
def job(tmp_path: Path) -> Job:
    made = Job(tmp_path)
    made.cache.put(made.pod())
    return made


def test_the_status_of_a_supervisor_is_kept_and_reported_once(job: Job):
    supervisor = job.supervisor(feeders=2)
    supervisor.has_ray(RayTuning(worker_register_timeout_s=7))

    async def scenario() -> None:
        job.poller.want(KEY, 2)
        status = await job.until(lambda a: a.desired == 2)
        assert (status.ready, status.ray.version, status.ray.worker_register_timeout_seconds) == (
            0,
            "2.60.0",
            7,
        )
        supervisor.ready(0, 1)
        await job.until(lambda a: a.ready == 2)
        job.has_written(batchesPerSecond="0", gbPerSecond="0", stallPercent="0", occupancyPercent="0")
        reported, asked = job.reported, job.poller._jobs[KEY].polled_at
        async with asyncio.timeout(20):
            while job.poller._jobs[KEY].polled_at == asked:
                await asyncio.sleep(0.01)
        assert (reported, job.reported) == (2, 2), "once for each change, and not for the same again"

    job.run(scenario)


def test_feeder_count_is_requested_only_until_it_is_reached(job: Job):
    supervisor = job.supervisor(feeders=1)

    async def scenario() -> None:
        for wanted, scaled in ((1, 0), (3, 1), (2, 2)):
            job.poller.want(KEY, wanted)
            await job.until(lambda a, wanted=wanted: a.desired == wanted)
            assert (supervisor.desired, supervisor.scaled) == (wanted, scaled)

    job.run(scenario)


def test_supervisor_of_a_job_that_has_ended_is_asked_to_end_its_feeders(job: Job):
    supervisor = job.supervisor(feeders=2)

    async def scenario() -> None:
        job.poller.want(KEY, 2)
        await job.until(lambda a: a.desired == 2)
        assert not supervisor.is_to_end
        job.poller.want(KEY, 0, ends=True)
        assert not (await job.until(lambda a: a.desired == 0)).ended
        assert supervisor.is_to_end
        supervisor.ends_feeders()
        await job.until(lambda a: a.ended)
        assert supervisor.scaled == 0

    job.run(scenario)


def test_restarted_supervisor_with_another_feeder_count_is_corrected(job: Job):
    supervisor = job.supervisor(feeders=4)

    async def scenario() -> None:
        job.poller.want(KEY, 2)
        await job.until(lambda a: a.desired == 2)

    job.run(scenario)
    assert supervisor.desired == 2


def test_rates_cover_the_time_between_two_polls(job: Job):
    sidecar = job.supervisor().sidecar()

    async def scenario() -> None:
        says(sidecar, next_calls=10, used_nbytes=1, pool_nbytes=4)
        job.poller.want(KEY, 1)
        idle = await job.until(lambda a: a.rates is not None)
        assert (idle.rates.batches_per_s, idle.rates.occupancy) == (0.0, 0.25), (
            "what was before is not of this time"
        )
        reported = job.reported
        says(sidecar, next_calls=110, nbytes=10**9, wait_ns=1, step_ns=3, used_nbytes=1, pool_nbytes=4)
        busy = await job.until(lambda a: a.rates.batches_per_s > 0)
        assert busy.rates.batches_per_s * 1e7 == pytest.approx(busy.rates.nbytes_per_s), (
            "over the same seconds"
        )
        assert busy.rates.stall == 0.25
        await job.until(lambda _: job.reported > reported)

    job.run(scenario)


def test_trainer_failure_is_reported_after_its_end_too(job: Job):
    supervisor = job.supervisor()
    supervisor.ready(0, host="10.0.0.9")

    async def scenario() -> None:
        job.poller.want(KEY, 1)
        failure = {"rank": "3", "feeder": "feeder-0", "reason": "ModuleMissing", "text": "no module x"}
        with supervisor.sidecar() as sidecar:
            says(sidecar, failure)
            await job.until(lambda a: a.failure is not None)
        status = await job.until(lambda a: a.failure is not None)
        assert status.failure.text == "sidecar-t-0-1, rank 3, received from feeder-0: no module x"
        assert status.failure.host == "10.0.0.9"
        again, taken = supervisor.sidecar("sidecar-t-1-1"), itertools.count()

        def is_forgotten(found: SupervisorStatus) -> bool:
            """The trainer goes on: the supervisor may notice the end of the first sidecar after the first batch."""
            says(again, next_calls=next(taken))
            return found.failure is None

        await job.until(is_forgotten)

    job.run(scenario)


def listening(job: Job) -> socket.socket:
    """A server that accepts and sends nothing."""
    return socket.create_server(("127.0.0.1", job.port))


@pytest.mark.parametrize(
    ("peer", "why"),
    [
        pytest.param(lambda job: None, "Connect call failed", id="nobody is there"),
        pytest.param(listening, "no answer within 0.5 s from 127.0.0.1", id="it accepts and is silent"),
        pytest.param(
            lambda job: job.supervisor(key=b"another key of 32 bytes at least"), "does not hold this job's key",
            id="it has another key",
        ),
    ],
)  # fmt: skip
def test_unresponsive_supervisor_counts_as_silent_after_some_polls(
    job: Job, peer: Callable[[Job], Any], why: str
):
    kept = peer(job)

    async def scenario() -> None:
        job.poller.want(KEY, 1)
        status = await job.until(lambda a: a.silent)
        assert why in status.silent
        assert job.poller._jobs[KEY].misses >= supervisor_poller.MAX_MISSES
        assert job.reported == 1
        assert (status.ready, status.ray.version) == (0, "")

    job.run(scenario)
    del kept


def test_supervisor_that_answers_again_is_no_longer_silent(job: Job):
    async def scenario() -> None:
        job.poller.want(KEY, 1)
        await job.until(lambda a: a.silent)
        job.supervisor()
        await job.until(lambda a: not a.silent and a.desired == 1)

    job.run(scenario)


def test_only_a_ready_head_is_polled_and_a_new_one_starts_afresh(tmp_path: Path):
    job = Job(tmp_path)
    first, second = job.supervisor("127.0.0.2"), job.supervisor("127.0.0.3", feeders=1)
    first.ready(0)

    async def scenario() -> None:
        job.poller.want(KEY, 1)
        job.cache.put(job.pod("127.0.0.2", ready=False))
        await asyncio.sleep(5 * supervisor_poller.TICK_S)
        assert job.poller.status(KEY) is None
        job.cache.put(job.pod("127.0.0.2"))
        await job.until(lambda a: a.ready == 1)
        job.cache.remove(job.pod("127.0.0.2"))
        await job.gone()
        job.cache.put(job.pod("127.0.0.3"))
        await job.until(lambda a: a.ready == 0)
        second.ready(0)
        await job.until(lambda a: a.ready == 1)
        job.poller.want(KEY, None)
        assert job.poller.status(KEY) is None, "a job that ended is not polled"

    job.run(scenario)


def test_status_with_the_maximum_number_of_feeders_is_read(job: Job):
    supervisor = job.supervisor(feeders=MAX_FEEDERS)
    supervisor.ready(*range(MAX_FEEDERS), host=253 * "h")

    async def scenario() -> None:
        job.poller.want(KEY, MAX_FEEDERS)
        status = await job.until(lambda a: a.silent or a.ready)
        assert (status.silent, status.ready) == ("", MAX_FEEDERS)

    job.run(scenario)


def test_supervisor_with_keys_of_the_previous_root_is_polled(job: Job):
    """Its head started before the root key was replaced; the head of another job, or a later one, has new keys."""
    new = b"n" * 32
    job.poller = SupervisorPoller(job.cache, new, job._changed, port=job.port, previous_root=ROOT)
    secret = names.key_secret("mnist", job.uid, ROOT)
    template = {"spec": {"volumes": [{"name": "dataloaderjob-key", "secret": {"secretName": secret}}]}}
    metadata = {
        "name": "mnist-head", "namespace": KEY[0], "labels": names.labels("mnist", names.Role.HEAD),
        "ownerReferences": [{"kind": KIND, "name": "mnist", "uid": job.uid, "controller": True}],
    }  # fmt: skip
    head = {"kind": "Deployment", "metadata": metadata, "spec": {"template": template}}
    job.cache.put(head)
    supervisor = job.supervisor()
    supervisor.ready(0)

    async def scenario() -> None:
        job.poller.want(KEY, 2)
        await job.until(lambda a: a.ready == 1)
        while supervisor.desired != 2:
            await asyncio.sleep(0.01)
        found = job.poller._head(KEY)
        assert found is not None
        assert found.key == names.job_key(ROOT, job.uid)
        named = {"secretName": names.key_secret("mnist", job.uid, new)}
        template["spec"]["volumes"][0]["secret"] = named
        job.cache.put(head)
        found = job.poller._head(KEY)
        assert found is not None
        assert found.key == names.job_key(new, job.uid)

    job.run(scenario)


class Hostile:
    """A head that answers with as much as is accepted, and never to a number of feeders."""

    def __init__(self, job: Job, nbytes: int) -> None:
        self.asked = 0
        head = b'{"type":"status","desired":0,"ready":0,"feeders":[{}],"x":"'
        self._data = head + b"x" * (nbytes - len(head) - 2) + b'"}'
        self._job, self._key = job, names.job_key(ROOT, job.uid)
        self.head = supervisor_poller.Head("127.0.0.1", names.unique(*KEY, job.uid), self._key)

    async def serve(self) -> asyncio.Server:
        return await asyncio.start_server(self._serve, "127.0.0.1", self._job.port)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        handshake = ServerHandshake(keys.of_job(self._key), job=self.head.job)
        writer.write(handshake.greeting)
        while not handshake.done:
            writer.write(handshake.receive(await reader.readexactly(handshake.wanted)))
        seals = handshake.seals
        assert seals is not None
        for answer in (self._data, None):
            head = await reader.readexactly(sockets.head_nbytes(seals))
            nbytes = sockets.open_head(head, sockets.MAX_MESSAGE_NBYTES, seals)
            sockets.open_rest(await reader.readexactly(nbytes), seals)
            if answer is not None:
                writer.write(seals.out.seal(sockets.LENGTH.pack(len(answer)), answer))
        self.asked += 1
        await asyncio.sleep(60)


def test_hostile_heads_use_bounded_memory_of_the_operator(job: Job, monkeypatch: pytest.MonkeyPatch):
    """While they owe an answer, nothing is kept of the status that they have sent."""
    hostile = Hostile(job, supervisor_poller.MAX_STATUS_NBYTES)

    async def scenario() -> None:
        large, waiting = asyncio.Semaphore(1), supervisor_poller._Job(wanted=1)
        async with await hostile.serve():
            polls = [
                asyncio.create_task(supervisor_poller._exchange(hostile.head, job.port, waiting, large))
                for _ in range(16)
            ]
            while hostile.asked < len(polls):
                await asyncio.sleep(0.01)
            kept, _ = tracemalloc.get_traced_memory()
            for poll in polls:
                poll.cancel()
            await asyncio.gather(*polls, return_exceptions=True)
        assert kept < 40e6, f"{kept / 1e6:.0f} MB for {len(polls)} heads"

    tracemalloc.start()
    try:
        asyncio.run(asyncio.wait_for(scenario(), 60))
    finally:
        tracemalloc.stop()


def test_oversized_status_is_refused_before_it_is_read(job: Job):
    hostile = Hostile(job, 2 * supervisor_poller.MAX_STATUS_NBYTES)

    async def scenario() -> None:
        async with await hostile.serve():
            with pytest.raises(RemoteProtocolError, match="exceeds 1048576"):
                await supervisor_poller._exchange(
                    hostile.head, job.port, supervisor_poller._Job(wanted=1), asyncio.Semaphore(1)
                )

    asyncio.run(asyncio.wait_for(scenario(), 60))


def stop_answering(job: Job) -> socket.socket:
    """As if its process hung: the port is there, and what connects gets nothing."""
    job.port = job.poller._port = reserve_port()
    return listening(job)


def test_supervisor_silent_for_long_after_answering_counts_as_hung(job: Job, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(supervisor_poller, "HUNG_S", 2.0)
    job.supervisor()

    async def scenario() -> None:
        job.poller.want(KEY, 1)
        await job.until(lambda a: a.desired == 1)
        with stop_answering(job):
            await job.until(lambda a: "no answer within" in a.silent and not a.hung)
            await job.until(lambda a: a.hung)

    job.run(scenario)


@pytest.mark.parametrize("others", [0, 1], ids=["never-answered", "others-are-silent-too"])
def test_unreachable_supervisor_is_not_replaced(job: Job, others: int):
    made = supervisor_poller._Job(1, status=SupervisorStatus(silent="refused"))
    made.answered_at = None if others == 0 else -1e9
    job.poller._jobs = {("team", str(number)): made for number in range(1 + others)}
    assert not job.poller._hangs(made)
    made.answered_at = -1e9
    job.poller._jobs = {KEY: made}
    assert job.poller._hangs(made)


def test_moved_metrics_of_many_jobs_are_queued_at_a_limited_rate_in_order():
    woken: list[JobKey] = []
    poller = SupervisorPoller(Cache(), ROOT, woken.append)
    keys = [("team", f"job-{number}") for number in range(20)]
    for key in keys:
        poller.want(key, 1)
        poller._moved[key] = None
    seconds = len(keys) / supervisor_poller.METRICS_PER_S
    ticks = round(seconds / supervisor_poller.TICK_S)
    for _ in range(ticks // 2):
        poller._release_moved()
    assert len(woken) == pytest.approx(len(keys) / 2, abs=1)
    for _ in range(ticks):
        poller._release_moved()
    assert woken == keys


# TLS


def under_tls(job: Job, folder: Path, *, seed: bytes | None = None) -> Generations:
    """The certificates of the job, or those that follow from another seed."""
    return Generations(folder / "tls", seed=seed or names.certificate_seed(ROOT, job.uid))


def supervisor_under_tls(job: Job, found: Generations) -> SupervisorAlone:
    made = SupervisorAlone(
        job.folder / "tls-supervisor", job=names.unique(*KEY, job.uid), key=names.job_key(ROOT, job.uid),
        host="127.0.0.1", port=job.port, feeders=1, tls_folder=str(tls_folder(found.home, Part.SUPERVISOR)),
    )  # fmt: skip
    made.has_ray()
    return made


def test_supervisor_under_tls_is_polled_and_scaled(job: Job, tmp_path: Path) -> None:
    found = under_tls(job, tmp_path)
    supervisor = supervisor_under_tls(job, found)
    supervisor.ready(0)

    async def scenario() -> None:
        job.cache.put(job.pod())
        job.poller.want(KEY, 3, found.schedule)
        status = await job.until(lambda status: status.desired == 3)
        assert status.ready == 1

    job.run(scenario)
    assert supervisor.desired == 3


def test_next_generation_of_certificates_is_used_for_polls(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dataloaderjob.core.credentials.LOOK_EVERY_S", 0.0)
    found = under_tls(job, tmp_path)
    supervisor = supervisor_under_tls(job, found)

    async def scenario() -> None:
        job.cache.put(job.pod())
        job.poller.want(KEY, 1, found.schedule)
        await job.until(lambda status: status.desired == 1)
        found.schedule = Schedule(found.schedule.began - PERIOD)  # time passes
        found.add(1)
        found.remove(0)
        job.poller.want(KEY, None)
        await job.gone()
        job.poller.want(KEY, 2, found.schedule)
        await job.until(lambda status: status.desired == 2)

    job.run(scenario)
    assert supervisor.desired == 2


@pytest.mark.parametrize(
    ("which", "why"),
    [
        ("another-job", "it belongs to another job"),
        ("head-without-tls", "the peer does not use TLS, but this process does"),
        ("head-under-tls", "but the connection does not use TLS: update this pod's image"),
    ],
)
def test_supervisor_with_other_tls_is_reported_with_the_remedy(
    job: Job, tmp_path: Path, which: str, why: str
) -> None:
    found = under_tls(job, tmp_path, seed=b"o" * 32 if which == "another-job" else None)
    kept = job.supervisor() if which == "head-without-tls" else supervisor_under_tls(job, found)
    assert kept.desired == 1

    async def scenario() -> None:
        job.cache.put(job.pod())
        job.poller.want(KEY, 3, None if which == "head-under-tls" else found.schedule)
        status = await job.until(lambda status: status.silent)
        assert why in status.silent

    job.run(scenario)
    assert kept.desired == 1


def test_large_answer_arrives_whole_under_tls(job: Job, tmp_path: Path) -> None:
    found, data = under_tls(job, tmp_path), bytes(range(256)) * 4096
    own_keys = keys.of_job(b"j" * 32)
    own = found.of(Part.SUPERVISOR)
    listener = socket.create_server(("127.0.0.1", job.port))

    def answer() -> None:
        sock, _ = listener.accept()
        challenge, first = opening.new_challenge()
        sock.sendall(first)
        proof = b""
        while not proof or opening.wanted(proof):
            proof += sock.recv(opening.wanted(proof))
        assert opening.is_proof(proof, challenge, own_keys, CONTROL.newest)
        with own.accepted(sock) as under:
            under.sendall(data)

    async def receive() -> bytes:
        head = supervisor_poller.Head("127.0.0.1", "j", b"", names.certificate_seed(ROOT, job.uid))
        state = supervisor_poller._Job(1, found.schedule)
        reader, writer = await asyncio.open_connection(head.address, job.port)
        context = supervisor_poller._context(head, state, found.schedule)
        prove = opening.prover(own_keys, role="control", name="operator", protocol=CONTROL.newest)
        await supervisor_poller._set_up_tls(reader, writer, context, prove)
        await asyncio.sleep(0.2)  # the reader's buffer is full meanwhile
        received = await reader.readexactly(len(data))
        writer.transport.abort()
        return received

    server = threading.Thread(target=answer)
    server.start()
    assert asyncio.run(receive()) == data
    server.join()
    listener.close()
