"""One batch from one ticket: torch's way, with seeds of ours."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, get_worker_info
from torch.utils.data._utils import worker
from torch.utils.data._utils.collate import default_collate_fn_map
from trees import digest

import dataloaderjob
from dataloaderjob.core.ticket_codec import Ticket, pack_ticket, unpack_ticket
from dataloaderjob.making.fetcher import (
    Fetcher,
    SampleError,
    preserved_generators,
    seed_batch,
    seed_sample,
    seed_worker,
    stack_in_private_memory,
)
from dataloaderjob.trainer.session.stream import Stream
from dataloaderjob.trainer.session.tickets import as_keys, submit


class Squares(Dataset[Any]):
    def __getitem__(self, i: int) -> Any:
        return {"x": torch.full((2,), float(i)), "n": i, "name": f"item {i}", "pair": (i, np.float32(i))}

    def __len__(self) -> int:
        return 10


class Noise(Dataset[Any]):
    def __getitem__(self, i: Any) -> Any:
        return random.random(), np.random.rand(), torch.rand(()).item()


class WithGetitems(Noise):
    def __getitems__(self, keys: list[Any]) -> list[Any]:
        return [(key, random.random()) for key in keys]


class NoGetitems(Squares):
    __getitems__ = None


class Failing(Squares):
    def __init__(self, error: Callable[[], BaseException]) -> None:
        self.error = error

    def __getitem__(self, i: int) -> Any:
        if i == 5:
            raise self.error()
        return super().__getitem__(i)


def ticket(*keys: Any, first: int = 0, seed: int = 1234, bare: bool = False) -> Ticket:
    return unpack_ticket(pack_ticket(seed, first, keys, bare=bare))


def as_list(batch: list[Any]) -> list[Any]:
    return batch


@pytest.mark.parametrize("dataset", [Squares(), NoGetitems()], ids=["plain", "getitems-is-None"])
def test_a_batch_equals_torch_s(dataset: Any) -> None:
    (expected,) = DataLoader(dataset, batch_sampler=[[3, 1, 2]])
    assert digest(Fetcher(dataset, None).fetch(0, ticket(3, 1, 2))) == digest(expected)


def test_a_bare_key_equals_torch_s() -> None:
    expected = list(DataLoader(Squares(), batch_size=None, sampler=[4, 2]))
    found = [Fetcher(Squares(), None).fetch(k, ticket(i, first=k, bare=True)) for k, i in enumerate([4, 2])]
    assert digest(found) == digest(expected)


def test_a_bare_key_may_be_a_list() -> None:
    class Whole(Dataset[Any]):
        def __getitem__(self, keys: list[int]) -> Any:
            return torch.tensor(keys)

    assert Fetcher(Whole(), None).fetch(0, ticket([3, 4], bare=True)).tolist() == [3, 4]


def test_getitems_gets_the_keys_as_torch_gives_them() -> None:
    found = Fetcher(WithGetitems(), as_list).fetch(0, ticket("a", 2))
    assert [key for key, _ in found] == ["a", 2]


def test_a_sample_s_draws_depend_on_seed_position_and_key_only() -> None:
    fetcher = Fetcher(Noise(), as_list)
    whole = fetcher.fetch(0, ticket(5, 6, 7, 8))
    assert fetcher.fetch(3, ticket(7, 8, first=2)) == whole[2:]
    assert fetcher.fetch(0, ticket(5, 6, 7, 8, seed=99)) != whole


def test_two_draws_of_one_key_differ() -> None:
    a, b = Fetcher(Noise(), as_list).fetch(0, ticket(5, 5))
    assert all(x != y for x, y in zip(a, b, strict=True))


def test_the_three_generators_give_different_streams() -> None:
    seed_sample(1, 2, 3)
    draws = np.random.randint(0, 2**32, 10, dtype=np.uint64).tolist()
    assert draws != [random.getrandbits(32) for _ in range(10)]
    assert [draw % 2**16 for draw in draws] != torch.randint(0, 2**16, (10,)).tolist()
    np.random.seed(7)
    torch.manual_seed(7)
    same = [int(draw) % 2**16 for draw in np.random.randint(0, 2**32, 10, dtype=np.uint64)]
    assert same == torch.randint(0, 2**16, (10,)).tolist(), "equal seeds show"


def test_collate_and_getitems_are_seeded_by_the_ticket() -> None:
    def shake(batch: list[Any]) -> Any:
        return random.random(), np.random.rand(), torch.rand(()).item()

    fetcher = Fetcher(Squares(), shake)
    assert fetcher.fetch(7, ticket(1, 2)) == fetcher.fetch(7, ticket(3))
    assert fetcher.fetch(7, ticket(1)) != fetcher.fetch(8, ticket(1))
    grouped = Fetcher(WithGetitems(), as_list)
    assert grouped.fetch(7, ticket(1, 2)) == grouped.fetch(7, ticket(1, 2, first=50))


def test_leftovers_of_the_last_draw_do_not_leak_into_the_next_sample() -> None:
    """Generators of normal numbers make two at a time and keep one."""

    class Normal(Dataset[Any]):
        def __getitem__(self, i: int) -> Any:
            return random.gauss(0, 1), np.random.randn(), torch.randn(1).item()

    fetcher = Fetcher(Normal(), as_list)
    assert fetcher.fetch(0, ticket(1, 2, 3))[2] == fetcher.fetch(0, ticket(3, first=2))[0]


def test_on_sample_receives_each_number_before_its_sample_is_made() -> None:
    events: list[Any] = []

    class Telling(Dataset[Any]):
        def __getitem__(self, i: int) -> Any:
            events.append(("made", i))
            return i

    Fetcher(Telling(), None).fetch(0, ticket(8, 9), events.append)
    assert events == [0, ("made", 8), 1, ("made", 9)]


def test_a_failing_sample_is_located() -> None:
    with pytest.raises(SampleError) as caught:
        Fetcher(Failing(lambda: ValueError("bad")), None).fetch(0, ticket(1, 5, 2))
    error = caught.value
    assert (error.phase, error.position, error.key) == ("__getitem__", 1, 5)
    assert isinstance(error.cause, ValueError)


def test_a_failing_collate_fn_is_located() -> None:
    with pytest.raises(SampleError) as caught:
        Fetcher(Squares(), lambda batch: 1 / 0).fetch(0, ticket(1))
    assert (caught.value.phase, caught.value.position) == ("collate_fn", None)


def test_ragged_shapes_fail_in_collate_with_torch_s_own_error() -> None:
    class Ragged(Dataset[Any]):
        def __getitem__(self, i: int) -> Any:
            return torch.zeros(i)

    with pytest.raises(SampleError) as caught:
        Fetcher(Ragged(), None).fetch(0, ticket(1, 2))
    assert "stack expects each tensor to be equal size" in str(caught.value.cause)


def test_sys_exit_in_user_code_is_a_failure_and_ctrl_c_is_not() -> None:
    with pytest.raises(SampleError):
        Fetcher(Failing(lambda: SystemExit(3)), None).fetch(0, ticket(5))
    with pytest.raises(KeyboardInterrupt):
        Fetcher(Failing(KeyboardInterrupt), None).fetch(0, ticket(5))


@pytest.mark.parametrize("kind", [StopIteration, StopAsyncIteration])
def test_stop_iteration_in_user_code_is_an_error_that_names_it(kind: Any) -> None:
    """Under torch's loader it ends the loop, as if the epoch were over, and nobody learns that batches are missing."""
    with pytest.raises(SampleError) as caught:
        Fetcher(Failing(lambda: kind("none left")), None).fetch(0, ticket(5))
    cause = caught.value.cause
    assert (type(cause), str(cause)) == (RuntimeError, f"__getitem__ raised {kind.__name__}: none left")
    assert type(cause.__cause__) is kind
    if kind is StopIteration:
        assert list(DataLoader(Failing(kind), sampler=[5])) == [], "torch's"
    loader = dataloaderjob.DataLoader(Failing(kind), sampler=[5, 0], num_workers=0)
    with pytest.raises(RuntimeError, match=f"__getitem__ raised {kind.__name__}$"):
        next(iter(loader))


