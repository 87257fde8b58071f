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
    """Requirements of the package and of these extras, including the extras that they contain."""
    yield from map(Requirement, PROJECT["project"]["dependencies"])
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
def test_packages_of_images_are_pinned_to_compatible_versions(requirement: Requirement):
    found = [pin for pin in PINS if canonicalize_name(pin.name) == canonicalize_name(requirement.name)]
    assert found, "make constraints"
    for pin in found:
        (version,) = (one.version for one in pin.specifier)
        assert requirement.specifier.contains(version), f"{pin}: make constraints"


def test_torch_and_its_own_dependencies_are_not_pinned():
    names = {canonicalize_name(pin.name) for pin in PINS}
    assert not names & {"torch", "triton", "sympy", "networkx"}
    assert not [name for name in names if name.startswith("nvidia")]


@pytest.mark.parametrize("image", IMAGES)
def test_image_installs_nothing_before_its_version_constraints(image: str):
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


def test_build_backend_is_pinned_too():
    (backend,) = map(Requirement, PROJECT["build-system"]["requires"])
    assert backend.name in {pin.name for pin in PINS}


def test_every_extra_that_is_mentioned_exists():
    files = [*documents(), *(ROOT / "sidecar").rglob("*.py"), *(ROOT / "sidecar").glob("Dockerfile.*")]
    named = {
        extra
        for path in files
        for extras in re.findall(r"dataloaderjob\[([\w,]+)\]", path.read_text())
        for extra in extras.split(",")
    }
    assert {"trainer", "local", "cli"} <= named <= set(EXTRAS)


def test_base_package_needs_everything_a_trainer_imports_except_torch():
    assert {r.name for r in needed()} == {"numpy", "cloudpickle", "msgpack", "xxhash"}
    assert {r.name for r in needed("trainer")} - {r.name for r in needed()} == {"torch"}


@pytest.mark.parametrize(
    ("image", "extras"), [("operator/Dockerfile", "operator"), ("sidecar/Dockerfile.sidecar", "sidecar")]
)
def test_images_without_user_code_install_their_extras_alone(image: str, extras: str):
    text = (ROOT / image).read_text()
    assert 'p["dependencies"]' not in text
    assert f'"{extras}"' in text
    assert "pip install --no-cache-dir --no-deps --prefix /package ." in text
