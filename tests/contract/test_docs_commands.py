"""What the documents tell people to type exists and takes those options."""

from __future__ import annotations

import functools
import importlib.util
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pages
import pytest
from documents import ROOT, Shown, commands, documents, links

COMMANDS = commands()
CLI = ("-m", "dataloaderjob.local.cli")


def of(program: str) -> list[pytest.param]:
    return [pytest.param(shown, id=str(shown)) for shown in COMMANDS if shown.words[0] == program]


@functools.cache
def help_of(*words: str, cwd: Path = ROOT) -> str:
    """What `python WORDS --help` says. Fails where that fails."""
    done = subprocess.run(
        [sys.executable, *words, "--help"], cwd=cwd, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, f"python {' '.join(words)} --help:\n{done.stderr}"
    return done.stdout


def options(words: tuple[str, ...]) -> list[str]:
    own = words[: words.index("--")] if "--" in words else words  # another program's follow
    return [word.partition("=")[0] for word in own if word.startswith("-")]


def targets() -> set[str]:
    return set(re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def test_the_readme_begins_with_advice():
    block = re.search(r"^```sh\n(.*?)^```", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    assert block is not None
    first = next(line for line in block[1].splitlines() if not line.startswith("pip install"))
    assert first.startswith("dataloaderjob advise -- python train.py ")


@pytest.mark.parametrize("shown", of("make"))
def test_a_documented_make_target_exists(shown: Shown):
    goals = [word for word in shown.words[1:] if "=" not in word and not word.startswith("-")]
    assert set(goals) <= targets()


def test_the_makefile_parses_and_explains_each_of_its_targets():
    done = subprocess.run(
        ["make", "--no-print-directory", "help"], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert {line.split()[0] for line in done.stdout.splitlines()} == targets()


@pytest.mark.parametrize("shown", of("dataloaderjob"))
def test_a_documented_command_of_the_cli_exists_with_its_options(shown: Shown):
    text = help_of(*CLI, shown.words[1])
    assert [option for option in options(shown.words) if option not in text] == []
    for word in shown.words[2:]:
        if word.endswith("dataloaderjob.yaml"):
            assert (ROOT / word).exists() or (shown.document.parent / word).exists()


def test_every_command_of_the_cli_has_a_help():
    listed = re.findall(r"^    (\w+) ", help_of(*CLI), re.MULTILINE)
    assert {"run", "status", "scale"} <= set(listed)
    for name in listed:
        assert "usage" in help_of(*CLI, name)


def test_the_console_script_points_at_the_cli():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    module, _, function = project["scripts"]["dataloaderjob"].partition(":")
    assert module == CLI[1]
    assert callable(getattr(importlib.import_module(module), function))


@pytest.mark.thorough
@pytest.mark.parametrize("shown", of("python"))
def test_a_documented_script_exists_with_its_options(shown: Shown):
    if shown.words[1] == "-m":
        assert importlib.util.find_spec(shown.words[2]), f"no module {shown.words[2]}"
        if not options(shown.words[3:]):  # not all of them take options
            return
        text = help_of("-m", shown.words[2])
    else:
        folder = next((f for f in (ROOT, shown.document.parent) if (f / shown.words[1]).exists()), None)
        assert folder, f"no {shown.words[1]}"
        text = help_of(shown.words[1], cwd=folder)
    assert [option for option in options(shown.words[3:]) if option not in text] == []


@pytest.mark.parametrize("shown", of("torchrun"))
def test_a_documented_launch_names_a_script_that_exists(shown: Shown):
    assert shutil.which("torchrun", path=str(Path(sys.executable).parent))
    (script,) = (word for word in shown.words if word.endswith(".py"))
    assert (ROOT / script).exists() or (shown.document.parent / script).exists()


def test_every_document_is_a_page_of_the_site():
    assert sorted(pages.paths()) == [str(path.relative_to(ROOT)) for path in documents()]


@pytest.mark.parametrize("document", documents(), ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(document: Path):
    assert [target for target in links(document) if not (document.parent / target).exists()] == []


def test_each_dependency_has_its_line_with_its_lower_bound():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    lists = [
        project["project"]["dependencies"],
        *project["project"]["optional-dependencies"].values(),
        project["build-system"]["requires"],
    ]
    needed = {
        tuple(re.fullmatch(r"([\w\[\]-]+)(>=.+)", requirement).groups())
        for requirements in lists
        for requirement in requirements
        if not requirement.startswith("dataloaderjob")
    }
    text = (ROOT / "docs/internals/dependencies.md").read_text()
    listed = set(re.findall(r"^\| `([^`]+)` .*\| `(>=[^`]+)`: [^|]+ \|$", text, re.MULTILINE))
    assert listed == needed
