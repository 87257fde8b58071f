"""User code and data on their way to a feeder, which here is another Python process."""

from __future__ import annotations

import functools
import gc
import math
import mmap
import os
import pickle
import subprocess
import sys
import threading
import unittest
import weakref
from pathlib import Path
from typing import Any
from unittest import mock

import cramjam
import numpy as np
import pytest
import torch

from dataloaderjob.core.blobs import BlobStore, Bundle
from dataloaderjob.core.errors import InputError, RemoteProtocolError
from dataloaderjob.shipping import bundles, pickling, snapshot
from dataloaderjob.shipping.bundles import FIRST_BUFFER, load_bundle, make_bundle
from dataloaderjob.shipping.pickling import MIN_BUFFER_NBYTES
from processes import rollup


class Arrays:
    """Of the kinds that datasets hold."""

    def __init__(self) -> None:
        self.array = np.arange(100_000.0)
        self.same = self.array
        self.small = np.arange(3)
        self.fixed = np.arange(50_000)
        self.fixed.flags.writeable = False
        self.fortran = np.asfortranarray(np.ones((300, 400)))
        self.tensor = torch.arange(100_000.0)
        self.part = self.tensor[10:20]
        self.bfloat = torch.ones(100_000, dtype=torch.bfloat16)
        self.empty = torch.empty(0, 3)
        self.parameter = torch.nn.Parameter(torch.ones(20_000))


class Held:
    def __init__(self, held: Any) -> None:
        self.items = [1, {"deep": held}]


class Slotted:
    __slots__ = ("lock",)


class WithState:
    def __init__(self) -> None:
        self.lock = threading.Lock()

    def __getstate__(self) -> Any:
        return {"other": self.lock}


def bundle_of(store: BlobStore, dataset: Any, collate_fn: Any = None) -> Bundle:
    return make_bundle(dataset, collate_fn, None, store=store, allow_pickle=False)


@pytest.fixture
def store(tmp_path: Path) -> BlobStore:
    return BlobStore(tmp_path / "blobs")


