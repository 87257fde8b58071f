"""What is signed of a release, what an inventory has, and when an audit has taken place."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from release import audit, inventory, locks, signing

HASH = "a" * 64


@pytest.fixture
def signed(tmp_path: Path) -> tuple[Path, Path]:
    """A folder that is signed, and the public key."""
    folder = tmp_path / "dist"
    (folder / "sub").mkdir(parents=True)
    for name in ("a.whl", "b.tar.gz", "sub/c.json"):
        (folder / name).write_text(name)
    private, public = signing.new_key(tmp_path)
    signing.sign(folder, private)
    return folder, public


def test_signed_files_are_verified_by_the_public_key(signed: tuple[Path, Path]):
    folder, public = signed
    assert signing.verify(folder, public) == 3
    assert signing.main(["verify", str(folder), "--key", str(public)]) == 0


@pytest.mark.parametrize(
    "change", ["changed", "missing", "added", "renamed", "sums", "signature", "key", "link"]
)
def test_anything_but_the_signed_files_is_refused(signed: tuple[Path, Path], tmp_path: Path, change: str):
    folder, public = signed
    sums = folder / signing.SUMS
    match change:
        case "changed":
            (folder / "a.whl").write_text("b.whl")
        case "missing":
            (folder / "a.whl").unlink()
        case "added":
            (folder / "d.whl").write_text("d")
        case "renamed":
            (folder / "a.whl").rename(folder / "e.whl")
        case "sums":
            (folder / "a.whl").write_text("other")
            sums.write_text(sums.read_text().replace(sums.read_text()[:64], HASH))
        case "signature":
            (folder / signing.SIGNATURE).write_bytes(bytes(64))
        case "key":
            other = tmp_path / "other"
            other.mkdir()
            _, public = signing.new_key(other)
        case "link":
            (folder / "a.whl").unlink()
            os.symlink("b.tar.gz", folder / "a.whl")
    with pytest.raises(signing.SignatureFault):
        signing.verify(folder, public)
    assert signing.main(["verify", str(folder), "--key", str(public)]) == 1


def test_a_private_key_is_its_owners_alone(tmp_path: Path):
    private, _ = signing.new_key(tmp_path)
    assert private.stat().st_mode & 0o077 == 0


def test_pins_of_other_systems_are_not_those_of_images(tmp_path: Path):
    lock = tmp_path / "lock.txt"
    lock.write_text(
        f"numpy==2.4.6 ; python_full_version < '3.12' \\\n    --hash=sha256:{HASH} \\\n    --hash=sha256:{'b' * 64}\n"
        f"numpy==2.5.5 ; python_full_version >= '3.12' \\\n    --hash=sha256:{HASH}\n"
        f"colorama==0.4.6 ; sys_platform == 'win32' \\\n    --hash=sha256:{HASH}\nXx_Hash==4.1.0\n"
    )
    assert [pin.name for pin in locks.pins(lock)] == ["numpy", "numpy", "colorama", "xx-hash"]
    assert list(locks.pins(lock, of_images=True)) == [
        locks.Pin("numpy", "2.4.6", (HASH, "b" * 64)),
        locks.Pin("xx-hash", "4.1.0", ()),
    ]


def test_only_the_feeders_inventory_has_torch_and_what_it_needs():
    found = {lock.name: inventory.contents(lock, "1.2.3") for lock in locks.IMAGES}
    assert all("dataloaderjob==1.2.3" in text for text in found.values())
    assert [name for name, text in found.items() if "\ntorch==" in text] == ["feeder"]
    assert "\nsympy==" in found["feeder"]
    assert "xxhash==4.1.0 --hash=sha256:" in found["sidecar"]


def test_a_tool_that_is_missing_is_named(tmp_path: Path):
    with pytest.raises(inventory.NoInventoryError, match="make sbom installs it"):
        inventory.write(locks.IMAGES[1], "1", tmp_path, tmp_path / "none")


def result(*dependencies: dict[str, object]) -> audit.Audit:
    return audit.parsed(json.dumps({"dependencies": dependencies}), "pypi")


GOOD = {"name": "a", "version": "1", "vulns": []}
BAD = {"name": "b", "version": "2", "vulns": [{"id": "PYSEC-1", "fix_versions": ["3"]}]}
SKIPPED = {"name": "c", "skip_reason": "Dependency not found on PyPI"}


@pytest.mark.parametrize(
    ("found", "code"),
    [
        (result(GOOD), 0),
        (result(GOOD, BAD), audit.FOUND),
        (result(GOOD, SKIPPED), audit.NOT_RUN),
        (result(BAD, SKIPPED), audit.NOT_RUN),
        (result(), audit.NOT_RUN),
        (audit.parsed("oops", "pypi"), audit.NOT_RUN),
        (audit.parsed("{}", "pypi"), audit.NOT_RUN),
    ],
    ids=["clean", "found", "skipped", "found-and-skipped", "empty", "no-json", "no-list"],
)
def test_an_audit_that_skipped_a_package_has_not_taken_place(found: audit.Audit, code: int):
    assert found.code == code
    assert ("**Not audited**" in found.report()) == (code == audit.NOT_RUN)


def test_findings_are_rows_of_the_report():
    assert "| `b` | 2 | PYSEC-1 | 3 |" in result(GOOD, BAD).report()
