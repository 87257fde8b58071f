"""The processes behind a feeder, where user code starts others, is started again, or takes what they need."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import resource
import signal
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from feeder_client import Receiver, Squares, bundle_of, wait_until
from feeder_serving import KEY, Connect, Served, blobs, connecting, feeder_process, serving
from torch.utils.data._utils import collate

from dataloaderjob.core.frames import FrameKind
from dataloaderjob.feeder.body_buffers import copy
from dataloaderjob.feeder.builder import Builder
from dataloaderjob.feeder.builders import LINGER_S
from dataloaderjob.feeder.bundles import MAX_IDLE_TEMPLATES
from dataloaderjob.feeder.channel import Channel, pair
from dataloaderjob.making.failures import unpack_failure
from dataloaderjob.shipping.bundles import UserCode


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Served]:
    with serving(tmp_path) as made:
        yield made


@pytest.fixture
def connect(server: Served) -> Iterator[Connect]:
    with connecting(server) as made:
        yield made


class Counting(Squares):
    calls = 0

    def __getitem__(self, i: int) -> torch.Tensor:
        self.calls += 1
        return torch.tensor(self.calls)


class WithHelper(Squares):
    """Starts a process while it is loaded."""

    helper: Any = None

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self.helper = multiprocessing.get_context("fork").Process(target=time.sleep, args=(600,), daemon=True)
        self.helper.start()


class IgnoresChildren(Squares):
    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)


def alive(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def test_restarted_trainer_finds_no_state_of_its_predecessor(server: Served, tmp_path: Path):
    bundle = bundle_of(Counting(), blobs(tmp_path))
    found = []
    for trainer in ("first", "first", "second"):
        with Receiver(server.port, KEY, trainer=trainer) as receiver:
            receiver.ticket(0, [0, 1], receiver.know(bundle))
            found.append(receiver.next().batch().tolist())
    assert found == [[1, 2], [3, 4], [1, 2]], "a link that comes back goes on, another process begins afresh"


def test_reopened_session_starts_before_the_old_one_has_lingered(connect: Connect, tmp_path: Path):
    took = []
    with connect() as receiver:
        session = receiver.know(bundle_of(Counting(), blobs(tmp_path)))
        for number in range(10):
            began = time.monotonic()
            receiver.ticket(number, [0], session)
            assert receiver.next().batch().tolist() == [1], "of a builder of its own"
            took.append(time.monotonic() - began)
            receiver.send(FrameKind.RELEASE, bundle=session)
    assert min(took[1:]) < LINGER_S


def test_new_rank_shares_the_sessions_of_running_ones(server: Served, tmp_path: Path):
    bundle = bundle_of(Counting(), blobs(tmp_path))
    with Receiver(server.port, KEY, trainer="rank-0") as one:
        one.ticket(0, [0], one.know(bundle))
        assert one.next().batch().tolist() == [1]
        with Receiver(server.port, KEY, trainer="rank-1") as other:
            other.ticket(0, [0], other.know(bundle))
            assert other.next().batch().tolist() == [2]


def test_processes_started_while_loading_end_with_the_bundle(connect: Connect, tmp_path: Path):
    with connect() as receiver:
        helpers = []
        for epoch in range(3):
            shipped = bundle_of(
                WithHelper(epoch + 1), blobs(tmp_path),
                collate_fn=lambda _: torch.utils.data.get_worker_info().dataset.helper.pid,
            )  # fmt: skip
            session = receiver.know(replace(shipped, epoch=epoch))
            receiver.ticket(0, [0], session, stream=epoch + 1)
            helpers.append(receiver.next().batch())
            receiver.send(FrameKind.RELEASE, bundle=session)
        wait_until(lambda: not any(map(alive, helpers[:2])), 5, "the first two are gone")
        assert alive(helpers[2])


def test_processes_started_in_a_sample_end_with_the_session(connect: Connect, tmp_path: Path):
    def started(_: Any) -> int:
        if (pid := os.fork()) == 0:
            time.sleep(600)
        return pid

    with connect() as receiver:
        session = receiver.know(bundle_of(Squares(), blobs(tmp_path), collate_fn=started))
        receiver.ticket(0, [0], session)
        pid = receiver.next().batch()
        assert alive(pid)
        receiver.send(FrameKind.RELEASE, bundle=session)
        wait_until(lambda: not alive(pid), 10, "it is gone")


def test_killed_template_is_replaced_while_its_helper_lives(connect: Connect, tmp_path: Path):
    """The helper has the template's end of the channel open."""
    shipped = bundle_of(WithHelper(1), blobs(tmp_path), collate_fn=lambda _: os.getppid())
    with connect() as receiver:
        session = receiver.know(shipped)
        receiver.ticket(0, [0], session)
        template = receiver.next().batch()
        os.kill(template, signal.SIGKILL)
        wait_until(lambda: not alive(template), 5, "it is gone")
        receiver.ticket(1, [0], session)
        frame = receiver.next()
        while frame.kind is not FrameKind.BODY:  # what was under way is lost, and asked for again
            assert frame.kind is FrameKind.LOST
            receiver.ticket(1, [0], session)
            frame = receiver.next()
        assert frame.batch() != template


