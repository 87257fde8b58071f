"""Changes of a YAML text that leave every other character as it is."""

from __future__ import annotations

import copy
import json
from typing import Any

import hypothesis.strategies as st
import pytest
import yaml
from hypothesis import given

from dataloaderjob.api.load import Loader
from dataloaderjob.api.yaml_edits import CannotEdit, edited, edited_json

TEXT = """\
# first
a: 1   # one
list:
  # before x
  - name: x  # the x
    value: |
      # text
  # before y
  - name: y
    value: {flow: "1"}   # kept
  # after y
empty: []  # none
last: 'quoted'
# end
"""
DATA: dict[str, Any] = {
    "a": 1,
    "list": [{"name": "x", "value": "# text\n"}, {"name": "y", "value": {"flow": "1"}}],
    "empty": [],
    "last": "quoted",
}


def change(text: str, *wanted: Any) -> str:
    return edited(text, wanted, Loader)


def put(path: tuple[Any, ...], value: Any) -> dict[str, Any]:
    """The data with another value at a path."""
    found = copy.deepcopy(DATA)
    part: Any = found
    for name in path[:-1]:
        part = part[name]
    part[path[-1]] = value
    return found


def with_list(*items: Any) -> dict[str, Any]:
    return put(("list",), list(items))


X, Y, N = DATA["list"][0], DATA["list"][1], {"name": "z", "value": 1}
CASES: dict[str, tuple[dict[str, Any], str, str]] = {
    "nothing": (DATA, "", ""),
    "a scalar": (put(("a",), 2), "a: 1 ", "a: 2 "),
    "a key at the end": ({**DATA, "new": {"b": [1]}}, "'quoted'\n", "'quoted'\nnew:\n  b:\n  - 1\n"),
    "an empty list is filled": (put(("empty",), ["z"]), "empty: []  # none\n", "empty:  # none\n- z\n"),
    "an entry in front, above the comments": (
        with_list(N, X, Y), "list:\n", "list:\n  - name: z\n    value: 1\n",
    ),
    "an entry at the end, before the comments": (
        with_list(X, Y, N), "# kept\n", "# kept\n  - name: z\n    value: 1\n",
    ),
    "an entry between": (
        with_list(X, N, Y), "      # text\n", "      # text\n  - name: z\n    value: 1\n",
    ),
    "an entry fewer": (
        with_list(X), '  - name: y\n    value: {flow: "1"}   # kept\n', "",
    ),
    "a field in an entry": (
        with_list(X, {**Y, "more": "1e5"}), "# kept\n", "# kept\n    more: '1e5'\n",
    ),
    "a flow mapping": (
        put(("list", 1, "value"), {"flow": "1", "b": True}), ' {flow: "1"}   # kept\n',
        "   # kept\n      flow: '1'\n      b: true\n",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("wanted", "old", "new"), CASES.values(), ids=CASES)
@pytest.mark.parametrize("newline", ["\n", "\r\n"], ids=["LF", "CRLF"])
def test_change_touches_its_own_lines_alone(wanted: Any, old: str, new: str, newline: str) -> None:
    assert TEXT.count(old) == 1 or not old
    text, expected = TEXT, TEXT.replace(old, new) if old else TEXT
    assert change(text.replace("\n", newline), wanted) == expected.replace("\n", newline)


def test_text_without_a_final_newline_stays_without_one() -> None:
    assert change("a: 1", {"a": 1, "b": 2}) == "a: 1\nb: 2"


def test_each_document_is_changed_and_empty_ones_stay() -> None:
    text = "---\n# nothing\n---\na: 1\n---\n\n---\n{b: 2}\n"
    assert change(text, {"a": 3}, {"b": 2}) == text.replace("a: 1", "a: 3")


def test_alias_whose_anchor_changes_alike_is_kept() -> None:
    text = "one: &x\n  a: 1\ntwo: *x\n"
    assert change(text, {"one": {"a": 2}, "two": {"a": 2}}) == text.replace("1", "2")


@pytest.mark.parametrize(
    ("text", "wanted", "line"),
    [
        ("one: &x\n  a: 1\ntwo: *x\n", {"one": {"a": 2}, "two": {"a": 1}}, ""),
        ("one: &x\n  a: 1\ntwo: *x\n", {"one": {"a": 1}, "two": {"a": 2}}, "line 3: "),
        ("one: &x [1]\ntwo:\n- 1\n- *x\n", {"one": [1], "two": [2, [1]]}, "line 3: "),
        ("b: &b {a: 1, c: 2}\nm:\n  <<: *b\n", {"b": {"a": 1, "c": 2}, "m": {"a": 1}}, ""),
    ],
    ids=["its anchor changes", "it changes", "in a list", "a merged key is removed"],
)
def test_alias_that_cannot_follow_is_refused_with_its_line(text: str, wanted: Any, line: str) -> None:
    with pytest.raises(CannotEdit, match=f"^{line}write out the part that an alias"):
        change(text, wanted)


def test_merged_key_is_overridden_in_its_own_mapping() -> None:
    text = "b: &b {a: 1}\nm:\n  <<: *b\n  d: 4\n"
    assert change(text, {"b": {"a": 1}, "m": {"a": 9, "d": 4}}) == text + "  a: 9\n"


@pytest.mark.parametrize(
    "text", ["1e5", "12e3", "0o17", "0x1F", "1_000", "y", "No", "on", ".5", "12:30:45", "~", ""]
)
def test_string_that_another_reader_takes_for_a_number_is_quoted(text: str) -> None:
    made = change("a: 1\n", {"a": 1, "b": text})
    assert made.splitlines()[1] == f"b: '{text}'"


def test_json_keeps_its_indentation() -> None:
    text = json.dumps({"a": [1, {"b": 2}]}, indent=3)
    assert edited_json(text, {"a": [1, {"b": 3}]}) == text.replace("2", "3")
    assert edited_json('{"a": 1}\n', {"a": 2}) == '{"a": 2}\n'


names = st.sampled_from(["name", "a", "b", "mountPath", "c d", "1"])
scalars = st.one_of(st.none(), st.booleans(), st.integers(-9, 9), st.text("ab1: #-\n'\"{[&*é", max_size=6))
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names, inner, max_size=3),
    max_leaves=12,
)
documents = st.dictionaries(names, values, min_size=1, max_size=4)


@given(
    before=documents,
    after=documents,
    flow=st.sampled_from([None, False, True]),
    indent=st.sampled_from([2, 4]),
)
def test_any_change_of_any_document_gives_the_wanted_values(
    before: Any, after: Any, flow: bool | None, indent: int
) -> None:
    text = yaml.safe_dump(before, default_flow_style=flow, indent=indent, allow_unicode=True)
    assert list(yaml.load_all(change(text, after), Loader)) == [after]


comments = st.text("ab #:-", max_size=8).map(lambda text: f"  # {text.strip()}")


@given(before=st.dictionaries(names, values, min_size=1), more=values, data=st.data())
def test_additions_keep_every_line_and_every_comment(before: Any, more: Any, data: st.DataObject) -> None:
    document = {**before, "last": 1}
    text = yaml.safe_dump(document, sort_keys=False)
    for number, line in enumerate(text.splitlines()):
        if line.endswith((": 1", ": true", "- -1")):
            lines = text.splitlines()
            lines[number] += data.draw(comments)
            with_comment = "\n".join(lines) + "\n"
            if yaml.safe_load(with_comment) == document:  # otherwise the line lies within a string
                text = with_comment
    assert change(text, {**document, "more": more}).startswith(text)
