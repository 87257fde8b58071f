"""Functions of libraries that a script has replaced travel to feeders; those of the libraries do not."""

from __future__ import annotations

import functools
import importlib
import sys
import types
from pathlib import Path

import pytest

from dataloaderjob.shipping.module_state import patches
from dataloaderjob.shipping.modules import UserModules

LIBRARY = {
    "__init__.py": "from .reading import read\n",
    "reading.py": "import functools\ndef read(x, fast): return x, fast\nread = functools.partial(read, fast=True)\n",
    "plain.py": "def load(x, safe=True): return x, safe\n",
    "again.py": "from .plain import load\n",
    "plugin.py": "from users_package import helper, other as renamed\nfrom users_package import *\n",
}


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    folder = tmp_path / "site-packages" / "patchable"
    folder.mkdir(parents=True)
    for name, text in LIBRARY.items():
        (folder / name).write_text(text)
    monkeypatch.syspath_prepend(str(folder.parent))
    (tmp_path / "users_package.py").write_text("def helper(): ...\ndef other(): ...\ndef starred(): ...\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    modules = ("patchable.reading", "patchable.plain", "patchable.again", "patchable.plugin")
    for name in ("users_package", "patchable", *modules):
        monkeypatch.setitem(sys.modules, name, importlib.import_module(name))
    return "patchable"


def found(library: str) -> list[tuple[str, str]]:
    return [(module, name) for module, name, _ in patches(UserModules()) if module.startswith(library)]


def test_partial_that_a_library_imports_from_its_own_module_is_no_patch(library: str) -> None:
    assert found(library) == []


def test_partial_that_a_script_assigns_is_found_wherever_it_was_put(
    library: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    unsafe = functools.partial(sys.modules["patchable.plain"].load, safe=False)
    for module in ("patchable.plain", "patchable.again"):
        monkeypatch.setattr(sys.modules[module], "load", unsafe)
    assert found(library) == [("patchable.again", "load"), ("patchable.plain", "load")]


def test_users_function_that_a_plugin_imports_is_no_patch(library: str) -> None:
    plugin = vars(sys.modules["patchable.plugin"])
    assert {"helper", "renamed", "starred"} <= plugin.keys()
    assert found(library) == []


@pytest.mark.parametrize("name", ["helper", "renamed", "starred"])
def test_users_function_in_the_place_of_an_imported_one_is_a_patch(
    library: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def replacement() -> None: ...

    replacement = types.FunctionType(replacement.__code__, vars(sys.modules["users_package"]), name)
    monkeypatch.setattr(sys.modules["patchable.plugin"], name, replacement)
    assert found(library) == [("patchable.plugin", name)]


def test_torchs_own_partials_are_no_patches() -> None:
    importlib.import_module("torch.fx.experimental.unification.core")
    assert found("torch.fx") == []
