"""The life of loaders, iterators and batches in a trainer process: what they hold, and how they end."""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import io
import json
import operator
import os
import pickle
import random
import resource
import signal
import statistics
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from batches import Augmented, Gated, Numbers, Sized, epoch, ids
from rig import Rig, until
from torch.utils import data

import dataloaderjob
from dataloaderjob import DataLoader
from dataloaderjob.batches.decoding import BodyPlan, Decoder
from dataloaderjob.core import control
from dataloaderjob.core.errors import ServiceError, ServiceUnavailable, UnsupportedBatch
from dataloaderjob.trainer.session import attach
from dataloaderjob.trainer.session.pool import Pool
from processes import alive, go_on, in_child, line, open_files, rollup, script, usage


@pytest.fixture(scope="module")
def rig() -> Iterator[Rig]:
    with Rig(feeders=2) as made:
        yield made


@pytest.fixture(autouse=True)
def fresh(rig: Rig) -> None:
    """The loaders of the test before are gone, and with them its pool, unless it failed."""
    gc.collect()
    with contextlib.suppress(AssertionError):
        until(lambda: not rig.status()["receivers"], 1.0)


def pool(rig: Rig, pid: int | None = None) -> dict[str, Any]:
    """The metrics of the pool of this process, or another."""
    (found,) = [r for r in rig.status()["receivers"] if r["trainer"] == (pid or os.getpid())]
    return found


# The trainer process


def test_trainer_imports_no_ray_and_starts_no_thread(rig: Rig) -> None:
    with script("""
        import os, sys
        import torch
        from batches import Augmented
        torch.set_num_threads(1)
        torch.randn(1000, 1000) @ torch.randn(1000, 1000)
        from dataloaderjob import DataLoader
        before = sorted(os.listdir("/proc/self/task"))
        loader = DataLoader(Augmented(100), batch_size=5)
        for _ in range(3):
            for batch in loader:
                pass
        iterator = iter(loader)
        next(iterator)
        assert sorted(os.listdir("/proc/self/task")) == before, "a thread was started"
        print(sorted(m for m in sys.modules if m.partition(".")[0] in ("ray", "rich", "pydantic", "yaml", "grpc")))
    """) as process:
        assert line(process) == "[]"


@pytest.mark.nightly
def test_two_hundred_short_epochs_do_not_grow_any_resource(rig: Rig) -> None:
    """Memory, descriptors, threads and extents, in trainer, sidecar and feeders."""
    with script("""
        import torch
        from batches import Augmented
        from dataloaderjob import DataLoader
        torch.set_num_threads(1)
        train, val = DataLoader(Augmented(300), batch_size=20, shuffle=True), DataLoader(Augmented(64), batch_size=20)
        steady = DataLoader(Augmented(60), batch_size=20, persistent_workers=True)

        def run(epochs):
            for number in range(epochs):
                for step, batch in enumerate(train):
                    if number % 5 == 4 and step == 3:
                        break
                for a, b in zip(val, val):
                    pass
                for batch in steady:
                    pass
                train.dataset.width = 100 + number % 3

        while True:
            run(int(input()))
            print("done", flush=True)
    """) as process:

        def run(epochs: int) -> dict[int, Any]:
            process.stdin.write(f"{epochs}\n")
            process.stdin.flush()
            assert line(process) == "done"
            until(lambda: pool(rig, process.pid)["lent"] <= 16, what="the return of leases")
            found = pool(rig, process.pid)
            pids = [process.pid, rig.sidecar.pid, found["receiver"], *(p.pid for p, _ in rig.feeders)]
            assert found["streams"] <= 2
            return {pid: usage(pid) for pid in pids} | {0: (found["total_nbytes"], found["pool_nbytes"])}

        before = run(40)
        after = run(160)
    assert before.keys() == after.keys()
    assert before.pop(0) == after.pop(0), "the pool grew"
    for pid, was in before.items():
        now = after[pid]
        assert now.private_kb < was.private_kb + 2500, (pid, process.pid, was, now)
        assert abs(now.fds - was.fds) <= 1, (pid, was, now)
        assert now.threads == was.threads, (pid, was, now)


EXITS = {
    "a live iterator and kept batches": ("kept = [next(iterator) for _ in range(5)]", 0, ""),
    "sys.exit in mid-epoch": ("next(iterator); sys.exit(3)", 3, ""),
    "an error in mid-epoch": ("next(iterator); raise KeyError('mine')", 1, "KeyError: 'mine'"),
    "a daemon thread that waits": (
        # It must be in our wait: torch's own operators abort a process that ends in the middle of one.
        """seen, waits = threading.Event(), DataLoader(Gated(gate, 2), batch_size=2)
threading.Thread(target=lambda: [seen.set() for _ in waits], daemon=True).start(); seen.wait(); next(iterator)""",
        0,
        "",
    ),
    "batches in reference cycles": ("cycle = [next(iterator)]; cycle.append(cycle); del cycle", 0, ""),
}