@pytest.fixture(autouse=True)
def process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loading makes this process the trainer's; the test's own comes back."""
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "argv", list(sys.argv))


def test_dataset_and_functions_round_trip_through_a_bundle(store: BlobStore) -> None:
    bundle = make_bundle({"a": 1}, len, print, store=store, allow_pickle=True)
    code = load_bundle(Bundle.parse(bundle.manifest()), store)
    assert (code.dataset, code.collate_fn, code.worker_init_fn) == ({"a": 1}, len, print)
    assert bundle.allow_pickle
    assert bundle.facts["python"] == "{}.{}".format(*sys.version_info)


def test_arrays_and_tensors_keep_type_flags_and_sharing(store: BlobStore) -> None:
    made = Arrays()
    found = load_bundle(bundle_of(store, made), store).dataset
    for name, value in vars(made).items():
        got = getattr(found, name)
        assert type(got) is type(value), name
        assert (got == value).all(), name
    assert found.same is found.array
    assert found.array.flags.writeable
    assert not found.fixed.flags.writeable
    assert found.fortran.flags.f_contiguous
    found.tensor[10] = -1
    assert found.part[0] == -1


def test_large_buffers_leave_the_pickle_and_small_ones_stay_in_it(store: BlobStore) -> None:
    bundle = bundle_of(
        store, [np.zeros(MIN_BUFFER_NBYTES, np.uint8), np.zeros(MIN_BUFFER_NBYTES - 1, np.uint8)]
    )
    assert [n for _, n in bundle.blobs[FIRST_BUFFER:]] == [MIN_BUFFER_NBYTES]
    without = bundle_of(store, [])
    assert MIN_BUFFER_NBYTES < bundle.blobs[0][1] - without.blobs[0][1] < MIN_BUFFER_NBYTES + 5000


def test_two_loads_share_memory_until_one_writes(store: BlobStore) -> None:
    bundle = bundle_of(store, torch.zeros(10_000_000, dtype=torch.uint8))
    first, second = (load_bundle(bundle, store).dataset for _ in range(2))
    before = anonymous_nbytes()
    assert int(first.sum()) == 0
    assert anonymous_nbytes() - before < 2_000_000
    first += 1
    assert int(second.sum()) == 0
    assert int(load_bundle(bundle, store).dataset.sum()) == 0
    assert int(first.sum()) == 10_000_000


def anonymous_nbytes() -> int:
    return rollup(os.getpid())["Anonymous"] * 1024


def test_loading_keeps_no_descriptor_open(store: BlobStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bundles, "BLOB_NBYTES", 1)  # a blob for each buffer
    bundle = bundle_of(store, [np.zeros(100_000, np.uint8) + i for i in range(20)])
    assert len(bundle.blobs) == FIRST_BUFFER + 20
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    dataset = load_bundle(bundle, store).dataset
    assert len(os.listdir("/proc/self/fd")) == before
    assert [int(a[0]) for a in dataset] == list(range(20))


def test_many_buffers_share_few_blobs(store: BlobStore) -> None:
    bundle = bundle_of(store, [np.full(70_001, i % 251, np.uint8) for i in range(1500)])
    assert len(bundle.blobs) == FIRST_BUFFER + 2
    dataset = load_bundle(bundle, store).dataset
    assert all((a == i % 251).all() for i, a in enumerate(dataset))
    assert all(a.ctypes.data % 64 == 0 for a in dataset)


def test_the_id_follows_the_content(store: BlobStore) -> None:
    dataset = Arrays()
    first = bundle_of(store, dataset).id
    assert bundle_of(store, dataset).id == first
    dataset.array[5] += 1
    second = bundle_of(store, dataset)
    assert second.id != first
    dataset.array[5] -= 1
    assert bundle_of(store, dataset).id == first


def test_a_memmap_travels_as_its_file(store: BlobStore, tmp_path: Path) -> None:
    path = tmp_path / "data"
    np.arange(1_000_000, dtype=np.int32).tofile(path)
    whole = np.memmap(path, dtype=np.int32, mode="r", shape=(1000, 1000))
    later = np.memmap(path, dtype=np.int32, mode="c", offset=4 * (mmap.ALLOCATIONGRANULARITY + 3))
    bundle = bundle_of(store, [whole, whole[10:12], later[5:9]])
    assert len(bundle.blobs) == FIRST_BUFFER
    found = load_bundle(bundle, store).dataset
    assert (found[0] == whole).all()
    assert found[1].tolist() == whole[10:12].tolist()
    assert found[2].tolist() == later[5:9].tolist()
    assert not found[0].flags.writeable
    path.unlink()
    with pytest.raises(InputError, match=f"needs '{path}', which feeders do not see: mount"):
        load_bundle(bundle, store)


# What cannot travel


def closure() -> Any:
    lock = threading.Lock()
    return lambda batch: lock


def slotted() -> Slotted:
    made = Slotted()
    made.lock = threading.Lock()  # type: ignore[attr-defined]
    return made


class Typed:
    """What libraries compare with, as dill does."""

    def __init__(self) -> None:
        self.types = {
            type(threading.Lock()): 1,
            type(threading.RLock()): 2,
            type({}.keys()): 3,
            type(iter([])): 4,
            cramjam.File: 5,  # "builtins.File"
        }
        self.enter = type(threading.Lock()).__enter__


def test_type_with_another_name_in_its_module_is_restored(tmp_path: Path):
    store = BlobStore(tmp_path)
    made = load_bundle(bundle_of(store, Typed()), store).dataset
    assert made.types == Typed().types
    assert made.enter is type(threading.Lock()).__enter__


@pytest.mark.parametrize(
    ("dataset", "collate_fn", "said"),
    [
        pytest.param(
            Held(threading.Lock()),
            None,
            "dataset.items[1]['deep']: _thread.lock (TypeError: cannot",
            id="deep",
        ),
        pytest.param(slotted(), None, "dataset.lock: _thread.lock", id="slot"),
        pytest.param(WithState(), None, "dataset.other: _thread.lock", id="getstate"),
        pytest.param((i for i in "ab"), None, "dataset: generator", id="generator"),
        pytest.param([], closure(), "collate_fn: its variable lock: _thread.lock", id="closure"),
        pytest.param(
            [], functools.partial(len, threading.Lock()), "collate_fn.args[0]: _thread.lock", id="partial"
        ),
        pytest.param([], Held(threading.Lock()).__init__, "collate_fn.__self__.items[1]", id="method"),
    ],
)
def test_unpicklable_part_is_named_with_a_remedy(
    store: BlobStore, dataset: Any, collate_fn: Any, said: str
) -> None:
    with pytest.raises(InputError) as caught:
        bundle_of(store, dataset, collate_fn)
    assert said in str(caught.value)
    assert "worker_init_fn" in str(caught.value)
    assert not list(store.folder.iterdir())


def test_a_loop_of_objects_is_searched_once(store: BlobStore) -> None:
    held = Held(threading.Lock())
    held.items.insert(0, held)
    with pytest.raises(InputError, match=r"dataset\.items\[2\]\['deep'\]: _thread\.lock"):
        bundle_of(store, held)


# Other processes

MODULE = """
import dataclasses, torch
SCALE = 3

