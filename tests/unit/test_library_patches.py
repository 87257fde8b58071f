"""Library functions that a script has replaced are sent to feeders. A library's own partials are not."""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from dataloaderjob.shipping.module_state import patches
from dataloaderjob.shipping.modules import UserModules

LIBRARY = {
    "__init__.py": "from .reading import read\n",
    "reading.py": "import functools\ndef read(x, fast): return x, fast\nread = functools.partial(read, fast=True)\n",
    "compat.py": "from . import read\n",
    "starred.py": "from patchable.reading import *\n",
    "plain.py": "def load(x, safe=True): return x, safe\n",
    "again.py": "from .plain import load\n",
    "other.py": "def read(x): return x\n",
}


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    folder = tmp_path / "site-packages" / "patchable"
    folder.mkdir(parents=True)
    for name, text in LIBRARY.items():
        (folder / name).write_text(text)
    monkeypatch.syspath_prepend(str(folder.parent))
    for name in LIBRARY:
        importlib.import_module(f"patchable.{name.removesuffix('.py')}" if name[0] != "_" else "patchable")
    yield "patchable"
    for name in [name for name in sys.modules if name.partition(".")[0] == "patchable"]:
        del sys.modules[name]


def found(library: str) -> list[tuple[str, str]]:
    return [(module, name) for module, name, _ in patches(UserModules()) if module.startswith(library)]


def test_partial_that_a_library_imports_from_its_own_module_is_no_patch(library: str) -> None:
    own = vars(sys.modules["patchable.reading"])["read"]
    assert all(
        vars(sys.modules[name])["read"] is own
        for name in ("patchable", "patchable.compat", "patchable.starred")
    )
    assert found(library) == []


def test_partial_that_a_script_assigns_is_found_wherever_it_was_put(library: str) -> None:
    unsafe = functools.partial(vars(sys.modules["patchable.plain"])["load"], safe=False)
    for module in ("patchable.plain", "patchable.again"):
        vars(sys.modules[module])["load"] = unsafe
    assert found(library) == [("patchable.again", "load"), ("patchable.plain", "load")]


def test_librarys_partial_is_a_patch_in_a_module_that_does_not_import_it(library: str) -> None:
    vars(sys.modules["patchable.other"])["read"] = vars(sys.modules["patchable.reading"])["read"]
    assert found(library) == [("patchable.other", "read")]


def test_patch_of_a_module_whose_file_is_a_path_is_found(library: str) -> None:
    own = vars(sys.modules["patchable.other"])
    own["__file__"] = Path(own["__file__"])
    own["read"] = vars(sys.modules["patchable.reading"])["read"]
    assert found(library) == [("patchable.other", "read")]


def test_torchs_own_partials_are_no_patches() -> None:
    importlib.import_module("torch.fx.experimental.unification.core")
    assert found("torch.fx") == []
