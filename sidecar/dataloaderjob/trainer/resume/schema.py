"""The schema of a loader's state: the fields that the module `state` lists, and the valid values of each field. This
module is pure.

A state comes from a checkpoint, which may be damaged or written by someone else. `validate` therefore checks the whole
state when it is loaded. The code that resumes from it can rely on its types and ranges. Unknown fields are ignored,
because some frameworks add fields.
"""

from __future__ import annotations

import base64
import reprlib
from collections.abc import Callable, Mapping
from typing import Any

from dataloaderjob.core.errors import InputError

Check = Callable[[Any, str], None]
"""A function that raises InputError, with the path of the field, unless a value is valid for the field."""
_NATURAL = 1 << 53
"""Limit for counts and epochs. JSON parsers preserve whole numbers up to this limit."""
_WORD = 1 << 64
_MAX_TEXT = 60
CheckGenerator = Callable[[str, str], None]
"""A function of (name, text) that raises an exception unless the generator with this name accepts the state in the
text."""


def validate(state: Mapping[str, Any], *, takes: CheckGenerator, is_stream: bool) -> None:
    """Raises InputError, with the path of the first invalid field, unless one of our loaders may have made the state.

    `takes` checks the state of one generator. With `is_stream`, the field `sampler` holds the slots of an
    IterableDataset.
    """
    named = _named(takes)
    fields = {**_FIELDS, "generators": named, "now": _or_none(named), "drawn": _or_none(_pairs_of(takes))}
    if is_stream:
        fields["sampler"] = _or_none(_fields(_SLOTS, {"rank", "slots", "digests", "ends"}))
    _fields(fields, {"batches"})(state, "")


def refuse(path: str, needed: str, found: Any) -> InputError:
    """Returns the error for an invalid field."""
    shown = reprlib.repr(found)  # works even if the value is nested too deeply for repr
    shown = shown if len(shown) <= _MAX_TEXT else f"{shown[: _MAX_TEXT - 3]}..."
    return InputError(
        f"the state's {path or 'content'} must be {needed}, but is {shown}: load the result of state_dict()"
    )


def _fields(known: Mapping[str, Check], required: set[str]) -> Check:
    def check(value: Any, path: str) -> None:
        if not isinstance(value, Mapping) or not all(type(name) is str for name in value):
            raise refuse(path, "a dict with names as keys", value)
        for name in sorted(required - value.keys()):
            raise refuse(_within(path, name), "present", None)
        for name, one in known.items():
            if name in value:
                one(value[name], _within(path, name))

    return check


def _within(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _whole(least: int, most: int) -> Check:
    def check(value: Any, path: str) -> None:
        if type(value) is not int or not least <= value < most:
            raise refuse(path, f"a whole number from {least} to {most - 1}", value)

    return check


def _of_type(kind: type, needed: str) -> Check:
    def check(value: Any, path: str) -> None:
        if type(value) is not kind:
            raise refuse(path, needed, value)

    return check


def _or_none(inner: Check) -> Check:
    def check(value: Any, path: str) -> None:
        if value is not None:
            inner(value, path)

    return check


def _items(inner: Check) -> Check:
    def check(value: Any, path: str) -> None:
        if type(value) not in (list, tuple):
            raise refuse(path, "a list", value)
        for number, one in enumerate(value):
            inner(one, f"{path}[{number}]")

    return check


def _parts(*inner: Check) -> Check:
    """Returns the check for a list with one item for each check in `inner`."""

    def check(value: Any, path: str) -> None:
        if type(value) not in (list, tuple) or len(value) != len(inner):
            raise refuse(path, f"a list of {len(inner)}", value)
        for number, (one, part) in enumerate(zip(inner, value, strict=True)):
            one(part, f"{path}[{number}]")

    return check


def _named(takes: CheckGenerator) -> Check:
    """Returns the check for a dict of generators' states by name."""

    def check(value: Any, path: str) -> None:
        if not isinstance(value, Mapping):
            raise refuse(path, "a dict", value)
        for name, one in value.items():
            _text(name, f"{path}'s names")
            _of_generator(takes, name, one, f"{path}[{name!r}]")

    return check


def _pairs_of(takes: CheckGenerator) -> Check:
    """Returns the check for a list of [name, state] pairs."""

    def check(value: Any, path: str) -> None:
        _items(_parts(_text, _text))(value, path)
        for name, one in value:
            _of_generator(takes, name, one, f"{path}[{name!r}]")

    return check


def _of_generator(takes: CheckGenerator, name: str, value: Any, path: str) -> None:
    _text(value, path)
    try:
        takes(name, value)
    except Exception as exc:  # numpy, torch and Python raise many types of exceptions
        raise refuse(path, f"the state of a generator ({type(exc).__name__}: {exc})", value) from exc


def _base64(value: Any, path: str) -> None:
    _text(value, path)
    try:
        base64.b64decode(value, validate=True)
    except ValueError as exc:
        raise refuse(path, "base64", value) from exc


def _hex_word(value: Any, path: str) -> None:
    _text(value, path)
    if len(value) != 16 or not set(value) <= set("0123456789abcdef"):
        raise refuse(path, "16 hexadecimal digits", value)


_text = _of_type(str, "text")
_integer = _of_type(int, "a whole number")
_flag = _of_type(bool, "true or false")
_natural = _whole(0, _NATURAL)
_number = _whole(-_NATURAL, _NATURAL)
_word = _whole(0, _WORD)
_seed = _whole(-_WORD, _WORD)
_LOADER: dict[str, Check] = {
    "batch_size": _or_none(_natural), "ranks": _or_none(_natural), "sampler": _or_none(_text),
    "seeds": _items(_integer), "generator=": _text, "drop_last": _flag, "persistent_workers": _flag,
    "collate_fn": _or_none(_text),
    "dataset_id": _or_none(_text), "dataset": _or_none(_text), "length": _or_none(_natural), "slots": _natural,
    "world": _natural, "stage": _flag, "tail": _or_none(_text), "probes": _or_none(_items(_or_none(_text))),
}  # fmt: skip
_SLOTS: dict[str, Check] = {
    "rank": _number,
    "slots": _items(_or_none(_parts(_natural, _base64))),
    "digests": _items(_or_none(_parts(_natural, _hex_word))),
    "ends": _items(_parts(_natural, _natural)),
    "taken": _items(_natural),
}
_FIELDS: dict[str, Check] = {
    "epoch": _or_none(_number), "iterations": _natural, "batches": _natural, "samples": _or_none(_natural),
    "finished": _flag, "base_seed": _or_none(_seed), "resets": _or_none(_natural), "draws": _whole(0, 1 << 32),
    "seen": _or_none(_items(_integer)), "rank": _or_none(_natural),
    "digest": _or_none(_parts(_natural, _number, _word, _word)), "loader": _or_none(_fields(_LOADER, set())),
}  # fmt: skip
