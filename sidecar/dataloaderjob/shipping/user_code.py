"""Classes and functions of user code: looked up by name, or sent by value.

A feeder may have received the user's classes by value (cloudpickle), under the module names that they have in the
trainer. To find a class by name, the trainer first searches its loaded modules, including `__main__`, and then the
classes that it has sent by value. A feeder can make the trainer import a module only if the trainer has already
imported the module's package.

Classes and functions of the script, and those created inside functions, are sent by value. A feeder creates such a
class empty and then sets its attributes, which may refer to the class. Creating the class runs no user code: the
effects that a metaclass and `__init_subclass__` had in the trainer are part of the state that is sent. If these hooks
ran again, they would find a `__main__` without its globals, and would register each class a second time.
"""

from __future__ import annotations

import contextlib
import enum
import importlib
import pickle
import re
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib.machinery import ExtensionFileLoader
from typing import Any
from weakref import WeakSet, WeakValueDictionary

import cloudpickle

from dataloaderjob.core.errors import UnsupportedBatch
from dataloaderjob.core.layout import ClassName
from dataloaderjob.shipping.modules import MAINS, is_installed

_cloudpickle: Any = cloudpickle.cloudpickle
_ELSEWHERE: dict[type, ClassName] = {types.MappingProxyType: ("types", "MappingProxyType")}
"""Classes that cannot be found under their own names, with the names to use instead."""
_sent: WeakValueDictionary[ClassName, type] = WeakValueDictionary()
"""Named tuples that were sent to feeders by value. The name of a named tuple does not show if it was created inside a
function or class."""
_ambiguous: set[ClassName] = set()
"""Names that several named tuples with different fields share."""
_BY_METACLASS = ("__prepare__", "__new__", "__init__", "__setattr__")
_made: WeakSet[type] = WeakSet()
"""The classes of this process that arrived by value."""
_ENUM_OWN = frozenset({
    "_generate_next_value_", "_member_names_", "_member_map_", "_member_type_", "_value2member_map_",
})  # fmt: skip
"""Attributes that are set when an enum is created."""
_MEMBER_OWN = frozenset({"_value_", "_name_", "_sort_order_", "_inverted_", "__objclass__"})
"""Attributes that are set when a member of an enum is created, except `_inverted_`, which is set on first use."""
_DATA: dict[type, Callable[[Any], Any]] = {
    int: int.__int__,
    float: float.__float__,
    str: lambda member: str.__getitem__(member, slice(None)),
    bytes: lambda member: bytes.__getitem__(member, slice(None)),
    tuple: lambda member: tuple.__getitem__(member, slice(None)),
}
_IDENTIFIER = re.compile(r"[^\W\d]\w*")
_FUNCTION_STATE = (
    "__name__", "__qualname__", "__annotations__", "__kwdefaults__", "__defaults__", "__module__", "__doc__",
)  # fmt: skip
_codes: dict[int, tuple[types.CodeType, tuple[str, ...]]] = {}


# Classes by name


_IS_MADE_AT_RUN_TIME = 1 << 9
"""Py_TPFLAGS_HEAPTYPE. A type without this flag is part of the interpreter, or of a library written in C."""


def note_sent(cls: Any) -> None:
    """Records a class that feeders receive by value."""
    if not hasattr(cls, "_fields"):
        return
    name = cls.__module__, cls.__qualname__
    known: Any = _sent.setdefault(name, cls)
    if known._fields != cls._fields:
        _ambiguous.add(name)


def class_name(cls: type) -> ClassName | None:
    """Returns (module, qualified name), or None for a class created inside a function, because no path leads to that
    class."""
    if cls in _ELSEWHERE:
        return _ELSEWHERE[cls]
    if "<locals>" in cls.__qualname__:
        return None
    return cls.__module__, cls.__qualname__


def full_name(cls: type) -> str:
    """Returns the class's name for messages, such as `PIL.Image.Image`. Omits the module of built-in classes, such as
    `dict`."""
    return cls.__qualname__ if cls.__module__ == "builtins" else f"{cls.__module__}.{cls.__qualname__}"


def find_class(module: str, qualname: str) -> type:
    """Returns the class with this name. Raises UnsupportedBatch, with advice on how to make the class findable, if it
    cannot be found."""
    try:
        found: Any = _found(module, qualname)
    except (ImportError, AttributeError, ValueError) as exc:
        raise UnsupportedBatch(
            f"the batch holds a {module}.{qualname}, and this process cannot find that class ({exc}): "
            "define it at the top level of a module that the training script imports"
        ) from exc
    if not isinstance(found, type):
        raise UnsupportedBatch(
            f"the batch holds a {module}.{qualname}, which is not a class in this process but a "
            f"{type(found).__name__}: give the class a unique name"
        )
    return found