@dataclasses.dataclass
class Pair:
    image: torch.Tensor

class Squares:
    def __init__(self, n):
        self.n = n
    def __getitem__(self, i):
        import imported_late
        return Pair(torch.tensor(imported_late.square(i) * SCALE))
    def __len__(self):
        return self.n
"""
TRAIN = """
import sys
from pathlib import Path
from squares import Squares
from dataloaderjob.core.blobs import BlobStore
from dataloaderjob.shipping.bundles import make_bundle

def collate(batch):
    return [pair.image for pair in batch], helper()

def helper():
    return "of the script"

if __name__ == "__main__":
    bundle = make_bundle(Squares(5), collate, None, store=BlobStore(Path(sys.argv[1])), allow_pickle=False)
    sys.stdout.buffer.write(bundle.manifest())
"""
FEED = """
import sys
from pathlib import Path
from dataloaderjob.core.blobs import BlobStore, Bundle
from dataloaderjob.core.ticket_codec import Ticket
from dataloaderjob.making.fetcher import Fetcher
from dataloaderjob.shipping.bundles import load_bundle
from dataloaderjob.batches.encoding import encode
code = load_bundle(Bundle.parse(sys.stdin.buffer.read()), BlobStore(Path(sys.argv[1])))
print(Fetcher(code.dataset, code.collate_fn).fetch(0, Ticket(0, 0, False, [1, 2])))
print("squares" in sys.modules, encode(code.dataset[2], allow_pickle=False).nbytes > 0)
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    folder = tmp_path / "project"
    (folder / "package").mkdir(parents=True)
    (folder / "squares.py").write_text(MODULE)
    (folder / "imported_late.py").write_text("def square(i): return i * i\n")
    (folder / "train.py").write_text(TRAIN)
    (folder / "package" / "__init__.py").write_text("")
    (folder / "package" / "train.py").write_text(TRAIN)
    return folder


def python(*args: str, cwd: Path, **kwargs: Any) -> bytes:
    done = subprocess.run([sys.executable, *args], cwd=cwd, capture_output=True, timeout=120, **kwargs)
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout


@pytest.mark.parametrize(
    "script",
    [
        pytest.param(["train.py"], id="script"),
        pytest.param(["-m", "train"], id="module"),
        pytest.param(["-m", "package.train"], id="module-of-a-package"),
    ],
)
@pytest.mark.quick("script")
def test_local_modules_travel_with_the_script(project: Path, tmp_path: Path, script: list[str]) -> None:
    blobs = str(tmp_path / "blobs")
    manifest = python(*script, blobs, cwd=project)
    lines = python("-c", FEED, blobs, cwd=tmp_path, input=manifest).decode().splitlines()
    assert lines == ["([tensor(3), tensor(12)], 'of the script')", "True True"]


def test_a_library_that_a_feeder_lacks_is_named(project: Path, tmp_path: Path) -> None:
    library = tmp_path / "site-packages"
    library.mkdir()
    (project / "squares.py").rename(library / "squares.py")
    blobs = str(tmp_path / "blobs")
    path = {**os.environ, "PYTHONPATH": os.pathsep.join((str(library), os.environ.get("PYTHONPATH", "")))}
    manifest = python("train.py", blobs, cwd=project, env=path)
    (library / "squares.py").unlink()
    with pytest.raises(InputError, match=r"needs the module 'squares'.*dataloaderjob\[feeder\]"):
        load_bundle(Bundle.parse(manifest), BlobStore(Path(blobs)))


