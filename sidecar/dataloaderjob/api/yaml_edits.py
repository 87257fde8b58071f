"""Edits of values in a YAML or JSON text. They leave all other characters unchanged, including comments, order, quotes
and indentation. Pure.

A library that loads and dumps a file with its comments (ruamel.yaml 0.19) also reindents lists and moves some comments.
The diff of a small change then covers much of the file. Instead, this module uses the positions of PyYAML's nodes to
insert and remove lines, or entries between braces and brackets.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import SequenceMatcher
from typing import Any

import yaml

from dataloaderjob.api.documents import MERGE, Document, FilePart, is_alias, values
from dataloaderjob.core.errors import InputError

_WIDE = 1 << 20
_NO_ALIAS = "write out the part that an alias (*name) or a merge (<<) refers to"
_NO_PLACE = "the sidecar cannot be inserted without changing other values: write this part on separate lines"
Span = tuple[int, int]


class CannotEdit(InputError):
    """The text cannot be changed in place."""

    def __init__(self, line: int, why: str) -> None:
        """`line` is the line of the text, starting at 0."""
        super().__init__(f"line {line + 1}: {why}")
        self.line, self.why = line, why


@dataclass(slots=True)
class _Edits:
    """Replacements of parts of a text, by offset."""

    text: str
    newline: str
    is_json: bool
    made: list[tuple[int, int, str]] = field(default_factory=list)
    aliases: list[int] = field(default_factory=list)
    """Lines of aliases whose values change, starting at 0."""

    def applied(self) -> str:
        pieces: list[str] = []
        position = 0
        # Edits in one place stay in their order.
        for start, end, new in sorted(self.made, key=lambda edit: edit[:2]):
            pieces += (self.text[position:start], new)
            position = end
        return "".join((*pieces, self.text[position:]))

    def insert(self, position: int, block: str) -> None:
        """Inserts whole lines at the beginning of a line, or at the end of the text."""
        block = block.replace("\n", self.newline)
        if position == len(self.text) and not self.text.endswith("\n"):
            block = self.newline + block.removesuffix(self.newline)
        if self.made and self.made[-1][:2] == (position, position):
            block = self.made.pop()[2] + block
        self.made.append((position, position, block))

    def change(
        self, node: yaml.Node, before: Any, after: Any, key: yaml.Node | None, column: int, *, in_flow: bool = False
    ) -> None:  # fmt: skip
        """Changes a value. `key` is the node of its key in a mapping, or None in a list. `column` is the column of the
        mapping or list that contains the value. `in_flow`: the value is between braces or brackets."""
        if same(before, after):
            return
        stays = isinstance(node, yaml.CollectionNode) and node.value and after and type(before) is type(after)
        if is_alias(node):  # its anchor may get the same change
            self.aliases.append(node.start_mark.line)
        elif stays and isinstance(node, yaml.MappingNode) and node.flow_style:
            self._flow_mapping(node, before, after)
        elif stays and isinstance(node, yaml.SequenceNode) and node.flow_style:
            self._flow_sequence(node, before, after)
        elif stays and isinstance(node, yaml.MappingNode) and self._keeps_its_first_line(node, after):
            self._mapping(node, before, after)
        elif stays and isinstance(node, yaml.SequenceNode) and key is not None:
            self._sequence(node, before, after, key)
        elif in_flow or self.is_json:
            start = node.start_mark.index
            self.made.append((start, node.end_mark.index, self._in_flow(after, start)))
        else:
            self._replace(node, after, key, column)

    def _keeps_its_first_line(self, node: yaml.MappingNode, after: Mapping[str, Any]) -> bool:
        """Checks whether a mapping can be edited line by line. It cannot if its first key is removed and other text
        precedes that key on its line, such as the dash of a list entry."""
        first = node.value[0][0]
        return (
            first.value in after
            or first.tag == MERGE
            or not self.text[self._line(first.start_mark.index) : first.start_mark.index].strip()
        )

    def _mapping(self, node: yaml.MappingNode, before: Any, after: Mapping[str, Any]) -> None:
        column = node.value[0][0].start_mark.column
        entries = {key.value: (key, value) for key, value in node.value}
        end = self._after(node)
        for name, (key, value) in entries.items():
            if name in before and name not in after:
                self.made.append((self._line(key.start_mark.index), self._after(value), ""))
        changed = {
            name: value
            for name, value in after.items()
            if name not in before or not same(before[name], value)
        }
        for name in [name for name in entries if name in changed]:
            key, value = entries[name]
            self.change(value, before[name], after[name], key, column)
        for name in changed:
            if name not in entries:  # after the changes, which may add lines in the same place
                self.insert(end, _block({name: after[name]}, column))

    def _sequence(self, node: yaml.SequenceNode, before: Any, after: list[Any], key: yaml.Node) -> None:
        items = node.value
        dashes = [self._dash(item) for item in items]
        column = dashes[0] - self._line(dashes[0])
        first = self._line(dashes[0])
        if key.end_mark.line < items[0].start_mark.line:
            first = self._next_line(key.end_mark.index)  # above the comments of the first item
        for low, high, new in self._differences(items, before, after, column):
            for index in range(low, high):
                self.made.append((self._line(dashes[index]), self._after(items[index]), ""))
            if new:
                self.insert(self._after(items[low - 1]) if low else first, _block(new, column))

    def _differences(
        self, items: Sequence[yaml.Node], before: list[Any], after: list[Any], column: int | None
    ) -> Iterator[tuple[int, int, list[Any]]]:
        """Changes the items that remain. Yields the others: the first and last item to remove, and the new ones in
        their place. `column` is the column of the list's dashes; None for a list in brackets."""
        matcher = SequenceMatcher(
            None, [_identity(item) for item in before], [_identity(item) for item in after], autojunk=False
        )
        for what, low, high, new_low, new_high in matcher.get_opcodes():
            if what != "equal" and high - low != new_high - new_low:
                yield low, high, after[new_low:new_high]
                continue
            for index, wanted in zip(range(low, high), after[new_low:new_high], strict=True):
                self.change(items[index], before[index], wanted, None, column or 0, in_flow=column is None)

    def _flow_mapping(self, node: yaml.MappingNode, before: Any, after: Mapping[str, Any]) -> None:
        spans = [
            (key.start_mark.index, max(key.end_mark.index, value.end_mark.index)) for key, value in node.value
        ]
        names = [key.value for key, _ in node.value]
        removed = [n for n, name in enumerate(names) if name in before and name not in after]
        for (key, value), name in zip(node.value, names, strict=True):
            if name not in after or name not in before or same(before[name], after[name]):
                continue
            if value.start_mark.index < value.end_mark.index:
                self.change(value, before[name], after[name], None, 0, in_flow=True)
            else:
                colon = "" if ":" in self.text[key.end_mark.index : value.end_mark.index] else ":"
                end = max(key.end_mark.index, value.end_mark.index)
                self.made.append((end, end, f"{colon} {self._in_flow(after[name], end)}"))
        new = {
            name: value for name, value in after.items()
            if name not in names and (name not in before or not same(before[name], value))
        }  # fmt: skip
        entries = [self._entry(name, value, spans[0][0]) for name, value in new.items()]
        self._splice(node, spans, removed, {len(spans): entries} if new else {})

    def _flow_sequence(self, node: yaml.SequenceNode, before: Any, after: list[Any]) -> None:
        spans = [(item.start_mark.index, item.end_mark.index) for item in node.value]
        removed: list[int] = []
        added: dict[int, list[str]] = {}
        for low, high, new in self._differences(node.value, before, after, None):
            removed += range(low, high)
            if new:
                added[low] = [self._in_flow(item, spans[0][0]) for item in new]
        self._splice(node, spans, removed, added)

    def _splice(
        self, node: yaml.CollectionNode, spans: Sequence[Span], removed: Sequence[int],
        added: Mapping[int, Sequence[str]],
    ) -> None:  # fmt: skip
        """Removes entries between braces or brackets, and inserts others in front of the entry with a number."""
        close = node.end_mark.index - 1
        kept = [n for n in range(len(spans)) if n not in removed]
        for n in (n for n in removed if n - 1 not in removed):
            following = next((k for k in kept if k > n), len(spans))
            if n:  # with the comma in front
                self.made.append((spans[n - 1][1], spans[following - 1][1], ""))
            else:
                self.made.append((spans[0][0], spans[following][0] if following < len(spans) else close, ""))
        first = spans[0][0]
        indent = self.text[self._line(first) : first]
        own_lines = "\n" in self.text[node.start_mark.index : first] and not indent.strip()
        separator = f",{self.newline}{indent}" if own_lines else ", "
        for place, texts in added.items():
            if before := [n for n in kept if n < place]:
                position = spans[before[-1]][1]
                self.made.append((position, position, "".join(separator + text for text in texts)))
            elif kept:
                position = spans[kept[0]][0]
                self.made.append((position, position, "".join(text + separator for text in texts)))
            else:
                self.made.append((close, close, separator.join(texts)))

    def _replace(self, node: yaml.Node, after: Any, key: yaml.Node | None, column: int) -> None:
        start, end = node.start_mark.index, node.end_mark.index
        has_lines = _is_block(node) or getattr(node, "style", None) in ("|", ">")
        if key is None:
            if has_lines:
                self.made.append((start, self._after(node), _flat(after) + self.newline))
            else:
                self.made.append((start, end, _flat(after)))
            return
        colon = self.text.index(":", key.end_mark.index) + 1
        line = self._next_line(colon)
        if _is_block(node):
            self.made.append((line, self._after(node), ""))
        elif has_lines:
            self.made.append((colon, self._after(node), self.newline))
            line = self._after(node)
        elif end > start:
            self.made.append((len(self.text[:start].rstrip(" \t")), end, ""))
            line = self._next_line(end)
        if after and isinstance(after, dict | list):
            self.insert(line, _block(after, column + 2 if isinstance(after, dict) else column))
        else:
            self.made.append((colon, colon, f" {_flat(after)}"))

    def _in_flow(self, value: Any, at: int) -> str:
        """Returns a value as it may stand between braces or brackets, or in a JSON text. `at`: an offset on a line that
        has the value's indentation."""
        if not self.is_json:
            return _dumped([value], flow=True).strip()[1:-1]
        return self._json(value, at)

    def _entry(self, name: str, value: Any, at: int) -> str:
        if not self.is_json:
            return _dumped({name: value}, flow=True).strip()[1:-1]
        return f"{json.dumps(name, ensure_ascii=False)}: {self._json(value, at)}"

    def _json(self, value: Any, at: int) -> str:
        step = re.search(r"\n([ \t]+)", self.text)
        text = json.dumps(value, indent=step.group(1) if step else None, ensure_ascii=False)
        line = self.text[self._line(at) : at]
        indent = line[: len(line) - len(line.lstrip())]
        return text.replace("\n", self.newline + indent)

    def _dash(self, item: yaml.Node) -> int:
        """Returns the offset of a list entry's dash. A comment may stand between the dash and the entry."""
        end = item.start_mark.index
        line = self._line(end)
        if self.text[line:end].rstrip().endswith("-"):
            return self.text.rindex("-", line, end)
        while line:
            end, line = line, self._line(line - 1)
            if self.text[line:end].lstrip().startswith("-"):
                return self.text.index("-", line)
        return item.start_mark.index

    def _after(self, node: yaml.Node) -> int:
        """Returns the offset of the line after a value."""
        while _is_block(node):
            node = node.value[-1][1] if isinstance(node, yaml.MappingNode) else node.value[-1]
        end = node.end_mark.index
        line = self._line(end)
        return line if line and not self.text[line:end].strip() else self._next_line(end)

    def _line(self, index: int) -> int:
        return self.text.rfind("\n", 0, index) + 1

    def _next_line(self, index: int) -> int:
        return self.text.find("\n", index) + 1 or len(self.text)


