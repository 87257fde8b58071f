"""Changes of a YAML text that leave every other character as it is."""

from __future__ import annotations

import copy
from typing import Any

import hypothesis.strategies as st
import pytest
import yaml
from hypothesis import given

from dataloaderjob.api.documents import Document, FilePart, Loader, parsed, parts
from dataloaderjob.api.yaml_edits import CannotEdit, edited

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


def documents_of(text: str) -> tuple[FilePart, list[Document]]:
    (found,) = parsed(text, "")
    return found


def change(text: str, *wanted: Any) -> str:
    part, found = documents_of(text)
    return text[: part.start] + edited(part, found, wanted) + text[part.start + len(part.text) :]


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
        put(("list", 1, "value"), {"flow": "1", "b": True}), '{flow: "1"}', '{flow: "1", b: true}',
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
        ("one: &x\n  a: 1\ntwo: *x\n", {"one": {"a": 2}, "two": {"a": 1}}, 2),
        ("one: &x\n  a: 1\ntwo: *x\n", {"one": {"a": 1}, "two": {"a": 2}}, 3),
        ("one: &x [1]\ntwo:\n- 1\n- *x\n", {"one": [1], "two": [1, [2]]}, 4),
        ("one: &x [1]\ntwo: [1, *x]\n", {"one": [1], "two": [1, [2]]}, 2),
        ("b: &b {a: 1, c: 2}\nm:\n  <<: *b\n", {"b": {"a": 1, "c": 2}, "m": {"a": 1}}, 1),
    ],
    ids=["its anchor changes", "it changes", "in a list", "in brackets", "a merged key is removed"],
)
def test_alias_that_cannot_follow_is_refused_with_its_line(text: str, wanted: Any, line: int) -> None:
    with pytest.raises(CannotEdit, match=f"^line {line}: write out the part that an alias"):
        change(text, wanted)


ALIASED = {
    "as the last value": (
        "r:\n  a: &x\n    b: 1\n  c: *x\n",
        ("r", "d"),
        "r:\n  a: &x\n    b: 1\n  c: *x\n  d: new\n",
    ),
    "as the last item": ("k: &x\n  b: 1\nr:\n- 1\n- *x\n", ("r", 2), "k: &x\n  b: 1\nr:\n- 1\n- *x\n- new\n"),
    "an anchor of a list": ("r: &x\n  - 1\nk: 2\n", ("r", 1), "r: &x\n  - 1\n  - new\nk: 2\n"),
    "an anchor of an item": (
        "r:\n  - &x\n    b: 1\nk: *x\n",
        ("r", 1),
        "r:\n  - &x\n    b: 1\n  - new\nk: *x\n",
    ),
    "a comment after a dash": ("r:\n  - # one\n    b: 1\n", ("r", 1), "r:\n  - # one\n    b: 1\n  - new\n"),
    "an anchor in braces": ("r: &x {b: 1}\nk: [*x]\n", ("k", 1), "r: &x {b: 1}\nk: [*x, new]\n"),
}


@pytest.mark.parametrize(("text", "path", "expected"), ALIASED.values(), ids=ALIASED)
def test_addition_beside_anchors_and_aliases_keeps_them(
    text: str, path: tuple[Any, Any], expected: str
) -> None:
    wanted = copy.deepcopy(yaml.safe_load(text))
    owner = wanted[path[0]]
    if isinstance(owner, list):
        owner.append("new")
    else:
        owner[path[1]] = "new"
    assert change(text, wanted) == expected