def test_exit_codes_and_output_are_the_scripts_own(rig: Rig, tmp_path: Path) -> None:
    """Exit codes are the script's own, and nothing is said that the script does not say."""
    processes = []
    gate = tmp_path / "gate"
    for ending, _, _ in EXITS.values():
        text = "import pathlib, sys, threading\nfrom batches import Gated, Numbers\n"
        text += f"from dataloaderjob import DataLoader\ngate = pathlib.Path({str(gate)!r})\n"
        text += f"loader = DataLoader(Numbers(500), batch_size=2)\niterator = iter(loader)\n{ending}\n"
        context = script(text)
        processes.append((context, context.__enter__()))
    try:
        for (name, (_, code, said)), (_, process) in zip(EXITS.items(), processes, strict=True):
            out, err = process.communicate(timeout=60)
            assert (process.returncode, out) == (code, ""), f"{name}: {err}"
            assert err.strip().splitlines()[-1:] == ([said] if said else []), name
            assert "Exception ignored" not in err
    finally:
        gate.touch()
        for context, _ in processes:
            context.__exit__(None, None, None)


# Iteration


def test_iteration_restarts_after_a_break(rig: Rig) -> None:
    loader = DataLoader(Numbers(200), batch_size=5)
    for stop in (0, 1, 7, 0):
        for step, batch in enumerate(loader):
            if step == stop:
                break
        del batch
    assert ids(loader) == list(range(200))


def test_persistent_iterator_restarts_after_a_break(rig: Rig) -> None:
    loader = DataLoader(Numbers(200), batch_size=5, persistent_workers=True)
    for stop in (0, 3, 1):
        for step, batch in enumerate(loader):
            assert batch[0].tolist() == list(range(5 * step, 5 * step + 5))
            if step == stop:
                break
    del batch
    assert ids(loader) == list(range(200))
    assert iter(loader) is iter(loader)


def test_nested_iteration_and_zip_of_one_loader(rig: Rig) -> None:
    loader = DataLoader(Numbers(30), batch_size=10)
    nested = [(a[0].tolist(), b[0].tolist()) for a in loader for b in loader]
    parts = [list(range(i, i + 10)) for i in (0, 10, 20)]
    assert nested == [(a, b) for a in parts for b in parts]
    assert [(a[0].tolist(), b[0].tolist()) for a, b in zip(loader, loader, strict=True)] == [
        (p, p) for p in parts
    ]
    assert len(rig.status()["receivers"]) == 1


def test_two_loaders_at_once_with_batches_of_very_different_size(rig: Rig) -> None:
    small, large = DataLoader(Numbers(60), batch_size=3), DataLoader(Sized(1 << 20, 40), batch_size=2)
    for at, (a, b) in enumerate(zip(small, large, strict=True)):
        assert a[0].tolist() == [3 * at, 3 * at + 1, 3 * at + 2]
        assert torch.equal(b, torch.tensor([[2 * at], [2 * at + 1]], dtype=torch.uint8).expand_as(b))


def test_dataset_changed_between_epochs_is_seen(rig: Rig) -> None:
    loader = DataLoader(Numbers(4, width=2), batch_size=4)
    widths = []
    for width in (2, 5, 3, 2):
        loader.dataset.width = width
        widths += [batch[1].shape[1] for batch in loader]
    assert widths == [2, 5, 3, 2]


def test_collate_fn_and_num_workers_changed_between_epochs_are_seen(rig: Rig) -> None:
    loader = DataLoader(Numbers(4), batch_size=4)
    assert len(next(iter(loader))) == 2
    loader.collate_fn = len
    assert next(iter(loader)) == 4
    loader.num_workers = 0
    loader.collate_fn = id  # would differ in a feeder
    samples = next(iter(loader))
    assert isinstance(samples, int)


