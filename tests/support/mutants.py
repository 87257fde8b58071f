"""Mutations of a manifest that has every field: each changes one place of it, for the worse more often than not. They
are the same for the same seed."""

from __future__ import annotations

import copy
import itertools
import json
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from every_field import EVERY_FIELD
from odd_values import (
    CONTAINER_FIELDS,
    DEEP,
    FOLDERS,
    LABELS,
    NUMBERS,
    POD_FIELDS,
    QUANTITIES,
    RESOURCES,
    STRINGS,
    VARIABLES,
    VOLUMES,
    WRONG,
)

from dataloaderjob.api.base import Path, spell

TRAINERS: Path = ("spec", "trainers", "job", "template")
FEEDERS: Path = ("spec", "feeders", "template")
HEAD: Path = ("spec", "ray", "managed", "head", "template")
FIRST: Path = ("spec", "containers", 0)
ABSENT = object()
Made = Iterator[tuple[Path, str, Any]]
"""Places, what is done there in words, and what is there then."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    """A manifest with one mutation."""

    path: Path
    what: str
    manifest: dict[str, Any]

    def __str__(self) -> str:
        return f"{spell(self.path)}: {self.what}"


def mutants(count: int, seed: int = 0) -> list[Mutant]:
    """So many different ones, as evenly of each class as there are."""
    rng = random.Random(seed)
    classes = [list(made()) for made in CLASSES]
    for found in classes:
        rng.shuffle(found)
    found, seen = [], {_text(EVERY_FIELD)}
    for path, what, value in itertools.chain.from_iterable(zip(*map(_padded(classes), classes), strict=True)):
        if len(found) == count:
            break
        if what and (text := _text(data := changed(path, value))) not in seen:
            seen.add(text)
            found.append(Mutant(path=path, what=what, manifest=data))
    if len(found) < count:
        raise ValueError(f"there are {len(found)} mutations, and {count} are needed")
    return found


def _padded(classes: list[list[Any]]) -> Callable[[list[Any]], list[Any]]:
    most = max(map(len, classes))
    return lambda made: made + [((), "", None)] * (most - len(made))


def _text(manifest: Any) -> str:
    return json.dumps(manifest, sort_keys=True)


def changed(path: Path, value: Any) -> dict[str, Any]:
    """The manifest that has every field, with this value there."""
    data = copy.deepcopy(EVERY_FIELD)
    node: Any = data
    for part in path[:-1]:
        node = node[part] if isinstance(part, int) else node.setdefault(part, {})
    last = path[-1]
    if value is ABSENT:
        del node[last]
    elif isinstance(last, int) and last == len(node):
        node.append(copy.deepcopy(value))
    else:
        node[last] = copy.deepcopy(value)
    return data


def _places(value: Any = EVERY_FIELD, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Every place of the manifest below `path`, with what is there."""
    entries = (
        value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list) else ()
    )
    for key, inner in entries:
        if (*path, key) in (("apiVersion",), ("kind",)):
            continue  # of another kind of object
        yield (*path, key), inner
        yield from _places(inner, (*path, key))


def _at(path: Path) -> Any:
    node: Any = EVERY_FIELD
    for part in path:
        node = node[part]
    return node


def _shown(value: Any) -> str:
    text = ascii(value)
    return text if len(text) < 50 else f"{text[:40]}... ({len(text)})"


def _values(kinds: type | tuple[type, ...], values: tuple[Any, ...], word: str) -> Callable[[], Made]:
    """Each of `values` at each place that has one of a kind."""

    def made() -> Made:
        for path, there in _places():
            if isinstance(there, kinds) and not (kinds is int and isinstance(there, bool)):
                for value in values:
                    yield path, f"{word} {_shown(value)}", value

    return made


def wrong_types() -> Made:
    for path, there in _places():
        for value in WRONG:
            if type(value) is not type(there) or isinstance(there, dict | list):
                yield path, f"of another type: {_shown(value)}", value


def nulls() -> Made:
    for path, _ in _places():
        yield path, "null", None


def removals() -> Made:
    for path, _ in _places():
        yield path, "left out", ABSENT


def quantities() -> Made:
    for path, _ in _places():
        if path[-2:-1] in (("requests",), ("limits",)) or path[-1] in (
            "size",
            "memoryPerProcess",
            "poolSize",
        ):
            for value in QUANTITIES:
                yield path, f"the quantity {_shown(value)}", value
        if path[-1] in ("requests", "limits"):
            for name in RESOURCES:
                yield (*path, name), "a further resource", "1"


def labels() -> Made:
    for path, _ in _places():
        if path[-1] in ("labels", "annotations", "nodeSelector", "matchLabels"):
            for value in LABELS:
                yield path, f"{_shown(value)}", value
        if path[-1] == "annotations":
            yield path, "300 kB", {"a": "x" * 300_000}


def misspelt() -> Made:
    """Keys in another case or form, instead of the right one."""
    for path, there in _places():
        *above, key = path
        if isinstance(key, int):
            continue
        snake = "".join(f"_{c.lower()}" if c.isupper() else c for c in key)
        for other in (key.lower(), key[:1].upper() + key[1:], snake, f"{key}s", key[:-1], f" {key}"):
            if other not in _at(tuple(above)) and other:
                data = {other if name == key else name: value for name, value in _at(tuple(above)).items()}
                yield tuple(above) or (key,), f"{key} spelt {other}", data if above else there


