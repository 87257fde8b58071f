"""Checks that a release can be made of this working tree. Run by `make release-check`; publishes nothing.

It compares the version everywhere, wants a dated section of the changelog with the result of the audit, settings of
this version for later releases to read, and a base image by digest. It checks the images' locks, installs the wheel
into an empty environment, and signs wheel, sdist and inventories of the images.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import venv
from collections.abc import Callable
from pathlib import Path

from release import inventory, locks, signing

import dataloaderjob

ROOT = Path(__file__).parents[2]
VERSION = dataloaderjob.__version__
QUICKSTART = ROOT / "examples/quickstart.py"


class Fault(Exception):
    """A step's reason to refuse the release, with what to do."""


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def run(*command: str | Path, cwd: Path = ROOT) -> str:
    """The command's standard output. Raises Fault with the end of both outputs if it fails."""
    clean = {
        name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "DATALOADERJOB_"))
    }
    done = subprocess.run(
        list(map(str, command)),
        cwd=cwd,
        env=clean,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode:
        raise Fault(f"{' '.join(map(str, command))} failed:\n{done.stdout[-3000:]}")
    return done.stdout


def tree() -> None:
    if changed := run("git", "status", "--porcelain").splitlines():
        raise Fault(
            f"{len(changed)} files differ from the last commit, such as {changed[0][3:]}: commit or restore them"
        )
    if f"v{VERSION}" in run("git", "tag").split():
        raise Fault(
            f"the tag v{VERSION} exists already: raise __version__ in sidecar/dataloaderjob/__init__.py"
        )


def changelog(text: str | None = None) -> None:
    """The newest section is this version's and has a date, as in `## 0.2.0 (2027-01-31)`."""
    sections = re.findall(
        r"^## (\S+) \((.*)\)$", text if text is not None else (ROOT / "CHANGELOG.md").read_text(), re.M
    )
    if not sections or sections[0][0] != VERSION:
        found = sections[0][0] if sections else "none"
        raise Fault(f"the first section of CHANGELOG.md must be that of {VERSION}, found {found}")
    if not re.fullmatch(r"\d{4}-\d\d-\d\d", sections[0][1]):
        raise Fault(
            f"write the day of the release into CHANGELOG.md: ## {VERSION} (YYYY-MM-DD), found ({sections[0][1]})"
        )


AUDIT = re.compile(r"^- Audit of \d{4}-\d\d-\d\d by pip-audit: \d+ findings", re.M)


def audited(text: str | None = None) -> None:
    """The newest section says what `make audit` found, as in `- Audit of 2027-01-31 by pip-audit: 0 findings`."""
    sections = re.split(
        r"^## ", text if text is not None else (ROOT / "CHANGELOG.md").read_text(), flags=re.M
    )
    if len(sections) < 2 or not AUDIT.search(sections[1]):
        raise Fault(
            "run `make audit`, and write its result into the first section of CHANGELOG.md: - Audit of YYYY-MM-DD by "
            "pip-audit: N findings, then the findings"
        )


def base_image(name: str) -> None:
    """The name ends with a digest, so that the images are built from the same files again."""
    if not re.search(r"@sha256:[0-9a-f]{64}$", name):
        raise Fault(
            f"the base image must be named by its digest, found {name}: docker buildx imagetools inspect {name}, then "
            f"PYTHON_IMAGE={name}@sha256:..."
        )


def signed(folder: Path, key: Path | None) -> None:
    """Inventories join the wheel and the sdist. All are signed, and a file that is changed afterwards is refused."""
    try:
        for lock in locks.IMAGES:
            inventory.write(lock, VERSION, folder)
        if key is None:
            say("   no SIGNING_KEY: the signature is tried with a key that is then thrown away")
            with tempfile.TemporaryDirectory() as made:
                _try_signature(folder, signing.new_key(Path(made))[0])
        else:
            _try_signature(folder, key)
    except (inventory.NoInventoryError, signing.SignatureFault) as exc:
        raise Fault(str(exc)) from exc


def _try_signature(folder: Path, key: Path) -> None:
    with tempfile.TemporaryDirectory() as made:
        public = Path(made) / "release.pub"
        signing.public_part(key, public)
        signing.sign(folder, key)
        signing.verify(folder, public)
        (wheel,) = folder.glob("*.whl")
        wheel.write_bytes(wheel.read_bytes() + b"\0")
        try:
            signing.verify(folder, public)
        except signing.SignatureFault:
            return
        raise Fault("the signature does not cover the wheel")


def settings() -> None:
    if not (ROOT / "tests/contract/skew" / VERSION).is_dir():
        raise Fault(
            f"tests/contract/skew/{VERSION} is missing: the next release must read this one's settings"
        )


def contracts() -> None:
    """Versions of chart and images, constraints, generated files."""
    files = [f"tests/contract/test_{name}.py" for name in ("version", "packaging", "generated", "skew")]
    run(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *files)


def built(folder: Path) -> Path:
    """The wheel, made in an environment of its own as an index's users would get it."""
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder)
    (wheel,) = folder.glob("*.whl")
    if f"-{VERSION}-" not in wheel.name or not list(folder.glob(f"*-{VERSION}.tar.gz")):
        raise Fault(
            f"expected a wheel and an sdist of {VERSION}, found {sorted(one.name for one in folder.iterdir())}"
        )
    return wheel