def test_user_code_ignoring_its_children_ends_no_other_session(connect: Connect, tmp_path: Path):
    shipped = bundle_of(IgnoresChildren(1), blobs(tmp_path), collate_fn=lambda _: [os.getppid(), os.getpid()])
    with connect() as receiver:
        sessions = [receiver.know(replace(shipped, loader=loader)) for loader in range(2)]
        found = []
        for number, session in enumerate(sessions):
            receiver.ticket(0, [0], session, stream=number + 1)
            found.append(receiver.next().batch())
        receiver.send(FrameKind.RELEASE, bundle=sessions[0])
        wait_until(lambda: not alive(found[0][1]), 5, "the first builder is gone")
        receiver.ticket(1, [0], sessions[1], stream=2)
        assert receiver.next().batch() == found[1]


def test_lack_of_descriptors_for_a_batch_is_reported_as_such(connect: Connect, tmp_path: Path):
    def init(_: int) -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))

    with connect() as receiver:
        session = receiver.know(bundle_of(Squares(), blobs(tmp_path), worker_init_fn=init))
        receiver.ticket(0, [0], session)
        error = unpack_failure(receiver.next().payload)
        assert isinstance(error, OSError)
        assert "Too many open files" in str(error)
        assert "placing the batch" in error.__notes__[0]


def test_builder_forked_ahead_runs_no_user_code(monkeypatch: pytest.MonkeyPatch):
    def refused(*_: Any, **__: Any) -> Any:
        raise AssertionError("called")

    monkeypatch.setitem(collate.default_collate_fn_map, torch.Tensor, refused)
    here, there = pair()
    builder = Builder(UserCode(dataset=[1], collate_fn=None, worker_init_fn=None), Channel(here), None)  # type: ignore[arg-type]
    builder.warm_up(1000)
    assert builder._buffers._free, "it has a buffer"
    monkeypatch.setattr(torch, "stack", refused)
    builder.warm_up(1000)
    here.close()
    there.close()


def test_templates_of_closed_loaders_are_bounded(connect: Connect, tmp_path: Path):
    templates = []
    with connect() as receiver:
        for loader in range(MAX_IDLE_TEMPLATES + 4):
            shipped = bundle_of(Squares(loader + 1), blobs(tmp_path), collate_fn=lambda _: os.getppid())
            session = receiver.know(replace(shipped, loader=loader))
            receiver.ticket(0, [0], session, stream=loader + 1)
            templates.append(receiver.next().batch())
            receiver.send(FrameKind.RELEASE, bundle=session)
        wait_until(lambda: sum(map(alive, templates)) == MAX_IDLE_TEMPLATES, 10, "the oldest are gone")
        assert alive(templates[-1])


def test_strangers_leave_a_feeder_the_descriptors_its_sessions_need(tmp_path: Path):
    with contextlib.ExitStack() as stack:
        process, about = stack.enter_context(feeder_process(tmp_path, max_files=80))
        receiver = stack.enter_context(Receiver(about["port"], KEY))
        for _ in range(200):
            stack.enter_context(socket.create_connection(("127.0.0.1", about["port"])))
        for number in range(5):
            session = receiver.know(bundle_of(Squares(number + 10), blobs(tmp_path)))
            receiver.ticket(number, [number], session)
            assert receiver.next().batch().tolist() == [number**2]
        assert process.poll() is None


@pytest.mark.parametrize("nbytes", [0, 1, 64 * 1024 - 1, 64 * 1024, 1_000_001])
def test_a_part_of_any_size_is_copied_whole(nbytes: int):
    part, to = os.urandom(nbytes), bytearray(nbytes)
    copy(memoryview(to), part)
    assert bytes(to) == part


def test_threads_of_user_code_run_during_a_large_copy():
    turns, ended = [0], threading.Event()

    def turn() -> None:
        while not ended.is_set():
            turns[0] += 1
            time.sleep(0)

    thread = threading.Thread(target=turn)
    thread.start()
    part = memoryview(torch.arange(1 << 25).numpy()).cast("B")
    to = memoryview(bytearray(len(part)))
    try:
        before = turns[0]
        copy(to, part)
        during = turns[0] - before
    finally:
        ended.set()
        thread.join()
    assert during > 100, "it takes some 0.1 s, and a turn some microseconds"
