"""The base of every API model: camelCase in YAML, frozen values, quantities, and rules that span fields. Pure.

Each rule is written once, in CEL, as a row of the model's `RULES`. pydantic evaluates it here. `crd.py` passes it to
the API server, as x-kubernetes-validations. Quantities are written as in Kubernetes ("500m", "2Gi").
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from functools import cache, cached_property, lru_cache, total_ordering
from typing import Annotated, Any, ClassVar, Self, cast

import cel
from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    SerializerFunctionWrapHandler,
    Strict,
    ValidationInfo,
    model_serializer,
    model_validator,
)
from pydantic.alias_generators import to_camel
from pydantic.fields import FieldInfo
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

Path = tuple[str | int, ...]
"""Keys and list indices, as spelled in the manifest."""

Whole = Annotated[int, Strict()]
Flag = Annotated[bool, Strict()]
Free = Annotated[dict[str, Any], Field(max_length=1024)]
"""A part that Kubernetes defines and that this package passes on without reading it."""

BREACHES = "breaches"
"""Type of the pydantic error that carries the broken rules of one model."""
ONE_MACHINE = "one_machine"
"""Key in the validation context. Its value is true if the manifest will run on one machine instead of a cluster."""


LEAVE_UNSET = "leave this unset"
"""Start of `use` if the field must not be set."""


def remedy(use: str) -> str:
    """Returns the end of a message about a field, such as `use true or false`."""
    return use if use.startswith(LEAVE_UNSET) else f"use {use}"


@dataclass(frozen=True, slots=True)
class Use:
    """Field metadata that describes the valid values in words, if the field's type and bounds do not express them."""

    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Breach:
    """A broken rule, and the place where it is broken."""

    path: Path
    """Path relative to the model that holds the rule."""
    found: str
    use: str


@dataclass(frozen=True, kw_only=True)
class Rule:
    """A check that the type and bounds of a single field cannot express."""

    field: str
    """Dotted path of the offending field, relative to the model that holds the rule. `[]` stands for each entry of a
    list or each key of a mapping. If the list or mapping is empty or absent, the rule holds."""
    use: str
    """The valid values, in words."""
    cel: str
    """CEL expression that is true if the object is valid. `self` is the model as the API server stores it, with
    defaults filled in. `item` is the entry or key that the last `[]` stands for. In a mapping, the expression sees the
    keys, and only those values that are quantities."""
    found: str
    """CEL expression of type string that evaluates to the value found, for messages."""
    only_on_a_cluster: bool = False
    """True if the rule applies only on a cluster. On one machine, the field is ignored and may be absent."""

    @cached_property
    def whole(self) -> str:
        """The expression that the API server evaluates: `cel`, applied to everything that `[]` stands for."""
        *lists, _ = re.split(r"\[\]\.?", self.field)
        return _for_all("self", lists, self.cel)


@dataclass(frozen=True, slots=True, kw_only=True)
class Immutable:
    """A field that may not change during the object's lifetime."""

    field: str
    """Alias of one of the model's fields. An optional field may be absent both before and after an update."""
    use: str
    presence_only: bool = False
    """True if the content may change, but the field may neither appear nor disappear."""

    @property
    def cel(self) -> str:
        mine, old = f"self.{self.field}", f"oldSelf.{self.field}"
        there = f"has({mine}) == has({old})"
        return there if self.presence_only else f"{there} && (!has({mine}) || {mine} == {old})"


def _for_all(owner: str, lists: list[str], cel: str) -> str:
    if not lists:
        return cel
    field, name = f"{owner}.{lists[0]}", "outer" if lists[1:] else "item"
    return f"!has({field}) || {field}.all({name}, {_for_all(name, lists[1:], cel)})"


class Model(BaseModel):
    """A part of the manifest in which an unknown field is an error.

    A field set to null counts as absent, as on the API server.
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
        known = fields_by_alias(cls)
        return {key: value for key, value in data.items() if value is not None or key not in known}

    @model_validator(mode="after")
    def _obey_rules(self, info: ValidationInfo) -> Self:
        one_machine = bool((info.context or {}).get(ONE_MACHINE))
        if self.RULES and (breaches := list(_breaches(self, one_machine=one_machine))):
            raise _refusal(breaches)
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
    """A part that Kubernetes defines. The fields that matter here are typed; all others are passed on.

    In a manifest, a key that closely resembles a typed field is rejected (`problems.near_misses`).
    """

    model_config = ConfigDict(extra="allow")


def nested(model: type[Model]) -> Any:
    """Makes a field that defaults to one shared `model()`. The default in the schema is `{}`, so that each nested
    default appears only once."""
    return Field(default_factory=cache(model), json_schema_extra={"default": {}})


@cache
def fields_by_alias(model: type[BaseModel]) -> dict[str, FieldInfo]:
    """Returns the model's fields, keyed by their names in the manifest."""
    return {info.alias or name: info for name, info in model.model_fields.items()}