def _found(module: str, qualname: str) -> Any:
    """Returns the object with this name. Raises ImportError, AttributeError or ValueError if it cannot be found."""
    try:
        found: Any = sys.modules.get(module) or _import(module)
        for name in qualname.split("."):
            found = getattr(found, name)
        return found
    except AttributeError:
        sent = sent_class((module, qualname))
        if sent is None:
            raise
        return sent


def sent_class(name: ClassName) -> type | None:
    """Returns the named tuple with this name that feeders received by value, or None unless exactly one exists."""
    return None if name in _ambiguous else _sent.get(name)


def is_by_value(cls: type) -> bool:
    """Returns True if a class arrived in this process by value."""
    return cls in _made


def other_name(cls: type) -> tuple[str, str] | None:
    """Returns the actual (module, name) of a class that claims a name in the standard library. Returns None for other
    classes. For example, the type of a lock claims to be `_thread.lock`, but is `_thread.LockType`. Raises
    PicklingError for a type of the interpreter that is in no module, because it cannot be recreated."""
    if cls.__module__.partition(".")[0] not in sys.stdlib_module_names:
        return None
    for module in (cls.__module__, "types", "_collections_abc"):
        for name, value in list(vars(sys.modules[module]).items()) if module in sys.modules else ():
            if value is cls:
                return module, name
    for name, extension in list(sys.modules.items()):
        if _is_extension(extension) and vars(extension).get(cls.__name__) is cls:
            return name, cls.__name__
    if not cls.__flags__ & _IS_MADE_AT_RUN_TIME:
        raise pickle.PicklingError(f"no module contains the type {full_name(cls)}")
    return None


def _is_extension(module: Any) -> bool:
    return isinstance(getattr(getattr(module, "__spec__", None), "loader", None), ExtensionFileLoader)


def attribute(module: str, name: str) -> Any:
    """Returns the class with a name that `other_name` returned. Called when the class is unpickled."""
    return getattr(importlib.import_module(module), name)


def _import(module: str) -> types.ModuleType:
    package = module.partition(".")[0]
    if package not in sys.modules or module.endswith(".__main__"):  # a `__main__` would run as a script
        raise ImportError(f"{module!r} is not imported here")
    return importlib.import_module(module)


# Classes by value


def reduce_class(cls: Any) -> tuple[Any, ...]:
    """Reduces a class as cloudpickle does, without the tracker id, which could match another bundle's class."""
    args: Any
    note_sent(cls)
    if issubclass(cls, enum.Enum):
        members = {name: (_data(member), member._value_) for name, member in cls.__members__.items()}
        args = (cls.__bases__, cls.__name__, cls.__qualname__, members, cls.__module__)
        return _make_enum, args, _enum_state(cls), None, None, _set_enum_state
    own = {"__module__": cls.__module__, "__qualname__": cls.__qualname__}
    args = (type(cls), cls.__name__, _cloudpickle._get_bases(cls), own, None, None)  # noqa: SLF001
    return _make_class, args, _cloudpickle._class_getstate(cls), None, None, _set_state  # noqa: SLF001


def _data(member: Any) -> Any:
    """Returns an enum member's data, which has the enum's data type, such as str in `class Letter(str, Enum)`. The data
    may differ from the member's value."""
    take = _DATA.get(type(member)._member_type_)
    return None if take is None else take(member)


def _enum_state(cls: Any) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """Returns (attributes of the class, attributes of each member that has its own attributes, by name)."""
    own, _ = _cloudpickle._class_getstate(cls)  # noqa: SLF001
    members = {
        name: {"".join(key): value for key, value in vars(member).items() if key not in _MEMBER_OWN}
        for name, member in cls._member_map_.items()
        if member._name_ == name
    }
    kept = {name: value for name, value in own.items() if name not in _ENUM_OWN | cls.__members__.keys()}
    return kept, {name: attributes for name, attributes in members.items() if attributes}


def _make_class(metaclass: type, name: str, bases: tuple[type, ...], *rest: Any) -> type:
    classes = types.resolve_bases(bases)  # Generic[T] is not a class
    with _quiet([metaclass, *map(type, classes)], classes):
        return _note(_cloudpickle._make_skeleton_class(metaclass, name, bases, *rest))  # noqa: SLF001


def _make_enum(
    bases: tuple[type, ...], name: str, qualname: str, members: dict[str, tuple[Any, Any]], module: str
) -> type:
    metaclass: Any = type(bases[-1])
    with _quiet((), bases):
        own = metaclass.__prepare__(name, bases)
        making = {
            "__new__": _make_member,
            "__init__": _init_member,
            "__module__": module,
            "__qualname__": qualname,
        }
        for key, given in (making | members).items():
            own[key] = given
        made: Any = metaclass.__new__(metaclass, name, bases, own)
    for helper in ("__init__", "__new_member__"):  # the user's own helpers arrive with the state
        if helper in vars(made):
            type.__delattr__(made, helper)
    return _note(made)


