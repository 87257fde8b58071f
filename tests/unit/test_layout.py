"""The byte format of a batch, without torch."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataloaderjob.core import layout, values
from dataloaderjob.core.errors import RemoteProtocolError
from dataloaderjob.core.layout import NodeKind, node


def leaf(
    *shape: int, kind: NodeKind = NodeKind.TENSOR, strides: Any = None, itemsize: Any = 4
) -> tuple[Any, ...]:
    return node(kind, "float32", itemsize, shape, strides, 0)


def parse(schema: tuple[Any, ...]) -> layout.Layout:
    return layout.parse(layout.pack_schema(schema))


MADE = node(NodeKind.MADE, "instance", ("m", "C"), node(NodeKind.LIST, ()))
leaves = st.lists(st.integers(0, 5), max_size=3).map(lambda shape: leaf(*shape))
names = st.lists(st.text(min_size=1, max_size=3), max_size=4, unique=True)
schemas: st.SearchStrategy[tuple[Any, ...]] = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=4).map(lambda c: node(NodeKind.LIST, tuple(c)))
        | st.lists(inner, max_size=4).map(lambda c: node(NodeKind.NAMEDTUPLE, ("m", "C"), tuple(c)))
        | inner.map(lambda child: node(NodeKind.MADE, "list", ("m", "C"), child))
        | inner.map(lambda child: node(NodeKind.ATTRIBUTES, ("a",), (MADE, child)))
        | st.dictionaries(st.text(max_size=3), inner, max_size=4).map(
            lambda d: node(NodeKind.DICT, tuple(d), tuple(d.values()))
        )
    ),
    max_leaves=10,
)


@given(schemas)
def test_each_leaf_buffer_is_at_the_next_aligned_offset(schema: tuple[Any, ...]) -> None:
    head = layout.pack_schema(schema)
    parsed, end = layout.parse(head), len(head)
    for buffer in parsed.buffers:
        assert buffer.offset == layout.aligned(end)
        end = buffer.offset + buffer.nbytes
    assert parsed.values_offset == end


@given(schemas)
def test_leaf_buffers_are_aligned_and_do_not_overlap(schema: tuple[Any, ...]) -> None:
    head = layout.pack_schema(schema)
    parsed = layout.parse(head)
    assert all(b.offset % 64 == 0 for b in parsed.buffers)
    assert all(b.offset >= len(head) for b in parsed.buffers)
    for a, b in itertools.pairwise(parsed.buffers):
        assert a.offset + a.nbytes <= b.offset


@given(schemas, st.data())
def test_a_damaged_schema_parses_or_is_refused(schema: tuple[Any, ...], data: st.DataObject) -> None:
    head = bytearray(layout.pack_schema(schema))
    head[data.draw(st.integers(0, len(head) - 1))] = data.draw(st.integers(0, 255))
    try:
        parsed = layout.parse(bytes(head))
    except RemoteProtocolError:
        return
    assert parsed.values_offset >= len(head)


@pytest.mark.parametrize(
    ("schema", "why"),
    [
        pytest.param((), "malformed", id="empty-node"),
        pytest.param((99,), "malformed", id="unknown-kind"),
        pytest.param(node(NodeKind.LIST, [leaf(2)]), "expected a tuple", id="children-in-a-list"),
        pytest.param(node(NodeKind.LIST, (5,)), "a node must be a tuple, but is a int", id="child-no-node"),
        pytest.param(
            node(NodeKind.DICT, ("a",), ()),
            "0 children must have one key each, but 1 keys were found",
            id="more-keys-than-children",
        ),
        pytest.param(node(NodeKind.DICT, (bytearray(),), (leaf(),)), "key", id="unhashable-key"),
        pytest.param(node(NodeKind.MAPPING, ("m",), (), ()), "malformed", id="half-a-class"),
        pytest.param(node(NodeKind.MAPPING, None, (), ()), "malformed", id="no-class"),
        pytest.param(node(NodeKind.MAPPING, ("m", 5), (), ()), "does not name a class", id="class-no-string"),
        pytest.param(node(NodeKind.DATACLASS, ("m", "C"), ("__class__",), (leaf(),)), "field", id="dunder"),
        pytest.param(node(NodeKind.SAME, 0), "does not come before", id="same-as-nothing"),
        pytest.param(
            node(NodeKind.LIST, (node(NodeKind.SAME, 0), leaf(1))), "come before", id="same-as-what-follows"
        ),
        pytest.param(node(NodeKind.AGAIN, 0), "does not come before", id="again-of-nothing"),
        pytest.param(
            node(NodeKind.MADE, "list", None, node(NodeKind.AGAIN, 0)),
            "come before",
            id="again-within-itself",
        ),
        pytest.param(node(NodeKind.MADE, 5, None, leaf(1)), "not a way to create", id="way-no-string"),
        pytest.param(node(NodeKind.MADE, "list", ("m",), leaf(1)), "malformed", id="made-of-half-a-class"),
        pytest.param(node(NodeKind.MADE, "list", None), "malformed", id="made-of-nothing"),
        pytest.param(node(NodeKind.ATTRIBUTES, (), (MADE,)), "0 attributes", id="no-attributes"),
        pytest.param(
            node(NodeKind.ATTRIBUTES, ("a",), (MADE,)),
            "got 1 attributes and 1 children",
            id="attribute-of-no-value",
        ),
        pytest.param(
            node(NodeKind.ATTRIBUTES, ("__class__",), (MADE, leaf(1))),
            "an attribute has an invalid name",
            id="dunder-attribute",
        ),
        pytest.param(
            node(NodeKind.ATTRIBUTES, (5,), (MADE, leaf(1))),
            "an attribute has an invalid name",
            id="attribute-no-string",
        ),
        pytest.param(
            node(NodeKind.ATTRIBUTES, ("a",), (leaf(1), leaf(1))),
            "cannot have any",
            id="attribute-of-a-tensor",
        ),
        pytest.param(leaf(-1), "natural", id="negative-size"),
        pytest.param(leaf(2, itemsize=-4), "natural", id="negative-itemsize"),
        pytest.param(leaf(2, itemsize=True), "natural", id="bool-for-itemsize"),
        pytest.param(leaf(2, strides=(2,)), "gaps or overlap", id="gaps"),
        pytest.param(leaf(2, 2, strides=(0, 1)), "gaps or overlap", id="overlap"),
        pytest.param(leaf(2, strides=(-1,)), "gaps or overlap", id="negative-stride"),
        pytest.param(leaf(2, strides=(1, 1)), "gaps or overlap", id="more-strides-than-sizes"),
        pytest.param(node(NodeKind.VALUE, 1), "omits", id="value-left-out"),
        pytest.param(node(NodeKind.VALUE, -1), "natural", id="value-of-negative-index"),
        pytest.param(node(NodeKind.TENSOR, "float32", 4), "malformed", id="half-a-leaf"),
    ],
)
def test_malformed_schema_is_refused_with_the_reason(schema: Any, why: str) -> None:
    with pytest.raises(RemoteProtocolError, match=why):
        parse(schema)


def test_depth_is_bounded() -> None:
    schema = leaf(1)
    for _ in range(layout.MAX_DEPTH):
        schema = node(NodeKind.LIST, (schema,))
    assert len(parse(schema).buffers) == 1
    with pytest.raises(RemoteProtocolError, match="deeper"):
        parse(node(NodeKind.LIST, (schema,)))


@pytest.mark.parametrize(
    ("head", "why"),
    [
        pytest.param(b"", "at least 32 bytes", id="empty"),
        pytest.param(bytes(32), "a batch of version", id="zeros"),
        pytest.param(
            layout.HEADER.pack(0, 0, layout.MAGIC, 9, 0, 0, 0), "a batch of version", id="later-version"
        ),
        pytest.param(
            layout.HEADER.pack(0, 0, layout.MAGIC, layout.VERSION, 0, 1 << 31, 0), "exceeds", id="huge-schema"
        ),
        pytest.param(
            layout.HEADER.pack(0, 0, layout.MAGIC, layout.VERSION, 0, 50, 0), "ends after 32 of 82", id="cut"
        ),
    ],
)
def test_malformed_header_is_refused_with_the_reason(head: bytes, why: str) -> None:
    with pytest.raises(RemoteProtocolError, match=why):
        layout.parse(head)


def test_schema_that_does_not_match_its_digest_is_refused() -> None:
    key = bytearray(layout.pack_schema(node(NodeKind.LIST, ())))
    layout.parse(bytes(key))
    key[24] ^= 1
    with pytest.raises(RemoteProtocolError, match="digest"):
        layout.parse(bytes(key))


def test_the_schema_does_not_depend_on_values() -> None:
    schema = node(NodeKind.LIST, (leaf(2), node(NodeKind.VALUE, 0)))
    parsed = parse(schema)
    assert parsed.num_values == 1
    assert parsed.root.children[1].index == 0
    assert values.unpack(layout.pack_schema(schema)[layout.HEADER.size :]) == schema


@pytest.mark.parametrize(
    ("shape", "strides", "dense"),
    [
        pytest.param((2, 3), (3, 1), True, id="c-order"),
        pytest.param((2, 3), (1, 2), True, id="f-order"),
        pytest.param((2, 3, 4, 5), (60, 1, 15, 3), True, id="channels-last"),
        pytest.param((1, 3), (77, 1), True, id="any-stride-of-a-size-of-one"),
        pytest.param((), (), True, id="no-dimension"),
        pytest.param((2, 3), (4, 1), False, id="gap"),
        pytest.param((2, 3), (0, 1), False, id="expanded"),
    ],
)
def test_dense_means_one_block_of_memory(shape: Any, strides: Any, dense: bool) -> None:
    assert layout.is_dense(shape, strides) is dense