def spell(path: Path) -> str:
    """Formats a path for messages: `spec.trainers.job.template.spec.containers[0].command`."""
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
    """Checks that no two entries of a list have the same `name`. The schema enforces this with
    x-kubernetes-list-type."""
    seen: set[str] = set()
    breaches = []
    for index, value in enumerate(values):
        if value.name in seen:
            breaches.append(
                Breach(path=(index, "name"), found=f'"{value.name}" a second time', use="each name once")
            )
        seen.add(value.name)
    if breaches:
        raise _refusal(breaches)
    return values


def _refusal(breaches: list[Breach]) -> PydanticCustomError:
    text = "; ".join(f"{spell(b.path)}: found {b.found}; {remedy(b.use)}" for b in breaches)
    return PydanticCustomError(BREACHES, "{text}", {"text": text, "breaches": breaches})


BY_NAME: Any = {"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["name"]}
"""Schema of a list whose entries are identified by their `name`."""


KIB, MIB, GIB, TIB = 1 << 10, 1 << 20, 1 << 30, 1 << 40
MAX_LENGTH = 32
_SUFFIXES = {
    "n": Fraction(1, 10**9), "u": Fraction(1, 10**6), "m": Fraction(1, 1000), "": Fraction(1),
    "k": Fraction(10**3), "M": Fraction(10**6), "G": Fraction(10**9), "T": Fraction(10**12),
    "P": Fraction(10**15), "E": Fraction(10**18),
    "Ki": Fraction(KIB), "Mi": Fraction(MIB), "Gi": Fraction(GIB), "Ti": Fraction(TIB),
    "Pi": Fraction(1 << 50), "Ei": Fraction(1 << 60),
}  # fmt: skip
_NUMBER = r"([0-9]+(\.[0-9]*)?|\.[0-9]+)"
PATTERN = rf"^{_NUMBER}(n|u|m|k|[MGTPE]|[KMGTPE]i|[eE][+-]?[0-9]{{1,2}})?$"


@total_ordering
class Quantity:
    """A number with a unit. Quantities are compared and ordered by value; `text` is the number as written."""

    __slots__ = ("text", "value")
    EXAMPLE: ClassVar[str] = 'a quantity such as "500m", "1.5", 2 or "2Gi"'

    def __init__(self, text: str | int) -> None:
        """Raises ValueError if `text` is not a quantity, is negative, or exceeds 2**63 - 1."""
        written = str(text)
        parts = re.fullmatch(PATTERN, written)
        if isinstance(text, bool) or len(written) > MAX_LENGTH or parts is None:
            raise ValueError(f"found {text!r}; use {self.EXAMPLE}")
        number, _, suffix = parts.groups("")
        factor = _SUFFIXES[suffix] if suffix in _SUFFIXES else Fraction(10) ** int(suffix[1:])
        self.text = written
        self.value = Fraction(number.rstrip(".")) * factor
        if self.value >= 1 << 63:
            raise ValueError(f"found {text!r}; use a quantity below 2**63")

    @property
    def nbytes(self) -> int:
        """The value rounded up to a whole number, as Kubernetes rounds."""
        return -int(-self.value // 1)

    def __eq__(self, other: object) -> bool:
        return self.value == other.value if isinstance(other, Quantity) else NotImplemented

    def __lt__(self, other: Quantity) -> bool:
        return self.value < other.value

    def __hash__(self) -> int:
        return hash(self.value)

    def __str__(self) -> str:
        return self.text

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.text!r})"

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(
            cls._validate, serialization=core_schema.to_string_ser_schema()
        )

    @classmethod
    def __get_pydantic_json_schema__(
        cls, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        return {
            "x-kubernetes-int-or-string": True,
            "anyOf": [{"type": "integer"}, {"type": "string"}],
            "pattern": PATTERN,
            "maxLength": MAX_LENGTH,
        }

    @classmethod
    def _validate(cls, value: Any) -> Self:
        if isinstance(value, cls):
            return value
        if isinstance(value, str | int) and not isinstance(value, bool):
            try:
                return cls(value)
            except ValueError as exc:
                raise PydanticCustomError("quantity", "{reason}", {"reason": str(exc)}) from exc
        raise PydanticCustomError("quantity", "use {example}", {"example": cls.EXAMPLE})


class ByteSize(Quantity):
    """A quantity that counts bytes."""

    __slots__ = ()
    EXAMPLE: ClassVar[str] = 'a size such as "512Mi" or "2Gi"'


def _whole_bytes(size: ByteSize) -> ByteSize:
    if size.value.denominator != 1:
        raise PydanticCustomError("quantity", "use {example}", {"example": ByteSize.EXAMPLE})
    return size


Bytes = Annotated[ByteSize, AfterValidator(_whole_bytes)]
Quantities = Annotated[dict[str, Quantity], Field(max_length=16)]


_quantity = lru_cache(maxsize=256)(Quantity)
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "quantity": str,
    "isLessThan": lambda one, other: _quantity(one) < _quantity(other),
    "isGreaterThan": lambda one, other: _quantity(one) > _quantity(other),
    "isInteger": lambda one: _quantity(one).value.denominator == 1,
    "asInteger": lambda one: int(_quantity(one).value),
}
"""The Kubernetes extensions to CEL that rules use. Quantities are passed to them as text."""
_program = cache(cel.compile)
_NAMED = re.compile(r"self((?:\.\w+\b(?!\())+)")
"""Matches a field named in CEL, including the path to it."""
Tree = dict[str, Any]
"""Fields by name, each with the fields below it. An empty tree stands for all fields. Only the fields of a tree are
converted for CEL, because converting a whole job is expensive."""


