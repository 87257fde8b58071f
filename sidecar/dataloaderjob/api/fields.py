"""What the models say about their fields, in words: for messages and for the reference. Pure."""

from __future__ import annotations

import types
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Le
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from dataloaderjob.api.base import Path, Use
from dataloaderjob.api.quantities import Quantity


@dataclass(frozen=True, slots=True)
class Shape:
    """A type without its Annotated and Optional wrappings, and the metadata found on the way."""

    type: Any
    metadata: tuple[Any, ...] = field(default=())

    @property
    def model(self) -> type[BaseModel] | None:
        return self.type if isinstance(self.type, type) and issubclass(self.type, BaseModel) else None

    @property
    def items(self) -> Any:
        """Type of a list's entries or of a mapping's values; None where there are none."""
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


@cache
def fields_by_alias(model: type[BaseModel]) -> dict[str, FieldInfo]:
    return {info.alias or name: info for name, info in model.model_fields.items()}


def shape_at(model: type[BaseModel], path: Path) -> Shape | None:
    """The shape that the models declare at `path`; None inside a free part."""
    shape: Shape | None = Shape(model)
    for part in path:
        assert shape is not None  # noqa: S101  narrowed below
        owner = shape.model
        if owner is not None:
            info = fields_by_alias(owner).get(str(part))
            shape = field_shape(info) if info else None
        else:
            shape = shape_of(shape.items) if shape.items is not None else None
        if shape is None:
            return None
    return shape


def expectation(shape: Shape) -> str:
    """What a value of this shape may be, in words that follow `use`."""
    for item in shape.metadata:
        if isinstance(item, Use):
            return item.text
    kind, origin = shape.type, get_origin(shape.type)
    if kind is bool:
        return "true or false"
    if kind is int:
        return "a whole number" + _bounds(shape.metadata)
    if kind is str:
        return "a string (in quotes where it looks like a number, true or false)"
    if origin is Literal:
        return " or ".join(str(arg) for arg in get_args(kind))
    if origin is tuple:
        return "a list with at least one entry" if _has_min(shape.metadata) else "a list"
    if isinstance(kind, type) and issubclass(kind, Quantity):
        return kind.EXAMPLE
    if shape.model is not None:
        return f"a mapping with the fields {', '.join(fields_by_alias(shape.model))}"
    return "a mapping"


def paths_ending_in(model: type[BaseModel], name: str) -> list[str]:
    """Dotted paths below `model` of all fields called `name`, nearest first."""
    found = [path for path in _walk(model, ()) if path[-1].removesuffix("[]") == name]
    return [".".join(path).removesuffix("[]") for path in sorted(found, key=len)]


def _walk(model: type[BaseModel], root: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    for alias, info in fields_by_alias(model).items():
        shape = field_shape(info)
        inner = shape.model
        listed = ""
        if inner is None and get_origin(shape.type) is tuple:
            inner, listed = shape_of(shape.items).model, "[]"
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