def test_stop_iteration_of_a_key_does_not_end_the_epoch() -> None:
    class Key:
        def __iter__(self) -> Any:
            raise StopIteration

    keys: Any = [[0], Key(), [1]]
    iterator = iter(dataloaderjob.DataLoader(range(3), batch_sampler=keys, num_workers=0))
    assert next(iterator).tolist() == [0]
    with pytest.raises(RuntimeError, match="the epoch is not over"):
        next(iterator)


def test_torch_s_initial_seed_fits_an_int64() -> None:
    with preserved_generators():
        for i in range(20):
            seed_sample(i, i, i)
            assert torch.tensor(torch.initial_seed()).dtype is torch.int64


def test_a_worker_is_seeded_as_torch_s_is() -> None:
    class Draws(Dataset[Any]):
        def __getitem__(self, i: int) -> Any:
            return random.random(), np.random.rand(), torch.rand(1).item(), torch.initial_seed()

    loader = DataLoader(Draws(), batch_size=None, sampler=[0, 1], num_workers=2)
    loader.generator = torch.Generator().manual_seed(3)
    base_seed = int(
        torch.empty((), dtype=torch.int64).random_(generator=torch.Generator().manual_seed(3)).item()
    )
    for number, found in enumerate(loader):
        with preserved_generators():
            seed_worker(base_seed, number)
            assert Draws()[0] == tuple(found)


