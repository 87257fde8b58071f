"""Head and feeder pods of a cluster as processes of this machine: real Ray, the real DataLoader."""

from __future__ import annotations

import gc
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray
import torch
from fault_data import Slow, digest_of
from loud_data import Loud
from pods import HEAD, Pod, Pods
from rig import until
from torch.utils.data import Dataset

from dataloaderjob import DataLoader
from dataloaderjob.core.errors import DataLoaderJobError

Job = tuple[Pods, Pod, list[Pod]]


@pytest.fixture(scope="module")
def pods() -> Iterator[Pods]:
    with Pods(feeders=2) as made:
        yield made


@pytest.fixture
def job(pods: Pods, monkeypatch: pytest.MonkeyPatch) -> Job:
    """A job of two feeder pods, all of it up, also what the test before this one ended."""
    head, feeders = pods.up()
    monkeypatch.setenv("DATALOADERJOB_SOCKET", pods.socket)
    return pods, head, feeders


def loader(dataset: Dataset, **options: int) -> DataLoader:
    return DataLoader(dataset, batch_size=16, generator=torch.Generator().manual_seed(7), **options)


def reference(samples: int) -> str:
    """Of a dataset that does not print."""
    return digest_of(loader(Slow(samples, 0.0), num_workers=0))


class Broken(Dataset):
    """Raises for one sample."""

    def __getitem__(self, i: int) -> torch.Tensor:
        if i == 40:
            raise ValueError("sample 40 is broken")
        return torch.tensor(i)

    def __len__(self) -> int:
        return 64


