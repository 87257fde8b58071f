"""Edits of values in a YAML text. They leave all other characters unchanged, including comments, order, quotes and
indentation. Pure.

A library that loads and dumps a file with its comments (ruamel.yaml 0.19) also reindents lists and moves some comments.
The diff of a small change then covers much of the file. Instead, this module uses the positions of PyYAML's nodes to
insert and remove individual lines.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import SequenceMatcher
from typing import Any

import yaml

from dataloaderjob.core.errors import InputError

_WIDE = 1 << 20
_NO_ALIAS = "write out the part that an alias (*name) or a merge (<<) refers to"


class CannotEdit(InputError):
    """The text cannot be changed in place; the message states where and why."""


@dataclass(slots=True)
class _Edits:
    """Replacements of parts of a text, by offset."""

    text: str
    newline: str
    made: list[tuple[int, int, str]] = field(default_factory=list)
    aliases: list[int] = field(default_factory=list)
    """Lines of aliases whose values change."""

    def applied(self) -> str:
        text = self.text
        for start, end, new in _backwards(self.made):
            text = text[:start] + new + text[end:]
        return text

    def insert(self, position: int, block: str) -> None:
        """Inserts whole lines at the beginning of a line, or at the end of the text."""
        block = block.replace("\n", self.newline)
        if position == len(self.text) and not self.text.endswith("\n"):
            block = self.newline + block.removesuffix(self.newline)
        if self.made and self.made[-1][:2] == (position, position):
            block = self.made.pop()[2] + block
        self.made.append((position, position, block))

    def change(self, node: yaml.Node, before: Any, after: Any, key: yaml.Node | None, column: int) -> None:
        """Changes a value. `key` is the node of its key in a mapping, or None in a list. `column` is the column of the
        mapping or list that contains the value."""
        if _same(before, after):
            return
        lines = _is_block(node) and bool(after)
        if lines and isinstance(node, yaml.MappingNode) and isinstance(after, Mapping):
            if self._keeps_its_first_line(node, after):
                self._mapping(node, before, after)
                return
        elif lines and isinstance(node, yaml.SequenceNode) and isinstance(after, list) and key is not None:
            self._sequence(node, before, after, key)
            return
        self._replace(node, after, key, column)

    def _keeps_its_first_line(self, node: yaml.MappingNode, after: Mapping[str, Any]) -> bool:
        """Checks whether a mapping can be edited line by line. It cannot if its first key is removed and other text
        precedes that key on its line, such as the dash of a list entry."""
        first = node.value[0][0]
        return (
            first.value in after
            or not self.text[self._line(first.start_mark.index) : first.start_mark.index].strip()
        )

    def _mapping(self, node: yaml.MappingNode, before: Any, after: Mapping[str, Any]) -> None:
        column = node.value[0][0].start_mark.column
        entries = {key.value: (key, value) for key, value in node.value}
        end = self._after(node)
        for name, (key, value) in entries.items():
            if name in before and name not in after:
                self.made.append((self._line(key.start_mark.index), self._after(value, key), ""))
        changed = {
            name: value
            for name, value in after.items()
            if name not in before or not _same(before[name], value)
        }
        for name in [name for name in entries if name in changed]:
            key, value = entries[name]
            if value.start_mark.index < key.end_mark.index:  # an alias: its anchor may get the same change
                self.aliases.append(key.start_mark.line + 1)
            else:
                self.change(value, before[name], after[name], key, column)
        for name in changed:
            if name not in entries:  # after the changes, which may add lines in the same place
                self.insert(end, _block({name: after[name]}, column))

    def _sequence(self, node: yaml.SequenceNode, before: Any, after: list[Any], key: yaml.Node) -> None:
        column, items = node.start_mark.column, node.value
        for item in items:
            self._no_alias(item, node.start_mark.index, node)
        first = self._line(items[0].start_mark.index)
        if key.end_mark.line < items[0].start_mark.line:
            first = self._next_line(key.end_mark.index)  # above the comments of the first item
        matcher = SequenceMatcher(
            None, [_identity(x) for x in before], [_identity(x) for x in after], autojunk=False
        )
        for what, low, high, new_low, new_high in matcher.get_opcodes():
            if what == "equal" or high - low == new_high - new_low:
                for index, wanted in zip(range(low, high), after[new_low:new_high], strict=True):
                    self.change(items[index], before[index], wanted, None, column)
                continue
            for index in range(low, high):
                start = self._line(items[index].start_mark.index)
                self.made.append((start, self._after(items[index]), ""))
            if new := after[new_low:new_high]:
                self.insert(self._after(items[low - 1]) if low else first, _block(new, column))

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

    def _no_alias(self, node: yaml.Node, start: int, owner: yaml.Node) -> None:
        """Raises CannotEdit if a node's text lies before `start`, outside its owner. The owner then refers to the node
        by an alias."""
        if node.start_mark.index < start:
            raise CannotEdit(f"line {owner.start_mark.line + 1}: {_NO_ALIAS}")

    def _after(self, node: yaml.Node, key: yaml.Node | None = None) -> int:
        """Returns the offset of the line after a value. `key` is the node of its key, if it has one. The value may then
        be an alias."""
        while _is_block(node):
            if isinstance(node, yaml.MappingNode):
                key, node = node.value[-1]
            else:
                self._no_alias(node.value[-1], node.start_mark.index, node)
                key, node = None, node.value[-1]
        if key is not None and node.start_mark.index < key.end_mark.index:  # an alias
            return self._next_line(key.end_mark.index)
        end = node.end_mark.index
        line = self._line(end)
        return line if line and not self.text[line:end].strip() else self._next_line(end)

    def _line(self, index: int) -> int:
        return self.text.rfind("\n", 0, index) + 1

    def _next_line(self, index: int) -> int:
        return self.text.find("\n", index) + 1 or len(self.text)


def _backwards(edits: Sequence[tuple[int, int, str]]) -> Iterator[tuple[int, int, str]]:
    """Yields edits from the end of the text to its beginning. Of several edits in one place, the last one comes
    first."""
    yield from reversed(sorted(edits, key=lambda edit: edit[:2]))  # noqa: C413  equal ones are reversed too


def edited(text: str, wanted: Sequence[Any], loader: type[yaml.SafeLoader]) -> str:
    """Returns the text with changed documents. `wanted` holds the new value of each document that is not empty.

    Raises CannotEdit if the edited text would have other values.
    """
    edits = _Edits(text, "\r\n" if "\r\n" in text else "\n")
    for (node, before), after in zip(_documents(text, loader), wanted, strict=True):
        edits.change(node, before, after, None, 0)
    made = edits.applied()
    try:
        found = [value for _, value in _documents(made, loader)]
    except yaml.YAMLError:
        found = []
    if not _same(found, list(wanted)):
        line = f"line {edits.aliases[0]}: " if edits.aliases else ""
        raise CannotEdit(f"{line}{_NO_ALIAS}")
    return made


def edited_json(text: str, wanted: Any) -> str:
    """Returns a JSON text with a new value and the same indentation."""
    lines = text.splitlines()
    indent = len(lines[1]) - len(lines[1].lstrip()) if len(lines) > 2 else None
    return json.dumps(wanted, indent=indent or None, ensure_ascii=False) + (
        "\n" if text.endswith("\n") else ""
    )


def _documents(text: str, loader: type[yaml.SafeLoader]) -> Iterator[tuple[yaml.Node, Any]]:
    """Yields the documents that are not empty, each as a node and as a value."""
    nodes, values = (list(make) for make in (yaml.compose_all(text, loader), yaml.load_all(text, loader)))
    for node, value in zip(nodes, values, strict=True):
        if value is not None:
            yield node, value


def _is_block(node: yaml.Node) -> bool:
    """Checks whether a node is a mapping or a list in block style."""
    return isinstance(node, yaml.CollectionNode) and not node.flow_style and bool(node.value)


def _identity(item: Any) -> str:
    """Returns a text that is equal for two versions of the same list entry."""
    if isinstance(item, Mapping) and (found := [name for name in ("name", "mountPath") if name in item]):
        return json.dumps([item[name] for name in found], default=str)
    return json.dumps(item, sort_keys=True, default=str)


def _same(one: Any, other: Any) -> bool:
    """Compares values as JSON does: true is not 1."""
    return json.dumps(one, sort_keys=True, default=str) == json.dumps(other, sort_keys=True, default=str)


class _Dumper(yaml.SafeDumper):
    """A dumper that quotes every string that another reader could take for another type. For example, kubectl reads 1e5
    as a number, and PyYAML reads it as a string."""

    def ignore_aliases(self, data: Any) -> bool:  # noqa: ARG002  equal parts are written out
        return True


def _string(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    style = "'" if _AMBIGUOUS.fullmatch(text) else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_AMBIGUOUS = re.compile(r"[-+.]?[0-9][-+.0-9a-fA-FxoXOeE_:]*|[yYnN]|[-+]?\.(inf|nan)", re.IGNORECASE)
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
