"""Inventories of the images' packages, in the CycloneDX format: `make sbom` writes one for each image to build/sbom.

An image has exactly the packages of its lock, this package, and, if it is the feeders', torch with what torch alone
needs. Those are read from the environment that runs this. The packages of the base image are not among them.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement

from dataloaderjob import __version__
from release import locks

TOOL = locks.ROOT / ".venv-release/bin/cyclonedx-py"
FOLDER = locks.ROOT / "build/sbom"


class NoInventoryError(Exception):
    """An inventory cannot be made; the message states what to do."""


def needed_by(name: str, known: dict[str, str] | None = None) -> dict[str, str]:
    """Returns the versions of a package and of what it needs, as installed in this environment, by name."""
    found = {} if known is None else known
    normal = locks.name_of(name)
    if normal in found:
        return found
    try:
        installed = metadata.distribution(name)
    except metadata.PackageNotFoundError as exc:
        raise NoInventoryError(
            f"{name} is needed in this environment, and is not installed: make env"
        ) from exc
    found[normal] = installed.version
    for one in map(Requirement, installed.requires or ()):
        if one.marker is None or one.marker.evaluate({"extra": ""}):
            needed_by(one.name, found)
    return found


def contents(lock: locks.Lock, version: str) -> str:
    """Returns what the image of a lock has, as requirements for the tool."""
    pins = list(locks.pins(lock.path, of_images=True))
    lines = [
        " ".join((f"{pin.name}=={pin.version}", *(f"--hash=sha256:{one}" for one in pin.hashes)))
        for pin in pins
    ]
    lines.append(f"dataloaderjob=={version}")
    if lock.name == "feeder":
        locked = {pin.name for pin in pins}
        lines += [f"{name}=={v}" for name, v in needed_by(locks.UNLOCKED).items() if name not in locked]
    return "\n".join(lines) + "\n"


def write(lock: locks.Lock, version: str, folder: Path, tool: Path = TOOL) -> Path:
    """Writes the inventory of one image, and checks that it has every package. Returns its path."""
    if not tool.exists():
        raise NoInventoryError(f"{tool} is needed to write inventories: make sbom installs it")
    path = folder / f"dataloaderjob-{version}-{lock.name}.cdx.json"
    requirements = contents(lock, version)
    command = [
        str(tool),
        "requirements",
        "--output-reproducible",
        "--spec-version",
        "1.6",
        "-o",
        str(path),
        "-",
    ]
    done = subprocess.run(command, input=requirements, capture_output=True, text=True, check=False)
    if done.returncode:
        raise NoInventoryError(f"cyclonedx-py made no inventory of {lock.name}:\n{done.stderr[-2000:]}")
    listed = {
        (locks.name_of(one["name"]), one.get("version")) for one in json.loads(path.read_text())["components"]
    }
    if missing := {(pin.name, pin.version) for pin in locks.pins(lock.path, of_images=True)} - listed:
        raise NoInventoryError(f"the inventory of {lock.name} lacks {sorted(missing)[:5]}")
    return path


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=FOLDER, help="where to write them (build/sbom)")
    folder = parser.parse_args(arguments).folder
    folder.mkdir(parents=True, exist_ok=True)
    try:
        for lock in locks.IMAGES:
            sys.stdout.write(f"{write(lock, __version__, folder)}\n")
    except NoInventoryError as exc:
        sys.stderr.write(f"{exc}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