def test_client_closing_in_one_thread_is_not_reused_by_another(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    ending, go = threading.Event(), threading.Event()
    drop = Pool.drop

    def slowly(pool: Pool, number: int) -> None:
        ending.set()
        assert go.wait(20)
        drop(pool, number)

    iterators = [iter(DataLoader(Numbers(6), batch_size=2))]
    next(iterators[0])
    monkeypatch.setattr(Pool, "drop", slowly)
    thread = threading.Thread(target=iterators.clear)
    thread.start()
    try:
        assert ending.wait(20)
        monkeypatch.setattr(Pool, "drop", drop)
        loader = DataLoader(Numbers(6), batch_size=2)
        found, second = ids(loader), iter(loader)
    finally:
        go.set()
        thread.join()
    assert found == list(range(6))
    assert ids(second) == found, "its descriptors are not those that were closed"


@pytest.mark.slow
def test_too_many_live_iterators_are_refused(rig: Rig) -> None:
    loader = DataLoader(Numbers(40), batch_size=10)
    live = [iter(loader) for _ in range(control.ROWS)]
    with pytest.raises(ServiceError, match="at most 64 iterators can exist at once: release some"):
        iter(loader)
    assert [ids(x) for x in live] == [list(range(40))] * control.ROWS
    del live[::2]
    assert ids(loader) == list(range(40))


def test_exhausted_iterator_stays_exhausted(rig: Rig) -> None:
    iterator = iter(DataLoader(Numbers(3)))
    assert len(list(iterator)) == 3
    assert [next(iterator, "end") for _ in range(3)] == ["end"] * 3


def test_sampler_error_is_raised_in_turn(rig: Rig) -> None:
    def failing() -> Iterator[list[int]]:
        yield [1, 2]
        yield [3]
        raise ZeroDivisionError("mine")

    class Sampler(data.Sampler):
        def __iter__(self):
            return failing()

    for options in ({}, {"num_workers": 0}):
        iterator = iter(DataLoader(Numbers(9), batch_sampler=Sampler(), **options))
        assert [next(iterator)[0].tolist() for _ in range(2)] == [[1, 2], [3]]
        with pytest.raises(ZeroDivisionError, match="mine"):
            next(iterator)
        assert next(iterator, "end") == "end"


def test_large_index_lists_and_keys_of_any_size_arrive(rig: Rig) -> None:
    """More than one packet of the socket, which takes 208 KiB."""
    loader = DataLoader(Numbers(50_000, width=1), batch_size=50_000)
    (batch,) = loader
    assert batch[0].tolist() == list(range(50_000))


def test_file_descriptors_above_1024_work(rig: Rig) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(4096, hard)), hard))
    taken = [os.open("/dev/null", os.O_RDONLY) for _ in range(1100)]
    try:
        assert ids(DataLoader(Numbers(300, seconds=0.001), batch_size=10)) == list(range(300))
    finally:
        for fd in taken:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_leftovers_of_iterator_65536_before_are_not_taken_for_a_batch(rig: Rig) -> None:
    before = DataLoader(Numbers(20))
    assert ids(before) == list(range(20))
    before._client._last_stream += 0x10000 - 1
    assert ids(DataLoader(Numbers(20, seconds=0.01), sampler=range(19, -1, -1))) == list(range(19, -1, -1))


# Batches


def test_batches_kept_beyond_the_limit_become_copies_with_one_warning(rig: Rig) -> None:
    loader = DataLoader(Sized(1 << 16, 200), batch_size=4)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        hoard = list(loader)
    (warning,) = [w for w in caught if "this process still holds" in str(w.message)]
    assert warning.filename == __file__, "it points to the line that took a batch"
    assert "raise spec.loader.memoryPerProcess" in str(warning.message)
    assert [b[:, 0].tolist() for b in hoard] == [[4 * i, 4 * i + 1, 4 * i + 2, 4 * i + 3] for i in range(50)]
    assert pool(rig)["copies"] >= 25
    del hoard
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        copies = pool(rig)["copies"]
        assert sum(1 for _ in loader) == 50
    assert pool(rig)["copies"] == copies, "with the batches gone, copies end"


def test_warning_about_held_batches_holds_no_batch(rig: Rig) -> None:
    loader = DataLoader(Sized(1 << 14, 200), batch_size=2)
    hoard: list[Any] = []
    gc.disable()
    try:
        with pytest.warns(UserWarning, match="still holds"):  # noqa: PT031
            for batch in loader:
                hoard.append(batch)
        del hoard, batch
        iter(loader)
        until(lambda: pool(rig)["lent"] <= 16, what="the end of leases without the garbage collector")
    finally:
        gc.enable()


