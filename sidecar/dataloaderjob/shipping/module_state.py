"""The state of user modules: its parts, the order in which they are pickled with the dataset, and how they are
restored.

A pickle has these parts, in this order:

1. functions and classes that were put into `__main__` and into the modules that the dataset reaches
2. the data of each of these modules
3. the data of `__main__`
4. the dataset with its functions

The parts are separate dumps with a common memo, so an object that two parts refer to remains a single object. A module
that the dataset does not reach has its own pickle, which is applied if user code imports the module.
"""

from __future__ import annotations

import functools
import importlib
import io
import linecache
import sys
import types
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from dataloaderjob.core import values
from dataloaderjob.shipping import names, unpicklable
from dataloaderjob.shipping.modules import MAINS, UserModules, is_defined_at, origins
from dataloaderjob.shipping.names import Item, Names
from dataloaderjob.shipping.pickling import Reached, UserCodeUnpickler, rest_of
from dataloaderjob.shipping.unpicklable import ENTRY, Excluded

Dump = tuple[str, Any]
"""(name of the module or part, object to pickle)."""


class Code(NamedTuple):
    """Functions, classes and modules that a module holds but does not define."""

    references: bytes
    """A packed list of (path, module that defines the object, path in that module)."""
    by_value: list[Item]
    modules: tuple[str, ...]
    """The modules that the references name."""


CODE, MAIN, ROOTS = "<code>", "__main__", "<roots>"


