"""Problems that a user can act on, derived from pydantic's errors: place, value found and valid values. Pure.

The module also describes the models' fields in words, for messages and for the reference.
"""

from __future__ import annotations

import difflib
import types
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Le
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from dataloaderjob.api.base import (
    BREACHES,
    LEAVE_UNSET,
    OpenModel,
    Path,
    Quantity,
    Use,
    fields_by_alias,
    remedy,
    spell,
)
from dataloaderjob.core.errors import InputError


@dataclass(frozen=True, slots=True)
class Shape:
    """A type without its Annotated and Optional wrappers, and the metadata found in them."""

    type: Any
    metadata: tuple[Any, ...] = field(default=())

    @property
    def model(self) -> type[BaseModel] | None:
        return self.type if isinstance(self.type, type) and issubclass(self.type, BaseModel) else None

    @property
    def items(self) -> Any:
        """Type of a list's entries or of a mapping's values; None for other types."""
        origin, args = get_origin(self.type), get_args(self.type)
        if origin is tuple:
            return args[0]
        return args[1] if origin is dict else None


def shape_of(annotation: Any, metadata: tuple[Any, ...] = ()) -> Shape:
    origin = get_origin(annotation)
    if origin is Annotated:
        inner, *more = get_args(annotation)
        flat = [part for item in more for part in (item.metadata if isinstance(item, FieldInfo) else [item])]
        return shape_of(inner, metadata + tuple(flat))
    if origin in (Union, types.UnionType):
        (inner,) = (arg for arg in get_args(annotation) if arg is not type(None))
        return shape_of(inner, metadata)
    return Shape(annotation, metadata)


def field_shape(info: FieldInfo) -> Shape:
    return shape_of(info.annotation, tuple(info.metadata))


def fields_within(model: type[BaseModel]) -> Iterator[tuple[str, str, type[BaseModel] | None]]:
    """Yields every field of a model as a tuple: its name, "[]" or "", and the model of its values or None. "[]" means
    that the field holds several values."""
    for alias, info in fields_by_alias(model).items():
        shape, listed = field_shape(info), ""
        if shape.model is None and shape.items is not None:
            shape, listed = shape_of(shape.items), "[]"
        yield alias, listed, shape.model


def shape_at(model: type[BaseModel], path: Path) -> Shape | None:
    """Returns the shape that the models declare at `path`; None inside a `Free` part."""
    shape = Shape(model)
    for part in path:
        if shape.model is not None:
            if (info := fields_by_alias(shape.model).get(str(part))) is None:
                return None
            shape = field_shape(info)
        elif shape.items is not None:
            shape = shape_of(shape.items)
        else:
            return None
    return shape


def expectation(shape: Shape) -> str:
    """Describes the valid values of this shape, in words that follow `use` in a message."""
    for item in shape.metadata:
        if isinstance(item, Use):
            return item.text
    kind, origin = shape.type, get_origin(shape.type)
    if kind is bool:
        return "true or false"
    if kind is int:
        return "a whole number" + _bounds(shape.metadata)
    if kind is str:
        return "a string (in quotes if it looks like a number, true or false)"
    if origin is Literal:
        return " or ".join(str(arg) for arg in get_args(kind))
    if isinstance(kind, type) and issubclass(kind, StrEnum):
        return " or ".join(_quoted(value) for value in kind)
    if origin is tuple:
        return "a list with at least one entry" if _has_min(shape.metadata) else "a list"
    if isinstance(kind, type) and issubclass(kind, Quantity):
        return kind.EXAMPLE
    if shape.model is not None:
        return f"a mapping with the fields {', '.join(fields_by_alias(shape.model))}"
    return "a mapping"


def _quoted(value: str) -> str:
    """Returns the value as it must be written in YAML, which reads On and Off as true and false."""
    return f'"{value}" in quotes' if value.lower() in ("on", "off") else value


def paths_ending_in(model: type[BaseModel], name: str) -> list[str]:
    """Returns the dotted paths below `model` of all fields called `name`, nearest first."""
    found = [path for path in _walk(model, ()) if path[-1].removesuffix("[]") == name]
    return [".".join(path).removesuffix("[]") for path in sorted(found, key=len)]


