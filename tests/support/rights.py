"""What a service account may do, and what it did."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

Right = tuple[str, str, str]
"""(API group, resource or resource/subresource, verb)"""


def granted(rules: Iterable[Mapping[str, Any]]) -> set[Right]:
    """By rules of a Role."""
    return {
        (group, resource, verb)
        for rule in rules
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }


def used(audit_log: Path, account: str, namespace: str) -> set[Right]:
    """In a namespace, by `namespace:name` of a service account. A PATCH that made an object needed the right to create
    it too."""
    found = set()
    for event in _events(audit_log, account):
        if event["objectRef"].get("namespace") != namespace:
            continue
        ref = event["objectRef"]
        resource = "/".join(filter(None, (ref["resource"], ref.get("subresource"))))
        found.add((ref.get("apiGroup", ""), resource, event["verb"]))
        if event["verb"] == "patch" and event["responseStatus"]["code"] == 201:
            found.add((ref.get("apiGroup", ""), resource, "create"))
    return found


def refused(audit_log: Path, account: str) -> list[str]:
    """What it asked for and may not."""
    return [
        event["requestURI"] for event in _events(audit_log, account) if event["responseStatus"]["code"] == 403
    ]


def _events(audit_log: Path, account: str) -> Iterable[dict[str, Any]]:
    """Requests about objects; those of discovery are everybody's. The last line may be on its way."""
    for line in audit_log.read_text().splitlines(keepends=True):
        if line.endswith("\n"):
            event = json.loads(line)
            if event["user"]["username"] == f"system:serviceaccount:{account}" and "objectRef" in event:
                yield event
