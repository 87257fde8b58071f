"""What is in the images, and what is not."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest
from cluster import FEEDER, OPERATOR, ROOT, SIDECAR, CommandFailed, missing, run
from release import inventory, locks

from dataloaderjob import __version__

pytestmark = pytest.mark.timeout(120)
BASE = os.environ.get("PYTHON_IMAGE") or "python:3.11-slim-bookworm"
TOOLS = ("gcc", "cc", "make", "git")
LOOK = """
import importlib.util, json, os, shutil, sys
words = json.loads(sys.argv[1])
print(json.dumps({
    "uid": os.getuid(),
    "modules": [name for name in words["modules"] if importlib.util.find_spec(name)],
    "tools": [name for name in words["tools"] if shutil.which(name)],
    "writable": [path for path in ("/", "/opt/dataloaderjob", "/app") if os.access(path, os.W_OK)],
}))
"""
MODULES = (
    "torch",
    "ray",
    "numpy",
    "pydantic",
    "kopf",
    "kubernetes",
    "yaml",
    "pyarrow",
    "pip",
    "dataloaderjob",
    "dataloaderjob_operator",
)
WHEEL = {"dataloaderjob", "dataloaderjob_operator"}
HAS = {
    OPERATOR: WHEEL | {"pydantic", "kopf", "kubernetes", "yaml"},
    SIDECAR: {"dataloaderjob"},
    FEEDER: WHEEL | {"torch", "ray", "numpy", "pyarrow", "pydantic", "yaml", "pip"},
}


@pytest.mark.parametrize("image", HAS)
def test_image_has_its_modules_and_no_tools_or_root(image: str):
    if gone := missing():
        pytest.fail(gone, pytrace=False)
    question = json.dumps({"modules": MODULES, "tools": TOOLS})
    found = json.loads(
        run(["docker", "run", "--rm", "--network=none", image, "python", "-c", LOOK, question])
    )  # fmt: skip
    assert set(found["modules"]) == HAS[image]
    assert (found["uid"], found["tools"], found["writable"]) == (65532, [], [])


@pytest.mark.parametrize(
    ("image", "lock"), list(zip(HAS, locks.IMAGES, strict=True)), ids=["operator", "sidecar", "feeder"]
)
def test_image_has_exactly_the_packages_of_its_inventory(image: str, lock: locks.Lock):
    """Those of its lock, in these versions, and this package; torch with what torch alone needs in the feeders'."""
    if gone := missing():
        pytest.fail(gone, pytrace=False)
    listed = "import importlib.metadata as m; print(*(f'{d.name}=={d.version}' for d in m.distributions()))"
    lines = run(["docker", "run", "--rm", "--network=none", image, "python", "-c", listed]).split()
    found = {(locks.name_of(name), version) for name, _, version in (line.partition("==") for line in lines)}
    locked = {(pin.name, pin.version) for pin in locks.pins(lock.path, of_images=True)}
    extra = found - locked - {("dataloaderjob", __version__)}
    assert locked <= found
    if image == FEEDER:
        extra = {(name, v) for name, v in extra if name not in {"pip", *inventory.needed_by("torch")}}
    assert extra == set()


def documented() -> str:
    """The Dockerfile that docs/kubernetes/images-and-data.md shows, on the image of this release."""
    text = (ROOT / "docs/kubernetes/images-and-data.md").read_text()
    (found,) = re.findall(r"^```dockerfile\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    head, _, rest = found.partition("\n")
    assert head.startswith("FROM ghcr.io/dataloaderjob/feeder:")
    return f"FROM {FEEDER}\n{rest}"


@pytest.mark.timeout(400)
def test_package_installed_by_the_documented_lines_is_available(tmp_path: Path):
    (tmp_path / "train.py").write_text("import PIL, torch; print(PIL.__name__, torch.__name__)\n")
    (tmp_path / "Dockerfile").write_text(documented())
    run(["docker", "build", "-t", "documented:1", str(tmp_path)], timeout_s=300)
    assert run(["docker", "run", "--rm", "--network=none", "documented:1"]) == "PIL torch\n"
    run(["docker", "image", "rm", "documented:1"])


@pytest.mark.parametrize("words", [["pip", "install", "pillow"], ["pip3", "uninstall", "-y", "numpy"]])
def test_pip_as_the_images_user_explains_the_remedy(words: list[str]):
    with pytest.raises(CommandFailed, match="put 'USER root' before 'RUN pip install'"):
        run(["docker", "run", "--rm", "--network=none", FEEDER, *words])


def test_pip_lists_the_packages_of_the_environment():
    assert "\nray " in run(["docker", "run", "--rm", "--network=none", FEEDER, "pip", "list"])


def test_sidecar_image_adds_almost_nothing_to_its_base():
    sizes = {}
    if not run(["docker", "image", "ls", "--quiet", BASE]):
        run(["docker", "pull", BASE], timeout_s=300)  # BuildKit keeps the base to itself
    for image in (SIDECAR, BASE):
        sizes[image] = int(run(["docker", "image", "inspect", "--format", "{{.Size}}", image]))
    assert sizes[SIDECAR] - sizes[BASE] < 10e6
