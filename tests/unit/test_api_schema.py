"""The schema is one that Kubernetes takes; it has the models' rules, which see what the API server stores."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
from manifests import ACCEPTED, REFUSED_BY_RULES, manifest

from dataloaderjob.api import ManifestError, parse_object
from dataloaderjob.api.base import remedy, stored
from dataloaderjob.api.crd import PRESERVE, VALIDATIONS, structural_schema

SCHEMA = structural_schema()
Schema = dict[str, Any]


def parts(schema: Schema, path: str = "") -> Iterator[tuple[str, Schema]]:
    yield path, schema
    for name, part in schema.get("properties", {}).items():
        yield from parts(part, f"{path}.{name}")
    for key in ("items", "additionalProperties"):
        if key in schema:
            yield from parts(schema[key], f"{path}.{key}")


def with_defaults(schema: Schema, value: Any) -> Any:
    """What the API server stores: nulls dropped, defaults filled in."""
    if isinstance(value, dict):
        value = {key: item for key, item in value.items() if item is not None}
        for name, part in schema.get("properties", {}).items():
            if name not in value and "default" in part:
                value[name] = copy.deepcopy(part["default"])
            if name in value:
                value[name] = with_defaults(part, value[name])
    elif isinstance(value, list) and "items" in schema:
        value = [with_defaults(schema["items"], item) for item in value]
    return value


@pytest.mark.parametrize("word", ["$ref", "$defs", "oneOf", "allOf", "const", "prefixItems", "title"])
def test_schema_uses_no_keyword_unknown_to_kubernetes(word: str) -> None:
    assert not [path for path, part in parts(SCHEMA) if word in part]


def test_a_union_is_only_that_of_int_and_string() -> None:
    unions = [part for _, part in parts(SCHEMA) if "anyOf" in part]
    assert unions
    assert all(part["x-kubernetes-int-or-string"] and len(part["anyOf"]) == 2 for part in unions)


def test_every_part_has_a_type() -> None:
    untyped = [
        path for path, part in parts(SCHEMA) if not isinstance(part.get("type"), str) and "anyOf" not in part
    ]
    assert not untyped


def test_no_part_forbids_additional_properties_in_a_way_kubernetes_refuses() -> None:
    for path, part in parts(SCHEMA):
        assert not isinstance(part.get("additionalProperties"), bool), path
        assert not ("additionalProperties" in part and "properties" in part), path


def test_values_visible_to_cel_are_bounded_for_its_cost_estimate() -> None:
    for path, part in parts(SCHEMA["properties"]["spec"]):
        if part.get("type") == "array":
            assert "maxItems" in part, path
        if "additionalProperties" in part:
            assert "maxProperties" in part, path
        if part.get("type") == "string" and not path.endswith(".additionalProperties"):
            assert "maxLength" in part or "enum" in part, path
        if "anyOf" in part:
            assert "maxLength" in part, path


def test_lists_of_named_entries_are_maps_for_the_api_server() -> None:
    named = [p for p, part in parts(SCHEMA) if part.get("x-kubernetes-list-map-keys") == ["name"]]
    assert {path.rsplit(".", 1)[1] for path in named} == {"containers", "env", "volumes"}


def test_nested_default_is_complete_because_rules_are_checked_against_it() -> None:
    for path, part in parts(SCHEMA):
        if isinstance(part.get("default"), dict):
            assert with_defaults(part, part["default"]) == part["default"], path


def test_messages_include_only_numbers_of_bounded_length() -> None:
    dear = [
        rule["messageExpression"]
        for _, part in parts(SCHEMA)
        for rule in part.get(VALIDATIONS, [])
        if "string(" in rule.get("messageExpression", "")
    ]
    assert dear
    assert all("memoryPerProcess" in text or "poolSize" in text for text in dear)


def test_constant_message_is_not_an_expression() -> None:
    for path, part in parts(SCHEMA):
        for rule in part.get(VALIDATIONS, []):
            assert "self" in rule.get("messageExpression", "self"), path


def test_resources_in_a_template_add_nothing_to_the_schema() -> None:
    found = [part for path, part in parts(SCHEMA) if path.endswith("containers.items.resources")]
    assert len(found) == 3
    assert all(part[PRESERVE] and "properties" not in part for part in found)


def test_free_form_parts_preserve_unknown_fields() -> None:
    pod = SCHEMA["properties"]["spec"]["properties"]["trainers"]["properties"]["job"]["properties"][
        "template"
    ]["properties"]["spec"]
    assert pod[PRESERVE] is True
    assert PRESERVE not in SCHEMA["properties"]["spec"]


def test_the_schema_is_small() -> None:
    assert len(json.dumps(SCHEMA)) < 64_000


@pytest.mark.parametrize("changes", ACCEPTED)
def test_schema_defaults_equal_the_models_defaults(changes: dict[str, Any]) -> None:
    spec = with_defaults(SCHEMA, manifest(changes))["spec"]
    assert parse_object(manifest(changes)) == parse_object({**manifest(changes), "spec": spec})


def visible(schema: Schema, value: Any) -> Any:
    """What the schema lets rules see of a value: of mappings of anything the keys, and quantities."""
    if "properties" in schema:
        known = {name: part for name, part in schema["properties"].items() if name in value}
        return {name: visible(part, value[name]) for name, part in known.items()}
    if isinstance(value, dict):
        quantities = "anyOf" in (schema.get("additionalProperties") or {})
        return {key: str(item) if quantities else None for key, item in value.items()}
    if isinstance(value, list):
        return [visible(schema["items"], item) for item in value]
    return str(value) if "anyOf" in schema else value


@pytest.mark.parametrize("changes", ACCEPTED)
def test_rules_see_the_values_that_the_api_server_stores(changes: dict[str, Any]) -> None:
    schema = SCHEMA["properties"]["spec"]
    there = visible(schema, with_defaults(SCHEMA, manifest(changes))["spec"])
    here = stored(parse_object(manifest(changes)).spec, {})
    assert visible(schema, here) == there


def test_every_rule_has_a_row_that_breaks_it() -> None:
    rows = []
    for row in REFUSED_BY_RULES:
        with pytest.raises(ManifestError) as caught:
            parse_object(manifest(row.values[0]))
        rows += [remedy(problem.use) for problem in caught.value.problems]
    rules = [
        rule
        for _, part in parts(SCHEMA)
        for rule in part.get(VALIDATIONS, [])
        if "oldSelf" not in rule["rule"]
    ]
    assert {re.split("[:;] (?=use |leave )", rule["message"], maxsplit=1)[1] for rule in rules} == set(rows)
