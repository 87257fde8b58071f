"""What is made from the models: the CustomResourceDefinition and the reference of its fields. Pure but for main.

`python -m dataloaderjob.api.crd > crds/dataloaderjobs.yaml` prints the CRD. Its schema is the models', with their rules
as CEL. Kubernetes knows neither $ref nor unions nor `additionalProperties: false`: references are inlined, an optional
field is one that may be left out, and unknown fields are refused by strict field validation, as kubectl asks for.

The reference of spec and status is docs/reference/manifest.md; a test fails when it differs.
"""

from __future__ import annotations

import ast
import copy
import inspect
import json
import re
import sys
import textwrap
from collections.abc import Iterator
from enum import StrEnum
from itertools import pairwise
from typing import Any, get_args, get_origin

import yaml
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue
from pydantic_core import core_schema

from dataloaderjob.api.base import Immutable, Model, OpenModel, Quantity, Rule, fields_by_alias
from dataloaderjob.api.job import GROUP, KIND, PLURAL, SHORT_NAME, VERSION, DataLoaderJob, Metadata
from dataloaderjob.api.problems import Shape, expectation, field_shape, fields_within, shape_of
from dataloaderjob.api.status import Condition, ConditionType, DataLoaderJobStatus, Phase

Schema = dict[str, Any]
PRESERVE = "x-kubernetes-preserve-unknown-fields"
VALIDATIONS = "x-kubernetes-validations"
_NUMBER_AS_TEXT = re.compile(r"string\((?!self(\.\w+)*\.(memoryPerProcess|poolSize)\))")
"""The API server knows no bound of a number's text, and refuses the message as too dear."""
_LITERAL = re.compile(r"'[^'\\]*'")
"""What was found, where that is always the same words: they need no expression."""
COLUMNS = (
    ("Phase", "string", ".status.phase", 0),
    ("Feeders", "string", ".status.feeders.summary", 0),
    ("Trainers", "string", ".status.trainers.summary", 0),
    ("GB/s", "string", ".status.loader.gbPerSecond", 0),
    ("Stall%", "string", ".status.loader.stallPercent", 0),
    ("Age", "date", ".metadata.creationTimestamp", 0),
    ("Batches/s", "string", ".status.loader.batchesPerSecond", 1),
    ("Restarts", "integer", ".status.trainers.restarts", 1),
)
"""Name, type, path and priority of each column of `kubectl get`: 1 is shown with `-o wide` only."""
EXAMPLE = """\
apiVersion: dataloading.dev/v1alpha1
kind: DataLoaderJob
metadata:
  name: fashion-mnist
spec:
  feeders:
    replicas: 2
  loader:
    memoryPerProcess: 1Gi
  trainers:
    job:
      replicas: 2
      template:
        spec:
          containers:
            - name: trainer
              image: registry.example/fashion-mnist:1
              command: [python, train.py]
"""
_HEAD = f"""\
# The manifest: DataLoaderJob v1alpha1

<!-- Made by `make generate`. Change the models, not this file. -->

One manifest for one machine (`dataloaderjob run job.yaml`) and for a cluster (`kubectl apply -f job.yaml`):

```yaml
{EXAMPLE}```

- Fields are camelCase. A field that is not listed here is an error, except where a table ends with
  "and all others of Kubernetes". A field set to null counts as left out.
- Quantities are Kubernetes': `500m`, `"1.5"`, `2`, `512Mi`, `2Gi`. Numbers with a decimal point need quotes.
- A file holds one DataLoaderJob. An error names the file, the line, the field, what was found and what
  would do, for all problems at once.
- Rules that cross fields ("Checked besides") are CEL expressions of the schema: the API server and this package
  evaluate the same. `[]` in the name of a field stands for each entry of a list, or each key of a mapping.
- What the operator reports is below [status](#status).
"""
STATUS = "status"


def structural_schema(model: type[Model] = DataLoaderJob) -> Schema:
    """The schema for `spec.versions[].schema.openAPIV3Schema`; `status` is a free object here."""
    raw = model.model_json_schema(by_alias=True, schema_generator=_WithoutNull)
    schema = _inline(raw, raw.get("$defs", {}))
    _spell_out_defaults(schema)
    _add_rules(schema, model)
    if model is DataLoaderJob:
        schema["properties"] |= {
            "apiVersion": {"type": "string"},
            "kind": {"type": "string"},
            "metadata": {"type": "object"},
        }
        schema["required"] = ["spec"]
        schema[VALIDATIONS] = [_validation(rule, "metadata") for rule in Metadata.RULES]
    return schema


class _WithoutNull(GenerateJsonSchema):
    """Optional is "may be left out": the API server drops nulls."""

    def nullable_schema(self, schema: core_schema.NullableSchema) -> JsonSchemaValue:
        return self.generate_inner(schema["schema"])