def test_other_version_of_a_module_is_reported_as_such(store: BlobStore, monkeypatch: Any) -> None:
    bundle = bundle_of(store, Arrays())
    monkeypatch.delattr(sys.modules[Arrays.__module__], "Arrays")
    with pytest.raises(InputError, match=r"Arrays.*a different version of that module"):
        load_bundle(bundle, store)


@pytest.mark.parametrize("nbytes", [0, 4, 8, 20, 40])
def test_a_cut_first_blob_is_refused(store: BlobStore, nbytes: int) -> None:
    bundle = bundle_of(store, np.zeros(100_000))
    head = store.path(bundle.blobs[0][0]).read_bytes()
    cut = Bundle(blobs=(store.put(head[:nbytes]), *bundle.blobs[1:]))
    with pytest.raises((RemoteProtocolError, pickle.UnpicklingError, EOFError)):
        load_bundle(cut, store)


def test_a_table_that_points_outside_its_blob_is_refused(store: BlobStore) -> None:
    bundle = bundle_of(store, np.zeros(100_000))
    short = Bundle(blobs=(*bundle.blobs[:FIRST_BUFFER], store.put(bytes(70_000))))
    with pytest.raises(RemoteProtocolError, match="table of buffers is malformed"):
        load_bundle(short, store)


class Grows:
    """Within a container: another thread adds to it the first `times` times that it is pickled."""

    times = 0

    def __init__(self) -> None:
        self.held: dict[Any, Any] = {"first": 1, "self": self, "last": 2}

    def __reduce__(self) -> Any:
        if Grows.times:
            Grows.times -= 1
            self.held[len(self.held)] = 0
        return Grows, ()


def test_dict_filled_by_another_thread_meanwhile_is_pickled_again(store: BlobStore) -> None:
    grows = Grows()
    Grows.times = 3
    load = load_bundle(bundle_of(store, Held(grows.held)), store)
    assert {*load.dataset.items[1]["deep"]} == {"first", "self", "last", 3, 4, 5}


def test_dataset_and_its_class_are_freed_with_their_last_user(store: BlobStore) -> None:
    def bundle() -> list[Any]:
        class Local:
            def __init__(self) -> None:
                self.items = [1, 2]

        dataset = Local()
        bundle_of(store, dataset, lambda samples: (Local, samples))
        return [weakref.ref(dataset), weakref.ref(Local)]

    references = bundle()
    gc.collect()
    assert [reference() for reference in references] == [None, None]


COLLECTED_MEANWHILE = """
import gc, sys
from pathlib import Path
from dataloaderjob.core.blobs import BlobStore
from dataloaderjob.shipping.bundles import make_bundle

class Temporary:
    def __reduce__(self):
        return Temporary, ()

    def __del__(self):
        gc.collect()

class Dataset:
    def __getstate__(self):
        return {"items": [Temporary() for _ in range(8)]}

store = BlobStore(Path(sys.argv[1]))
make_bundle(Dataset(), None, None, store=store, allow_pickle=False)
"""