def _breaches(model: Model, *, one_machine: bool) -> Iterator[Breach]:
    seen = stored(model, _seen(type(model)))
    context = cel.Context({"self": seen}, _FUNCTIONS)
    for rule in model.RULES:
        if (one_machine and rule.only_on_a_cluster) or _program(rule.whole).execute(context) is True:
            continue
        for path, item in _places(rule.field, seen):
            context.add_variable("item", item)
            if _program(rule.cel).execute(context) is not True:
                yield Breach(path=path, found=_program(rule.found).execute(context), use=rule.use)


@cache
def _seen(model: type[Model]) -> Tree:
    """Returns the fields that the model's rules name."""
    tree: Tree = {}
    for rule in model.RULES:
        for path in _NAMED.findall(f"self.{rule.field} {rule.cel} {rule.found}"):
            node = tree
            for name in path[1:].split("."):
                node = node.setdefault(name, {})
    return tree


def stored(value: Any, seen: Tree) -> Any:
    """Converts a value to the form that the API server stores and rules see. It has the manifest's names, includes
    defaults, and omits absent fields. A mapping keeps all keys, but only those values that are quantities."""
    if isinstance(value, Model):
        made, names = {}, type(value).model_fields
        for alias, name in zip(fields_by_alias(type(value)), names, strict=True):
            part = getattr(value, name)
            given = part is not None and (name in value.model_fields_set or part not in ((), {}))
            if given and (alias in seen or not seen):
                made[alias] = stored(part, seen.get(alias, {}))
        return made
    if isinstance(value, tuple):
        return [stored(entry, seen) for entry in value]
    if isinstance(value, dict):
        return {key: str(part) if isinstance(part, Quantity) else None for key, part in value.items()}
    return str(value) if isinstance(value, Quantity) else value


def _places(field: str, value: Any, path: Path = (), item: Any = None) -> Iterator[tuple[Path, Any]]:
    """Yields every path that a rule's field stands for, each with the entry or key of its last `[]`."""
    before, each, after = field.partition("[]")
    names = [int(name) if name.isdigit() else name for name in re.findall(r"[^.\[\]]+", before)]
    path += tuple(names)
    if not each:
        yield path, item
        return
    for name in names:
        value = value.get(name, {})
    for key, entry in value.items() if isinstance(value, dict) else enumerate(value):
        yield from _places(after, entry, (*path, key), key if isinstance(value, dict) else entry)


def in_quotes(text: str) -> str:
    """Returns a CEL expression that puts the value of another CEL expression, `text`, in double quotes."""
    return f"'\"' + {text} + '\"'"


_MEMORY = 'bytes with a unit, such as "512Mi" (m is a thousandth of a byte)'


def _memory_rule(kind: str) -> Rule:
    held = f"has(self.{kind}) && 'memory' in self.{kind}"
    memory = f"string(self.{kind}['memory'])"
    return Rule(
        field=f"{kind}.memory",
        use=_MEMORY,
        cel=f"!({held}) || !quantity({memory}).isLessThan(quantity('1Mi'))",
        found=f"{memory} + ', less than 1Mi'",
    )


class Resources(Model):
    """Resources that a container requests from its node. Ignored on one machine unless stated otherwise."""

    requests: Quantities = Field(default_factory=dict)
    """Reserved amounts, by resource name (`cpu`, `memory`, ...)."""
    limits: Quantities = Field(default_factory=dict)
    """Maximum amounts, by resource name."""

    RULES: ClassVar[tuple[Rule, ...]] = (
        Rule(
            field="requests[]",
            use="at most the limit, or a higher limit",
            cel="!has(self.limits) || !(item in self.limits) ||"
            " !quantity(string(self.requests[item])).isGreaterThan(quantity(string(self.limits[item])))",
            found="string(self.requests[item]) + ', above the limit ' + string(self.limits[item])",
        ),
        _memory_rule("requests"),
        _memory_rule("limits"),
    )


class ContainerResources(OpenModel, Resources):
    """Resources of a container in a pod template, including `claims`, which Kubernetes added later."""

    claims: Annotated[tuple[Free, ...], Field(max_length=16)] = ()
    """Names of claims in the pod's `resourceClaims`."""


def resources(**kinds: dict[str, str]) -> Any:
    """Makes a resources field. The schema shows its default exactly as written in the call."""
    return Field(
        default_factory=cache(lambda: Resources.model_validate(kinds)),
        json_schema_extra=lambda schema: schema.update(default=cast("Any", kinds)),
    )
