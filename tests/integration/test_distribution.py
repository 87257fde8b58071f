"""The wheel and the sdist that `make dist` makes: what is in them, and that they install and run in an empty
environment. That has no more than pip finds, and takes torch in the version that this environment has."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tarfile
import venv
import zipfile
from importlib.metadata import version
from pathlib import Path

import pytest
from documents import ROOT

import dataloaderjob

pytestmark = pytest.mark.timeout(900)
PACKAGES = (ROOT / "sidecar/dataloaderjob", ROOT / "operator/dataloaderjob_operator")
README = (ROOT / "README.md").read_text()


def run(*words: object, cwd: Path) -> str:
    """What a command prints. It sees neither the sources nor this environment."""
    env = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")}
    done = subprocess.run([*map(str, words)], cwd=cwd, env=env, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout


def build(source: Path, out: Path, *kinds: str) -> None:
    """As `make dist` does, without a network."""
    command = [sys.executable, "-m", "build", "--no-isolation", *kinds, "--outdir", str(out), str(source)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]


def contents(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("dist")
    build(ROOT, out, "--wheel", "--sdist")
    return out


@pytest.fixture(scope="module")
def wheel(dist: Path) -> Path:
    (found,) = dist.glob("*.whl")
    return found


def test_wheel_contains_exactly_the_two_packages(wheel: Path):
    assert wheel.name == f"dataloaderjob-{dataloaderjob.__version__}-py3-none-any.whl"
    found = {name for name in contents(wheel) if ".dist-info/" not in name}
    assert found == {
        str(path.relative_to(package.parent))
        for package in PACKAGES
        for path in package.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in contents(wheel))


def test_the_sdist_makes_the_same_wheel(dist: Path, wheel: Path, tmp_path: Path):
    (sdist,) = dist.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path)  # no filter=: Debian 12's Python is older than that
    build(tmp_path / sdist.name.removesuffix(".tar.gz"), tmp_path / "again", "--wheel")
    (again,) = (tmp_path / "again").glob("*.whl")
    assert contents(again) == contents(wheel)


@pytest.mark.slow
def test_the_quickstart_runs_in_an_empty_environment(wheel: Path, tmp_path: Path):
    assert re.findall(r"pip install (\S+)", README)[0] == "dataloaderjob"
    script, printed = re.findall(r"```python\n(.*?)```.*?```text\n(.*?)```", README, re.DOTALL)[0]
    (tmp_path / "quickstart.py").write_text(script)
    venv.create(tmp_path / "empty", with_pip=True, symlinks=True)
    programs = tmp_path / "empty/bin"
    # Compiling torch would take half a minute; Python compiles what it imports.
    run(
        programs / "pip",
        "install",
        "--no-compile",
        wheel,
        f"torch=={version('torch')}",
        cwd=tmp_path,
    )
    assert run(programs / "python", "quickstart.py", cwd=tmp_path) == printed
    assert (
        run(programs / "dataloaderjob", "version", cwd=tmp_path)
        == f"dataloaderjob {dataloaderjob.__version__}\n"
    )
    absent = "import importlib.util as u; print([n for n in ('ray', 'rich', 'pydantic') if u.find_spec(n)])"
    assert run(programs / "python", "-c", absent, cwd=tmp_path) == "[]\n"
