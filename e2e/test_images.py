"""What is in the images, and what is not."""

from __future__ import annotations

import json
import os

import pytest
from cluster import FEEDER, OPERATOR, SIDECAR, missing, run

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
)
HAS = {
    OPERATOR: {"pydantic", "kopf", "kubernetes", "yaml", "dataloaderjob"},
    SIDECAR: {"dataloaderjob"},
    FEEDER: {"torch", "ray", "numpy", "pyarrow", "pydantic", "yaml", "dataloaderjob"},
}


@pytest.mark.parametrize("image", HAS)
def test_an_image_has_what_its_process_needs_no_tools_and_no_root(image: str):
    if gone := missing():
        pytest.fail(gone, pytrace=False)
    question = json.dumps({"modules": MODULES, "tools": TOOLS})
    found = json.loads(
        run(["docker", "run", "--rm", "--network=none", image, "python", "-c", LOOK, question])
    )  # fmt: skip
    assert set(found["modules"]) == HAS[image]
    assert (found["uid"], found["tools"], found["writable"]) == (65532, [], [])


def test_the_sidecars_image_adds_next_to_nothing_to_its_base():
    sizes = {}
    if not run(["docker", "image", "ls", "--quiet", BASE]):
        run(["docker", "pull", BASE], timeout_s=300)  # BuildKit keeps the base to itself
    for image in (SIDECAR, BASE):
        sizes[image] = int(run(["docker", "image", "inspect", "--format", "{{.Size}}", image]))
    assert sizes[SIDECAR] - sizes[BASE] < 10e6