def edited(part: FilePart, documents: Sequence[Document], wanted: Sequence[Any]) -> str:
    """Returns the part's text with changed documents. `documents` are those of the part, and `wanted` their new values.

    Raises CannotEdit if the edited text would have other values.
    """
    edits = _Edits(part.text, "\r\n" if "\r\n" in part.text else "\n", part.is_json)
    for document, after in zip(documents, wanted, strict=True):
        if document.node is None:
            raise TypeError("a document that was not parsed has no positions to edit")
        edits.change(document.node, document.data, after, None, 0)
    made = edits.applied()
    try:
        found = values(FilePart(start=part.start, text=made, is_json=part.is_json))
    except (yaml.YAMLError, ValueError):
        found = []
    if not same(found, list(wanted)):
        at = min((start for start, _, _ in edits.made), default=0)
        line, why = (
            (edits.aliases[0], _NO_ALIAS) if edits.aliases else (part.text.count("\n", 0, at), _NO_PLACE)
        )
        if not edits.aliases and re.search(r"[&*]\w", part.text):
            why = _NO_ALIAS
        raise CannotEdit(line, why)
    return made


def _is_block(node: yaml.Node) -> bool:
    """Checks whether a node is a mapping or a list in block style."""
    return (
        isinstance(node, yaml.CollectionNode)
        and not node.flow_style
        and bool(node.value)
        and not is_alias(node)
    )