def test_shared_memory_smaller_than_a_pool_is_reported(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DATALOADERJOB_SOCKET", rig.another_sidecar("small", shared_memory_nbytes=3 << 20))
    with pytest.warns(
        UserWarning, match=r"has no room for a pool of batches of 2\.1 MB; further batches are copied"
    ):
        found = [batch[:, 0].tolist() for batch in DataLoader(Sized(1 << 20, 40), batch_size=2)]
    assert found == [[2 * i, 2 * i + 1] for i in range(20)]


def test_views_outlive_loader_iterator_and_sidecar(rig: Rig) -> None:
    loader = DataLoader(Sized(1 << 16, 40), batch_size=4)
    kept = [batch[1:, ::2] for batch in loader][:6]
    arrays = [k.numpy() for k in kept]
    expected = [k.clone() for k in kept]
    del loader
    gc.collect()
    until(lambda: not rig.status()["receivers"])
    rig.kill_sidecar()
    for k, e, a in zip(kept, expected, arrays, strict=True):
        assert torch.equal(k, e)
        assert np.array_equal(a, e.numpy())
        k += 1
    del kept, k, expected, arrays, e, a
    gc.collect()
    rig.start_sidecar()
    assert len(list(DataLoader(Sized(1 << 16, 8), batch_size=4))) == 2


def test_batches_can_be_changed_saved_copied_and_differentiated(rig: Rig) -> None:
    loader = DataLoader(Numbers(40, width=50_000), batch_size=4)
    batches = iter(loader)
    _, x = next(batches)
    before = x.clone()
    x.div_(2).add_(1)
    x[0] = 7
    assert torch.equal(x[1:], before[1:] / 2 + 1)
    assert x.untyped_storage().nbytes() == x.nbytes
    for save in (torch.save, pickle.dump):
        out = io.BytesIO()
        save(x, out)
        assert out.tell() < x.nbytes + 2000, "only its own bytes are written"
    assert torch.equal(copy.deepcopy(x), x)
    w = torch.ones(50_000, requires_grad=True)
    loss = (x @ w).sum()
    expected = x.sum(0)
    del x
    gc.collect()
    for _ in batches:  # would overwrite the place of what autograd saved, were it free
        pass
    loss.backward()
    assert torch.equal(w.grad, expected)


def test_batches_go_to_other_processes(rig: Rig) -> None:
    queue = torch.multiprocessing.get_context("fork").Queue()
    for _, x in DataLoader(Numbers(40, width=5000), batch_size=4):
        queue.put(x)  # torch moves it into shared memory of its own
    found = torch.cat([queue.get(timeout=10) for _ in range(10)])
    assert found[:, 0].tolist() == list(range(40))
    assert found[:, -1].tolist() == [i + 2499.5 for i in range(40)]
    x = next(iter(DataLoader(Numbers(4), batch_size=4)))[1]
    assert x.share_memory_()[:, 0].tolist() == list(range(4))


def test_extents_return_when_their_last_view_ends_in_any_thread(rig: Rig) -> None:
    loader = DataLoader(Sized(1 << 16, 48), batch_size=4)
    batches = list(zip(range(8), loader, strict=False))
    until(lambda: pool(rig)["lent"] >= 8)
    thread = threading.Thread(target=batches.clear)
    thread.start()
    thread.join()
    iter(loader)  # tells the sidecar of the iterator that is gone
    until(lambda: pool(rig)["lent"] <= 16, what="the end of leases")


# Garbage, copies, pickles


def test_garbage_collection_of_loaders_closes_the_connection(rig: Rig) -> None:
    gc.collect()
    before = sorted(os.listdir("/proc/self/fd"))
    loader = DataLoader(Numbers(20), batch_size=2)
    other = DataLoader(Numbers(20), batch_size=2)
    iterator = iter(loader)
    next(iterator)
    next(iter(other))
    assert len(rig.status()["receivers"]) == 1
    receiver = pool(rig)["receiver"]
    del loader, other
    assert len(rig.status()["receivers"]) == 1, "the iterator goes on without its loader"
    assert len(list(iterator)) == 9
    del iterator
    until(lambda: not rig.status()["receivers"])
    assert not alive(receiver)
    assert sorted(os.listdir("/proc/self/fd")) == before


def test_used_loader_pickles_and_copies_without_its_connection(rig: Rig) -> None:
    loader = DataLoader(Numbers(20), batch_size=5, generator=torch.Generator(), persistent_workers=True)
    assert ids(loader) == list(range(20))
    for again in (pickle.loads(pickle.dumps(loader)), copy.copy(loader), copy.deepcopy(loader)):
        assert type(again) is DataLoader
        assert ids(again) == list(range(20))
        assert again._iterator is not loader._iterator
    assert ids(loader) == list(range(20))


def test_loader_can_be_rebuilt_from_its_attributes(rig: Rig) -> None:
    arguments = {
        "batch_size": 3, "sampler": list(range(11)), "num_workers": 2, "collate_fn": list, "drop_last": True,
        "timeout": 9, "worker_init_fn": print, "prefetch_factor": 3, "persistent_workers": True, "allow_pickle": True,
        "in_order": False,
    }  # fmt: skip
    first = DataLoader(Numbers(11), **arguments)
    again = DataLoader(**{name: getattr(first, name) for name in ("dataset", *arguments)})
    assert {name: getattr(again, name) for name in arguments} == arguments
    assert isinstance(again, data.DataLoader)
    assert len(again) == len(first) == 3


# Threads


@pytest.mark.thorough
def test_two_threads_iterate_one_loader_and_another(rig: Rig) -> None:
    loader, other = (
        DataLoader(Numbers(400), batch_size=2),
        DataLoader(Augmented(300, seconds=0.0002), batch_size=3),
    )
    found: list[Any] = []

    def run(which: DataLoader) -> None:
        try:
            found.append(ids(which))
        except BaseException as exc:
            found.append(exc)

    for _ in range(4):
        threads = [threading.Thread(target=run, args=(which,)) for which in (loader, loader, other, other)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert sorted(found, key=len) == [list(range(300))] * 2 + [list(range(400))] * 2
        found.clear()


def test_iterator_made_in_one_thread_is_used_in_another(rig: Rig) -> None:
    iterator = iter(DataLoader(Numbers(100), batch_size=5))
    first = next(iterator)[0].tolist()
    rest: list[int] = []
    thread = threading.Thread(target=lambda: rest.extend(ids(iterator)))
    thread.start()
    thread.join(30)
    assert first + rest == list(range(100))


# Signals


class Interrupt(BaseException):
    """What the handler raises: as KeyboardInterrupt, but only ours."""


@pytest.fixture
def next_within() -> Iterator[Callable[[Any, float], Any]]:
    """next() with None at the end; Interrupt is raised within it after so many seconds, 0 for never."""
    armed = False

    def on_alarm(*_: object) -> None:
        if armed:
            raise Interrupt

    def taken(iterator: Any, seconds: float) -> Any:
        nonlocal armed
        signal.setitimer(signal.ITIMER_REAL, seconds)
        try:
            armed = True
            batch = next(iterator, None)
            armed = False
            return batch
        finally:
            armed = False

    old = signal.signal(signal.SIGALRM, on_alarm)
    yield taken
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, old)


def test_interrupt_during_next_ends_the_iterator_and_the_state_resumes(rig: Rig, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    loader = DataLoader(Gated(gate, at=12), batch_size=3)
    iterator = iter(loader)
    found = [next(iterator)[0].tolist() for _ in range(4)]
    timer = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        next(iterator)
    timer.join()
    gate.touch()
    for _ in range(2):
        with pytest.raises(ServiceError, match=r"KeyboardInterrupt interrupted next\(\).*state_dict"):
            next(iterator)
    state = loader.state_dict()
    assert state["batches"] == 4
    loader.load_state_dict(state)
    found += [batch[0].tolist() for batch in loader]
    assert functools.reduce(operator.iadd, found, []) == list(range(40))


def median_of_next(loader: Any) -> float:
    """Seconds that next() takes."""
    times, iterator = [], iter(loader)
    done = object()
    began = time.perf_counter()
    while next(iterator, done) is not done:
        times.append(time.perf_counter() - began)
        began = time.perf_counter()
    return statistics.median(times)


@pytest.mark.thorough
@pytest.mark.parametrize("options", [{"timeout": 20}, {"num_workers": 0}], ids=["service", "in-process"])
@pytest.mark.quick("service")
def test_interrupts_at_any_moment_keep_state_digest_and_connection(
    rig: Rig, options: dict[str, int], next_within: Callable[[Any, float], Any]
) -> None:
    """Wherever the interrupt came, a loop that goes on from the state sees each batch once, with the same digest."""
    interrupts, digests = 0, set()
    # a list's iterator is C code, which an interrupt cannot end, as it ends a generator
    batches = [[2 * i, 2 * i + 1] for i in range(30)]
    # half of the interrupts come within next(), however fast the machine is
    longest = 2 * median_of_next(DataLoader(Numbers(60), batch_sampler=batches, **options))
    for _ in range(2):
        before = interrupts
        loader = DataLoader(Numbers(60), batch_sampler=batches, **options)
        iterator: Any = iter(loader)
        found: list[int] = []
        disturb, batch = True, None
        while True:
            batch = None  # a finalizer that is interrupted is lost
            try:
                batch = next_within(iterator, disturb * random.uniform(10e-6, longest))
            except Interrupt:
                interrupts += 1
                if iterator._broken:  # else it came behind next()
                    with pytest.raises(ServiceError, match="Interrupt interrupted"):
                        next(iterator)
                state = loader.state_dict()
                if found and state["batches"] in (0, len(batches)):
                    break  # it came behind the last batch: the state is that of the next epoch
                loader = DataLoader(Numbers(60), batch_sampler=batches, **options)
                loader.load_state_dict(state)
                iterator, disturb = (
                    iter(loader),
                    False,
                )  # what it takes up again takes longer than the next alarm
                continue
            disturb = True
            if batch is None:
                break
            assert torch.equal(batch[1][:, 0], batch[0].float()), "a batch was overwritten"
            assert batch[0].tolist()[0] == 2 * loader.state_dict()["batches"] - 2
            found.append(batch[0].tolist()[0])
        assert found == sorted(set(found)), "each batch at most once, in order"
        assert 30 - len(found) <= interrupts - before, (
            "only what next() was just returning is lost with the interrupt"
        )
        digests.add(loader.digest)
        del iterator
    assert interrupts > 5
    assert len(digests) == 1, "what is given counts once"
    if "timeout" in options:
        gc.collect()
        assert ids(DataLoader(Numbers(50), batch_size=5)) == list(range(50))


@pytest.mark.parametrize("at", [0, 3])
def test_interrupt_in_one_epoch_of_persistent_workers_spares_the_next(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    """What was being taken is let go with its epoch, and once: its lease's number is soon another batch's."""

    def interrupted(*_: object) -> None:
        raise Interrupt

    generator = torch.Generator().manual_seed(3)
    loader = DataLoader(
        Numbers(60), batch_size=5, shuffle=True, generator=generator, num_workers=2, persistent_workers=True
    )
    iterator: Any = iter(loader)
    for _ in range(at):
        next(iterator)
    with monkeypatch.context() as patch:
        patch.setattr(BodyPlan, "batch", interrupted)
        with pytest.raises(Interrupt):
            next(iterator)
    for _ in range(3):
        batches = list(loader)
        assert sorted(number for batch in batches for number in batch[0].tolist()) == list(range(60))
        assert all(torch.equal(batch[1][:, 0], batch[0].float()) for batch in batches)
        del batches
    books = iterator._client.pool
    assert books.leases == {}
    assert books.leased_nbytes == 0


def test_signal_handler_error_after_taking_a_batch_ends_the_iterator(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a watchdog's TimeoutError: else the batch would be left out without a word."""

    def late(*_: object) -> None:
        raise TimeoutError("a watchdog")

    loader = DataLoader(Numbers(40), batch_size=2)
    iterator: Any = iter(loader)
    found = ids([next(iterator) for _ in range(3)])
    with monkeypatch.context() as patch:
        patch.setattr(type(iterator), "_advance", late)
        with pytest.raises(TimeoutError):
            next(iterator)
    with pytest.raises(ServiceError, match="TimeoutError interrupted next"):
        next(iterator)
    loader.load_state_dict(loader.state_dict())
    assert found + ids(loader) == list(range(40))


def test_interrupt_in_one_epoch_of_torchs_iterator_spares_the_next(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> None:
        raise Interrupt

    loader = data.DataLoader(
        Numbers(40), batch_size=2, num_workers=2, persistent_workers=True,
        multiprocessing_context=dataloaderjob.context(),
    )  # fmt: skip
    iterator = iter(loader)
    next(iterator)
    with monkeypatch.context() as patch:
        patch.setattr(BodyPlan, "batch", interrupted)
        with pytest.raises(Interrupt):
            next(iterator)
    with pytest.raises(ServiceError, match="Interrupt interrupted next"):
        next(iterator)
    for _ in range(2):
        assert ids(loader) == list(range(40))


def test_interrupted_sampler_does_not_look_exhausted(rig: Rig) -> None:
    """A generator is over once an exception went through it: the epoch must not end early and in silence."""

    class Interrupted(data.Sampler):
        def __iter__(self) -> Any:
            for number in range(200):
                if number == 100:
                    raise Interrupt
                yield number

    iterator = iter(DataLoader(Numbers(200), batch_size=2, sampler=Interrupted()))
    with pytest.raises(Interrupt):
        ids(iterator)
    for _ in range(3):
        with pytest.raises(ServiceError, match="Interrupt interrupted next"):
            next(iterator)


def test_invalid_keys_raise_the_samplers_error_in_turn(rig: Rig) -> None:
    batches: Any = [[0, 1], [2, 3], 6, [7]]
    for kind, options, rest in (
        (DataLoader, {}, []),
        (DataLoader, {"num_workers": 0}, [7]),
        (data.DataLoader, {}, [7]),
    ):
        iterator = iter(kind(Numbers(10), batch_sampler=batches, **options))
        assert [next(iterator)[0].tolist() for _ in range(2)] == [[0, 1], [2, 3]]
        with pytest.raises(TypeError):
            next(iterator)
        assert ids(iterator) == rest


def test_batches_that_cannot_be_rebuilt_return_their_extents(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unknown(*_: object) -> None:
        raise UnsupportedBatch("this process lacks the class of the batch")

    iterator = iter(DataLoader(Numbers(200), batch_size=5))
    next(iterator)
    with monkeypatch.context() as patch:
        patch.setattr(Decoder, "plan", unknown)
        for _ in range(30):
            with pytest.raises(UnsupportedBatch):
                next(iterator)
    assert [number for batch in iterator for number in batch[0].tolist()] == list(range(155, 200))
    # `batches` says that these metrics are not those of the beginning, when nothing was lent either
    until(lambda: (found := pool(rig))["batches"] == 40 and found["lent"] == 0, what="the end of all leases")


def test_tensors_created_for_later_batches_ignore_inference_mode(rig: Rig) -> None:
    """A tensor made under inference_mode() is of no use for training, whichever loop was before."""
    loader = DataLoader(Numbers(200), batch_size=5)
    for mode in (torch.inference_mode(), torch.inference_mode(False)) * 2:
        with mode:
            for batch in loader:
                assert torch.is_inference_mode_enabled() or not any(t.is_inference() for t in batch)
    weight = torch.ones(1, requires_grad=True)
    for _, values in loader:
        (weight * values).sum().backward()
    assert weight.grad is not None


def test_batch_taken_when_a_slow_sampler_is_interrupted_is_given_again(
    rig: Rig, next_within: Callable[[Any, float], Any]
) -> None:
    """It is interrupted while it draws for later, when a batch has been taken already."""

    class Slow(data.Sampler):
        def __iter__(self) -> Any:
            return self

        def __next__(self) -> list[int]:
            self.at = getattr(self, "at", -1) + 1
            if self.at == 30:
                raise StopIteration
            if self.at == 20:
                time.sleep(0.5)
            return [self.at]

    loader = DataLoader(Numbers(30), batch_sampler=Slow())
    iterator = iter(loader)
    found = ids([next(iterator)])  # feeders load the dataset for it
    with pytest.raises(Interrupt):
        while True:
            found += ids([next_within(iterator, 0.2)])
    assert found == list(range(4)), "the fifth was taken when the sampler was asked for the 21st"
    again = DataLoader(Numbers(30), batch_sampler=Slow())
    again.load_state_dict(loader.state_dict())
    assert found + ids(again) == list(range(30))


# Forks


def test_forked_child_is_refused_and_the_parent_is_unharmed(rig: Rig) -> None:
    loader = DataLoader(Numbers(200), batch_size=5)
    iterator = iter(loader)
    kept = next(iterator)
    told = in_child(lambda: str(next(iterator)))
    assert told == (
        "ServiceUnavailable: this iterator belongs to the parent process: call iter(loader) again in the forked child"
    )
    assert ids([kept]) + ids(iterator) == list(range(200))
    until(lambda: pool(rig)["lent"] <= 2)


def test_parents_batches_outlive_a_forked_child(rig: Rig) -> None:
    loader = DataLoader(Sized(1 << 14, 400), batch_size=2)
    iterator = iter(loader)
    kept = [next(iterator) for _ in range(6)]
    expected = [k.clone() for k in kept]

    def drop() -> str:
        nonlocal iterator, loader
        kept.clear()
        del iterator, loader
        gc.collect()
        return str([target for target in open_files() if "dlj" in target or "eventfd" in target])

    assert in_child(drop) == "[]", "the child keeps no descriptor of the pool"
    for _ in range(150):
        next(iterator)
    assert all(torch.equal(k, e) for k, e in zip(kept, expected, strict=True)), "a lent batch was overwritten"


def test_batches_of_a_forked_child_stay_intact_while_the_parent_continues(rig: Rig) -> None:
    iterator = iter(DataLoader(Sized(1 << 20, 400), batch_size=2))
    kept = [next(iterator) for _ in range(3)]
    # numpy's, as torch's own threads are not there in a forked child
    sums = [int(batch.numpy().sum()) for batch in kept]
    (told, tell), (wait, go) = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        os.read(wait, 1)
        same = [int(batch.numpy().sum()) for batch in kept] == sums
        kept[0].numpy()[:] += 1  # it is the child's own
        os.write(tell, b"1" if same else b"0")
        os._exit(0)
    kept.clear()
    for _ in range(150):  # their places are used many times
        next(iterator)
    os.write(go, b"x")
    assert os.read(told, 1) == b"1"
    os.waitpid(child, 0)
    for fd in (told, tell, wait, go):
        os.close(fd)


def test_leases_ending_during_a_fork_end_afterwards(rig: Rig) -> None:
    iterator = iter(DataLoader(Sized(1 << 14, 400), batch_size=2))
    kept = [next(iterator) for _ in range(6)]
    stop = threading.Event()

    def let_go() -> None:
        while not stop.is_set() and kept:
            kept.pop()
            time.sleep(0.002)

    thread = threading.Thread(target=let_go)
    thread.start()
    for _ in range(5):
        assert in_child(lambda: "forked") == "forked"
    stop.set()
    thread.join()
    kept.clear()
    for _ in range(100):
        next(iterator)
    until(lambda: pool(rig)["lent"] <= 20, what="the end of what was let go while it forked")


@pytest.mark.parametrize("persistent", [False, True])
def test_forked_child_with_its_own_rank_can_iterate(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, persistent: bool
) -> None:
    monkeypatch.setenv("RANK", "0")
    loader = DataLoader(Numbers(60), batch_size=5, persistent_workers=persistent)
    iterator = iter(loader)
    first = next(iterator)

    def with_a_rank_of_its_own() -> str:
        os.environ["RANK"] = "1"
        return str(ids(loader))

    assert in_child(with_a_rank_of_its_own) == str(list(range(60)))
    refused = in_child(lambda: str(ids(loader)))
    assert f"rank 0 is taken by the live process {os.getpid()}" in refused
    assert "give each process its own RANK" in refused
    assert ids([first]) + ids(iterator) == list(range(60))


def test_torchs_loader_with_forked_workers_works_next_to_ours(rig: Rig) -> None:
    ours, theirs = (
        DataLoader(Numbers(60), batch_size=5),
        data.DataLoader(Numbers(60), batch_size=5, num_workers=2),
    )
    for a, b in zip(ours, theirs, strict=True):
        assert a[0].tolist() == b[0].tolist()
    assert epoch(ours) == epoch(theirs)


# The sidecar goes and comes


def test_lost_sidecar_is_reported_and_a_new_one_is_found_later(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(attach, "ABSENCE_DEADLINE_S", 1.0)
    monkeypatch.setattr(attach, "ABSENCE_NOTE_S", 0.2)
    loader = DataLoader(Numbers(60), batch_size=2, persistent_workers=True)
    iterator = iter(loader)
    next(iterator)
    rig.kill_sidecar()
    with pytest.raises(
        ServiceUnavailable, match=r"no sidecar appeared at .* within 1 s \(is its container running\?\)"
    ):
        list(iterator)
    with pytest.raises(ServiceUnavailable, match="no sidecar appeared"):
        next(iterator)
    assert "no sidecar responds at " in capsys.readouterr().err
    rig.start_sidecar()
    assert ids(loader) == list(range(60))


def test_interrupt_without_a_sidecar_is_immediate_and_the_state_resumes(
    rig: Rig, next_within: Callable[[Any, float], Any]
) -> None:
    loader = DataLoader(Numbers(60), batch_size=2)
    iterator, found = iter(loader), []
    rig.kill_sidecar()
    while True:
        began = time.monotonic()
        try:
            found += ids([next_within(iterator, 0.3)])
        except Interrupt:
            break
    assert time.monotonic() - began < 10
    rig.start_sidecar()
    loader.load_state_dict(loader.state_dict())
    assert found + ids(loader) == list(range(60))


def test_batches_are_not_copied_when_memory_holds_only_three(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    nbytes = 40 << 20
    path = rig.another_sidecar("large", processes=1, shared_memory_nbytes=3 * nbytes + (1 << 20))
    monkeypatch.setenv("DATALOADERJOB_SOCKET", path)
    loader = DataLoader(Sized(nbytes, 12), batch_size=None)
    count, iterator = 0, iter(loader)
    for number, batch in enumerate(iterator):
        assert int(batch[0]) == number % 256
        count += 1
    assert count == 12
    assert iterator._client.pool.copies == 0  # type: ignore[attr-defined]


def test_worker_info_works_in_feeders_and_worker_init_fn_runs_once_each(rig: Rig, tmp_path: Path) -> None:
    class Telling(Numbers):
        def __getitem__(self, i: int) -> Any:
            info = data.get_worker_info()
            return os.getpid(), info.id, info.num_workers, type(info.dataset).__name__, info.seed

    def init(worker: int) -> None:
        with open(tmp_path / "init", "a") as out:
            out.write(f"{os.getpid()} {worker}\n")

    loader = DataLoader(Telling(40, seconds=0.001), batch_size=None, worker_init_fn=init)
    told = {tuple(sample[:4]) for sample in loader}
    assert {t[3] for t in told} == {"Telling"}
    assert {f"{pid} {index}" for pid, index, *_ in told} <= set((tmp_path / "init").read_text().splitlines())
    assert len((tmp_path / "init").read_text().splitlines()) <= 2
    assert data.get_worker_info() is None


def test_pool_is_the_only_memory_of_batches_in_the_trainer(rig: Rig) -> None:
    with script(
        """
        from batches import Sized
        from dataloaderjob import DataLoader
        for batch in DataLoader(Sized(1 << 20, 200), batch_size=2):
            pass
        print("done", flush=True)
        input()
    """,
        cold=True,
    ) as process:
        assert line(process) == "done"
        found = rollup(process.pid)
        assert found["Shared_Dirty"] < 64 * 1024
        go_on(process)
        assert process.wait(20) == 0
        assert json.loads(json.dumps(rig.status()))["receivers"] is not None
