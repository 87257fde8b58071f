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
    "default arguments that the import took from a configuration, or that were set": {
        "config.py": """
            class cfg:
                size = 4
        """,
        "transforms.py": """
            import dataclasses, threading
            from config import cfg
            MARK = object()
            LOCK = threading.Lock()
            def crop(x, size=cfg.size, mark=MARK, lock=LOCK):
                return x[:size], mark is MARK, lock is LOCK
            def pad(x, *, to=cfg.size * 2):
                return x + [0] * (to - len(x))
            class Scale:
                def __init__(self, by=cfg.size):
                    self.by = by
                @classmethod
                def made(cls, by=cfg.size):
                    return cls(by).by
                @staticmethod
                def plain(by=cfg.size):
                    return by
            @dataclasses.dataclass
            class Settings:
                sizes: list = dataclasses.field(default_factory=list)
                edge: int = cfg.size
        """,
        "train.py": """
            from config import cfg
            from parity import same
            cfg.size = 6
            import transforms as tr
            class Data:
                def __getitem__(self, i):
                    x = list(range(10))
                    scales = tr.Scale().by, tr.Scale.made(), tr.Scale.plain()
                    return tr.crop(x), tr.pad(x[:3]), scales, tr.Settings(), tr.Settings().sizes is tr.Settings().sizes
            same(Data())
            tr.pad.__kwdefaults__["to"] = 5
            tr.Scale.__init__.__defaults__ = (9,)
            same(Data())
        """,
    },
    "a default argument that is a table": {
        "labels.py": """
            def label_id(name, _ids={}):
                return _ids.setdefault(name, len(_ids))
        """,
        "train.py": """
            from labels import label_id
            from parity import same
            for name in ("bird", "cat", "dog"):
                label_id(name)
            class Data:
                def __getitem__(self, i):
                    return label_id("dog"), label_id("cat"), label_id("bird")
            same(Data())
        """,
    },
    "settings under an lru_cache": {
        "settings.py": """
            from functools import cache, lru_cache
            class Settings:
                size = 4
            @lru_cache
            def get_settings():
                return Settings()
            @cache
            def get_name():
                return "import"
            @lru_cache(maxsize=None)
            def get_lock():
                import threading
                return threading.Lock()
            @cache
            def double(x):
                return x * 2
        """,
        "user.py": """
            from settings import get_settings
            HELD = get_settings()
        """,
        "train.py": """
            import settings, user
            from settings import get_settings
            from parity import same
            get_settings().size = 7
            settings.get_lock()
            settings.double(1)
            class Data:
                def __init__(self):
                    self.settings = get_settings()
                def __getitem__(self, i):
                    one = self.settings is get_settings() is user.HELD
                    return get_settings().size, one, settings.get_name(), settings.double(i), bool(settings.get_lock())
            data = Data()
            same(data)
            get_settings.cache_clear()
            get_settings()
            user.HELD = data.settings = get_settings()
            same(data)
        """,
    },
    "a function of a module under singledispatch to which the script adds": {
        "convert.py": """
            from functools import singledispatch, singledispatchmethod
            @singledispatch
            def convert(x):
                return "any"
            @convert.register
            def _(x: int):
                return "int"
            class Encoder:
                @singledispatchmethod
                def encode(self, x):
                    return "any"
        """,
        "train.py": """
            from convert import Encoder, convert
            from parity import same
            class Box:
                pass
            @convert.register
            def _(x: Box):
                return "box"
            @Encoder.encode.register(Box)
            def _(self, x):
                return "encoded"
            class Data:
                def __getitem__(self, i):
                    encode = Encoder().encode
                    return convert(i), convert(Box()), convert("a"), encode(Box()), encode(i)
            same(Data())
        """,
    },
    "state of a module of which parts cannot be copied": {
        "config.py": """
            import threading
            class Config:
                def __init__(self):
                    self._lock = threading.RLock()
                    self.size = 4
                def set(self, **given):
                    with self._lock:
                        self.__dict__.update(given)
            cfg = Config()
            STATE = {"scale": 1, "log": None}
            ITEMS = [1, threading.Lock(), 3]
            local = threading.local()
            class Local(threading.local):
                depth = 1
            own = Local()
        """,
        "train.py": """
            import config, threading
            from parity import same
            config.cfg.set(size=6)
            config.STATE["scale"] = 10
            config.STATE["log"] = open("train.log", "w")
            config.ITEMS[0] = 2
            config.local.train = True
            config.local.lock = threading.Lock()
            config.own.depth = 3
            class Data:
                def __getitem__(self, i):
                    config.cfg.set(got=i)
                    with config.ITEMS[1]:
                        items = config.ITEMS[0], config.ITEMS[2]
                    own = config.own.depth, config.local.train
                    return config.cfg.size, config.cfg.got, config.STATE["scale"], items, own
            same(Data())
            config.cfg.size = 7
            config.STATE["log"] = "mended"
            config.STATE["new"] = 3
            class Data(Data):
                def __getitem__(self, i):
                    return super().__getitem__(i), config.STATE
            same(Data())
        """,
    },
    "a partialmethod that the script puts into a class of a module": {
        "aug.py": """
            import functools
            class Aug:
                def apply(self, x, strength=1):
                    return x * strength
                def __call__(self, x):
                    return self.apply(x)
                twice = functools.partialmethod(apply, strength=2)
        """,
        "train.py": """
            import functools
            from aug import Aug
            from parity import same
            Aug.__call__ = functools.partialmethod(Aug.apply, strength=5)
            class Data:
                def __getitem__(self, i):
                    return Aug()(i + 1), Aug().twice(i + 1)
            same(Data())
        """,
    },
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_feeder_sees_the_same_state_as_a_fork_of_the_script(host: Scripts, tmp_path: Path, name: str) -> None:
    results = host.run(write(tmp_path, SCRIPTS[name]))
    assert results
    for result in results:
        assert not result["refused"]
        assert result["found"] == result["expected"]
        assert not any("Error" in found for found in result["found"]), result["found"]


def test_module_state_that_cannot_be_copied_is_reported_once_except_locks(
    host: Scripts, tmp_path: Path
) -> None:
    files = {
        "state.py": """
            import threading
            LOCK = threading.Lock()
            STATE = {"scale": 1, "log": None, "lock": threading.Lock()}
        """,
        "train.py": """
            import state, warnings
            from parity import same
            state.STATE.update(scale=3, log=open("train.log", "w"))
            class Data:
                def __getitem__(self, i):
                    return state.STATE["scale"], state.LOCK.locked()
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                same(Data())
                same(Data())
            class Told:
                def __getitem__(self, i):
                    return TOLD[i:]
            TOLD = [str(warning.message) for warning in caught]
            same(Told())
        """,
    }
    *results, told = host.run(write(tmp_path, files))
    for result in results:
        assert result["found"] == result["expected"] == ["(3, False)"] * 2
    assert "TextIOWrapper in state.STATE cannot be copied" in told["found"][0]
    assert told["found"][1] == "[]"
