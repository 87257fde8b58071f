"""Manifests that the documents show, and fields of them that they name, are those of the models."""

from __future__ import annotations

import copy
import re
import textwrap
from collections.abc import Iterator
from typing import Any, get_origin

import pytest
import yaml
from documents import ROOT, documents
from manifests import GOOD

from dataloaderjob.api import KIND, ManifestError, parse_object
from dataloaderjob.api.base import OpenModel, fields_by_alias
from dataloaderjob.api.job import DataLoaderJob
from dataloaderjob.api.load import parse_manifest
from dataloaderjob.api.problems import Shape, field_shape, shape_of

DOCUMENTS = {
    str(path.relative_to(ROOT)): path.read_text() for path in documents() if path.name != "CHANGELOG.md"
}
"""All but the one that names what was renamed."""
_BLOCK = re.compile(r"^ *```ya?ml\n(.*?)^ *```", re.MULTILINE | re.DOTALL)
_FIELD = re.compile(r"`((?:spec|status)(?:\.\w+(?:\[\d*\])?)+)`")


def shown() -> Iterator[Any]:
    """What is a DataLoaderJob or a part of one: YAML of no other kind."""
    for name, text in DOCUMENTS.items():
        for block in _BLOCK.finditer(text):
            for data in yaml.safe_load_all(textwrap.dedent(block[1])):
                if data.get("kind", KIND) == KIND:
                    yield pytest.param(data, id=f"{name}:{text.count(chr(10), 0, block.start()) + 1}")


def completed(part: dict[str, Any]) -> dict[str, Any]:
    """A manifest with this part, which begins at the manifest's own fields or at those of its spec."""
    if not part.keys() <= fields_by_alias(DataLoaderJob).keys():
        part = {"spec": part}
    base = copy.deepcopy(GOOD)
    if "attach" in (part.get("spec", {}).get("trainers") or {}):  # instead of the trainers of GOOD
        base["spec"] = {}
    return merged(base, part)


def merged(into: dict[str, Any], part: dict[str, Any]) -> dict[str, Any]:
    for key, value in part.items():
        both = isinstance(into.get(key), dict) and isinstance(value, dict)
        into[key] = merged(into[key], value) if both else value
    return into


def exists(path: str) -> bool:
    """Whether the models have a field at this path, or leave that to Kubernetes."""
    shape = Shape(DataLoaderJob)
    for part in path.split("."):
        if shape.model is None:
            return get_origin(shape.type) is dict
        name, entry, _ = part.partition("[")
        if name not in (known := fields_by_alias(shape.model)):
            return issubclass(shape.model, OpenModel)
        shape = field_shape(known[name])
        shape = shape_of(shape.items) if entry else shape
    return True


@pytest.mark.parametrize("part", list(shown()))
def test_documented_manifests_have_only_known_fields(part: dict[str, Any]):
    found = completed(part)
    trainers, feeders = found["spec"]["trainers"], found["spec"].get("feeders", {})
    attached = "attach" in trainers
    if attached and "image" not in feeders:  # for one machine
        parse_manifest(yaml.safe_dump(found), one_machine=True)
    else:
        parse_object(found)


def test_documented_field_exists():
    named = {(name, path) for name, text in DOCUMENTS.items() for path in _FIELD.findall(text)}
    assert len(named) > 30
    assert sorted(f"{name}: {path}" for name, path in named if not exists(path)) == []


def test_removed_field_is_detected():
    with pytest.raises(ManifestError, match=r"spec\.trainer: found an unknown field; use trainers\.job"):
        parse_object(completed({"trainer": {"failurePolicy": {"maxRestarts": 3}}}))
    assert not exists("spec.deadlines")
    assert not exists("spec.suspend.until")
    assert exists("spec.trainers.job.template.spec.containers[0].livenessProbe.exec")
    assert exists("status.loader.observedTime")
