"""The CustomResourceDefinition, generated from the models. Pure except for main.

`python -m dataloaderjob.api.crd > crds/dataloaderjobs.yaml` prints the CRD. The models determine its schema, and their
rules become CEL validations. Kubernetes supports neither $ref nor unions nor `additionalProperties: false`. References
are therefore inlined, and an optional field is one that may be omitted. Strict field validation, which kubectl
requests, rejects unknown fields.
"""

from __future__ import annotations

import copy
import json
import re
import sys
from typing import Any

import yaml
from pydantic import BaseModel
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue
from pydantic_core import core_schema

from dataloaderjob.api.base import Immutable, Model, Rule, remedy
from dataloaderjob.api.job import GROUP, KIND, PLURAL, SHORT_NAME, VERSION, DataLoaderJob, Metadata
from dataloaderjob.api.problems import fields_within
from dataloaderjob.api.status import DataLoaderJobStatus

Schema = dict[str, Any]
PRESERVE = "x-kubernetes-preserve-unknown-fields"
VALIDATIONS = "x-kubernetes-validations"
_NUMBER_AS_TEXT = re.compile(r"string\((?!self(\.\w+)*\.(memoryPerProcess|poolSize)\))")
"""Matches a number that a message converts to text. The API server knows no limit on the length of this text, and
rejects the message expression as too expensive."""
_LITERAL = re.compile(r"'[^'\\]*'")
"""Matches a `found` that always yields the same text and therefore needs no expression."""
COLUMNS = (
    ("Phase", "string", ".status.phase", 0),
    ("Feeders", "string", ".status.feeders.summary", 0),
    ("Trainers", "string", ".status.trainers.summary", 0),
    ("GB/s", "string", ".status.loader.gbPerSecond", 0),
    ("Stall%", "string", ".status.loader.stallPercent", 0),
    ("Input", "string", ".status.loader.verdict", 0),
    ("Age", "date", ".metadata.creationTimestamp", 0),
    ("Reason", "string", ".status.reason", 0),
    ("Batches/s", "string", ".status.loader.batchesPerSecond", 1),
    ("Restarts", "integer", ".status.trainers.restarts", 1),
)
"""Name, type, path and priority of each column of `kubectl get`; columns of priority 1 need `-o wide`."""


def structural_schema(model: type[Model] = DataLoaderJob) -> Schema:
    """Returns the schema for `spec.versions[].schema.openAPIV3Schema`, in which `status` is a free-form object."""
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
    """A schema generator in which "optional" means "may be omitted", because the API server drops nulls."""

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
        out.pop("maxProperties", None)  # a bound for CEL, useless if CEL cannot look inside
    return out


def _spell_out_defaults(schema: Schema) -> None:
    """Fills in nested defaults, because the API server checks rules against a default exactly as written."""
    for part in schema.get("properties", {}).values():
        _spell_out_defaults(part)
        if part.get("default") == {}:
            part["default"] = copy.deepcopy(defaults_within(part))
    if "items" in schema:
        _spell_out_defaults(schema["items"])


def defaults_within(schema: Schema) -> dict[str, Any]:
    """Returns the defaults of an object's fields, by name."""
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
            if "properties" in part:  # otherwise only the models' or Kubernetes' own rules apply
                _add_rules(part, inner)


def _validation(rule: Rule, below: str = "") -> Schema:
    """Builds the schema of one rule. If the rule must be placed above its model, `below` is the field that holds the
    model."""

    def lift(cel: str) -> str:
        return cel.replace("self.", f"self.{below}.") if below else cel

    field = f"{below}.{rule.field}" if below else rule.field
    made = {
        "rule": lift(rule.whole),
        "message": f"{field}: {remedy(rule.use)}",
        "reason": "FieldValueInvalid",
    }
    if _LITERAL.fullmatch(rule.found):
        made["message"] = f"{field}: found {rule.found[1:-1]}; {remedy(rule.use)}"
    elif "[]" not in rule.field and not _NUMBER_AS_TEXT.search(rule.found):
        before, after = _quoted(f"{field}: found "), _quoted(f"; {remedy(rule.use)}")
        made["messageExpression"] = f"{before} + {lift(rule.found)} + {after}"
    return made


def _frozen(rule: Immutable) -> Schema:
    return {
        "rule": rule.cel,
        "message": f"{rule.field}: found a change; {remedy(rule.use)}",
        "reason": "FieldValueForbidden",
    }


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"


def custom_resource_definition() -> Schema:
    """Returns the complete CustomResourceDefinition, for `kubectl apply` and the chart."""
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
    """Returns the CRD as YAML; the same models always produce the same text."""
    head = "# Generated by `python -m dataloaderjob.api.crd`; do not edit.\n"
    # In this copy, no object occurs twice, so the YAML contains no aliases, which some tools do not support.
    plain = json.loads(json.dumps(custom_resource_definition()))
    return head + yaml.safe_dump(plain, sort_keys=False, width=110)


if __name__ == "__main__":
    sys.stdout.write(crd_text())