def _walk(model: type[BaseModel], root: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    for alias, listed, inner in fields_within(model):
        path = (*root, alias + listed)
        yield path
        if inner is not None:
            yield from _walk(inner, path)


def _bounds(metadata: tuple[Any, ...]) -> str:
    low = next((item.ge for item in metadata if isinstance(item, Ge)), None)
    high = next((item.le for item in metadata if isinstance(item, Le)), None)
    if low is None and high is None:
        return ""
    return f" from {low} to {high}" if high is not None else f" of at least {low}"


def _has_min(metadata: tuple[Any, ...]) -> bool:
    return any(getattr(item, "min_length", 0) for item in metadata)


MAX_SHOWN = 60
"""Maximum number of characters of a value that a message shows."""
OLD_NAMES = {
    "numHeartbeatsTimeout": "healthCheck.failureThreshold, which replaced it in Ray",
    "workerRegisterTimeout": "workerRegisterTimeoutSeconds",
    "startupSeconds": "spec.startupDeadlineSeconds",
    "batchSeconds": "spec.loader.batchTimeoutSeconds",
    "progressAfterSeconds": "spec.loader.warnAfterSeconds",
    "sharedMemory": "spec.loader.memoryPerProcess, which is per process",
    "headResources": "spec.ray.managed.head.resources",
    "sharedMemorySize": "spec.loader.memoryPerProcess",
    "minReplicas": "spec.feeders.minAvailable",
    "maxReplicas": f"{LEAVE_UNSET}, because spec.feeders.replicas is the maximum",
    "trainer": "trainers.job, which has the same fields",
    "processesPerPod": "processesPerPod",
    "numWorkers": "spec.feeders.replicas",
}
"""Names that users know from other tools or releases, and their equivalents in the manifest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One thing to change in a manifest."""

    path: str
    """Path of the field as spelled in the manifest; empty for the manifest as a whole."""
    found: str
    use: str
    line: int | None = None
    """Line number in the file, starting at 1."""

    def __str__(self) -> str:
        subject = f"{self.path}: " if self.path else ""
        return f"{subject}found {self.found}; {remedy(self.use)}"


class ManifestError(InputError):
    """The manifest cannot work. The error contains every problem found in it."""

    def __init__(self, source: str, problems: Iterable[Problem]) -> None:
        self.source = source
        self.problems = tuple(sorted(problems, key=lambda p: (p.line or 0, p.path)))
        lines = [f"{source}:{p.line}: {p}" if p.line else f"{source}: {p}" for p in self.problems]
        if len(lines) > 1:
            lines = [f"{source} has {len(lines)} problems:", *(f"  {line}" for line in lines)]
        super().__init__("\n".join(lines))


def translate(error: ValidationError, model: type[BaseModel], *, lines: Mapping[Path, int]) -> list[Problem]:
    """Returns every problem in a pydantic error of `model`. `lines` holds the line number of each path."""
    problems = []
    for detail in error.errors(include_url=False):
        loc: Path = tuple(part for part in detail["loc"] if part != "[key]")
        for path, found, use in _explain(model, loc, detail):
            problems.append(Problem(path=spell(path), found=found, use=use, line=line_of(path, lines)))
    return problems


def near_misses(
    model: type[BaseModel], data: Any, *, lines: Mapping[Path, int], path: Path = ()
) -> Iterator[Problem]:
    """Yields a problem for each key in an open part that closely resembles a typed field. Kubernetes would drop such a
    key."""
    if isinstance(data, Mapping):
        known = fields_by_alias(model)
        for key, value in data.items():
            here = (*path, key)
            if key in known:
                yield from _below(field_shape(known[key]), value, lines, here)
            elif issubclass(model, OpenModel):
                for near in difflib.get_close_matches(str(key), known, n=1, cutoff=0.85):
                    yield Problem(
                        path=spell(here), found="an unknown field", use=near, line=line_of(here, lines)
                    )


def without_unknown(shape: Shape, data: Any, path: Path = ()) -> tuple[Any, list[Path]]:
    """Returns the data without the fields that the models lack, and the paths of those fields. Keeps all fields of open
    parts."""
    dropped: list[Path] = []
    if shape.model is not None and isinstance(data, Mapping):
        known, kept = fields_by_alias(shape.model), {}
        for key, value in data.items():
            here = (*path, key)
            if key in known:
                kept[key], more = without_unknown(field_shape(known[key]), value, here)
                dropped += more
            elif issubclass(shape.model, OpenModel):
                kept[key] = value
            else:
                dropped.append(here)
        return kept, dropped
    if shape.items is not None and isinstance(data, list):
        entries = [without_unknown(shape_of(shape.items), one, (*path, i)) for i, one in enumerate(data)]
        return [one for one, _ in entries], [place for _, more in entries for place in more]
    return data, dropped


def _below(shape: Shape, value: Any, lines: Mapping[Path, int], path: Path) -> Iterator[Problem]:
    if shape.model is not None:
        yield from near_misses(shape.model, value, lines=lines, path=path)
    elif isinstance(value, list) and shape.items is not None:
        for index, item in enumerate(value):
            yield from _below(shape_of(shape.items), item, lines, (*path, index))


def line_of(path: Path, lines: Mapping[Path, int]) -> int | None:
    """Returns the line number of the path, or of the nearest part above it in the file."""
    for end in range(len(path), 0, -1):
        if path[:end] in lines:
            return lines[path[:end]]
    return lines.get(())


def describe(value: object) -> str:
    """Describes a value for a message, in YAML's terms."""
    if value is None:
        return "nothing"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return f'"{value[:MAX_SHOWN]}..."' if len(value) > MAX_SHOWN else f'"{value}"'
    if isinstance(value, Mapping):
        keys = ", ".join(str(key) for key in list(value)[:4])
        return f"a mapping ({keys}{', ...' if len(value) > 4 else ''})" if value else "an empty mapping"
    if isinstance(value, list | tuple):
        return f"a list of {len(value)}" if value else "an empty list"
    text = str(value)
    return f"{text[:MAX_SHOWN]}..." if len(text) > MAX_SHOWN else text


def _explain(model: type[BaseModel], loc: Path, detail: Any) -> Iterator[tuple[Path, str, str]]:
    kind = detail["type"]
    if kind == BREACHES:
        for breach in detail["ctx"]["breaches"]:
            yield loc + breach.path, breach.found, breach.use
    elif kind == "extra_forbidden":
        yield loc, "an unknown field", _instead_of(model, loc)
    elif kind == "too_short" and detail["input"]:
        return  # pydantic counts only valid entries; the problems of the others are reported
    elif kind == "missing":
        yield loc, "nothing", _expected(model, loc)
    elif kind == "string_too_long":
        yield loc, f"{len(detail['input'])} characters", f"at most {detail['ctx']['max_length']}"
    elif kind == "too_long":
        yield loc, f"{len(detail['input'])} entries", f"at most {detail['ctx']['max_length']}"
    else:
        yield loc, describe(detail["input"]), _expected(model, loc)


def _expected(model: type[BaseModel], loc: Path) -> str:
    shape = shape_at(model, loc)
    return expectation(shape) if shape else "a value that the manifest reference allows"


def _instead_of(model: type[BaseModel], loc: Path) -> str:
    """Suggests the field that a user who wrote the unknown field `loc` may have meant."""
    name, parent = str(loc[-1]), shape_at(model, loc[:-1])
    owner = parent.model if isinstance(parent, Shape) else model
    if owner is None:
        return "no such field"
    known = fields_by_alias(owner)
    if name in OLD_NAMES:
        return OLD_NAMES[name]
    plain = {alias.lower(): alias for alias in known}
    same = plain.get(name.replace("_", "").replace("-", "").lower())
    if same:
        return same
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.7)
    if near:
        return near[0]
    elsewhere = paths_ending_in(owner, name)
    if elsewhere:
        return " or ".join(spell(loc[:-1]) + "." + path for path in elsewhere[:2])
    elsewhere = [path for path in paths_ending_in(model, name) if path != spell(loc)]
    if elsewhere:
        return " or ".join(elsewhere[:2])
    return f"one of {', '.join(known)}, or remove it"