def installed(folder: Path, wheel: Path, torch: str) -> None:
    """Installs into an empty environment: first without torch, then with it, and runs the quickstart there."""
    venv.create(folder / "env", with_pip=True)
    python = folder / "env/bin/python"
    run(python, "-m", "pip", "install", "--quiet", wheel, cwd=folder)
    wanted = "from dataloaderjob import DataLoader"
    said = run(python, "-c", f"try:\n    {wanted}\nexcept ImportError as exc:\n    print(exc)", cwd=folder)
    if "pip install torch" not in said:
        raise Fault(f"without torch, `{wanted}` must say what to install, and said: {said}")
    run(python, "-m", "pip", "install", "--quiet", torch, cwd=folder)
    run(python, "-m", "pip", "check", cwd=folder)
    if (version := run(folder / "env/bin/dataloaderjob", "--version", cwd=folder)).split()[-1] != VERSION:
        raise Fault(f"dataloaderjob --version printed {version!r}, expected {VERSION}")
    batches = run(python, QUICKSTART, cwd=folder)
    if "tensor([0, 1, 4, 9])" not in batches:
        raise Fault(f"{QUICKSTART.name} printed something else in an empty environment:\n{batches}")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--torch", default="torch", help="requirement of torch, or the path of a wheel")
    parser.add_argument(
        "--base-image", default="", help="the image that images are built from, with its digest"
    )
    parser.add_argument("--key", type=Path, help="PEM file with the key of releases; none: a temporary one")
    chosen = parser.parse_args(arguments)
    torch = chosen.torch
    faults = 0
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        steps: list[tuple[str, Callable[[], object]]] = [
            ("working tree and tag", tree),
            ("changelog", changelog),
            ("result of the audit in the changelog", audited),
            ("base image by digest", lambda: base_image(chosen.base_image)),
            ("settings of this version for later ones", settings),
            ("versions, constraints, generated files", contracts),
            ("wheel in an empty environment", lambda: installed(folder, built(folder / "dist"), torch)),
            ("inventories and signature", lambda: signed(folder / "dist", chosen.key)),
        ]
        for name, step in steps:
            say(f"== {name}")
            try:
                step()
            except Fault as fault:
                faults += 1
                say(f"FAULT: {fault}")
    say(
        f"{faults} of {len(steps)} checks refuse the release of {VERSION}"
        if faults
        else f"{VERSION} can be released"
    )
    return bool(faults)


if __name__ == "__main__":
    sys.exit(main())