def _inline(schema: Schema, definitions: Schema) -> Schema:
    schema = dict(schema)
    if "$ref" in schema:
        target = definitions[schema.pop("$ref").rsplit("/", 1)[1]]
        schema = {**target, **schema}
    out: Schema = {}
    for key, value in schema.items():
        if key in ("title", "$defs"):
            continue
        if key == "properties":
            stated = {name: part for name, part in value.items() if not part.get("x-left-out")}
            out[key] = {name: _inline(part, definitions) for name, part in stated.items()}
        elif key == "items":
            out[key] = _inline(value, definitions)
        elif key == "additionalProperties":
            if isinstance(value, dict):
                out[key] = _inline(value, definitions)
            elif value:
                out[PRESERVE] = True
        elif key == "const":
            out["enum"] = [value]
        elif key == "default" and value in (None, [], ()):
            continue
        else:
            out[key] = value
    if out.get(PRESERVE):
        out.pop("maxProperties", None)  # a bound for CEL's sake, of no use where CEL cannot look
    return out


def _spell_out_defaults(schema: Schema) -> None:
    """Fills nested defaults in: the API server checks rules against a default as it is written."""
    for part in schema.get("properties", {}).values():
        _spell_out_defaults(part)
        if part.get("default") == {}:
            part["default"] = copy.deepcopy(defaults_within(part))
    if "items" in schema:
        _spell_out_defaults(schema["items"])


def defaults_within(schema: Schema) -> dict[str, Any]:
    """Defaults of the fields of an object, by name."""
    return {n: part["default"] for n, part in schema.get("properties", {}).items() if "default" in part}


def _add_rules(schema: Schema, model: type[BaseModel]) -> None:
    if issubclass(model, Model):
        rules = [_validation(rule) for rule in model.RULES] + [_frozen(rule) for rule in model.IMMUTABLE]
        if rules:
            schema[VALIDATIONS] = rules
    for alias, listed, inner in fields_within(model):
        if inner is not None and not (model is DataLoaderJob and alias == "metadata"):
            part = schema["properties"].get(alias, {})
            part = part["items"] if listed and part else part
            if "properties" in part:  # else the models' rules apply alone, or Kubernetes'
                _add_rules(part, inner)


def _validation(rule: Rule, below: str = "") -> Schema:
    """One rule; `below`: the field that holds the rule's model, where the rule must stand above it."""

    def lift(cel: str) -> str:
        return cel.replace("self.", f"self.{below}.") if below else cel

    field = f"{below}.{rule.field}" if below else rule.field
    made = {
        "rule": lift(rule.whole),
        "message": f"{field}: use {rule.use}",
        "reason": "FieldValueInvalid",
    }
    if _LITERAL.fullmatch(rule.found):
        made["message"] = f"{field}: found {rule.found[1:-1]}; use {rule.use}"
    elif "[]" not in rule.field and not _NUMBER_AS_TEXT.search(rule.found):
        before, after = _quoted(f"{field}: found "), _quoted(f"; use {rule.use}")
        made["messageExpression"] = f"{before} + {lift(rule.found)} + {after}"
    return made


def _frozen(rule: Immutable) -> Schema:
    return {
        "rule": rule.cel,
        "message": f"{rule.field}: found a change; use {rule.use}",
        "reason": "FieldValueForbidden",
    }


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"


def custom_resource_definition() -> Schema:
    """The whole object, for `kubectl apply` and the chart."""
    schema = structural_schema()
    schema["properties"]["status"] = structural_schema(DataLoaderJobStatus)
    version: dict[str, Any] = {
        "name": VERSION,
        "served": True,
        "storage": True,
        "schema": {"openAPIV3Schema": schema},
        "subresources": {
            "status": {},
            "scale": {
                "specReplicasPath": ".spec.feeders.replicas",
                "statusReplicasPath": ".status.feeders.replicas",
                "labelSelectorPath": ".status.selector",
            },
        },
        "additionalPrinterColumns": [
            {"name": name, "type": kind, "jsonPath": path, **({"priority": priority} if priority else {})}
            for name, kind, path, priority in COLUMNS
        ],
    }
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{PLURAL}.{GROUP}"},
        "spec": {
            "group": GROUP,
            "scope": "Namespaced",
            "names": {
                "kind": KIND,
                "listKind": f"{KIND}List",
                "plural": PLURAL,
                "singular": KIND.lower(),
                "shortNames": [SHORT_NAME],
                "categories": ["dataload"],
            },
            "versions": [version],
        },
    }


def crd_text() -> str:
    """The CRD as YAML, always the same for the same models."""
    head = "# Made by `python -m dataloaderjob.api.crd`; do not edit.\n"
    # No object is there twice then, so YAML has no aliases, which not all tools know.
    plain = json.loads(json.dumps(custom_resource_definition()))
    return head + yaml.safe_dump(plain, sort_keys=False, width=110)