def test_callers_generators_are_left_unchanged() -> None:
    def draws() -> list[float]:
        return [random.gauss(0, 1), np.random.randn(), torch.randn(1).item(), random.random()]

    random.seed(1)
    seed_batch(1, 1)
    draws()  # leaves half a pair of normal numbers in each generator
    expected_state = random.getstate(), np.random.get_state(), torch.get_rng_state()
    threads = torch.get_num_threads()
    with pytest.raises(ZeroDivisionError), preserved_generators():
        assert torch.get_num_threads() == 1
        seed_sample(5, 5, 5)
        draws()
        raise ZeroDivisionError
    assert random.getstate() == expected_state[0]
    assert str(np.random.get_state()) == str(expected_state[1])
    assert torch.equal(torch.get_rng_state(), expected_state[2])
    assert torch.get_num_threads() == threads


@pytest.fixture
def as_worker() -> Iterator[None]:
    """`get_worker_info()` answers, as it does in a feeder."""
    before = default_collate_fn_map[torch.Tensor]
    worker._worker_info = worker.WorkerInfo(id=0, num_workers=1, seed=0, dataset=None)
    yield
    worker._worker_info = None
    default_collate_fn_map[torch.Tensor] = before
    stack_in_private_memory.cache_clear()


def test_feeder_collates_without_shared_memory_like_the_process_itself(as_worker: None) -> None:
    class Mixed(Dataset[Any]):
        def __getitem__(self, i: int) -> Any:
            info = get_worker_info()
            assert info is not None
            return torch.ones(2, dtype=[torch.float32, torch.float64][i]), np.ones(2), info.num_workers

    tensors, arrays, workers = Fetcher(Mixed(), None).fetch(0, ticket(0, 1))
    assert tensors.dtype is torch.float64
    assert not tensors.is_shared()
    assert not arrays.is_shared()
    assert workers.tolist() == [1, 1]
    assert get_worker_info() is not None


def test_numpy_integer_keys_travel_as_one_array_and_keep_their_type() -> None:
    stream, keys = Stream(1, "{}", 4), list(np.arange(256))
    submit(stream, 7, 0, 0, as_keys(keys, bare=False), bare=False)
    packed = stream.pending[0]
    assert isinstance(packed, bytes)
    assert len(packed) < 3000
    found = unpack_ticket(packed).keys
    assert found == keys
    assert set(map(type, found)) == {np.int64}
