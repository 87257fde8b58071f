"""Quantities of Kubernetes ("500m", "2Gi"), and requests and limits made of them. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator
from fractions import Fraction
from functools import total_ordering
from typing import Annotated, Any, ClassVar, Self, cast

from pydantic import AfterValidator, Field, GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from dataloaderjob.api.base import Free, Model, OpenModel, Path, Rule

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
_PARTS = re.compile(rf"^(?P<number>{_NUMBER})(?P<suffix>.*)$")


@total_ordering
class Quantity:
    """A number with a unit, equal to and ordered with others by its value; `text` is as written."""

    __slots__ = ("text", "value")
    EXAMPLE: ClassVar[str] = 'a quantity such as "500m", "1.5", 2 or "2Gi"'

    def __init__(self, text: str | int) -> None:
        """Raises ValueError for what is no quantity, is negative, or exceeds 2**63 - 1."""
        written = str(text)
        if isinstance(text, bool) or len(written) > MAX_LENGTH or not re.fullmatch(PATTERN, written):
            raise ValueError(f"found {text!r}; use {self.EXAMPLE}")
        parts = _PARTS.match(written)
        assert parts is not None  # noqa: S101  PATTERN matched
        suffix = parts["suffix"]
        if suffix in _SUFFIXES:
            factor = _SUFFIXES[suffix]
        else:
            factor = Fraction(10) ** int(suffix[1:])
        self.text = written
        self.value = Fraction(parts["number"].rstrip(".")) * factor
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
    EXAMPLE: ClassVar[str] = 'a number of bytes such as "512Mi" or "2Gi"'


def _whole_bytes(size: ByteSize) -> ByteSize:
    if size.value.denominator != 1:
        raise PydanticCustomError("quantity", "use {example}", {"example": ByteSize.EXAMPLE})
    return size


Bytes = Annotated[ByteSize, AfterValidator(_whole_bytes)]
Quantities = Annotated[dict[str, Quantity], Field(max_length=16)]


def in_units(nbytes: int) -> str:
    """A size for a message, in the largest binary unit that divides it."""
    for unit, size in (("Gi", GIB), ("Mi", MIB), ("Ki", KIB)):
        if nbytes and nbytes % size == 0:
            return f"{nbytes // size}{unit}"
    return f"{nbytes} bytes"


def _over_limit(resources: Resources) -> Iterator[tuple[Path, str]]:
    for name, request in resources.requests.items():
        limit = resources.limits.get(name)
        if limit is not None and request > limit:
            yield ("requests", name), f"{request}, above the limit {limit}"


def _tiny_memory(kind: str) -> Any:
    def check(resources: Resources) -> Iterator[tuple[Path, str]]:
        memory: Quantity | None = getattr(resources, kind).get("memory")
        if memory is not None and memory.value < MIB:
            yield (kind, "memory"), f"{memory}, less than 1Mi"

    return check


_MEMORY = 'bytes with a unit, such as "512Mi" (a bare number counts bytes, and m is a thousandth of one)'


def _memory_rule(kind: str) -> Rule:
    held = f"has(self.{kind}) && 'memory' in self.{kind}"
    memory = f"string(self.{kind}['memory'])"
    return Rule(
        field=kind,
        use=_MEMORY,
        cel=f"!({held}) || !quantity({memory}).isLessThan(quantity('1Mi'))",
        found=f"{memory} + ', less than 1Mi'",
        check=_tiny_memory(kind),
    )


class Resources(Model):
    """What a container asks of its node. Ignored on one machine, except where it says otherwise."""

    requests: Quantities = Field(default_factory=dict)
    """What is reserved, by resource name (`cpu`, `memory`, ...)."""
    limits: Quantities = Field(default_factory=dict)
    """What may be used at most, by resource name."""

    RULES: ClassVar[tuple[Rule, ...]] = (
        Rule(
            field="requests",
            use="at most the limit, or a higher limit",
            cel="!has(self.requests) || !has(self.limits) || self.requests.all(k, !(k in self.limits) ||"
            " !quantity(string(self.requests[k])).isGreaterThan(quantity(string(self.limits[k]))))",
            found="'a request above its limit'",
            check=_over_limit,
        ),
        _memory_rule("requests"),
        _memory_rule("limits"),
    )


class ContainerResources(OpenModel, Resources):
    """Resources of a container in a pod template: also what Kubernetes adds to them (`claims`)."""

    claims: Annotated[tuple[Free, ...], Field(max_length=16)] = ()
    """Names of claims of the pod's `resourceClaims`."""


def resources(**kinds: dict[str, str]) -> Any:
    """A field of resources with a default, told in the schema as written here."""
    return Field(
        default_factory=lambda: Resources.model_validate(kinds),
        json_schema_extra=lambda schema: schema.update(default=cast("Any", kinds)),
    )
