"""`python -m dataloaderjob.api.crd > crds/dataloaderjobs.yaml`: the CustomResourceDefinition. Pure but for main."""

from __future__ import annotations

import sys
from typing import Any

import yaml

from dataloaderjob.api.job import GROUP, KIND, PLURAL, SHORT_NAME, VERSION
from dataloaderjob.api.schema import Schema, structural_schema
from dataloaderjob.api.status import DataLoaderJobStatus

CATEGORY = "dataload"
_COLUMNS = (
    ("Phase", "string", ".status.phase", 0),
    ("Feeders", "string", ".status.feeders.summary", 0),
    ("Trainers", "integer", ".status.trainers.active", 0),
    ("GB/s", "string", ".status.loader.gbPerSecond", 0),
    ("Stall %", "string", ".status.loader.stallPercent", 0),
    ("Age", "date", ".metadata.creationTimestamp", 0),
    ("Batches/s", "string", ".status.loader.batchesPerSecond", 1),
    ("Restarts", "integer", ".status.trainers.restarts", 1),
)


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
            for name, kind, path, priority in _COLUMNS
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
                "categories": [CATEGORY],
            },
            "versions": [version],
        },
    }


def text() -> str:
    """The CRD as YAML, always the same for the same models."""
    head = "# Made by `python -m dataloaderjob.api.crd`; do not edit.\n"
    return head + yaml.safe_dump(custom_resource_definition(), sort_keys=False, width=110)


if __name__ == "__main__":
    sys.stdout.write(text())
