"""Writes a pod's volume of Secrets to a folder, as a kubelet does."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def write_volume(volume: Mapping[str, Any], secrets: Mapping[str, Mapping[str, Any]], folder: Path) -> None:
    """Writes the files of a `secret` or `projected` volume; `secrets` by name. Raises KeyError if one is missing that
    is not optional: the pod would not start."""
    if "secret" in volume:
        sources = [{**volume["secret"], "name": volume["secret"]["secretName"]}]
    else:
        sources = [source["secret"] for source in volume["projected"]["sources"]]
    for source in sources:
        if source.get("optional") and source["name"] not in secrets:
            continue
        data = secrets[source["name"]]["data"]
        for item in source.get("items") or [{"key": key, "path": key} for key in data]:
            path = folder / item["path"]
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(base64.b64decode(data[item["key"]]))
