"""What a script defines itself reaches feeders, whatever kind of thing it is and however a sample finds it."""

from __future__ import annotations

import pickle
import types
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from script_parity import Scripts, scripts, write

from dataloaderjob.making.failures import pack_failure, unpack_failure
from dataloaderjob.shipping import unpicklable


@pytest.fixture(scope="module")
def host() -> Iterator[Scripts]:
    with scripts() as made:
        yield made


SCRIPTS: dict[str, dict[str, str]] = {
    "an enum has its aliases": {
        "train.py": """
            from enum import Enum, Flag
            from parity import same
            class Color(Enum):
                RED = 1
                CRIMSON = 1
            class Access(Flag):
                READ = 1
                WRITE = 2
                BOTH = 3
            class Data:
                def __getitem__(self, i):
                    return Color["CRIMSON"] is Color.RED, list(Color.__members__), Access.BOTH, list(Access)
            same(Data())
        """
    },
    "members of an enum have what __init__ and __new__ gave them": {
        "train.py": """
            from enum import Enum
            from parity import same
            class Planet(Enum):
                EARTH = (5.976e24, 6.37814e6)
                def __init__(self, mass, radius):
                    self.mass, self.radius = mass, radius
            class Numbered(Enum):
                def __new__(cls, label):
                    made = object.__new__(cls)
                    made._value_ = len(cls.__members__) + 1
                    made.label = label
                    return made
            class Kind(Numbered):
                A = "a"
                B = "b"
            class Raw(bytes, Enum):
                ONE = (1, "one")
                def __new__(cls, value, label):
                    made = bytes.__new__(cls, [value])
                    made._value_, made.label = value, label
                    return made
            class Pair(tuple, Enum):
                P = (1, 2)
            class Data:
                def __getitem__(self, i):
                    kinds = [(k, k.value, k.label) for k in Kind]
                    raw = bytes(Raw.ONE), Raw(1) is Raw.ONE, Raw.ONE.label
                    return Planet.EARTH.radius, kinds, raw, tuple(Pair.P), Pair.P.value
            same(Data())
        """
    },
    "types made by typing's NewType, ParamSpec and TypeVarTuple": {
        "train.py": """
            from typing import Generic, NewType, ParamSpec, TypeVarTuple
            from parity import same
            Id, P, Ts = NewType("Id", int), ParamSpec("P"), TypeVarTuple("Ts")
            class Grid(Generic[*Ts]):
                pass
            class Data:
                def __getitem__(self, i: Id, *args: P.args) -> Grid[Id, str]:
                    return Id(i), repr(Id), repr(P), P.args.__origin__ is P, repr(Ts), Id.__supertype__
            same(Data())
        """
    },
    "an array of a subclass has its attributes": {
        "train.py": """
            import numpy as np
            from parity import same
            class Audio(np.ndarray):
                def __new__(cls, data, rate=None):
                    made = np.asarray(data).view(cls)
                    made.rate = rate
                    return made
                def __array_finalize__(self, other):
                    if other is not None:
                        self.rate = getattr(other, "rate", None)
            class Data:
                clips = [Audio(np.arange(4.0), rate=8000), Audio(np.ones(20000), rate=[3])]
                def __getitem__(self, i):
                    clip = self.clips[i]
                    return type(clip), clip.rate, np.asarray(clip).sum(), clip.shape
            same(Data())
        """
    },
    "classes of the script that only a pickle file names": {
        "train.py": """
            import pickle
            from dataclasses import dataclass
            from parity import same
            SCALE = 3
            def scaled(x):
                return x * SCALE
            class Base:
                def twice(self):
                    return scaled(2 * self.x)
            @dataclass
            class Sample(Base):
                x: int
            packed = [pickle.dumps(Sample(i)) for i in range(2)]
            class Data:
                def __init__(self, packed):
                    self.packed = packed
                def __getitem__(self, i):
                    found = pickle.loads(self.packed[i])
                    same_class = type(found) is type(pickle.loads(self.packed[i]))
                    return found, found.twice(), isinstance(found, Base), same_class
            same(Data(packed))
        """
    },
    "functions of the script that are looked up by name": {
        "train.py": """
            import sys
            from parity import same
            def flip(x):
                return -x
            def double(x):
                return helper(x) * 2
            def helper(x):
                return x + 1
            def negate(x):
                return flip(x)
            class Data:
                def __getitem__(self, i):
                    return globals()["flip"](i), eval("double")(i), getattr(sys.modules[__name__], "negate")(i)
            same(Data())
        """
    },
    "types that only annotations of the script name": {
        "train.py": """
            from __future__ import annotations
            from dataclasses import dataclass
            from decimal import Decimal
            from typing import get_type_hints
            from parity import same
            class Inner:
                pass
            @dataclass
            class Record:
                price: Decimal
                inner: Inner | None
            class Data:
                def __getitem__(self, i):
                    return get_type_hints(Record)
            same(Data())
        """
    },
    "what a module asks the script for": {
        "opts.py": """
            def get():
                import __main__
                return __main__.OPT["size"], __main__.helper(1)
            def other():
                from __main__ import OTHER
                return OTHER
        """,
        "train.py": """
            from parity import same
            import opts
            OPT = {"size": 3 + int("1")}
            OTHER = [int("7")]
            def helper(x):
                return x + 1
            class Data:
                def __getitem__(self, i):
                    return opts.get(), opts.other()
            same(Data())
            OPT["size"] = 9
            same(Data())
        """,
    },
    "globals that only the training uses need not travel": {
        "train.py": """
            import threading
            from parity import same
            LOCK = threading.Lock()
            LOG = open(__file__)
            TABLE = bytes(2 << 20)
            class Broken:
                held = LOCK
            def train(lock=LOCK):
                with LOCK:
                    return LOG, TABLE, Broken
            class Data:
                def __getitem__(self, i):
                    return i
            same(Data())
        """
    },
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_feeder_sees_the_same_state_as_a_fork_of_the_script(host: Scripts, tmp_path: Path, name: str) -> None:
    results = host.run(write(tmp_path / "project", SCRIPTS[name]))
    assert results
    for result in results:
        assert not result["refused"], result["refused"]
        assert result["found"] == result["expected"]
        assert not any("Error" in found for found in result["found"]), result["found"]


def test_changes_made_by_training_do_not_change_the_bundle(host: Scripts, tmp_path: Path) -> None:
    script = """
        import torch
        from parity import same
        best, rank, history, model = 0.0, 0, [], torch.nn.Linear(2, 2)
        def train(epoch):
            global best
            best = epoch + rank
            history.append(best)
            return model
        class Data:
            def __getitem__(self, i):
                return i
        data = Data()
        for epoch in range(3):
            same(data)
            rank += 1
            train(epoch)
            torch.nn.init.normal_(model.weight)
    """
    project = write(tmp_path / "project", {"train.py": script})
    first, again = host.run(project), host.run(project)
    assert len({result["id"] for result in first + again}) == 1


# What cannot come, and is told


def test_objects_hashed_before_their_attributes_exist_are_reported(host: Scripts, tmp_path: Path) -> None:
    script = """
        from parity import same
        class Node:
            def __init__(self, key):
                self.key, self.edges = key, {}
            def __hash__(self):
                return hash(self.key)
            def __eq__(self, other):
                return self.key == other.key
        class Data:
            def __init__(self, nodes):
                self.nodes = nodes
            def __getitem__(self, i):
                return len(self.nodes[i].edges)
        a, b = Node(1), Node(2)
        a.edges[b], b.edges[a] = 1.0, 1.0
        same(Data([a, b]))
    """
    (result,) = host.run(write(tmp_path / "project", {"train.py": script}))
    assert "__hash__" in result["found"][0]
    assert "version" not in result["found"][0]


def test_a_long_chain_of_objects_is_refused_with_a_short_path(host: Scripts, tmp_path: Path) -> None:
    script = """
        from parity import same
        class Link:
            next = None
        class Data:
            def __getitem__(self, i):
                return i
        data = Data()
        data.first = last = Link()
        for _ in range(3000):
            last.next = Link()
            last = last.next
        same(data)
    """
    (result,) = host.run(write(tmp_path / "project", {"train.py": script}))
    assert "dataset.first.next.next" in result["refused"]
    assert "linked too deeply for pickle" in result["refused"]
    assert len(result["refused"]) < 800


@pytest.mark.parametrize("made", ["RawArray('i', 4)", "RawValue('i', 4)", "Array('i', 4)"])
def test_raw_memory_of_multiprocessing_is_refused_as_shared(host: Scripts, tmp_path: Path, made: str) -> None:
    script = f"""
        import multiprocessing
        from parity import same
        class Data:
            def __getitem__(self, i):
                return i
        data = Data()
        data.held = multiprocessing.{made}
        same(data)
    """
    (result,) = host.run(write(tmp_path / "project", {"train.py": script}))
    assert "dataset.held: " in result["refused"]
    assert "shared with forked processes only" in result["refused"]


def test_search_for_a_shared_tensor_skips_libraries_and_hides_warnings() -> None:
    shared = torch.zeros(2).share_memory_()
    library, mine = types.ModuleType("library"), types.ModuleType("mine")
    library.held = mine.held = shared  # type: ignore[attr-defined]

    class Talks:
        def __getstate__(self) -> dict[str, object]:
            warnings.warn("deprecated", FutureWarning, stacklevel=2)
            return {"module": mine}

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        addresses = {shared.untyped_storage().data_ptr()}
        assert unpicklable.find_storage({"dataset": library}, addresses, {"mine"}) == (
            "something",
            "the dataset",
        )
        assert unpicklable.find_storage({"dataset": Talks()}, addresses, {"mine"}) == (
            "a tensor",
            "dataset.module.held",
        )


@pytest.mark.parametrize(
    ("exc", "hinted"),
    [
        (LookupError("unknown error handler name 'mine'"), True),
        (pickle.UnpicklingError("Weights only load failed"), True),
        (KeyError("a"), False),
        (IndexError("a"), False),
    ],
)
def test_errors_about_missing_registrations_have_a_hint(exc: Exception, hinted: bool) -> None:
    assert ("may not have run those lines" in unpack_failure(pack_failure(exc)).__notes__[0]) is hinted