def _make_member(cls: Any, *given: Any) -> Any:
    # If the data type is a tuple, both arrive as one tuple.
    data, value = given if len(given) == 2 else given[0]
    base = cls._member_type_
    if base in _DATA:
        member = base.__new__(cls, data)
    elif base.__new__ is object.__new__:
        member = object.__new__(cls)
    else:
        member = base.__new__(cls, *(value if isinstance(value, tuple) else (value,)))
    member._value_ = value
    return member


def _init_member(member: Any, *given: Any) -> None:
    """Does nothing in place of `__init__`, because a member's attributes arrive with the state."""


def _set_enum_state(cls: Any, state: tuple[dict[str, Any], dict[str, dict[str, Any]]]) -> Any:
    own, members = state
    made: Any = _set_state(cls, (own, {}))
    for name, attributes in members.items():
        vars(made._member_map_[name]).update(attributes)
    return made


def _set_state(cls: type, state: Any) -> type:
    with _quiet([type(cls)], ()):
        made: type = _cloudpickle._class_setstate(cls, state)  # noqa: SLF001
    return made


def _note(cls: type) -> type:
    _made.add(cls)
    return cls


@contextlib.contextmanager
def _quiet(metaclasses: Iterable[type], bases: Iterable[type]) -> Iterator[None]:
    """Temporarily removes the hooks of user classes. The hooks of libraries still run, because the state that is sent
    does not contain their effects."""
    hooks = [(cls, name) for cls in _with_bases(metaclasses) for name in _BY_METACLASS]
    hooks += [(cls, "__init_subclass__") for cls in _with_bases(bases)]
    taken = [(cls, name, vars(cls)[name]) for cls, name in hooks if name in vars(cls)]
    for cls, name, _ in taken:
        type.__delattr__(cls, name)
    try:
        yield
    finally:
        for cls, name, hook in taken:
            type.__setattr__(cls, name, hook)


def _with_bases(classes: Iterable[type]) -> list[type]:
    return [
        cls for cls in dict.fromkeys(base for given in classes for base in given.__mro__) if is_users(cls)
    ]


def is_users(cls: type) -> bool:
    """Returns True if a class belongs to a user module, not to an installed one."""
    file = getattr(sys.modules.get(cls.__module__), "__file__", None)
    return cls.__module__ in MAINS or cls in _made or (isinstance(file, str) and not is_installed(file))


# Functions by value


class Globals:
    """Placeholder for a module's globals. Functions that are sent by value share these with the module."""

    def __init__(self, name: str) -> None:
        self.name = name


def globals_used(code: types.CodeType) -> tuple[str, ...]:
    """Returns the globals used by a code object, and by the functions inside it."""
    known = _codes.get(id(code))
    if known is None:
        found = dict.fromkeys(_cloudpickle._walk_global_ops(code))  # noqa: SLF001
        for const in code.co_consts:
            if isinstance(const, types.CodeType):
                found.update(dict.fromkeys(globals_used(const)))
        known = _codes[id(code)] = code, tuple(found)
    return known[1]


def names_in_annotations(cls: type) -> dict[str, None]:
    """Returns the names in a class's string annotations, as created by `from __future__ import annotations`."""
    texts = [text for text in vars(cls).get("__annotations__", {}).values() if type(text) is str]
    return dict.fromkeys(name for text in texts for name in _IDENTIFIER.findall(text))


def _submodules(function: types.FunctionType, own: Mapping[str, Any]) -> list[str]:
    """Returns the modules that a function reaches as attributes of other modules, at any depth, as in `import os;
    os.path`."""
    found: list[str] = []
    used = function.__code__.co_names
    known = [
        own[name] for name in globals_used(function.__code__) if isinstance(own.get(name), types.ModuleType)
    ]
    pending = [module.__name__ for module in known if "__path__" in vars(module)]
    while pending:
        package = pending.pop()
        inner = [f"{package}.{name}" for name in used if f"{package}.{name}" in sys.modules]
        found += inner
        pending += inner
    return found


def function_state(function: types.FunctionType, own: Mapping[str, Any]) -> tuple[Any, ...]:
    # New strings: equal names may or may not be interned, so two processes might pickle them differently.
    state = {name: value for name in _FUNCTION_STATE if (value := getattr(function, name))}
    extra = {"".join(name): value for name, value in vars(function).items()}
    return state, extra, function.__closure__, _submodules(function, own)


def module_globals(module: str) -> dict[str, Any]:
    return vars(sys.modules[module] if module in MAINS else importlib.import_module(module))


def make_function(code: Any, own: dict[str, Any], cells: Any) -> types.FunctionType:
    return types.FunctionType(code, own, None, None, cells)


def set_function_state(function: types.FunctionType, given: tuple[Any, ...]) -> None:
    state, extra, cells, submodules = given
    for name, value in state.items():
        setattr(function, name, value)
    vars(function).update(extra)
    for cell, filled in zip(function.__closure__ or (), cells or (), strict=True):
        try:
            cell.cell_contents = filled.cell_contents
        except ValueError:
            continue  # the cell is empty in the trainer, too
    for name in submodules:
        importlib.import_module(name)
