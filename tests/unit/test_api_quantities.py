"""Quantities mean what Kubernetes means by them."""

from __future__ import annotations

import contextlib
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataloaderjob.api.base import PATTERN, Quantity


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("0", Fraction(0)),
        (2, Fraction(2)),
        ("500m", Fraction(1, 2)),
        ("1.5", Fraction(3, 2)),
        (".5", Fraction(1, 2)),
        ("5.", Fraction(5)),
        ("250u", Fraction(1, 4000)),
        ("1n", Fraction(1, 10**9)),
        ("1k", Fraction(1000)),
        ("2Ki", Fraction(2048)),
        ("1.5Gi", Fraction(3 << 29)),
        ("3G", Fraction(3 * 10**9)),
        ("1E", Fraction(10**18)),
        ("1Ei", Fraction(1 << 60)),
        ("1E3", Fraction(1000)),
        ("12e-3", Fraction(12, 1000)),
        ("1e+2", Fraction(100)),
    ],
)
def test_a_quantity_has_its_value(text: str | int, value: Fraction) -> None:
    assert Quantity(text).value == value
    assert str(Quantity(text)) == str(text)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "Gi",
        "1 Gi",
        "2GB",
        "1g",
        "-1",
        "+1",
        "1,5",
        "0x10",
        "1e",
        "1_000",
        "9Ei",
        "1" * 40,
        True,
        "\uff11",
        "1\n",
    ],
)
def test_invalid_quantity_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="use a quantity"):
        Quantity(text)


def test_bytes_are_rounded_up() -> None:
    assert Quantity("1500m").nbytes == 2
    assert Quantity("2Gi").nbytes == 2 << 30


@given(st.integers(0, 10**12), st.sampled_from(["", "m", "k", "M", "Ki", "Mi"]))
def test_order_and_hash_follow_the_value(number: int, suffix: str) -> None:
    one, more = Quantity(f"{number}{suffix}"), Quantity(f"{number + 1}{suffix}")
    assert one < more
    assert one != more
    assert Quantity(f"{number}.0{suffix}") == one
    assert hash(Quantity(f"{number}.0{suffix}")) == hash(one)


@given(st.from_regex(PATTERN.replace("$", r"\Z"), fullmatch=True).filter(lambda text: len(text) <= 32))
def test_quantities_allowed_by_the_schema_parse_or_are_too_large(text: str) -> None:
    with contextlib.suppress(ValueError):
        assert 0 <= Quantity(text).value < 1 << 63
        return
    with pytest.raises(ValueError, match=r"use a quantity below 2\*\*63"):
        Quantity(text)
