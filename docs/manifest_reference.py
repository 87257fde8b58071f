"""The reference of the manifest's spec and status, as Markdown, made of the models of `dataloaderjob.api`."""

from __future__ import annotations

import ast
import inspect
import json
import textwrap
from collections.abc import Iterator
from enum import StrEnum
from itertools import pairwise
from typing import Any, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from dataloaderjob.api.base import Model, OpenModel, Quantity, fields_by_alias
from dataloaderjob.api.crd import COLUMNS, defaults_within, structural_schema
from dataloaderjob.api.job import DataLoaderJob, Metadata
from dataloaderjob.api.problems import Shape, expectation, field_shape, fields_within, shape_of
from dataloaderjob.api.status import Condition, ConditionType, DataLoaderJobStatus, Phase

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