def test_garbage_collection_during_a_released_pickle_is_safe(tmp_path: Path) -> None:
    found = subprocess.run(
        [sys.executable, "-c", COLLECTED_MEANWHILE, str(tmp_path)],
        env={**os.environ, "PYTHONMALLOC": "debug"}, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert found.returncode == 0, found.stderr


def test_fingerprint_of_one_dataset_is_never_used_for_another(
    store: BlobStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshot, "SLOW_S", 0.0)  # everything counts as slow to pickle

    class Kind:
        """Not seen before; and without arrays, as the other one is."""

    one = Held("one")
    first = bundle_of(store, one).id
    assert bundle_of(store, one).id == first
    other = bundle_of(store, Kind()).id  # it may take no fingerprint of the one before
    assert other != first
    assert bundle_of(store, one).id == first


def test_threads_make_bundles_at_once(store: BlobStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of modules with state that does not pickle, which each of them finds out."""
    monkeypatch.setattr(sys.modules[__name__], "not_pickled", [threading.Lock()], raising=False)
    interval = sys.getswitchinterval()
    found: list[Any] = []

    def make() -> None:
        for number in range(8):
            try:
                found.append(bundle_of(store, Held({number, threading.get_ident()})))
            except InputError as exc:
                found.append(exc)

    threads = [threading.Thread(target=make) for _ in range(4)]
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert [made for made in found if not isinstance(made, Bundle)] == []


def test_slow_copying_is_reported_each_time(tmp_path, monkeypatch):
    monkeypatch.setattr(bundles, "SLOW_S", 0.0)
    monkeypatch.setattr(snapshot, "SLOW_S", math.inf)  # no copy is kept, whatever the machine does meanwhile
    told = []
    for _ in range(2):
        make_bundle(
            [1], None, None, store=BlobStore(tmp_path / "blobs"), allow_pickle=False, slow=told.append
        )
    assert len(told) == 2
    assert all(seconds > 0 for seconds in told)


def test_failed_copy_keeps_no_reference_to_its_caller() -> None:
    """An exception's frames know their callers, the iterator that is being made among them."""

    class Iterator:
        pass

    def made() -> weakref.ref[Any]:
        iterator = Iterator()
        assert not pickling.picklable([threading.Lock()], None, ())
        return weakref.ref(iterator)

    gc.collect()
    gc.disable()
    try:
        assert made()() is None
    finally:
        gc.enable()


def test_dataset_too_large_for_scratch_is_refused_before_hashing(tmp_path: Path):
    store = BlobStore(tmp_path, {"spec.feeders.scratch.size": 64 << 20})
    parts = [np.full(20 << 20, number, dtype=np.uint8) for number in range(4)]
    with pytest.raises(InputError, match=r"scratch has 64 MiB: raise spec\.feeders\.scratch\.size"):
        make_bundle(parts, None, None, store=store, allow_pickle=False)
    assert not list(tmp_path.iterdir())
    make_bundle(parts[:2], None, None, store=store, allow_pickle=False)


def test_a_large_dataset_is_announced_before_it_is_copied(
    store: BlobStore, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bundles, "ANNOUNCED_NBYTES", 4_000_000)
    for large, told in (
        (torch.zeros(500_000), ""),
        (torch.zeros(1_500_000), "copying 5.72 MiB of the dataset"),
    ):
        bundles.make_bundle(large, None, None, store=store, allow_pickle=False)
        assert capsys.readouterr().err == (f"[dataloaderjob] {told} for the feeders, once\n" if told else "")


class InTest(unittest.TestCase):
    def collate(self, samples: list[Any]) -> Any:
        return samples


def _noted() -> Any:
    made = mock.MagicMock()
    made.__len__.return_value = 8
    len(made)
    return made


def _with_handle() -> InTest:
    made = InTest()
    made.handle = threading.Lock()  # type: ignore[attr-defined]
    return made


@pytest.mark.parametrize(
    ("dataset", "collate", "words"),
    [
        pytest.param(
            _noted, None, ("the calls that a mock has recorded cannot be copied", "patch with new="), id="mock"
        ),
        pytest.param(
            lambda: [1], lambda: _with_handle().collate,
            ("collate_fn.__self__: ", "InTest", "use a function; with num_workers=0"), id="method-of-a-test",
        ),
        pytest.param(
            lambda: iter(torch.utils.data.DataLoader([1])), None, ("torchio's Queue", "num_workers=0"), id="a-loader",
        ),
    ],
)  # fmt: skip
def test_uncopyable_part_is_named_with_a_remedy(
    store: BlobStore, dataset: Any, collate: Any, words: tuple[str, ...]
) -> None:
    with pytest.raises(InputError) as error:
        make_bundle(dataset(), collate and collate(), None, store=store, allow_pickle=False)
    assert not [word for word in words if word not in str(error.value)], str(error.value)


def test_error_names_the_global_used_by_a_method_and_not_another_method(store: BlobStore) -> None:
    exec(
        "class Uses:\n"
        "    def __len__(self):\n        return 8\n"
        "    def __getitem__(self, i):\n        return HANDLE and i\n",
        script := {"__name__": "__main__", "HANDLE": threading.Lock()},
    )
    with pytest.raises(InputError) as error:
        make_bundle(script["Uses"](), None, None, store=store, allow_pickle=False)
    assert "__getitem__: the global HANDLE: _thread.lock" in str(error.value)
