"""The release that comes after this one, as far as other releases meet it: a version of its own, a field more in the
manifest and its definition, a key more in all settings files and in what a supervisor reports, a further protocol of
the supervisor beside today's, and other templates of pods. Made of this one's source, with its Dockerfiles and chart.
"""

from __future__ import annotations

import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

from cluster import ROOT, Cluster, run

from dataloaderjob import __version__

_MAJOR, _MINOR, _ = __version__.split(".")
VERSION = f"{_MAJOR}.{int(_MINOR) + 1}.0"
SIDECAR, OPERATOR = "sidecar/dataloaderjob", "operator/dataloaderjob_operator"
CRD = "charts/dataloaderjob/files/dataloaderjobs.yaml"
FOLDERS = ("constraints", "operator", "sidecar", "charts")
FILES = ("pyproject.toml", "README.md", "LICENSE", ".dockerignore")
ADDED = '"of_the_next_release": {"a": 1}'
CHANGES = (
    (f"{SIDECAR}/__init__.py", r'__version__ = "[^"]*"', f'__version__ = "{VERSION}"'),
    ("charts/dataloaderjob/Chart.yaml", r"(?m)^((?:app)?[vV]ersion): .*$", rf"\1: {VERSION}"),
    (f"{SIDECAR}/api/job.py", r"    suspend: Flag = False\n", r"    of_the_next_release: Flag = True\n\g<0>"),
    (CRD, r"( +)suspend:\n", r"\1ofTheNextRelease:\n\1  default: true\n\1  type: boolean\n\g<0>"),
    (f"{OPERATOR}/objects/settings.py", r"json\.dumps\(value,", f"json.dumps({{**value, {ADDED}}},"),
    (f"{SIDECAR}/supervisor/main.py", r'"type": "status",', rf"\g<0> {ADDED},"),
    (f"{OPERATOR}/objects/workloads.py", r'"periodSeconds": [25]\b', '"periodSeconds": 3'),
)  # fmt: skip
"""File, what is found in it, what takes its place."""
HANDSHAKE = f"{SIDECAR}/core/handshake.py"
CONTROL = re.compile(r"(CONTROL = Versions\(\s*)\d+(,\s*)(\d+)")
"""A release speaks the protocol of the one before it, and one that is new."""


@dataclass(frozen=True, slots=True)
class Release:
    """Images that are on the cluster's workers, and the chart that installs them."""

    operator: str
    sidecar: str
    feeder: str
    chart: Path

    def values(self) -> list[str]:
        """Of the chart, for these images."""
        found: list[str] = []
        for value, name in (("image", self.operator), ("sidecarImage", self.sidecar)):
            repository, _, tag = name.rpartition(":")
            found += ["--set", f"{value}.repository={repository}", "--set", f"{value}.tag={tag}"]
        return found


def build(cluster: Cluster, folder: Path) -> Release:
    """Builds the images from a changed copy of the source, and loads them: some minutes. Raises CommandFailed."""
    source = copy(folder)
    release = Release(
        *(f"dataloaderjob.example/{part}:{VERSION}" for part in ("operator", "sidecar", "feeder")),
        source / "charts" / "dataloaderjob",
    )
    files = ("operator/Dockerfile", "sidecar/Dockerfile.sidecar", "sidecar/Dockerfile.feeder")
    python = os.environ.get("PYTHON_IMAGE")
    base = ["--build-arg", f"PYTHON_IMAGE={python}"] if python else []
    images = [release.operator, release.sidecar, release.feeder]
    for file, image in zip(files, images, strict=True):
        build_words = ["docker", "build", *base, "-f", str(source / file), "-t", image, str(source)]
        run(build_words, timeout_s=900)
    nodes = ",".join(cluster.node(place) for place in ("trainers", "feeders"))
    run(["kind", "load", "docker-image", "--name", cluster.name, *images, "--nodes", nodes], timeout_s=600)
    return release


def copy(folder: Path) -> Path:
    """A copy of the source with the changes. Each has to meet what it changes."""
    source = folder / "next"
    for name in FOLDERS:
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in FILES:
        shutil.copy2(ROOT / name, source / name)
    shutil.copytree(ROOT / "wheels", source / "wheels", copy_function=os.link)
    for file, found, instead in CHANGES:
        change(source / file, found, instead)
    handshake = source / HANDSHAKE
    text, count = CONTROL.subn(lambda m: f"{m[1]}{m[3]}{m[2]}{int(m[3]) + 1}", handshake.read_text())
    assert count == 1
    handshake.write_text(text)
    return source


def change(path: Path, found: str, instead: str) -> None:
    """Changes a copied file, which has to meet what it changes."""
    text, count = re.subn(found, instead, path.read_text())
    assert count, f"{path.name} has no {found!r} any more"
    path.write_text(text)