def _identity(item: Any) -> str:
    """Returns a text that is equal for two versions of the same list entry."""
    if isinstance(item, Mapping) and (found := [name for name in ("name", "mountPath") if name in item]):
        return json.dumps([item[name] for name in found], default=str)
    return json.dumps(item, sort_keys=True, default=str)


def same(one: Any, other: Any) -> bool:
    """Compares values as JSON does: true is not 1."""
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(same(value, other[name]) for name, value in one.items())
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(same, one, other))
    return type(one) is type(other) and (one == other or one != one)


class _Dumper(yaml.SafeDumper):
    """A dumper that quotes every string that another reader could take for another type. For example, kubectl reads 1e5
    as a number, and PyYAML reads it as a string."""

    def ignore_aliases(self, data: Any) -> bool:  # noqa: ARG002  equal parts are written out
        return True


def _string(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    style = "'" if _AMBIGUOUS.fullmatch(text) else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_AMBIGUOUS = re.compile(r"[-+]?\.?[0-9][-+.0-9a-fA-FxoXOeE_:]*|[yYnN]|[-+]?\.(inf|nan)", re.IGNORECASE)
_Dumper.add_representer(str, _string)


def _dumped(value: Any, *, flow: bool) -> str:
    return str(
        yaml.dump(
            value, Dumper=_Dumper, default_flow_style=flow, sort_keys=False, width=_WIDE, allow_unicode=True
        )
    )


def _flat(value: Any) -> str:
    """Returns a value on one line."""
    return _dumped(value, flow=True).removesuffix("\n").removesuffix("\n...")


def _block(value: Any, column: int) -> str:
    """Returns the lines of a value, indented."""
    lines = _dumped(value, flow=False).splitlines(keepends=True)
    return "".join(f"{' ' * column}{line}" if line.strip() else line for line in lines)
