"""Graphs of PyTorch Geometric: `Data`, `HeteroData`, their batches, and subclasses without their own `__init__`.

A graph is sent as the contents of its stores, which hold tensors and plain values (PyG 2.8). The trainer fills a graph
without calling setters, so no code chosen by a feeder runs. PyG creates the class of a batch at run time, so the class
of the batch's graphs is sent by name instead. This module looks up PyG in `sys.modules` and never imports it.
"""

from __future__ import annotations

import sys
from typing import Any

from dataloaderjob.batches import allowed
from dataloaderjob.batches.special import Carrier, StaysError, exactly

_PRIVATE = frozenset({"_num_graphs", "_slice_dict", "_inc_dict", "_num_nodes"})
"""Attributes that PyG keeps outside a store's mapping. Batches have them, and so do graphs whose nodes have no
attributes."""
_KEPT_BY_PYG = frozenset({"_mapping", "_parent", "_cached_attr", "_key"})
_OF_GRAPHS = frozenset(
    {"_store", "_global_store", "_node_store_dict", "_edge_store_dict", "_tensor_attr_cls", "_edge_attr_cls"}
)
"""Names in the `__dict__` of every graph."""
_DEFINED = (
    "__init__",
    "__new__",
    "__getstate__",
    "__setstate__",
    "__reduce__",
    "__reduce_ex__",
    "__setattr__",
)


def is_graph(cls: type) -> bool:
    """Returns True if objects of this class are sent as graphs. Returns False if PyG has not been imported, because no
    graph can exist yet."""
    return _base(cls) is not None


def graph_class(cls: type) -> type:
    """Returns the class to send by name. For a batch, this is the class of its graphs."""
    pyg = sys.modules.get("torch_geometric.data")
    if pyg is not None and pyg.Batch in allowed.mro(cls):
        graphs = [base for base in cls.__bases__ if pyg.Batch not in allowed.mro(base)]
        return graphs[0] if cls.__bases__ == (pyg.Batch, *graphs) and len(graphs) == 1 else cls
    return cls


def _base(cls: type) -> Any:
    """Returns the base `Data` or `HeteroData` of a class whose objects consist only of stores. Returns None for other
    classes."""
    pyg = sys.modules.get("torch_geometric.data")
    if pyg is None:
        return None
    named = graph_class(cls)
    bases = allowed.mro(named)
    if pyg.Batch in bases:  # a user's own kind of batch
        return None
    for base in (pyg.Data, pyg.HeteroData):
        if base in bases and allowed.is_allowed(named, base):
            same = all(getattr(named, name, None) is getattr(base, name, None) for name in _DEFINED)
            own = {name for kind in named.__mro__[: named.__mro__.index(base)] for name in vars(kind)}
            return base if same and not own & {"__del__", "__init_subclass__"} else None
    return None


def _stores(graph: Any) -> list[tuple[Any, Any]]:
    """Returns the stores of a graph with their keys: None, a node type, or an edge type."""
    own = graph.__dict__
    if "_store" in own:
        return [(None, own["_store"])]
    return [
        (None, own["_global_store"]),
        *own["_node_store_dict"].items(),
        *own["_edge_store_dict"].items(),
    ]


def _take(graph: Any) -> tuple[bool, list[tuple[Any, dict[str, Any], dict[str, Any]]]]:
    if more := sorted(graph.__dict__.keys() - _OF_GRAPHS):
        raise StaysError(f" with an attribute {more[0]!r}")
    content = []
    for key, store in _stores(graph):
        beside = {name: value for name, value in store.__dict__.items() if name not in _KEPT_BY_PYG}
        if more := sorted(beside.keys() - _PRIVATE):
            raise StaysError(f" with an attribute {more[0]!r}")
        content.append((key, dict(store._mapping), beside))  # noqa: SLF001  its setters may be the user's
    return graph_class(type(graph)) is not type(graph), content


def _make(cls: Any, content: Any) -> Any:
    pyg: Any = sys.modules["torch_geometric.data"]
    is_batch, stores = exactly(content, bool, list)
    made = pyg.Batch(_base_cls=cls) if is_batch else cls()
    for part in stores:
        key, mapping, beside = part
        exactly((mapping, beside), dict, dict)
        if not beside.keys() <= _PRIVATE or not all(map(_is_name, mapping)):
            raise TypeError(f"a graph's store cannot have {sorted(map(str, (*beside, *mapping)))}")
        store = _store_of(made, key)
        store._mapping.update(mapping)  # noqa: SLF001
        store.__dict__.update(beside)
    return made


def _is_name(name: Any) -> bool:
    """Returns True for a str that is not a dunder name. numpy would read memory at the address in an attribute such as
    `__array_interface__`."""
    return type(name) is str and not (name.startswith("__") and name.endswith("__"))


def _store_of(graph: Any, key: Any) -> Any:
    """Returns the store with this key, and creates the store if it does not exist."""
    if key is None:
        return _stores(graph)[0][1]
    if type(key) is str:
        return graph.get_node_store(key)
    if type(key) is tuple and len(key) == 3 and all(type(part) is str for part in key):
        return graph.get_edge_store(*key)
    raise TypeError(f"a graph cannot have a store with the key {key!r}")


CARRIER = Carrier(take=_take, make=_make, fits=is_graph, named=graph_class, shared=True)
