"""The chart as helm renders it."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import yaml

CHART = Path(__file__).resolve().parents[2] / "charts" / "dataloaderjob"


def helm(*words: str) -> subprocess.CompletedProcess[str]:
    """Raises FileNotFoundError with what to do where there is no helm."""
    if shutil.which("helm") is None:
        raise FileNotFoundError("helm is needed for tests of the chart: https://helm.sh/docs/intro/install")
    return subprocess.run(["helm", *words], capture_output=True, text=True, timeout=120)


def notes(*options: str, release: str = "r", namespace: str = "ops") -> str:
    """What helm prints after an installation. Raises ValueError with what helm said."""
    done = helm("install", release, str(CHART), "--namespace", namespace, "--dry-run=client", *options)
    if done.returncode:
        raise ValueError(done.stderr)
    return done.stdout.partition("\nNOTES:\n")[2]


def render(
    *options: str, release: str = "r", namespace: str = "ops"
) -> dict[tuple[str, str], dict[str, Any]]:
    """By (kind, name). Raises ValueError with what helm said."""
    done = helm("template", release, str(CHART), "--namespace", namespace, *options)
    if done.returncode:
        raise ValueError(done.stderr)
    found = [thing for thing in yaml.safe_load_all(done.stdout) if thing]
    return {(thing["kind"], thing["metadata"]["name"]): thing for thing in found}
