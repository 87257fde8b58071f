"""Files as users have them, the job that they are injected with, and what a pod has after an injection."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from dataloaderjob.api.injection import Injection, injection
from dataloaderjob.api.load import parse_manifest
from dataloaderjob.api.pod_templates import pod_templates
from dataloaderjob.api.sidecar import SIDECAR

FOLDER = Path(__file__).parent / "to_inject"
JOB_FILE = FOLDER / "dataloaderjob.yaml"
FILES = tuple(sorted(path for path in FOLDER.iterdir() if path != JOB_FILE))
IMAGE = "ghcr.io/dataloaderjob/sidecar:9"
LABELED = {"metadata": {"labels": {"dataloading.dev/inject": "bert"}}}


def bert(*, image: str = IMAGE, pull_secrets: tuple[str, ...] = (), **spec: Any) -> Injection:
    """The injection of the job in the files' folder, with other parts of the spec if they are given."""
    data = yaml.safe_load(JOB_FILE.read_text())
    data["spec"].update(spec)
    return injection(parse_manifest(yaml.safe_dump(data)), image=image, pull_secrets=pull_secrets)


def pod(*containers: Mapping[str, Any], **spec: Any) -> dict[str, Any]:
    """A pod with the label."""
    found = containers or ({"name": "train", "image": "ghcr.io/acme/train:1"},)
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        **LABELED,
        "spec": {"containers": [*map(dict, found)], **spec},
    }


def container(name: str, **fields: Any) -> dict[str, Any]:
    return {"name": name, "image": "ghcr.io/acme/train:1", **fields}


def requesting(**limits: str) -> dict[str, Any]:
    """A container's resources; a name's `_` stands for `.` and `__` for `/`."""
    named = {name.replace("__", "/").replace("_", "."): value for name, value in limits.items()}
    return {"resources": {"limits": named}}


def sidecars(text: str) -> list[list[dict[str, Any]]]:
    """The sidecars of each pod template in a file."""
    found = [t for data in yaml.safe_load_all(text) for t in pod_templates(data).templates]
    inits = [(t.template.get("spec") or {}).get("initContainers") or [] for t in found]
    return [[c for c in init if c["name"] == SIDECAR] for init in inits]
