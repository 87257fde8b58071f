"""What `make generate` makes is committed as it makes it."""

from __future__ import annotations

import argparse

import generate
import pytest
from documents import ROOT

from dataloaderjob.local import cli
from dataloaderjob_operator import options


@pytest.mark.parametrize("path", generate.FILES)
def test_generated_file_matches_the_code(path):
    assert (ROOT / path).read_text() == generate.FILES[path](), f"make generate writes {path} anew"


@pytest.mark.parametrize("make", [cli.make_parser, options.make_parser], ids=["dataloaderjob", "operator"])
def test_every_argument_is_documented(make):
    parsers: list[argparse.ArgumentParser] = [make()]
    for parser in parsers:
        for action in parser._actions:
            if isinstance(action, argparse._SubParsersAction):
                parsers += action.choices.values()
            else:
                assert action.help, f"{parser.prog}: {action.dest}"
