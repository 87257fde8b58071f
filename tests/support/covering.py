"""Which rows of a test with many parameters the quick runs have.

`@pytest.mark.quick(ID, ...)`: those that have one of these ids, of a whole row or of one value. The others are marked
slow, or nightly if the mark has `others="nightly"`.

`@pytest.mark.cover(1)`: as many rows of the product as have each value of each parameter; `cover(2)`: each pair of
values of two parameters. The rows beyond are marked nightly.
"""

from __future__ import annotations

import itertools
import os
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pytest

Row = Mapping[str, int]
"""A parameter's name and a number that stands for its value."""


def covering(rows: Sequence[Row], strength: int) -> set[int]:
    """Numbers of rows that have whatever `strength` values appear together in a row, chosen greedily: of equal ones
    that whose values are the rarest so far."""
    parts = [set(itertools.combinations(sorted(row.items()), min(strength, len(row)))) for row in rows]
    missing, chosen, used = set().union(*parts), set[int](), Counter[tuple[str, int]]()
    while missing:
        best = max(
            range(len(rows)), key=lambda n: (len(parts[n] & missing), -sum(used[v] for v in rows[n].items()))
        )
        chosen.add(best)
        used.update(rows[best].items())
        missing -= parts[best]
    return chosen


def seeds(variable: str, count: int, quick: int = 2) -> list[Any]:
    """Parameters of a test of chance: as many as the environment says in `variable`, else `count`. Those after the
    first `quick` are nightly."""
    numbers = range(int(os.environ.get(variable, count)))
    return [pytest.param(n, marks=[] if n < quick else [pytest.mark.nightly]) for n in numbers]


def mark_the_others(items: Iterable[pytest.Item]) -> None:
    tests: defaultdict[str, list[pytest.Function]] = defaultdict(list)
    for item in items:
        if (
            isinstance(item, pytest.Function)
            and item.get_closest_marker("cover")
            and hasattr(item, "callspec")
        ):
            tests[item.nodeid.partition("[")[0]].append(item)
        if (
            isinstance(item, pytest.Function)
            and (named := item.get_closest_marker("quick"))
            and not is_named(item.callspec.id, named.args)
        ):
            item.add_marker(named.kwargs.get("others", "slow"))
    for rows in tests.values():
        (strength,) = rows[0].get_closest_marker("cover").args
        chosen = covering([_identities(row) for row in rows], strength)
        for number, row in enumerate(rows):
            if number not in chosen:
                row.add_marker(pytest.mark.nightly)


def is_named(row: str, names: Iterable[str]) -> bool:
    """Whether a row's id is one of the names, or has it as that of a value: "in order" in "2-in order"."""
    return any(f"-{name}-" in f"-{row}-" for name in names)


def _identities(row: pytest.Function) -> Row:
    return {name: id(value) for name, value in row.callspec.params.items()}