FLOW = {
    "braces": ("{a: 22:30, b: 1}", lambda d: {**d, "z": "+.5"}, "{a: 22:30, b: 1, z: '+.5'}"),
    "a trailing comma": ("{a: 0o17,}", lambda d: {**d, "z": 1}, "{a: 0o17, z: 1,}"),
    "empty braces": ("m: {a: {}, b: 1e1}", lambda d: {"m": {**d["m"], "a": {"z": 1}}}, "m: {a: {z: 1}, b: 1e1}"),
    "no value": ("m: {a, b: 1}", lambda d: {"m": {**d["m"], "a": 2}}, "m: {a: 2, b: 1}"),
    "brackets, in front": ("l: [\"+.5\", '1']", lambda d: {"l": ["z", *d["l"]]}, "l: [z, \"+.5\", '1']"),
    "brackets, at the end": ("l: [a]  # c", lambda d: {"l": ["a", "b, c"]}, "l: [a, 'b, c']  # c"),
    "comments between": (
        "l: [\n  a,  # one\n  b  # two\n]\n", lambda d: {"l": ["a", "z", "b"]},
        "l: [\n  a,\n  z,  # one\n  b  # two\n]\n",
    ),
    "the first fewer": ("l: [a, 22:22, b]", lambda d: {"l": d["l"][1:]}, "l: [22:22, b]"),
    "the last fewer": ("l: [a, 22:22, b]", lambda d: {"l": d["l"][:2]}, "l: [a, 22:22]"),
    "all but one": ("m: {a: 1, b: 12:30, c: 3,}", lambda d: {"m": {"b": d["m"]["b"]}}, "m: {b: 12:30,}"),
    "others": ("m: {a: 1, b: 2}", lambda d: {"m": {"c": 3}}, "m: {c: 3}"),
    "inner": ("p: {l: [{name: a}, {name: b, v: 0b1}]}", lambda d: {"p": {"l": [{"name": "a", "z": 1}, d["p"]["l"][1]]}},
              "p: {l: [{name: a, z: 1}, {name: b, v: 0b1}]}"),
    "JSON": ('{"a": 1e1, "b": ["\\ud83d\\ude80"]}', lambda d: {**d, "z": {"x": "1"}},
             '{"a": 1e1, "b": ["\\ud83d\\ude80"], "z": {"x": "1"}}'),
    "JSON of several lines": ('{\n\t"a": 1,\n\t"b": []\n}\n', lambda d: {**d, "b": [{"x": "1"}]},
             '{\n\t"a": 1,\n\t"b": [\n\t\t{\n\t\t\t"x": "1"\n\t\t}\n\t]\n}\n'),
}  # fmt: skip


@pytest.mark.parametrize(("text", "change_of", "expected"), FLOW.values(), ids=FLOW)
def test_change_between_braces_keeps_all_other_characters(text: str, change_of: Any, expected: str) -> None:
    (document,) = documents_of(text)[1]
    assert change(text, change_of(document.data)) == expected


def test_tabs_between_words_are_read_and_kept() -> None:
    text = "a:\t1\t# one\nb: [x]\t\n"
    assert change(text, {"a": 1, "b": ["x", "z"]}) == "a:\t1\t# one\nb: [x, z]\t\n"


def test_merged_key_is_overridden_in_its_own_mapping() -> None:
    text = "b: &b {a: 1}\nm:\n  <<: *b\n  d: 4\n"
    assert change(text, {"b": {"a": 1}, "m": {"a": 9, "d": 4}}) == text + "  a: 9\n"


@pytest.mark.parametrize(
    "text", ["1e5", "12e3", "0o17", "0x1F", "1_000", "y", "No", "on", ".5", "-.5", "12:30:45", "~", ""]
)
def test_string_that_another_reader_takes_for_a_number_is_quoted(text: str) -> None:
    made = change("a: 1\n", {"a": 1, "b": text})
    assert made.splitlines()[1] == f"b: '{text}'"


def test_json_values_in_a_row_are_separate_parts() -> None:
    text = '{"a": 1}\n\n{"b": 2} '
    assert [text[part.start :][: len(part.text)] for part in parts(text)] == ['{"a": 1}', '{"b": 2}']
    assert len(parts("{a: 1}\n---\n{b: 2}\n")) == 1


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


def is_spread_over(text: str, longer: str) -> bool:
    """Whether all characters of a text occur in a longer one, in their order."""
    left = iter(longer)
    return all(character in left for character in text)


@given(before=st.dictionaries(names, values, min_size=1), more=values, data=st.data())
def test_additions_between_braces_only_insert_characters(before: Any, more: Any, data: st.DataObject) -> None:
    text = yaml.safe_dump(before, default_flow_style=True, width=data.draw(st.sampled_from([10, 1000])))
    wanted = copy.deepcopy(before)
    owners = [wanted, *(value for value in wanted.values() if value and isinstance(value, dict | list))]
    owner = data.draw(st.sampled_from(owners))
    if isinstance(owner, list):
        owner.append(more)
    else:
        owner["a new key"] = more
    made = change(text, wanted)
    assert is_spread_over(text.rstrip("\n"), made)
