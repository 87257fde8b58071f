"""One bundle for one script: its id in other processes, what is kept when nothing changes, keys, warnings."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import textwrap
import warnings
from collections import OrderedDict, deque, namedtuple
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dataloaderjob.core import ticket_codec
from dataloaderjob.core.blobs import BlobStore
from dataloaderjob.core.errors import InputError
from dataloaderjob.shipping import snapshot
from dataloaderjob.shipping.bundles import load_bundle, make_bundle
from dataloaderjob.shipping.names import Names, content, update

MODULES = {
    "config.py": "cfg = {'names': {'b', 'a', 'c'}, 'n': 1}\nclass Base:\n    seen = {None, 'x', (1, 'y')}\n",
    "data.py": """
        import enum
        from config import Base, cfg
        class Color(enum.Enum):
            RED = 1
            GREEN = 2
        KINDS = {Color.RED, Color.GREEN}
        class Data(Base):
            def __getitem__(self, i):
                return cfg, i in {"one", "two", "three"}
    """,
    "train.py": """
        import os, sys
        from pathlib import Path
        import config, data
        from dataloaderjob.core.blobs import BlobStore
        from dataloaderjob.shipping.bundles import make_bundle
        config.cfg["n"] = 2
        KNOWN = {"x", "y", "z"}
        class Mine(data.Data):
            tags = {"p", "q", b"r"}
            def __getitem__(self, i):
                return super().__getitem__(i) if i in KNOWN else i in {"four", "five", "six"}
        def init(worker):
            print(object())
        os.environ["RANK"] = os.environ["LOCAL_RANK"] = str(os.getpid())
        made = Mine()
        made.extra = frozenset("hello"), {Path("a"), Path("b")}
        store = BlobStore(Path(sys.argv[1]))
        for _ in range(2):
            print(make_bundle(made, lambda batch: batch, init, store=store, allow_pickle=False).id.hex())
    """,
}


def write(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (folder / name).write_text(textwrap.dedent(text))


def test_script_has_one_bundle_id_in_all_processes(tmp_path: Path) -> None:
    write(tmp_path, MODULES)
    found = []
    for seed in ("1", "2", "3"):  # the first compiles the modules, the others load what it compiled
        done = subprocess.run(
            [sys.executable, "train.py", str(tmp_path / "blobs")],
            cwd=tmp_path,
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 0, done.stderr
        found += done.stdout.split()
    assert len(found) == 6
    assert len(set(found)) == 1


@pytest.fixture
def store(tmp_path: Path) -> BlobStore:
    return BlobStore(tmp_path / "blobs")


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Everything counts as slow to pickle; the list has an entry for each time that it is pickled."""
    taken: list[Any] = []
    take = snapshot.SnapshotMaker.take

    def counted(self: snapshot.SnapshotMaker, roots: Any) -> Any:
        taken.append(roots)
        return take(self, roots)

    monkeypatch.setattr(snapshot, "SLOW_S", 0.0)
    monkeypatch.setattr(snapshot.SnapshotMaker, "take", counted)
    return taken


class Held:
    def __init__(self, held: Any) -> None:
        self.held = held


def made(dataset: Any, store: BlobStore) -> bytes:
    return make_bundle(dataset, None, None, store=store, allow_pickle=False).id


@pytest.mark.parametrize(
    ("held", "change"),
    [
        pytest.param(
            lambda: [{"n": i} for i in range(5000)], lambda h: h[4000].update(n=-1), id="deep-in-a-list"
        ),
        pytest.param(lambda: dict.fromkeys(range(5000)), lambda h: h.update({3: 1}), id="dict"),
        pytest.param(
            lambda: torch.zeros(100_000), lambda h: h[77:78].numpy().fill(1), id="tensor-by-another-view"
        ),
        pytest.param(
            lambda: np.arange(3_000_001, dtype=np.uint8), lambda h: h[-1:].fill(1), id="last-odd-byte"
        ),
        pytest.param(
            lambda: np.arange(1_000_000),
            lambda h: h[[5, 6]].sort() or h.__setitem__([5, 6], h[[6, 5]]),
            id="swap",
        ),
    ],
)
def test_unchanged_data_is_not_pickled_again_and_changed_data_is(
    store: BlobStore, slow: list[Any], held: Any, change: Any
) -> None:
    dataset = Held(held())
    first = made(dataset, store)
    assert made(dataset, store) == first
    assert len(slow) == 1
    change(dataset.held)
    assert made(dataset, store) != first
    assert len(slow) == 2


def test_changed_module_beside_the_dataset_is_pickled_again(
    store: BlobStore, slow: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "beside.py").write_text("values = [1]\n")
    monkeypatch.syspath_prepend(tmp_path)
    module, dataset = importlib.import_module("beside"), Held(1)
    try:
        first = made(dataset, store)
        assert made(dataset, store) == first
        assert len(slow) == 1
        module.values.append(2)
        assert made(dataset, store) != first
        assert len(slow) == 2
    finally:
        del sys.modules["beside"]


def test_unchanged_data_is_pickled_again_if_its_blobs_are_missing(store: BlobStore, slow: list[Any]) -> None:
    dataset = Held(list(range(5000)))
    first = made(dataset, store)
    for path in store.folder.iterdir():
        path.unlink()
    assert made(dataset, store) == first
    assert len(slow) == 2


@pytest.mark.parametrize("dtype", ["int32", "float32"])
def test_arrays_within_large_containers_are_compared_with_their_types(
    store: BlobStore, slow: list[Any], dtype: str
) -> None:
    dataset = Held([np.zeros(1, dtype=np.int32) for _ in range(5000)])
    first = made(dataset, store)
    dataset.held[7] = np.zeros(1, dtype=dtype)
    assert (made(dataset, store) == first) == (dtype == "int32")


