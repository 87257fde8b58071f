"""Feeders that die, freeze, come back, do not fit or are not there; and user code at its most unkind.

What bad input says in the ordinary cases is in test_bad_input.
"""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from batches import Numbers, as_list, ids
from lister import Lister
from rig import JOB, Rig, until
from troubles import BadState, CorruptImage, ExitsOnce, Fails, Gives, Nested, Unprintable

from dataloaderjob import DataLoader
from dataloaderjob.core.errors import DeadlineExceeded, InputError, ServiceUnavailable, UnsupportedBatch

DEADLINE_S = 15.0
"""Long enough for a busy machine to load user code; two tests wait for its end."""


class Fleet(Rig):
    """A rig whose feeders are listed by a supervisor of ours, and started again when they die."""

    def __init__(self, feeders: int) -> None:
        super().__init__(feeders, batch_deadline_s=DEADLINE_S)
        self.lister = Lister((self.home / "key").read_bytes(), JOB)
        self.sidecar_options |= {
            "supervisor_host": "127.0.0.1",
            "supervisor_port": self.lister.port,
            "feeders": (),
        }

    def start_sidecar(self, **more: Any) -> Any:
        self.relist()
        return super().start_sidecar(**more)

    def relist(self) -> None:
        self.lister.list(self.endpoints(), desired=self.count)

    def revive(self) -> None:
        """Starts as many feeders as have died."""
        dead = self.count - len(self.endpoints())
        if dead > 0:
            self.add_feeders(dead)
            self.relist()

    @contextlib.contextmanager
    def revived(self) -> Iterator[None]:
        """While the block runs, feeders that die are started again."""
        stop = threading.Event()

        def policy() -> None:
            while not stop.wait(0.05):
                self.revive()

        thread = threading.Thread(target=policy)
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()
            self.revive()

    def __exit__(self, *exc: object) -> None:
        super().__exit__(*exc)
        self.lister.close()


@pytest.fixture(scope="module")
def fleet() -> Iterator[Fleet]:
    with Fleet(feeders=2) as made:
        yield made


@pytest.fixture(autouse=True)
def fresh(fleet: Fleet) -> None:
    fleet.revive()
    gc.collect()
    with contextlib.suppress(AssertionError):
        until(lambda: not fleet.status()["receivers"], 1.0)


def flaw(dataset: Any, **options: Any) -> Any:
    """Of forty samples in batches of five, number 17 goes wrong: its error. All other batches arrive."""
    iterator, errors, batches = iter(DataLoader(dataset, batch_size=5, **options)), {}, 0
    while True:
        try:
            next(iterator)
            batches += 1
        except StopIteration:
            break
        except Exception as exc:
            errors[batches] = exc
    assert (list(errors), batches) == ([3], 7), errors
    return errors[3]


# Feeders come and go


def test_feeder_dying_once_changes_no_batch(fleet: Fleet, tmp_path: Path) -> None:
    with fleet.revived():
        assert ids(DataLoader(ExitsOnce(tmp_path / "died"), batch_size=5)) == list(range(40))
    assert (tmp_path / "died").exists()


def test_feeder_frozen_replaced_and_killed_changes_no_batch(fleet: Fleet) -> None:
    """The frozen one wakes up with work that is long done, under the name of the one in its place."""
    frozen, about = next((p, a) for p, a in fleet.feeders if p.poll() is None)
    found: list[int] = []
    for step, batch in enumerate(DataLoader(Numbers(1200, seconds=0.0005), batch_size=5)):
        found += batch[0].tolist()
        if step == 20:
            os.kill(frozen.pid, signal.SIGSTOP)
        if step == 60:
            fleet.add_feeders(1, name=about["name"])
            fleet.relist()
        if step == 90:
            os.kill(frozen.pid, signal.SIGCONT)
        if step == 120:
            frozen.kill()
            frozen.wait()
            fleet.relist()
    assert found == list(range(1200))


