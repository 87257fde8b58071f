"""Graphs of PyTorch Geometric in batches, without pickle."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch_geometric.data import Batch, Data, HeteroData, TemporalData
from trees import trip

from dataloaderjob.batches import graphs
from dataloaderjob.batches.encoding import encode
from dataloaderjob.core.errors import UnsupportedBatch


class Own(Data):
    """A user's kind of graph."""

    def __inc__(self, key: str, value: Any, *args: Any, **more: Any) -> Any:
        return 0 if key == "edge_index" else super().__inc__(key, value, *args, **more)


class OwnBatch(Batch):
    """A user's kind of batch."""


class Makes(Data):
    def __init__(self, x: Any = None) -> None:
        super().__init__(x=x)


def graph(number: int, cls: Any = Data) -> Any:
    nodes = 2 + number % 3
    edges = torch.randint(0, nodes, (2, 4), generator=torch.Generator().manual_seed(number))
    return cls(x=torch.full((nodes, 3), float(number)), edge_index=edges, y=number, name=f"g{number}")


def typed(number: int) -> HeteroData:
    made = HeteroData(split="train")
    made["user"].x = torch.full((2, 3), float(number))
    made["item"].x = torch.ones(4, 1)
    made["user", "buys", "item"].edge_index = torch.tensor([[0, 1], [3, number % 4]])
    return made


def content(found: Any) -> Any:
    """What is in a graph, comparable."""
    if torch.is_tensor(found):
        return found.dtype, found.tolist()
    if isinstance(found, dict):
        return {key: content(value) for key, value in found.items()}
    return found


@pytest.mark.parametrize(
    "made",
    [
        pytest.param(lambda: graph(1), id="graph"),
        pytest.param(lambda: graph(1, Own), id="users-class"),
        pytest.param(lambda: Data(num_nodes=7), id="nodes-without-attributes"),
        pytest.param(lambda: typed(3), id="typed"),
        pytest.param(lambda: Batch.from_data_list([graph(i) for i in range(5)]), id="batch"),
        pytest.param(lambda: Batch.from_data_list([graph(i, Own) for i in range(5)]), id="batch-of-users"),
        pytest.param(lambda: Batch.from_data_list([typed(i) for i in range(3)]), id="batch-of-typed"),
        pytest.param(lambda: Batch.from_data_list([graph(1)], follow_batch=["x"]), id="followed"),
    ],
)
def test_graph_round_trips(made: Any):
    sent = made()
    got = trip({"graph": sent})["graph"]
    assert type(got) is type(sent)
    assert content(got.to_dict()) == content(sent.to_dict())
    assert got.num_nodes == sent.num_nodes
    assert repr(got) == repr(sent)
    if isinstance(sent, Batch):
        assert got.num_graphs == sent.num_graphs
        for i in range(sent.num_graphs):
            assert content(got[i].to_dict()) == content(sent[i].to_dict())
    assert content(got.clone().to_dict()) == content(sent.to_dict())


def _with_private() -> Any:
    made = graph(1)
    made._store.__dict__["_secret"] = 1
    return made


@pytest.mark.parametrize(
    "made",
    [
        pytest.param(lambda: Makes(torch.zeros(1)), id="its-own-init"),
        pytest.param(lambda: Batch.from_data_list([Makes(torch.zeros(1))]), id="batch-of-those"),
        pytest.param(lambda: TemporalData(src=torch.zeros(1)), id="events"),
        pytest.param(_with_private, id="private-attribute"),
        pytest.param(lambda: OwnBatch.from_data_list([graph(1)]), id="users-batch"),
    ],
)
def test_graph_with_more_than_its_stores_is_refused_naming_the_option(made: Any):
    with pytest.raises(
        UnsupportedBatch, match=r"allow_pickle=True to the DataLoader, or to dataloaderjob.context\(\)"
    ):
        encode([made()], allow_pickle=False)


@pytest.mark.parametrize(
    "stores",
    [
        pytest.param([(None, {"x": 1}, {"_parent": 3})], id="a-parent"),
        pytest.param([(None, {"x": 1}, {"_mapping": {}})], id="a-mapping"),
        pytest.param([(None, {3: 1}, {})], id="a-number-for-a-name"),
        pytest.param([(3, {}, {})], id="a-number-for-a-key"),
        pytest.param([(("a", "b"), {}, {})], id="a-pair-for-a-key"),
    ],
)
def test_feeder_can_fill_only_the_stores_of_a_graph(stores: Any):
    with pytest.raises((TypeError, AttributeError)):
        graphs.CARRIER.make(HeteroData, (False, stores))


def test_users_setters_do_not_run_in_the_trainer():
    class Sets(Data):
        calls = 0

        @property
        def loud(self) -> Any:
            return None

        @loud.setter
        def loud(self, value: Any) -> None:
            Sets.calls += 1

    graphs.CARRIER.make(Sets, (False, [(None, {"loud": "x"}, {})]))
    assert Sets.calls == 0


@pytest.mark.parametrize("cls", [OwnBatch, Batch, Makes, TemporalData, object, int])
def test_unrelated_class_is_not_treated_as_a_graph(cls: type):
    assert not graphs.is_graph(cls)
