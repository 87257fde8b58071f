"""What is installed: extras, the versions that images are pinned to, and what the documents say of both."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator

import pytest
from documents import ROOT, documents
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
EXTRAS: dict[str, list[str]] = PROJECT["project"]["optional-dependencies"]
CONSTRAINTS = ROOT / "constraints/images.txt"
IMAGES = ("operator/Dockerfile", "sidecar/Dockerfile.sidecar", "sidecar/Dockerfile.feeder")
PINS = [Requirement(line) for line in CONSTRAINTS.read_text().splitlines() if re.match(r"[\w.-]+==", line)]


def needed(*extras: str) -> Iterator[Requirement]:
    """What these extras install, those that they contain too."""
    for extra in extras:
        for requirement in map(Requirement, EXTRAS[extra]):
            if requirement.name == "dataloaderjob":
                yield from needed(*requirement.extras)
            else:
                yield requirement


@pytest.mark.parametrize(
    "requirement",
    [
        r
        for r in {
            str(r): r for r in needed("operator", "feeder", "ray-data", "trainer", "sidecar", "api")
        }.values()
        if r.name != "torch"
    ],
    ids=str,
)
def test_what_an_image_installs_is_pinned_to_a_version_that_fits(requirement: Requirement):
    found = [pin for pin in PINS if canonicalize_name(pin.name) == canonicalize_name(requirement.name)]
    assert found, "make constraints"
    for pin in found:
        (version,) = (one.version for one in pin.specifier)
        assert requirement.specifier.contains(version), f"{pin}: make constraints"


def test_torch_and_what_it_alone_needs_are_not_pinned():
    names = {canonicalize_name(pin.name) for pin in PINS}
    assert not names & {"torch", "triton", "sympy", "networkx"}
    assert not [name for name in names if name.startswith("nvidia")]


@pytest.mark.parametrize("image", IMAGES)
def test_an_image_installs_nothing_before_it_has_the_pinned_versions(image: str):
    text = (ROOT / image).read_text()
    pinned = text.index(
        "COPY constraints/images.txt /constraints/\nENV PIP_CONSTRAINT=/constraints/images.txt"
    )
    installs = [match.start() for match in re.finditer(r"^(?:RUN| &&) .*pip install", text, re.MULTILINE)]
    assert installs
    assert pinned < min(installs)
    assert "!constraints" in (ROOT / ".dockerignore").read_text().splitlines(), (
        "docker build is given the file"
    )


def test_what_builds_the_package_is_pinned_too():
    (backend,) = map(Requirement, PROJECT["build-system"]["requires"])
    assert backend.name in {pin.name for pin in PINS}


def test_every_extra_that_is_named_exists():
    files = [*documents(), *(ROOT / "sidecar").rglob("*.py"), *(ROOT / "sidecar").glob("Dockerfile.*")]
    named = {
        extra
        for path in files
        for extras in re.findall(r"dataloaderjob\[([\w,]+)\]", path.read_text())
        for extra in extras.split(",")
    }
    assert {"trainer", "local", "cli"} <= named <= set(EXTRAS)


def test_a_trainer_gets_what_its_process_imports():
    assert {r.name for r in needed("trainer")} == {"torch", "numpy", "cloudpickle", "msgpack", "xxhash"}
