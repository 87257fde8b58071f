"""What is installed: extras, the versions that images are pinned to, and what the documents say of both."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator

import pytest
from documents import ROOT, documents
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from release import locks

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
EXTRAS: dict[str, list[str]] = PROJECT["project"]["optional-dependencies"]
CONSTRAINTS = ROOT / "constraints/images.txt"
DOCKERFILES = {
    "operator": "operator/Dockerfile",
    "sidecar": "sidecar/Dockerfile.sidecar",
    "feeder": "sidecar/Dockerfile.feeder",
}
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


def installs(name: str) -> list[str]:
    return re.findall(r"^RUN .*pip install (.*)$", (ROOT / DOCKERFILES[name]).read_text(), re.MULTILINE)


@pytest.mark.parametrize("image", locks.IMAGES, ids=lambda lock: lock.name)
def test_image_installs_only_files_whose_hashes_are_locked(image: locks.Lock):
    torch = [one for one in installs(image.name) if "${TORCH}" in one]
    own = "--no-cache-dir --no-deps --no-build-isolation --prefix /package ."
    locked = [f"--no-cache-dir --require-hashes -r /constraints/{name}.txt" for name in (image.name, "build")]
    assert sorted(installs(image.name)) == sorted([*locked, own, *torch])
    assert len(torch) == (image.name == "feeder")
    assert "!constraints" in (ROOT / ".dockerignore").read_text().splitlines(), (
        "docker build is given the files"
    )


def test_torch_changes_no_package_that_is_locked():
    text = (ROOT / DOCKERFILES["feeder"]).read_text()
    assert "RUN PIP_CONSTRAINT=/wheels/images.txt pip install --no-cache-dir --find-links /wheels" in text
    assert "COPY constraints/images.txt wheels/*.whl /wheels/" in text


@pytest.mark.parametrize("lock", locks.LOCKS, ids=lambda lock: lock.name)
def test_a_lock_has_hashes_and_the_versions_of_all_images(lock: locks.Lock):
    versions = {(pin.name, pin.version) for pin in locks.pins(locks.VERSIONS)}
    pins = list(locks.pins(lock.path))
    assert all(pin.hashes for pin in pins), "make constraints"
    assert {(pin.name, pin.version) for pin in pins} <= versions, "make constraints"
    wanted = set(map(locks.name_of, lock.requirements()))
    assert wanted <= {pin.name for pin in pins}, "make constraints"
    assert not {pin.name for pin in pins} & {"torch", "dataloaderjob"}


def test_locks_together_have_every_version_that_images_have():
    locked = {(pin.name, pin.version) for lock in locks.LOCKS for pin in locks.pins(lock.path)}
    assert locked == {(pin.name, pin.version) for pin in locks.pins(locks.VERSIONS)}


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
    (lock,) = (one for one in locks.IMAGES if one.path.name in text)
    assert extras in lock.extras
    assert "pip install --no-cache-dir --no-deps --no-build-isolation --prefix /package ." in text
