"""A feeder is what the script was: functions that stand for others, and what functions and modules keep."""

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


def write(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (folder / name).write_text(textwrap.dedent(text))
    return folder / "train.py"


SCRIPTS: dict[str, dict[str, str]] = {
    "a decorator with functools.wraps keeps objects in its closure": {
        "config.py": """
            import functools
            def singleton(cls):
                instances = {}
                @functools.wraps(cls)
                def get(*args, **kwargs):
                    if cls not in instances:
                        instances[cls] = cls(*args, **kwargs)
                    return instances[cls]
                return get

            @singleton
            class Config:
                def __init__(self):
                    self.size = 4
        """,
        "data.py": """
            import config
            from config import Config
            class Data:
                def __getitem__(self, i):
                    return Config().size, Config is config.Config, Config() is Config()
        """,
        "train.py": """
            from parity import same
            from config import Config
            from data import Data
            Config().size = 6
            same(Data())
        """,
    },
    "a wrapper of another module that a table refers to is the module's own": {
        "decorators.py": """
            import functools
            def counted(fn):
                calls = []
                @functools.wraps(fn)
                def inner(*args):
                    calls.append(fn)
                    return len(calls), fn(*args)
                return inner
        """,
        "a_user.py": "from steps import double\n",
        "steps.py": """
            from decorators import counted
            TABLE = {}
            @counted
            def double(x):
                return SCALE * x
            class Step:
                @counted
                def run(self, x):
                    return x + SCALE
                @staticmethod
                @counted
                def plain(x):
                    return -x
            SCALE = 2
            TABLE["double"] = double
            name = lambda x: SCALE
        """,
        "train.py": """
            import a_user, steps
            from parity import same
            steps.SCALE = 5
            steps.double(1)
            steps.Step().run(1)
            class Data:
                def __getitem__(self, i):
                    one = steps.double is steps.TABLE["double"] is a_user.double
                    step = steps.Step()
                    return one, steps.double(i), step.run(i), step.plain(i), steps.name(i)
            same(Data())
        """,
    },
    "functions, methods and properties of a module wrapped by the script": {
        "loading.py": """
            import contextlib
            import dataclasses
            import torch
            def load(i):
                return i
            @contextlib.contextmanager
            def opened(i):
                yield i
            @dataclasses.dataclass
            class Size:
                edge: int = 3
            class Reader:
                def read(self, i):
                    return load(i) + 100
                @property
                def mode(self):
                    return "plain"
                @torch.no_grad()
                def gradless(self):
                    return torch.is_grad_enabled()
        """,
        "train.py": """
            import functools
            import loading
            from parity import same
            def doubled(fn):
                @functools.wraps(fn)
                def inner(*args, **kwargs):
                    return fn(*args, **kwargs) * 2
                return inner
            class Data:
                def __getitem__(self, i):
                    reader = loading.Reader()
                    with loading.opened(i) as opened:
                        return (
                            loading.load(i), reader.read(i), reader.mode, reader.gradless(), opened, loading.Size()
                        )
            same(Data())
            loading.load = doubled(loading.load)
            same(Data())
            loading.Reader.read = doubled(loading.Reader.read)
            loading.Reader.mode = property(doubled(loading.Reader.mode.fget))
            same(Data())
        """,
    },
    "a function of a library wrapped by the script": {
        "train.py": """
            import functools
            import torch
            from parity import same
            old = torch.nn.functional.layer_norm
            @functools.wraps(old)
            def layer_norm(x, shape):
                return old(x, shape) + 7
            torch.nn.functional.layer_norm = layer_norm
            class Data:
                def __getitem__(self, i):
                    return torch.nn.functional.layer_norm(torch.ones(2) * i, (2,))
            same(Data())
        """,
    },
    "a wrapper that holds a lock stays as the import makes it": {
        "locked.py": """
            import functools, threading
            def synchronized(fn):
                lock = threading.Lock()
                @functools.wraps(fn)
                def inner(*args):
                    with lock:
                        return fn(*args)
                return inner
            @synchronized
            def load(i):
                return SIZE + i
            SIZE = 1
        """,
        "train.py": """
            import locked
            from parity import same
            locked.SIZE = 5
            class Data:
                def __init__(self):
                    self.load = locked.load
                def __getitem__(self, i):
                    return self.load(i), self.load is locked.load
            same(Data())
        """,
    },
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_feeder_finds_what_a_fork_of_the_script_finds(host: Scripts, tmp_path: Path, name: str) -> None:
    results = host.run(write(tmp_path, SCRIPTS[name]))
    assert results
    for result in results:
        assert not result["refused"]
        assert result["found"] == result["expected"]
        assert not any("Error" in found for found in result["found"]), result["found"]
