"""What a script defines itself reaches feeders, whatever kind of thing it is and however a sample finds it."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest
from script_parity import Scripts, scripts


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
}


def write(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(textwrap.dedent(text))
    return folder / "train.py"


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_feeder_finds_what_a_fork_of_the_script_finds(host: Scripts, tmp_path: Path, name: str) -> None:
    results = host.run(write(tmp_path / "project", SCRIPTS[name]))
    assert results
    for result in results:
        assert not result["refused"], result["refused"]
        assert result["found"] == result["expected"]
        assert not any("Error" in found for found in result["found"]), result["found"]
