# ruff: noqa: PYI024
"""Classes by name."""

from __future__ import annotations

from collections import namedtuple
from typing import Any

import pytest

from dataloaderjob.core.errors import UnsupportedBatch
from dataloaderjob.shipping import user_code


@pytest.fixture(autouse=True)
def nothing_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(user_code, "_sent", type(user_code._sent)())
    monkeypatch.setattr(user_code, "_ambiguous", set())


def test_named_tuple_made_in_a_function_is_found_once_sent() -> None:
    made: Any = namedtuple("OfAFunction", "a b")
    with pytest.raises(
        UnsupportedBatch, match=r"cannot find that class .*define it at the top level of a module"
    ):
        user_code.find_class(__name__, "OfAFunction")
    user_code.note_sent(made)
    assert user_code.find_class(__name__, "OfAFunction") is made


def test_ambiguous_named_tuple_class_is_not_found() -> None:
    first: Any = namedtuple("OfAFunction", "a b")
    same: Any = namedtuple("OfAFunction", "a b")
    other: Any = namedtuple("OfAFunction", "a c")
    user_code.note_sent(first)
    user_code.note_sent(same)
    assert user_code.find_class(__name__, "OfAFunction") is first
    user_code.note_sent(other)
    with pytest.raises(UnsupportedBatch, match="cannot find that class"):
        user_code.find_class(__name__, "OfAFunction")


def test_sent_class_is_not_kept_alive() -> None:
    user_code.note_sent(namedtuple("OfAFunction", "a b"))  # type: ignore[arg-type]
    import gc

    gc.collect()
    with pytest.raises(UnsupportedBatch):
        user_code.find_class(__name__, "OfAFunction")


def test_modules_own_class_takes_precedence() -> None:
    made: Any = namedtuple("UnsupportedBatch", "a b")
    user_code.note_sent(made)
    assert user_code.find_class(__name__, "UnsupportedBatch") is UnsupportedBatch
