"""Bad input of every kind: one clear error that says what to do, at its turn, and nothing else is lost."""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import re
import subprocess
import sys
import threading
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from batches import Gated, Numbers, ids
from rig import Rig, until
from torch.utils import data

from dataloaderjob import DataLoader
from dataloaderjob.core import frames, ipc
from dataloaderjob.core.errors import (
    DeadlineExceeded,
    FeederLost,
    InputError,
    ServiceUnavailable,
    UnsupportedBatch,
    UserCodeError,
)
from dataloaderjob.core.memory import memory_limit
from dataloaderjob.core.settings import SidecarSettings, dump
from dataloaderjob.shipping import bundles
from dataloaderjob.trainer.session.window import MAX_PREFETCH
from processes import in_child, line, script


@pytest.fixture(scope="module")
def rig() -> Iterator[Rig]:
    with Rig(feeders=2) as made:
        yield made


@pytest.fixture(autouse=True)
def fresh(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """The loaders of the test before are gone, and with them its pool, unless it failed."""
    monkeypatch.setenv("DATALOADERJOB_SOCKET", rig.socket)
    gc.collect()
    with contextlib.suppress(AssertionError):
        until(lambda: not rig.status()["receivers"], 1.0)


def bad(deed: Callable[[], Any], at: int = 7, n: int = 20) -> Numbers:
    """A dataset whose sample `at` is what `deed` does. Its class is local, so it travels by value."""

    class Bad(Numbers):
        def __getitem__(self, i: int) -> Any:
            return deed() if i == at else super().__getitem__(i)

    return Bad(n)


def raises(error: BaseException) -> Callable[[], Any]:
    def deed() -> Any:
        raise error

    return deed


def outcome(iterator: Iterator[Any]) -> tuple[list[int], list[BaseException]]:
    """Ids of all batches that come, and the errors between them."""
    found: list[int] = []
    errors: list[BaseException] = []
    while True:
        try:
            batch = next(iterator)
        except StopIteration:
            return found, errors
        except Exception as exc:
            errors.append(exc)
            assert len(errors) < 50, errors
        else:
            found += ids([batch])


def shown(error: BaseException) -> str:
    """What a traceback ends with, notes among it."""
    return "".join(traceback.format_exception_only(error)).rstrip()


def only_error(loader: DataLoader, without: range, n: int = 20) -> BaseException:
    """The error of a loader over Numbers(n) that loses just the samples `without`."""
    found, errors = outcome(iter(loader))
    assert found == [i for i in range(n) if i not in without]
    assert len(errors) == 1, errors
    return errors[0]


def installed(monkeypatch: pytest.MonkeyPatch, folder: Path, name: str, text: str) -> Any:
    """Makes and imports a module that is installed for this process and not for feeders."""
    home = folder / "site-packages"
    home.mkdir()
    (home / f"{name}.py").write_text(text)
    with monkeypatch.context() as path:
        path.syspath_prepend(home)
        made = importlib.import_module(name)
    monkeypatch.setitem(sys.modules, name, made)
    return made


@pytest.fixture
def script_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """As if the training script were tmp_path/train.py, whose modules travel along."""
    main = sys.modules["__main__"]
    monkeypatch.setattr(main, "__file__", str(tmp_path / "train.py"), raising=False)
    monkeypatch.setattr(main, "__spec__", None)
    return tmp_path


# What cannot be sent to feeders


def test_unpicklable_dataset_is_refused_naming_the_attribute(rig: Rig) -> None:
    dataset = Numbers()
    dataset.store = {"path": "x", "lock": threading.Lock()}
    told = re.escape("dataset.store['lock']: _thread.lock (TypeError: cannot pickle '_thread.lock' object)")
    with pytest.raises(InputError, match=f"this cannot be copied: {told}. Create it in worker_init_fn"):
        iter(DataLoader(dataset, num_workers=1))
    dataset.store["lock"] = None
    assert len(ids(DataLoader(dataset))) == dataset.n


def test_unpicklable_collate_fn_is_refused_naming_its_variable(rig: Rig) -> None:
    def collate() -> Callable[[list[Any]], Any]:
        log = open(os.devnull, "w")  # noqa: SIM115  what it closes over is the point
        return lambda samples: print(samples, file=log)

    with pytest.raises(InputError, match=r"collate_fn: its variable log: _io.TextIOWrapper \(TypeError: "):
        iter(DataLoader(Numbers(), collate_fn=collate(), num_workers=1))
    with pytest.raises(InputError, match=r"worker_init_fn: its default argument 0: _thread\.lock"):
        iter(DataLoader(Numbers(), worker_init_fn=lambda _, lock=threading.Lock(): lock, num_workers=1))


def test_refused_dataset_disturbs_no_other_iterator(rig: Rig) -> None:
    other = iter(DataLoader(Numbers(200), batch_size=2))
    found = ids([next(other)])
    for _ in range(3):
        with pytest.raises(InputError):
            iter(DataLoader([threading.Lock()], num_workers=1))
    assert found + ids(other) == list(range(200))


def test_module_that_feeders_lack_is_named_with_the_remedy(
    rig: Rig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "from batches import Numbers\nclass Ours(Numbers): pass\n"
    ours = installed(monkeypatch, tmp_path, "dlj_only_here", text)
    with pytest.raises(InputError, match="the module 'dlj_only_here', which feeders do not have") as caught:
        next(iter(DataLoader(ours.Ours())))
    assert "install it in the feeders' image" in str(caught.value)
    assert "raised by loading in feeder-" in shown(caught.value)


def test_module_of_keys_that_feeders_lack_is_named(
    rig: Rig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "from typing import NamedTuple\nclass Crop(NamedTuple):\n    index: int\n"
    keys = installed(monkeypatch, tmp_path, "dlj_keys_only_here", text)
    with pytest.raises(
        InputError, match="keys cannot be loaded in a feeder: No module named 'dlj_keys_only_here'"
    ) as caught:
        next(iter(DataLoader(Numbers(), sampler=[keys.Crop(1)])))
    assert "Use ints, strings or tuples as keys" in str(caught.value)
    assert [p.poll() for p, _ in rig.feeders] == [None, None]


def test_unpicklable_keys_raise_in_turn(rig: Rig) -> None:
    """Also beyond the window: what was drawn before them is not lost."""
    for at in (0, 3, 25):
        keys: list[Any] = [[i] for i in range(30)]
        keys[at] = [threading.Lock()]
        iterator = iter(DataLoader(Numbers(), batch_sampler=keys))
        assert [ids([next(iterator)]) for _ in range(at)] == [[i] for i in range(at)]
        with pytest.raises(InputError, match=f"the sampler's keys for batch {at} cannot be sent to feeders"):
            next(iterator)
        assert next(iterator, "end") == "end"


# What user code does in a feeder


def test_getitem_error_arrives_unchanged_and_the_epoch_continues(rig: Rig) -> None:
    deed = raises(ValueError("broken record"))
    error = only_error(DataLoader(bad(deed), batch_size=2), without=range(6, 8))
    text = shown(error)
    assert (type(error), str(error)) == (ValueError, "broken record")
    assert re.match(r"ValueError: broken record\nraised for index 7 in feeder-[01]:\nTraceback", text)
    assert re.search(r'test_bad_input\.py", line \d+, in __getitem__', text)
    assert "workshop.py" not in text, "our own frames are no help"
    assert text.endswith("ValueError: broken record")


Nowhere = type("Nowhere", (Exception,), {"__module__": "nowhere"})
ERRORS = {
    "KeyError": (KeyError("label"), KeyError, "'label'"),
    "OSError": (FileNotFoundError(2, "No such file or directory", "/data/7.png"), FileNotFoundError, "/data/7.png"),
    "SystemExit": (SystemExit("mine"), UserCodeError, "SystemExit: mine"),
    "a type of no module": (Nowhere("mine"), UserCodeError, "Nowhere: mine"),
    "MemoryError": (MemoryError("mine"), MemoryError, "mine"),
}  # fmt: skip


@pytest.mark.parametrize("kind", ERRORS)
def test_errors_of_every_kind_name_index_and_feeder(rig: Rig, kind: str) -> None:
    raised, expected, text = ERRORS[kind]
    error = only_error(DataLoader(bad(raises(raised)), batch_size=4), without=range(4, 8))
    assert type(error) is expected
    assert text in str(error)
    assert re.search(r"raised for index 7 in feeder-[01]", shown(error))


@pytest.mark.parametrize("workers", [0, None], ids=["here", "feeders"])
def test_stop_iteration_is_raised_as_an_error_and_ends_no_loop(rig: Rig, workers: int | None) -> None:
    """Under torch's loader it ends the loop, and nobody learns that batches are missing. A feeder must not be able to
    end a loop in this way."""
    dataset = bad(raises(StopIteration("mine")))
    assert ids(data.DataLoader(dataset, batch_size=4, num_workers=workers or 0)) == list(range(4)), "torch's"
    error = only_error(DataLoader(dataset, batch_size=4, num_workers=workers), without=range(4, 8))
    assert (type(error), str(error)) == (RuntimeError, "__getitem__ raised StopIteration: mine")
    assert workers == 0 or re.search(
        r"raised for index 7 in feeder-[01]:\nStopIteration: mine\n", shown(error)
    )


def test_error_class_of_a_local_module_keeps_type_and_attributes(
    rig: Rig, script_here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = """
from batches import Numbers

class BadImage(Exception):
    def __init__(self, path, *, width):
        super().__init__(f"{path} is {width} pixels wide")
        self.path, self.width = path, width

class Images(Numbers):
    def __getitem__(self, i):
        if i == 3:
            raise BadImage(f"{i}.png", width=0)
        return super().__getitem__(i)
"""
    (script_here / "dlj_images.py").write_text(text)
    monkeypatch.syspath_prepend(script_here)
    mine = importlib.import_module("dlj_images")
    monkeypatch.setitem(sys.modules, "dlj_images", mine)
    error = only_error(DataLoader(mine.Images(10)), without=range(3, 4), n=10)
    assert type(error) is mine.BadImage
    assert (error.path, error.width) == ("3.png", 0)
    assert str(error) == "3.png is 0 pixels wide"
    assert "raised for index 3 in feeder-" in shown(error)


def test_index_out_of_range_is_an_index_error_with_the_index(rig: Rig) -> None:
    for dataset in (Numbers(20), data.TensorDataset(torch.arange(20)), list(range(20))):
        sampler = [*range(5), 999, *range(5, 10)]
        found, errors = outcome(iter(DataLoader(dataset, sampler=sampler)))
        (error,) = errors
        assert type(error) is IndexError
        assert re.search(r"raised for index 999 in feeder-[01]", shown(error))
        assert found == list(range(10))


def test_ragged_samples_raise_torchs_error_from_the_collate_fn(rig: Rig) -> None:
    dataset = bad(lambda: (7, torch.zeros(3)))
    error = only_error(DataLoader(dataset, batch_size=5), without=range(5, 10))
    assert type(error) is RuntimeError
    assert str(error).startswith("stack expects each tensor to be equal size, but got [7] at entry 0 and [3]")
    assert re.search(r"raised by collate_fn in feeder-[01]", shown(error))


def test_worker_init_fn_error_is_raised_for_each_batch(rig: Rig) -> None:
    def init(_: int) -> None:
        raise ConnectionRefusedError(111, "no database")

    found, errors = outcome(iter(DataLoader(Numbers(6), batch_size=2, worker_init_fn=init)))
    assert found == []
    assert [type(error) for error in errors] == [ConnectionRefusedError] * 3
    assert re.search(r"no database\nraised by worker_init_fn in feeder-[01]:\nTraceback", shown(errors[0]))


# Garbage


def test_object_that_cannot_travel_is_named_with_the_option(rig: Rig) -> None:
    dataset = bad(lambda: (7, {"boxes": [re.compile("a")]}))
    error = only_error(DataLoader(dataset, batch_size=1, collate_fn=lambda s: s[0]), without=range(7, 8))
    assert type(error) is UnsupportedBatch
    assert "batch[1]['boxes'][0]: re.Pattern" in str(error).replace('"', "'")
    assert "allow_pickle=True" in str(error)
    allowed = DataLoader(dataset, batch_size=None, allow_pickle=True, collate_fn=lambda s: s)
    assert next(sample[1] for sample in allowed if sample[0] == 7) == {"boxes": [re.compile("a")]}, (
        "what the message offers works"
    )


def test_object_that_does_not_even_pickle_is_named(rig: Rig) -> None:
    dataset = bad(lambda: (7, [threading.Lock()]))
    loader = DataLoader(dataset, batch_size=None, allow_pickle=True)
    error = only_error(loader, without=range(7, 8))
    assert type(error) is UnsupportedBatch
    assert "batch[1][0]: _thread.lock" in str(error)


def test_sample_that_default_collate_cannot_take_raises_torchs_error(rig: Rig) -> None:
    error = only_error(DataLoader(bad(lambda: None)), without=range(7, 8))
    assert type(error) is TypeError
    assert "default_collate: batch must contain tensors, numpy arrays" in str(error)
    assert re.search(r"raised by collate_fn in feeder-[01]", shown(error))


# Feeders that die or hang


def test_sample_that_ends_its_process_raises_feeder_lost_with_the_index() -> None:
    with Rig(feeders=2) as fragile:
        loader = DataLoader(bad(lambda: os._exit(1), n=80), batch_size=2)
        error = only_error(loader, without=range(6, 8), n=80)
        assert all(p.poll() is None for p, _ in fragile.feeders), "only the processes that made it end"
    assert type(error) is FeederLost
    assert "3 feeder processes died, each while making index 7 of batch 3 (the last one: " in str(error)
    assert "ended with exit code 1" in str(error)
    assert "look for os._exit, a crash in native code or a lack of memory" in str(error)


def test_hanging_sample_raises_deadline_exceeded_with_feeder_and_indices(
    rig: Rig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    gate = tmp_path / "gate"
    path = rig.another_sidecar("patient", batch_deadline_s=3.0, progress_after_s=0.5)
    monkeypatch.setenv("DATALOADERJOB_SOCKET", path)
    iterator = iter(DataLoader(Gated(gate, at=7), batch_size=2))
    try:
        assert ids([next(iterator) for _ in range(3)]) == list(range(6))
        with pytest.raises(DeadlineExceeded) as caught:
            next(iterator)
    finally:
        gate.touch()
    assert isinstance(caught.value, TimeoutError)
    assert re.search(
        r"batch 3 was not ready after \d s \(the deadline is 3 s, spec\.loader\.batchTimeoutSeconds\): ",
        str(caught.value),
    )
    assert re.search(r"feeder-[01] is making (index 7|indices \[6, 7\])", str(caught.value))
    note = r"\[dataloaderjob\] the trainer has been waiting for batch 3 for \d s: feeder-[01] is making"
    assert re.search(note, capfd.readouterr().err)
    assert ids(iterator) == list(range(8, 40))


def test_loader_timeout_loses_no_batch(rig: Rig, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    iterator = iter(DataLoader(Gated(gate, at=4), batch_size=2, timeout=1))
    found: list[int] = []
    try:
        while len(found) < 4:  # the first may take as long where the machine is busy
            with contextlib.suppress(DeadlineExceeded):
                found += ids([next(iterator)])
        with pytest.raises(
            DeadlineExceeded,
            match=r"timed out after 1 seconds: batch 2 is not ready \(the loader's timeout\): "
            r"feeder-\d is making ind\w+ \[4, 5\]",
        ):
            next(iterator)
    finally:
        gate.touch()
    while found[-1] < 39:
        with contextlib.suppress(DeadlineExceeded):
            found += ids([next(iterator)])
    assert found == list(range(40))


# Versions


@pytest.mark.parametrize(("fact", "label"), [("python", "Python"), ("torch", "torch"), ("numpy", "numpy")])
def test_versions_that_differ_are_refused_with_both_and_the_remedy(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, fact: str, label: str
) -> None:
    true = bundles.facts()
    loader = DataLoader(Numbers(8), batch_size=4)
    with monkeypatch.context() as patch:
        patch.setattr(bundles, "facts", lambda: {**true, fact: "9.9"})
        found, errors = outcome(iter(loader))
    told = f"trainer and feeder differ: the trainer has {label} 9.9, but the feeder has {true[fact]}; build"
    assert found == []
    assert [type(error) for error in errors] == [ServiceUnavailable] * 2
    assert all(re.search(rf"feeder-[01]: {re.escape(told)}", str(error)) for error in errors), errors
    assert ids(loader) == list(range(8))


def test_different_cpu_capability_is_reported_once_and_works(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    true = bundles.facts()
    monkeypatch.setattr(bundles, "facts", lambda: {**true, "cpu": "x86_64 ABACUS"})
    assert ids(DataLoader(Numbers(40), batch_size=2)) == list(range(40))
    notes = [text for text in capfd.readouterr().err.splitlines() if "the trainer's is x86_64 ABACUS" in text]
    feeders = Counter(re.search(r"feeder-\d", text).group() for text in notes)
    assert notes
    assert max(feeders.values()) == 1
    assert "set ATEN_CPU_CAPABILITY=default in both" in notes[0]


def test_another_protocol_version_is_refused_with_the_remedy(rig: Rig) -> None:
    def newer() -> str:
        ipc.PROTOCOL += 1
        return str(ids(DataLoader(Numbers(4))))

    assert in_child(newer) == (
        f"ServiceUnavailable: the sidecar at {rig.socket} refused this process: this sidecar speaks protocol version "
        f"{frames.PROTOCOL}, but the trainer speaks {frames.PROTOCOL + 1}: install the same dataloaderjob version in "
        "both images"
    )


# Who may come, and where


def test_second_process_of_a_rank_is_refused_and_the_first_continues(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "5")
    iterator = iter(DataLoader(Numbers(80), batch_size=2))
    found = ids([next(iterator)])
    with script(
        "from batches import *\nfrom dataloaderjob import DataLoader\niter(DataLoader(Numbers()))"
    ) as other:
        _, err = other.communicate(timeout=60)
    assert other.returncode == 1
    assert (
        f"rank 5 is taken by the live process {os.getpid()}, so process {other.pid} cannot use it: give each"
        in err
    )
    assert found + ids(iterator) == list(range(80))


def test_process_takes_over_the_rank_of_a_dead_one(rig: Rig) -> None:
    text = """
        from batches import *
        from dataloaderjob import DataLoader
        iterator = iter(DataLoader(Numbers(40)))
        print(ids([next(iterator)]), flush=True)
        input()
    """
    for _ in range(2):
        with script(text, env={"RANK": "6"}) as process:
            assert line(process) == "[0]"


def test_malformed_rank_is_refused(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0/../../1")
    with pytest.raises(
        ServiceUnavailable, match=r"a rank must be a short word of letters, digits and -\._, but is '0/\.\.'?"
    ):
        iter(DataLoader(Numbers()))


def test_missing_or_too_long_socket_path_is_reported(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    long = f"{rig.home}/{'x' * 100}"
    for path, message in {
        "/nowhere/s": "no sidecar listens at /nowhere/s (DATALOADERJOB_SOCKET): is the sidecar container",
        long: f"a Unix socket's path may have at most 107 bytes, but {long!r} has {len(long)}",
        str(rig.home): f"{rig.home} is not a sidecar's socket: is DATALOADERJOB_SOCKET",
    }.items():
        monkeypatch.setenv("DATALOADERJOB_SOCKET", path)
        with pytest.raises(ServiceUnavailable, match=re.escape(message)):
            iter(DataLoader(Numbers()))


@pytest.mark.skipif(os.getuid() != 0, reason="only root can act as another user")
def test_user_without_access_gets_the_remedy(rig: Rig) -> None:
    def as_another_user() -> str:
        os.setgroups([])
        os.setgid(65534)
        os.setuid(65534)
        return str(ids(DataLoader(Numbers(4))))

    assert in_child(as_another_user) == (
        f"ServiceUnavailable: user 65534 may not connect to the sidecar's socket {rig.socket}: run the trainer as the "
        "sidecar's user or in its group (on a cluster: the same securityContext.fsGroup)"
    )


# Memory


def test_batch_above_the_memory_limit_fails_and_smaller_ones_arrive(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DATALOADERJOB_SOCKET", rig.another_sidecar("narrow", shared_memory_nbytes=4 << 20))
    dataset = bad(lambda: (7, torch.zeros(8 << 20, dtype=torch.uint8)))
    error = only_error(DataLoader(dataset), without=range(7, 8))
    assert type(error) is InputError
    assert re.fullmatch(
        r"a batch needs 8(\.\d)? MB of shared memory, but the limit is 4(\.\d)? MB: "
        r"raise spec\.loader\.memoryPerProcess or lower the batch size",
        str(error),
    )


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "pool above the limit": (
        {"shared_memory_nbytes": 64 << 20, "pool_nbytes": 65 << 20},
        f"a pool of {65 << 20} bytes was requested, but the limit of one pool is {64 << 20} ({64 << 20} for",
    ),
    "pool above a process's part": (
        {"shared_memory_nbytes": 64 << 20, "pool_nbytes": 33 << 20, "processes": 2},
        f"{32 << 20} ({64 << 20} for 2 processes): raise spec.loader.memoryPerProcess or lower spec.loader.poolSize",
    ),
    "limit beyond the machine": (
        {"shared_memory_nbytes": 1 << 50},
        f"{1 << 50} bytes of shared memory were requested, but this container may use {memory_limit()}: raise",
    ),
    "socket's path too long": (
        {"socket": f"/tmp/{'x' * 120}"},
        "a Unix socket's path may have at most 107 bytes, ",
    ),
    "socket's folder not there": ({"socket": "/nowhere/s"}, "the folder of the socket '/nowhere/s' does not exist"),
    "key not there": ({"key_path": "/nowhere/key"}, "cannot read the job's key from /nowhere/key: No such file"),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_misconfigured_sidecar_fails_before_touching_anything(rig: Rig, tmp_path: Path, what: str) -> None:
    options, message = REFUSED[what]
    home = tmp_path / "new"
    home.mkdir()
    settings = {
        "socket": str(home / "s"),
        "key_path": str(rig.home / "key"),
        "blobs": str(home / "blobs"),
        **options,
    }
    dump(SidecarSettings(job="j", **settings), tmp_path / "settings.json")
    found = subprocess.run(
        [sys.executable, "-m", "dataloaderjob.sidecar", "--settings", tmp_path / "settings.json"],
        env=rig.env, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert (found.returncode, found.stdout) == (2, "")
    assert found.stderr.startswith("sidecar: InputError: ")
    assert message in found.stderr
    assert len(found.stderr.splitlines()) == 1
    assert not list(home.iterdir())


# Arguments


def test_prefetch_out_of_bounds_is_refused(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    def told(found: int) -> str:
        return (
            rf"between 1 and {MAX_PREFETCH} batches can be prefetched, got {found}: change prefetch_factor "
            r"\* num_workers, or spec\.loader\.prefetch \(DATALOADERJOB_PREFETCH\)"
        )

    with pytest.raises(InputError, match=told(2 * MAX_PREFETCH)):
        DataLoader(Numbers(), num_workers=2, prefetch_factor=MAX_PREFETCH)
    with pytest.raises(InputError, match=told(0)):
        DataLoader(Numbers(), num_workers=2, prefetch_factor=0)
    for value in ("0", "100000"):
        monkeypatch.setenv("DATALOADERJOB_PREFETCH", value)
        with pytest.raises(InputError, match=told(int(value))):
            DataLoader(Numbers())
    monkeypatch.delenv("DATALOADERJOB_PREFETCH")
    loader = DataLoader(Numbers(3000, width=1), batch_size=2, num_workers=1, prefetch_factor=MAX_PREFETCH)
    assert ids(loader) == list(range(3000)), "the bound itself works"


@pytest.mark.parametrize("name", ["DATALOADERJOB_PREFETCH", "DATALOADERJOB_FEEDERS"])
def test_variables_that_are_not_numbers_are_named(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv(name, "many")
    with pytest.raises(InputError, match=f"{name} must be a whole number, but is 'many'"):
        DataLoader(Numbers())


@pytest.mark.parametrize(
    "arguments",
    [
        {"num_workers": -1},
        {"batch_size": 0},
        {"batch_size": 2, "batch_sampler": [[1]]},
        {"shuffle": True, "sampler": [1]},
        {"timeout": -1},
        {"batch_size": None, "drop_last": True},
        {"num_workers": 0, "persistent_workers": True},
        {"num_workers": 0, "prefetch_factor": 2},
    ],
    ids=str,
)
def test_arguments_that_torch_refuses_get_its_error(rig: Rig, arguments: dict[str, Any]) -> None:
    found = []
    for kind in (data.DataLoader, DataLoader):
        with pytest.raises(ValueError) as caught:
            kind(Numbers(), **arguments)
        found.append(str(caught.value))
    assert found[0] == found[1]
