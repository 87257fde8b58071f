"""A feeder is what the script was: ordinary scripts, in which a fork finds what a loaded bundle finds."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from script_parity import Scripts, scripts, write


@pytest.fixture(scope="module")
def host() -> Iterator[Scripts]:
    with scripts() as made:
        yield made


CONFIG = """
class Node(dict):
    def __getattr__(self, name):
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None

    def __setattr__(self, name, value):
        if self.__dict__.get("_frozen"):
            raise AttributeError(f"frozen: {name}")
        self[name] = value

    def __setitem__(self, name, value):
        if self.__dict__.get("_frozen"):
            raise AttributeError(f"frozen: {name}")
        super().__setitem__(name, value)

    def freeze(self):
        self.__dict__["_frozen"] = True

cfg = Node(SIZE=224, DATASET=Node(NAME="none", MEAN=[0.5]))
"""
DATA = """
from config import cfg

class Data:
    size = cfg.SIZE
    def __init__(self):
        self.node = cfg.DATASET
    def __len__(self):
        return 4
    def __getitem__(self, i, node=cfg):
        return i, cfg.SIZE, node.SIZE, node is cfg, self.node is cfg.DATASET, cfg.DATASET.NAME, self.size
"""
SCRIPTS: dict[str, dict[str, str]] = {
    "a class of the script that is toggled": {
        "train.py": """
            from parity import same
            class cfg:
                augment = True
            class Data:
                def __getitem__(self, i):
                    return cfg.augment
            data = Data()
            for augment in (True, False, True, False):
                cfg.augment = augment
                same(data)
        """
    },
    "a configuration that is filled and frozen at start, held by name, default argument and attribute": {
        "config.py": CONFIG,
        "data.py": DATA,
        "train.py": """
            from parity import same
            from config import cfg
            from data import Data
            cfg.SIZE = 512
            cfg.DATASET.NAME = "coco"
            Data.size = 7
            cfg.freeze()
            same(Data())
        """,
    },
    "a configuration class of a module": {
        "settings.py": """
            class Config:
                lr = 0.1
                names = ["a"]
                class Inner:
                    depth = 1
        """,
        "data.py": """
            from settings import Config
            NAMES = Config.names
            class Data:
                def __getitem__(self, i):
                    return Config.lr, Config.names, Config.Inner.depth, NAMES is Config.names, Config.extra
        """,
        "train.py": """
            from parity import same
            from settings import Config
            from data import Data
            Config.lr = 3
            Config.names.append("b")
            Config.Inner.depth = 2
            Config.extra = {"new": 1}
            same(Data())
        """,
    },
    "a registry that side-effect imports fill": {
        "registry.py": """
            REGISTRY = {}
            def register(cls):
                REGISTRY[cls.__name__] = cls
                return cls
        """,
        "extras.py": """
            from registry import register
            @register
            class Double:
                def __call__(self, x):
                    return 2 * x
        """,
        "data.py": """
            from registry import REGISTRY
            class Data:
                def __getitem__(self, i):
                    return sorted(REGISTRY), REGISTRY["Double"]()(i), REGISTRY["Triple"]()(i)
        """,
        "train.py": """
            from parity import same
            import extras
            from registry import register
            from data import Data
            FACTOR = 3
            @register
            class Triple:
                def __call__(self, x):
                    return FACTOR * x
            same(Data())
        """,
    },
    "counters, flags and caches of a module": {
        "data.py": """
            COUNT = 0
            FLAG = None
            CACHE = {}
            SEEN = set()
            ITEMS = []
            class Data:
                made = 0
                def __init__(self):
                    global COUNT
                    COUNT += 1
                    type(self).made += 1
                def __getitem__(self, i):
                    CACHE[i] = True
                    return COUNT, FLAG, CACHE, sorted(SEEN), ITEMS, self.made
        """,
        "train.py": """
            from parity import same
            import data
            data.FLAG = "on"
            data.SEEN.update("ab")
            data.ITEMS.extend([1, [2]])
            made = [data.Data() for _ in range(3)]
            made[0][7]
            same(made[0])
            data.FLAG = "off"
            same(made[0])
        """,
    },
    "functions and methods that are replaced": {
        "lib.py": """
            def load(i):
                return ("lib", i)
            def other(i):
                return ("other", i)
            class Reader:
                def read(self, i):
                    return ("reader", i)
                @staticmethod
                def static(i):
                    return 0
        """,
        "data.py": """
            import lib
            class Data:
                def __getitem__(self, i):
                    return lib.load(i), lib.other(i), lib.Reader().read(i), lib.Reader.static(i)
        """,
        "train.py": """
            from parity import same
            import lib
            from data import Data
            SCALE = 10
            def mine(i):
                return ("mine", i * SCALE)
            lib.load = mine
            lib.other = lambda i: ("lambda", SCALE)
            lib.Reader.read = lambda self, i: ("patched", i)
            lib.Reader.static = staticmethod(mine)
            Data.__len__ = lambda self: 5
            same(Data())
        """,
    },
    "a module that is imported within __getitem__": {
        "late.py": """
            VALUE = 1
            class cfg:
                depth = 1
            TABLE = {"a": 1}
        """,
        "never.py": "X = 1",
        "data.py": """
            class Data:
                def __getitem__(self, i):
                    from late import TABLE, VALUE, cfg
                    import never
                    return VALUE, cfg.depth, TABLE, never.X
        """,
        "train.py": """
            from parity import same
            import late
            from data import Data
            late.VALUE = 2
            late.cfg.depth = 3
            late.TABLE["b"] = 2
            same(Data())
        """,
    },
    "two modules and the dataset share one object": {
        "one.py": "SHARED = None\nclass Thing:\n    pass\n",
        "two.py": "SHARED = None\n",
        "data.py": """
            import one, two
            class Data:
                def __getitem__(self, i):
                    return one.SHARED is two.SHARED is self.shared, self.shared.n, one.LIST is self.list
        """,
        "train.py": """
            from parity import same
            import one, two
            from data import Data
            one.SHARED = two.SHARED = one.Thing()
            one.SHARED.n = 5
            one.LIST = [1]
            data = Data()
            data.shared, data.list = one.SHARED, one.LIST
            same(data)
        """,
    },
    "functools in the script": {
        "train.py": """
            import functools
            from parity import same
            @functools.lru_cache(maxsize=8)
            def fib(n):
                return n if n < 2 else fib(n - 1) + fib(n - 2)
            @functools.cache
            def table():
                return {"a": helper()}
            def helper():
                return 4
            @functools.singledispatch
            def show(x):
                return "any"
            @show.register
            def _(x: int):
                return "int" + str(fib(x + 10))
            @show.register(str)
            def _(x):
                return "str" + show(3)
            class Data:
                def __init__(self, n):
                    self.n = n
                @functools.cached_property
                def squares(self):
                    return [i * i for i in range(self.n)]
                @functools.lru_cache
                def cached(self, i):
                    return i + 1
                def __getitem__(self, i):
                    shown = show(i), show("a"), show(1.5)
                    return fib(20), fib.cache_parameters(), table(), shown, self.squares, self.cached(i)
            same(Data(4), collate_fn=functools.partial(lambda batch, extra: (batch, extra(9)), extra=fib))
        """
    },
    "classes of the script": {
        "train.py": """
            import abc, dataclasses, enum, typing
            from collections import namedtuple
            from parity import same
            class Color(enum.Enum):
                RED = 1
                GREEN = 2
                def shout(self):
                    return self.name + "!" + str(LIMIT)
            class Flag(enum.IntFlag):
                A = 1
                B = 2
            LIMIT = 9
            Pair = namedtuple("Pair", "a b")
            class Typed(typing.NamedTuple):
                x: int
                y: int = 3
            @dataclasses.dataclass
            class Item:
                n: int
                tags: list = dataclasses.field(default_factory=list)
                again: int = dataclasses.field(default=2, repr=False)
            @dataclasses.dataclass(frozen=True, slots=True)
            class Frozen:
                n: int
            class Slotted:
                __slots__ = ("a", "b")
                def __init__(self):
                    self.a = 1
            class Base(abc.ABC):
                @abc.abstractmethod
                def get(self): ...
                def __init_subclass__(cls, **kw):
                    cls.tag = cls.__name__
            class Derived(Base):
                def get(self):
                    return super().__repr__ is not None
                class Nested:
                    value = 5
            T = typing.TypeVar("T")
            class Box(typing.Generic[T]):
                pass
            class Data:
                def __init__(self):
                    self.held = Color.RED, Pair(1, 2), Frozen(2), Slotted(), {Color.GREEN: 1}
                def __getitem__(self, i):
                    fields = [f.name for f in dataclasses.fields(Item)], dataclasses.replace(Item(1), n=2)
                    return (Color.RED.shout(), self.held[0] is Color.RED, self.held[:3], self.held[3].a,
                        Flag.A | Flag.B, Typed(i), Item(i), fields, Derived().get(), Derived.tag,
                        Derived.Nested().value, Derived.Nested.__qualname__, Box[int].__args__,
                        isinstance(Derived(), Base), Color.GREEN in self.held[4],
                        dataclasses.fields(Item)[0].default is dataclasses.MISSING)
            same(Data())
        """
    },
    "closures, lambdas and local classes": {
        "data.py": """
            SCALE = 2
            STATE = {"n": 0}
            def make(k):
                class Local:
                    def __getitem__(self, i):
                        STATE["n"] += 1
                        return i * k * SCALE, STATE["n"], count()
                return Local()
            def collate(k):
                return lambda batch: [batch, k, SCALE, count()]
            def count():
                return STATE["n"]
        """,
        "train.py": """
            from parity import same
            import data
            data.SCALE = 5
            total = 0
            def outer():
                seen = []
                def inner(batch):
                    global total
                    total += 1
                    seen.append(total)
                    return batch, list(seen), len(inner.__code__.co_freevars)
                return inner
            same(data.make(3), collate_fn=data.collate(4))
            same(data.make(3), collate_fn=outer())
            same([1, 2], collate_fn=lambda batch: batch + [data.SCALE])
        """,
    },
    "globals that functions of the script share and change": {
        "train.py": """
            import os.path, random
            import concurrent.futures
            import numpy as np
            from parity import same
            calls = 0
            cache = {}
            names = {"b", "a"}
            class Data:
                def __init__(self):
                    self.cache = cache
                def __getitem__(self, i):
                    bump()
                    cache[i] = calls
                    return calls, self.cache, self.cache is cache, sorted(names), os.path.basename("a/b"), \\
                        concurrent.futures.ThreadPoolExecutor.__name__, np.random.rand is not None, __name__
            def bump():
                global calls
                calls += 1
            def init(worker):
                global calls
                calls = 100
            same(Data())
            same(Data(), worker_init_fn=init)
        """
    },
    "circular and relative imports in a package": {
        "proj/__init__.py": "from .a import A\nDEBUG = False\n",
        "proj/a.py": """
            from __future__ import annotations
            from . import b
            import proj
            class A:
                def __getitem__(self, i):
                    from .sub import deep
                    return b.B().name(), proj.DEBUG, deep.VALUE, deep.__name__, __file__.rsplit("/", 2)[1:], __package__
        """,
        "proj/b.py": """
            import proj.a
            class B:
                def name(self):
                    return proj.a.A.__name__
        """,
        "proj/sub/__init__.py": "",
        "proj/sub/deep.py": "VALUE = 0\n",
        "train.py": """
            from parity import same
            import proj, proj.sub.deep
            proj.DEBUG = True
            proj.sub.deep.VALUE = 6
            same(proj.A())
        """,
    },
    "a namespace package": {
        "space/inner/mod.py": """
            VALUE = 1
            class Data:
                def __getitem__(self, i):
                    import space.inner.late
                    return VALUE, space.inner.late.X
        """,
        "space/inner/late.py": "X = 2",
        "train.py": """
            from parity import same
            import space.inner.mod as mod
            mod.VALUE = 3
            same(mod.Data())
        """,
    },
    "source, file and traceback of a module": {
        "data.py": """
            import inspect, linecache, sys, traceback
            class Data:
                def __getitem__(self, i):
                    try:
                        raise ValueError(i)
                    except ValueError:
                        text = traceback.format_exc()
                    return inspect.getsource(Data), inspect.getsourcefile(Data), "raise ValueError(i)" in text, \\
                        sys.modules["data"].__spec__.name, sys.modules["data"] is sys.modules[__name__]
        """,
        "train.py": """
            from parity import same
            from data import Data
            import os, inspect
            def collate(batch):
                return batch, inspect.getsource(collate), __file__, os.path.exists(__file__)
            same(Data(), collate_fn=collate)
        """,
    },
    "what does not pickle in modules": {
        "data.py": """
            import logging, threading, itertools, re, pathlib, random
            LOCK = threading.Lock()
            LOG = logging.getLogger(__name__)
            COUNTER = itertools.count()
            LOCAL = threading.local()
            PATTERN = re.compile("a+")
            MISSING = object()
            ROOT = pathlib.Path(__file__).parent
            RNG = random.Random(3)
            GENERATOR = (i for i in range(3))
            class Data:
                lock = threading.RLock()
                def __init__(self):
                    self.missing = MISSING
                    self.lock2 = LOCK
                def __getitem__(self, i):
                    with LOCK, self.lock:
                        return next(COUNTER), self.missing is MISSING, PATTERN.match("aa")[0], LOG.name, ROOT.name, \\
                            RNG.random(), self.lock2 is LOCK, HANDLE is None
            class Handle:
                def __init__(self):
                    self.lock = threading.Lock()
            HANDLE = None
        """,
        "train.py": """
            from parity import same
            import data
            next(data.COUNTER), data.RNG.random()
            same(data.Data())
        """,
    },
    "a script's global that only a registry's class needs and that does not pickle": {
        "registry.py": """
            REGISTRY = {}
            class Data:
                def __getitem__(self, i):
                    return sorted(REGISTRY)
        """,
        "train.py": """
            import threading
            from parity import same
            import registry
            LOCK = threading.Lock()
            class Trainer:
                def step(self):
                    with LOCK:
                        pass
            registry.REGISTRY["trainer"] = Trainer
            same(registry.Data())
        """,
    },
    "the process": {
        "train.py": """
            import decimal, locale, logging, os, sys, warnings
            import numpy as np, torch
            from PIL import Image, ImageFile
            from parity import same
            os.environ["MY_FLAG"] = "1"
            os.makedirs("work", exist_ok=True)
            os.chdir("work")
            sys.path.append("/nowhere"), sys.path.insert(1, os.getcwd())
            logging.basicConfig(level=logging.INFO)
            logging.getLogger("mine").setLevel(logging.ERROR)
            warnings.simplefilter("ignore", UserWarning)
            torch.set_default_dtype(torch.float64)
            np.seterr(divide="ignore")
            decimal.getcontext().prec = 7
            ImageFile.LOAD_TRUNCATED_IMAGES = True
            Image.MAX_IMAGE_PIXELS = None
            class Data:
                def __getitem__(self, i):
                    with warnings.catch_warnings(record=True) as caught:
                        warnings.warn("no", UserWarning)
                    root = logging.getLogger()
                    return (os.getcwd(), os.environ["MY_FLAG"], sys.argv, torch.tensor(1.0).dtype,
                        np.geterr()["divide"],
                        decimal.getcontext().prec, len(caught), ImageFile.LOAD_TRUNCATED_IMAGES,
                        Image.MAX_IMAGE_PIXELS, root.level, bool(root.handlers), logging.getLogger("mine").level,
                        os.getcwd() in sys.path, torch.is_grad_enabled())
            same(Data())
            with torch.no_grad():
                same(Data())
        """
    },
    "libraries that the script changed": {
        "patches.py": "def opened(fp, *args):\n    return ('opened', fp)\n",
        "train.py": """
            import PIL.Image
            from torch.utils.data import default_collate
            from torch.utils.data._utils.collate import default_collate_fn_map
            from parity import same
            import patches
            class Box:
                def __init__(self, n):
                    self.n = n
            def collate_boxes(batch, *, collate_fn_map=None):
                return [box.n for box in batch]
            default_collate_fn_map[Box] = collate_boxes
            PIL.Image.open = patches.opened
            class Data:
                def __getitem__(self, i):
                    return {"box": Box(i), "image": str(PIL.Image.open("x"))}
            same(Data(), collate_fn=default_collate)
        """,
    },
    "scripted functions and modules": {
        "train.py": """
            import torch
            from parity import same
            @torch.jit.script
            def double(x: torch.Tensor) -> torch.Tensor:
                return x * 2
            class Net(torch.nn.Module):
                def forward(self, x):
                    return x + 1
            net = torch.jit.script(Net())
            class Data:
                def __getitem__(self, i):
                    return double(torch.tensor(i)), net(torch.tensor(i))
            same(Data())
        """
    },
    "user code that runs while the dataset is loaded": {
        "tools.py": """
            FACTOR = 1
            def scaled(x):
                return x * FACTOR
        """,
        "train.py": """
            import math
            from parity import same
            import tools
            tools.FACTOR = 7
            OFFSET = 3
            class Data:
                def __init__(self):
                    self.n = 2
                def __setstate__(self, state):
                    self.n = tools.scaled(state["n"]) + helper(OFFSET)
                def __getstate__(self):
                    return {"n": (self.n - OFFSET) // tools.FACTOR}
                def __getitem__(self, i):
                    return self.n
            def helper(x):
                return math.floor(x)
            data = Data()
            data.n = tools.scaled(2) + OFFSET
            same(data)
        """,
    },
    "a package that lies elsewhere and is gone later": {
        "../elsewhere/lib/__init__.py": "from .config import cfg\n",
        "../elsewhere/lib/config.py": "class cfg:\n    n = 1\n",
        "../elsewhere/lib/data.py": """
            from lib import cfg
            class Data:
                def __getitem__(self, i):
                    from lib import late
                    return cfg.n, late.X
        """,
        "../elsewhere/lib/late.py": "X = 1",
        "train.py": """
            import os, sys
            sys.path.insert(0, os.path.abspath("../elsewhere"))
            from parity import same
            from lib.data import Data
            import lib.late
            lib.cfg.n = 5
            lib.late.X = 6
            same(Data())
            os.rename("../elsewhere", "../gone")
        """,
    },
    "sets, partials, paths and other values": {
        "data.py": """
            import collections, decimal, functools, datetime
            QUEUE = collections.deque([1], maxlen=3)
            COUNTS = collections.Counter()
            GROUPS = collections.defaultdict(list)
            ORDER = collections.OrderedDict(a=1, b=2)
            BYTES = bytearray(b"a")
            def add(a, b):
                return a + b
            plus = functools.partial(add, 1)
            class Data:
                def __init__(self, *parts):
                    self.parts = parts
                def __getitem__(self, i):
                    return (QUEUE, COUNTS, dict(GROUPS), list(ORDER), BYTES, plus(i), self.parts,
                        self.counts is COUNTS, GROUPS["new"])
        """,
        "train.py": """
            import functools, datetime, decimal, pathlib, numpy as np, torch
            from parity import same
            import data
            data.QUEUE.append(2), data.COUNTS.update("aab"), data.GROUPS["x"].append(1), data.BYTES.extend(b"b")
            data.ORDER.move_to_end("a")
            data.plus = functools.partial(data.add, 10)
            made = data.Data({3, 1}, frozenset("a"), {(1, 2)}, pathlib.Path("a"), datetime.date(2020, 1, 1),
                decimal.Decimal("1.5"), np.float32(3), np.arange(3), torch.eye(2), range(3), slice(1, 2), ...)
            made.counts = data.COUNTS
            same(made)
        """,
    },
    "objects of a module and their methods as functions": {
        "tools.py": """
            class Collator:
                def __init__(self, pad):
                    self.pad = pad
                def __call__(self, batch):
                    return [batch, self.pad, SIZE]
                def method(self, batch):
                    return batch, self.pad
            SIZE = 1
            collator = Collator(0)
        """,
        "train.py": """
            from parity import same
            import tools
            tools.SIZE = 2
            tools.collator.pad = 3
            same([1, 2], collate_fn=tools.collator)
            same([1, 2], collate_fn=tools.collator.method)
            same([1, 2], collate_fn=tools.Collator(4).method)
        """,
    },
    "a singleton, a class with slots and a frozen dataclass in modules": {
        "state.py": """
            import dataclasses
            class Singleton:
                _instance = None
                def __new__(cls):
                    if cls._instance is None:
                        cls._instance = super().__new__(cls)
                        cls._instance.values = {}
                    return cls._instance
            class Slotted:
                __slots__ = ("a", "b")
            @dataclasses.dataclass(frozen=True)
            class Options:
                n: int = 1
            slotted = Slotted()
            options = Options()
            CURRENT = None
        """,
        "data.py": """
            from state import Singleton, options, slotted
            import state
            DEFAULTS = options
            class Data:
                def __getitem__(self, i):
                    return Singleton().values, slotted.a, hasattr(slotted, "b"), state.options, \\
                        state.CURRENT is Singleton(), DEFAULTS
        """,
        "train.py": """
            from parity import same
            import data, state
            state.Singleton().values["x"] = 1
            state.slotted.a = 4
            state.options = state.Options(3)
            state.CURRENT = state.Singleton()
            same(data.Data())
        """,
    },
    "a dataset that asks another for what it lacks": {
        "train.py": """
            import torch
            from torch.utils.data import ConcatDataset, TensorDataset, random_split
            from parity import same
            class Wrapped:
                def __init__(self, inner):
                    self.inner = inner
                def __getattr__(self, name):
                    return getattr(self.inner, name)
                def __getitem__(self, i):
                    return self.inner[i], len(self.tensors)
            data = TensorDataset(torch.arange(20.0))
            same(Wrapped(Wrapped(data)))
            same(ConcatDataset(random_split(data, [10, 10], torch.Generator().manual_seed(1))))
        """
    },
    "options in a module, a metaclass that registers, generators": {
        "opts.py": """
            import argparse
            parser = argparse.ArgumentParser()
            parser.add_argument("--n", type=int, default=1)
            args = None
            class Meta(type):
                registry = {}
                def __new__(meta, name, bases, own):
                    cls = super().__new__(meta, name, bases, own)
                    meta.registry[name] = cls
                    return cls
            class Base(metaclass=Meta):
                pass
        """,
        "train.py": """
            import numpy as np, torch
            from parity import same
            import opts
            args = opts.args = opts.parser.parse_args(["--n", "5"])
            class Mine(opts.Base):
                def __init__(self):
                    self.rng = np.random.default_rng(3)
                    self.generator = torch.Generator().manual_seed(3)
                def __getitem__(self, i):
                    return (args.n, args is opts.args, sorted(opts.Meta.registry), opts.Meta.registry["Mine"] is Mine,
                        self.rng.integers(10), torch.rand(1, generator=self.generator))
            same(Mine())
        """,
    },
    "classes whose making has effects": {
        "kinds.py": """
            class Named:
                names = []
                def __init_subclass__(cls, *, name, **options):
                    super().__init_subclass__(**options)
                    cls.name = name
                    Named.names.append(name)
            class Kind(type):
                made = {}
                def __new__(mcs, name, bases, namespace, *, code=0):
                    kind = super().__new__(mcs, name, bases, namespace)
                    mcs.made[name] = code
                    return kind
                def __init__(cls, name, bases, namespace, *, code=0):
                    super().__init__(name, bases, namespace)
                    Kind.made[name] += 1
        """,
        "train.py": """
            import abc, enum
            from parity import same
            from kinds import Kind, Named
            class Meta(abc.ABCMeta):
                kinds = []
                def __new__(mcs, name, bases, namespace, *, code):
                    mcs.kinds.append((name, code))
                    return super().__new__(mcs, name, bases, namespace)
                def __init__(cls, name, bases, namespace, *, code):
                    super().__init__(name, bases, namespace)
                    cls.code = code
                def __setattr__(cls, name, value):
                    if not name.startswith("_") and name != "code":
                        raise AttributeError(name)
                    super().__setattr__(name, value)
            class Step(metaclass=Meta, code=1):
                steps = []
                @abc.abstractmethod
                def run(self): ...
                def __init_subclass__(cls, **options):
                    Step.steps.append(cls.__name__)
                    super().__init_subclass__(**options)
            class Add(Step, code=2):
                def run(self):
                    return 5
            class First(Named, name="first"):
                pass
            class Counted(metaclass=Kind, code=6):
                pass
            class Level(enum.IntEnum):
                def __init_subclass__(cls):
                    LEVELS.append(cls.__name__)
            LEVELS = []
            class Depth(Level):
                LOW, HIGH = 1, 2
            class Data:
                def __getitem__(self, i):
                    class Later(Step, code=9):
                        pass
                    try:
                        Step()
                    except TypeError:
                        LEVELS.append("abstract")
                    return (Meta.kinds, Step.steps, Add().run(), Add.code, isinstance(Add(), Step), Named.names,
                            First.name, Kind.made, type(Counted) is Kind, Depth(2), LEVELS, Later.code)
            same(Data())
            class Second(First, name="second"):
                pass
            same(Data())
        """,
    },
    "modules that the script imports for what their import does": {
        "quiet.py": """
            with open("imported", "a") as file:
                pass
            class Model:
                pass
        """,
        "rot.py": """
            import codecs
            import table
            codecs.register_error("count", lambda error: ("<1>", error.end))
            table.names.append("rot")
        """,
        "table.py": "names = []",
        "ends.py": """
            import sys, builtins
            def begin():
                if not hasattr(builtins, "ready"):
                    sys.exit("the script comes first")
            begin()
        """,
        "setup/__init__.py": "from . import inner\nfrom .kinds import kind\n",
        "setup/inner.py": """
            import json
            def default(self, value):
                return "a set"
            json.JSONEncoder.default = default
        """,
        "setup/kinds.py": """
            import copyreg
            def kind(cls):
                return cls
            class Plain:
                pass
            copyreg.pickle(Plain, lambda plain: "PLAIN")
        """,
        "guarded.py": "import string\nstring.guarded = True\n",
        "train.py": """
            import builtins
            builtins.ready = True
            from parity import same
            try:
                import rot
            except ImportError:
                rot = None
            import ends
            from setup import kind
            from quiet import Model
            import table
            class Data:
                def __getitem__(self, i):
                    import copyreg, json
                    return (b"\\xff".decode("utf-8", "count"), json.dumps({i}), len(table.names),
                            [cls.__name__ for cls in copyreg.dispatch_table if cls.__name__ == "Plain"])
            same(Data())
            table.names.append("more")
            same(Data())
        """,
    },
    "settings of the process and of the standard library": {
        "train.py": """
            import collections, collections.abc, decimal, mimetypes, os, resource, socket, ssl, sys
            import numpy as np
            import torch
            from parity import same
            class Data:
                def __getitem__(self, i):
                    mask = os.umask(0)
                    os.umask(mask)
                    return (mask, sys.get_int_max_str_digits(), socket.getdefaulttimeout(),
                            mimetypes.guess_type("a.rawx"),
                            ssl._create_default_https_context.__name__, torch.get_float32_matmul_precision(),
                            [trap.__name__ for trap, on in decimal.getcontext().traps.items() if on],
                            str(np.array([1 / 3])), str(torch.tensor([1 / 3])), getattr(np, "float", None),
                            resource.getrlimit(resource.RLIMIT_NOFILE),
                            isinstance({}, getattr(collections, "Mapping", int)))
            same(Data())
            os.umask(0o027)
            sys.set_int_max_str_digits(0)
            socket.setdefaulttimeout(7)
            mimetypes.add_type("image/raw", ".rawx")
            ssl._create_default_https_context = ssl._create_unverified_context
            torch.set_float32_matmul_precision("high")
            decimal.getcontext().traps[decimal.Inexact] = True
            np.set_printoptions(precision=2)
            torch.set_printoptions(precision=3)
            np.float = float
            collections.Mapping = collections.abc.Mapping
            soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
            same(Data())
        """,
    },
    "csv, time zone and variables": {
        "train.py": """
            import csv, os, time
            from parity import same
            csv.field_size_limit(1 << 20)
            os.environ["TZ"] = "XYZ-5"
            time.tzset()
            os.environ["GONE"] = "1"
            class Data:
                def __getitem__(self, i):
                    return csv.field_size_limit(), time.strftime("%H %Z", time.localtime(0)), os.environ.get("GONE")
            same(Data())
            del os.environ["GONE"]
            same(Data())
        """,
    },
    "a module whose import fails in a feeder and that nothing needs": {
        "fragile.py": """
            import builtins
            if not hasattr(builtins, "ready"):
                raise RuntimeError("the script comes first")
            VALUE = 1
        """,
        "data.py": """
            fragile = None
            class Data:
                def __getitem__(self, i):
                    return i
        """,
        "train.py": """
            import builtins
            builtins.ready = True
            from parity import same
            import data, fragile
            data.fragile = fragile
            same(data.Data())
        """,
    },
    "torch and Lightning-like modules that hold what feeders cannot have": {
        "engine.py": """
            import sqlite3, threading
            class Engine:
                def __init__(self):
                    self.thread = threading.Thread(target=print)
                    self.lock = threading.Lock()
            ENGINE = None
            DB = None
            STEP = 0
        """,
        "data.py": """
            import engine
            class Data:
                def __getitem__(self, i):
                    return engine.STEP, engine.DB is None
        """,
        "train.py": """
            from parity import same
            import engine, data
            engine.STEP = 8
            engine.ENGINE = engine.Engine()
            engine.handlers = [lambda: engine.ENGINE.lock]
            same(data.Data())
        """,
    },
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_feeder_sees_the_same_state_as_a_fork_of_the_script(host: Scripts, tmp_path: Path, name: str) -> None:
    results = host.run(write(tmp_path / "project", SCRIPTS[name]))
    assert results
    for result in results:
        assert not result["refused"], result["refused"]
        assert result["found"] == result["expected"]


# By name, or refused


@pytest.mark.parametrize(
    ("source", "said"),
    [
        pytest.param("held = multiprocessing.Value('i', 0)", "shared with forked processes only", id="value"),
        pytest.param("held = multiprocessing.Semaphore()", "plain attribute of the dataset", id="semaphore"),
        pytest.param("held = MANAGER.dict()", "num_workers=0", id="manager"),
        pytest.param("held = threading.Lock()", "dataset.held: _thread.lock", id="lock"),
        pytest.param("held = sqlite3.connect(':memory:')", "dataset.held: sqlite3.Connection", id="sqlite"),
        pytest.param("held = open('out', 'w')", "dataset.held: _io.TextIOWrapper", id="file"),
        pytest.param("held = (i for i in 'ab')", "dataset.held: generator", id="generator"),
    ],
)
def test_attributes_that_cannot_reach_a_feeder_are_refused_by_name(
    host: Scripts, tmp_path: Path, source: str, said: str
) -> None:
    script = f"""
        import multiprocessing, sqlite3, threading
        from parity import same
        MANAGER = multiprocessing.Manager() if "MANAGER" in {source!r} else None
        class Data:
            def __getitem__(self, i):
                return i
        data = Data()
        data.{source}
        same(data)
        if MANAGER is not None:
            MANAGER.shutdown()
    """
    (result,) = host.run(write(tmp_path / "project", {"train.py": script}))
    assert "dataset.held" in result["refused"]
    assert said in result["refused"]


def test_global_lock_used_by_a_dataset_is_refused_by_name(host: Scripts, tmp_path: Path) -> None:
    script = """
        import threading
        from parity import same
        LOCK = threading.Lock()
        class Data:
            def __getitem__(self, i):
                with LOCK:
                    return i
        same(Data())
    """
    (result,) = host.run(write(tmp_path / "project", {"train.py": script}))
    assert "the global LOCK: _thread.lock" in result["refused"]


def test_needed_module_that_fails_to_import_is_named_with_the_cause(host: Scripts, tmp_path: Path) -> None:
    files = {
        "fragile.py": """
            import builtins
            if not hasattr(builtins, "ready"):
                raise RuntimeError("the script comes first")
            class Data:
                def __getitem__(self, i):
                    return i
        """,
        "train.py": """
            import builtins
            builtins.ready = True
            from parity import same
            import fragile
            same(fragile.Data())
        """,
    }
    (result,) = host.run(write(tmp_path / "project", files))
    (found,) = result["found"]
    assert found.startswith("InputError: the dataset needs the module 'fragile'")
    assert "RuntimeError: the script comes first" in found


def test_a_script_that_runs_as_a_module_of_a_package(host: Scripts, tmp_path: Path) -> None:
    files = {
        "pkg/__init__.py": "",
        "pkg/data.py": "N = 1\nclass Data:\n    def __getitem__(self, i):\n        return N, i\n",
        "pkg/train.py": """
            from parity import same
            from . import data
            from .data import Data
            data.N = 5
            def collate(batch):
                from . import data
                return batch, data.N, __package__, __spec__.name
            same(Data(), collate_fn=collate)
        """,
    }
    write(tmp_path, files)
    (result,) = host.run(tmp_path / "pkg" / "train.py", module="pkg.train", cwd=tmp_path)
    assert result["found"] == result["expected"] == [f"([(5, {i})], 5, 'pkg', 'pkg.train')" for i in (0, 1)]


def test_a_module_is_imported_once_in_a_feeder(host: Scripts, tmp_path: Path) -> None:
    files = {
        "data.py": """
            with open("imports", "a") as file:
                file.write("data\\n")
            class Data:
                def __getitem__(self, i):
                    import data
                    assert data.Data is type(self)
                    return i
        """,
        "train.py": "from parity import same\nfrom data import Data\nsame(Data())\n",
    }
    (result,) = host.run(write(tmp_path, files))
    assert result["found"] == ["0", "1"]
    assert (tmp_path / "imports").read_text() == "data\n" * 2


def test_only_imports_with_effects_are_repeated_in_a_feeder(host: Scripts, tmp_path: Path) -> None:
    said = "with open('imports', 'a') as file:\n    file.write(__name__ + '\\n')\n"
    files = {
        "model.py": said + "class Model:\n    pass\n",
        "guarded.py": said + "import json\njson.guarded = True\n",
        "effects.py": said + "import json\njson.seen = True\n",
        "wipe.py": said + "import shutil as sh\nsh.rmtree('outputs', True)\n",
        "wipes.py": said + "import json, wipe\njson.wiped = True\n",
        "train.py": """
            import effects
            import wipes
            from model import Model
            from parity import same
            class Data:
                def __getitem__(self, i):
                    return i
            if __name__ == "__main__":
                import guarded
                same(Data())
        """,
    }
    folder = write(tmp_path, files).parent
    host.run(folder / "train.py")
    assert (folder / "imports").read_text().split() == [
        *("effects", "wipes", "wipe", "model", "guarded"),
        "effects",
    ]