def unknown() -> Made:
    for path, there in _places():
        if isinstance(there, dict):
            yield (*path, "xyzzy"), "an unknown field", 1
            yield (*path, "image"), "an image where there may be none", "i"
            yield (*path, "x.y/é z"), "an odd name", {"a": [1]}


def lists() -> Made:
    for path, there in _places():
        if isinstance(there, list) and there:
            yield (*path, len(there)), "an entry twice", there[0]
            yield path, "1,100 entries", there * 1_100
            yield (*path, len(there)), "an entry that is null", None
            yield (*path, len(there)), "an entry that is empty", {}
            if isinstance(there[0], dict) and "name" in there[0]:
                yield (
                    (*path, len(there)),
                    "an entry with this name and nothing else",
                    {"name": there[0]["name"]},
                )
                yield path, "1,100 entries with names", [{**there[0], "name": f"n{i}"} for i in range(1_100)]


def names() -> Made:
    for name in (
        "x" * 40,
        "x" * 41,
        "x" * 253,
        "x" * 254,
        "X",
        "1x",
        "x.y",
        "x-",
        "-x",
        "é",
        "",
        "x_y",
        "x y",
    ):
        yield ("metadata", "name"), f"{_shown(name)}", name
    yield ("metadata", "finalizers"), "no word", ["x"]
    yield ("metadata", "ownerReferences"), "empty", [{}]
    yield ("metadata", "generateName"), "besides", "x-"
    for value in ("dataloading.dev/x", "x/y", "a/b/c", "Kueue", "é/x"):
        yield ("spec", "managedBy"), value, value
    yield ("spec", "suspend"), "true", True
    yield ("status",), "of somebody", {"phase": "Complete", "completionTime": "2026-01-01T00:00:00Z"}


def reserved() -> Made:
    """What is the operator's own, and what two things of a pod must not share."""
    for template in (TRAINERS, FEEDERS, HEAD):
        first, pod = (*template, *FIRST), (*template, "spec")
        volume = _at((*pod, "volumes"))[0]["name"]
        for name in VARIABLES:
            yield (*first, "env"), f"the variable {_shown(name)}", [{"name": name, "value": "1"}]
        for path in FOLDERS:
            yield (*first, "volumeMounts"), f"at {_shown(path)}", [{"name": volume, "mountPath": path}]
        twice = [{"name": volume, "mountPath": "/x", "subPath": each} for each in "ab"]
        yield (*first, "volumeMounts"), "two at one path", twice
        for volume in ("nosuch", "dataloaderjob-key", "dataloaderjob-tmp", "images", ""):
            yield (*first, "volumeMounts"), f"of the volume {volume}", [{"name": volume, "mountPath": "/x"}]
            yield (*pod, "volumes", 0, "name"), f"called {volume}", volume
        for name in ("dataloaderjob-sidecar", "head", "feeder", "trainer", "other", "X", "x" * 64):
            yield (*first, "name"), f"called {name}", name
            yield (*pod, "initContainers"), f"one called {name}", [{"name": name, "image": "i"}]
        for port in (6379, 9400, 9500, 0, 70_000, "http"):
            yield (*first, "ports"), f"{port}", [{"containerPort": port}]
            yield (*first, "ports"), f"metrics at {port}", [{"name": "metrics", "containerPort": port}]
        ports = [{"name": "a", "containerPort": 1}, {"name": "a", "containerPort": 2}]
        yield (*first, "ports"), "of one name", ports


def contradictions() -> Made:
    """What Kubernetes' own types allow and its rules do not."""
    for template in (TRAINERS, FEEDERS, HEAD):
        first, pod = (*template, *FIRST), (*template, "spec")
        for field, value in POD_FIELDS:
            yield (*pod, field), _shown(value), value
        for field, value in CONTAINER_FIELDS:
            yield (*first, field), _shown(value), value
        for volume in VOLUMES:
            yield (*pod, "volumes", 0), _shown(volume), {"name": _at((*pod, "volumes"))[0]["name"], **volume}
        yield (*template, "metadata", "deep"), "90 levels", DEEP
    for volume in VOLUMES:
        yield ("spec", "sidecar", "scratch"), f"the volume {_shown(volume)}", {"volume": volume}
        yield ("spec", "feeders", "scratch"), f"the volume {_shown(volume)}", {"volume": volume}
        yield ("spec", "data", "volumes", 0), _shown(volume), {"name": "images", **volume}
    for field, value in CONTAINER_FIELDS:
        if field == "securityContext":
            yield ("spec", "sidecar", field), _shown(value), value


CLASSES: tuple[Callable[[], Made], ...] = (
    wrong_types, nulls, removals, quantities, labels, misspelt, unknown, lists, names, reserved,
    contradictions, contradictions,  # twice as many
    _values(int, NUMBERS, "the number"), _values(str, STRINGS, "the text"), _values(bool, WRONG, "of another type:"),
)  # fmt: skip
