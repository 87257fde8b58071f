"""Which batches must be copied before they are sent, because user code still holds their memory."""

import numpy as np
import pytest
import torch
from torch.utils.data import default_collate

from dataloaderjob.fetch.aliasing import aliased

KEPT = torch.zeros(10)
HELD_DICT = {"x": torch.zeros(10)}
HELD_LIST = [torch.zeros(10)]
HELD_TUPLE = (torch.zeros(10),)
ARRAY = np.zeros(10)


def fresh_tensor():
    return torch.zeros(4)


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(fresh_tensor, id="one tensor"),
        pytest.param(
            lambda: default_collate([(torch.zeros(3), 1), (torch.ones(3), 2)]), id="default_collate"
        ),
        pytest.param(lambda: default_collate([{"a": np.zeros(3), "s": "x"}] * 2), id="dict of arrays"),
        pytest.param(lambda: ["a", {"k": [torch.zeros(2), None]}], id="nested"),
        pytest.param(lambda: [np.zeros(3)], id="array"),
        pytest.param(lambda: 17, id="a number"),
    ],
)
def test_a_fresh_batch_is_sent_as_it_lies(make):
    batch = make()
    assert not aliased(batch)


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda: KEPT, id="the tensor itself"),
        pytest.param(lambda: KEPT[2:4], id="a view as the batch"),
        pytest.param(lambda: [KEPT], id="in a list"),
        pytest.param(lambda: (1, {"x": KEPT[:3]}), id="a view, nested"),
        pytest.param(lambda: [ARRAY], id="an array"),
        pytest.param(lambda: [ARRAY[1:]], id="a view of an array"),
        pytest.param(lambda: [torch.from_numpy(ARRAY)], id="a tensor over an array"),
        pytest.param(lambda: HELD_DICT, id="a dict that is kept"),
        pytest.param(lambda: HELD_LIST, id="a list that is kept"),
        pytest.param(lambda: HELD_TUPLE, id="a tuple that is kept"),
        pytest.param(lambda: (1, HELD_DICT), id="a kept dict within a fresh tuple"),
        pytest.param(lambda: [object()], id="something we cannot look into"),
    ],
)
def test_a_batch_that_user_code_still_holds_is_copied(make):
    batch = make()
    assert aliased(batch)
