"""What every API model shares: camelCase in YAML, frozen values, and rules that cross fields. Pure.

A rule is written once, as a row of the model's `RULES`: the CEL expression that the API server
evaluates (`schema.py` emits it as x-kubernetes-validations) and its Python twin, which pydantic runs
here. A test evaluates both over the same manifests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, ClassVar, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    Strict,
    model_serializer,
    model_validator,
)
from pydantic.alias_generators import to_camel
from pydantic_core import PydanticCustomError

Path = tuple[str | int, ...]
"""Keys and list positions, in the spelling of the manifest."""

Whole = Annotated[int, Strict()]
Flag = Annotated[bool, Strict()]
Free = Annotated[dict[str, Any], Field(max_length=1024)]
"""A part that Kubernetes defines and this package hands on unread."""

BREACHES = "breaches"
"""Type of the pydantic error that carries the broken rules of one model."""


@dataclass(frozen=True, slots=True)
class Use:
    """Metadata of a field: what would do, in words, where its type and bounds do not say it."""

    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Breach:
    """One broken rule in one place."""

    path: Path
    """From the model that holds the rule."""
    found: str
    use: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """A check that one field's type and bounds cannot express."""

    field: str
    """Path of the field to blame, dotted, from the model that holds the rule."""
    use: str
    """What would do."""
    cel: str
    """True where the object is right. `self` is the model, as the API server has it: defaults filled in."""
    found: str
    """CEL expression of type string: what was found."""
    check: Callable[[Any], Iterable[tuple[Path, str]]]
    """The twin: path from the model and what was found, for every breach."""

    def breaches(self, model: Model) -> Iterator[Breach]:
        for path, found in self.check(model):
            yield Breach(path=path, found=found, use=self.use)


@dataclass(frozen=True, slots=True, kw_only=True)
class Immutable:
    """A field that may not change while the object lives."""

    field: str
    """Alias of a field of the model; optional fields may be absent on both sides."""
    use: str

    @property
    def cel(self) -> str:
        mine, old = f"self.{self.field}", f"oldSelf.{self.field}"
        return f"has({mine}) == has({old}) && (!has({mine}) || {mine} == {old})"


class Model(BaseModel):
    """A part of the manifest in which an unknown field is an error.

    A field set to null counts as absent, as the API server has it.
    """

    model_config = ConfigDict(
        alias_generator=to_camel,
        validate_by_alias=True,
        validate_by_name=True,
        extra="forbid",
        frozen=True,
        use_attribute_docstrings=True,
        allow_inf_nan=False,
    )
    RULES: ClassVar[tuple[Rule, ...]] = ()
    IMMUTABLE: ClassVar[tuple[Immutable, ...]] = ()

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, data: Any) -> Any:
        if not isinstance(data, Mapping):
            return data
        known = aliases(cls)
        return {key: value for key, value in data.items() if value is not None or key not in known}

    @model_validator(mode="after")
    def _obey_rules(self) -> Self:
        breaches = [breach for rule in self.RULES for breach in rule.breaches(self)]
        if breaches:
            text = "; ".join(f"{spell(b.path)}: found {b.found}, use {b.use}" for b in breaches)
            raise PydanticCustomError(BREACHES, "{text}", {"text": text, "breaches": breaches})
        return self

    @model_serializer(mode="wrap")
    def _leave_out_the_empty(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        free = self.model_extra or {}
        return {
            key: value
            for key, value in handler(self).items()
            if key in free or (value is not None and value != [] and value != ())
        }


class OpenModel(Model):
    """A part that Kubernetes defines: the fields that matter here are typed, others are handed on.

    In a manifest, a key that is nearly one of the typed fields is refused (`problems.near_misses`).
    """

    model_config = ConfigDict(extra="allow")


def nested(model: type[Model]) -> Any:
    """A field that holds `model` with its defaults. The schema says `{}`: each default is told once."""
    return Field(default_factory=model, json_schema_extra={"default": {}})


@cache
def aliases(model: type[BaseModel]) -> tuple[str, ...]:
    """Names of the model's fields in the manifest."""
    return tuple(field.alias or name for name, field in model.model_fields.items())


def spell(path: Path) -> str:
    """A path as in the messages: `spec.trainer.template.spec.containers[0].command`."""
    text = ""
    for part in path:
        if isinstance(part, int):
            text += f"[{part}]"
        elif "." in part or "/" in part:
            text += f'["{part}"]'
        else:
            text += f".{part}" if text else part
    return text


def unique_names(values: tuple[Any, ...]) -> tuple[Any, ...]:
    """For lists that are maps by `name`. The schema says it by x-kubernetes-list-type."""
    seen: set[str] = set()
    breaches = []
    for index, value in enumerate(values):
        if value.name in seen:
            breaches.append(
                Breach(path=(index, "name"), found=f'"{value.name}" a second time', use="each name once")
            )
        seen.add(value.name)
    if breaches:
        text = ", ".join(f"{spell(b.path)}: found {b.found}" for b in breaches)
        raise PydanticCustomError(BREACHES, "{text}", {"text": text, "breaches": breaches})
    return values


BY_NAME: Any = {"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["name"]}
"""Schema of a list whose entries are told apart by their `name`."""
