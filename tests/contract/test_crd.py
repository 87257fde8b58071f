"""The CRD in crds/ is that of the models, and one that kubectl can apply."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from dataloaderjob.api.status import ConditionType, DataLoaderJobStatus

CRD = Path(__file__).resolve().parents[2] / "crds" / "dataloaderjobs.yaml"
MAX_NBYTES = 125_000
"""`kubectl apply` keeps a copy in an annotation, which may have 262,144 bytes."""


def at(schema: dict[str, Any], path: str) -> dict[str, Any]:
    for name in path.strip(".").split("."):
        schema = schema["properties"][name]
    return schema


def version() -> dict[str, Any]:
    (found,) = yaml.safe_load(CRD.read_text())["spec"]["versions"]
    return dict(found)


def test_crd_is_small_enough_for_kubectl_apply():
    assert len(CRD.read_bytes()) < MAX_NBYTES


def test_crd_has_no_yaml_aliases():
    assert not [event for event in yaml.parse(CRD.read_text()) if isinstance(event, yaml.AliasEvent)]


def test_columns_and_subresources_refer_to_existing_fields():
    made = version()
    schema = made["schema"]["openAPIV3Schema"]
    kinds = {"string": {"string"}, "integer": {"integer"}}
    for column in made["additionalPrinterColumns"]:
        if column["jsonPath"] != ".metadata.creationTimestamp":
            assert at(schema, column["jsonPath"])["type"] in kinds[column["type"]], column
    scale = made["subresources"]["scale"]
    assert at(schema, scale["specReplicasPath"])["type"] == "integer"
    assert at(schema, scale["statusReplicasPath"])["type"] == "integer"
    assert at(schema, scale["labelSelectorPath"])["type"] == "string"
    assert made["subresources"]["status"] == {}


def test_conditions_are_a_map_by_type_and_a_status_can_be_read_back():
    schema = version()["schema"]["openAPIV3Schema"]
    conditions = at(schema, ".status.conditions")
    assert conditions["x-kubernetes-list-map-keys"] == ["type"]
    told = {
        "conditions": [
            {"type": kind, "status": "Unknown", "reason": "New", "lastTransitionTime": "2026-01-01T00:00:00Z"}
            for kind in ConditionType
        ]
    }
    status = DataLoaderJobStatus.model_validate(told)
    assert {condition.type for condition in status.conditions} == set(ConditionType)
    assert status.feeders.summary == "0/0"