def processes_begin_with(code: str, program: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes of this program in pods that are started from now on run this before anything else."""
    lines = ["import sys", f"if any(a.endswith('{program}') for a in sys.orig_argv):", f"    {code}"]
    (folder / "sitecustomize.py").write_text("\n".join(lines))
    monkeypatch.syspath_prepend(str(folder))


def awaited_cause(pods: Pods, cause: str, timeout_s: float) -> dict[str, Any]:
    """The status once its only feeder has this cause not to be ready."""

    def found() -> dict[str, Any] | None:
        try:
            status = pods.status()
        except (OSError, DataLoaderJobError):
            return None
        return status if any(f["cause"] == cause for f in status["feeders"]) else None

    return dict(until(found, timeout_s, f"cause {cause}"))


def lines(text: str, word: str) -> list[tuple[str, int, str]]:
    """(feeder, sample, time) of each line that user code printed."""
    found = [re.fullmatch(rf"\[(feeder-\d)\] {word} (\d+) at (\d+)", line) for line in text.splitlines()]
    return [(m[1], int(m[2]), m[3]) for m in found if m]


def test_epoch_through_pods_equals_num_workers_0_and_pods_show_output(job: Job):
    pods, head, feeders = job
    assert digest_of(loader(Loud(800))) == reference(800)
    for word, which in (("making", "out"), ("native", "err")):

        def shown(which: str = which, word: str = word) -> list[list[tuple[str, int, str]]]:
            return [lines(getattr(pod, which), word) for pod in feeders]

        until(lambda: len({i for each in shown() for _, i, _ in each}) == 800, 10, "all lines")
        assert [len({name for name, *_ in each}) for each in shown()] == [1, 1], "each its own feeder's"
        assert max(Counter(line for each in shown() for line in each).values()) == 1, "nothing twice"
    assert "making" not in head.out + head.err
    assert ":actor_name:" not in "".join(pod.out + pod.err for pod in feeders)
    for pod in feeders:
        assert list((pod.volume / "node" / "blobs").glob("[0-9a-f]*")), "blobs lie on each node"
    assert (
        f"supervisor: INFO feeder-0 ({pods.status()['feeders'][0]['instance']}) has reported from 127.0.0."
        in pods.running["s"].err
    )


def agent_of(head: Pod) -> int:
    """The pid of the process that serves Ray to the supervisor."""
    for process in psutil.process_iter(["pid", "cmdline"]):
        args = process.info["cmdline"] or []
        if "dataloaderjob.providers.ray.agent" in args and any(str(head.volume) in a for a in args):
            return int(process.info["pid"])
    raise AssertionError(f"no agent:\n{head.err[-2000:]}")


def printed(module: str, *args: str) -> dict[str, Any]:
    """Returns the last line that a command of a report prints in a pod."""
    words = [sys.executable, "-P", "-m", module, *args]
    done = subprocess.run(words, capture_output=True, text=True, check=True, timeout=60)
    return dict(json.loads(done.stdout.splitlines()[-1]))


def test_pods_tell_a_report_its_ranks_the_costs_and_the_times_of_batches(job: Job):
    pods, _, feeders = job
    stream = iter(loader(Slow(160, 0.01)))
    taken = [next(stream) for _ in range(8)]
    settings = ["--settings", str(pods.home / "s.json")]

    def reported() -> bool:
        status = printed("dataloaderjob.pod.status", *settings, "--looks", "2")
        ranks = [rank for one in status["sidecars"].values() for rank in one["ranks"].values()]
        built = sum(feeder["costs"].get("built", 0) for feeder in status["feeders"])
        return built >= len(taken) and sum(calls for calls, *_ in ranks) >= len(taken)

    until(reported, 20, "the counts of ranks and feeders")
    made = [
        printed("dataloaderjob.pod.times", "--folder", str(pod.volume / "node" / "times")) for pod in feeders
    ]
    assert sum(times["sums"]["count"] for times in made) >= len(taken)
    assert all(times["samples"][0][0] >= 10**7 for times in made if times["samples"])


@pytest.mark.thorough
def test_supervisor_without_ray_or_its_token_adds_and_ends_feeders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    processes_begin_with("sys.modules['ray'] = None", "dataloaderjob.supervisor.main", tmp_path, monkeypatch)
    with Pods(feeders=1) as pods:
        _, feeders = pods.up(1)
        supervisor = psutil.Process(pods.ready(1)["pid"])
        assert not [name for name in supervisor.environ() if name.startswith("RAY_")]
        assert not [m.path for m in supervisor.memory_maps() if "/ray/" in m.path]
        pods.feeder(1)
        for wanted in (2, 1):
            pods.scale(wanted)
            until(lambda wanted=wanted: len(pods.ready(wanted)["feeders"]) == wanted, 30, "as many feeders")
        os.kill(next(f["pid"] for f in pods.status()["feeders"]), signal.SIGKILL)
        pods.ready(0)
        pods.ready(1)
        assert supervisor.is_running(), "it was never restarted"
        assert feeders[0].process.poll() is None


def test_agent_has_no_key_and_the_supervisor_no_token(job: Job):
    pods, head, _ = job
    agent, supervisor = psutil.Process(agent_of(head)), psutil.Process(pods.status()["pid"])
    key, token = pods.key.hex(), (pods.home / "ray").read_text()
    for process, mine, theirs in ((agent, "ray", "links"), (supervisor, "links", "ray")):
        said = " ".join([*process.environ().values(), *process.cmdline()])
        settings = Path(process.cmdline()[-1]).read_text()
        for secret in (key, token):
            assert secret not in said + settings
        assert str(pods.home / theirs) not in said + settings, f"{mine} alone is known"


@pytest.mark.thorough
def test_dead_pods_are_replaced_within_an_epoch_and_leave_no_process(job: Job):
    pods, head, feeders = job
    replaced: list[Pod] = []

    def before(number: int) -> None:
        if number != 20:
            return
        os.kill(feeders[0].vital("raylet"), signal.SIGKILL)
        assert feeders[0].process.wait(15) == 1, "no pod without a raylet"
        assert "pod: ERROR raylet ended" in feeders[0].err
        assert feeders[1].terminate() == 0
        (feeders[0].volume / "node" / "blobs" / "stale").write_text("of an earlier container")
        replaced.append(pods.feeder(0))

    assert digest_of(loader(Loud(1600)), before=before) == reference(1600)
    assert lines(replaced[0].out, "making")
    assert not (replaced[0].volume / "node" / "blobs" / "stale").exists()
    replaced.append(pods.feeder(1))
    pods.ready(2)
    for pod in (*replaced, head, pods.running["s"]):
        assert pod.terminate() == 0
        assert pod.err.splitlines()[-1].endswith("INFO ended as requested")
    assert pods.left() == [], "nothing of any pod lives on"


@pytest.mark.slow
def test_pod_is_ready_while_its_feeder_serves_or_after_a_passed_trial(job: Job):
    pods, _, feeders = job

    def ready(pod: Pod) -> bool:
        return (pod.volume / "node" / "ready").exists()

    for pod in feeders:
        until(lambda pod=pod: ready(pod), 10, "a pod whose feeder serves is ready")
        assert "starting one to test" not in pod.err
    more = pods.feeder(2, patience_s=1.0)
    until(lambda: "joined the Ray" in more.err, 60, "it joins")
    assert not ready(more), "nothing has shown what it can"
    until(lambda: ready(more), 120, "it is ready without a feeder")
    assert "starting one to test whether this image can run feeders" in more.err
    host = next(f["pid"] for f in pods.status()["feeders"])
    os.kill(host, signal.SIGKILL)
    until(lambda: not all(ready(pod) for pod in feeders), 10, "it is taken back with the feeder")
    assert more.terminate() == 0
    assert not ready(more)
    pods.ready(2)


@pytest.mark.slow
def test_update_moves_a_feeder_to_a_ready_pod_while_the_other_serves(job: Job):
    pods, _, feeders = job
    new = pods.feeder(2, patience_s=0.0)
    until(lambda: (new.volume / "node" / "ready").exists(), 120, "the new pod is ready")
    taken: list[float] = []

    def before(number: int) -> None:
        taken.append(time.monotonic())
        if number == 10:  # as a Deployment ends an old pod
            feeders[0].process.terminate()

    assert digest_of(loader(Loud(3200)), before=before) == reference(3200)
    assert feeders[0].process.wait(15) == 0
    gaps = [after - at for at, after in itertools.pairwise(taken)]
    assert max(gaps) < 3.0, "batches go on while a feeder moves"
    until(lambda: (new.volume / "node" / "ready").exists() and lines(new.out, "making"), 60, "it feeds")
    assert new.terminate() == 0
    pods.up()


@pytest.mark.slow
def test_head_restarts_its_supervisor_and_ends_when_its_gcs_dies(
    job: Job,
):
    pods, head, feeders = job
    before = pods.ready(2)
    os.kill(before["pid"], signal.SIGKILL)
    after = until(lambda: (s := pods.ready(2))["pid"] != before["pid"] and s, 60, "another supervisor")
    assert [f["instance"] for f in after["feeders"]] == [f["instance"] for f in before["feeders"]], "adopted"
    supervisor = pods.running["s"]
    assert "supervisor: WARNING the supervisor ended with code -9; restarting it" in supervisor.err
    os.kill(agent_of(head), signal.SIGKILL)
    between = until(
        lambda: (s := pods.ready(2))["pid"] != after["pid"] and s, 60, "a supervisor of the next agent"
    )
    assert [f["instance"] for f in between["feeders"]] == [f["instance"] for f in before["feeders"]], (
        "adopted"
    )
    assert "head: WARNING the agent ended with code -9; restarting it" in head.err
    os.kill(head.vital("gcs_server"), signal.SIGKILL)
    assert head.process.wait(15) == 1
    assert "gcs_server ended" in head.err
    pods.head()
    codes = [pod.process.wait(90) for pod in feeders]
    assert codes == [1, 1], "a raylet of another cluster is of no use"
    for number in range(2):
        pods.feeder(number)
    pods.ready(2)
    assert supervisor.process.poll() is None, "its container outlives Ray's"
    assert digest_of(loader(Loud(160))) == reference(160)


@pytest.mark.slow
def test_pod_with_a_wrong_ray_token_fails_to_join_with_an_error(job: Job):
    pods, _, _ = job
    (pods.home / "wrong").write_text("0" * 64)
    pod = pods.feeder(2, token_path=str(pods.home / "wrong"))
    assert pod.process.wait(90) == 1
    assert "InvalidAuthToken" in pod.out + pod.err
    assert f"with the token of {pods.home}/wrong, could not be started" in pod.err
    assert pods.status()["ready"] == 2


@pytest.mark.slow
def test_failure_is_reported_until_a_later_batch_is_taken(job: Job):
    pods, _, _ = job
    broken = loader(Broken())
    with pytest.raises(ValueError, match="sample 40"):
        list(broken)
    (failure,) = until(lambda: pods.status()["failures"], 10, "the failure")
    assert failure["text"] == "ValueError: sample 40 is broken (for index 40)"
    assert (failure["reason"], failure["feeder"][:7]) == ("UserCodeFailed", "feeder-")
    assert failure["sidecar"].startswith("sidecar-")
    assert pods.status()["failures"] == [failure], "nothing was taken since"
    del broken  # with it goes the pool: the next trainer has another, and for less than a second
    gc.collect()
    assert digest_of(loader(Slow(64, 0.0))) == digest_of(loader(Slow(64, 0.0), num_workers=0))
    until(lambda: pods.status()["failures"] == [], 10, "it has passed")


@pytest.mark.slow
def test_short_worker_register_timeout_is_reported_and_raising_it_helps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    processes_begin_with("import time; time.sleep(2.5)", "default_worker.py", tmp_path, monkeypatch)
    field = "spec.ray.managed.tuning.workerRegisterTimeoutSeconds"
    with Pods(feeders=1, changes={field: 1}) as pods:
        head, feeder = pods.head(), pods.feeder(0)
        status = awaited_cause(pods, "WorkerRegisterTimeout", 90)
        assert status["ray"]["worker_register_timeout_seconds"] == 1, "as its GCS says"
        (why,) = [f["why"] for f in status["feeders"]]
        assert "worker_register_timeout, 1 s" in why
        assert f"raise {field}" in why
        assert [pod.terminate() for pod in (feeder, head)] == [0, 0]
        pods.change({field: 60})
        pods.head()
        pods.feeder(0)
        assert pods.ready(1)["ray"] == {
            "version": ray.__version__,
            **pods.job.spec.ray.managed.tuning.settings().config(),
        }


@pytest.mark.slow
def test_module_missing_in_a_feeder_image_is_reported_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    processes_begin_with("sys.modules['torch'] = None", "dataloaderjob.feeder.host", tmp_path, monkeypatch)
    with Pods(feeders=1) as pods:
        pods.head()
        pods.feeder(0)
        status = awaited_cause(pods, "FeederFails", 90)
        (why,) = [f["why"] for f in status["feeders"]]
        assert "its process failed at its start: " in why
        assert "ended with code 1: ModuleNotFoundError: import of torch" in why


def test_pod_waits_for_the_head_and_finally_gives_up():
    with Pods() as pods:
        patient, hasty = pods.feeder(0), pods.feeder(1, head_timeout_s=1.0, progress_every_s=0.5)
        assert hasty.process.wait(30) == 1
        waits = [line for line in hasty.err.splitlines() if "INFO waiting for the head's GCS" in line]
        assert len(waits) >= 2
        assert f"GCS at {HEAD}:{pods.gcs_port} did not accept a connection within 1 s" in hasty.err
        until(lambda: "waiting for" in patient.err, 20, "the other one waits")
        assert patient.terminate() == 0
        assert pods.left() == []


def test_pod_without_key_or_token_exits_naming_the_missing_path():
    with Pods() as pods:
        supervisor = pods.supervisor(key_path="/nowhere/links")
        head, feeder = pods.head(token_path="/nowhere/ray"), pods.feeder(0, token_path="/nowhere/ray")
        assert [pod.process.wait(30) for pod in (supervisor, head, feeder)] == [1, 1, 1]
        assert "supervisor: ERROR cannot read the job's key from /nowhere/links" in supervisor.err
        for pod, name in ((head, "head"), (feeder, "pod")):
            assert (
                f"{name}: ERROR cannot read the token of the job's Ray cluster from /nowhere/ray" in pod.err
            )


def test_folder_too_deep_for_sockets_is_refused_naming_the_setting():
    with Pods() as pods:
        pod = pods.feeder(0, temp_dir=str(pods.home / ("x" * 60)))
        assert pod.process.wait(30) == 1
        assert "set temp_dir to a shorter path" in pod.err