class References:
    """References to the code that modules import from other modules. A module's references are computed again only if
    its code has changed."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[list[Item], Code]] = {}

    def find(self, module: str, items: list[Item]) -> Code:
        known = self._known.get(module)
        if known is None or not _same(known[0], items):
            known = self._known[module] = items, _referred(items)
        return known[1]


def _same(some: list[Item], others: list[Item]) -> bool:
    return len(some) == len(others) and all(
        a[0] == b[0] and a[1] is b[1] for a, b in zip(some, others, strict=True)
    )


def _referred(items: list[Item]) -> Code:
    references, by_value = [], []
    for path, value in items:
        place = _place(value)
        if place is None:
            by_value.append((path, value))
        else:
            references.append((path, *place))
    return Code(
        values.pack(references), by_value, tuple(dict.fromkeys(module for _, module, _ in references))
    )


def _place(value: Any) -> tuple[str, str] | None:
    """Returns (module, path in that module) for an object that can be found by import. Returns None for other objects,
    and for objects of `__main__`."""
    if isinstance(value, types.ModuleType):
        name = value.__name__
        return (name, "") if sys.modules.get(name) is value and name not in MAINS else None
    module, path = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
    if not isinstance(module, str) or not isinstance(path, str) or module in MAINS:
        return None
    if names.look_up(module, path) is not value or not is_defined_at(value, module, path):
        return None
    return module, path


class ModuleState:
    """The content that must be sent for the user modules."""

    def __init__(self, known: Names, excluded: Excluded, references: References) -> None:
        self.known = known
        self._excluded = excluded
        self._references = references

    def dumps(self, reached: Reached, patches: list[Any]) -> Iterator[Dump]:
        """Yields the parts that must be pickled before the dataset."""
        modules = sorted(name for name in reached.modules if name in self.known.split)
        main = self._main(reached)
        code = [(name, self.code(name)) for name in modules]
        is_code = {name: isinstance(value, names.CODE) for name, value in main.items()}
        for _, found in code:
            reached.modules.update((name, None) for name in found.modules if name in self.known.split)
        code_parts = [(name, found.references, found.by_value) for name, found in code]
        main_code = [(name, value) for name, value in main.items() if is_code[name]]
        yield CODE, (modules, code_parts, main_code, patches)
        for name in modules:
            yield name, self.data(name)
        yield "__main__", [(name, value) for name, value in main.items() if not is_code[name]]

    def alone(self, module: str, reached: Reached) -> Iterator[Dump]:
        """Yields the state of a module that the dataset does not reach. While the consumer pickles a part, it records
        in `reached` the globals that the part uses. The next part contains these globals."""
        code = self.code(module)
        yield module, (code.references, code.by_value, self.data(module))
        done = set[str]()
        while new := [name for name in reached.main if name not in done]:
            done.update(new)
            main = self._main(reached)
            yield module, [(name, main[name]) for name in new if name in main]

    def _main(self, reached: Reached) -> dict[str, Any]:
        own = vars(sys.modules["__main__"])
        return {
            name: own[name]
            for name in sorted(reached.main.keys() & own.keys())
            if not (name.startswith("__") and name.endswith("__"))
            and ("__main__", name, id(own[name])) not in self._excluded
        }

    def code(self, module: str) -> Code:
        found = self._references.find(module, self.known.split[module][0])
        return found._replace(by_value=self._allowed(module, found.by_value))

    def data(self, module: str) -> tuple[list[tuple[Any, Any]], list[Item]]:
        """Returns a list of (object to update in place, its content), and a list of (path, value to assign)."""
        items = self._allowed(module, self.known.split[module][1])
        contents = []
        kept = []
        for path, value in items:
            named = self.known.table.get(id(value))
            if named is not None and named[1][:2] == (module, path) and names.kind(value) != "opaque":
                try:
                    contents.append((value, self._content(module, path, value)))
                except Exception:  # user code; the object remains as the import created it
                    self._excluded.add((module, path, id(value)))
            kept.append((path, value))
        return contents, kept

    def _content(self, module: str, path: str, value: Any) -> tuple[Any, ...]:
        content, path = names.content(value), path + ENTRY
        out = {entry[2] for entry in self._excluded if entry[:2] == (module, path)}
        if not out:
            return content
        if hasattr(type(value), "__setstate__"):
            raise TypeError("its own __setstate__ may need the omitted entries")
        return unpicklable.without(content, lambda entry: id(entry) in out)

    def _allowed(self, module: str, items: list[Item]) -> list[Item]:
        excluded = self._excluded
        if not excluded:
            return items
        return [(path, value) for path, value in items if (module, path, id(value)) not in excluded]


def parts(module: str, state: ModuleState) -> Iterator[tuple[str, Any, Any]]:
    """Yields (path, object, the object's pickled form) for each part of a module's state."""
    for path, value in state.code(module).by_value:
        yield path, value, value
    contents, items = state.data(module)
    content_of = {id(value): content for value, content in contents}
    for path, value in items:
        yield path, value, content_of.get(id(value), value)


# In a feeder


def apply_code(loaded: Any, skip: Collection[str]) -> list[str]:
    """Restores code and patches. Returns the names of the modules for which data follows, in the order of the data."""
    modules, code, main, patches = loaded
    for module, references, by_value in code:
        if module not in skip:
            assign_code(module, references, by_value)
    assign_all("__main__", main)
    for patch in patches:
        apply_patch(*patch)
    return list(modules)


def apply_alone(module: str, packed: bytes, fresh: names.Fresh) -> None:
    """Restores the state of a module from the parts that `ModuleState.alone` yielded."""
    unpickler = UserCodeUnpickler(io.BytesIO(packed), (), fresh)
    references, by_value, data = unpickler.load()
    main = vars(sys.modules[MAIN])
    for needed in rest_of(unpickler):
        for name, value in needed:
            main.setdefault(name, value)
    assign_code(module, references, by_value)
    apply_data(module, data)


def apply_data(module: str, loaded: Any) -> None:
    contents, items = loaded
    for fresh, content in contents:
        names.update(fresh, content)
    assign_all(module, items)


def assign_code(module: str, references: bytes, by_value: list[Item]) -> None:
    for path, where, place in values.unpack(references):
        try:
            found: Any = importlib.import_module(where)
        except Exception:  # noqa: S112  user code; the import of `module` did not need it
            continue
        for name in place.split(".") if place else ():
            found = getattr(found, name, None)
        if found is not None:
            names.assign(module, path, found)
    assign_all(module, by_value)


def assign_all(module: str, items: list[Item]) -> None:
    for path, value in items:
        names.assign(module, path, value)


# User code put into installed libraries


def patches(user_modules: UserModules) -> list[tuple[str, str, Any]]:
    """Returns (library's module, name, the user's function) for each library function that the script has replaced,
    either with its own function or with a `functools.partial` of the original.

    Call this only once: examining every global of every loaded module takes 10 to 30 ms.
    """
    mine, main = user_modules.find(), sys.modules["__main__"]
    users = {id(vars(main)), *(id(vars(module)) for module in mine.values())}
    found: list[tuple[str, str, Any]] = []
    partials: defaultdict[int, list[_Partial]] = defaultdict(list)
    for module_name, module in list(sys.modules.items()):
        own = getattr(module, "__dict__", None)
        if type(own) is not dict or module_name in mine or module is main or not _patchable(module_name, own):
            continue
        for name, value in list(own.items()):
            if type(value) is types.FunctionType and id(value.__globals__) in users:
                found.append((module_name, name, value))
            elif type(value) is functools.partial and getattr(value.func, "__name__", None) == name:
                file, package = str(own["__file__"]), own.get("__package__") or ""
                partials[id(value)].append(_Partial(module_name, name, value, file, package))
    found += [(one.module, one.name, one.value) for one in _replaced(partials.values())]
    return sorted(found, key=lambda patch: patch[:2])


class _Partial(NamedTuple):
    """A partial of the function `name`, as a global of that name in a library's module."""

    module: str
    name: str
    value: functools.partial[Any]
    file: str
    package: str

    def is_assigned(self) -> bool:
        """Returns True if the module's own source assigns the name."""
        return any(line.startswith(f"{self.name} = ") for line in linecache.getlines(self.file))

    def is_imported(self, owners: set[str]) -> bool:
        """Returns True if the module's own source imports the name from one of the modules `owners`."""
        text = "".join(linecache.getlines(self.file))
        return not owners.isdisjoint(origins(text, self.name, self.package))


def _replaced(groups: Iterable[list[_Partial]]) -> Iterator[_Partial]:
    """Yields the partials that a script, rather than the library itself, has put into their modules. A group holds the
    places of a single partial, because libraries import partials from their own modules."""
    for places in groups:
        owners = {one.module for one in places if one.is_assigned()}
        others = [one for one in places if one.module not in owners]
        while importing := [one for one in others if one.is_imported(owners)]:
            owners.update(one.module for one in importing)
            others = [one for one in others if one.module not in owners]
        yield from others


def _patchable(name: str, own: dict[str, Any]) -> bool:
    top = name.partition(".")[0]
    # The standard library is excluded: feeders use it, and a script's own json.loads would break them. Some scripts
    # silence print() on all ranks but the first, which would make the bundles of the ranks differ.
    return (
        top not in sys.stdlib_module_names
        and top not in ("dataloaderjob", "__mp_main__")
        and bool(own.get("__file__"))
    )


def entries(modules: Mapping[str, types.ModuleType]) -> list[tuple[str, Any, Any]]:
    """Returns (module, path, value) for each entry that user code has added to one of four tables: torch's
    default_collate_fn_map, PIL's formats, the names in numpy and collections (old code sets `np.float = float`), and
    sys.modules (old pickles need aliases)."""
    from torch.utils.data._utils import collate

    found: list[tuple[str, Any, Any]] = [
        (_COLLATE, cls, function)
        for cls, function in collate.default_collate_fn_map.items()
        if getattr(function, "__module__", "") != collate.__name__
    ]
    image = sys.modules.get("PIL.Image")
    formats = [] if image is None else list(image.OPEN.items())
    found += [added for name in _WITH_ADDED_NAMES for added in _added_names(name)]
    found += _aliases(modules)
    return found + [
        (_PIL_OPEN, name, made) for name, made in formats if not made[0].__module__.startswith("PIL.")
    ]


def _aliases(modules: Mapping[str, types.ModuleType]) -> Iterator[tuple[str, str, types.ModuleType]]:
    main = sys.modules[MAIN]
    users = {id(main), *map(id, modules.values())}
    for name, module in list(sys.modules.items()):
        if id(module) in users and name not in modules and name not in MAINS:
            yield _ALIAS, name, module


def _added_names(name: str) -> Iterator[tuple[str, str, Any]]:
    own = vars(sys.modules[name])
    for added in sorted(own.keys() - _names_at_import(name)):
        if not added.startswith("_") and not isinstance(own[added], types.ModuleType):
            yield name, added, own[added]


@functools.cache
def _names_at_import(name: str) -> frozenset[str]:
    return frozenset(sys.modules[name].__all__)


_COLLATE, _PIL_OPEN, _ALIAS = "<collate>", "<PIL>", "<alias>"
_WITH_ADDED_NAMES = ("collections", "numpy")
"""Modules to which old code adds names. Their `__all__` lists all names that they had originally."""


def apply_patch(where: str, name: Any, value: Any) -> None:
    if where == _COLLATE:
        from torch.utils.data._utils import collate

        collate.default_collate_fn_map[name] = value
    elif where == _PIL_OPEN:
        from PIL import Image

        Image.preinit()
        Image.register_open(name, *value)
    elif where == _ALIAS:
        sys.modules.setdefault(name, value)
    else:
        setattr(importlib.import_module(where), name, value)
