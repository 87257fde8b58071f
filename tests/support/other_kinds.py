"""Kinds of other controllers, defined on a real API server without the controllers."""

from __future__ import annotations

from typing import Any

OPEN = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}


def definition(kind: str, plural: str, group: str, version: str) -> dict[str, Any]:
    """A CustomResourceDefinition that accepts any spec and status."""
    schema = {"type": "object", "properties": {"spec": OPEN, "status": OPEN}}
    served = {
        "name": version, "served": True, "storage": True, "subresources": {"status": {}},
        "schema": {"openAPIV3Schema": schema},
    }  # fmt: skip
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{plural}.{group}"},
        "spec": {
            "group": group,
            "scope": "Namespaced",
            "names": {"kind": kind, "plural": plural, "singular": kind.lower(), "listKind": f"{kind}List"},
            "versions": [served],
        },
    }


TRAINJOBS = definition("TrainJob", "trainjobs", "trainer.kubeflow.org", "v1alpha1")
JOBSETS = definition("JobSet", "jobsets", "jobset.x-k8s.io", "v1alpha2")