def test_changing_list_of_feeders_within_an_epoch_changes_no_batch(fleet: Fleet) -> None:
    everyone = fleet.endpoints()
    found: list[int] = []
    for step, batch in enumerate(DataLoader(Numbers(1200, seconds=0.0005), batch_size=5)):
        found += batch[0].tolist()
        if step % 20 == 10:
            fleet.lister.list(everyone[step // 20 % 3 :][:1] or everyone, desired=1)
    fleet.relist()
    assert found == list(range(1200))


def test_deadline_without_any_feeder_reports_why(fleet: Fleet) -> None:
    fleet.lister.list([], desired=2, notes=("feeder-0: no node has room for it",))
    loader = DataLoader(Numbers(40), batch_size=5)
    try:
        with pytest.raises(
            DeadlineExceeded,
            match=r"no feeder is connected; the supervisor lists 0 of 2 feeders \(feeder-0: no node has room",
        ):
            next(iter(loader))
    finally:
        fleet.relist()
    assert ids(loader) == list(range(40))


def test_supervisor_outage_changes_no_batch(fleet: Fleet) -> None:
    iterator = iter(DataLoader(Numbers(40), batch_size=5))
    found = ids([next(iterator)])
    fleet.lister.close()
    until(lambda: not fleet.status()["supervisor"])
    assert found + ids(iterator) == list(range(40))
    assert ids(DataLoader(Numbers(40), batch_size=5)) == list(range(40)), "new pools know the feeders, too"
    fleet.lister = Lister((fleet.home / "key").read_bytes(), JOB, port=fleet.lister.port)
    fleet.relist()
    until(lambda: fleet.status()["supervisor"])


@pytest.mark.parametrize("what", ["torch", "numpy"])
def test_feeder_of_another_version_is_skipped_or_named_if_alone(
    fleet: Fleet, tmp_path: Path, what: str
) -> None:
    """The feeder is one that believes to have another version."""
    (tmp_path / "sitecustomize.py").write_text(f"import {what}\n{what}.__version__ = '1.2.3'\n")
    before = dict(fleet.env)
    fleet.env["PYTHONPATH"] = f"{tmp_path}{os.pathsep}{fleet.env['PYTHONPATH']}"
    fleet.cold = True
    try:
        (other,) = fleet.add_feeders(1)
    finally:
        fleet.env, fleet.cold = before, False
    try:
        fleet.lister.list(fleet.endpoints()[-1:], desired=1)
        loader = DataLoader(Numbers(40), batch_size=5)
        with pytest.raises(ServiceUnavailable) as told:
            next(iter(loader))
        here = ".".join(sys.modules[what].__version__.split(".")[:2])
        assert (
            f": trainer and feeder differ: the trainer has {what} {here}, but the feeder has 1.2; build"
            in str(told.value)
        )
        fleet.relist()
        until(lambda: fleet.status()["receivers"][0]["feeders_up"] == 3)
        assert ids(loader) == list(range(40)), "feeders that fit do the work beside one that does not"
    finally:
        other.kill()
        other.wait()
        fleet.relist()


# What feeders load


def test_local_modules_travel_with_the_script(fleet: Fleet, tmp_path: Path) -> None:
    (tmp_path / "mydata").mkdir()
    (tmp_path / "mydata" / "__init__.py").write_text("from mydata.deep import Mine\n")
    (tmp_path / "mydata" / "deep.py").write_text(
        "import helper\nclass Mine:\n    def __len__(self): return 4\n"
        "    def __getitem__(self, i): return helper.double(i)\n"
    )
    (tmp_path / "helper.py").write_text("def double(i): return 2 * i\n")
    (tmp_path / "train.py").write_text(
        "from dataloaderjob import DataLoader\nfrom mydata import Mine\n"
        "class Local:\n    def __len__(self): return 4\n    def __getitem__(self, i): return -i\n"
        "print([int(x) for x in DataLoader(Mine())], [int(x) for x in DataLoader(Local())])\n"
    )
    found = subprocess.run(
        [sys.executable, tmp_path / "train.py"],
        env={**fleet.env, "DATALOADERJOB_SOCKET": fleet.socket},
        capture_output=True,
        text=True,
        timeout=60,
        cwd="/",
    )
    assert (found.stdout, found.stderr) == ("[0, 2, 4, 6] [0, -1, -2, -3]\n", "")


def test_data_missing_on_feeders_are_reported_with_the_remedy(fleet: Fleet) -> None:
    with pytest.raises(
        InputError, match=r"'/data/index.bin', which feeders do not see: mount the trainers' data volumes"
    ):
        next(iter(DataLoader(BadState(10))))


def test_loader_within_a_feeder_is_refused(fleet: Fleet) -> None:
    """It would wait for a feeder that waits for it; without `num_workers` it runs where it is."""
    error = flaw(Nested(40))
    assert isinstance(error, ServiceUnavailable)
    assert "a dataloaderjob.DataLoader cannot be iterated inside a feeder: use num_workers=0" in str(error)


# User code at its most unkind


def test_error_of_a_users_class_keeps_type_and_attributes(fleet: Fleet) -> None:
    error = flaw(Fails(lambda: CorruptImage("a.png", offset=12)))
    assert type(error) is CorruptImage
    assert (error.path, error.offset) == ("a.png", 12)
    said = "".join(traceback.format_exception_only(error))
    assert "a.png is corrupt at 12" in said
    assert "raised for index 17 in feeder-" in said
    assert 'troubles.py", line' in said
    own = flaw(Fails(lambda: CorruptImage("a.png", offset=12)), num_workers=0)
    assert (type(own), str(own)) == (CorruptImage, "a.png is corrupt at 12")


class Odd(BaseException):
    """What `except Exception` does not catch."""


UNKIND = [
    pytest.param(lambda: UnicodeDecodeError("utf-8", b"\xff", 0, 1, "bad"), "bad", id="five-arguments"),
    pytest.param(lambda: RuntimeError(), "raised for index 17", id="without-text"),
    pytest.param(lambda: Unprintable(), "Unprintable", id="whose-text-fails"),
    pytest.param(lambda: ValueError("x" * 10**6), "xxx", id="of-a-megabyte"),
    pytest.param(lambda: ValueError("a\ud800b\0c"), "b", id="that-is-no-unicode"),
    pytest.param(lambda: ValueError(threading.Lock()), "_thread.lock", id="with-what-does-not-pickle"),
    pytest.param(lambda: ExceptionGroup("all", [ValueError(1), KeyError(2)]), "all", id="group"),
    pytest.param(lambda: torch.cuda.OutOfMemoryError("gpu"), "gpu", id="torchs-own"),
    pytest.param(lambda: KeyboardInterrupt("no key was pressed"), "no key was pressed", id="an-interrupt"),
    pytest.param(lambda: GeneratorExit("left"), "left", id="of-a-generator"),
    pytest.param(lambda: Odd("base"), "base", id="no-exception"),
]


@pytest.mark.parametrize(("make", "text"), UNKIND)
def test_any_error_arrives_and_so_do_the_other_batches(
    fleet: Fleet, make: Callable[[], BaseException], text: str
) -> None:
    said = "".join(traceback.format_exception_only(flaw(Fails(make))))
    assert text in said
    assert "for index 17 in feeder-" in said
    assert len(said) < 100_000


GARBAGE = [
    pytest.param(object, "object", id="object"),
    pytest.param(lambda: torch.empty(2, device="meta"), "torch.Tensor", id="meta-device"),
    pytest.param(lambda: lambda: 1, "function", id="lambda"),
    pytest.param(lambda: (i for i in range(3)), "generator", id="generator"),
    pytest.param(lambda: NotImplemented, "NotImplementedType", id="NotImplemented"),
]


@pytest.mark.parametrize(("make", "name"), GARBAGE)
def test_leaf_that_cannot_travel_is_named_with_its_path(fleet: Fleet, make: Any, name: str) -> None:
    error = flaw(Gives(lambda: {"boxes": [1, make()]}), collate_fn=as_list)
    assert type(error) is UnsupportedBatch
    assert "this leaf cannot be sent from a feeder to the trainer: batch[2]['boxes'][1]: " in str(error)
    assert name in str(error)
    assert "pass allow_pickle=True to the DataLoader" in str(error)


def test_batch_that_contains_itself_is_refused(fleet: Fleet) -> None:
    def ouroboros() -> Any:
        made: list[Any] = []
        made.append(made)
        return made

    assert "nested deeper than" in str(flaw(Gives(ouroboros), collate_fn=as_list))
