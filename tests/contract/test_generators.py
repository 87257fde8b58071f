"""Seeds of user code are the process's global generators: nothing of ours may draw from them."""

import ast
from pathlib import Path

import dataloaderjob

PACKAGE = Path(dataloaderjob.__file__).parent
DRAWS = {
    "random",
    "uniform",
    "choice",
    "choices",
    "randint",
    "randrange",
    "sample",
    "shuffle",
    "getrandbits",
    "seed",
}


def test_only_the_fetcher_touches_the_global_generator_of_random():
    guilty = []
    for path in PACKAGE.rglob("*.py"):
        if path.name == "fetcher.py":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if (
                isinstance(node, ast.Attribute)
                and isinstance(node.value, ast.Name)
                and node.value.id == "random"
                and node.attr in DRAWS
            ):
                guilty.append(f"{path.relative_to(PACKAGE)}:{node.lineno}")
    assert not guilty, "a background thread that draws here would change users' batches"