def reference() -> str:
    """The whole reference as Markdown. A model that several fields share is told where it first occurs."""
    first: dict[type[BaseModel], str] = {}
    for path, model in (*_sections(DataLoaderJob, ""), *_sections(DataLoaderJobStatus, STATUS)):
        first.setdefault(model, path)
    return "\n".join([_HEAD, *(_section(path, model, first) for model, path in first.items())])


def _sections(model: type[BaseModel], path: str) -> Iterator[tuple[str, type[BaseModel]]]:
    yield path or "DataLoaderJob", model
    for alias, listed, inner in fields_within(model):
        if inner is not None:
            yield from _sections(inner, (f"{path}.{alias}" if path else alias) + listed)


def _section(path: str, model: type[BaseModel], first: dict[type[BaseModel], str]) -> str:
    reported = path.split(".")[0] == STATUS
    text = [f"## {path}", "", inspect.cleandoc(model.__doc__ or ""), ""]
    if reported:
        text += ["| field | type | meaning |", "|---|---|---|"]
    else:
        text += ["| field | type | default | meaning |", "|---|---|---|---|"]
    properties = structural_schema(model)["properties"] if issubclass(model, Model) else {}
    for alias, info in fields_by_alias(model).items():
        meaning = " ".join((info.description or "").split())
        if model is Metadata and meaning.startswith("Set by the cluster"):
            continue
        if meaning:
            kind = _type(field_shape(info), first)
            if model is DataLoaderJob and alias == STATUS:
                kind = f"[{kind}](#{STATUS})"
            default = "" if reported else f" {_default(info, properties.get(alias, {}))} |"
            text.append(f"| `{alias}` | {kind} |{default} {meaning} |")
    if issubclass(model, OpenModel):
        text.append("| ... | | | and all others of Kubernetes, handed on as they are |")
    text += _refusals(model)
    if model is DataLoaderJobStatus:
        text += _values("phase", Phase) + _columns()
    if model is Condition:
        text += _values("type", ConditionType)
    return "\n".join([*text, ""])


def _refusals(model: type[BaseModel]) -> list[str]:
    if not issubclass(model, Model):
        return []
    lines = [f"- `{rule.field}`: use {rule.use}" for rule in model.RULES]
    lines += [f"- `{rule.field}` cannot change: use {rule.use}" for rule in model.IMMUTABLE]
    return ["", "Checked besides:", "", *dict.fromkeys(lines)] if lines else []


def _values(field: str, values: type[StrEnum]) -> list[str]:
    """A table of what a field may be: the members of an enum, each with the string below it."""
    (body,) = ast.parse(textwrap.dedent(inspect.getsource(values))).body
    assert isinstance(body, ast.ClassDef)  # noqa: S101  narrowed for what follows
    rows = [
        f"| `{ast.literal_eval(member.value)}` | {' '.join(ast.literal_eval(meaning.value).split())} |"
        for member, meaning in pairwise(body.body)
        if isinstance(member, ast.Assign) and isinstance(meaning, ast.Expr)
    ]
    return ["", f"| `{field}` | meaning |", "|---|---|", *rows]


def _columns() -> list[str]:
    rows = [f"| {name} | `{path}` | {'yes' if wide else 'no'} |" for name, _, path, wide in COLUMNS]
    return ["", "`kubectl get dlj` shows", "", "| column | field | `-o wide` only |", "|---|---|---|", *rows]


def _default(info: FieldInfo, schema: dict[str, Any]) -> str:
    if info.is_required():
        return "required"
    if "default" not in schema or schema["default"] == defaults_within(schema):
        return ""  # told where its fields are
    return f"`{json.dumps(schema['default'])}`".replace('"', "")


def _type(shape: Shape, first: dict[type[BaseModel], str]) -> str:
    kind = shape.type
    if shape.model is not None:
        return f"[mapping](#{_anchor(first[shape.model])})"
    if get_origin(kind) is tuple:
        inner = shape_of(shape.items)
        if inner.model is not None:
            return f"[list](#{_anchor(first[inner.model])})"
        return f"list of {({str: 'strings', int: 'whole numbers'}).get(inner.type, 'mappings')}"
    if get_origin(kind) is dict:
        values = get_args(kind)[1]
        named = {str: "strings", Quantity: "quantities"}.get(shape_of(values).type)
        return f"mapping of {named}" if named else "mapping"
    if isinstance(kind, type) and issubclass(kind, Quantity):
        return "bytes" if "bytes" in kind.EXAMPLE else "quantity"
    if isinstance(kind, type) and issubclass(kind, StrEnum):
        return "string, see below"
    return {str: "string", bool: "true or false"}.get(kind) or expectation(shape)


def _anchor(path: str) -> str:
    """The anchor that Markdown renderers give a heading."""
    return path.lower().replace(".", "").replace("[]", "")


if __name__ == "__main__":
    sys.stdout.write(crd_text())
