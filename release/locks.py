"""The versions that images install, and the hashes of their files: `constraints/`. Run by `make constraints`.

`images.txt` has one version of each package for all images. The lock of an image has those that it installs, each with
the hashes of its files, so that pip refuses any other file. torch is in none of them: TORCH chooses it.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from packaging.markers import Marker

ROOT = Path(__file__).parents[1]
CONSTRAINTS = ROOT / "constraints"
VERSIONS = CONSTRAINTS / "images.txt"
UNLOCKED = "torch"
COMMAND = "make constraints"
PYTHON = "3.11"
"""The oldest Python that locks are made for, which is that of the images."""
IN_IMAGES = {
    "python_version": PYTHON,
    "python_full_version": f"{PYTHON}.0",
    "implementation_name": "cpython",
    "platform_python_implementation": "CPython",
    "os_name": "posix",
    "sys_platform": "linux",
    "platform_system": "Linux",
    "extra": "",
}
"""The values of markers in the images, on any architecture."""
_PIN = re.compile(r"^([\w.-]+)==([^\s;]+)(?:\s*;\s*(.*?))?\s*((?:--hash=\S+\s*)*)$")
_HASH = re.compile(r"--hash=sha256:([0-9a-f]{64})\b")


@dataclass(frozen=True, slots=True)
class Lock:
    """One file of pins with hashes, and the parts of pyproject.toml that it is made from."""

    name: str
    extras: tuple[str, ...] = ()
    with_package: bool = False
    """True if the image installs the requirements of the package itself, too."""
    with_backend: bool = False
    """True for the lock of the packages that build the wheel."""

    @property
    def path(self) -> Path:
        return CONSTRAINTS / f"{self.name}.txt"

    def requirements(self) -> list[str]:
        """Returns the lock's own requirements, without torch and without this package."""
        settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
        project = settings["project"]
        wanted = [one for extra in self.extras for one in project["optional-dependencies"][extra]]
        if self.with_package:
            wanted += project["dependencies"]
        if self.with_backend:
            wanted += settings["build-system"]["requires"]
        return sorted(one for one in wanted if name_of(one) not in (UNLOCKED, "dataloaderjob"))


LOCKS = (
    Lock("operator", ("api", "operator")),
    Lock("sidecar", ("sidecar",)),
    Lock("feeder", ("feeder", "ray-data"), with_package=True),
    Lock("build", with_backend=True),
)
IMAGES = LOCKS[:3]


@dataclass(frozen=True, slots=True)
class Pin:
    """One package of a lock."""

    name: str
    version: str
    hashes: tuple[str, ...]
    """SHA-256 of each of its files, in hexadecimal digits."""


def name_of(requirement: str) -> str:
    """Returns the normalized name of a requirement's package."""
    found = re.match(r"[\w.-]+", requirement)
    return re.sub(r"[-_.]+", "-", found.group()).lower() if found else ""


def pins(path: Path, *, of_images: bool = False) -> Iterator[Pin]:
    """Yields the pins of a lock, or of `images.txt`, which has no hashes. `of_images`: without those for other versions
    of Python and other systems."""
    for entry in path.read_text().replace("\\\n", " ").splitlines():
        found = _PIN.match(entry)
        if found and not (of_images and found[3] and not Marker(found[3]).evaluate(dict(IN_IMAGES))):
            yield Pin(name_of(found[1]), found[2], tuple(_HASH.findall(found[4])))


def _compile(requirements: list[str], output: Path, *options: str) -> None:
    """Runs uv, which resolves `requirements` for all platforms and writes `output`."""
    command = ["uv", "pip", "compile", "--quiet", "--universal", "--python-version", PYTHON, "--no-config"]
    command += ["--custom-compile-command", COMMAND, "--output-file", str(output), *options, "-"]
    subprocess.run(command, cwd=ROOT, input="\n".join(requirements) + "\n", text=True, check=True)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--upgrade", action="store_true", help="take the newest versions")
    upgrade = ["--upgrade"] if parser.parse_args(arguments).upgrade else []
    excludes = CONSTRAINTS / "excludes.txt"
    everything = sorted({one for lock in LOCKS for one in lock.requirements()})
    without = ["--excludes", str(excludes.relative_to(ROOT))]
    _compile(everything, VERSIONS, *without, *upgrade)
    for lock in LOCKS:
        fixed = ["--constraint", str(VERSIONS.relative_to(ROOT)), "--generate-hashes", "--no-annotate"]
        _compile(lock.requirements(), lock.path, *without, *fixed)
    return 0


if __name__ == "__main__":
    sys.exit(main())