def test_checksum_detects_swapped_words() -> None:
    data = np.arange(1 << 20, dtype=np.uint64)
    before = snapshot.checksum(data.data)
    data[[3, 4]] = data[[4, 3]]
    assert snapshot.checksum(data.data) != before
    assert snapshot.checksum(np.zeros(8, np.uint8).data) != snapshot.checksum(np.zeros(16, np.uint8).data)


def test_a_tensor_in_shared_memory_is_warned_of_by_name_once(
    store: BlobStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset = Held({"epoch": torch.zeros(3).share_memory_()})
    monkeypatch.setattr("dataloaderjob.shipping.bundles._snapshots", snapshot.SnapshotMaker())
    with pytest.warns(UserWarning, match=r"dataset\.held\['epoch'\] is a tensor in shared memory"):
        made(dataset, store)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        made(dataset, store)


def test_value_that_cannot_be_updated_in_place_raises_type_error() -> None:
    with pytest.raises(TypeError):
        content(i for i in "ab")


@pytest.mark.parametrize(
    "value",
    [{"a": 1}, [1, 2], {1, 2}, bytearray(b"ab"), OrderedDict(a=1), deque([1])],
    ids=lambda value: type(value).__name__,
)
def test_container_takes_over_the_content_of_another(value: Any) -> None:
    fresh = type(value)()
    update(fresh, content(value))
    assert fresh == value


def test_names_come_from_the_module_that_defines_the_class() -> None:
    here = sys.modules[__name__]
    assert Names({}).table == {}
    names = Names({__name__: here})
    assert names.table[id(MODULES)][1][:2] == (__name__, "MODULES")


# Keys

KEYS = """
    import sys
    from collections import namedtuple
    from pathlib import Path
    from dataloaderjob.core import ticket_codec
    from dataloaderjob.core.blobs import BlobStore
    from dataloaderjob.shipping.bundles import make_bundle
    from dataloaderjob.making.fetcher import pickle_keys

    Known = namedtuple("Known", "index size")
    class Other:
        def __init__(self, n):
            self.n = n
        def value(self):
            return self.n * SCALE
    SCALE = 3

    class Data:
        def __getitem__(self, key):
            if isinstance(key, Known):
                return key.index, type(key) is Known
            return key.value()

    if __name__ == "__main__":
        folder = Path(sys.argv[1])
        bundle = make_bundle(Data(), None, None, store=BlobStore(folder), allow_pickle=False)
        keys = Known(1, 2), Other(5), Other(6), "plain"
        packed = [ticket_codec.pack_ticket(0, 0, [key], pickle_keys=pickle_keys) for key in keys]
        import pickle
        (folder / "out").write_bytes(pickle.dumps((bundle.manifest(), packed)))
"""
FEED = """
    import pickle, sys
    from pathlib import Path
    from dataloaderjob.core import ticket_codec
    from dataloaderjob.core.blobs import BlobStore, Bundle
    from dataloaderjob.shipping.bundles import load_bundle
    folder = Path(sys.argv[1])
    manifest, packed = pickle.loads((folder / "out").read_bytes())
    dataset = load_bundle(Bundle.parse(manifest), BlobStore(folder)).dataset
    keys = [ticket_codec.unpack_ticket(ticket).keys[0] for ticket in packed]
    print([dataset[key] for key in keys[:3]], keys[3], type(keys[1]) is type(keys[2]))
"""


@pytest.mark.slow
def test_keys_of_script_classes_have_the_same_class_in_a_feeder(tmp_path: Path) -> None:
    write(tmp_path, {"train.py": KEYS, "feed.py": FEED})
    for script in ("train.py", "feed.py"):
        done = subprocess.run(
            [sys.executable, script, str(tmp_path)], cwd=tmp_path, capture_output=True, text=True, timeout=120
        )
        assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n")[0] == "[(1, True), 15, 18] plain True"


def test_unpicklable_key_raises_the_reason() -> None:
    with pytest.raises(TypeError, match="generator"):
        ticket_codec.pack_ticket(0, 0, [(i for i in "ab")])


Point = namedtuple("Point", "x y")  # noqa: PYI024  as scripts have them


def test_a_bundle_loads_in_the_process_that_made_it(
    store: BlobStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    bundle = make_bundle(Held(Point(1, {2})), None, None, store=store, allow_pickle=False)
    assert load_bundle(bundle, store).dataset.held == Point(1, {2})
    with pytest.raises(InputError):
        made(Held(i for i in "ab"), store)


def test_dataset_does_not_ship_the_globals_of_another_of_its_class(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        textwrap.dedent("""
            import sys
            from pathlib import Path
            from dataloaderjob.core.blobs import BlobStore
            from dataloaderjob.shipping.bundles import make_bundle
            table = [str(i) for i in range(20_000)]
            class Mapped:
                def __init__(self, function): self.function = function
                def __getitem__(self, i): return self.function(i)
            small, large = Mapped(lambda i: i), Mapped(lambda i: table[i])
            store = BlobStore(Path("blobs"))
            for made in (small, large, small, Mapped(small.function), large):
                bundle = make_bundle(made, None, None, store=store, allow_pickle=False)
                print(sum(nbytes for _, nbytes in bundle.blobs) > 100_000, bundle.id.hex())
        """)
    )
    done = subprocess.run(
        [sys.executable, "train.py"], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    large, ids = zip(*map(str.split, done.stdout.splitlines()), strict=True)
    assert large == ("False", "True", "False", "False", "True")
    assert ids == (ids[0], ids[1], ids[0], ids[0], ids[1]), "no feeder loads them again"
